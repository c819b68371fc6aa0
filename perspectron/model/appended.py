"""A file of a state: safetensors, and what later saves append to it.

A file begins as an ordinary safetensors file. Tensors that get a slot per token (`grown`, [B,·,S,·]) are digested in
pages of PAGE slots. A later save to the same path keeps the pages that are the same and appends a part: again a header
and data as safetensors have them, of the slots that are new and of all that does not grow. `from` in its header says
how many slots of the parts before it stay; the last part's metadata and tensors are the state's.

`end` in the first header, at a fixed place within the file's first 512 bytes, says how many bytes count. It is changed
last, when all before it is on the disk: a kill leaves the old state or the new one, and whoever reads meanwhile gets
one of them. Anything behind it is an unfinished save, and is overwritten. A file of which half is no longer used, or of
less than LEAST bytes, is written anew.

Digests show damage, not forgery. `digest` is the SHA-256 of a part's metadata without `end`, `whole` that of the
tensors that do not grow, `pages` the XXH3 (128 bits) of each page: the bytes of its slots, tensor by tensor as `grown`
lists them.

Shapes: B batch, H heads, S cache slots, K width.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_128

from perspectron.util.errors import StateError, StorageError
from perspectron.util.files import opened, parse_json
from perspectron.util.machine import memory
from perspectron.util.tensors import (
    JSON_ROOM,
    Place,
    check_size,
    compose,
    parse_header,
    read_header,
    read_tensor,
)

PAGE = 64
"""Slots of a page; the last of a part may have fewer."""
AT_ONCE = 8  # pages
LEAST = 256 << 10
"""Least bytes of a state for saves to append to its file; a smaller one is written anew."""
MOST_APPENDED = 1024
"""A file of so many parts or more is written anew, not appended to."""
MOST_PARTS = 4096
"""Most parts that are read from one file; earlier parts in files of their own are not limited."""
FIELDS = ("grown", "from", "pages", "page", "whole", "digest")
"""Fields of a header that describe the file and not the state."""
END = "end"
_Body = tuple[int, Callable[[], Tensor]]
"""Bytes of a tensor, and a function that returns it."""


@dataclass(frozen=True)
class Grown:
    """Tensors that get a slot per token: their names, and a function for a span of slots of each [B,H,S,K]."""

    names: tuple[str, ...]
    span: Callable[[int, int], Sequence[Tensor]]


@dataclass(frozen=True)
class Contents:
    """Contents of a file: metadata, the tensors that do not grow, and those that do, with their number of slots."""

    header: dict[str, str]
    tensors: dict[str, Tensor]
    grown: tuple[Grown, ...] = ()
    slots: int = 0

    def kinds(self) -> dict[str, list[Any]]:
        """dtype, B, H and K of each tensor that grows."""
        pairs = (
            (name, x) for part in self.grown for name, x in zip(part.names, part.span(0, 0), strict=True)
        )
        return {name: [str(x.dtype), x.shape[0], x.shape[1], x.shape[3]] for name, x in pairs}

    def pages(self, ends: Sequence[int], start: int = 0) -> list[str]:
        """Digests of the pages that begin at `start` and end at `ends`, in order."""
        taken = [xxh3_128() for _ in ends]
        for first in range(0, len(ends), AT_ONCE):  # a span across pieces of a cache is a copy: a small one
            some = slice(first, first + AT_ONCE)
            for part in self.grown:
                for x in part.span(start, ends[some][-1]):
                    _digested(x, start, ends[some], taken[some])
            start = ends[some][-1]
        return [page.hexdigest() for page in taken]


def _digested(x_BHSK: Tensor, start: int, ends: Sequence[int], taken: Sequence[Any]) -> None:
    """Add the slots of each page to its digest."""
    B, H, S, K = x_BHSK.shape
    if not B * H * S * K:
        return
    x_BHSK = x_BHSK.detach().cpu()
    rows = [_bytes(x_BHSK[b, h]).reshape(S, -1) for b in range(B) for h in range(H)]
    at = 0
    for end, page in zip(ends, taken, strict=True):
        for row in rows:
            page.update(row[at : end - start].data)
        at = end - start


def _bytes(x: Tensor) -> Any:
    return x.contiguous().flatten().view(torch.uint8).numpy()


def page_ends(start: int, stop: int, size: int = PAGE) -> list[int]:
    """Ends of the pages, of at most `size` slots, of a part that has the slots from `start` to before `stop`."""
    return [*range(start + size, stop, size), stop] if stop > start else []


@dataclass(frozen=True)
class _Page:
    stop: int
    digest: str


@dataclass
class _Part:
    """A part of a file. places: of its tensors, in the last part only; data: byte where they begin; start: first slot;
    slots: how many it has; starts: of tensors that grow, counted from `data`; pages: those not replaced since."""

    path: Path
    metadata: dict[str, str]
    places: dict[str, Place]
    data: int
    kinds: dict[str, list[Any]]
    start: int = 0
    slots: int = 0
    starts: list[int] = field(default_factory=list)
    pages: list[_Page] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.pages[-1].stop if self.pages else self.start


# Writing


def write(path: Path, contents: Contents, name: Path, start: int = 0) -> None:
    """Write a whole file, or one part from slot `start` on in a file of its own, readable by its owner alone; not
    atomic by itself. OSError: it cannot be written; StateError, which names `name`: its header would be too large."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        head, bodies = _part(contents, start, whole=True)
        check_size(name, len(head) - 8, StateError)
        end = len(head) + sum(size for size, _ in bodies)
        if contents.grown:
            head = head.replace(_end(0), _end(end), 1)
        file.write(head)
        _write(file, bodies)


