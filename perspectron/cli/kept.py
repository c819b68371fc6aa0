"""A talk kept on disk, so that it goes on after any end of the program.

FILE is the memory after the last answer, with the messages, written whole or not at all. FILE.asked is the message that
is being answered; the same answer is drawn again, as what it begins from is kept.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from perspectron.decode.conversation import Conversation
from perspectron.model.model import LanguageModel
from perspectron.model.state import read_state
from perspectron.util.errors import StateError
from perspectron.util.files import locked, read_json, remove, write_json
from perspectron.util.schema import checked

FILE = "chat.state"
"""Its name in the folder of a run, where a terminal's talk is kept."""


class Said(Struct, forbid_unknown_fields=True):
    """What was said, as a chat template makes it a text."""

    messages: list[dict[str, str]] = []
    text: str = ""


class _Asked(Struct, forbid_unknown_fields=True):
    """A message, and how many tokens were drawn before it."""

    message: str
    drawn: int


class Kept:
    """A talk's files."""

    def __init__(self, path: Path, model: LanguageModel) -> None:
        self.path, self.model = path, model
        self._asking = path.with_name(f"{path.name}.asked")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other program keeps a talk there. StorageError: one does, or nothing can be."""
        with locked(self.path.absolute().parent, f".{self.path.name}.lock"):
            yield

    def read(self) -> tuple[Conversation | None, Said, str | None]:
        """The memory and what was said, and the message that has no answer yet. StateError: of another model, or
        damaged."""
        memory, said = None, Said()
        if self.path.exists():
            state, extra = read_state(self.path, self.model)
            memory = Conversation.of(self.path, state, extra, self.model.config.vocab_size)
            said = checked(extra.get("said"), Said, StateError, f"{self.path}: not a talk")
        if not self._asking.exists():
            return memory, said, None
        asked = checked(
            read_json(self._asking, StateError), _Asked, StateError, f"{self._asking}: not a message"
        )
        return memory, said, asked.message if asked.drawn == _drawn(memory) else None

    def ask(self, memory: Conversation | None, message: str) -> None:
        """Keep a message that is read after this memory. StorageError if it cannot be."""
        write_json(self._asking, {"message": message, "drawn": _drawn(memory)})

    def answered(self, memory: Conversation, messages: Any, text: str) -> None:
        """Keep the memory after an answer. StorageError if it cannot be; what was kept before is there then."""
        memory.save(self.path, self.model, extra={"said": {"messages": list(messages), "text": text}})
        remove(self._asking)

    def forget(self, whole: bool = True) -> None:
        """Keep nothing any more, or no message without an answer."""
        remove(self._asking)
        if whole:
            remove(self.path)


def _drawn(memory: Conversation | None) -> int:
    return -1 if memory is None else memory.drawn[0]
