"""Folder of named states: files that sessions saved or strangers uploaded, under names that stay within the folder."""

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from perspectron.decode.history import History, history
from perspectron.decode.kept import Account, Hold
from perspectron.decode.said import Said, said_in
from perspectron.decode.session import Session
from perspectron.model.appended import read_metadata
from perspectron.util.config import require
from perspectron.util.errors import PerspectronError, StateError, StorageError
from perspectron.util.files import parse_json, remove, safe_join, sweep, temporary_beside
from perspectron.util.lease import Lease, Leases
from perspectron.util.objects import Folder
from perspectron.util.tensors import JSON_ROOM

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ENDING = ".state"


MOST = 256 << 20
"""Most bytes of a folder's states to keep in memory, not counting what prefix stores, sessions and their marks hold."""


class _Held(NamedTuple):
    """A state in memory. sign: that of its file (`sign_of`), which differs once the file is written anew."""

    sign: tuple[int, ...]
    session: Session
    hold: Hold | None


class Missing(PerspectronError):
    """There is no state of this name."""


@dataclass(frozen=True)
class About:
    """The entry of a state in a list, as its file claims it. parent: the state it continues; tokens: of its text."""

    id: str
    bytes: int
    created: int
    parent: str
    tokens: int


class States:
    """States of one model in a folder, which is made when the first is saved. Those used last stay in memory, within
    MOST bytes: a session that continues one shares its keys and values."""

    def __init__(self, folder: Path, leases: Leases | None = None, place: str = "") -> None:
        self.folder, self.leases = folder, leases or Leases(Folder(folder.parent))
        self.place = place or folder.name
        """Prefix of its states' names in `leases`."""
        self._held, self._account = OrderedDict[Path, _Held](), Account(3)
        self._lock = threading.Lock()
        self._entries = dict[Path, tuple[tuple[int, ...], About]]()
        """List entries that were read, each with the sign of its file (`sign_of`)."""
        sweep(folder)  # uploads and saves that a kill cut short

    @contextlib.contextmanager
    def _told(self, upload: Path | None = None, name: str = "") -> Iterator[None]:
        """Reword errors for remote users: a file is named without its folder, an upload by the name it was to get.
        Missing: a file was deleted after it was found."""
        try:
            yield
        except PerspectronError as error:
            said = str(error).replace(str(upload), name) if upload else str(error)
            gone = isinstance(error, StateError) and isinstance(error.__context__, FileNotFoundError)
            raise (Missing if gone else type(error))(
                said.replace(f"{self.folder}/", "").replace(str(self.folder), "states")
            ) from error

    def path(self, name: str, field: str = "state") -> Path:
        """File of a state. ConfigError, which names the field that it comes from: a name that is more than letters,
        digits, dots, dashes and underscores."""
        bound = "1 to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
        require(NAME.fullmatch(name) is not None, field, name[:80], bound)
        return safe_join(self.folder, name + ENDING, StateError)

    def found(self, name: str) -> Path:
        """File of a saved state. Missing: there is none of this name."""
        path = self.path(name)
        if not path.is_file():
            known = ", ".join(self._names()[:8]) or "none are saved"
            raise Missing(f"state {name!r} is not there; there are: {known}")
        return path

    def there(self, name: str) -> tuple[Path, os.stat_result]:
        """The file of a saved state, and what the system knows of it. Missing as `found`, also where it was deleted
        meanwhile."""
        path = self.found(name)
        try:
            return path, path.stat()
        except FileNotFoundError:
            raise Missing(f"state {name!r} is not there; it was deleted meanwhile") from None

    def list(self) -> list[About]:
        """All states, the oldest first; files that are not states are left out."""
        paths = set(self.folder.glob(f"*{ENDING}"))
        found = [about for path in paths if (about := self._about(path)) is not None]
        for path in list(self._entries):  # a copy, as other threads add some
            if path not in paths:
                self._entries.pop(path, None)
        return sorted(found, key=lambda about: (about.created, about.id))

    def _names(self) -> Sequence[str]:
        """Names of states, from those of their files alone."""
        names = (path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))
        return sorted(name for name in names if NAME.fullmatch(name))

    def _about(self, path: Path) -> About | None:
        """As the function `_about`, which parses each file once."""
        sign = sign_of(path)
        known = self._entries.get(path)
        if known is not None and known[0] == sign:
            return known[1]
        about = _about(path)
        if about is not None:  # else it may be readable later
            self._entries[path] = sign, about
        return about

    def about(self, name: str) -> About:
        """The list entry of one state. Missing: there is no file of this name, or it is not a state."""
        about = self._about(self.found(name))
        if about is None:
            raise Missing(f"state {name!r}: its file is not one of a state")
        return about

    def history(self, name: str) -> History:
        """The history of a state, as its file claims it. Missing: no such state. StateError: damaged, or no text."""
        with self._told():
            return history(self.found(name))

    def said(self, name: str) -> Said:
        """The conversation of a state, as its file claims it; empty if none. Missing, StateError as `history`."""
        with self._told():
            return said_in(parse_json(read_metadata(self.found(name)).get("extra", "{}"), room=JSON_ROOM))

    def save(self, name: str, session: Session, parent: str = "", lease: Lease | None = None) -> About:
        """Write a state, whole or not at all. StorageError when it cannot be written. Busy: the lease under which it is
        written has ended."""
        with self._told():
            if lease is not None:
                lease.check()
            session.save(path := self.path(name), extra=beside(session, parent))
        with contextlib.suppress(PerspectronError, ValueError, KeyError):
            sign, found = sign_of(path), parse_json(read_metadata(path)["extra"], room=JSON_ROOM)
            if found["session"] == session.fields():  # else another has written there meanwhile
                self._hold(path, sign, session)
        return self.about(name)

    def load(self, name: str, fresh: Session, *, anew: bool = False) -> Session:
        """A session that continues a saved state, which is of the same model as `fresh`; from its file unless it is in
        memory, or always if `anew`. Missing, StateError: there is no such state, or none that can be continued."""
        path = self.found(name)
        sign = sign_of(path)
        with self._lock:
            held = self._held.get(path)
            known = held is not None and held.sign == sign
            if held is not None and known and not anew and (own := held.session.opened(fresh)):
                self._held.move_to_end(path)
                return own
        with self._told():
            session = fresh.loaded(path)
        if not (anew and known):  # the session in memory can go further back
            self._hold(path, sign, session)
        return session

    @property
    def memory_bytes(self) -> int:
        """Bytes of states kept in memory that no store, session or mark holds too."""
        return self._account.bytes

    def _hold(self, path: Path, sign: tuple[int, ...], session: Session) -> None:
        """Keep a state in memory, and drop the least recently used ones beyond MOST bytes."""
        own = session.fork()
        own.extra = said_in(session.extra).extra()
        with self._lock:
            self._held.pop(path, None)
            if sign:
                self._held[path] = _Held(sign, own, own.hold(self._account))
            while self._held and self._account.bytes > MOST:
                _, (_, _, hold) = self._held.popitem(last=False)
                if hold is not None:
                    hold.let_go()

    def take(self, name: str, upload: Path, fresh: Session, lease: Lease | None = None) -> About:
        """Check an uploaded file and move it to its name among the states. StateError: it is not a state of this
        model. Busy as `save`."""
        path = self.path(name)
        with self._told(upload, name):
            fresh.loaded(upload)
        if lease is not None:
            lease.check()
        os.replace(upload, path)
        return self.about(name)

    def upload(self) -> BinaryIO:
        """Open a new file for an upload, for its owner alone, as saved ones are. OSError: it cannot be made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = temporary_beside(self.folder / "upload")
        return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def delete(self, name: str, lease: Lease | None = None) -> None:
        """Delete a state. Missing: it is not there. Busy as `save`. StorageError: it cannot be deleted."""
        path = self.found(name)
        if lease is not None:
            lease.check()
        self._forget(path)

    def _forget(self, path: Path) -> None:
        """Remove a file and what is in memory of it."""
        try:
            remove(path)
        except OSError as error:
            raise StorageError(f"{path.name}: not deleted ({error.strerror or error})") from None
        with self._lock:
            self._held.pop(path, None)


def beside(session: Session, parent: str) -> dict[str, Any]:
    """The contents of a file besides the session: the state that it continues, and the conversation."""
    return {"parent": parent} | said_in(session.extra).extra()


def sign_of(path: Path) -> tuple[int, ...]:
    """Identity of what is in a file: its inode, size and times; empty if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _about(path: Path) -> About | None:
    """The list entry of a file, read from its headers alone, unchecked; None if they are not those of a state."""
    try:
        stat = path.stat()
        extra: Any = parse_json(read_metadata(path)["extra"], room=JSON_ROOM)
        own = extra.get("session") or {"ids": [], "before": 0}
        tokens, parent = len(own["ids"]) - (own["before"] == 1), str(extra.get("parent", ""))
        return About(path.name.removesuffix(ENDING), stat.st_size, int(stat.st_mtime), parent[:64], tokens)
    except (PerspectronError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