def page_names(contents: Contents, stops: Sequence[int], start: int = 0, before: str = "") -> list[str]:
    """The names of parts in files of their own, the first from slot `start`, each of the others from the end of the one
    before: digests of what a part holds and of the name of the part before it."""
    starts, names = [start, *stops][: len(stops)], list[str]()
    ends = [page_ends(start, stop) for start, stop in zip(starts, stops, strict=True)]
    digests = iter(contents.pages([end for own in ends for end in own], start))
    for first, own in zip(starts, ends, strict=True):
        before = _page_name([next(digests) for _ in own], first, before)
        names.append(before)
    return names


def _page_name(digests: Sequence[str], start: int, before: str) -> str:
    return hashlib.blake2b(f"{before} {start} {''.join(digests)}".encode(), digest_size=16).hexdigest()


def append(path: Path, contents: Contents) -> bool:
    """Append what is new to a file that holds an earlier state of the same text, whole or not at all. False: there is
    no such file, or it is better written anew. StorageError when it cannot be written, StateError as `write`."""
    size = _bytes_of(contents)
    if not contents.grown or size < LEAST:
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, descriptor):
            return False
        with open(descriptor, "rb", closefd=False) as file:
            parts, end = _parts(path, file)
        kept = _kept(parts, contents) if os.pread(descriptor, 32, _END_AT) == _end(end) else 0
        if not kept or len(parts) >= MOST_APPENDED:
            return False
        head, bodies = _part(contents, kept)
        own = len(head) + sum(size for size, _ in bodies)
        if own > size // 2 or end + own > 2 * size:
            return False
        check_size(path, len(head) - 8, StateError)
        _append(path, descriptor, end, head, bodies)
        return _is_at(path, descriptor)  # else another has written the file anew meanwhile
    except (OSError, ValueError):  # another process writes to it, or it cannot be continued
        return False
    finally:
        os.close(descriptor)


def _append(path: Path, descriptor: int, end: int, head: bytes, bodies: Sequence[_Body]) -> None:
    at, bytes_end = end, _end(end)
    try:
        os.ftruncate(descriptor, end)
        for piece in (head, *(_bytes(make().detach().cpu()).data for size, make in bodies if size)):
            at = _pwrite(descriptor, piece, at)
        os.fsync(descriptor)
        bytes_end = _end(at)
        _pwrite(descriptor, bytes_end, _END_AT)
        os.fsync(descriptor)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if bytes_end != _end(end):
                _pwrite(descriptor, _end(end), _END_AT)
            os.ftruncate(descriptor, end)
        if isinstance(error, OSError):
            raise StorageError(f"{path}: not written ({error.strerror or error})") from error
        raise


def _pwrite(descriptor: int, data: Any, at: int) -> int:
    """Write all of the data at an offset; the offset of its end."""
    left = memoryview(data).cast("B")
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
    return at


