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
from tests.refusals import refused


def fails(named: list[object], call, *args, **kwargs) -> None:
    """`call` raises a ConfigError of one line, which names these."""
    with refused(ConfigError, *named):
        call(*args, **kwargs)


def plain() -> dict:
    """A model of one block as JSON gives it."""
    return {
        "name": "small",
        "vocab_size": 10,
        "d_model": 16,
        "blocks": [
            {"mixer": {"kind": "pdr", "rank": 4}, "ffn": {"kind": "routed", "hidden": 8, "torus": [2, 3]}}
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
MISTAKES = [
    (["d_modle"], 4, ["config", "d_modle"]),
    (["d_model"], 16.0, ["config.d_model", 16.0]),
    (["d_model"], "16", ["config.d_model", "'16'"]),
    (["d_model"], True, ["config.d_model", True]),
    (["d_model"], [16], ["config.d_model"]),
    (["d_model"], None, ["config.d_model", None]),
    (["d_model"], 0, ["d_model", 0]),
    (["vocab_size"], -1, ["vocab_size", -1]),
    (["name"], 3, ["config.name", 3]),
    (["norm_eps"], math.nan, ["config.norm_eps", math.nan]),
    (["norm_eps"], math.inf, ["config.norm_eps", math.inf]),
    (["norm_eps"], False, ["config.norm_eps", False]),
    (["norm_eps"], 0, ["norm_eps", 0.0]),
    (["blocks"], [], ["blocks", 0]),
    (["blocks"], {}, ["config.blocks", "{}"]),
    (["blocks"], "pdr", ["config.blocks", "pdr"]),
    (["blocks", 0], "pdr", ["config.blocks[0]", "pdr"]),
    (MIXER, "pdr", ["config.blocks[0].mixer", "pdr"]),
    (MIXER, {"kind": "pdr"}, ["config.blocks[0].mixer.rank"]),
    ([*MIXER, "rank"], 0, ["rank", 0]),
    ([*MIXER, "rank"], "a\nb", ["config.blocks[0].mixer.rank", r"a\nb"]),
    ([*MIXER, "scale"], -1.0, ["scale", -1.0]),
    ([*MIXER, "scale"], math.nan, ["config.blocks[0].mixer.scale", math.nan]),
    ([*MIXER, "out_norm"], 1, ["config.blocks[0].mixer.out_norm", 1]),
    ([*MIXER, "renorm_every"], -1, ["renorm_every", -1]),
    ([*MIXER, "window"], 4, ["config.blocks[0].mixer", "window"]),
    (FFN, {"kind": "swiglu", "hidden": 0}, ["hidden", 0]),
    (FFN, {"kind": "moe"}, ["config.blocks[0].ffn.kind", "moe"]),
    (FFN, {"hidden": 4}, ["config.blocks[0].ffn.kind", None]),
    ([*FFN, "torus"], [2, 2.5], ["config.blocks[0].ffn.torus[1]", 2.5]),
    ([*FFN, "torus"], [2, 0], ["torus"]),
    ([*FFN, "torus"], [], ["torus", "()"]),
    ([*FFN, "torus"], 4, ["config.blocks[0].ffn.torus", 4]),
]


@pytest.mark.parametrize(("path", "value", "named"), MISTAKES, ids=str)
def test_a_mistake_is_named(path, value, named):
    load(ModelConfig, plain())
    fails(named, load, ModelConfig, changed(path, value))


@pytest.mark.parametrize("key", ["name", "vocab_size", "d_model", "blocks"])
def test_a_missing_key_is_named(key):
    config = {name: value for name, value in plain().items() if name != key}
    fails([f"config.{key}"], load, ModelConfig, config)


@pytest.mark.parametrize("value", [None, [], "model", 3, math.nan])
def test_what_is_no_object_is_named(value):
    fails(["config"], load, ModelConfig, value)


@pytest.mark.parametrize("kind", ["xlstm", None, 3, ["pdr"]])
def test_an_unknown_mixer_is_named_with_those_there_are(kind):
    with refused(ConfigError, "config.blocks[0].mixer.kind", *mixers()):
        load(ModelConfig, changed([*MIXER, "kind"], kind))


def test_configs_are_checked_without_a_file_too():
    fails(["kv_heads", 3], mixers()["window_gqa"].small.__class__, 4, 3, 8)
    fails(["window", 0], mixers()["window_gqa"].small.__class__, 4, 2, 0)
    fails(["heads", 0], mixers()["attention"].small.__class__, 0)
    fails(["rope_base", math.nan], mixers()["attention"].small.__class__, 2, math.nan)
    fails(["hidden", 0], SwiGLUConfig, 0)


# ---------------------------------------------------------------- presets


def test_every_override_of_a_preset_arrives():
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


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"rank": 0}, ["rank", 0]),
        ({"window": 0}, ["window", 0]),
        ({"layers": 0}, ["layers", 0]),
        ({"hidden": -3}, ["hidden", -3]),
        ({"d_model": 0}, ["d_model", 0]),
        ({"renorm_every": -1}, ["renorm_every", -1]),
        ({"kv_heads": 3}, ["kv_heads", 3]),
        ({"kv_heads": 0}, ["kv_heads", 0]),
        ({"heads": 5}, ["kv_heads", 2]),
        ({"heads": 4.0}, ["heads", 4.0]),
        ({"layers": True}, ["layers", True]),
        ({"rank": "8"}, ["rank", "'8'"]),
        ({"rank": [8]}, ["rank"]),
        ({"rank": None}, ["rank", None]),
        ({"out_norm": 1}, ["out_norm", 1]),
        ({"ffn": "moe"}, ["ffn", "moe"]),
        ({"experts": 9}, ["experts", 9]),
        ({"gate": "hard"}, ["gate", "hard"]),
        ({"router": "hash"}, ["router", "hash"]),
        ({"nearest": 0}, ["nearest", 0]),
        ({"temperature": 0}, ["temperature", 0.0]),
        ({"balance": -1}, ["balance", -1.0]),
        ({"bias_rate": -0.1}, ["bias_rate", -0.1]),
        ({"torus": 8}, ["torus", 8]),
        ({"torus": []}, ["torus", "()"]),
        ({"torus": [2, 0]}, ["torus"]),
        ({"dim": 3}, ["perspective-tiny", "dim"]),
    ],
    ids=str,
)
def test_a_bad_override_is_named(override, named):
    fails(named, presets.get, "perspective-tiny", **override)


