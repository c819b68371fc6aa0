"""States of prefixes, kept by what was read: the longest one that a prompt begins with is not read again.

The key of a state is a chain of digests over the model and the tokens, a link for each `chunk` tokens (a cell) and one
for those of the last cell. Prompts are read alone and cut at multiples of `chunk`, wherever they were cut before, so
that prompts that share a beginning share its calls: equal keys are equal calls, in equal order, and so equal bits.
Where a model's prompts have the same bits wherever they are cut (`decode.anywhere`), states are kept at other places
too: at the end of each prompt, and where a text parts from those that were read before it.

Two tiers: states in memory, and files on disk whose index is a database that several processes may share.
"""

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File

import torch
from torch import Tensor

from perspectron import native
from perspectron.decode.anywhere import measured
from perspectron.decode.disk import Counters, Disk, Prefix, saved
from perspectron.decode.kept import Account, Hold, bytes_of
from perspectron.decode.known import Known
from perspectron.decode.marks import settle
from perspectron.decode.places import Path
from perspectron.decode.reading import CHUNK
from perspectron.decode.shared import Shared
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.config import require, require_whole
from perspectron.util.errors import StateError
from perspectron.util.objects import Objects

FORMAT = "perspectron-prefix-2"
WORTHWHILE = 16
"""Minimum number of tokens by which a new place must exceed the longest stored one."""


@dataclass
class _Entry:
    prefix: Prefix
    place: tuple[bytes, int]
    """Key of the cell in which the prefix ends, and its number of tokens in that cell."""
    hold: Hold
    size: int
    """Bytes that it added to those in use."""
    parent: bytes
    """Key of the entry from which this one would be computed again; empty if there is none."""
    clock: float


SAMPLED = 64
"""How many numbers of each tensor are compared to detect that weights have changed."""


class Frozen:
    """A model whose weights must not change while states of it are kept: its fingerprint, a digest of all weights, is
    taken once."""

    def __init__(self, model: LanguageModel) -> None:
        self.config, self._model, self._digest = model.config, weakref.ref(model), model.fingerprint()
        self.init_state, self._sampled = model.init_state, _sampled(model)
        self.number = model.number

    def fingerprint(self) -> str:
        """The digest. StateError as `check`."""
        self.check()
        return self._digest

    def check(self) -> None:
        """StateError if the weights have changed. Some numbers of each tensor are compared, since training changes them
        everywhere; a few others changed by hand go unnoticed."""
        if (model := self._model()) is not None and _sampled(model) != self._sampled:
            raise StateError("the weights have changed since the store of prefixes was made: make a new one")


