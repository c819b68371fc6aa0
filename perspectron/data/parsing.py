"""Texts of chat templates as ids: a template's special tokens are parsed, and what users write never is.

Templates look at what users write, so that it is rendered as it is, but for the pieces of it that could make a special
token: each has a stand-in, a character for private use, until the special tokens of the rendered text are known.
"""

import itertools
import json
import re
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tokenizers

from perspectron.data.tokenizer import Tokenizer
from perspectron.util.config import require
from perspectron.util.errors import DataError

PRIVATE = (range(0xE000, 0xF8FF), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Characters for private use, but for one."""
EDGE = "\uf8ff"


class Spellings:
    """Spellings of tokens, to be found in texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self._begun = frozenset(text[:end] for text in self.texts for end in range(1, len(text) + 1))
        first = "|".join(re.escape(text) for text in self._begun if len(text) == 1)
        self._first = re.compile(first or "(?!)")

    def places(self, text: str) -> Iterator[int]:
        """Where one may begin."""
        return (found.start() for found in self._first.finditer(text))

    def at(self, text: str, at: int) -> tuple[str, str]:
        """The longest one that stands there, or nothing, and the longest beginning of one."""
        end = at + 1
        while end < len(text) and text[at : end + 1] in self._begun:
            end += 1
        whole = (text[at:last] for last in range(end, at, -1) if text[at:last] in self.texts)
        return next(whole, ""), text[at:end]


class Parser:
    """A tokenizer that knows which special tokens of a text are meant: in it each has a spelling that nobody can guess,
    under the same id. Ordinary added tokens, as `<think>` often is, are parsed wherever they stand.

    DataError: a special token that is one only as a word of its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        whole = json.loads(tokenizer.to_str())
        added = whole["added_tokens"]
        for token in added:
            if token["special"] and token["single_word"]:
                raise DataError(
                    f"tokenizer: {token['content']!r} is special as a single word alone, must be so everywhere"
                )
        self.special = Spellings(token["content"] for token in added if token["special"])
        self._added = Spellings(token["content"] for token in added)
        nonce = secrets.token_hex(16)
        self._names = {
            text: f"{EDGE}{nonce}.{at}{EDGE}" for at, text in enumerate(sorted(self.special.texts))
        }
        self._inner = tokenizers.Tokenizer.from_str(json.dumps(_renamed(whole, self._names)))

    def ids(self, text: str, shield: "Shield") -> list[int]:
        """The ids of a rendered text. DataError: half of a surrogate pair."""
        parts, done = list[str](), 0
        for at in self._added.places(text):
            if at >= done and (token := self._added.at(text, at)[0]):
                parts += text[done:at], self._names.get(token, token)
                done = at + len(token)
        try:
            return self._inner.encode(shield.off("".join(parts) + text[done:]), add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise DataError("messages: half of a surrogate pair, which is no text") from None


class Shield:
    """Stand-ins for the pieces of users' strings that are special tokens of `parser`, or of which the template could
    make one by putting pieces side by side. Where the template has the same letters, as "</think>" has the beginning of
    "</s>", it may look for them: there they stay."""

    def __init__(self, parser: Parser, template: str, values: Any) -> None:
        self._special, self._template = parser.special, template
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
            require(
                stand != "", "messages", "all characters for private use", "text that leaves one of them out"
            )
            self._pieces[piece], self._stands[stand] = stand, piece
        return self._pieces[piece]


_PARSERS: "weakref.WeakKeyDictionary[Tokenizer, Parser]" = weakref.WeakKeyDictionary()


def parser_of(tokenizer: Tokenizer) -> Parser:
    """The parser of a tokenizer, which is made once."""
    if tokenizer not in _PARSERS:
        _PARSERS[tokenizer] = Parser(tokenizer)
    return _PARSERS[tokenizer]


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


def _renamed(whole: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The JSON of a tokenizer whose special tokens have other spellings."""

    def name(text: str) -> str:
        return names.get(text, text)

    model = dict(whole["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {name(text): id for text, id in vocab.items()}
    else:
        model["vocab"] = [[name(text), score] for text, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = name(model["unk_token"])
    added = [{**token, "content": name(token["content"])} for token in whole["added_tokens"]]
    return {
        **whole,
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "padding": None,
        "truncation": None,
    }
