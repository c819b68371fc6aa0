"""Batches of ids: shuffled windows for training, and all windows in order for measuring.

Suffixes: B batch, T time.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.data.shards import Source, Split
from perspectron.data.shuffle import ORDER, shuffle
from perspectron.util.errors import DataError

IGNORE = -100
"""The target at padding, which torch's cross entropy ignores by default."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets.

    ids_BT: int64. targets_BT: int64, the id after each input, or IGNORE at padding (where the input is 0) and where it
        is of a prompt.
    starts_BT: bool, True where a document starts.
    targets: how many targets are not IGNORE.
    padding: how many tokens at the end of the last row are padding.
    ends_BT: bool, True where the target is the last id of its document; of `windows` alone.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    starts_BT: Tensor
    targets: int
    padding: int = 0
    ends_BT: Tensor | None = None

    @property
    def pad_BT(self) -> Tensor | None:
        """True at padding; None if there is none."""
        if not self.padding:
            return None
        pad_BT = torch.zeros_like(self.starts_BT)
        pad_BT[-1, -self.padding :] = True
        return pad_BT

    @property
    def reset_BT(self) -> Tensor | None:
        """`starts_BT`; None if none starts after column 0, where a state that is new is fresh anyway."""
        return self.starts_BT if bool(self.starts_BT[:, 1:].any()) else None


