"""Conversations: everything needed to continue texts later, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perspectron.model.narrow import Dtype
from perspectron.model.state import MOST_TOKENS, LMState, Stateful, read_state, save_state
from perspectron.model.tuned import kinds_of
from perspectron.util.config import require
from perspectron.util.errors import StateError

OWN = ("conversation", "session", "log")
"""Names of a file's own entries, which a user's entries may not have."""


def beside(extra: dict[str, Any] | None) -> dict[str, Any]:
    """The user's entries for a file, empty if there are none. ConfigError: one has a name of OWN."""
    require(extra is None or isinstance(extra, dict), "extra", extra, "a dict")
    extra = extra or {}
    for name in OWN:
        require(
            name not in extra,
            "extra",
            f"{{{name!r}: …}}",
            f"without {', '.join(OWN)}, which a file has itself",
        )
    return extra


@dataclass(frozen=True)
class Conversation:
    """Everything needed to continue one or several texts. `generate` leaves it unchanged; `Rows.add` consumes it,
    because the state is updated in place.

    state: the model's state after the tokens read. pending: for each row the tokens not yet read; after `generate`
    exactly one, the last one drawn, however the row finished, or the end of its prompt if a hook stopped it before it
    drew any. Tokens of a stop string are part of the history but not of the text. After "end" the pending token is the
    one that ended it; with a tokenizer of ours the row then goes on with a new document and an empty memory. recent:
    for each row the last `repetition_window` tokens of prompts and draws (in a session's file all that are known),
    without those that begin and end texts. drawn: for each row the number of tokens drawn so far.
    """

    state: LMState
    pending: list[list[int]]
    recent: list[list[int]]
    drawn: list[int]

    @property
    def rows(self) -> int:
        """Number of texts."""
        return len(self.pending)

    @property
    def begins(self) -> bool:
        """True if this is a single row with a trained memory that has not read or drawn anything yet."""
        return self.rows == 1 and bool(kinds_of(self.state)) and not (self.recent[0] or self.drawn[0])

    @classmethod
    def stack(cls, conversations: Sequence["Conversation"]) -> "Conversation":
        """All rows in one conversation; a single conversation is returned as it is. StateError as for
        `LMState.stack`."""
        if len(conversations) == 1:
            return conversations[0]
        return cls(
            LMState.stack([talk.state for talk in conversations]),
            [list(ids) for talk in conversations for ids in talk.pending],
            [list(ids) for talk in conversations for ids in talk.recent],
            [count for talk in conversations for count in talk.drawn],
        )

    def take(self, row: int) -> "Conversation":
        """Copy one row. StateError for a row that does not exist."""
        state = self.state.take(row)
        return Conversation(state, [list(self.pending[row])], [list(self.recent[row])], [self.drawn[row]])

    def fork(self) -> "Conversation":
        """An independent copy."""
        pending, recent = ([list(ids) for ids in rows] for rows in (self.pending, self.recent))
        return Conversation(self.state.fork(), pending, recent, list(self.drawn))

    def save(
        self, path: Path | str, model: Stateful, dtype: Dtype = "full", extra: dict[str, Any] | None = None
    ) -> None:
        """Write to one file, atomically; dtype and extra: as `save_state` has them. ConfigError: an entry of `extra`
        has a name of OWN. StorageError if it cannot be written."""
        fields = {"pending": self.pending, "recent": self.recent, "drawn": self.drawn}
        save_state(path, self.state, model, extra=beside(extra) | {"conversation": fields}, dtype=dtype)

    @classmethod
    def load(cls, path: Path | str, model: Stateful) -> "Conversation":
        """Read a saved conversation. StateError if the file is missing, damaged, of another model, or a bare state."""
        return cls.of(path, *read_state(path, model), model.config.vocab_size)

    @classmethod
    def of(cls, path: Path | str, state: LMState, extra: dict[str, Any], vocab: int) -> "Conversation":
        """Make a conversation from a state and its file's entries. StateError: the file at `path` has no conversation,
        tokens outside the vocabulary, or a count of drawn tokens out of bounds."""
        fields: Any = extra.get("conversation")
        if not _are_conversation_fields(fields, state.batch_size):
            raise StateError(f"{path}: not a conversation, lacks its pending, recent and drawn tokens")
        for name, rows, most in (*((name, fields[name], vocab) for name in ("pending", "recent")),
                                 ("drawn", [fields["drawn"]], MOST_TOKENS)):  # fmt: skip
            for wrong in (number for row in rows for number in row if not 0 <= number < most):
                raise StateError(f"{path}: {name} holds {wrong}, must be ≥ 0 and < {most}")
        return cls(state, fields["pending"], fields["recent"], fields["drawn"])


def _are_conversation_fields(fields: Any, rows: int) -> bool:
    if not isinstance(fields, dict) or set(fields) != {"pending", "recent", "drawn"}:
        return False
    if not all(isinstance(field, list) and len(field) == rows for field in fields.values()):
        return False
    ids = [*fields["pending"], *fields["recent"], fields["drawn"]]
    return all(isinstance(row, list) and all(type(id) is int for id in row) for row in ids)
