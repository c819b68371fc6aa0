"""What a model's gates are: at the start they are where the documents put them."""

import math
from dataclasses import replace

import pytest
import torch

from claims.measures.gates import gates
from perspectron import presets
from perspectron.compare.ablations import ablate
from perspectron.designs.adr.mixer import ADRConfig
from perspectron.model.model import build
from perspectron.ops.attention import places
from perspectron.presets import small
from perspectron.util import registry

ABLATIONS = dict(registry.parts("ablations"))
IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(1))


def test_lenses_start_at_the_documents_mixture():
    found = gates(build(presets.get("lens-tiny")), IDS)
    assert torch.tensor(found["lens_weights"]).shape == (4, 4, 3)
    assert found["lens_weights"][3][2] == pytest.approx([0.80, 0.15, 0.05], abs=1e-3)
    assert found["route_gate"] == pytest.approx([0.9] * 4, abs=1e-3)


def test_decay_is_that_of_its_bias_and_changes_with_the_text():
    model = build(presets.get("perspective-tiny-dense"))
    found = gates(model, IDS)
    assert len(found["pdr_gate_mean"]) == 3
    assert found["pdr_gate_mean"] == pytest.approx([0.93] * 3, abs=0.02)
    with torch.no_grad():
        model.blocks[0].mixer.p_proj.weight.zero_()
    first = {name: values[0] for name, values in gates(model, IDS).items()}
    assert first == pytest.approx({"pdr_gate_mean": 0.95, "pdr_gate_spread": 0}, abs=0.02)


def test_memories_shift_attention_less():
    assert all(value < 1 for value in gates(build(presets.get("adr-tiny")), IDS)["adr_roughness"])


def test_only_the_metric_leaves_the_span_of_directions():
    model = build(presets.get("drm-104k"))
    found = gates(model, IDS)
    assert 0 < found["drm_active"][0] < 8
    assert found["drm_outside"][0] > 1e-4
    model.set_step(0)  # naturalisation has not begun
    assert gates(model, IDS)["drm_outside"][0] < 1e-8


KEPT = {"perspective": {"pdr_gate_mean", "pdr_gate_spread"}, "adr": {"adr_roughness"}}
KEPT |= {"drm": {"drm_active", "drm_outside"}, "lens": {"lens_weights"}, "perspective2": set()}
WITHOUT = {("perspective", "no_pdr"), ("adr", "values_only")}


@pytest.mark.parametrize(
    ("design", "name"),
    [(d, name) for d, names in ABLATIONS.items() if d != "perspective-experts" for name in names],
)
def test_of_every_ablation(design, name):
    """A removed part takes its gates with it; those of the other parts are there, and finite."""
    wide = 96 if design == "perspective2" else 48  # its queries and keys weigh less there
    config = ablate(small(design, vocab_size=250, d_model=wide, layers=4, seq_len=64), name)
    found = gates(build(config), IDS)
    assert found.keys() - {"route_gate"} == (set() if (design, name) in WITHOUT else KEPT[design])
    for values in found.values():
        assert all(map(math.isfinite, torch.tensor(values).flatten().tolist()))


def test_a_gate_of_low_rank_is_the_one_the_layer_uses():
    """Through both of its matrices: the first to zero leaves the bias."""
    model = build(ablate(small("perspective", vocab_size=250, d_model=48, seq_len=64), "low_rank_gate"))
    with torch.no_grad():
        model.blocks[0].mixer.p_down.weight.zero_()
    assert gates(model, IDS)["pdr_gate_mean"][0] == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("remember", ["both", "keys", "values"])
def test_what_is_asked_of_memories_is_what_attention_reads(remember):
    """And keeps in its cache, cold start and all."""
    config = ADRConfig(heads=2, gamma=0.9, cold_start=True, couple=False, remember=remember)
    base = small("adr", vocab_size=250, d_model=32, seq_len=64)
    blocks = tuple(replace(block, mixer=config) for block in base.blocks)
    mixer = build(replace(base, blocks=blocks)).blocks[0].mixer
    x_BTD = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = mixer.init_state(2, x_BTD.device, x_BTD.dtype)
        read = mixer.remember(x_BTD, before, places(before.cache.length_B, 24, None, None))
        after = mixer(x_BTD, before)[1].cache
    for seen, kept in zip(read.seen_BT2HK.unbind(2), after.ring(), strict=True):
        torch.testing.assert_close(seen.transpose(1, 2), kept, rtol=0, atol=0)


def test_of_a_design_without_gates():
    assert gates(build(presets.get("gpt2-tiny")), IDS) == {}
