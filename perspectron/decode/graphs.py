"""Decoding steps as CUDA graphs: one launch reads a token in each row, where the modules are hundreds of kernels, each
launched by the host. A graph runs the modules' own kernels.

Shapes: B batch, D model width, V vocabulary.
"""

import dataclasses
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.decode.held import (
    MOST_UNSETTLED,
    Unsettled,
    caches,
    fill,
    like,
    settled,
    tensors,
)
from perspectron.decode.recorder import ASKED, Mode, near
from perspectron.decode.witness import Witness
from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.mixture import Mixed
from perspectron.experts.router import Routed
from perspectron.model.cache import Cache, is_cache, with_caches
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.native.tape import Unrecordable, memory
from perspectron.ops.dispatch import capturing

PATIENCE = 8
"""Steps of one shape that the modules take before a graph is captured, which takes as long as some dozens of them."""
MOST_GRAPHS = 16
"""Maximum number of graphs kept for a model."""
MOST_IDLE = 2 << 30
"""Maximum bytes of the states of kept graphs, the latest one's left out."""
LEAST_SLOTS = 256
"""Caches get slots in multiples of this, and of an eighth to a quarter of those used, so that few graphs suffice."""
MOST_COMPARED = 1 << 30
"""Up to this many bytes, a state itself is compared with that of the modules, besides the outputs."""
Body = Callable[..., tuple[Tensor, Tensor]]
COPIES = ("to", "_to_copy", "copy_", "copy")
log = logging.getLogger("perspectron")


class Graphs:
    """Graphs of one model's step, by the shapes of its state and the calling thread. plain: True if the model can have
    any. told: the reason, as last logged, why a model that could have them has none. A text may move to another thread;
    while the modules read more of it in a thread that has not stepped it, its former thread must step no other text."""

    def __init__(self, model: LanguageModel, told: str | None = None) -> None:
        self._model, self.witness, self.told = weakref.ref(model), Witness(model), told
        self.made: Callable[[LanguageModel, LMState], Step] = Step
        self.device = model.device
        held = [*model.parameters(), *model.buffers()]
        routed = [m for m in model.modules() if isinstance(m, Routed | Mixed)]
        fetched = any(
            not isinstance(m, RoutedSwiGLU) for m in routed
        )  # the host asks which experts are chosen
        here = all(x.device == self.device for x in held)
        self.plain = self.device.type == "cuda" and here and not fetched and not self.witness.patched
        self._asked, self._refused, self._unsettled = Counter[Any](), set[Any](), Counter[Any]()
        self._made = dict[Any, Step | None]()
        self._latest: Step | None = None
        self._lock = threading.Lock()

    def look(self) -> None:
        """Do nothing: graphs read all weights in place."""

    def step(self, ids_B1: Tensor, state: LMState) -> tuple[Tensor, Tensor, LMState] | None:
        """Read a token in each row after `state`, which is used up: (the head's input [B,D], logits [B,V], the new
        state). None for a step that is left to the modules; the state is then as it was."""
        if ids_B1.device != self.device or ids_B1.ndim != 2 or ids_B1.shape[1] != 1:
            return None
        with self._lock:
            if not self.witness.stands:  # a graph would read memory that holds no weights any more
                self._made.clear()
                self._latest = None
                return None
            if self._latest is None or not self._latest.at(state):
                self._latest, state = self._taken(state)
            now = self._latest
            return None if now is None or len(ids_B1) != now.batch_size else now.step(ids_B1, state)

    @torch.inference_mode(False)  # compilers do not support inference tensors
    @torch.no_grad()
    def _taken(self, state: LMState) -> "tuple[Step | None, LMState]":
        """The graph for a state of these shapes, and the state in its memory, to go on from; or None and the state."""
        for key, there in self._made.items():
            if there is not None and there.at(state):
                self._made[key] = self._made.pop(key)  # in order of use
                return there, state
        model = self._model()
        assert model is not None
        model.own(state)
        state = with_caches(state, Cache.whole)
        parts, spec = pytree.tree_flatten(state, is_leaf=is_cache)
        if any(x.device != self.device for x in tensors(state)) or any(c.used == 0 for c in caches(state)):
            return None, state
        shapes = tuple(_shape(part) for part in parts)
        key = threading.get_ident(), spec, *shapes
        kind = spec, state.batch_size > 1, *(dtype for _, dtype in shapes)
        idle = (k for k, made in self._made.items() if k[1:] == key[1:] and made is not None and made.idle)
        if key not in self._made and (other := next(idle, None)) is not None:
            self._made[key] = self._made.pop(other)
        if key not in self._made:
            self._asked[key] += 1
            if self._asked[key] <= PATIENCE:
                return None, state
            self._made[key] = None if kind in self._refused else self._captured(model, state, kind)
        made = self._made[key] = self._made.pop(key)
        self._shrink()
        if made is None:
            return None, state
        if (taken := made.take(state)) is None:
            del self._made[key], self._asked[key]  # its memory is left to its users
            return None, state
        return (made, taken) if made.left > 0 else (None, state)

    def _captured(self, model: LanguageModel, state: LMState, kind: Any) -> "Step | None":
        """Capture a graph; None if that fails. A failure is final for states of this kind in all shapes, unless memory
        was short or shapes may still settle. Logs the reason, as a warning once per model."""
        try:
            return self.made(model, state)
        except torch.OutOfMemoryError:
            reason: Exception = Unrecordable("too little memory for another state of this size")
        except Exception as why:  # whatever it was, the modules can do it
            self._unsettled[kind] += isinstance(why, Unsettled)
            if isinstance(why, Unsettled) and self._unsettled[kind] <= MOST_UNSETTLED:
                return None
            self._refused.add(kind)
            reason = why
        said = log.info if self.told == str(reason) else log.warning
        said("steps of %s run without a graph, several times slower: %s", model.config.name, reason)
        self.told = str(reason)
        return None

    def _shrink(self) -> None:
        """Drop the graphs that were used least recently, but never the latest."""
        *idle, _ = self._made
        held = sum(made.nbytes for made in map(self._made.__getitem__, idle) if made is not None)
        for key in idle:
            if len(self._made) <= MOST_GRAPHS and held <= MOST_IDLE:
                return
            made = self._made.pop(key)
            held -= 0 if made is None else made.nbytes