@pytest.mark.parametrize(
    ("preset", "changes", "name"),
    [
        ("perspective-tiny-dense", {"torus": [2, 2]}, "torus"),
        ("perspective-1t-dense", {"torus": [4, 2]}, "torus"),
        ("perspective-tiny", {"router": "switch", "smooth": 0.5}, "smooth"),
        ("perspective-tiny", {"router": "switch", "nearest": 2}, "nearest"),
        ("perspective-tiny", {"router": "switch", "temperature": 3.0}, "temperature"),
        ("perspective-tiny", {"gate": "none", "balance": 0.5}, "balance"),
    ],
    ids=str,
)
def test_a_field_without_effect_is_refused(preset, changes, name):
    fails([name], presets.get, preset, **changes)


@pytest.mark.parametrize("torus", [["8"], [2.5], [True, 2], [math.nan], [[2]]], ids=str)
def test_a_torus_of_anything_but_whole_numbers_is_named(torus):
    with refused(ConfigError, "int") as caught:
        presets.get("perspective-tiny", ffn="routed", torus=torus)
    assert str(caught.value).startswith("torus")


def test_an_unknown_preset_is_named_with_those_there_are():
    known = ", ".join([*presets.names(), *presets.DESIGNS])
    with refused(ConfigError, "preset", "llama") as caught:
        presets.get("llama")
    assert known[:300] in str(caught.value) and str(caught.value).endswith(known[-100:])
    with refused(ConfigError, "preset", "perspectve-tiny", "perspective-tiny") as caught:
        presets.get("perspectve-tiny")
    assert "gpt2" not in str(caught.value)


@pytest.mark.parametrize(
    ("preset", "override", "named"),
    [
        ("adr-tiny", {"halflife": [4.0]}, ["halflife"]),
        ("adr-tiny", {"halflife": [0.0, 4.0]}, ["halflife"]),
        ("adr-tiny", {"halflife": ["4", 8.0]}, ["halflife[0]", "'4'"]),
        ("adr-tiny", {"norm": "both"}, ["norm", "both"]),
        ("adr-tiny", {"emit": "both"}, ["emit", "both"]),
        ("lens-tiny", {"context": False, "context_rank": 4}, ["context_rank", 4]),
        ("lens-tiny", {"route": False, "anneal": 0.1}, ["anneal", 0.1]),
        ("lens-tiny", {"context_rank": 400}, None),
        ("drm-104k", {"rank": -1}, ["rank", -1]),
        ("drm-104k", {"gate_top_k": 9}, ["gate_top_k", 9]),
        ("drm-104k", {"gate_renorm": True}, ["gate_renorm", True]),
        ("drm-104k", {"action": -1.0}, ["action", -1.0]),
        ("gla-tiny", {"gate_rank": 0}, ["gate_rank", 0]),
        ("ssd-tiny", {"state": 0}, ["state", 0]),
    ],
    ids=str,
)
def test_a_bad_size_of_another_design_is_named(preset, override, named):
    if named is None:
        fails(["context_rank", 400], perspectron.build, presets.get(preset, **override))
    else:
        fails(named, presets.get, preset, **override)


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
    with refused(ConfigError, field, 1 << 40):
        load(ModelConfig, values)


def test_a_size_deep_in_a_block_is_refused_by_its_name():
    values = dump(presets.get("perspective-tiny"))
    values["blocks"][1]["ffn"] = {"kind": "swiglu", "hidden": 1 << 30}
    with refused(ConfigError, "blocks[1].ffn.hidden", 1 << 30):
        load(ModelConfig, values)
    values = dump(presets.get("perspective-tiny"))
    with refused(ConfigError, "blocks", 1025):
        load(ModelConfig, values | {"blocks": [values["blocks"][0]] * 1025})
