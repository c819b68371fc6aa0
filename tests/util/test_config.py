"""Strict configs: what is dumped loads again, and every mistake is one line that says field, value and bound."""

import copy
import json
import math

import pytest

import perspectron
from perspectron import presets
from perspectron.cli import catalogue
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.experts.router import RoutedConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import mixers
from perspectron.util.config import dump, load
from perspectron.util.errors import ConfigError


def fails(message: str, call, *args, **kwargs) -> None:
    """`call` raises a ConfigError of one line, and that line is `message`."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    assert str(caught.value) == message
    assert "\n" not in message


def plain() -> dict:
    """A model of one block as JSON gives it."""
    return {
        "name": "small",
        "vocab_size": 10,
        "d_model": 16,
        "blocks": [
            {
                "mixer": {"kind": "pdr", "rank": 4},
                "ffn": {"kind": "routed", "hidden": 8, "torus": [2, 3]},
            }
        ],
    }


def changed(path: list, value) -> dict:
    """`plain()` with the value at a path replaced."""
    config = place = copy.deepcopy(plain())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_survives_a_round_trip_through_json(name):
    config = presets.get(name)
    text = json.dumps(dump(config), allow_nan=False)
    loaded = load(ModelConfig, json.loads(text))
    assert loaded == config
    assert hash(loaded) == hash(config)
    assert type(loaded.blocks[0].mixer) is type(config.blocks[0].mixer)
    assert json.dumps(dump(loaded)) == text


@pytest.mark.parametrize("name", mixers())
def test_every_mixer_config_survives_a_round_trip(name):
    block = BlockConfig(mixers()[name].small, SwiGLUConfig(8))
    written = json.loads(json.dumps(dump(block)))
    assert written["mixer"]["kind"] == name and written["ffn"]["kind"] == "swiglu"
    assert load(BlockConfig, written) == block


def test_presets_differ_where_their_names_say_so():
    configs = {name: presets.get(name) for name in presets.names()}
    assert len({json.dumps(dump(config)) for config in configs.values()}) == len(configs)
    assert all(config.name == name for name, config in configs.items())


def test_defaults_are_filled_in_and_numbers_become_what_the_field_holds():
    config = load(ModelConfig, plain() | {"norm_eps": 1})
    assert type(config.norm_eps) is float
    expected = (BlockConfig(PDRConfig(4), RoutedConfig(8, (2, 3))),)
    assert config == ModelConfig("small", 10, 16, expected, norm_eps=1.0)
    assert load(ModelConfig, plain()).norm_eps == 1e-6
    assert load(ModelConfig, changed(["blocks", 0, "mixer", "scale"], None)).blocks[0].mixer.scale is None


# ---------------------------------------------------------------- mistakes in a file

MIXER, FFN = ["blocks", 0, "mixer"], ["blocks", 0, "ffn"]
FFN_KINDS = "routed, swiglu, mlp, context_mlp, tied"
MISTAKES = [
    (
        ["d_modle"],
        4,
        "config: key = 'd_modle', must be one of name, vocab_size, d_model, blocks, head, embedding_std, "
        "embedding_norm, embedding_factor, logits_factor, logits_cap, positions, norm, norm_eps, dropout, shift, "
        "first_values, longest",
    ),
    (["d_model"], 16.0, "config.d_model = 16.0, must be of type int"),
    (["d_model"], "16", "config.d_model = '16', must be of type int"),
    (["d_model"], True, "config.d_model = True, must be of type int"),
    (["d_model"], [16], "config.d_model = [16], must be of type int"),
    (["d_model"], None, "config.d_model = None, must be of type int"),
    (["d_model"], 0, "d_model = 0, must be ≥ 1"),
    (["vocab_size"], -1, "vocab_size = -1, must be ≥ 1"),
    (["name"], 3, "config.name = 3, must be of type str"),
    (["norm_eps"], math.nan, "config.norm_eps = nan, must be finite"),
    (["norm_eps"], math.inf, "config.norm_eps = inf, must be finite"),
    (["norm_eps"], False, "config.norm_eps = False, must be of type float"),
    (["norm_eps"], 0, "norm_eps = 0.0, must be > 0"),
    (["blocks"], [], "blocks = 0, must be at least one block"),
    (["blocks"], {}, "config.blocks = {}, must be a list"),
    (["blocks"], "pdr", "config.blocks = 'pdr', must be a list"),
    (["blocks", 0], "pdr", "config.blocks[0] = 'pdr', must be an object"),
    (MIXER, "pdr", "config.blocks[0].mixer = 'pdr', must be an object with a \"kind\""),
    (MIXER, {"kind": "pdr"}, "config.blocks[0].mixer.rank = 'nothing', must be given"),
    ([*MIXER, "rank"], 0, "rank = 0, must be ≥ 1"),
    ([*MIXER, "rank"], "a\nb", "config.blocks[0].mixer.rank = 'a\\nb', must be of type int"),
    ([*MIXER, "scale"], -1.0, "scale = -1.0, must be > 0"),
    ([*MIXER, "scale"], math.nan, "config.blocks[0].mixer.scale = nan, must be finite"),
    ([*MIXER, "out_norm"], 1, "config.blocks[0].mixer.out_norm = 1, must be of type bool"),
    ([*MIXER, "renorm_every"], -1, "renorm_every = -1, must be ≥ 0"),
    (
        [*MIXER, "window"],
        4,
        "config.blocks[0].mixer: key = 'window', must be one of rank, scale, out_norm, renorm_every, gate_rank, "
        "fixed_decay",
    ),
    (FFN, {"kind": "swiglu", "hidden": 0}, "hidden = 0, must be ≥ 1"),
    (FFN, {"kind": "moe"}, "config.blocks[0].ffn.kind = 'moe', must be one of " + FFN_KINDS),
    (FFN, {"hidden": 4}, "config.blocks[0].ffn.kind = None, must be one of " + FFN_KINDS),
    ([*FFN, "torus"], [2, 2.5], "config.blocks[0].ffn.torus[1] = 2.5, must be of type int"),
    ([*FFN, "torus"], [2, 0], "torus = (2, 0), must be one or more lengths ≥ 1"),
    ([*FFN, "torus"], [], "torus = (), must be one or more lengths ≥ 1"),
    ([*FFN, "torus"], 4, "config.blocks[0].ffn.torus = 4, must be a list"),
]


@pytest.mark.parametrize(("path", "value", "message"), MISTAKES, ids=[message for *_, message in MISTAKES])
def test_a_mistake_is_named(path, value, message):
    load(ModelConfig, plain())
    fails(message, load, ModelConfig, changed(path, value))


@pytest.mark.parametrize("key", ["name", "vocab_size", "d_model", "blocks"])
def test_a_missing_key_is_named(key):
    config = {name: value for name, value in plain().items() if name != key}
    fails(f"config.{key} = 'nothing', must be given", load, ModelConfig, config)


@pytest.mark.parametrize("value", [None, [], "model", 3, math.nan])
def test_what_is_no_object_is_named(value):
    fails(f"config = {value!r}, must be an object", load, ModelConfig, value)


@pytest.mark.parametrize("kind", ["mamba", None, 3, ["pdr"]])
def test_an_unknown_mixer_is_named_with_those_there_are(kind):
    with pytest.raises(ConfigError) as caught:
        load(ModelConfig, changed([*MIXER, "kind"], kind))
    message = str(caught.value)
    assert message.startswith(f"config.blocks[0].mixer.kind = {kind!r}, must be one of ")
    assert set(mixers()) <= set(message.rpartition("one of ")[2].split(", "))


def test_configs_are_checked_without_a_file_too():
    fails("kv_heads = 3, must be a divisor of heads = 4", mixers()["window_gqa"].small.__class__, 4, 3, 8)
    fails("window = 0, must be ≥ 1", mixers()["window_gqa"].small.__class__, 4, 2, 0)
    fails("heads = 0, must be ≥ 1", mixers()["attention"].small.__class__, 0)
    fails("rope_base = nan, must be > 1", mixers()["attention"].small.__class__, 2, math.nan)
    fails("hidden = 0, must be ≥ 1", SwiGLUConfig, 0)


# ---------------------------------------------------------------- presets


def test_overrides_arrive():
    config = presets.get("perspective-tiny", layers=8, rank=8, heads=6, kv_heads=3, window=5, hidden=9, d_model=24,
                         vocab_size=7, out_norm=True, renorm_every=11)  # fmt: skip
    assert (config.vocab_size, config.d_model, len(config.blocks)) == (7, 24, 8)
    assert config.blocks[0] == config.blocks[6]
    assert config.blocks[0].mixer == PDRConfig(8, out_norm=True, renorm_every=11)
    slow = config.blocks[3].mixer
    assert (slow.kind, slow.heads, slow.kv_heads, slow.window) == ("window_gqa", 6, 3, 5)
    assert config.blocks[7].ffn == SwiGLUConfig(9)
    routed = presets.get("perspective-tiny", torus=[3, 2], experts=6, gate="soft", bias_rate=0.0, nearest=3)
    assert routed.blocks[0].ffn == RoutedConfig(472, (3, 2), 6, gate="soft", bias_rate=0.0, nearest=3)
    assert presets.get("perspective-tiny", ffn="dense").blocks == presets.get("perspective-tiny-dense").blocks
    assert presets.get("perspective-tiny") == presets.get("perspective-tiny"), "no override stays behind"


KEYS = ", ".join(presets.sizes("perspective-tiny"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"rank": 0}, "rank = 0, must be ≥ 1"),
        ({"window": 0}, "window = 0, must be ≥ 1"),
        ({"layers": 0}, "layers = 0, must be ≥ 1"),
        ({"hidden": -3}, "hidden = -3, must be ≥ 1"),
        ({"d_model": 0}, "d_model = 0, must be ≥ 1"),
        ({"renorm_every": -1}, "renorm_every = -1, must be ≥ 0"),
        ({"kv_heads": 3}, "kv_heads = 3, must be a divisor of heads = 4"),
        ({"kv_heads": 0}, "kv_heads = 0, must be a divisor of heads = 4"),
        ({"heads": 5}, "kv_heads = 2, must be a divisor of heads = 5"),
        ({"heads": 4.0}, "heads = 4.0, must be of type int"),
        ({"layers": True}, "layers = True, must be of type int"),
        ({"rank": "8"}, "rank = '8', must be of type int"),
        ({"rank": [8]}, "rank = [8], must be of type int"),
        ({"rank": None}, "rank = None, must be of type int"),
        ({"out_norm": 1}, "out_norm = 1, must be of type bool"),
        ({"ffn": "moe"}, "ffn = 'moe', must be one of dense, routed, seed"),
        ({"experts": 9}, "experts = 9, must be the 8 that fill a torus of (4, 2)"),
        ({"gate": "hard"}, "gate = 'hard', must be one of none, straight_through, soft"),
        ({"router": "hash"}, "router = 'hash', must be one of torus, switch"),
        ({"nearest": 0}, "nearest = 0, must be ≥ 1"),
        ({"temperature": 0}, "temperature = 0.0, must be > 0"),
        ({"balance": -1}, "balance = -1.0, must be ≥ 0"),
        ({"bias_rate": -0.1}, "bias_rate = -0.1, must be ≥ 0"),
        ({"torus": 8}, "torus = 8, must be a list"),
        ({"torus": []}, "torus = (), must be one or more lengths ≥ 1"),
        ({"torus": [2, 0]}, "torus = (2, 0), must be one or more lengths ≥ 1"),
        ({"dim": 3}, f"perspective-tiny: key = 'dim', must be one of {KEYS}"),
    ],
    ids=str,
)
def test_a_bad_override_is_named(override, message):
    fails(message, presets.get, "perspective-tiny", **override)


@pytest.mark.parametrize("torus", [["8"], [2.5], [True, 2], [math.nan], [[2]]], ids=str)
def test_a_torus_of_anything_but_whole_numbers_is_named(torus):
    with pytest.raises(ConfigError, match=r"^torus") as caught:
        presets.get("perspective-tiny", ffn="routed", torus=torus)
    assert "int" in str(caught.value)


def test_an_unknown_preset_is_named_with_those_there_are():
    known = ", ".join([*presets.names(), *presets.DESIGNS])
    with pytest.raises(ConfigError, match="preset = 'gpt-5',") as caught:
        presets.get("gpt-5")
    begins, _, ends = str(caught.value).partition("one of ")[2].partition(" … ")
    assert known.startswith(begins) and known.endswith(ends) and len(begins) > 300


@pytest.mark.parametrize(
    ("preset", "override", "message"),
    [
        ("adr-tiny", {"halflife": [4.0]}, "halflife = [4.0], must be two numbers of tokens > 0"),
        ("adr-tiny", {"halflife": [0.0, 4.0]}, "halflife = [0.0, 4.0], must be two numbers of tokens > 0"),
        ("adr-tiny", {"halflife": ["4", 8.0]}, "halflife[0] = '4', must be of type float"),
        ("adr-tiny", {"norm": "both"}, "norm = 'both', must be one of post, pre"),
        ("adr-tiny", {"emit": "both"}, "emit = 'both', must be one of state, raw"),
        (
            "lens-tiny",
            {"context": False, "context_rank": 4},
            "context_rank = 4, must be left out where context is off",
        ),
        ("lens-tiny", {"route": False, "anneal": 0.1}, "anneal = 0.1, must be left out where route is off"),
        ("lens-tiny", {"context_rank": 400}, None),
        ("drm-104k", {"rank": -1}, "rank = -1, must be ≥ 0"),
        ("drm-104k", {"gate_top_k": 9}, "gate_top_k = 9, must be ≤ directions = 8"),
        ("drm-104k", {"gate_renorm": True}, "gate_renorm = True, must be false where gate_top_k = 0"),
        ("drm-104k", {"action": -1.0}, "action = -1.0, must be ≥ 0"),
        ("gla-tiny", {"gate_rank": 0}, "gate_rank = 0, must be ≥ 1"),
        ("ssd-tiny", {"state": 0}, "state = 0, must be ≥ 1"),
    ],
    ids=str,
)
def test_a_bad_size_of_another_design_is_named(preset, override, message):
    if message is None:
        fails(
            "context_rank = 400, must be ≤ d_model = 128", perspectron.build, presets.get(preset, **override)
        )
    else:
        fails(message, presets.get, preset, **override)


def test_whole_numbers_do_for_fractions():
    assert presets.get("drm-104k", dt=4) == presets.get("drm-104k", dt=4.0)
    assert presets.get("adr-tiny", halflife=[4, 8]) == presets.get("adr-tiny", halflife=[4.0, 8.0])


def test_every_part_of_the_drm_can_be_set_by_name():
    config = presets.get(
        "drm-104k", gate_top_k=3, gate_renorm=True, risk=True, damping=0.1, action=0.5, stability=0.2
    )
    mixer = config.blocks[0].mixer
    assert (mixer.gate_top_k, mixer.gate_renorm, mixer.damping, mixer.losses.action) == (3, True, 0.1, 0.5)
    assert mixer.risk is not None and config.head.stability == 0.2


@pytest.mark.parametrize("scale", ["tiny", "20m", "125m"])
def test_opponents_are_as_large_as_perspective(scale):
    size = {preset["name"]: preset["parameters"] for preset in catalogue.read()["presets"]}
    alike = [name for name in size if name.endswith(f"-{scale}") and name != f"perspective-{scale}"]
    assert len(alike) >= 4
    for name in alike:
        assert abs(size[name] / size[f"perspective-{scale}-dense"] - 1) < 0.02, name


@pytest.mark.parametrize("field", ["vocab_size", "d_model", "positions"])
def test_sizes_that_cannot_be_meant_are_refused(field):
    values = dump(presets.get("perspective-tiny")) | {field: 1 << 40}
    with pytest.raises(ConfigError, match=rf"{field} = 1099511627776, must be ≤ 16,777,216"):
        load(ModelConfig, values)


def test_a_size_deep_in_a_block_is_refused_by_its_name():
    values = dump(presets.get("perspective-tiny"))
    values["blocks"][1]["ffn"] = {"kind": "swiglu", "hidden": 1 << 30}
    with pytest.raises(ConfigError, match=r"blocks\[1\].ffn.hidden = 1073741824"):
        load(ModelConfig, values)
    values = dump(presets.get("perspective-tiny"))
    with pytest.raises(ConfigError, match="blocks = 1025,"):
        load(ModelConfig, values | {"blocks": [values["blocks"][0]] * 1025})
