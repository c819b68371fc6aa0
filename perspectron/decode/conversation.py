"""All that is needed to go on with texts later: the model's state and what sampling remembers, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perspectron.errors import StateError
from perspectron.state import LMState, Stateful, read_state, save_state


@dataclass(frozen=True)
class Conversation:
    """All that is needed to go on. Going on uses it up, because the state is updated in place: keep a `fork()`
    to go on from the same point twice.

    state: after what was read. pending: per row, tokens not yet read; after `generate` exactly one, the last one
    drawn. That holds however the row finished: tokens of a stop string are part of the history, though not of
    the text; after "end" the pending token is the end-of-text token, so that the row goes on with a new
    document and remembers nothing of the old one. recent: per row, the last `repetition_window` tokens of prompts
    and draws, end-of-text tokens left out. drawn: per row, how many tokens were ever drawn.
    """

    state: LMState
    pending: list[list[int]]
    recent: list[list[int]]
    drawn: list[int]

    @property
    def rows(self) -> int:
        """Texts in it."""
        return len(self.pending)

    @classmethod
    def stack(cls, conversations: Sequence["Conversation"]) -> "Conversation":
        """The rows of all, in one; one alone is returned itself. StateError as `LMState.stack`."""
        if len(conversations) == 1:
            return conversations[0]
        return cls(
            LMState.stack([talk.state for talk in conversations]),
            [list(ids) for talk in conversations for ids in talk.pending],
            [list(ids) for talk in conversations for ids in talk.recent],
            [count for talk in conversations for count in talk.drawn],
        )

    def take(self, row: int) -> "Conversation":
        """One row, as a copy. StateError: a row that is not there."""
        state = self.state.take(row)
        return Conversation(state, [list(self.pending[row])], [list(self.recent[row])], [self.drawn[row]])

    def fork(self) -> "Conversation":
        """An independent copy."""
        pending, recent = ([list(ids) for ids in rows] for rows in (self.pending, self.recent))
        return Conversation(self.state.fork(), pending, recent, list(self.drawn))

    def save(self, path: Path | str, model: Stateful) -> None:
        """Write to one file, whole or not at all. StorageError when it cannot be written."""
        fields = {"pending": self.pending, "recent": self.recent, "drawn": self.drawn}
        save_state(path, self.state, model, extra={"conversation": fields})

    @classmethod
    def load(cls, path: Path | str, model: Stateful) -> "Conversation":
        """Read a saved conversation. StateError: missing, damaged, another model's, or a bare state."""
        return cls.of(path, *read_state(path, model))

    @classmethod
    def of(cls, path: Path | str, state: LMState, extra: dict[str, Any]) -> "Conversation":
        """The conversation of a state and what was saved with it. StateError: the file at `path` has none."""
        fields: Any = extra.get("conversation")
        if not _are_conversation_fields(fields, state.batch_size):
            raise StateError(f"{path}: not a conversation, lacks its pending, recent and drawn tokens")
        return cls(state, fields["pending"], fields["recent"], fields["drawn"])


def _are_conversation_fields(fields: Any, rows: int) -> bool:
    if not isinstance(fields, dict) or set(fields) != {"pending", "recent", "drawn"}:
        return False
    if not all(isinstance(field, list) and len(field) == rows for field in fields.values()):
        return False
    ids = [*fields["pending"], *fields["recent"], fields["drawn"]]
    return all(isinstance(row, list) and all(type(id) is int for id in row) for row in ids)
