"""Atomic writing, and reading of files that are not trusted."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

from msgspec import Meta, Struct
from platformdirs import user_cache_path

from perspectron.util.errors import ArtifactError, PerspectronError, StorageError

MAX_JSON = 16 << 20  # bytes of a file that is read as JSON
MAX_DIGITS = 19  # of a number without fraction: what 64 bits hold
LOCK = ".lock"
PAUSE = 0.5  # seconds between tries to lock a folder
TRIES = 20  # attempts to put a folder in the place of another


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read its bytes. OSError for anything else: a pipe is refused, not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def opened(path: Path, error: type[PerspectronError]) -> Iterator[BufferedReader]:
    """Open as `open_file` does. `error`, with one line that names the file: it is missing or cannot be read."""
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as cause:
        raise error(f"{path}: unreadable ({cause.strerror})") from None


def cache_folder() -> Path | None:
    """The user's cache folder, for what can be computed again; it may not exist yet. None: no place for one."""
    folder = user_cache_path("perspectron")
    return folder if folder.is_absolute() else None


def append_to(path: Path) -> FileIO:
    """Open a regular file to append to it, or make it if there is none. StorageError for anything else, and where it
    cannot be written: a link is not followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        _refuse_special(path)
        return FileIO(os.open(path, flags, 0o644), "ab")
    except OSError as error:
        raise StorageError(f"{path}: not written ({error.strerror or error})") from error


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes. OSError: not a regular file, or not readable."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """Size and SHA-256 of a file, as manifests hold them."""

    bytes: Annotated[int, Meta(ge=0)]
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """The record of a file as it is. OSError: not a regular file, or not readable."""
        return cls(path.stat().st_size, sha256(path))

    def check(self, folder: Path, name: str, error: type[PerspectronError], *, contents: bool = True) -> None:
        """Check that a file is as recorded. `error`, naming it: outside the folder, missing, of another size or, if its
        contents are read, not as it was written."""
        path = safe_join(folder, name, error)
        with opened(path, error) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self.bytes:
                raise error(f"{path}: {size} bytes, must be {self.bytes}")
            if contents:
                self.check_digest(path, hashlib.file_digest(file, "sha256").hexdigest(), error)

    def check_digest(self, path: Path, digest: str, error: type[PerspectronError]) -> None:
        """Check a digest of a file's bytes. `error`, naming the file: it is not the one recorded."""
        if digest != self.sha256:
            raise error(f"{path}: damaged, its SHA-256 is not {self.sha256[:12]}…")


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; whatever file or folder stands there at the end is renamed onto it.

    On any error the temporary is removed and what stood at `path` before is untouched. Any number of threads and
    processes may write one path: the last to end wins, and no file is ever a mixture. durable: wait for the disk.
    Raises StorageError for an OSError (full disk, read-only folder), and before anything is written where `path` is
    neither a regular file nor a folder: a link is not followed and a device not replaced.
    """
    if not path.name:
        raise StorageError(f"{path}: not written (Is a directory)")
    temporary, aside = temporary_beside(path), temporary_beside(path)
    _written.update((temporary.name, aside.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_special(path)
        yield temporary
        if durable:
            for part in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
                sync(part)
        _put(temporary, path, aside)
        if durable:
            sync(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: not written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):  # an error above is the one to tell
            if aside.is_dir() and not path.exists():
                os.replace(aside, path)
        for leftover in (aside, temporary):
            with contextlib.suppress(OSError):
                remove(leftover)
            _written.discard(leftover.name)


_written: set[str] = set()  # names that this process writes to or puts away now


def _put(temporary: Path, path: Path, aside: Path) -> None:
    """Rename onto `path`. A folder takes two steps, between which somebody else may put theirs there."""
    for left in reversed(range(TRIES)):
        try:
            if temporary.is_dir() and path.is_dir():
                remove(aside)
                os.replace(path, aside)
            os.replace(temporary, path)
            return
        except OSError as error:
            taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
            if not (left and taken and temporary.is_dir()):
                raise


def _refuse_special(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kind = "a link" if stat.S_ISLNK(mode) else "not a regular file"
            raise StorageError(f"{path}: not written (it is {kind}; name a file or remove it first)")


def temporary_beside(path: Path) -> Path:
    """A temporary path beside `path`, whose name tells by which process it is used."""
    return path.with_name(f".{os.getpid()}-{secrets.token_hex(8)}.tmp")


_TEMPORARY = re.compile(r"\.(\d+)-[0-9a-f]{16}\.tmp")


def sweep(folder: Path) -> None:
    """Delete what `atomic` left in a folder when its process was killed. What a living process writes stays, as do
    files of other names."""
    for leftover in folder.glob(".*.tmp"):
        name = _TEMPORARY.fullmatch(leftover.name)
        if name is not None and leftover.name not in _written and not _alive(int(name[1])):
            remove(leftover)


def _alive(pid: int) -> bool:
    """True if another process of this number runs; in a container a program has the same one each time."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK, patience: float = 0.0) -> Iterator[int]:
    """Keep a folder to this process and to those that inherit the descriptor yielded; the kernel frees it when the
    last of them is killed. Within one process it may be locked again.

    StorageError: another process still has it after `patience` seconds, or nothing can be written there.
    """
    from filelock import FileLock, Timeout  # takes long to import

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.resolve() / name, is_singleton=True, thread_local=False)
        lock.acquire(timeout=patience, poll_interval=PAUSE)
    except Timeout:
        raise StorageError(
            f"{folder}: another process is using it; wait until that ends, or choose another folder"
        ) from None
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) or error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            why = error.strerror if isinstance(error, OSError) else error
            raise StorageError(f"{folder}: not a folder to write in ({why})") from None
    own = lock._context.lock_file_fd  # which the lock closes in a child; None on a disk without locks
    held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC) if own is None else os.dup(own)
    try:
        yield held
    finally:
        os.close(held)
        lock.release()


