"""Steps of a model that run as a recording: one call of native code reads a token, where the modules would be hundreds
of calls of PyTorch. Layers with experts are called between parts of it.

Shapes: B batch, D model width, V vocabulary.
"""

import dataclasses
import logging
import sys
import threading
import weakref
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.modules import module as everywhere

from perspectron import native
from perspectron.decode.recorder import Recorder
from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.router import Routed
from perspectron.mixers.cache import Cache
from perspectron.model import LanguageModel
from perspectron.native import tape
from perspectron.native.tape import Unrecordable, memory, places_of
from perspectron.ops.dispatch import check_consumed, owned, watched
from perspectron.quant.linear import QuantEmbedding, QuantLinear
from perspectron.state import LMState

ROWS = 8
"""Rows of a larger batch that take a step together. Their number is a multiple of it (`decode.batch.WIDTH`), so that a
row has the same bits in batches of any size."""
TOLERANCE = 1e-4
"""A recording must give the modules' numbers up to this share of the largest."""
ROUNDED = 1e-2
"""The same with packed matrices: what they read is rounded to 8 bits, and another last bit may round another way."""
MOST_BYTES = 1 << 30
"""Bytes of a state up to which its step is recorded, which takes three times as many for a moment."""
MOST_RECORDINGS = 16
"""Recordings of a model that are kept."""
LEAST_SLOTS = 64
"""Slots of a cache that was full: it gets a power of two of them, so that few recordings do for all."""
log = logging.getLogger("perspectron")


def steps_of(model: LanguageModel) -> "Steps | None":
    """The model's recordings, as its weights are now; None where there can be none: on another device than a CPU, in
    another precision than float32 (packed matrices do not count), with experts that are fetched, with hooks that look
    on, or without native kernels. Weights that are changed through `.data` look unchanged; what was made of them alone
    stays as it was."""
    tensors, modules = [*model.parameters(), *model.buffers()], list(model.modules())
    fetched = any(isinstance(m, Routed) and not isinstance(m, RoutedSwiGLU) for m in modules)
    plain = all(x.device.type == "cpu" for x in tensors) and not fetched
    plain = plain and model.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    hooks = [(module._forward_hooks, module._forward_pre_hooks) for module in modules]
    hooked = any(map(any, [*hooks, (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)]))
    if not plain or hooked or not native.wanted():
        return None
    weights = tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors)
    if (found := _known.get(model)) is None or found.weights != weights:
        _known[model] = found = Steps(model, weights)
    return found


def stepped(
    model: LanguageModel, steps: "Steps | None", ids_B1: Tensor, state: LMState
) -> tuple[Tensor, Tensor, LMState]:
    """Read a token in each row after `state`, which is used up, by a recording or by the modules: (what the head reads
    [B,D], logits [B,V], the new state, which may be the same object). ValueError: gradients are on. Otherwise as
    `LanguageModel.hidden`."""
    check_consumed(True)
    quiet = not watched() and not torch.is_autocast_enabled("cpu")
    if steps is not None and quiet and (done := steps.step(ids_B1, state)) is not None:
        return done
    hidden_B1D, state, _ = model.hidden(ids_B1, state, consume_state=True)
    return hidden_B1D[:, 0], model.head(hidden_B1D[:, 0]), state