class _Source:
    """Windows of one of several texts in a split, in the order in which they are read: window i is its ids
    [i*T, i*T + T], of which it has (tokens - 1) // T; those of prompts alone are left out. Each pass over it has an
    order of its own. DataError: they are all left out."""

    def __init__(self, split: Split, source: Source, first: int, seq_len: int, seed: int) -> None:
        self.windows, self._there = (source.tokens - 1) // seq_len, None
        if split.learned is not None:
            self._there = split.windows_learned(seq_len, first, source.tokens)
            self.windows = len(self._there)
        if not self.windows:
            raise DataError(
                f"{_name(split, source)}: its windows are prompts alone; read longer ones (seq_len: {seq_len})"
            )
        self._first, self._seq_len, self._seed = first, seq_len, seed
        self._shuffled: tuple[int, Callable[..., NDArray[np.int64]]] = (-1, lambda i: i)

    def starts(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Starts of the windows that are read at places `at`, counted from the first pass on."""
        passes, places = np.divmod(at, self.windows)
        starts = np.empty_like(at)
        for number in np.unique(passes).tolist():
            if self._shuffled[0] != number:
                self._shuffled = (number, shuffle(self.windows, self._seed, number))
            mine = passes == number
            number = self._shuffled[1](places[mine])
            starts[mine] = (
                self._first + (number if self._there is None else self._there[number]) * self._seq_len
            )
        return starts


class Loader:
    """Endless training batches of windows of the split. Window i is the ids [i*T, i*T + T], of which there are
    (tokens - 1) // T, in each of the texts that the split was made of; those without a target are left out.

    Every epoch of one text visits every window once, in an order that depends only on (seed, epoch). Of several texts
    with weights, an epoch is as many windows as they have together, each text in its share of them: at any time within
    one window for each text. A text is read again when all of it was. A batch may span two epochs.

    `batch_size` counts the rows of all `world_size` ranks. Each rank reads an equal share, so that together they read
    what one rank would, and N ranks can resume where M stopped.

    DataError for a number out of bounds, ranks that do not divide the batch, or too little text for one window.
    """

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _at_least("batch_size", batch_size, 1)
        _at_least("seq_len", seq_len, 1)
        _at_least("seed", seed, 0)
        if not 0 <= rank < world_size:
            raise DataError(f"rank: {rank} is not between 0 and {world_size - 1}, of {world_size} ranks")
        if batch_size % world_size:
            raise DataError(
                f"batch_size: {batch_size} rows cannot be shared evenly by {world_size} ranks; "
                f"take a multiple of {world_size}"
            )
        for source in split.sources:
            if source.tokens < seq_len + 1:
                raise DataError(
                    f"{_name(split, source)}: {source.tokens} tokens, need at least {seq_len + 1} (seq_len + 1)"
                )
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.seed = seed
        self.order = ORDER
        share = batch_size // world_size
        self.epoch, self.cursor = 0, 0
        self._rows = slice(rank * share, (rank + 1) * share)
        self._split = split
        firsts = itertools.accumulate((source.tokens for source in split.sources), initial=0)
        self._sources = [
            _Source(split, source, first, seq_len, seed)
            for first, source in zip(firsts, split.sources, strict=False)
        ]
        weights = [source.weight for source in split.sources]
        # Each weight as a share of those that are left from it on.
        self._shares = [weight / sum(weights[i:]) for i, weight in enumerate(weights)]
        self.sources = _digest(split.sources) if len(split.sources) > 1 else 0
        self.text = split.digest
        self.windows = sum(source.windows for source in self._sources)

    def next_batch(self) -> Batch:
        """This rank's rows of the next `batch_size` windows: ids_BT and targets_BT with T = seq_len."""
        at = np.arange(self.batch_size) + (self.epoch * self.windows + self.cursor)
        last = int(at[-1]) + 1
        # A position stands at the end of an epoch until the next batch.
        self.epoch, self.cursor = divmod(last - 1, self.windows)
        self.cursor += 1
        return _whole(self._split, self._starts(at[self._rows]), self.seq_len)

    def _starts(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Starts of the windows that are read at places `at`: each goes to the first of the texts that is behind its
        share of what those before it left."""
        starts, mine = np.empty_like(at), np.arange(len(at))
        for source, share in zip(self._sources, self._shares, strict=True):
            low = at * share.numerator // share.denominator
            taken = (at + 1) * share.numerator // share.denominator > low
            starts[mine[taken]] = source.starts(low[taken])
            mine, at = mine[~taken], (at - low)[~taken]
        return starts

    def state_dict(self) -> dict[str, int]:
        """The loader's position, with the data and order it refers to. sources: a digest of the names, weights and
        sizes of several texts, 0 for one. text: a digest of the ids."""
        names = ("seed", "epoch", "cursor", "windows", "seq_len", "order", "sources", "text")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`; the batch size and number of ranks may differ. DataError for a state of
        other data, or an invalid one."""
        here = self.state_dict()
        state = {"text": here["text"]} | state  # which was not kept before
        if set(state) != set(here):
            raise DataError(
                f"loader state: keys are {', '.join(sorted(state))}, expected {', '.join(sorted(here))}"
            )
        if state["sources"] != here["sources"]:
            texts = ", ".join(
                f"{text.name} {float(text.weight):g}" for text in self._split.sources if text.name
            )
            raise DataError(
                f"loader state: of other texts or weights than here, {texts or 'where there is one text'}"
            )
        for name in ("seed", "windows", "seq_len", "order"):
            if state[name] != here[name]:
                raise DataError(f"loader state: {name} is {state[name]}, this loader has {here[name]}")
        if state["text"] != here["text"]:
            raise DataError(
                "loader state: of another text than here; restore the one that the run was trained on"
            )
        _at_least("loader state: epoch", state["epoch"], 0)
        if not 0 <= state["cursor"] <= self.windows:
            raise DataError(f"loader state: cursor {state['cursor']} is not between 0 and {self.windows}")
        self.epoch, self.cursor = state["epoch"], state["cursor"]


def _name(split: Split, source: Source) -> str:
    return f"{split.name} of {source.name}" if source.name else split.name


def _digest(sources: Sequence[Source]) -> int:
    """A number for texts with these names, weights and sizes."""
    lines = "\n".join(f"{text.name}={text.weight}:{text.tokens}" for text in sources)
    return int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=6).digest(), "big")


