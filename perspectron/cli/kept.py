"""A talk kept on disk, so that it goes on after any end of the program.

FILE is the memory after the last answer, with the messages, written whole or not at all. FILE.asked is the message that
is being answered; the same answer is drawn again, as what it begins from is kept.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from perspectron.decode.said import said_in
from perspectron.decode.session import Session
from perspectron.util.errors import StateError
from perspectron.util.files import locked, read_json, remove, write_json
from perspectron.util.schema import checked

FILE = "chat.state"
"""Its name in the folder of a run, where a terminal's talk is kept."""


class _Asked(Struct, forbid_unknown_fields=True):
    """A message, and how many tokens were drawn before it, those that stand there no more included: each answer makes
    them more."""

    message: str
    drawn: int


class Kept:
    """A talk's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asking = path.parent / f"{path.name}.asked"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other program keeps a talk there. StorageError: one does, or nothing can be."""
        with locked(self.path.absolute().parent, f".{self.path.name}.lock"):
            yield

    def read(self, begun: Session) -> tuple[Session | None, str | None]:
        """The memory, and the message that has no answer yet. begun: a text of the model. StateError: of another model,
        or damaged."""
        session = begun.loaded(self.path) if self.path.exists() else None
        if not self._asking.exists():
            return session, None
        asked = checked(
            read_json(self._asking, StateError), _Asked, StateError, f"{self._asking}: not a message"
        )
        gone = 0 if session is None else said_in(session.extra).gone
        return session, asked.message if asked.drawn == _drawn(session, gone) else None

    def ask(self, session: Session, gone: int, message: str) -> None:
        """Keep a message that is read after this memory. gone: as a point of a talk has it. StorageError if it cannot
        be."""
        write_json(self._asking, {"message": message, "drawn": _drawn(session, gone)})

    def answered(self, save: Callable[[Path], None]) -> None:
        """Keep the talk after an answer. StorageError if it cannot be; what was kept before is there then."""
        save(self.path)
        remove(self._asking)

    def forget(self, whole: bool = True) -> None:
        """Keep nothing any more, or no message without an answer."""
        remove(self._asking)
        if whole:
            remove(self.path)


def _drawn(session: Session | None, gone: int) -> int:
    return -1 if session is None or not session.tokens else session.drawn + gone
