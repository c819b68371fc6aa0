"""Decoding steps that run as a recording: one call of native code reads a token, where the modules would be hundreds of
calls of PyTorch. Layers with experts are called between parts of it.

Shapes: B batch, D model width, V vocabulary.
"""

import dataclasses
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import Array, c_int64
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.modules import module as everywhere

from perspectron import native
from perspectron.decode.ahead import Ahead, Reading
from perspectron.decode.graphs import Graphs
from perspectron.decode.held import (
    MOST_UNSETTLED,
    Unsettled,
    caches,
    fill,
    like,
    overlaid,
    settled,
    tensors,
)
from perspectron.decode.recorder import Beside, Recorder, near
from perspectron.decode.witness import Witness
from perspectron.experts.mixture import Mixed
from perspectron.experts.router import Routed
from perspectron.model.cache import LEAST_SLOTS, Cache, room_for, with_caches
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.native import tape
from perspectron.native.tape import Stale, Unrecordable, memory, places_of
from perspectron.ops.dispatch import check_consumed, owned, under_tracing

ROWS = 8
"""Rows of a larger batch that take a step together. Batches have a multiple of this many rows (`decode.batch.WIDTH`),
so that a row has the same bits in batches of any size."""
DISTURBANCE = 1e-6
"""Largest relative change of each number of a state, to see how much a model amplifies differences in last bits."""
SMALL_BYTES, MOST_BYTES = 1 << 24, 1 << 30
"""Up to the first number of bytes of a state, each recording is checked with whole states, which takes three times as
many for a moment. Up to the second, of the rows that take a step together, so is a recording of a larger state that
cannot be checked otherwise, such as one that does not update the state in place."""
MOST_RECORDINGS = 16
"""Maximum number of recordings kept for a model."""
WITNESSED = 64, 32 << 10
"""Each token compares the bytes that constants were made of: up to a 64th of the weights', or this many if more."""
log = logging.getLogger("perspectron")


def steps_of(model: LanguageModel) -> "Steps | Graphs | None":
    """The model's recordings, or on CUDA its graphs, to be asked for whenever a text begins or goes on. None where
    there can be none: on another device, on a CPU in another precision than float32 and bfloat16 (of the norms;
    matrices may be packed) or without native kernels, on CUDA with experts that are fetched, with hooks or a module's
    own `forward`, or under autocast.

    Weights may change at any time, by whatever writes into them, with a version or without: the tensors of which a
    recording has made constants are compared with each token, byte for byte, and all others are read in place. Some
    changes are noticed by this call alone, not between two tokens that follow it: other classes, methods and attributes
    of modules, tensors in other places, hooks, and the numbers of whole matrices that are computed from others (packed
    ones of DRM, parametrizations). Never noticed are functions replaced in a module of Python, and changes inside an
    object that a module holds, unless it is a list, set or dict.
    """
    found = _known.get(model)
    if found is None or not found.witness.holds(model):
        kind = Graphs if model.device.type == "cuda" else Steps
        _known[model] = found = kind(model, None if found is None else found.told)
    hooked = any(
        (found.witness.hooked, everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)
    )
    on_gpu = isinstance(found, Graphs)
    unlike = hooked or torch.is_autocast_enabled("cuda" if on_gpu else "cpu")
    if unlike or not found.plain or not (on_gpu or native.wanted()):
        return None
    found.look()
    return found


def stepped(
    model: LanguageModel, steps: "Steps | Graphs | None", ids_B1: Tensor, state: LMState
) -> tuple[Tensor, Tensor, LMState]:
    """Read a token in each row after `state`, which is used up, by a recording, a graph or the modules: (the head's
    input [B,D], logits [B,V], the new state, which may be the same object). ValueError: gradients are on. Otherwise as
    `LanguageModel.hidden`."""
    check_consumed(True)
    quiet = not under_tracing() and not torch.is_autocast_enabled(ids_B1.device.type)
    if steps is not None and quiet and (done := steps.step(ids_B1, state)) is not None:
        return done
    hidden_B1D, state, _ = model.hidden(ids_B1, state, consume_state=True)
    return hidden_B1D[:, 0], model.head(hidden_B1D[:, 0]), state