class Step:
    """A captured step of batches whose state has these shapes. The state of the text that took it last is in its
    memory; when another text takes it, that state moves elsewhere. left: number of tokens that it has room for."""

    asks = True
    """True if operations for which the host waits on the device are looked for before capturing."""

    def __init__(self, model: LanguageModel, state: LMState) -> None:
        self.batch_size, self.left = state.batch_size, 0
        self._positions, self._number = model.config.positions, model.number
        self._static = with_caches(like(state, self.batch_size, _room), _open)
        self._bases = bases = tensors(self._static)
        self.nbytes = sum(x.nbytes for x in bases)
        self._ids_B1 = ids_B1 = torch.ones(self.batch_size, 1, dtype=torch.int64, device=model.device)
        self._hidden_BD, self._logits_BV = hidden_BD, logits_BV = [
            torch.zeros(self.batch_size, n, dtype=model.dtype, device=model.device)
            for n in (model.config.d_model, model.config.vocab_size)
        ]
        body = _body(model, self._static)
        step = self.program(body, (ids_B1, *bases))

        @torch.inference_mode(False)
        @torch.no_grad()
        def run(step: Body = step) -> None:
            for into, x in zip((hidden_BD, logits_BV), step(ids_B1, *bases), strict=True):
                into.copy_(x)

        self._graph = Graph(run, model.device, asks=self.asks)
        self._handed: Callable[[], LMState | None] = _gone
        self._thread = threading.get_ident()  # of the last step
        self._leaves, self._caches = list[Any](), list[Any]()
        self._holders = [_holders(x) for x in bases]
        self._check(model.config.vocab_size, lambda: run(body))

    def program(self, body: Body, given: tuple[Tensor, ...]) -> Body:
        """The function that is captured for a step's body, called with `given`."""
        return body

    def near(self, found: Tensor, wanted: Tensor) -> bool:
        return near(found, wanted)

    def _check(self, V: int, modules: Callable[[], None]) -> None:
        """Raise Unrecordable unless some steps, with different tokens, give the same as the modules."""

        def said(step: Callable[[], None]) -> list[Tensor]:
            found = list[Tensor]()
            fill(self._static)
            for id in (0, V - 1, V // 2):
                self._ids_B1.fill_(id)
                step()
                found += [self._hidden_BD.clone(), self._logits_BV.clone()]
            return found + [x.clone() for x in self._bases if self.nbytes <= MOST_COMPARED]

        both = zip(said(self._graph.replay), said(modules), strict=True)
        if not all(torch.equal(*pair) or self.near(*pair) for pair in both):
            raise Unrecordable("it does not give what the modules give")

    def at(self, state: LMState) -> bool:
        """True if the next step continues this very state, and there is room for a token."""
        return self.left > 0 and self._handed() is state

    @property
    def idle(self) -> bool:
        """True if nothing refers to the tensors of the state that was handed out any more."""
        return all(leaf() is None for leaf in self._leaves)

    def take(self, state: LMState) -> LMState | None:
        """Continue from a copy of this state in the graph's memory: the copy, or None if others cannot give that memory
        up."""
        if not self._left(tensors(state)):
            return None
        parts, spec = pytree.tree_flatten(state, is_leaf=is_cache)
        own = pytree.tree_leaves(self._static, is_leaf=is_cache)
        taken = [_copied(*both) for both in zip(own, parts, strict=True)]
        handed: LMState = dataclasses.replace(pytree.tree_unflatten(taken, spec), model=self._number)
        self._handed = weakref.ref(handed)
        self._leaves = [weakref.ref(x) for x in tensors(handed)]
        self._caches = [weakref.ref(cache) for cache in caches(handed)]
        self.left = min((cache.slots - cache.used for cache in caches(handed)), default=sys.maxsize)
        if handed.length_B is not None:
            self.left = min(self.left, self._positions - int(handed.length_B.max()))
        return handed

    def _left(self, coming: list[Tensor]) -> bool:
        """Move the state that was handed out to memory of its own, if it is still in use. False if there is no memory
        for it, another thread may be reading it, or the graph's memory has views besides those of the coming state,
        which may be the same one after the modules have continued it."""
        alive = [(i, x) for i, leaf in enumerate(self._leaves) if (x := leaf()) is not None]
        if alive and self._thread != threading.get_ident():
            return False
        try:
            own = [self._bases[i].clone() for i, _ in alive]
        except torch.OutOfMemoryError:  # before any has moved
            return False
        for (_, x), place in zip(alive, own, strict=True):
            x.set_(place)
        self._handed, self._leaves, self._caches, self.left = _gone, [], [], 0
        pairs = zip(self._bases, coming, self._holders, strict=True)
        return all(_holders(base) == count + _same(base, x) for base, x, count in pairs)

    def step(self, ids_B1: Tensor, state: LMState) -> tuple[Tensor, Tensor, LMState]:
        """`Graphs.step` from the state that was taken."""
        self._ids_B1.copy_(ids_B1)
        self._thread = threading.get_ident()
        self._graph.replay()
        torch.autograd.graph.increment_version(self._bases)  # what autograd has saved of the state is gone
        self.left -= 1
        for known in self._caches:  # no other state has them: they were made when this one was taken
            if (cache := known()) is not None:
                object.__setattr__(cache, "used", cache.used + 1)
        return self._hidden_BD.clone(), self._logits_BV.clone(), state


def _body(model: LanguageModel, static: LMState) -> Callable[..., tuple[Tensor, Tensor]]:
    """The step as a function of the ids [B,1] and the tensors of the state, which it updates in place: (the head's
    input [B,D], logits [B,V])."""
    known, (leaves, spec) = weakref.ref(model), pytree.tree_flatten(static)

    def step(ids_B1: Tensor, *bases: Tensor) -> tuple[Tensor, Tensor]:
        now, each = known(), iter(bases)
        assert now is not None
        state: LMState = pytree.tree_unflatten(
            [next(each) if isinstance(x, Tensor) else x for x in leaves], spec
        )
        with capturing():
            hidden_B1D, after, _ = now.hidden(ids_B1, state, consume_state=True)
            logits_BV = now.head(hidden_B1D[:, 0])
        ends = tensors(after)
        settled([*bases], ends)
        for base, end in zip(bases, ends, strict=True):
            if memory(end) != memory(base):
                base.copy_(end)
            elif (base.storage_offset(), base.stride()) != (end.storage_offset(), end.stride()):
                raise Unrecordable("a state that moves in its memory")
        return hidden_B1D[:, 0], logits_BV

    return step


class Graph:
    """CUDA graph of a function without arguments: `replay` changes the device's memory as the function does. The
    function must not wait for the device or copy to it; asks: look for that first. Unrecordable: it does."""

    def __init__(self, run: Callable[[], None], device: torch.device, *, asks: bool = True) -> None:
        self._device, stream = device, _side(device)
        with torch.cuda.device(device):
            if asks:
                with _Unasked():
                    run()
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(
                        2
                    ):  # first calls of libraries and compilers do things that a capture forbids
                        run()
            finally:  # from now on others may reuse its memory
                current.wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                    run()
            finally:  # a capture that fails may leave its own stream the current one
                torch.cuda.set_stream(current)

    def replay(self) -> None:
        """Run the graph on the current stream."""
        with torch.cuda.device(self._device):
            self._graph.replay()


@cache
def _side(device: torch.device) -> Any:
    """The stream of all captures on a device: each stream has working memory of its own."""
    return torch.cuda.Stream(device)


class _Unasked(Mode):
    """Context in which an operation raises Unrecordable if the host waits for it, or its numbers come from another
    device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ASKED:
            raise Unrecordable(f"{name}, for which the host waits")
        out = func(*args, **(kwargs or {}))
        met = [x for x in pytree.tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        places = {x.device.type for x in met if x.ndim > 0 or x.device.type != "cpu" or name in COPIES}
        if len(places) > 1 or (name == "lift_fresh" and places - {"cpu"}):
            raise Unrecordable(f"{name} between devices")
        return out


def _room(cache: Cache) -> int:
    """Number of slots that a cache has in a graph, at least one of them free."""
    step = max(LEAST_SLOTS, (1 << cache.used.bit_length()) // 8)
    return (cache.used // step + 1) * step


def _open(cache: Cache) -> Cache:
    """The cache as the modules see it in a graph: they write where its length says, and read all slots."""
    return dataclasses.replace(cache, used=cache.slots - 1)


def _shape(part: Any) -> tuple[Any, Any]:
    """The shape and the dtype of a part of a state that a graph depends on."""
    if isinstance(part, Cache):
        B, H, _, K = part.k_BHSK.shape
        return (B, H, _room(part), K, part.v_BHSV.shape[3]), part.k_BHSK.dtype
    return (part.shape, part.dtype) if isinstance(part, Tensor) else (part, None)


def _copied(own: Any, part: Any) -> Any:
    """Copy a part of a state into the graph's memory, `own`."""
    if isinstance(part, Cache):
        for base, x in ((own.k_BHSK, part.k_BHSK), (own.v_BHSV, part.v_BHSV)):
            base[:, :, : part.used].copy_(x[:, :, : part.used])
            base[:, :, part.used :].zero_()  # free slots must hold finite numbers
        own.length_B.copy_(part.length_B)
        return Cache(own.k_BHSK.detach(), own.v_BHSV.detach(), own.length_B.detach(), part.used)
    return own.copy_(part).detach() if isinstance(part, Tensor) else part


def _holders(x: Tensor) -> int:
    """Number of references to a tensor's storage, those of its other views included."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))


def _same(x: Tensor, y: Tensor) -> bool:
    """True if two tensors are the same view of the same memory."""
    places = [(memory(z), z.storage_offset(), z.shape, z.stride()) for z in (x, y)]
    return places[0] == places[1]


def _gone() -> None:
    """A weak reference to nothing: always None."""
