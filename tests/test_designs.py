"""Designs at any size: parameters match, for every design, over three orders of magnitude."""

import dataclasses

import pytest
import torch

from perspectron import designs, presets
from perspectron.census import active_parameters
from perspectron.errors import ConfigError
from perspectron.model import build

DESIGNS = list(designs.DESIGNS)
BUDGETS = [(300_000, 512, 128), (1_000_000, 1024, 256), (5_000_000, 4096, 512), (100_000_000, 16384, 512)]


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(("params", "vocab_size", "seq_len"), BUDGETS)
def test_parameters_match_within_two_percent(design, params, vocab_size, seq_len):
    config = designs.solve(design, params, vocab_size=vocab_size, seq_len=seq_len)
    assert abs(active_parameters(config) / params - 1) <= 0.02
    assert config.name == design == designs.design_of(config)
    assert config.vocab_size == vocab_size
    assert config.positions in (0, seq_len)


def test_layers_share_width_and_depth():
    models = [designs.solve(name, 2_000_000, vocab_size=2048, seq_len=256) for name in DESIGNS]
    layered = [m for m in models if m.name not in ("drm", "ssd")]
    assert {m.d_model for m in layered} == {160}
    assert {len(m.blocks) for m in layered} == {4}


@pytest.mark.parametrize("design", DESIGNS)
def test_small_models_run_and_are_alike(design):
    config = designs.small(design, vocab_size=64, seq_len=32)
    assert abs(active_parameters(config) / 101_696 - 1) < 0.1
    ids = torch.arange(32)[None] % 64
    assert build(config)(ids, targets=ids).loss.isfinite()


@pytest.mark.parametrize("preset", presets.names())
def test_every_preset_is_of_a_design(preset):
    design = designs.design_of(presets.get(preset))
    assert preset.startswith(design.removesuffix("-experts"))


def test_a_name_of_ones_own_is_of_no_design():
    config = dataclasses.replace(presets.get("gpt2-tiny"), name="mine")
    with pytest.raises(ConfigError, match="model name = 'mine', must be one of perspective"):
        designs.design_of(config)


def test_a_budget_below_the_embedding_says_what_would_do():
    with pytest.raises(ConfigError, match=r"params = 50000, must be about 1,070,304 or more for gpt2"):
        designs.solve("gpt2", 50_000, vocab_size=32768, seq_len=64)


def test_an_unknown_design_lists_those_there_are():
    with pytest.raises(ConfigError, match="design = 'rwkv', must be one of perspective, adr"):
        designs.solve("rwkv", 1_000_000, vocab_size=512, seq_len=64)
