"""Presets by name, and designs at any size: parameters match, for every design, over three orders of magnitude."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from perspectron import presets
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.model.census import active_parameters, census
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import MLPConfig, SwiGLUConfig
from perspectron.model.model import build
from perspectron.presets import fit, table
from perspectron.presets.frame import stack
from perspectron.util import registry
from perspectron.util.config import between_commas
from perspectron.util.errors import ConfigError
from tests.refusals import refused

DESIGNS = list(presets.DESIGNS)
BUDGETS = [(300_000, 512, 128), (1_000_000, 1024, 256), (5_000_000, 4096, 512), (100_000_000, 16384, 512)]


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(("params", "vocab_size", "seq_len"), BUDGETS)
def test_parameters_match_within_two_percent(design, params, vocab_size, seq_len):
    config = presets.solve(design, params, vocab_size=vocab_size, seq_len=seq_len)
    assert abs(active_parameters(config) / params - 1) <= 0.02
    assert config.name == design == presets.design_of(config)
    assert config.vocab_size == vocab_size
    assert config.positions in (0, seq_len)


def test_designs_have_the_sizes_that_results_were_measured_with():
    """Layers, parameters and bytes of state at 2 M: an option that a mixer gets later must change none of them."""
    found = {}
    for design in DESIGNS:
        config = presets.solve(design, 2_000_000, vocab_size=2048, seq_len=512)
        found[design] = [len(config.blocks), active_parameters(config), fit.state_bytes(config, 512)]
    assert found == json.loads((Path(__file__).parents[1] / "goldens" / "sizes.json").read_text())


def test_layers_share_width_and_depth():
    models = [presets.solve(name, 2_000_000, vocab_size=2048, seq_len=256) for name in DESIGNS]
    layered = [m for m in models if m.name not in ("drm", "drm2", "ssd")]
    assert {m.d_model for m in layered} == {160}
    assert {
        len([b for b in m.blocks if getattr(b.mixer, "kind", "") != "rwkv7_channel"]) for m in layered
    } == {4}


@pytest.mark.parametrize("design", DESIGNS)
def test_small_models_run_and_are_alike(design):
    config = presets.small(design, vocab_size=64, seq_len=32)
    assert abs(active_parameters(config) / 101_696 - 1) < 0.1
    ids = torch.arange(32)[None] % 64
    assert build(config)(ids, targets=ids).loss.isfinite()


@pytest.mark.parametrize("preset", presets.names())
def test_every_preset_is_of_a_design(preset):
    design = presets.design_of(presets.get(preset))
    assert preset.startswith(design.removesuffix("-experts"))


@pytest.mark.parametrize("design", DESIGNS)
def test_a_design_is_a_preset_at_its_default_sizes(design):
    config = presets.get(design)
    assert config.name == design == presets.design_of(config)
    assert presets.get(design, vocab_size=77).vocab_size == 77


def test_a_design_entered_by_one_function_is_trained_and_compared_by_name(monkeypatch):
    monkeypatch.setattr(table, "DESIGNS", dict(table.DESIGNS))
    monkeypatch.setattr(fit, "DESIGNS", table.DESIGNS)

    @table.design("one window after another", "docs/designs/perspective.md#windowed-attention")
    def windows(
        name: str, *, vocab_size: int = 64, d_model: int = 32, layers: int = 2, hidden: int = 40,
        gqa: WindowGQAConfig = WindowGQAConfig(heads=2, kv_heads=1, window=8),
    ) -> ModelConfig:  # fmt: skip
        return stack(name, vocab_size, d_model, layers, BlockConfig(gqa, SwiGLUConfig(hidden)))

    assert presets.get("windows", window=4, layers=3).blocks[2].mixer == WindowGQAConfig(2, 1, 4)
    config = presets.solve("windows", 1_000_000, vocab_size=1024, seq_len=256)
    assert abs(active_parameters(config) / 1_000_000 - 1) <= 0.02
    assert config.blocks[0].mixer == WindowGQAConfig(config.d_model // 32, 1, 128)
    with refused(ConfigError, "windows", "rank"):
        presets.get("windows", rank=4)


def test_a_keyword_comes_before_a_field_of_the_same_name():
    assert presets.get("perspective-tiny", hidden=96).blocks[0].ffn.hidden == 96
    assert presets.get("perspective-tiny-dense", hidden=96).blocks[0].ffn.hidden == 96


def test_a_name_of_ones_own_is_of_no_design():
    config = dataclasses.replace(presets.get("gpt2-tiny"), name="mine")
    with refused(ConfigError, "mine"):
        presets.design_of(config)


def test_a_budget_below_the_embedding_says_what_would_do():
    with refused(ConfigError, "params", 50000):
        presets.solve("gpt2", 50_000, vocab_size=32768, seq_len=64)


def test_an_unknown_design_lists_those_there_are():
    with refused(ConfigError, "design", "rwkv"):
        presets.solve("rwkv", 1_000_000, vocab_size=512, seq_len=64)


@pytest.mark.parametrize(
    "name", ["perspective", "perspective2", "perspective[kda]", "gla", "gdn", "mamba3", "hgrn2", "rwkv7"]
)
def test_a_state_of_so_many_bytes_at_the_same_parameters(name):
    model = presets.solve(name, 2_000_000, vocab_size=2048, seq_len=256, state=373_776)
    counted = census(model, [1024])
    assert abs(counted.state_bytes[1024] / 373_776 - 1) <= 0.05
    assert abs(counted.active_parameters / 2_000_000 - 1) <= 0.02
    if name.startswith("perspective"):  # the frame stays as it is
        usual = presets.solve(name, 2_000_000, vocab_size=2048, seq_len=256)
        period = 2 if name == "perspective2" else 4
        assert len(model.blocks) % period == 0
        assert {type(block.mixer).kind for block in model.blocks[period - 1 :: period]} == {"window_gqa"}
        assert model.blocks[period - 1].mixer == usual.blocks[period - 1].mixer


def test_a_part_is_named_where_several_have_a_size():
    both = presets.get("perspective[kda]", heads=2)
    assert [block.mixer.heads for block in both.blocks] == [2, 2, 2, 2]
    one = presets.get("perspective[kda]", **{"heads": 2, "mixer.heads": 4})
    assert [block.mixer.heads for block in one.blocks] == [4, 4, 4, 2]
    with refused(ConfigError, "key", "gqa.window"):
        presets.get("perspective[kda]", **{"gqa.window": 4})


def test_the_best_parts_go_by_a_plus():
    made = presets.solve("transformer+", 100_000, vocab_size=300, seq_len=64)
    assert (made.shift, made.first_values, made.name) == (("k", "v", "network"), True, "transformer+")
    assert presets.design_of(made) == "transformer"
    assert presets.variant("gdn+[first_values=false]")[1] == {"shift": True, "first_values": False}
    assert presets.variant("mingru+")[1] == {"shift": True}  # no values that lean
    kda = presets.solve("perspective+[kda,heads=2]", 200_000, vocab_size=300, seq_len=64)
    assert kda.shift is True and presets.design_of(kda) == "perspective[kda]"


@pytest.mark.parametrize(
    "name", ["nothing+", "transformer++", "rwkv7+", "perspective2+", "transformer[shift=k]+"]
)
def test_parts_of_no_design_or_of_one_that_has_them_are_refused(name):
    with refused(ConfigError, "design"):
        presets.variant(name)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("transformer[layers=1,first_values=true]", "first_values"), ("perspective[first_values=true]", "first_values"),
        ("rwkv7[shift=true]", "shift"), ("rwkv7[input_conv=true]", "input_conv"),
        ("lens2[discoverability=false,disc_scale=true]", "disc_scale"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(name, field):
    with refused(ConfigError, field):
        presets.small(name, vocab_size=300)


def test_every_design_with_its_best_parts_is_a_model():
    for design in presets.DESIGNS.keys() - {"rwkv7", "perspective2"}:
        head, bracket, rest = design.partition("[")
        made = presets.solve(f"{head}+{bracket}{rest}", 300_000, vocab_size=300, seq_len=64)
        assert made.shift and presets.design_of(made) == design


def test_titles_are_names_that_readers_know():
    assert presets.title("transformer[shift=true,first_values=true]") == "Transformer[shift, first_values]"
    assert presets.title("transformer+") == "Transformer+"
    assert presets.title("perspective+[kda,rank=16]") == "Perspective+[KDA, rank=16]"
    assert presets.title("ssd") == "Mamba-2" and presets.title("perspective") == "Perspective"
    assert presets.title("perspective[kda,rank=16]") == "Perspective[KDA, rank=16]"
    assert presets.title("without the gate") == "without the gate"
    titles = {name for design in registry.designs().values() for name in design.titles}
    assert titles <= {*DESIGNS, "pdr2"}


@pytest.mark.parametrize("design", [name for name in DESIGNS if "[" not in name])
def test_every_design_has_relu2_and_zero_outputs_or_says_why_not(design):
    """ADR norms what it adds: there, outputs that are 0 leave more than the input."""
    given = {"vocab_size": 64, "d_model": 32, "layers": 4, "seq_len": 16}
    if design in ("drm", "drm2"):
        with refused(ConfigError, "zero_outputs", design):
            presets.small(f"{design}[zero_outputs=true]", **given)
    else:
        model, same = build(presets.small(f"{design}[zero_outputs=true]", **given)).eval(), []
        for block in model.blocks:
            block.register_forward_hook(lambda _, x, y: same.append(torch.equal(x[0], y[0])))
        model(torch.arange(24).reshape(2, 12))
        assert same == [design != "adr"] * len(model.blocks)
    networks = {type(block.ffn) for block in presets.small(design, **given).blocks}
    if networks == {SwiGLUConfig}:
        blocks = presets.small(f"{design}[relu2=true]", **given).blocks
        assert all(isinstance(b.ffn, MLPConfig) and b.ffn.activation == "relu2" for b in blocks)
    else:
        with refused(ConfigError, "relu2", design):
            presets.small(f"{design}[relu2=true]", **given)


def test_a_size_may_be_a_list():
    model = presets.solve("adr2[halflife=[2, 32.0],layers=2]", 2_000_000, vocab_size=2048, seq_len=256)
    assert [block.mixer.gamma for block in model.blocks] == [0.5 ** (1 / 2), 0.5 ** (1 / 32)]
    assert between_commas("a, b[c=[1,2],d], e") == ["a", "b[c=[1,2],d]", "e"]


@pytest.mark.parametrize("name", ["gla[heads=4", "gla]", "gla[heads=4]]", "gla[heads=4]x"])
def test_brackets_are_closed_once(name):
    with refused(ConfigError, "design"):
        presets.solve(name, 2_000_000, vocab_size=2048, seq_len=256)


@pytest.mark.parametrize(
    ("name", "state", "named"),
    [
        ("transformer", 160_000, ["match", "transformer", "state", "parameters"]),
        ("gla", 1_000, ["state", "gla", 640, 1280]),
        ("drm", 160_000, ["state", "drm", 72]),
        ("ssd", 414_720, ["state"]),
    ],
)
def test_a_state_that_cannot_be_is_refused_with_what_can(name, state, named):
    with refused(ConfigError, *named):
        presets.solve(name, 2_000_000, vocab_size=2048, seq_len=256, state=state)


@pytest.mark.parametrize("design", ["transformer", "drm"])
def test_a_width_of_less_than_a_head_is_refused(design):
    assert presets.small(design, vocab_size=300, d_model=32).vocab_size == 300
    with refused(ConfigError, "d_model", 16, 32):
        presets.small(design, vocab_size=300, d_model=16)
