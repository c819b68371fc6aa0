"""Keeps what users write in chats from being special tokens.

A template may look at what users write, so it is given unchanged, except for pieces of it that could make a special
token: each is replaced by a character for private use until the special tokens of the rendered text are marked.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perspectron.util.config import require

PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Characters for private use."""


class Spellings:
    """Spellings of tokens, to be found in texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self._begun = frozenset(text[:end] for text in self.texts for end in range(1, len(text) + 1))
        first = "|".join(re.escape(text) for text in self._begun if len(text) == 1)
        self._first = re.compile(first or "(?!)")

    def places(self, text: str) -> Iterator[int]:
        """The positions at which a spelling may begin."""
        return (found.start() for found in self._first.finditer(text))

    def at(self, text: str, at: int) -> tuple[str, str]:
        """(the longest spelling at a position, or "" if none is there; the longest beginning of one)."""
        end = at + 1
        while end < len(text) and text[at : end + 1] in self._begun:
            end += 1
        whole = (text[at:last] for last in range(end, at, -1) if text[at:last] in self.texts)
        return next(whole, ""), text[at:end]


class Shield:
    """Stand-ins for the pieces of users' strings that are special tokens, or of which a template could make one by
    putting pieces side by side. Where the template has the same letters, as "</think>" has the beginning of "</s>", it
    may look for them: there they stay. values: what is rendered; stand-ins are characters that occur nowhere in it."""

    def __init__(self, special: Iterable[str], template: str, values: Any) -> None:
        self._special, self._template = _spellings(tuple(special)), template
        written = "\0".join([template, *strings(values)])
        taken = set(written)
        self._free = (
            stand
            for stand in map(chr, itertools.chain(*PRIVATE))
            if stand not in taken and _escaped(stand) not in written
        )
        self._pieces = dict[str, str]()
        self._stands = dict[str, str]()

    def over(self, value: Any) -> Any:
        """The same value with stand-ins in its strings, names of objects among them."""
        if isinstance(value, str):
            return self._over(value)
        if isinstance(value, Mapping):
            return {self.over(name): self.over(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.over(part) for part in value]
        return value

    def off(self, text: str) -> str:
        """The text with what the stand-ins stand for, also where a template has written them as JSON in ASCII."""
        for stand, piece in self._stands.items():
            text = text.replace(stand, piece).replace(_escaped(stand), _escaped(piece))
        return text

    def _over(self, text: str) -> str:
        parts, done = list[str](), 0
        for at in self._special.places(text):
            if at < done:
                continue
            piece, begun = self._special.at(text, at)
            looked_for = at + len(begun) < len(text) and text[at : at + len(begun) + 2] in self._template
            if piece := piece or ("" if looked_for else begun):
                parts += text[done:at], self._stand(piece)
                done = at + len(piece)
        return "".join(parts) + text[done:]

    def _stand(self, piece: str) -> str:
        if piece not in self._pieces:
            stand = next(self._free, "")
            known = "all characters for private use"
            require(stand != "", "messages", known, "text that leaves one of them out")
            self._pieces[piece], self._stands[stand] = stand, piece
        return self._pieces[piece]


@functools.lru_cache(maxsize=8)
def _spellings(texts: tuple[str, ...]) -> Spellings:
    return Spellings(texts)


def strings(value: Any) -> Iterator[str]:
    """All strings of a value of JSON, names of objects among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from strings(name)
            yield from strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from strings(part)


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]