class Steps:
    """Recordings of one model's step, by the shapes of its state. weights: where they were, and in which version."""

    def __init__(self, model: LanguageModel, weights: tuple[tuple[int, int], ...]) -> None:
        self._model, self.weights = weakref.ref(model), weights
        self._one_row = any(isinstance(module, RoutedSwiGLU) for module in model.modules())
        self._ids = model.config.vocab_size
        self._made = dict[Any, _Recording | None]()
        self._latest: _Recording | None = None
        self._lock = threading.Lock()

    def step(self, ids_B1: Tensor, state: LMState) -> tuple[Tensor, Tensor, LMState] | None:
        """Read a token in each row after `state`, which is used up: (what the head reads [B,D], logits [B,V], the new
        state). None for a step that cannot be recorded; the state is then as it was."""
        ids = ids_B1.tolist()
        if not ids_B1.is_cpu or not all(len(row) == 1 and 0 <= row[0] < self._ids for row in ids):
            return None  # the modules say what is wrong
        with self._lock:
            now = self._latest
            if now is None or now.state is not state or now.left <= 0:
                if now is not None:
                    now.leave()
                self._latest = now = self._taken(state)
            return None if now is None or len(ids) != now.batch_size else now.step(ids_B1)

    @torch.inference_mode()
    def _taken(self, state: LMState) -> "_Recording | None":
        """The recording for a state of these shapes, which goes on from it."""
        model, B = self._model(), state.batch_size
        assert model is not None
        model.own(state)
        if state.nbytes > MOST_BYTES or any(x.device.type != "cpu" for x in _tensors(state)):
            return None
        if B > 1 and self._one_row:  # the modules read the weights of an expert once for all rows
            return None
        if (B > ROWS and B % ROWS) or any(cache.used == 0 for cache in _caches(state)):
            return None
        leaves, spec = pytree.tree_flatten(_roomy(state))
        leaves = [owned(x, True).contiguous() if isinstance(x, Tensor) else x for x in leaves]
        taken: LMState = dataclasses.replace(pytree.tree_unflatten(leaves, spec), model=model.number)
        shapes = ((x.shape[1:], x.dtype) if isinstance(x, Tensor) else None for x in leaves)
        key = (spec, min(B, ROWS), *shapes)
        if key not in self._made:
            try:
                self._made[key] = _Recording(model, taken)
            except Exception as reason:  # whatever it was, the modules can do it
                log.info("steps of %s run without a recording: %s", model.config.name, reason)
                self._made[key] = None
        recording = self._made[key] = self._made.pop(key)  # the latest is the last
        if len(self._made) > MOST_RECORDINGS:
            del self._made[next(iter(self._made))]
        if recording is not None:
            recording.take(taken)
            if recording.left <= 0:
                recording.leave()
                return None
        return recording


_known: "weakref.WeakKeyDictionary[LanguageModel, Steps]" = weakref.WeakKeyDictionary()


