"""Imported models whose layers have a matrix memory take one that was trained, beside attention too."""

import pytest
import torch

from perspectron.decode.steps import stepped, steps_of
from perspectron.model.state import LMState, load_state, save_state
from perspectron.model.tuned import KINDS, kinds_of, parts
from perspectron.util.errors import ConfigError
from tests.decode.test_rows import equal
from tests.decode.test_tuned import trained
from tests.interop import families
from tests.interop.families import Family
from tests.interop.test_hybrids import DELTA
from tests.interop.test_later_hybrids import FALCON, HEADS, OUTER
from tests.interop.test_recurrent import MAMBA
from tests.refusals import refused

CASES = {"falcon_h1": FALCON, "qwen3_5_text": DELTA, "mamba": MAMBA}


@pytest.mark.parametrize("kind", CASES)
def test_a_family_with_a_matrix_memory(kind, tmp_path) -> None:
    family = Family(kind, CASES[kind])
    model = families.read(families.save(families.made(family), tmp_path / "model"))
    ids, starts = (
        families.text(rows=2, length=12),
        [trained(model, KINDS, 1, 0.2), trained(model, ("offset",), 2, 0.2)],
    )
    mixers = [mixer for block in model.blocks for mixer in block.mixers]
    assert len(parts(starts[0])) == sum(mixer.decays() > 0 for mixer in mixers) > 0
    with torch.inference_mode():
        state, ends = LMState.stack([*starts, model.init_state(1)]), []
        rows = torch.cat([ids, ids[:1]])
        together = model(rows, state)
        for row, start in enumerate([*starts, None]):
            alone = model(rows[row : row + 1], start and start.fork())
            torch.testing.assert_close(together.logits[row], alone.logits[0], rtol=1e-4, atol=1e-4)
            ends.append(alone.state)
        assert not torch.allclose(together.logits[0], together.logits[2], atol=1e-3)
        reset = torch.zeros(1, 12, dtype=torch.bool)
        reset[0, 5] = True
        cut, whole = model(ids[:1], starts[0].fork(), reset_BT=reset), model(ids[:1, 5:], starts[0].fork())
        torch.testing.assert_close(cut.logits[0, 5:], whole.logits[0], rtol=1e-4, atol=1e-4)
        state = together.state
        for _ in range(3):
            before = state.fork()
            _, logits, state = stepped(model, steps_of(model), rows[:, :1], state)
            wanted = model(rows[:, :1], before)
            torch.testing.assert_close(logits, wanted.logits[:, 0], rtol=1e-4, atol=1e-4)
    save_state(tmp_path / "one.state", ends[0], model)
    again = load_state(tmp_path / "one.state", model)
    equal(again, ends[0])
    assert kinds_of(again) == KINDS


def test_one_of_attention_alone_is_refused(tmp_path) -> None:
    model = families.read(families.save(families.made(Family("llama", OUTER | HEADS)), tmp_path))
    with refused(ConfigError, "attention", "offset"):
        model.init_state(1, tuned=("offset",))