class Steps:
    """Recordings of one model's step, by the shapes of its state. plain: True if the model can have any. told: the
    reason, as last logged, why a model that could have them has none."""

    def __init__(self, model: LanguageModel, told: str | None = None) -> None:
        self._model, self.witness, self.told = weakref.ref(model), Witness(model), told
        self._routed = any(isinstance(module, Routed | Mixed) for module in model.modules())
        on_cpu = all(x.device.type == "cpu" for x in (*model.parameters(), *model.buffers()))
        self.plain = on_cpu and not self.witness.patched and model.dtype in (torch.float32, torch.bfloat16)
        self._ids = model.config.vocab_size
        self._refused, self._unsettled = set[Any](), Counter[Any]()
        self._made = dict[Any, _Recording | None]()
        self._latest: _Recording | None = None
        self.refuses = ""
        """The reason why no tokens can be read ahead; empty while they may be."""
        self._lock = threading.Lock()

    def look(self) -> None:
        """Drop recordings whose constants come from large weights that have changed."""
        with self._lock:
            for key in [key for key, made in self._made.items() if made is not None and not made.same()]:
                self._latest = None
                del self._made[key]

    def step(self, ids_B1: Tensor, state: LMState) -> tuple[Tensor, Tensor, LMState] | None:
        """Read a token in each row after `state`, which is used up: (the head's input [B,D], logits [B,V], the new
        state). None for a step that cannot be recorded; the state is then as it was."""
        ids = ids_B1.tolist()
        if not ids_B1.is_cpu or not all(len(row) == 1 and 0 <= row[0] < self._ids for row in ids):
            return None  # the modules raise the error
        with self._lock:
            for _ in range(2):
                now = self._latest
                if now is None or now.state is not state or now.left <= 0:
                    if now is not None:
                        now.leave()
                    self._latest = now = self._taken(state)
                try:
                    return None if now is None or len(ids) != now.batch_size else now.step(ids_B1)
                except Stale:  # nothing was written
                    self._latest = None
                    self._made.clear()
        raise RuntimeError("the model's weights change while it takes a step")

    @torch.inference_mode()
    def ahead(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], state: LMState
    ) -> tuple[Reading, LMState] | None:
        """Read several tokens in some rows after `state`, which is used up, with the bits of one step for each: the
        reading, and the state to go on with, which is as before until `Reading.keep`. Each row reads as many tokens as
        there is room for. None where that cannot be; the state may then be used as before."""
        if not all(0 <= id < self._ids for own in tokens for id in own):
            return None
        with self._lock:
            now = self._latest
            if now is None or now.state is not state:
                if now is not None:
                    now.leave()
                self._latest = now = self._taken(state)
            if now is None or now.state is None:
                return None
            now.count()
            if now.left <= 0:
                return None
            tokens = [own[: now.left] for own in tokens]
            one = self._single(now)
            try:
                if one is not None and isinstance(one.ahead, Ahead):
                    return now.read(one.ahead, rows, tokens), now.state
            except Stale:  # nothing was written
                self._latest = None
                self._made.clear()
                return None
            except Unrecordable as reason:
                assert one is not None
                one.ahead = reason.with_traceback(None)  # whose frames hold the model
            self.refuses = "its steps have no recording of one row" if one is None else str(one.ahead)
        return None

    def holds(self, state: LMState) -> bool:
        """True if the latest recording continues this very state, in its memory."""
        return self._latest is not None and self._latest.state is state

    def _single(self, now: "_Recording") -> "_Recording | None":
        """The recording of a single row, for the state that the recording `now` continues."""
        assert now.state is not None
        if now.batch_size == 1:
            return now
        model, own = self._model(), _bare(_alone(now.state)).picked([0])
        assert model is not None
        kind = pytree.tree_structure(own), False, *(x.dtype for x in tensors(own))
        key = kind, 1, *(x.shape[1:] for x in tensors(own))
        if key not in self._made:
            self._made[key] = (
                None if self._routed or kind in self._refused else self._recorded(model, own, 1, kind)
            )
        return self._made[key]

    @torch.inference_mode()
    def _taken(self, state: LMState) -> "_Recording | None":
        """The recording for a state of these shapes, which continues it; None if there is none."""
        model, B = self._model(), state.batch_size
        assert model is not None
        model.own(state)
        if any(x.device.type != "cpu" for x in tensors(state)):
            return None
        rows = B if self._routed else min(B, ROWS)  # the weights of an expert are read once for all rows
        if B % rows or any(cache.blank for cache in caches(state)):
            return None
        state = _roomy(state)
        leaves, spec = pytree.tree_flatten(_alone(state))
        leaves = [owned(x, True).contiguous() if isinstance(x, Tensor) else x for x in leaves]
        own: LMState = dataclasses.replace(pytree.tree_unflatten(leaves, spec), model=model.number)
        parts = tensors(own)
        kind = spec, B > 1, *(x.dtype for x in parts)
        key = kind, rows, *(x.shape[1:] for x in tensors(_bare(own)))
        if key not in self._made:
            self._made[key] = None if kind in self._refused else self._recorded(model, own, rows, kind)
        recording = self._made[key] = self._made.pop(key)  # in order of use
        if len(self._made) > MOST_RECORDINGS:
            del self._made[next(iter(self._made))]
        if recording is not None:
            pieces = iter([cache.shared for cache in caches(state)])
            recording.take(with_caches(own, lambda cache: dataclasses.replace(cache, shared=next(pieces))))
            if recording.left <= 0:
                recording.leave()
                return None
        return recording

    def _recorded(self, model: LanguageModel, state: LMState, rows: int, kind: Any) -> "_Recording | None":
        """Make a recording; None if that fails. A failure is final for states of this kind in all shapes, unless one
        was recorded before or shapes may still settle. Logs the reason, as a warning once per model."""
        try:
            return _Recording(model, state, rows)
        except Exception as reason:  # whatever it was, the modules can do it
            self._unsettled[kind] += isinstance(reason, Unsettled)
            if isinstance(reason, Unsettled) and self._unsettled[kind] <= MOST_UNSETTLED:
                return None
            if not any(made is not None and key[0] == kind for key, made in self._made.items()):
                self._refused.add(kind)
            said = log.info if self.told == str(reason) else log.warning
            said("steps of %s run without a recording, several times slower: %s", model.config.name, reason)
            self.told = str(reason)
            return None


