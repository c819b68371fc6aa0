"""Corpora of text files: one file, or those of a folder."""

import fnmatch
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from perspectron.data.corpus import Corpus, Document, Shares, SplitName, facts, fingerprint, share_of
from perspectron.data.reading import COMPRESSED, Text, border_at, examined, pieces, refusal
from perspectron.util.errors import DataError

HIDDEN = (".*",)
RARE = 0.05
"""Kinds with a smaller share of a folder's bytes are held out as one kind."""
LEAST = 1024
"""Least bytes to hold out of a kind for which it is held out in proportion."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [begin, end) of a file's text; `end` None is the whole file, not yet known to be text. encoding: of the
    file; "" is UTF-8. cut: bytes after `end` that are left out, of a character that the end of the file cuts off."""

    path: Path
    name: str
    encoding: str = ""
    begin: int = 0
    end: int | None = None
    cut: int = 0

    @property
    def size(self) -> int:
        """Bytes on disk, or of the text: for progress. DataError: the file is no longer there."""
        if self.end is not None:
            return self.end - self.begin
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error

    @property
    def share(self) -> float:
        """The hash of its name, in [0, 1), by which it goes to a split."""
        return share_of(self.name.encode("utf-8", "surrogateescape"))

    @property
    def kind(self) -> str:
        """Extension of the file, without that of a compression."""
        path = Path(self.name.lower())
        return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix

    @property
    def label(self) -> str:
        return f"{self.kind or 'plain'} files"

    def known(self) -> "Part":
        """The same part with its end, which is 0 for a file that is not text."""
        if self.end is not None:
            return self
        text = examined(self.path, self.encoding)
        return replace(self, end=text.size or 0, cut=text.cut)

    def split_at(self, at: int) -> tuple["Part", "Part"]:
        return replace(self, end=at, cut=0), replace(self, begin=at)


class Files(Corpus):
    """Text files, each with its split."""

    def __init__(
        self, source: str, identity: str, shares: Shares, parts: dict[SplitName, list[Part]]
    ) -> None:
        super().__init__(source, identity, shares)
        self._parts = parts

    @property
    def size(self) -> float:
        return sum(part.size for parts in self._parts.values() for part in parts)

    def _stream(self, split: SplitName) -> Iterator[Document]:
        tally = self._tallies[split]
        sizes = [part.size for part in self._parts[split]]
        whole, before = max(sum(sizes), 1), 0
        for part, size in zip(self._parts[split], sizes, strict=True):
            text = examined(part.path, part.encoding) if part.end is None else Text(part.end, part.cut)
            if text.size is None:
                tally.skip(part.name, part.label, text.why)
            end = text.size or 0
            for offset, piece in pieces(part.path, part.begin, end, part.encoding):
                stop = offset + len(piece.encode())
                share = (before + size * (stop - part.begin) / (end - part.begin)) / whole
                whole_file = part.end is None and offset == 0 and stop == end
                tally.read[part.label] += offset == 0
                yield Document(part.name if whole_file else f"{part.name}@{offset}", piece, "", share)
            if text.cut:
                why = f"the last {text.cut} bytes, a character that the end of {part.name} cuts off"
                tally.skip(f"{part.name}@{end}", part.label, why)
            before += size


def open_file(path: Path, shares: Shares, encoding: str = "") -> Corpus:
    """One text file, of which the end is held out. DataError: it is empty, or no text."""
    lines = [str(path.resolve()), str(shares), facts(path.name, path), *filter(None, [encoding])]
    text = examined(path, encoding)
    if text.size is None:
        raise DataError(refusal(path, text, encoding))
    if not text.size:
        raise DataError(f"{path}: empty, there is no text in it")
    part = Part(path, path.name, encoding, end=text.size, cut=text.cut)
    return Files(str(path), fingerprint("file", lines), shares, _cut(part, shares))


def walk(
    root: Path, left_out: tuple[str, ...], apart: Callable[[Path], bool] = lambda _: False
) -> list[tuple[str, Path]]:
    """Non-empty regular files under `root` as (relative POSIX path, path), sorted.

    Folders and files whose name matches one of the `left_out` patterns are not listed, nor folders in `root` of which
    `apart` is true.
    """
    files: list[tuple[str, Path]] = []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    def wanted(names: list[str]) -> list[str]:
        return [name for name in names if not any(fnmatch.fnmatchcase(name, p) for p in left_out)]

    for folder, folders, names in os.walk(root, onerror=refuse):
        paths = (Path(folder, name) for name in sorted(wanted(folders)))
        folders[:] = [path.name for path in paths if not path.is_symlink() and not apart(path)]
        for path in (Path(folder, name) for name in wanted(names)):
            if path.is_file() and path.stat().st_size:
                files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)


class NoText(DataError):
    """None of the files is text."""


