"""Reading prompts: any lengths, any chunks, constant memory."""

import weakref

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perspectron.decode.reading import prefill
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.errors import ConfigError
from tests.decode.conftest import VOCAB
from tests.refusals import refused

EXACT = {"rtol": 0, "atol": 1e-9}


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def close(state: LMState, expected: LMState) -> None:
    """Equal where it matters: a cache may have more room than its twin."""
    for mine, other in zip(pytree.tree_leaves(state), pytree.tree_leaves(expected), strict=True):
        if isinstance(mine, Tensor):
            if mine.ndim == 4:
                room = min(mine.shape[2], other.shape[2])
                mine, other = mine[:, :, :room], other[:, :, :room]
            torch.testing.assert_close(mine, other, **EXACT)


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_batch_of_different_lengths_reads_as_each_alone(double: LanguageModel, chunk: int) -> None:
    first, more = prompts_of(1, 40, 17, 7), prompts_of(9, 1, 8, 3)
    with torch.inference_mode():
        logits, state = prefill(double, first, chunk=chunk)
        again, state = prefill(double, more, state, chunk=chunk)
        for row in range(4):
            whole = double(torch.tensor([first[row] + more[row]])).logits[0]
            torch.testing.assert_close(logits[row], whole[len(first[row]) - 1], **EXACT)
            torch.testing.assert_close(again[row], whole[-1], **EXACT)
            following = torch.tensor([[5, 6]])
            alone = prefill(double, [first[row] + more[row]])[1]
            expected = double(following, alone).logits
            got = double(following, state.select(torch.tensor([row]))).logits
            torch.testing.assert_close(got, expected, **EXACT)


def test_nothing_is_remembered_across_the_reset(double: LanguageModel) -> None:
    a, b, c = prompts_of(20, 9, 30)
    logits, state = prefill(double, [[*a, 0, *b], [0, *c]], chunk=8, reset=0)
    for row, ids in enumerate(([0, *b], [0, *c])):
        expected, alone = prefill(double, [ids])
        torch.testing.assert_close(logits[row : row + 1], expected, **EXACT)
        got = prefill(double, [[3]], state.select(torch.tensor([row])))[0]
        torch.testing.assert_close(got, prefill(double, [[3]], alone)[0], **EXACT)
    # Also when it is the first token read after a state.
    after = prefill(double, [[0, *b]], prefill(double, [a])[1], reset=0)[0]
    torch.testing.assert_close(after, prefill(double, [[0, *b]])[0], **EXACT)


def test_a_row_that_waits_is_untouched(double: LanguageModel) -> None:
    short, long = prompts_of(5, 60)
    close(
        prefill(double, [short, long], chunk=4)[1].select(torch.tensor([0])),
        prefill(double, [short], chunk=4)[1],
    )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside and still alive, each storage once, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in self.alive:
                self.alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, id(storage))
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_memory_does_not_grow_with_the_prompt(perspective: LanguageModel) -> None:
    peaks, sizes = [], []
    for length in (10_000, 40_000):
        prompt = list(range(1, 251)) * (length // 250)
        with LiveBytes() as live:
            state = prefill(perspective, [prompt], chunk=2048)[1]
        peaks.append(live.peak)
        sizes.append(state.nbytes)
    assert sizes[1] == sizes[0]
    assert peaks[1] < 1.001 * peaks[0]  # experts' shares of a chunk vary
    with LiveBytes() as live:  # what is kept does count
        kept = [torch.zeros(10) + 1, torch.zeros(5)[:2]]
        torch.zeros(100)
    assert sum(live.alive.values()) == 60 and live.peak >= 440 and len(kept) == 2


def test_prompts_that_cannot_be_read_are_refused_by_their_row(model: LanguageModel) -> None:
    with refused(ConfigError, "prompts"):
        prefill(model, [])
    with refused(ConfigError, "prompt", 1):
        prefill(model, [[1], []])
    for id in (-1, VOCAB):
        with refused(ConfigError, 1, id):
            prefill(model, [[1], [1, id, 1]])
    with refused(ConfigError, "chunk", 0):
        prefill(model, [[1]], chunk=0)
    with refused(ConfigError, 2, 1):
        prefill(model, [[1], [1]], model.init_state(1))
