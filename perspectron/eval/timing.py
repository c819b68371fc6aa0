"""Times that can be compared: contenders take turns, and a median with its spread is reported.

The speed of a machine varies. Contenders that alternate meet the same conditions, so that their ratios hold where their
times do not. What is timed: steps of training, on random tokens; steps of decoding at contexts too long to read first,
from states whose caches are filled with random numbers; and, for one model, its tokens after a prompt.

Shapes: B batch, T time, V vocabulary, D model width.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, Self, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from perspectron.decode.reading import prefill
from perspectron.decode.sampling import SamplingConfig, sample
from perspectron.decode.steps import stepped, steps_of
from perspectron.model.census import Touched, is_cache, touched
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build, shape_of
from perspectron.model.state import LMState
from perspectron.stream.speed import reading
from perspectron.train.estimate import room
from perspectron.train.optim import OptimConfig, optimizer_of
from perspectron.util.config import at_least, require
from perspectron.util.machine import pick_device, seconds_of
from perspectron.util.terms import Term

Key = TypeVar("Key", bound=Hashable)
Dtype = Literal["float32", "bfloat16"]
MOST = 20  # times as many rounds as asked for
PROMPT = 64  # tokens read before a state is filled
BLOCK = 1 << 20  # random numbers, of which there are copies
FREE_SHARE = 0.5  # of the free memory that is used
GREEDY = SamplingConfig(temperature=0)
WARMUP = 2  # tokens that are left out
READ = 1 << 29  # bytes read to learn how fast that is


@dataclass(frozen=True)
class Spread:
    """Median of some measurements, bounds between which they lie, and their number."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def middle(cls, values: Sequence[float]) -> Self:
        """Median and quartiles: where half of the measurements lie, whatever else the machine did meanwhile."""
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(median, low, high, len(values))


def take_turns(
    contenders: Mapping[Key, Callable[[], float]], rounds: int, warmup: int = 1, *, seconds: float = 0.0
) -> dict[Key, list[float]]:
    """Results of each contender, which is called once a round, after `warmup` rounds that are left out. They take
    turns, in reverse order every other round. Quick ones go on for `seconds`, up to `MOST` times as many rounds."""
    names = list(contenders)
    answers: dict[Key, list[float]] = {name: [] for name in names}
    turn, end = 0, time.perf_counter() + seconds
    while turn < warmup + rounds or (turn < warmup + MOST * rounds and time.perf_counter() < end):
        for name in names if turn % 2 == 0 else reversed(names):
            answer = contenders[name]()
            if turn >= warmup:
                answers[name].append(answer)
        turn += 1
    return answers


def timed(
    call: Callable[[], object],
    device: torch.device = torch.device("cpu"),  # noqa: B008  (immutable)
    clock: Callable[[], float] | None = None,
) -> Callable[[], float]:
    """A function that makes the call and returns the seconds it took, as `seconds_of` measures them."""
    return partial(seconds_of, call, device, clock)


# Training: a step is forward, loss with every term, backward and AdamW, on random tokens.


@dataclass(frozen=True)
class Setting:
    """Windows and tokens of a training step, and its device."""

    batch_size: int = 8
    seq_len: int = 256
    device: str = "cpu"

    def __post_init__(self) -> None:
        at_least(1, self, "batch_size", "seq_len")

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len


def check(config: ModelConfig, setting: Setting) -> None:
    """ConfigError where a table of positions is too short."""
    positions = config.positions or setting.seq_len
    bound = f"≤ positions = {positions}, the learned table of {config.name}"
    require(setting.seq_len <= positions, "seq_len", setting.seq_len, bound)