def _sampled(model: LanguageModel) -> bytes:
    parts = [x.detach().reshape(-1) for x in (*model.parameters(), *model.buffers()) if x.numel() > 0]
    parts = [x[:: -(-len(x) // SAMPLED)] for x in parts]
    return b"" if not parts else torch.cat([x.double() for x in parts]).cpu().numpy().tobytes()


class PrefixStore:
    """States of what a model has read, kept by prefix: within `memory_bytes` in memory, and within `disk_bytes` in
    `folder` or in `shared`, a store that several machines see. What counts is the memory that the states hold: cache
    entries of a common beginning count once (`decode.kept`).

    An entry is worth the seconds it saves over the nearest shorter one that is stored, per byte; the one worth least
    goes first, and what was not asked for since others went counts less (GreedyDual-Size: Cao and Irani 1997).

    The disk's tier may be shared by any number of processes; one that is killed loses at most the entry that it was
    writing. A file that is damaged or of something else is dropped, counted and computed again; if the disk is full or
    the index cannot be read, the store goes on without them. For one thread at a time; others may read its counters.
    StorageError: `folder` cannot be made.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        chunk: int = CHUNK,
        memory_bytes: int = 256 << 20,
        folder: File | None = None,
        disk_bytes: int = 4 << 30,
        shared: Objects | None = None,
    ) -> None:
        require_whole("chunk", chunk, 1)
        require(memory_bytes >= 0, "memory_bytes", memory_bytes, "≥ 0")
        self.model, self.chunk, self.memory_bytes = Frozen(model), chunk, memory_bytes
        said = [FORMAT, self.model.fingerprint(), "", chunk, model.device.type, *_arithmetic()]
        self.root = hashlib.sha256(json.dumps(said).encode()).digest()
        self.anywhere = measured(model, chunk)
        self.counters, self.known = Counters(), Known()
        self._entries: dict[bytes, _Entry] = {}
        self._lengths = dict[bytes, Counter[int]]()
        """By the key of a cell: offsets in tokens at which states are stored, and how many at each."""
        self._account, self._clock = Account(0), 0.0
        self._disk: Disk | Shared | None = None
        if shared is not None:
            self._disk = Shared(shared, disk_bytes, self.model, self.counters)
        elif folder is not None:
            self._disk = Disk(File(folder), disk_bytes, self.model, self.counters)

    @property
    def used_bytes(self) -> int:
        """The bytes in memory now, those that several states share once."""
        return self._account.bytes

    def __len__(self) -> int:
        """Entries in memory."""
        return len(self._entries)

    def path(self, ids: Sequence[int], *, reset: int | None = None) -> Path:
        """The places of a text that is read from its start. reset: the token before which all is forgotten."""
        return Path(self.root, ids, self.chunk, anywhere=self.anywhere, reset=reset)

    def find(self, path: Path, *, most: int, least: int = 0, meanwhile: bool = False) -> Prefix | None:
        """The longest stored prefix of a text, of more than `least` and at most `most` tokens, whose state is to be
        used up; None if there is none. meanwhile: look only in memory, where a miss is not counted. StateError: the
        model's weights have changed."""
        self.model.check()
        found = self._first(path, self._places(path, most, least, not meanwhile), not meanwhile)
        if found is not None:
            self.counters.hits += 1
            self.counters.tokens_saved += found.tokens - least
        elif not meanwhile:
            self.counters.misses += 1
        return found

    def first(self, path: Path, places: Iterable[int]) -> Prefix | None:
        """The state at the first of these places of a text at which there is one. StateError as `find`."""
        self.model.check()
        return self._first(path, places, True)

    def part(self, path: Path, least: int) -> int | None:
        """The place at which to store a state since this text parts there from all texts read before it; None if it is
        less than WORTHWHILE tokens after `least`, where there is a state, or if none may or need be stored there. A
        text that may be cut within cells then counts as read, too."""
        if path.exact == 0:
            return None
        at = min(self.known.add(path), path.exact)
        return at if at % self.chunk and at - least >= WORTHWHILE and at < len(path.ids) else None

    def put(self, path: Path, at: int, state: LMState, last_1D: Tensor, seconds: float) -> None:
        """Store a copy of the state after the first `at` tokens, unless `last_1D` is not finite: whoever meets such
        numbers shall compute them. StateError as `find`."""
        self.model.check()
        key = path.key(at)
        if key in self._entries or not bool(last_1D.isfinite().all()):
            return
        prefix = Prefix(at, state, last_1D, seconds)
        self._remember(path, key, prefix)
        if self._disk is not None:
            self._disk.put(path, prefix)

    def close(self) -> None:
        """Close the files or the shared store."""
        if self._disk is not None:
            self._disk.close()

    def _first(self, path: Path, places: Iterable[int], disk: bool) -> Prefix | None:
        for at in places:
            if (entry := self._entries.get(path.key(at))) is not None:
                entry.clock, own = self._clock, entry.prefix
                return replace(own, state=own.state.fork(), last_1D=own.last_1D.clone())
            prefix = self._disk.get(path, at) if disk and self._disk is not None else None
            if prefix is not None:
                prefix = replace(prefix, tokens=at)
                self._remember(path, path.key(at), prefix)
                return prefix
        return None

    def _places(self, path: Path, most: int, least: int, disk: bool) -> Iterator[int]:
        """Places at which there may be a state, the longest first."""
        there = self._disk.lengths(path) if disk and self._disk is not None else {}
        return path.places(most, least, self._lengths, there)

    def _remember(self, path: Path, key: bytes, prefix: Prefix) -> None:
        """Keep a copy in memory, unless an entry worth more would have to go, or it has no room at all."""
        at, used = prefix.tokens, self.used_bytes
        shorter = (path.key(place) for place in self._places(path, at - 1, 0, False))
        parent = next((k for k in shorter if k in self._entries), b"")
        prefix = replace(prefix, state=prefix.state.fork(), last_1D=prefix.last_1D.clone())
        if bytes_of(prefix.state) + prefix.last_1D.nbytes > self.memory_bytes:
            return  # it would have to go after all others
        hold = Hold(self._account, prefix.state, prefix.last_1D)
        entry = _Entry(prefix, path.place(at), hold, max(1, self.used_bytes - used), parent, self._clock)
        while self.used_bytes > self.memory_bytes:
            least = min(self._entries, key=lambda k: self._worth(self._entries[k]), default=None)
            if least is None or self._worth(self._entries[least]) > self._worth(entry):
                hold.let_go()
                return
            if least == entry.parent:
                entry.parent = self._entries[least].parent
            self._evict(least)
            settle()
        self._entries[key] = entry
        cell, length = entry.place
        self._lengths.setdefault(cell, Counter())[length] += 1

    def _worth(self, entry: _Entry) -> float:
        parent = self._entries.get(entry.parent)
        return (
            entry.clock + saved(entry.prefix.seconds, parent.prefix.seconds if parent else 0.0) / entry.size
        )

    def _evict(self, key: bytes) -> None:
        entry = self._entries[key]
        self._clock = max(self._clock, self._worth(entry))
        del self._entries[key]
        entry.hold.let_go()
        cell, length = entry.place
        self._lengths[cell][length] -= 1
        if not +self._lengths[cell]:
            del self._lengths[cell]
        self.counters.evicted += 1
        for other in self._entries.values():
            if other.parent == key:
                other.parent = entry.parent


def _arithmetic() -> list[str | int | bool]:
    """Everything that bits depend on besides the weights and the tokens: kernels, instruction sets, threads, denormal
    numbers."""
    isa = native.isa() if native.available() else "none"
    tiny = bool((torch.tensor(1e-39) * 1.0) != 0)
    cpu = torch.backends.cpu.get_cpu_capability()
    return [torch.__version__, cpu, isa, torch.get_num_threads(), native.threads(), tiny]