def divide(
    source: str, files: list[tuple[str, Path]], shares: Shares, encoding: str = "", *, by_kind: bool = False
) -> dict[SplitName, list[Part]]:
    """Files to splits: by the hash of their name, or with `by_kind` of each kind its share of the bytes. A split
    without a readable file gets the one whose hash is nearest; fewer such files than splits are cut themselves. NoText
    where none is readable."""
    every = [Part(path, name, encoding) for name, path in files]
    if by_kind:
        parts = _by_kind(every, shares)
        if all(any(_texts(parts[split])) for split in shares.splits):
            return parts
    ranked = sorted(every, key=lambda part: (part.share, part.name))
    split_of = {part.name: shares.of(part.share) for part in ranked}
    first = list(itertools.islice(_texts(ranked), len(shares.splits) - 1))
    last = next(_texts(reversed(ranked)), None)
    if last is None:
        raise NoText(
            f"{source}: no text in it ({len(files)} files, none of them non-empty {encoding or 'UTF-8'})"
        )
    cut = dict[SplitName, list[Part]]()
    if last in first:
        cut = _cut(last.known(), shares)
        del split_of[last.name]
    else:
        split_of |= {first[0].name: "heldout", last.name: "train"}
        if shares.dev and not any(split_of[part.name] == "dev" and part.known().end for part in ranked):
            taken = (p for p in ranked if split_of[p.name] == "train" and p != last and p.known().end)
            split_of[next(taken, first[1]).name] = "dev"
    parts = {split: [p for p in every if split_of.get(p.name) == split] for split in shares.splits}
    return {split: parts[split] + cut.get(split, []) for split in parts}


def _by_kind(every: list[Part], shares: Shares) -> dict[SplitName, list[Part]]:
    """Divide parts among splits, such that each has its share of every kind; or its share of all kinds as one, where
    the former would be nothing or, as small kinds are not cut, far from the share of all. What is held out is chosen
    first, so that it is the same with and without dev."""
    kinds = defaultdict[str, list[Part]](list)
    for part in _in_order(every):
        kinds[part.kind].append(part)
    least = RARE * _bytes(every)
    rare = [kind for kind, parts in kinds.items() if _bytes(parts) < least]
    pooled = _in_order(part for kind in rare for part in kinds.pop(kind))
    groups = [(_bytes(parts), parts) for parts in (*kinds.values(), pooled)]
    splits, low, no_text = dict[SplitName, list[Part]](), 0.0, list[Part]()
    held: list[tuple[SplitName, float]] = [("heldout", shares.heldout), ("dev", shares.dev)]
    for split, share in held[: len(shares.splits) - 1]:
        found = [_portion(parts, whole, low, share) for whole, parts in groups]
        wanted = come = 0.0
        for (whole, parts), (taken, _) in zip(groups, found, strict=True):
            if share * whole < LEAST:
                wanted, come = wanted + share * _bytes(_texts(parts)), come + _bytes(_texts(taken))
            elif any(_texts(taken)):
                wanted, come = wanted + share * whole, come + share * whole
        if not come or not wanted / 2 <= come <= 2 * wanted:
            parts = _in_order(part for _, parts in groups for part in parts)
            texts = list(_texts(parts))
            no_text += set(parts) - set(texts)
            groups = [(_bytes(itertools.chain(texts, *splits.values())), texts)]
            found = [_portion(texts, groups[0][0], low, share, least=1)]
        splits[split] = [part for taken, _ in found for part in taken]
        groups = [(whole, left) for (whole, _), (_, left) in zip(groups, found, strict=True)]
        low += share
    splits["train"] = [*no_text, *(part for _, parts in groups for part in parts)]
    return {split: sorted(splits[split], key=lambda part: part.name) for split in shares.splits}


def _in_order(parts: Iterable[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: (part.share, part.name))


def _texts(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts that are text, and not empty."""
    return (part for part in parts if part.known().end)


def _bytes(parts: Iterable[Part]) -> int:
    return sum(part.size for part in parts)


def _portion(
    parts: list[Part], whole: float, low: float, share: float, least: int = LEAST
) -> tuple[list[Part], list[Part]]:
    """(parts taken, parts left), both in the order of their hashes. Those are taken whose hash is in [low, low + share)
    where they have from half to twice as many bytes as that share of the `whole`, or that is below `least`; else as
    many as have it, in the order of the hashes, the last of them cut, so that its end is taken."""
    chosen, rest = list[Part](), list[Part]()
    for part in parts:
        (chosen if low <= part.share < low + share and part.end is None else rest).append(part)
    wanted = share * whole
    if wanted < least or wanted / 2 <= _bytes(chosen) <= 2 * wanted:
        return chosen, rest
    known = [part.known() for part in parts]
    wanted *= sum(text.size for text in known if text.end) / max(1, sum(part.size for part in parts))
    taken, left = list[Part](), list[Part]()
    for part, text in zip(parts, known, strict=True):
        if not text.end or wanted < 1:
            left.append(part)
        elif text.size <= max(wanted, 4):  # one character cannot be cut
            taken.append(part)
            wanted -= text.size
        else:
            at = border_at(part.path, text.end, text.end - round(wanted), part.encoding)
            pair = text.split_at(at) if text.begin < at else (part, part)
            left.append(pair[0])
            taken += [pair[1]] if text.begin < at else []
            wanted = 0
    return taken, left


def _cut(part: Part, shares: Shares) -> dict[SplitName, list[Part]]:
    """One file's text, cut where the dev part of it begins, if there is one, and the held-out one."""
    size = part.end or 0
    edges = [border_at(part.path, size, round(size * (1 - shares.heldout)), part.encoding), size]
    if shares.dev:
        before = round(size * (1 - shares.heldout - shares.dev))
        edges.insert(0, border_at(part.path, edges[0], before, part.encoding))
    pairs = itertools.pairwise([0, *edges])
    return {
        split: [replace(part, begin=begin, end=end, cut=part.cut if end == size else 0)]
        for split, (begin, end) in zip(shares.splits, pairs, strict=True)
    }