def stepper(
    config: ModelConfig,
    setting: Setting,
    optim: OptimConfig | None = None,
    prepare: Callable[[LanguageModel, Tensor], None] | None = None,
    term: Callable[[Tensor, Tensor], Term] | None = None,
) -> Callable[[Dtype], None]:
    """A function that makes one training step of a random model, by AdamW unless another optimizer is named. prepare:
    called with the model and the ids [B, T] that it reads, before the optimizer is made. term: of its logits and these
    ids, added to the loss."""
    device = pick_device(setting.device)
    model = build(config).to(device).train()
    draw, shape = torch.Generator().manual_seed(0), (setting.batch_size, setting.seq_len + 1)
    ids_BT = torch.randint(config.vocab_size, shape, generator=draw).to(device)
    if prepare is not None:
        prepare(model, ids_BT[:, :-1])
    optimizer = optimizer_of(model, optim or OptimConfig())

    def step(dtype: Dtype) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            output = model(ids_BT[:, :-1], targets=ids_BT[:, 1:])
            if term is not None:
                output.aux["term"] = term(output.logits, ids_BT[:, :-1])
            objective = output.objective()
        if objective.requires_grad:  # else the first update of the training says why not
            objective.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_per_step(
    configs: Mapping[str, ModelConfig],
    setting: Setting,
    dtypes: Sequence[Dtype],
    rounds: int,
    optims: Mapping[str, OptimConfig | None] = MappingProxyType({}),
) -> dict[str, dict[Dtype, list[float]]]:
    """Seconds of a step by design and dtype, once a round; all take turns. optims: as `stepper` has them."""
    device = pick_device(setting.device)
    turns: dict[tuple[str, Dtype], Callable[[], float]] = {}
    for name, config in configs.items():
        step = stepper(config, setting, optims.get(name))
        for dtype in dtypes:
            turns[name, dtype] = timed(partial(step, dtype), device)
    seconds = take_turns(turns, rounds)
    return {name: {dtype: seconds[name, dtype] for dtype in dtypes} for name in configs}


# Decoding at a context. Memories of fixed size keep what a few tokens left: the cost does not depend on it.


@dataclass(frozen=True)
class Decoded:
    """Costs of a model at one context. seconds: of a token, once a round; empty where it was not run. state_bytes: of
    one conversation that long. touched_bytes: that a token reads or writes. skipped: why it was not run, or empty."""

    seconds: list[float]
    state_bytes: int
    touched_bytes: int
    skipped: str = ""


def decode_model(config: ModelConfig, longest: int, device: torch.device) -> LanguageModel:
    """A random model to time steps of, at contexts up to `longest`. A shorter table of learned positions is replaced by
    its first row, repeated: a token takes one row, and which one costs nothing."""
    model = build(config).to(device).eval().requires_grad_(False)
    if 0 < config.positions < longest:
        model.config = replace(config, positions=longest)
        row_1D = model.positions.weight[:1].detach()
        model.positions = nn.Embedding.from_pretrained(row_1D.expand(longest, -1))
    return model


def shapes(model: LanguageModel, context: int) -> LMState:
    """The state of one row with room for `context` tokens, without its numbers."""
    return shape_of(model.config).init_state(1, capacity=context)


def cache_bytes(state: LMState) -> int:
    leaves = pytree.tree_leaves_with_path(state)
    return sum(leaf.nbytes for where, leaf in leaves if is_cache(where))