def windows(
    split: Split, *, seq_len: int, batch_size: int, limit_tokens: int | None = None, spread: bool = False
) -> Iterator[Batch]:
    """The split, or its first `limit_tokens` ids, in order: every id but the very first is a target once. With `spread`
    a limited part is whole windows from all over the split: its first documents may be unlike the rest. Of prompts and
    completions those are windows with a target: few are, where prompts are long.

    Rows follow one another in the stream; the last one is padded and the last batch may have fewer rows. The
    text predicted by a whole split is all of its `text_bytes`.
    DataError: a number out of bounds, or fewer than 2 tokens.
    """
    _at_least("batch_size", batch_size, 1)
    _at_least("seq_len", seq_len, 1)
    if limit_tokens is not None:
        _at_least("limit_tokens", limit_tokens, 2)
    tokens = split.tokens if limit_tokens is None else min(limit_tokens, split.tokens)
    if tokens < 2:
        raise DataError(f"{split.name}: {tokens} tokens, need at least 2")
    if spread and tokens < split.tokens and tokens > seq_len:
        return _spread(split, tokens // seq_len, seq_len, batch_size)
    return _in_order(split, tokens, seq_len, batch_size)


def _spread(split: Split, count: int, seq_len: int, batch_size: int) -> Iterator[Batch]:
    """`count` windows at equal distances among those with targets, or all of these where they are fewer."""
    there = split.windows_learned(seq_len)
    count = min(count, len(there))
    starts = there[[(2 * i + 1) * len(there) // (2 * count) for i in range(count)]] * seq_len
    for first in range(0, count, batch_size):
        at = starts[first : first + batch_size]
        ends = np.stack([split.ends(start + 1, start + seq_len + 1) for start in at.tolist()])
        yield replace(_whole(split, at, seq_len), ends_BT=torch.from_numpy(ends))


def _in_order(split: Split, tokens: int, seq_len: int, batch_size: int) -> Iterator[Batch]:
    for first in range(0, tokens - 1, batch_size * seq_len):
        last = min(first + batch_size * seq_len, tokens - 1)
        stream = split.read(first, last + 1)
        shape = (-(-(last - first) // seq_len), seq_len)
        ids = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        ids.flat[: last - first] = stream[:-1]
        learned = split.is_learned(first + 1, last + 1)
        targets.flat[: last - first] = np.where(learned, stream[1:], IGNORE)
        starts = np.zeros(shape, dtype=np.bool_)
        starts.flat[: last - first] = split.begins(first, last)
        ends = np.zeros(shape, dtype=np.bool_)
        ends.flat[: last - first] = split.ends(first + 1, last + 1)
        batch = _batch(ids, targets, starts)
        yield replace(batch, padding=ids.size - (last - first), ends_BT=torch.from_numpy(ends))


def _whole(split: Split, starts: NDArray[np.int64], seq_len: int) -> Batch:
    """The windows that begin there, all of whose ids have targets."""
    at = starts.tolist()
    tokens = np.stack([split.read(start, start + seq_len + 1) for start in at])
    targets = tokens[:, 1:]
    if split.learned is not None:
        learned = np.stack([split.is_learned(start + 1, start + seq_len + 1) for start in at])
        targets = np.where(learned, targets, IGNORE)
    return _batch(tokens[:, :-1], targets, np.stack([split.begins(s, s + seq_len) for s in at]))


def _batch(ids: NDArray[np.int64], targets: NDArray[np.int64], starts: NDArray[np.bool_]) -> Batch:
    return Batch(
        ids_BT=torch.from_numpy(np.ascontiguousarray(ids)),
        targets_BT=torch.from_numpy(np.ascontiguousarray(targets)),
        starts_BT=torch.from_numpy(starts),
        targets=int((targets != IGNORE).sum()),
    )


def _at_least(field: str, value: int, bound: int) -> None:
    if value < bound:
        raise DataError(f"{field}: {value} is below {bound}")
