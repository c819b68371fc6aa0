"""Exact labels of the tokens of Python source, from `tokenize` and `ast`.

A label is a small whole number for each byte of a text; a token has that of its first byte that is no space.
"""

import ast
import io
import keyword
import tokenize
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

LABELS = {
    "brackets": ("outside", "1 deep", "2 deep", "3 or more"),
    "block": ("top level", "1 deep", "2 deep", "3 or more"),
    "text": ("code", "string", "comment"),
    "column": ("line start", "before 20", "before 40", "later"),
    "name": ("no name", "not bound before", "bound within 10 lines", "bound earlier"),
    "call": ("outside", "in an argument", "in an argument's argument"),
}
"""Each label and the names of its values."""
RECENT = 10  # lines

Bytes = NDArray[np.int8]
_STRINGS = {
    getattr(tokenize, name)
    for name in ("STRING", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
    if hasattr(tokenize, name)
}


def labels(text: str) -> dict[str, Bytes] | None:
    """The labels of each byte of a text; None where it is no Python that this version reads, or where a line ends in a
    carriage return alone, which `ast` counts and `tokenize` does not."""
    if "\r" in text.replace("\r\n", ""):
        return None
    try:
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return None
    at = _Places(text)
    found = {name: np.zeros(at.size, dtype=np.int8) for name in LABELS}
    for start, stop in at.lines():
        length = np.arange(stop - start)
        found["column"][start:stop] = np.where(
            length == 0, 0, np.where(length < 20, 1, np.where(length < 40, 2, 3))
        )
        first = start + at.indent(start, stop)
        found["column"][start : first + 1] = 0
    _spans(tokens, at, found)
    _names(tokens, _bound(tree), at, found["name"])
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            parts: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
            for part in parts:
                here = found["call"][at.of_node(part)]
                np.minimum(here + 1, 2, out=here)
    return found


class _Places:
    """Byte offsets of lines and columns in a text."""

    def __init__(self, text: str) -> None:
        self._lines = list(io.StringIO(text)) or [""]
        sizes = [len(line.encode()) for line in self._lines]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._bytes = text.encode()
        self.size = len(self._bytes)

    def lines(self) -> Iterator[tuple[int, int]]:
        yield from zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True)

    def indent(self, start: int, stop: int) -> int:
        line = self._bytes[start:stop]
        return min(len(line) - len(line.lstrip()), max(0, stop - start - 1))

    def of(self, line: int, column: int) -> int:
        """Place of a character: line from 1, column in characters from 0, as `tokenize` has them."""
        if line > len(self._lines):
            return self.size
        return int(self._starts[line - 1]) + len(self._lines[line - 1][:column].encode())

    def of_node(self, node: ast.expr | ast.keyword) -> slice:
        """Span of a node, whose columns are in bytes."""
        start = int(self._starts[node.lineno - 1]) + node.col_offset
        return slice(
            start, int(self._starts[(node.end_lineno or node.lineno) - 1]) + (node.end_col_offset or 0)
        )


def _spans(tokens: Sequence[tokenize.TokenInfo], at: _Places, found: dict[str, Bytes]) -> None:
    """Depths of brackets and blocks, strings and comments."""
    brackets = block = last = 0
    for token in tokens:
        start, stop = at.of(*token.start), at.of(*token.end)
        if token.type == tokenize.INDENT:
            block += 1
        elif token.type == tokenize.DEDENT:
            block -= 1
        closes = token.type == tokenize.OP and token.string in ")]}"
        brackets -= closes
        for name, depth in (("brackets", brackets), ("block", block)):
            found[name][min(last, start) : stop] = min(max(depth, 0), 3)
        brackets += token.type == tokenize.OP and token.string in "([{"
        if token.type in _STRINGS:
            found["text"][start:stop] = 1
        elif token.type == tokenize.COMMENT:
            found["text"][start:stop] = 2
        last = stop


def _bound(tree: ast.AST) -> dict[str, list[int]]:
    """The lines, in order, in which each name is bound."""
    bound: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        names: list[tuple[str, int]] = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [(node.id, node.lineno)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [(node.name, node.lineno)]
        elif isinstance(node, ast.arg):
            names = [(node.arg, node.lineno)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [((alias.asname or alias.name).partition(".")[0], node.lineno) for alias in node.names]
        for name, line in names:
            bound.setdefault(name, []).append(line)
    return {name: sorted(lines) for name, lines in bound.items()}


def _names(
    tokens: Sequence[tokenize.TokenInfo], bound: dict[str, list[int]], at: _Places, found: Bytes
) -> None:
    for token in tokens:
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            line = token.start[0]
            before = [one for one in bound.get(token.string, ()) if one < line]
            value = 1 if not before else 2 if line - before[-1] <= RECENT else 3
            found[at.of(*token.start) : at.of(*token.end)] = value


def of_tokens(pieces: Sequence[bytes], each: dict[str, Bytes]) -> dict[str, NDArray[np.int64]]:
    """The labels of tokens, given as their bytes, from those of the bytes."""
    places, at = [], 0
    for piece in pieces:
        inside = len(piece) - len(piece.lstrip(b" "))
        places.append(at + (inside if inside < len(piece) else 0))
        at += len(piece)
    index = np.array(places, dtype=np.int64)
    return {name: value[index].astype(np.int64) for name, value in each.items()}
