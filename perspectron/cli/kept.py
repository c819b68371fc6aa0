"""A talk kept on disk, so that it goes on after any end of the program.

FILE is the memory after the last answer, with the messages, written whole or not at all. FILE.asked is the message
being answered; after a kill the same answer is drawn again, since the state before it is kept.
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
"""Name of the file in a run's folder that keeps a terminal's talk."""


class _Asked(Struct, forbid_unknown_fields=True):
    """A message being answered. drawn: tokens drawn before it, removed ones included; each answer raises that number,
    so that an answered message is recognised."""

    message: str
    drawn: int


class Kept:
    """The files in which a talk is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asking = path.parent / f"{path.name}.asked"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which no other program keeps a talk in this file. StorageError: one does, or none can be kept."""
        with locked(self.path.absolute().parent, f".{self.path.name}.lock"):
            yield

    def read(self, begun: Session) -> tuple[Session | None, str | None]:
        """(the kept session, the message that has no answer yet), each None if there is none. begun: a session of the
        model. StateError: a file is damaged, or of another model."""
        session = begun.loaded(self.path) if self.path.exists() else None
        if not self._asking.exists():
            return session, None
        asked = checked(
            read_json(self._asking, StateError), _Asked, StateError, f"{self._asking}: not a message"
        )
        gone = 0 if session is None else said_in(session.extra).gone
        return session, asked.message if asked.drawn == _drawn(session, gone) else None

    def ask(self, session: Session, gone: int, message: str) -> None:
        """Keep a message that is to be read after this session. gone: as in `Said`. StorageError if it cannot be
        written."""
        write_json(self._asking, {"message": message, "drawn": _drawn(session, gone)})

    def answered(self, save: Callable[[Path], None]) -> None:
        """Keep the talk after an answer. StorageError if it cannot be written; what was kept before then stays."""
        save(self.path)
        remove(self._asking)

    def forget(self, whole: bool = True) -> None:
        """Delete the kept talk and its unanswered message; only the message unless `whole`."""
        remove(self._asking)
        if whole:
            remove(self.path)


def _drawn(session: Session | None, gone: int) -> int:
    return -1 if session is None or not session.tokens else session.drawn + gone
