"""Texts that have a name: those that every machine with Python has, and books."""

import fnmatch
import platform
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from perspectron.data.books import open_books
from perspectron.data.corpus import Corpus, Shares, fingerprint
from perspectron.data.texts import HIDDEN, Files, divide, walk
from perspectron.util.files import sha256


class _Named(NamedTuple):
    """A named corpus. folder: a key of `sysconfig.get_path`. files: patterns, in lower case, of which one fits a file's
    path in it. left_out: patterns of names of folders and files to leave out. alike: keep copies of a file."""

    folder: str
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    alike: bool


_NOT_TEXT = (*HIDDEN, "__pycache__", "perspectron", "perspectron-*")
_FOLDERS = {
    "stdlib": _Named(
        "stdlib",
        ("*.py",),
        (*HIDDEN, "test", "tests", "idle_test", "*-packages", "__pycache__", "config-*"),
        alike=True,
    ),
    "sources": _Named("purelib", ("*.py",), _NOT_TEXT, alike=False),
    "prose": _Named(
        "purelib",
        ("*.md", "*.rst", "*.dist-info/metadata", "*/licen[sc]e*", "*/copying*", "*/notice*", "*/authors*"),
        (*_NOT_TEXT, "*.py", "*.pyi"),
        alike=False,
    ),
}
NAMED = (*_FOLDERS, "books")
"""`stdlib`: the sources of Python's own library without its tests. Of the packages that are installed, `sources`: their
Python files; `prose`: what documents and licenses them. `books`: as Debian packages them, the same text everywhere."""


def open_named(name: str, shares: Shares) -> Corpus:
    if name == "books":
        return open_books(shares)
    folder, patterns, left_out, alike = _FOLDERS[name]
    root = Path(sysconfig.get_path(folder))
    files = [
        (path, file)
        for path, file in walk(root, left_out)
        if any(fnmatch.fnmatchcase(path.lower(), pattern) for pattern in patterns)
    ]
    files = files if alike else _distinct(files)
    # Sizes but no times: the same Python with the same packages elsewhere is the same corpus.
    listing = [f"{path}\0{file.stat().st_size}" for path, file in files]
    identity = fingerprint(name, [platform.python_version(), str(shares), *listing])
    return Files(name, identity, shares, divide(name, files, shares))


def _distinct(files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The files without copies of those before them, of which one could be held out and the other trained on."""
    sizes = Counter(file.stat().st_size for _, file in files)
    seen, kept = set[str](), []
    for path, file in files:
        digest = sha256(file) if sizes[file.stat().st_size] > 1 else path
        if digest not in seen:
            seen.add(digest)
            kept.append((path, file))
    return kept
