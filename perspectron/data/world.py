"""RWKV's World vocabulary: a text becomes, from its beginning, the longest token each time, whatever its bytes spell.

The author's file has a line for each token: its id, a Python literal of its text or bytes, and the number of its bytes.
Id 0 is in no line; it parts documents. As a file of the tokenizers library it is a WordPiece over the letters of bytes,
with nothing before the pieces inside a word and a text as one word: the same ids, by an algorithm that takes the square
of a text's length, which is why `Longest` stands before it here.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from perspectron.data.bpe import MOST_TOKENS, byte_letters, read
from perspectron.util.errors import DataError

FILE = "rwkv_vocab_v20230424.txt"
SEPARATOR = "<|rwkv_tokenizer_end_of_text|>"
"""The spelling of id 0 in folders of transformers."""
LONGEST = 1 << 12
"""Most bytes of a token."""
_LINE = re.compile(r"""(\d{1,8}) (b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")) (\d{1,8})""")
_AT_ONCE = 1 << 14  # tokens


def loaded(path: Path) -> str:
    """The vocabulary in a file of the author's as a file of the tokenizers library. DataError, naming file and line."""
    return to_json(parsed(read(path), path))


def parsed(text: str, path: object) -> dict[bytes, int]:
    """The ids of tokens in the author's file. DataError, naming the line: not an id, a literal and its length, an id or
    a token that was there before; or a byte without a token."""
    ids, known = dict[bytes, int](), {0}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        place = f"{path}: line {number}"
        parts = _LINE.fullmatch(line.removesuffix("\r"))
        if parts is None or len(line) > 4 * LONGEST:
            raise DataError(f"{place}: {line[:40]!r}, must be an id, a literal of a token and its length")
        try:
            literal = ast.literal_eval(parts[2])
            token = literal.encode() if isinstance(literal, str) else literal
        except (SyntaxError, ValueError) as error:
            raise DataError(f"{place}: {parts[2][:40]} is no text or bytes ({error})") from None
        id, length = int(parts[1]), int(parts[3])
        if len(token) != length or not 1 <= length <= LONGEST:
            raise DataError(f"{place}: a token of {len(token)} bytes, must be {length}, from 1 to {LONGEST}")
        if id in known or id >= MOST_TOKENS:
            must = "one of which there is no other, from 1" if id in known else f"< {MOST_TOKENS}"
            raise DataError(f"{place}: id {id}, must be {must}")
        if ids.setdefault(token, id) != id:
            raise DataError(f"{place}: {parts[2][:40]} is token {ids[token]}, too")
        known.add(id)
    return complete(ids, path)


def complete(ids: dict[bytes, int], where: object) -> dict[bytes, int]:
    """`ids`, checked. DataError: a byte without a token, or a token that is spelled as the separator."""
    if missing := [byte for byte in range(256) if bytes([byte]) not in ids]:
        raise DataError(f"{where}: byte {missing[0]:#04x} has no token, must be one of its own")
    if SEPARATOR.encode() in ids:
        raise DataError(f"{where}: token {ids[SEPARATOR.encode()]} is {SEPARATOR}, which is id 0")
    return ids


def to_json(ids: Mapping[bytes, int]) -> str:
    """The file of the tokenizers library."""
    letters = byte_letters()
    vocab = {SEPARATOR: 0} | {"".join(letters[byte] for byte in token): id for token, id in ids.items()}
    inner = tokenizers.Tokenizer(
        models.WordPiece(
            vocab, unk_token=SEPARATOR, continuing_subword_prefix="", max_input_chars_per_word=1 << 31
        )
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([SEPARATOR])
    return inner.to_str(pretty=True)


def is_one(file: Mapping[str, Any]) -> bool:
    """True of a tokenizer's file that has the longest token each time, as `to_json` writes them."""
    model = file["model"]
    return (
        model.get("type") == "WordPiece"
        and model.get("continuing_subword_prefix") == ""
        and file.get("normalizer") is None
        and file.get("pre_tokenizer") == {**_BYTES, "add_prefix_space": False, "use_regex": False}
    )


_BYTES = {"type": "ByteLevel", "trim_offsets": True}


class Encoding(NamedTuple):
    """The ids of a text, and no special one before them."""

    ids: list[int]
    special_tokens_mask: Sequence[int] = ()


class Longest:
    """A tokenizer of the library that encodes by the longest token each time, in time linear in the text's length.

    ids: of the tokens by their bytes. Added tokens are found first, by the names that they have in it."""

    def __init__(self, inner: tokenizers.Tokenizer, place: object) -> None:
        self._inner = inner
        added = {token.content: id for id, token in inner.get_added_tokens_decoder().items()}
        bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
        self.ids = dict[bytes, int]()
        for token, id in inner.get_vocab(with_added_tokens=False).items():
            if token not in added:
                try:
                    self.ids[bytes(bytes_of[letter] for letter in token)] = id
                except KeyError:
                    raise DataError(f"{place}: model.vocab has {token!r}, must be letters of bytes") from None
        complete(self.ids, place)
        lengths = dict[bytes, set[int]]()
        for data in self.ids:
            lengths.setdefault(data[:2], set()).add(len(data))
        # A token of one byte is taken where no token matches that begins with the next two bytes.
        self._lengths = {head: sorted(of, reverse=True) for head, of in lengths.items() if len(head) == 2}
        self._added = added
        spellings = [re.escape(token) for token in sorted(added, key=len, reverse=True)]
        self._marks = re.compile(f"({'|'.join(spellings)})") if spellings else None

    def get_vocab(self) -> dict[str, int]:
        return self._inner.get_vocab()

    def encode(self, text: str) -> Encoding:
        return Encoding([id for ids in self.pieces(text) for id in ids])

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[Encoding]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids)))

    def decode_batch(self, texts: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in texts]

    def pieces(self, text: str) -> Iterator[list[int]]:
        """The ids of a text, some thousand at a time."""
        parts = [text] if self._marks is None else self._marks.split(text)
        for i, part in enumerate(parts):
            if i % 2:
                yield [self._added[part]]
            else:
                yield from self._longest(part.encode())

    def _longest(self, data: bytes) -> Iterator[list[int]]:
        known, lengths, at, size, found = self.ids, self._lengths, 0, len(data), list[int]()
        while at < size:
            for length in lengths.get(data[at : at + 2], ()):
                token = data[at : at + length]  # at the end of the text it may be a shorter one, as good
                if token in known:
                    found.append(known[token])
                    at += len(token)
                    break
            else:
                found.append(known[data[at : at + 1]])
                at += 1
            if len(found) >= _AT_ONCE:
                yield found
                found = []
        if found:
            yield found