def remove(path: Path) -> None:
    """Delete a file or a folder; a missing one is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def safe_join(folder: Path, name: object, error: type[PerspectronError] = ArtifactError) -> Path:
    """The file of that name in `folder` or below. `error`: a name that could lead out of it, also by a link."""
    parts = name.split("/") if isinstance(name, str) and len(name) < 256 else []
    if not parts or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise error(f"{folder}: name {str(name)[:80]!r}, must be a short relative path without . and ..")
    path = folder.joinpath(*parts)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long in bytes, a ring of links, a lone surrogate
        inside = False
    if not inside:
        raise error(f"{folder}: name {str(name)[:80]!r}, must not lead out of the folder")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, atomically. StorageError: it cannot be written."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically. ValueError: a number in it is not finite, which no reader here would take."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """A value as JSON can hold it: null for a number that is not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(
    path: Path, error: type[PerspectronError], limit: int = MAX_JSON, *, infinite: bool = False
) -> Any:
    """Read JSON as `parse_json` does. What is missing, malformed, no file or over `limit` bytes raises `error` with
    one line that names it."""
    try:
        return parse_json(read_text(path, limit), infinite=infinite)
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except (OSError, ValueError) as cause:
        why = cause.strerror if isinstance(cause, OSError) else cause
        raise error(f"{path}: unreadable JSON ({why})") from None


def read_object(path: Path, error: type[PerspectronError]) -> dict[str, Any]:
    """The object in a JSON file of another program; empty where there is no such file. `error`, naming the file."""
    value = read_json(path, error, infinite=True) if path.exists() else {}
    if not isinstance(value, dict):
        raise error(f"{path}: must be an object")
    return value


def read_text(path: Path, limit: int = MAX_JSON, errors: str = "strict") -> str:
    """The text of a regular file. OSError: it is not one. ValueError: more than `limit` bytes, or not UTF-8 (`errors`
    as in `bytes.decode`)."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise ValueError(f"more than {limit} bytes")
        text = file.read()
    return text.decode(errors=errors)


def parse_json(text: str | bytes, *, infinite: bool = False, room: int | None = None) -> Any:
    """JSON to the letter. ValueError for what Python's reader lets pass: NaN and Infinity, numbers beyond 64 bits or
    beyond float64, a key twice in one object, thousands of levels. infinite: Infinity may stand for a number, and a
    whole number beyond 64 bits is the float64 next to it. room: bytes that the value may take; ValueError, before it
    takes them, for one of more."""
    hooks: dict[str, Any] = {"parse_int": _large if infinite else _integer, "parse_float": _finite}
    if room is not None:
        numbers = _Numbers(text, room)
        hooks = {"parse_int": numbers.integer, "parse_float": numbers.real}
    try:
        return json.loads(
            text,
            parse_constant=_infinity if infinite else _refuse_constant,
            object_pairs_hook=_object,
            **hooks,
        )
    except RecursionError:
        raise ValueError("too many levels") from None


_BYTES = {"[": 104, "{": 250, ":": 350, ",": 9, '"': 32}
"""Bytes that a value takes at most for each of these signs in its text, while it is parsed."""


class _Numbers:
    """Reads the numbers of JSON, equal integers as one object. ValueError: its value takes more than `room` bytes."""

    def __init__(self, text: str | bytes, room: int) -> None:
        text = text if isinstance(text, str) else text.decode()
        wide = 1 if text.isascii() and "\\u" not in text else 4
        self._room, self._left, self._known = room, room - wide * len(text), dict[str, int]()
        self._take(sum(cost * text.count(sign) for sign, cost in _BYTES.items()))

    def integer(self, digits: str) -> int:
        if (known := self._known.get(digits)) is None:
            self._take(200)
            known = self._known[digits] = _integer(digits)
        return known

    def real(self, digits: str) -> float:
        self._take(32)
        return _finite(digits)

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError(f"its value takes more than {self._room >> 20} MiB")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _infinity(name: str) -> float:
    return math.inf if name == "Infinity" else _refuse_constant(name)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError(
            f"{digits[:24]}… is beyond 64 bits" if len(digits) > 24 else f"{digits} is beyond 64 bits"
        )
    return number


def _large(digits: str) -> int | float:
    fits = len(digits) <= MAX_DIGITS + 1 and -(2**63) <= int(digits) < 2**63
    return int(digits) if fits else _finite(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:24]} is beyond float64")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {twice[:80]!r} occurs twice")
    return fields