class _Recording:
    """The step of a few rows whose state has these shapes. state: of all rows, what the next step goes on from.
    batch_size: rows of that state. left: tokens that it has room for, in positions and in slots of caches."""

    def __init__(self, model: LanguageModel, state: LMState) -> None:
        self.state: LMState | None = None
        self._rows = rows = min(ROWS, state.batch_size)
        self._positions = model.config.positions
        traced = _like(state, rows)
        bases, ids_B1 = _tensors(traced), torch.ones(rows, 1, dtype=torch.int64)
        hidden_BD, logits_BV = (
            torch.empty(rows, n, dtype=model.dtype) for n in (model.config.d_model, model.config.vocab_size)
        )
        recorder = Recorder([ids_B1, hidden_BD, logits_BV, *bases])
        with recorder:
            hidden_B1D, after, _ = model.hidden(ids_B1, traced, consume_state=True)
            hidden_BD.copy_(hidden_B1D[:, 0])
            logits_BV.copy_(model.head(hidden_B1D[:, 0]))
        self._tape = recorder.tape
        self._hidden_BD, self._logits_BV = hidden_BD, logits_BV
        self._apart = [x.nbytes for x in (ids_B1, hidden_BD, logits_BV)]
        own = {memory(x) for x in bases}
        for base, end in zip(bases, _tensors(after), strict=True):
            if base.shape != end.shape or (memory(end) in own and memory(end) != memory(base)):
                raise Unrecordable("a state that changes its shape, or parts that change places")
            if memory(end) != memory(base):
                tape.each(self._tape, "copy", base, end)
            elif base.data_ptr() != end.data_ptr() or base.stride() != end.stride():
                raise Unrecordable("a state that moves in its memory")
        self._tape.done()
        self._check(model, _like(state, rows), _like(state, rows))
        self.leave()

    def _check(self, model: LanguageModel, recorded: LMState, given: LMState) -> None:
        """Unrecordable unless two steps, of other tokens, give what the modules give."""
        packed = any(isinstance(module, QuantLinear | QuantEmbedding) for module in model.modules())
        share = ROUNDED if packed else TOLERANCE
        self.take(recorded)
        for id in (0, model.config.vocab_size - 1):
            ids_B1 = torch.full((self._rows, 1), id)
            hidden_B1D, given, _ = model.hidden(ids_B1, given, consume_state=True)
            hidden_BD, logits_BV, recorded = self.step(ids_B1)
            rows = range(self._rows)  # selected, a cache has no more slots than are filled
            pairs = [(hidden_BD, hidden_B1D[:, 0]), (logits_BV, model.head(hidden_B1D[:, 0]))]
            pairs += zip(_tensors(recorded.select(rows)), _tensors(given.select(rows)), strict=True)
            if not all(_near(found, wanted, share) for found, wanted in pairs):
                raise Unrecordable("it does not give what the modules give")

    def take(self, state: LMState) -> None:
        """Go on from this state, whose memory is written into from now on."""
        self.state, self.batch_size, self._caches = state, state.batch_size, _caches(state)
        self.left = min((cache.slots - cache.used for cache in self._caches), default=sys.maxsize)
        if state.length_B is not None:
            self.left = min(self.left, self._positions - int(state.length_B.max()))
        leaves = _tensors(state)
        self._places = [
            places_of([0, 0, 0, *(x.data_ptr() + first * x[:1].nbytes for x in leaves)])
            for first in range(0, self.batch_size, self._rows)
        ]

    def leave(self) -> None:
        """Let go of the state."""
        self.state, self._caches = None, []

    def step(self, ids_B1: Tensor) -> tuple[Tensor, Tensor, LMState]:
        """`Steps.step`, after the state that it is at."""
        assert self.state is not None
        ids_B1, B = ids_B1.long().contiguous(), self.batch_size
        hidden_BD, logits_BV = (x.new_empty(B, x.shape[1]) for x in (self._hidden_BD, self._logits_BV))
        starts = [x.data_ptr() for x in (ids_B1, hidden_BD, logits_BV)]
        for group, places in enumerate(self._places):
            places[1:4] = [start + group * apart for start, apart in zip(starts, self._apart, strict=True)]
            self._tape.run(places)
        self.left -= 1
        for cache in self._caches:  # no other state has them: they were made when this one was taken
            object.__setattr__(cache, "used", cache.used + 1)
        return hidden_BD, logits_BV, self.state


def _like(state: LMState, rows: int) -> LMState:
    """A state of the same shapes for so many rows, whose numbers are the same whatever was read: whether a step can be
    recorded must not depend on the text. Caches have one slot filled."""

    def made(part: Any) -> Any:
        if isinstance(part, Cache):
            k, v = (x.new_zeros(rows, *x.shape[1:]) for x in (part.k_BHSK, part.v_BHSV))
            for x in (k, v):
                x[:, :, :1] = noise(x[:, :, :1])
            return Cache(k, v, part.length_B.new_ones(rows), 1)
        return noise(part[:rows]) if isinstance(part, Tensor) else part

    def noise(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.ones_like(x)
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype) - 0.5

    return state._map(made, is_leaf=lambda part: isinstance(part, Cache))


def _near(found: Tensor, wanted: Tensor, share: float) -> bool:
    found, wanted = found.double(), wanted.double()
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    return torch.allclose(found, wanted, rtol=0, atol=share * largest, equal_nan=True)


def _tensors(state: LMState) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor)]


def _caches(state: Any) -> list[Cache]:
    """The growing caches among its parts."""
    parts = pytree.tree_leaves(state, is_leaf=lambda part: isinstance(part, Cache))
    return [part for part in parts if isinstance(part, Cache)]


def _roomy(state: LMState) -> LMState:
    """The state with a free slot in each cache."""

    def grown(part: Any) -> Any:
        if not isinstance(part, Cache) or part.used < part.slots:
            return part
        return part.with_slots(1 << (max(LEAST_SLOTS, part.used + 1) - 1).bit_length())

    return state._map(grown, is_leaf=lambda part: isinstance(part, Cache))
