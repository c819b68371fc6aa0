"""What one token costs a model that is decoding: seconds, and the bytes it has to touch.

Shapes: B batch, V vocabulary.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron import native
from perspectron.decode.generate import END_OF_TEXT_ID, prefill
from perspectron.decode.sampling import SamplingConfig, sample
from perspectron.model import LanguageModel
from perspectron.state import LMState
from perspectron.stream.engine import StreamedModel
from perspectron.stream.format import ExpertLayout

GREEDY = SamplingConfig(temperature=0)
WARMUP = 2
EXPERTS = (".gate_EFD", ".up_EFD", ".down_EDF")
READ = 1 << 29  # bytes read to learn how fast that is


@dataclass(frozen=True)
class Touched:
    """Bytes that one token reads, and of the state also writes. experts: codes and scales, or weights, of the chosen
    one of every routed layer. shared: every other weight but the head's. head: of the matrix that gives the logits.
    state: memories that each token rewrites, twice: read and written. caches: keys and values of tokens attended to."""

    experts: int
    shared: int
    head: int
    state: int
    caches: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def touched(model: LanguageModel, state: LMState) -> Touched:
    """By the last token, counted from the tensors of a model and of the state after it."""
    experts, weights = 0, dict[str, int]()
    for name, weight in model.state_dict().items():
        if name.endswith(EXPERTS):
            experts += weight.nbytes // len(weight)
        else:
            weights[name] = weight.nbytes
    for ffn in model.routed if isinstance(model, StreamedModel) else ():
        layout = ExpertLayout(model.config.d_model, ffn.config.hidden)
        experts += layout.code_bytes + layout.scale_bytes
    at_head = "lm_head." if model.config.head is not None else "embedding."
    head = sum(size for name, size in weights.items() if name.startswith(at_head))
    looked_up = ("embedding.", "positions.")  # of which a token takes a row
    shared = sum(size for name, size in weights.items() if not name.startswith((at_head, *looked_up)))
    leaves = {pytree.keystr(where): leaf for where, leaf in pytree.tree_leaves_with_path(state)}
    memories = caches = 0
    for name, leaf in leaves.items():
        owner, _, field = name.rpartition(".")
        if not isinstance(leaf, Tensor):
            continue
        if field.startswith(("k_", "v_")):
            seen_B = leaves[f"{owner}.length_B"].clamp(max=leaf.shape[2])
            caches += int(seen_B.sum()) * leaf[0, :, 0].nbytes
        else:
            memories += 2 * leaf.nbytes
    return Touched(experts, shared, head, memories, caches)


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
    seconds, recent = [], list[int]()
    for drawn in range(warmup + tokens):
        if between is not None:
            between()
        start = time.perf_counter()
        ids = sample(logits_1V[:, :vocab_size], [recent], drawn, sampling)
        hidden_11D, state, _ = model.hidden(ids.to(logits_1V.device)[:, None], state)
        logits_1V = model.head(hidden_11D)[:, 0]
        recent = [*recent, int(ids)][-sampling.repetition_window :]
        seconds.append(time.perf_counter() - start)
    return seconds[warmup:], state


def reader(model: LanguageModel) -> Callable[[], float]:
    """What reads some of the model's own weights from memory and says how fast: bytes a second."""
    largest = max(model.state_dict().values(), key=lambda tensor: tensor.untyped_storage().nbytes())
    whole = torch.empty(0, dtype=torch.uint8).set_(largest.untyped_storage())[:READ]
    words = whole[: whole.numel() // 8 * 8]

    def read() -> float:
        start = time.perf_counter()
        if native.available():
            native.read(whole, native.threads())
        else:
            words.view(torch.int64).sum()
        return whole.numel() / (time.perf_counter() - start)

    return read


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
        """Of the speed at which reading the bytes once would be all there is to do."""
        return self.touched.total / self.bandwidth / self.median


def bench(model: LanguageModel, vocab_size: int, prompt: Sequence[int], tokens: int) -> Bench:
    """Decode `tokens` tokens after a prompt, and read memory between them: both see the same machine."""
    read, speeds = reader(model), list[float]()
    before = _counted(model)
    seconds, state = decode(model, vocab_size, prompt, tokens, between=lambda: speeds.append(read()))
    after = _counted(model)
    missed, waited = ((b - a) / (tokens + WARMUP) for a, b in zip(before, after, strict=True))
    bandwidth = statistics.median(speeds)
    return Bench(seconds, touched(model, state), state.nbytes, bandwidth, missed, waited)


def _counted(model: LanguageModel) -> tuple[float, float]:
    """Bytes read and seconds waited so far."""
    cache = model.cache if isinstance(model, StreamedModel) else None
    if cache is None:
        return 0.0, 0.0
    counters = cache.counters
    return counters.bytes_read, counters.wait_seconds
