"""The ids that stand for no text: what begins a text, ends it, fills a batch, and begins memory anew."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perspectron.util.errors import DataError
from perspectron.util.files import read_json, read_object, write_text
from perspectron.util.schema import checked

MOST_PREFIX = 16
FILE = "specials.json"
"""File beside the tokenizer.json of a run or an artifact whose tokenizer is not of this library."""


class Specials(Struct, frozen=True, forbid_unknown_fields=True):
    """prefix: stands before every text. stops: each ends a text, and is none of it. pad: fills batches in other
    programs. reset: a model forgets what came before it, as in training; None if resets are told apart from ids. end:
    the one of `stops` at the end of each document in training; None if the next one's prefix marks the end."""

    prefix: tuple[int, ...] = ()
    stops: frozenset[int] = frozenset()
    pad: int | None = None
    reset: int | None = None
    end: int | None = None

    @property
    def silent(self) -> frozenset[int]:
        """All of them: repetition penalties and texts leave them out."""
        return self.stops.union(
            self.prefix, (id for id in (self.pad, self.reset, self.end) if id is not None)
        )

    @property
    def start(self) -> tuple[int, ...]:
        """The ids after which a text without a token is drawn: the prefix, or else the end of the text before."""
        return self.prefix or (() if self.end is None else (self.end,))

    @property
    def ended(self) -> bool:
        """False where a document ends with the id that begins the next one."""
        return self.end is not None or self.stops.isdisjoint(self.prefix[:1])

    def bare(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text without the prefix with which they may begin, as those of a chat template do."""
        n = len(self.prefix)
        return list(ids[n:] if tuple(ids[:n]) == self.prefix else ids)

    def lacks(self, ids: Sequence[int]) -> bool:
        """True if the ids of a whole text, such as a chat template makes, are to stay without the prefix: they do not
        begin with it, and no id resets memory."""
        return self.reset is None and self.bare(ids) == list(ids) and bool(self.prefix)

    def begun(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text from its beginning: the prefix, once, and the rest; or `start`."""
        return [*self.prefix, *self.bare(ids)] or list(self.start)

    def to_json(self) -> bytes:
        """The specials as JSON; equal ones give equal bytes."""
        return msgspec.json.encode(self, order="sorted")

    def save(self, path: Path) -> None:
        """Write to a file. StorageError if it cannot be."""
        write_text(path, self.to_json().decode())

    @classmethod
    def load(cls, path: Path) -> "Specials":
        """Read what `save` wrote. DataError: damaged."""
        found: Specials = checked(read_json(path, DataError), cls, DataError, f"{path}: no special ids")
        return found

    def check(self, where: object, vocab_size: int) -> None:
        """DataError: an id is not below `vocab_size`, or the prefix is longer than MOST_PREFIX."""
        if len(self.prefix) > MOST_PREFIX:
            raise DataError(f"{where}: a prefix of {len(self.prefix)} ids, must be ≤ {MOST_PREFIX}")
        for id in sorted(self.silent):
            if not 0 <= id < vocab_size:
                raise DataError(f"{where}: special id {id}, must be ≥ 0 and < {vocab_size}")


OURS = Specials((0,), frozenset((0,)), None, 0)
"""The special ids of tokenizers that this library trains: one id separates documents."""


def beside(folder: Path, ids: Mapping[str, int], prefix: Sequence[int], special: Collection[int]) -> Specials:
    """The special ids of a folder of transformers. ids: of its tokens by spelling. prefix: what the tokenizer itself
    puts first; where it puts nothing, `add_bos_token` of tokenizer_config.json may. stops: each eos of config.json,
    generation_config.json and tokenizer_config.json. special: ids of the special added tokens; the padding is one of
    them, or begins or ends texts, too: some files name an ordinary token, which texts need. DataError, naming file and
    field, for what is no token."""
    known = frozenset(ids.values())
    config, generation, own = (
        _Values(folder / f"{name}.json", ids, known)
        for name in ("config", "generation_config", "tokenizer_config")
    )
    stops = [*own.token("eos_token"), *config.ids("eos_token_id"), *generation.ids("eos_token_id")]
    if not prefix and own.values.get("add_bos_token") is True:
        prefix = own.token("bos_token")
    pad = own.token("pad_token") or [
        id
        for source in (config, generation)
        for id in source.ids("pad_token_id", unknown=True)
        if id in known
    ]
    pad = [id for id in pad if id in special or id in stops or id in prefix]
    end = stops[0] if stops and stops[0] not in prefix else None
    return Specials(tuple(prefix), frozenset(stops), pad[0] if pad else None, None, end)


class _Values:
    """The values of a file of JSON, none where it is missing."""

    def __init__(self, path: Path, ids: Mapping[str, int], known: frozenset[int]) -> None:
        self.path, self._ids, self._known = path, ids, known
        values = read_object(path, DataError)
        inner = values.get("text_config")
        self.values: dict[str, Any] = {**(inner if isinstance(inner, dict) else {}), **values}

    def ids(self, name: str, unknown: bool = False) -> list[int]:
        """An id, or a list of them; DataError for one that the tokenizer lacks, unless `unknown`."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for id in ids:
            if type(id) is not int:
                raise DataError(f"{self.path}: {name} is {value!r}, must be a whole number or a list of them")
            if not unknown and id not in self._known:
                raise DataError(f"{self.path}: {name} is {value!r}; the tokenizer has no token {id}")
        return ids

    def token(self, name: str) -> list[int]:
        """A list of the id of the token that a field spells; empty if it has none. DataError: it is not a token."""
        value = self.values.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is None:
            return []
        if not isinstance(value, str) or value not in self._ids:
            raise DataError(f"{self.path}: {name} is {value!r}, must be the spelling of a token")
        return [self._ids[value]]