_known: "weakref.WeakKeyDictionary[LanguageModel, Steps | Graphs]" = weakref.WeakKeyDictionary()


def _disturbed(model: LanguageModel, state: LMState, ids: Sequence[int], rows: int) -> list[Tensor]:
    """The modules' outputs and state after these tokens, from a state that is changed by up to DISTURBANCE."""
    for x in {x.data_ptr(): x for x in tensors(state)}.values():  # layers may share one memory
        if x.is_floating_point():
            random = torch.Generator(x.device).manual_seed(0)
            x.mul_(1 + torch.empty_like(x).uniform_(-DISTURBANCE, DISTURBANCE, generator=random))
    for id in ids:
        hidden_B1D, state, _ = model.hidden(torch.full((rows, 1), id), state, consume_state=True)
    return [hidden_B1D[:, 0], model.head(hidden_B1D[:, 0]), *_filled(state)]


class _Recording:
    """A recorded step of `rows` rows whose state has these shapes. state: that of all rows, which the next step
    continues. batch_size: rows of that state. left: tokens that it has room for, in positions and slots of caches."""

    def __init__(self, model: LanguageModel, state: LMState, rows: int) -> None:
        self.state: LMState | None = None
        self._rows = rows
        self._positions = model.config.positions
        large = state.nbytes > SMALL_BYTES and not caches(state) and state.length_B is None
        traced = overlaid(state, rows) if large else like(state, rows, lambda _: LEAST_SLOTS)
        bases, ids_B1 = tensors(traced), torch.ones(rows, 1, dtype=torch.int64)
        hidden_BD, logits_BV = (
            torch.empty(rows, n, dtype=model.dtype) for n in (model.config.d_model, model.config.vocab_size)
        )
        rings = [x for cache in caches(traced) for x in (cache.k_BHSK, cache.v_BHSV)]
        table_LB3 = torch.zeros(len(rings) // 2, rows, 3, dtype=torch.int64)
        recorder = Recorder([ids_B1, hidden_BD, logits_BV, *bases, table_LB3], rings, table_LB3)
        recorder.rehearses = True
        with recorder:
            hidden_B1D, after, _ = model.hidden(ids_B1, traced, consume_state=True)
            hidden_BD.copy_(hidden_B1D[:, 0])
            logits = model.head(hidden_B1D[:, 0])
            if not recorder.tape.give(logits, logits_BV):
                logits_BV.copy_(logits)
        self._tape = recorder.tape
        self._hidden_BD, self._logits_BV = hidden_BD, logits_BV
        self._apart = [x.nbytes for x in (ids_B1, hidden_BD, logits_BV)]
        settled(bases, tensors(after))
        copies = list[int]()
        for base, end in zip(bases, tensors(after), strict=True):
            if memory(end) != memory(base):
                copies.append(len(self._tape))
                tape.each(self._tape, "copy", base, end)
            elif base.data_ptr() != end.data_ptr() or base.stride() != end.stride():
                raise Unrecordable("a state that moves in its memory")
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        self._tape.done(recorder.read, max(weights // WITNESSED[0], WITNESSED[1]))
        self.same = self._tape.same
        ends = zip(bases, tensors(after), strict=True)
        in_place = not any(x.is_floating_point() and memory(end) != memory(x) for x, end in ends)
        if large and in_place:
            self._check(model, fill(traced), lambda: overlaid(state, rows))
        else:
            bare = _bare(state)
            if bare.nbytes // state.batch_size * rows > MOST_BYTES:
                raise Unrecordable("a state of too many bytes")
            # Another number of slots than was recorded, so that a tape that depends on it is refused.
            made = partial(like, bare, rows, lambda _: 2 * LEAST_SLOTS)
            self._check(model, made(), made)
        recorder.rehearses = False
        self.ahead: Ahead | Unrecordable | None = None
        if rows == 1:
            try:
                self.ahead = Ahead(self._tape, [ids_B1, hidden_BD, logits_BV, *bases, table_LB3], copies)
            except Unrecordable as reason:
                self.ahead = reason.with_traceback(None)  # whose frames hold the model
        self._tape.pack()
        self.leave()

    def _check(self, model: LanguageModel, recorded: LMState, made: Callable[[], LMState]) -> None:
        """Raise Unrecordable unless two steps, with different tokens, give the same as the modules, both without what
        is called aside. Packed products round their inputs to 8 bits, others to bfloat16: a number with another last
        bit may round another way, and the next layers amplify that. With these the two run side by side (`Beside`), and
        the modules go on with the recording's results. made: makes the state that both begin with."""
        together, given = self._tape.calls or self._tape.rounded, made()
        self.take(recorded)
        for steps, id in enumerate(asked := (0, model.config.vocab_size - 1), 1):
            ids_B1, wanted = torch.full((self._rows, 1), id), list[Tensor]()

            def modules(ids_B1: Tensor = ids_B1, wanted: list[Tensor] = wanted) -> None:
                nonlocal given
                hidden_B1D, given, _ = model.hidden(ids_B1, given, consume_state=True)
                wanted += [hidden_B1D[:, 0], model.head(hidden_B1D[:, 0])]

            def beside(places: Array[c_int64], modules: Callable[[], None] = modules) -> None:
                with Beside(self._tape, places):
                    modules()

            if not together:
                modules()
            hidden_BD, logits_BV, recorded = self.step(ids_B1, beside if together else self._tape.run)
            wanted += _filled(given)
            found = [hidden_BD, logits_BV, *_filled(recorded)]
            both = zip(found, wanted, strict=True)  # layers in one memory are looked at once
            apart = {(a.data_ptr(), b.data_ptr(), a.shape): (a, b) for a, b in both}
            if not all(near(*pair) for pair in apart.values()) and (
                together
                or not self._as_near(found, wanted, _disturbed(model, made(), asked[:steps], self._rows))
            ):
                raise Unrecordable("it does not give what the modules give")

    @staticmethod
    def _as_near(found: list[Tensor], wanted: list[Tensor], moved: list[Tensor]) -> bool:
        """True if the recording differs from the modules at most four times as much as the modules do from themselves
        when they begin with a disturbed state: deep models amplify differences in a last bit."""
        return all(
            float((a - b).abs().max()) <= 4 * float((c - b).abs().max())
            for a, b, c in zip(found, wanted, moved, strict=True)
            if not near(a, b)
        )

    def take(self, state: LMState) -> None:
        """Continue from this state; steps write into its memory from now on."""
        self.state, self.batch_size, self._caches = state, state.batch_size, caches(state)
        self.count()
        if self._caches:
            self._tape.stretch(self._caches[0].slots)
        self._leaves, groups = tensors(_alone(state)), range(0, self.batch_size, self._rows)
        self._tables = [self._table(first) for first in groups]
        starts = [table.rows_LB3.ctypes.data for table in self._tables]
        self._places = [
            places_of([0, 0, 0, *(x.data_ptr() + first * x[:1].nbytes for x in self._leaves), start])
            for first, start in zip(groups, starts, strict=True)
        ]

    def _table(self, first: int) -> tape.Table:
        """Table of the cache pieces (`tape.Table`) of the group of rows that begins with `first`."""
        rows = [
            cache.shared[first : first + self._rows] if cache.shared else ((),) * self._rows
            for cache in self._caches
        ]
        layers = [[[piece.place for piece in pieces] for pieces in layer] for layer in rows]
        return tape.table_of(
            layers, [[sum(piece.tokens for piece in pieces) for pieces in layer] for layer in rows]
        )

    def leave(self) -> None:
        """Release the state."""
        self.state, self._caches, self._leaves = None, [], list[Tensor]()
        self._tables = list[tape.Table]()

    def count(self) -> None:
        """Set `left`, the number of tokens that there is room for."""
        assert self.state is not None
        self.left = min((cache.slots - cache.used for cache in self._caches), default=sys.maxsize)
        if self.state.length_B is not None:
            self.left = min(self.left, self._positions - int(self.state.length_B.max()))

    def read(self, ahead: Ahead, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Reading:
        """`Steps.ahead` from the state that was taken."""
        like, state = (self._hidden_BD, self._logits_BV), self.state

        def kept() -> None:
            if self.state is state:
                self.count()

        return Reading(ahead, rows, tokens, self._leaves, self._caches, like, kept)

    def step(
        self, ids_B1: Tensor, run: Callable[[Array[c_int64]], None] | None = None
    ) -> tuple[Tensor, Tensor, LMState]:
        """`Steps.step` from the state that was taken. Stale: the tape cannot be used, and nothing was written."""
        assert self.state is not None
        ids_B1, B = ids_B1.long().contiguous(), self.batch_size
        hidden_BD, logits_BV = (x.new_empty(B, x.shape[1]) for x in (self._hidden_BD, self._logits_BV))
        starts = [x.data_ptr() for x in (ids_B1, hidden_BD, logits_BV)]
        for group, places in enumerate(self._places):
            places[1:4] = [start + group * apart for start, apart in zip(starts, self._apart, strict=True)]
            (run or self._tape.run)(places)
        torch.autograd.graph.increment_version(
            self._leaves
        )  # what autograd has saved of the state is overwritten
        self.left -= 1
        for cache in self._caches:  # no other state has them: they were made when this one was taken
            object.__setattr__(cache, "used", cache.used + 1)
        return hidden_BD, logits_BV, self.state


def _filled(state: LMState) -> list[Tensor]:
    """The tensors of a state; of caches, only the filled slots."""
    return tensors(state.select(range(state.batch_size)) if caches(state) else state)


def _roomy(state: LMState) -> LMState:
    """The state with a free slot in each cache, and the same number of slots in all caches."""
    if _level(state) and all(cache.used < cache.slots for cache in caches(state)):
        return state
    grown = with_caches(state, lambda cache: cache.with_room(1))
    if _level(grown):
        return grown
    most = max(max(cache.before, default=0) + cache.used for cache in caches(state))
    return with_caches(state, lambda cache: cache.whole().with_slots(room_for(most + 1)))


def _level(state: LMState) -> bool:
    """True if all caches have the same number of slots."""
    return len({cache.slots for cache in caches(state)}) <= 1


def _alone(state: LMState) -> LMState:
    """A view of the state without the pieces of its caches."""
    return with_caches(state, lambda cache: dataclasses.replace(cache, shared=()))


def _bare(state: LMState) -> LMState:
    """A view of the state without the slots of its caches, on whose number no recording depends."""

    def bared(part: Cache) -> Cache:
        return dataclasses.replace(part, k_BHSK=part.k_BHSK[:, :, :0], v_BHSV=part.v_BHSV[:, :, :0])

    return with_caches(state, bared)
