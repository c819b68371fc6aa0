"""A talk kept on disk, so that it goes on after any end of the program.

FILE is the memory after the last answer, with the messages, written whole or not at all. FILE.asked is the message that
is being answered; the same answer is drawn again, as what it begins from is kept.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from perspectron.decode.session import Session
from perspectron.util.errors import StateError
from perspectron.util.files import locked, read_json, remove, write_json
from perspectron.util.schema import checked

FILE = "chat.state"
"""Its name in the folder of a run, where a terminal's talk is kept."""


class Said(Struct, forbid_unknown_fields=True):
    """What was said, of which a chat template makes a text. start, gone: as a point of a
    talk has them."""

    messages: list[dict[str, str]] = []
    start: int = 0
    gone: int = 0


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

    def read(self, begun: Session) -> tuple[Session | None, Said, str | None]:
        """The memory and what was said, and the message that has no answer yet. begun: a text of the model. StateError:
        of another model, or damaged."""
        session, said = None, Said()
        if self.path.exists():
            session = begun.loaded(self.path)
            said = said_in(session, self.path)
        if not self._asking.exists():
            return session, said, None
        asked = checked(
            read_json(self._asking, StateError), _Asked, StateError, f"{self._asking}: not a message"
        )
        return session, said, asked.message if asked.drawn == _drawn(session, said.gone) else None

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


def said_in(session: Session, path: Path) -> Said:
    """What was said, by the file that a session was loaded from; nothing that is known where it says nothing.
    StateError: it is damaged."""
    return checked(session.extra.get("said", {}), Said, StateError, f"{path}: not a talk")


def _drawn(session: Session | None, gone: int) -> int:
    return -1 if session is None or not session.tokens else session.drawn + gone