def noise(nbytes: int, device: torch.device) -> Tensor:
    """At least `nbytes` bytes of random float32 numbers, for the caches of one model after another to lie in."""
    count = max(1, -(-nbytes // 4))
    block = torch.randn(min(BLOCK, count), generator=torch.Generator(device).manual_seed(0), device=device)
    return block.repeat(-(-count // len(block))).view(torch.uint8)


def filled(model: LanguageModel, context: int, length: int, noise_N: Tensor) -> LMState:
    """A state of one row after `length` tokens, with room for `context`, its caches over `noise`."""
    draw = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(model.config.vocab_size, (1, min(PROMPT, context)), generator=draw)
    memories = dict(pytree.tree_leaves_with_path(model(ids_1T.to(model.device)).state))
    used = 0

    def leaf(where: pytree.KeyPath, like: Tensor | int) -> Tensor | int:
        nonlocal used
        if isinstance(like, int):
            return length
        if pytree.keystr(where).endswith(".length_B"):
            return torch.full_like(like, length, device=model.device)
        if not is_cache(where):
            return memories[where]
        start, used = used, used + like.nbytes
        return noise_N[start:used].view(like.dtype).view(like.shape)

    state: LMState = pytree.tree_map_with_path(leaf, shapes(model, context))
    return state


class Stepper:
    """A model and its state just short of a context. A turn reads one token that warms the processor's caches and
    `visit` that count, the last of which is the context's last; the next turn begins where this one did."""

    def __init__(
        self,
        model: LanguageModel,
        context: int,
        visit: int,
        noise_N: Tensor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.context, self.visit = model, context, visit
        self._recorded = steps_of(model)
        self.start = self.state = filled(model, context, context - visit - 1, noise_N)
        self.ids_11 = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        self._steps = timed(lambda: [self.step() for _ in range(visit)], model.device, clock)

    def begin(self) -> None:
        """Go back to the start, which steps must not write into: its memories and rings are copied. A cache of the
        whole context is not: what was written there lies beyond what the start has read."""

        def copied(where: pytree.KeyPath, leaf: Tensor | int) -> Tensor | int:
            if isinstance(leaf, int) or (is_cache(where) and leaf.shape[2] == self.context):
                return leaf
            return leaf.clone()

        self.state = pytree.tree_map_with_path(copied, self.start)

    def step(self) -> Tensor:
        """The logits [1,V] after one more token."""
        _, logits_1V, self.state = stepped(self.model, self._recorded, self.ids_11, self.state)
        return logits_1V

    def turn(self) -> float:
        """Seconds of a token."""
        self.begin()
        self.step()
        return self._steps() / self.visit


@torch.inference_mode()
def decoding(
    models: Mapping[str, LanguageModel], context: int, *, rounds: int, visit: int, seconds: float = 0.0
) -> dict[str, Decoded]:
    """Every model at one context, in turns, for `rounds` or for `seconds` where they are quick; those whose cache
    takes more than half of the free memory left out."""
    states = {name: shapes(model, context) for name, model in models.items()}
    sizes = {name: cache_bytes(state) for name, state in states.items()}
    device = next(iter(models.values())).device
    most = FREE_SHARE * room(device)
    noise_N = noise(max((size for size in sizes.values() if size <= most), default=0), device)
    steppers = {
        name: Stepper(model, context, visit, noise_N) for name, model in models.items() if sizes[name] <= most
    }
    times = take_turns({name: one.turn for name, one in steppers.items()}, rounds, seconds=seconds)
    decoded = {}
    for name, model in models.items():
        if name in steppers:
            after = steppers[name].state
            decoded[name] = Decoded(times[name], after.nbytes, touched(model, after).total)
        else:
            why = f"its cache of {sizes[name] / 1e9:.1f} GB is more than half of the free memory"
            decoded[name] = Decoded([], states[name].nbytes, 0, why)
    return decoded


# One model, after a prompt


@torch.inference_mode()
def decode(
    model: LanguageModel,
    vocab_size: int,
    prompt: Sequence[int],
    tokens: int,
    *,
    warmup: int = WARMUP,
    between: Callable[[], object] | None = None,
) -> tuple[list[float], LMState]:
    """(seconds of each of `tokens` tokens after a prompt, the state after them). A token's time is that of drawing it
    from the logits, reading it, and having the next logits. The first `warmup` are left out. `between`: called before
    each token, not timed."""
    logits_1V, state = prefill(model, [prompt])
    seconds, steps = [], steps_of(model)
    for drawn in range(warmup + tokens):
        if between is not None:
            between()
        start = time.perf_counter()
        ids_11 = sample(logits_1V[:, :vocab_size], [[]], drawn, GREEDY).to(logits_1V.device)[:, None]
        _, logits_1V, state = stepped(model, steps, ids_11, state)
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
    between the tokens. missed: bytes that a token read from the disk; waited: seconds that it waited for them."""

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
        """Speed as a share of the bound at which a token takes only as long as reading its bytes once."""
        return self.touched.total / self.bandwidth / self.median


def bench(model: LanguageModel, vocab_size: int, prompt: Sequence[int], tokens: int) -> Bench:
    """Decode `tokens` tokens after a prompt, and read memory between them: both see the same machine."""
    read, speeds, reads = reader(model), list[float](), list[tuple[float, float]]()

    def between() -> None:
        speeds.append(read())
        reads.append(model.disk_reads())

    seconds, state = decode(model, vocab_size, prompt, tokens, between=between)
    before, after = reads[WARMUP], model.disk_reads()  # what the prompt and warming up read is no token's
    missed, waited = ((b - a) / tokens for a, b in zip(before, after, strict=True))
    bandwidth = statistics.median(speeds)
    return Bench(seconds, touched(model, state), state.nbytes, bandwidth, missed, waited)
