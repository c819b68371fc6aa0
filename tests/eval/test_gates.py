"""Half-lives of a memory's rows over a text."""

import math

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.eval.gates import halflives

SIZES = {"d_model": 32, "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "vocab_size": 300, "period": 2}


@pytest.mark.parametrize("design", ["perspective", "perspective2"])
def test_half_of_what_a_row_holds_is_left_after_a_half_life(design):
    model = perspectron.build(presets.get(design, **SIZES))
    found = halflives(model, [5, 6, 7])
    assert set(found) == {0} and found[0].shape == (3, 32)
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.p_proj.weight.zero_()
        mixer.p_proj.bias.fill_(math.log(0.9 / 0.1))
    torch.testing.assert_close(
        halflives(model, [5, 6])[0], torch.full((2, 32), math.log(0.5) / math.log(0.9)).double()
    )


def test_later_tokens_change_nothing_and_other_designs_have_none():
    model = perspectron.build(presets.get("perspective2", **SIZES)).double()
    whole, part = (halflives(model, ids)[0] for ids in ([5, 6, 7, 8], [5, 6]))
    torch.testing.assert_close(whole[:2], part)
    small = {key: value for key, value in SIZES.items() if key not in ("kv_heads", "period")}
    assert halflives(perspectron.build(presets.get("transformer", **small)), [5, 6]) == {}
    assert not any(module._forward_hooks for module in model.modules())