def _kept(parts: list[_Part], contents: Contents) -> int:
    """Slots of a file that are as in `contents`: those of its first pages, up to one that differs."""
    alike = all(parts[-1].metadata.get(name) == contents.header[name] for name in ("format", "model"))
    if not alike or parts[-1].kinds != contents.kinds():
        return 0
    pages = [page for part in parts for page in part.pages if page.stop <= contents.slots]
    found = contents.pages([page.stop for page in pages])
    kept = 0
    for page, digest in zip(pages, found, strict=True):
        if page.digest != digest:
            break
        kept = page.stop
    return kept


def _part(contents: Contents, start: int, *, whole: bool = False) -> tuple[bytes, list[_Body]]:
    """(header, bytes of each tensor after it and a function that returns it) of a part from slot `start` on."""
    made: dict[str, tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]] = {}
    for name, x in contents.tensors.items():
        made[name] = (x.dtype, tuple(x.shape), lambda x=x: x)  # type: ignore[misc]
    for part in contents.grown:
        for i, (name, x) in enumerate(zip(part.names, part.span(0, 0), strict=True)):
            B, H, _, K = x.shape
            shape = (B, H, contents.slots - start, K)
            made[name] = (x.dtype, shape, lambda i=i, p=part: p.span(start, contents.slots)[i])  # type: ignore[misc]
    order = sorted(made, key=lambda name: (-made[name][0].itemsize, name))
    header = dict(contents.header)
    if contents.grown:
        ends = page_ends(start, contents.slots)
        header |= {"grown": json.dumps(contents.kinds()), "from": str(start)}
        header["pages"] = "".join(contents.pages(ends, start))
    header = _sealed(header, contents.tensors)
    if whole and contents.grown:
        header = {END: _end(0).decode(), **header}
    shapes = {name: made[name][:2] for name in order}
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes.values()]
    first = compose(shapes, header)
    parse_header(first[8:], sum(sizes))  # so that nothing is written that no reader takes
    return first, [(size, made[name][2]) for size, name in zip(sizes, order, strict=True)]


def _write(file: BinaryIO, bodies: list[_Body]) -> None:
    for size, make in bodies:
        if size:
            file.write(_bytes(make().detach().cpu()).data)


def _bytes_of(contents: Contents) -> int:
    """Bytes of the tensors of a whole file."""
    slots = (
        x.shape[:2].numel() * x.shape[3] * x.itemsize for part in contents.grown for x in part.span(0, 0)
    )
    return sum(x.nbytes for x in contents.tensors.values()) + contents.slots * sum(slots)


