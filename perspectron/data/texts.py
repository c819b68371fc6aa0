"""Corpora of text files: one file, or those of a folder."""

import fnmatch
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perspectron.data.corpus import Corpus, Document, Place, Shares, SplitName, facts, fingerprint, share_of
from perspectron.data.reading import border_at, pieces, text_size
from perspectron.errors import DataError

HIDDEN = (".*",)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of a file's text; `end` None is the whole file, not yet known to be text."""

    path: Path
    name: str
    begin: int = 0
    end: int | None = None

    @property
    def size(self) -> int:
        """Bytes on disk, or of the text: for progress."""
        return self.path.stat().st_size if self.end is None else self.end - self.begin


class Files(Corpus):
    """Text files, each with its split."""

    def __init__(
        self, source: str, identity: str, shares: Shares, parts: dict[SplitName, list[Part]]
    ) -> None:
        super().__init__(source, identity, shares)
        self._parts = parts

    def _stream(self, split: SplitName, after: Place) -> Iterator[Document]:
        first, start = after or (0, 0)
        sizes = [part.size for part in self._parts[split]]
        whole, before = max(sum(sizes), 1), sum(sizes[:first])
        for i, part in enumerate(self._parts[split][first:], first):
            end = text_size(part.path) if part.end is None else part.end
            if not end:
                self._skip(split, part.name)
            else:
                for offset, text in pieces(part.path, max(part.begin, start), end):
                    stop = offset + len(text.encode())
                    place = [i, stop] if stop < end else [i + 1, 0]
                    share = (before + sizes[i] * (stop - part.begin) / (end - part.begin)) / whole
                    whole_file = part.end is None and offset == 0 and stop == end
                    name = part.name if whole_file else f"{part.name}@{offset}"
                    yield Document(name, text, "", place, share)
            before, start = before + sizes[i], 0


def open_file(path: Path, shares: Shares) -> Corpus:
    """One text file, of which the end is held out. DataError: it is empty, or no text."""
    identity = fingerprint("file", [str(path.resolve()), str(shares), facts(path.name, path)])
    size = text_size(path)
    if not size:
        raise DataError(
            f"{path}: not UTF-8 text" if size is None else f"{path}: empty, there is no text in it"
        )
    return Files(str(path), identity, shares, _cut(path, path.name, size, shares))


def walk(root: Path, left_out: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Non-empty regular files under `root` as (relative POSIX path, path), sorted.

    Folders and files whose name matches one of the `left_out` patterns are not listed.
    """
    files: list[tuple[str, Path]] = []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    def wanted(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatch.fnmatchcase(name, p) for p in left_out)]

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = wanted(folders)
        for path in (Path(folder, name) for name in wanted(names)):
            if path.is_file() and path.stat().st_size:
                files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)


class NoText(DataError):
    """None of the files is text."""


def divide(source: str, files: list[tuple[str, Path]], shares: Shares) -> dict[SplitName, list[Part]]:
    """Files to splits by the hash of their name. A split without a readable file gets the one whose hash is nearest;
    fewer such files than splits are cut themselves. NoText where none is readable."""
    ranked = sorted(files, key=lambda file: (share_of(_key(file[0])), file[0]))
    split_of = {name: shares.of(share_of(_key(name))) for name, _ in ranked}
    readable = (file for file in ranked if text_size(file[1]))
    first = list(itertools.islice(readable, len(shares.splits) - 1))
    last = next((file for file in reversed(ranked) if text_size(file[1])), None)
    if last is None:
        raise NoText(f"{source}: no text in it ({len(files)} files, none of them non-empty UTF-8)")
    parts: dict[SplitName, list[Part]] = {split: [] for split in shares.splits}
    cut = dict[SplitName, list[Part]]()
    if last in first:
        name, path = last
        size = text_size(path)
        assert size is not None
        cut = _cut(path, name, size, shares)
        del split_of[name]
    else:
        split_of |= {first[0][0]: "heldout", last[0]: "train"}
        if shares.dev and not any(split_of[name] == "dev" and text_size(path) for name, path in ranked):
            taken = (f for f in ranked if split_of[f[0]] == "train" and f != last and text_size(f[1]))
            split_of[next(taken, first[1])[0]] = "dev"
    for name, path in files:
        if name in split_of:
            parts[split_of[name]].append(Part(path, name))
    return {split: parts[split] + cut.get(split, []) for split in parts}


def _key(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _cut(path: Path, name: str, size: int, shares: Shares) -> dict[SplitName, list[Part]]:
    """One file's text of `size` bytes, cut where the dev part of it begins, if there is one, and the held-out one."""
    edges = [border_at(path, size, round(size * (1 - shares.heldout))), size]
    if shares.dev:
        edges.insert(0, border_at(path, edges[0], round(size * (1 - shares.heldout - shares.dev))))
    pairs = itertools.pairwise([0, *edges])
    return {split: [Part(path, name, *pair)] for split, pair in zip(shares.splits, pairs, strict=True)}
