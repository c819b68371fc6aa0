"""Seconds for decoding one token, beside the time needed to read the bytes it uses.

Shapes: V vocabulary, D model width.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from perspectron.decode.reading import END_OF_TEXT_ID, prefill
from perspectron.decode.sampling import SamplingConfig, sample
from perspectron.decode.steps import stepped, steps_of
from perspectron.model.census import Touched, touched
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.stream.speed import reading

GREEDY = SamplingConfig(temperature=0)
WARMUP = 2
READ = 1 << 29  # bytes read to learn how fast that is


@torch.inference_mode()
def decode(
    model: LanguageModel,
    vocab_size: int,
    prompt: Sequence[int],
    tokens: int,
    *,
    warmup: int = WARMUP,
    sampling: SamplingConfig = GREEDY,
    between: Callable[[], object] | None = None,
) -> tuple[list[float], LMState]:
    """(seconds of each of `tokens` tokens after a prompt, the state after them). A token's time is that of drawing it
    from the logits, reading it, and having the next logits. The first `warmup` are not told. `between`: called
    before each token, not timed."""
    logits_1V, state = prefill(model, [[END_OF_TEXT_ID, *prompt]])
    seconds, recent, steps = [], list[int](), steps_of(model)
    for drawn in range(warmup + tokens):
        if between is not None:
            between()
        start = time.perf_counter()
        ids = sample(logits_1V[:, :vocab_size], [recent], drawn, sampling)
        ids_11 = ids.to(logits_1V.device)[:, None]
        _, logits_1V, state = stepped(model, steps, ids_11, state)
        recent = [*recent, int(ids)][-sampling.repetition_window :]
        seconds.append(time.perf_counter() - start)
    return seconds[warmup:], state


def reader(model: LanguageModel) -> Callable[[], float]:
    """A function that reads some of the model's own weights from memory and returns the speed in bytes a second."""
    largest = max(model.state_dict().values(), key=lambda tensor: tensor.untyped_storage().nbytes())
    whole = torch.empty(0, dtype=torch.uint8).set_(largest.untyped_storage())[:READ]
    return partial(reading, whole)


@dataclass(frozen=True)
class Bench:
    """Tokens decoded one by one. seconds: of each. touched: bytes of one. bandwidth: bytes a second, read from memory
    between the tokens. missed: bytes a token read from the disk, and waited: seconds it stood still for them."""

    seconds: list[float]
    touched: Touched
    state_bytes: int
    bandwidth: float
    missed: float
    waited: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def share(self) -> float:
        """Share of the speed at which reading the bytes once would be all there is to do."""
        return self.touched.total / self.bandwidth / self.median


def bench(model: LanguageModel, vocab_size: int, prompt: Sequence[int], tokens: int) -> Bench:
    """Decode `tokens` tokens after a prompt, and read memory between them: both see the same machine."""
    read, speeds = reader(model), list[float]()
    before = model.disk_reads()
    seconds, state = decode(model, vocab_size, prompt, tokens, between=lambda: speeds.append(read()))
    after = model.disk_reads()
    missed, waited = ((b - a) / (tokens + WARMUP) for a, b in zip(before, after, strict=True))
    bandwidth = statistics.median(speeds)
    return Bench(seconds, touched(model, state), state.nbytes, bandwidth, missed, waited)
