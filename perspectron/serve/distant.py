"""Named states in an object store: each version is an object of its own, `NAME/TIME~TOKENS~PARENT`, so that none is
ever overwritten. The latest version is the state; whoever puts one deletes those before it."""

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from perspectron.decode.session import Session
from perspectron.serve.states import ENDING, NAME, About, Missing, States, beside, sign_of
from perspectron.util.errors import StorageError
from perspectron.util.files import atomic, remove, temporary_beside
from perspectron.util.lease import Lease, Leases
from perspectron.util.objects import Objects

KEPT = 600.0  # seconds for which a fetched file is kept after it was asked for


class DistantStates(States):
    """States of one model under `place` in an object store. folder: where this server keeps its own copies of files."""

    def __init__(self, folder: Path, objects: Objects, place: str, leases: Leases) -> None:
        super().__init__(folder, leases, place)
        self._objects = objects
        self._used = dict[Path, float]()
        """When each of the server's own copies was asked for last, of those that were not long ago."""

    def found(self, name: str) -> Path:
        """As `States.found`: the file of its latest version. StorageError: the store cannot be reached."""
        at = self._at(self.path(name))
        latest = self._latest(name)
        if latest is None:
            return super().found(name)  # Missing
        path = self._local(at, latest)
        with self._lock:  # so that no other request deletes the file once it is found
            self._used[path] = time.time()
            self._forget_old()
        if path.is_file():
            return path
        if (data := self._objects.get(f"{at}/{latest}")) is None:
            raise StorageError(f"state {name!r}: was written anew while it was read; ask again")
        with self._told(), atomic(path, durable=False) as temporary:
            temporary.write_bytes(data)
        return path

    def list(self) -> list[About]:
        """As `States.list`, read from the names of objects alone."""
        latest = dict[str, tuple[str, int]]()
        for at, size in sorted(self._objects.listed(self.place, deep=True).items()):
            name, _, version = at.rpartition("/")
            latest[name] = version, size
        found = [about for name, pair in latest.items() if (about := _about(name, *pair)) is not None]
        return sorted(found, key=lambda about: (about.created, about.id))

    def _names(self) -> Sequence[str]:
        return [about.id for about in self.list()]

    def about(self, name: str) -> About:
        """As `States.about`."""
        at = self._at(self.path(name))
        versions = self._objects.listed(at)
        about = _about(name, latest := max(versions, default=""), versions.get(latest, 0))
        if about is None:
            raise Missing(f"state {name!r} is not there")
        return about

    def save(self, name: str, session: Session, parent: str = "", lease: Lease | None = None) -> About:
        """As `States.save`."""
        path = temporary_beside(self.path(name))
        try:
            with self._told(path, name):
                session.save(path, extra=beside(session, parent))
            about, kept = self._keep(name, path, len(session.tokens), parent, lease)
            self._hold(kept, sign_of(kept), session)
            return about
        finally:
            remove(path)

    def take(self, name: str, upload: Path, fresh: Session, lease: Lease | None = None) -> About:
        """As `States.take`."""
        with self._told(upload, name):
            session = fresh.loaded(upload)
        return self._keep(name, upload, len(session.tokens), str(session.extra.get("parent", "")), lease)[0]

    def delete(self, name: str, lease: Lease | None = None) -> None:
        """As `States.delete`."""
        at = self._at(self.path(name))
        versions = self._objects.listed(at)
        if not versions:
            super().found(name)
        if lease is not None:
            lease.check()
        for version in sorted(versions):
            self._objects.delete(f"{at}/{version}")
            self._forget(self._local(at, version))

    def _keep(
        self, name: str, path: Path, tokens: int, parent: str, lease: Lease | None
    ) -> tuple[About, Path]:
        """Put a file as a new version, keep it as the server's own copy, and delete earlier versions."""
        at, data = self._at(self.path(name)), path.read_bytes()
        before = self._objects.listed(at)
        now = max([round(1e3 * time.time()), *(_time(version) + 1 for version in before)])
        parent = parent if NAME.fullmatch(parent) else ""  # an upload may claim anything
        version = f"{now:015d}~{tokens}~{parent}"
        if lease is not None:
            lease.check()
        self._objects.put(f"{at}/{version}", data)
        try:
            os.replace(path, kept := self._local(at, version))
        except OSError as error:
            raise StorageError(f"{name}: not written ({error.strerror or error})") from None
        for other in before:
            with contextlib.suppress(StorageError):
                self._objects.delete(f"{at}/{other}")
        about = _about(name, version, len(data))
        assert about is not None
        return about, kept

    def _latest(self, name: str) -> str | None:
        return max(self._objects.listed(self._at(self.path(name))), default=None)

    def _at(self, path: Path) -> str:
        return f"{self.place}/{path.name.removesuffix(ENDING)}"

    def _local(self, at: str, version: str) -> Path:
        """This server's file of a version, which never changes."""
        return self.folder / (hashlib.sha256(f"{at}/{version}".encode()).hexdigest()[:32] + ENDING)

    def _forget_old(self) -> None:
        """Delete the server's own copies that are old and were not asked for lately."""
        now = time.time()
        self._used = {path: used for path, used in self._used.items() if now - used <= KEPT}
        for path in self.folder.glob(f"*{ENDING}"):
            with contextlib.suppress(OSError):
                if path not in self._used and now - path.stat().st_mtime > KEPT:
                    remove(path)


def _time(version: str) -> int:
    start = version.partition("~")[0]
    return int(start) if start.isascii() and start.isdecimal() else 0


def _about(name: str, version: str, size: int) -> About | None:
    """The list entry of a version; None if `version` is not a name of one."""
    parts = version.split("~")
    if len(parts) != 3 or not _time(version) or not parts[1].isdecimal() or "/" in name:
        return None
    return About(name, size, _time(version) // 1000, parts[2], int(parts[1]))
