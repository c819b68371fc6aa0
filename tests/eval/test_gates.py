"""What a model's gates are: at the start they are where the documents put them."""

import pytest
import torch

from perspectron import presets
from perspectron.eval.gates import gates
from perspectron.model import build

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
    assert first == pytest.approx(
        {"pdr_gate_mean": 0.95, "pdr_gate_spread": 0, "pdr_halflife": 13.5}, abs=0.02
    )


def test_memories_shift_attention_less():
    assert all(value < 1 for value in gates(build(presets.get("adr-tiny")), IDS)["adr_roughness"])


def test_only_the_metric_leaves_the_span_of_directions():
    model = build(presets.get("drm-104k"))
    found = gates(model, IDS)
    assert 0 < found["drm_active"][0] < 8
    assert found["drm_outside"][0] > 1e-4
    model.set_step(0)  # naturalisation has not begun
    assert gates(model, IDS)["drm_outside"][0] < 1e-8


def test_of_a_design_without_gates():
    assert gates(build(presets.get("gpt2-tiny")), IDS) == {}
