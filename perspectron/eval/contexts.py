"""The cost of decoding a token at contexts too long to read first.

A state of n tokens is simulated: a few tokens are read, then caches are filled with random keys and values and lengths
set to n. Memories of fixed size need no more, because the cost of a step does not depend on its numbers. The caches of
all models share the same memory, so that only the largest has to fit and models can still take turns.

Shapes: B batch, P positions, D model width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from perspectron.decode.steps import stepped, steps_of
from perspectron.eval.timing import take_turns, timed
from perspectron.model.census import is_cache, touched
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState
from perspectron.util.machine import free_memory

PROMPT = 64  # tokens read before a state is filled
BLOCK = 1 << 20  # random numbers, of which there are copies
FREE_SHARE = 0.5  # of the free memory that a cache may take


@dataclass(frozen=True)
class Decoded:
    """A model at one context. seconds: of a token, once a round; empty where it was not run. state_bytes: of one
    conversation that long. touched_bytes: that a token reads or writes. skipped: why it was not run, or empty."""

    seconds: list[float]
    state_bytes: int
    touched_bytes: int
    skipped: str = ""


def decode_model(config: ModelConfig, longest: int, device: torch.device) -> LanguageModel:
    """A random model to time steps of, at contexts up to `longest`. A shorter table of learned positions goes on
    with its first row again and again: a token takes one row, and which one costs nothing."""
    model = build(config).to(device).eval().requires_grad_(False)
    if 0 < config.positions < longest:
        model.config = replace(config, positions=longest)
        row_1D = model.positions.weight[:1].detach()
        model.positions = nn.Embedding.from_pretrained(row_1D.expand(longest, -1))
    return model


def shapes(model: LanguageModel, context: int) -> LMState:
    """The state of one row with room for `context` tokens, without its numbers."""
    with torch.device("meta"):
        return LanguageModel(model.config).init_state(1, capacity=context)


def cache_bytes(state: LMState) -> int:
    leaves = pytree.tree_leaves_with_path(state)
    return sum(leaf.nbytes for where, leaf in leaves if is_cache(where))


class Pool:
    """Random numbers in memory, for one cache after another to be laid over."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes_N = torch.empty(-(-nbytes // 4) * 4, dtype=torch.uint8, device=device)
        numbers = self._bytes_N.view(torch.float32)
        draw = torch.Generator(device).manual_seed(0)
        block = torch.randn(min(BLOCK, max(1, len(numbers))), generator=draw, device=device)
        for start in range(0, len(numbers), len(block)):
            part = numbers[start : start + len(block)]
            part.copy_(block[: len(part)])

    def lay(self, like: Tensor, start: int) -> Tensor:
        """A tensor of that shape over the bytes from `start` on."""
        return self._bytes_N[start : start + like.nbytes].view(like.dtype).view(like.shape)


def filled(model: LanguageModel, context: int, length: int, pool: Pool) -> LMState:
    """A state of one row after `length` tokens, with room for `context`, its caches over the pool."""
    draw = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(model.config.vocab_size, (1, min(PROMPT, context)), generator=draw)
    read = model(ids_1T.to(model.device)).state
    memories = {pytree.keystr(where): leaf for where, leaf in pytree.tree_leaves_with_path(read)}
    used = 0

    def leaf(where: pytree.KeyPath, like: Tensor | int) -> Tensor | int:
        nonlocal used
        if isinstance(like, int):
            return length
        if pytree.keystr(where).endswith(".length_B"):
            return torch.full_like(like, length, device=model.device)
        if not is_cache(where):
            return memories[pytree.keystr(where)]
        laid = pool.lay(like, used)
        used += laid.nbytes
        return laid

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
        pool: Pool,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.model, self.context, self.visit = model, context, visit
        self._recorded = steps_of(model)
        self.start = self.state = filled(model, context, context - visit - 1, pool)
        self.ids_11 = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        self._steps = timed(lambda: [self.step() for _ in range(visit)], model.device, clock)

    def begin(self) -> None:
        """Go back to the start, which steps must not write into: its memories and rings are copied. A cache of the
        whole context is not: what was written there lies beyond what the start has read."""

        def own(where: pytree.KeyPath, leaf: Tensor | int) -> Tensor | int:
            if isinstance(leaf, int) or (is_cache(where) and leaf.shape[2] == self.context):
                return leaf
            return leaf.clone()

        self.state = pytree.tree_map_with_path(own, self.start)

    def step(self) -> Tensor:
        """The logits [1,V] after one more token."""
        _, logits_1V, self.state = stepped(self.model, self._recorded, self.ids_11, self.state)
        return logits_1V

    def turn(self) -> float:
        """Seconds of a token."""
        self.begin()
        self.step()
        return self._steps() / self.visit


def free(device: torch.device) -> int:
    """Bytes of memory to be had on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


@torch.inference_mode()
def measure(
    models: Mapping[str, LanguageModel],
    context: int,
    *,
    rounds: int,
    visit: int,
    seconds: float = 0.0,
) -> dict[str, Decoded]:
    """Every model at one context, in turns, for `rounds` or for `seconds` where they are quick; those whose cache
    takes more than half of the free memory left out."""
    states = {name: shapes(model, context) for name, model in models.items()}
    sizes = {name: cache_bytes(state) for name, state in states.items()}
    device = next(iter(models.values())).device
    room = FREE_SHARE * free(device)
    run = {name: model for name, model in models.items() if sizes[name] <= room}
    pool = Pool(max((sizes[name] for name in run), default=0), device)
    steppers = {name: Stepper(model, context, visit, pool) for name, model in run.items()}
    turns = {name: stepper.turn for name, stepper in steppers.items()}
    timed_seconds = take_turns(turns, rounds, seconds=seconds)
    decoded = {}
    for name, model in models.items():
        if name in run:
            after = steppers[name].state
            decoded[name] = Decoded(timed_seconds[name], after.nbytes, touched(model, after).total)
        else:
            why = f"its cache of {sizes[name] / 1e9:.1f} GB is more than half of the free memory"
            decoded[name] = Decoded([], states[name].nbytes, 0, why)
    return decoded