def _sealed(header: dict[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    header = header | {"whole": _whole(tensors)}
    return header | {"digest": _digest(header)}


def _whole(tensors: Mapping[str, Tensor]) -> str:
    taken = hashlib.sha256()
    _take(taken, tensors)
    return taken.hexdigest()


def digest_of(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Hex digest of a header and its tensors, as state files of the previous format and adapters store it."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    _take(digest, tensors)
    return digest.hexdigest()


def _take(digest: Any, tensors: Mapping[str, Tensor]) -> None:
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor).data)


def _digest(header: Mapping[str, str]) -> str:
    text = json.dumps({name: header[name] for name in header if name not in (END, "digest")}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _end(count: int) -> bytes:
    """The field `end`: the number of bytes that count and its checksum, in hexadecimal digits."""
    digits = f"{count:016x}".encode()
    return digits + xxh3_64_hexdigest(digits).encode()


_END_AT = 8 + len('{"__metadata__":{"end":"')


def _is_at(path: Path, descriptor: int) -> bool:
    """True if a path leads to an open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


# Reading


class PageError(StateError):
    """The file of an earlier part, `path`, is missing or damaged."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


Check = Callable[[dict[str, str], dict[str, Place]], None]
"""Called with the metadata of a state and the places of its tensors."""


def read(
    path: Path, before: Sequence[Path] = (), check: Check = lambda _, __: None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata without the fields of the file, tensors). before: files of earlier parts, each named by `page_names`.
    check: called before the tensors are read. StateError, which names the file: it is missing, damaged, larger than
    half the memory, or no saved state."""
    earlier, name = list[_Part](), ""
    for page in before:
        try:
            with _readable(page, earlier) as (_, parts):
                name = _page_name([own.digest for own in parts[-1].pages], parts[-1].start, name)
                if name != page.stem:
                    raise ValueError("damaged, it is not what its name says")
                earlier = parts
        except StateError as error:
            raise PageError(page, str(error)) from None
    with _readable(path, earlier) as (file, parts):
        last = parts[-1]
        if last.metadata.get("page", name) != name:
            raise ValueError(f"it goes on from page {last.metadata['page'][:40]}, not from {name or 'none'}")
        header = {name: text for name, text in last.metadata.items() if name not in FIELDS}
        check(header, last.places)
        tensors = dict[str, Tensor]()
        for name, place in last.places.items():
            if name not in last.kinds:
                file.seek(last.data + place.start)
                tensors[name] = read_tensor(file, place)
        if "whole" in last.metadata:
            fits = _whole(tensors) == last.metadata["whole"]
        else:  # of the previous format
            fits = digest_of(header, tensors) == last.metadata.get("digest")
        if not fits:
            raise ValueError("damaged, its contents do not match their digest")
        tensors |= _joined(file, parts)
    return header, tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of the state, without its tensors, which are not read. StateError as `read`."""
    with _readable(path) as (_, parts):
        return {name: text for name, text in parts[-1].metadata.items() if name not in FIELDS}


@contextlib.contextmanager
def _readable(path: Path, before: Sequence[_Part] = ()) -> Iterator[tuple[BufferedReader, list[_Part]]]:
    """The open file, and its parts, preceded by those of `before`."""
    with opened(path, StateError) as file:
        size, most = os.fstat(file.fileno()).st_size, memory() // 2
        if size > most:
            raise StateError(f"{path}: {size:,} bytes, must be ≤ {most:,}, half the memory of this machine")
        if (header := int.from_bytes(file.read(8), "little")) <= size:
            check_size(path, header, StateError)
        try:
            yield file, _parts(path, file, before)[0]
        except ValueError as cause:
            raise StateError(f"{path}: not a saved state ({cause})") from None


def _parts(path: Path, file: Any, before: Sequence[_Part] = ()) -> tuple[list[_Part], int]:
    """(the parts of `before` and of a file, each with the pages that count; the bytes that count). ValueError: the file
    is damaged, or no saved state."""
    parts, at, count, size = list(before), 0, 0, os.fstat(file.fileno()).st_size
    end = size
    while at < end:
        file.seek(at)
        text = read_header(file)
        metadata, places = parse_header(text, None)
        begun, data = at, at + 8 + len(text)
        del text  # a copy of what is in the metadata, which may be large
        at = data + max((place.stop for place in places.values()), default=0)
        if begun == 0:
            end = _end_of(metadata, size)
        if at > end:
            raise ValueError(f"it ends early, after {end} of at least {at} bytes")
        if (count := count + 1) > MOST_PARTS:
            raise ValueError(f"more than {MOST_PARTS} parts")
        parts = _with(parts, path, metadata, places, data)
    if not end:
        raise ValueError("it is empty")
    return parts, end


def _end_of(metadata: dict[str, str], size: int) -> int:
    """Number of bytes of a file that count. ValueError: the file has fewer, or the field `end` is damaged."""
    text = metadata.pop(END, None)
    if text is None:
        return size
    try:
        end = int(text[:16], 16)
    except ValueError:
        end = -1
    if end < 0 or text.encode() != _end(end):
        raise ValueError(f"{END} is damaged")
    if end > size:
        raise ValueError(f"it ends early, after {size} of {end} bytes")
    return end


def _with(
    parts: list[_Part], path: Path, metadata: dict[str, str], places: dict[str, Place], data: int
) -> list[_Part]:
    """The parts so far without the pages that a new one replaces, and it. ValueError: it is damaged or unlike them."""
    if "whole" not in metadata and not parts:  # a file of the previous format
        return [_Part(path, metadata, places, data, {})]
    if "digest" not in metadata or metadata["digest"] != _digest(metadata):
        raise ValueError("damaged, a header does not match its digest")
    kinds = _kinds(metadata, places)
    if parts and (
        not kinds or kinds != parts[0].kinds or metadata.get("format") != parts[0].metadata.get("format")
    ):
        raise ValueError("a part of another kind than the first")
    start = _number(metadata.get("from", "0"))
    slots = next((places[name].shape[2] for name in kinds), 0)
    if parts:
        parts[-1].metadata, parts[-1].places = {"format": metadata.get("format", "")}, {}
    while parts and parts[-1].stop > start:
        if parts[-1].pages:
            parts[-1].pages.pop()
        if not parts[-1].pages:
            parts.pop()
    if start != (parts[-1].stop if parts else 0):
        raise ValueError(f"a part from slot {start} on, which does not follow a page")
    ends, text = page_ends(start, start + slots), metadata.get("pages", "")
    if len(text) != 32 * len(ends):
        raise ValueError(f"{len(text)} digits of digests for {len(ends)} pages")
    pages = [_Page(end, text[32 * i : 32 * (i + 1)]) for i, end in enumerate(ends)]
    if parts and not parts[-1].pages:
        parts.pop()
    starts = [places[name].start for name in kinds]
    parts.append(_Part(path, metadata, places, data, kinds, start, slots, starts, pages))
    return parts


def _kinds(metadata: dict[str, str], places: dict[str, Place]) -> dict[str, list[Any]]:
    """Kinds of the tensors that grow, as the header lists them. ValueError: the file's tensors differ."""
    kinds = parse_json(metadata.get("grown", "{}"), room=JSON_ROOM)
    if not isinstance(kinds, dict):
        raise ValueError("grown is no object")
    slots = {places[name].shape[2] for name in kinds if name in places and len(places[name].shape) == 4}
    for name, kind in kinds.items():
        place = places.get(name)
        if place is None or len(place.shape) != 4 or len(slots) > 1:
            raise ValueError(f"{name[:80]!r} is listed in grown, and is none with slots as the others")
        if kind != [str(place.dtype), place.shape[0], place.shape[1], place.shape[3]]:
            raise ValueError(f"{name[:80]!r} is of another kind than grown lists")
    return kinds


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError(f"from is {text[:40]!r}, must be a number")
    return int(text)


def _joined(file: BufferedReader, parts: list[_Part]) -> dict[str, Tensor]:
    """The tensors that grow, joined from the slots of all parts. file: that of the last part. ValueError, or PageError
    for an earlier file: a page does not match its digest."""
    last, joined = parts[-1], dict[str, Tensor]()
    for name in last.kinds:
        dtype, (B, H, _, K) = last.places[name].dtype, last.places[name].shape
        joined[name] = _room((B, H, last.stop, K), dtype)
    for part in parts:
        ends, taken = [page.stop for page in part.pages], [xxh3_128() for _ in part.pages]
        with contextlib.ExitStack() as stack:
            own = file if part.path == last.path else stack.enter_context(opened(part.path, StateError))
            for at, x_BHSK in zip(part.starts, joined.values(), strict=True):
                _read_slots(own, part, part.data + at, x_BHSK)
                _digested(x_BHSK[:, :, part.start : part.stop], part.start, ends, taken)
        for page, digest in zip(part.pages, taken, strict=True):
            if page.digest != digest.hexdigest():
                why = f"damaged, the page up to slot {page.stop} does not match its digest"
                raise ValueError(why) if own is file else PageError(part.path, f"{part.path}: {why}")
    return joined


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor. numpy asks for large memory pages, which the system provides several times faster."""
    size = math.prod(shape) * dtype.itemsize
    return (
        torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)
        if size
        else torch.empty(shape, dtype=dtype)
    )


def _read_slots(file: BufferedReader, part: _Part, at: int, into_BHSK: Tensor) -> None:
    """Read the slots of a part that count into a tensor, whose data begin at `at`. ValueError: the file ends early."""
    B, H, _, K = into_BHSK.shape
    S, live, size = part.slots, part.stop - part.start, K * into_BHSK.dtype.itemsize
    pieces = into_BHSK if live == into_BHSK.shape[2] == S else None
    if pieces is not None:  # all of it in one go
        places = [(at, pieces)]
    else:
        starts = [at + i * S * size for i in range(B * H)]
        places = list(zip(starts, into_BHSK.flatten(0, 1)[:, part.start : part.stop], strict=True))
    for start, piece in places:
        into = _bytes(piece)
        file.seek(start)
        if into.size and file.readinto(into.data) < into.size:
            raise ValueError("it ends early")
