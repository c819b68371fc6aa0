"""Objects that several servers share: whole files under names, in a folder or behind any URL of fsspec.

What may be relied on is what object stores have: an object that was put is there whole for everybody or not at all, is
listed from then on, and may be deleted. There are no renames, appends and locks.
"""

import concurrent.futures
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from perspectron.util.errors import ConfigError, StateError, StorageError
from perspectron.util.files import atomic, open_file, remove, safe_join

T = TypeVar("T")
PATIENCE = 10.0  # seconds for an answer of a store
RATE = 4 << 20  # bytes for which a store is given a second more
AT_ONCE = 16  # requests to a store at the same time
ABANDONED = 3600.0  # seconds after which a half-written file, of whatever machine, is deleted


class Objects(ABC):
    """A store. StorageError: it cannot be reached, is full, or refuses."""

    url: str

    @abstractmethod
    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Write an object, whole or not at all, replacing one of this name. durable: wait for the disk."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """The bytes of an object; None: there is none."""

    @abstractmethod
    def listed(self, folder: str, *, deep: bool = False) -> dict[str, int]:
        """The bytes of each object in a folder, with `deep` also in those below it, by name relative to the folder."""

    def all_listed(self, folders: Sequence[str]) -> list[dict[str, int]]:
        """`listed` of several folders."""
        return [self.listed(folder) for folder in folders]

    def gets(self, names: Sequence[str]) -> list[bytes | None]:
        """`get` of several objects."""
        return [self.get(name) for name in names]

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object; one that is not there is fine."""

    def check(self) -> None:
        """StorageError unless objects can be put, listed, read and deleted."""
        name = f"check/{os.urandom(8).hex()}"
        self.put(name, b"check")
        whole = self.get(name) == b"check" and name.partition("/")[2] in self.listed("check")
        self.delete(name)
        if not whole:
            raise StorageError(f"{self.url}: does not give back what was put there")


class Folder(Objects):
    """A folder, on a disk that several machines may mount."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, str(folder)
        self._sign = _place(folder)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """As `Objects.put`."""
        self._there()
        with atomic(self._path(name), durable=durable) as temporary:
            temporary.write_bytes(data)
        self._there()

    def get(self, name: str) -> bytes | None:
        """As `Objects.get`."""
        path = self._path(name)
        try:
            with open_file(path) as file:
                return file.read()
        except FileNotFoundError:
            self._there()
            return None
        except OSError as error:
            raise StorageError(f"{path}: unreadable ({error.strerror or error})") from error

    def listed(self, folder: str, *, deep: bool = False) -> dict[str, int]:
        """As `Objects.listed`."""
        found, top = dict[str, int](), self._path(folder)
        left = [("", top)]
        while left:
            prefix, path = left.pop()
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            if entry.is_dir(follow_symlinks=False):
                                left += [(f"{prefix}{entry.name}/", Path(entry))] if deep else []
                            elif not entry.name.startswith("."):
                                found[prefix + entry.name] = entry.stat(follow_symlinks=False).st_size
                            elif deep and time.time() - entry.stat().st_mtime > ABANDONED:
                                remove(Path(entry))
            except FileNotFoundError:
                self._there()
            except OSError as error:
                raise StorageError(f"{path}: unreadable ({error.strerror or error})") from error
        return found

    def delete(self, name: str) -> None:
        """As `Objects.delete`."""
        path = self._path(name)
        try:
            remove(path)
        except OSError as error:
            raise StorageError(f"{path}: not deleted ({error.strerror or error})") from error

    def _path(self, name: str) -> Path:
        return safe_join(self.folder, name, StateError)

    def _there(self) -> None:
        """StorageError: the folder is gone, or another has its place, as that on which its disk was mounted."""
        there = _place(self.folder)
        if self._sign is not None and there != self._sign:
            raise StorageError(f"{self.folder}: no longer the folder that it was")
        self._sign = there


def _place(folder: Path) -> tuple[int, int] | None:
    """Identity of a folder: its device and inode; None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Remote(Objects):
    """The store behind a URL of fsspec. A request that takes too long is given up."""

    def __init__(self, url: str, patience: float = PATIENCE) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigError(f"store = {url}: needs fsspec; pip install 'perspectron[store]'") from None
        try:
            self._system, root = url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"store = {url}: {error}") from None
        self.url, self._root, self._patience = url, root.rstrip("/"), patience
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "store")

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """As `Objects.put`."""

        def put() -> None:
            if "/" in name:
                with contextlib.suppress(FileExistsError, NotImplementedError):
                    self._system.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(self._at(name), data)

        self._asked(name, put, len(data) / RATE)

    def get(self, name: str) -> bytes | None:
        """As `Objects.get`."""

        return self._asked(name, partial(self._get, name), 3 * self._patience)

    def gets(self, names: Sequence[str]) -> list[bytes | None]:
        """As `Objects.gets`, all at the same time."""
        return self._all(self._get, names)

    def _get(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return bytes(self._system.cat_file(self._at(name)))
        return None

    def listed(self, folder: str, *, deep: bool = False) -> dict[str, int]:
        """As `Objects.listed`."""

        return self._asked(folder, partial(self._list, folder, deep), 3 * self._patience if deep else 0.0)

    def all_listed(self, folders: Sequence[str]) -> list[dict[str, int]]:
        """As `Objects.all_listed`, all at the same time."""
        return self._all(self._list, folders)

    def _list(self, folder: str, deep: bool = False) -> dict[str, int]:
        at, names = self._at(folder), dict[str, int]()
        self._system.invalidate_cache()
        try:
            entries = (
                [*self._system.find(at, detail=True).values()] if deep else self._system.ls(at, detail=True)
            )
        except FileNotFoundError:
            return names
        for entry in entries:
            start = entry["name"].find(at.lstrip("/") + "/")
            if entry["type"] == "file" and start >= 0:
                names[entry["name"][start + len(at.lstrip("/")) + 1 :]] = int(entry["size"] or 0)
        return names

    def delete(self, name: str) -> None:
        """As `Objects.delete`."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(self._at(name))

        self._asked(name, delete)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _all(self, work: Callable[[str], T], names: Sequence[str]) -> list[T]:
        asked = [(name, self._pool.submit(work, name)) for name in names]
        return [self._result(name, each, 3 * self._patience) for name, each in asked]

    def _asked(self, name: str, work: Callable[[], T], more: float = 0.0) -> T:
        return self._result(name, self._pool.submit(work), more)

    def _result(self, name: str, asked: "concurrent.futures.Future[T]", more: float) -> T:
        """The result of work on another thread. StorageError, of whatever kind a file system's errors are."""
        try:
            return asked.result(self._patience + more)
        except TimeoutError:
            asked.cancel()
            raise StorageError(f"{self.url}: {name}: no answer in {self._patience + more:.0f} s") from None
        except Exception as error:
            raise StorageError(f"{self.url}: {name}: {type(error).__name__} ({error})") from error


def folder_of(url: str) -> Path | None:
    """The folder that a store is, where it is one by a plain path; None for a URL."""
    return None if "://" in url else Path(url)


def objects_of(url: str) -> Objects:
    """The store of a URL, or of a path. ConfigError: a kind that is not known, or needs a package."""
    if (folder := folder_of(url)) is not None:
        return Folder(folder)
    if url.startswith("file://"):
        folder = Path(url.removeprefix("file://"))
        if not folder.is_absolute():
            raise ConfigError(f"store = {url}: must be file:// and an absolute path")
        return Folder(folder)
    return Remote(url)
