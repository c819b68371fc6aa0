"""Files that appear whole or not at all."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from perspectron.errors import ArtifactError, PerspectronError, StorageError

MAX_JSON = 16 << 20  # bytes of a file that is read as JSON


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; whatever file or folder stands there at the end is renamed onto it.

    On any error the temporary is removed and what stood at `path` before is untouched.
    Raises StorageError for an OSError (full disk, read-only folder).
    """
    temporary, aside = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old.tmp"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        yield temporary
        for part in [*temporary.rglob("*"), temporary] if temporary.is_dir() else [temporary]:
            sync(part)
        if temporary.is_dir() and path.is_dir():
            os.replace(path, aside)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: not written ({error.strerror or error})") from error
    finally:
        if aside.is_dir() and not path.exists():
            os.replace(aside, path)
        remove(aside)
        remove(temporary)


def remove(path: Path) -> None:
    """Delete a file or a folder; a missing one is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def safe_join(folder: Path, name: object) -> Path:
    """The file of that name in `folder` or below. ArtifactError: a name that could lead out of it, also by a link."""
    parts = name.split("/") if isinstance(name, str) and len(name) < 256 else []
    if not parts or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise ArtifactError(
            f"{folder}: name {str(name)[:80]!r}, must be a short relative path without . and .."
        )
    path = folder.joinpath(*parts)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # too long in bytes, a ring of links, a lone surrogate
        inside = False
    if not inside:
        raise ArtifactError(f"{folder}: name {str(name)[:80]!r}, must not lead out of the folder")
    return path


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path, error: type[PerspectronError], limit: int = MAX_JSON) -> Any:
    """Read JSON. What is missing, malformed, no file or over `limit` bytes raises `error` with one line that names
    it."""
    try:
        return json.loads(_text(path, limit))
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except RecursionError:
        raise error(f"{path}: unreadable JSON (too many levels)") from None
    except (OSError, ValueError) as cause:
        raise error(f"{path}: unreadable JSON ({cause})") from None


def _text(path: Path, limit: int) -> str:
    with open(
        os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb"
    ) as file:  # a pipe must not block
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a file")
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"more than {limit} bytes")
    return text.decode()


def save_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, not atomically by itself; OSError when the disk is full."""
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, header
        )
    except SafetensorError as error:
        raise OSError(str(error)) from error
