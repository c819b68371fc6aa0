"""Byte-level BPE: any text to ids and back, without loss."""

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers, trainers

from perspectron.data import bpe
from perspectron.data.bpe import END_OF_TEXT, MOST_TOKENS, blank, byte_letters
from perspectron.util.errors import DataError
from perspectron.util.files import write_text

STOP = "<|stop|>"
"""Prefix of an imported model's tokens that end texts as the separator does. No text gives them, as every known pattern
splits here."""
_TRAINING_PIECE = 2**18
_PIECE = 2**16
_RUN = 2**20
_BORDER = re.compile(r"\n(?=[^\W_])|[^\W_](?= )")
__all__ = ["END_OF_TEXT", "MOST_TOKENS", "STOP", "Tokenizer", "blank", "byte_letters"]


class Tokenizer:
    """A byte-level BPE tokenizer. Id 0 (`end_of_text`) separates documents and is never produced by text."""

    end_of_text = 0

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Wrap a tokenizer that has passed `load` or come from `train`."""
        # Not part of the saved file: with it the separator's spelling inside a text is ordinary text.
        inner.encode_special_tokens = True
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()
        canonical = json.dumps(json.loads(inner.to_str()), sort_keys=True, separators=(",", ":"))
        self.fingerprint: str = hashlib.sha256(canonical.encode()).hexdigest()
        self._bytes = _byte_table(inner)
        ends = (id for token, id in inner.get_vocab().items() if token.startswith(STOP))
        self.stops = frozenset((self.end_of_text, *ends))
        """Tokens that end a text and are none of it."""

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn at most `vocab_size` tokens, including 256 bytes and the separator; fewer from little text.

        The same texts give the same tokenizer. DataError: `vocab_size` below 257, or no text.
        """
        if vocab_size < 257:
            raise DataError(f"vocab_size: {vocab_size} is below 257 (256 bytes and the separator)")
        inner = blank()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        pieces = _training_pieces(texts)
        first = next(pieces, None)
        if first is None:
            raise DataError("tokenizer: no text to train on")
        inner.train_from_iterator(itertools.chain([first], pieces), trainer)
        return cls.parse(inner.to_str(), Path("tokenizer"))

    @classmethod
    def spelled(cls, characters: Iterable[str]) -> "Tokenizer":
        """256 bytes, the separator, and tokens for these characters, each merged from its bytes, first to last. Text is
        split nowhere else, as the first byte of a character is none of another's others."""
        alphabet = byte_letters()
        vocab = {END_OF_TEXT: 0} | {letter: id for id, letter in enumerate(alphabet, 1)}
        merges = []
        for character in characters:
            letters = [alphabet[byte] for byte in character.encode()]
            for end in range(1, len(letters)):
                pair = ["".join(letters[:end]), letters[end]]
                if "".join(pair) not in vocab:
                    vocab["".join(pair)] = len(vocab)
                    merges.append(pair)
        return cls(_of(bpe.to_json(vocab, merges)))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer written by `save`. DataError: missing, damaged, or of another kind."""
        return cls.parse(bpe.read(path), path)

    @classmethod
    def parse(cls, text: str, path: Path) -> "Tokenizer":
        """A tokenizer of what `to_str` gives. DataError, naming `path`, as `load`."""
        learned = bpe.parse(text, path)
        bpe.require_whole(learned.vocab, learned.merges, path)
        for token in learned.added:
            if (token.content, token.id, token.special) != (END_OF_TEXT, cls.end_of_text, True):
                raise DataError(
                    f"{path}: added_tokens has {bpe.short(token.content)} with id {token.id}, must have {END_OF_TEXT} "
                    f"alone with id {cls.end_of_text}; `perspectron import` reads others"
                )
        with _panics(path):
            return cls(_of(bpe.to_json(*learned[:3])))

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON, atomically. StorageError if it cannot be written."""
        write_text(path, self.to_str())

    def to_str(self) -> str:
        """The tokenizer as JSON, as `save` writes it."""
        return str(self._inner.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, none of them `end_of_text`; of a long one piece by piece, as the library takes a hundred bytes
        for each token of what it encodes at once. DataError: half of a surrogate pair, or too long a run that cannot be
        cut."""
        return list(itertools.chain.from_iterable(self.pieces(text)))

    def pieces(self, text: str) -> Iterator[list[int]]:
        """`encode`, some 65,536 characters at a time."""
        for piece in _pieces(text):
            if len(piece) > _RUN:
                run = f"{len(piece):,} characters without a space after a letter or a line after another"
                raise DataError(f"text: {run}, must be ≤ {_RUN:,}: the tokenizer reads them at once")
            yield self.encode_batch([piece])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        try:
            with _panics("text"):
                return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts))]
        except (TypeError, UnicodeEncodeError):
            _refuse_surrogates(texts)
            raise

    def encode_items(
        self, items: Iterable[tuple[str, str]], dtype: str
    ) -> Iterator[tuple[NDArray[Any], int]]:
        """Documents, of each a prompt and a text, either of which may be empty: its ids, the separator first, and how
        many stand before the text. DataError as `encode_batch`."""
        items = list(items)
        encoded = iter(self.encode_batch([text for item in items for text in item if text]))
        for prompt, text in items:
            before = [self.end_of_text, *(next(encoded) if prompt else ())]
            yield np.array([*before, *(next(encoded) if text else ())], dtype), len(before)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, separators left out; what is not UTF-8 becomes U+FFFD. DataError: no such id."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token (possibly part of a character); none for those that end a text."""
        if not 0 <= id < self.vocab_size:
            raise DataError(f"token id: {id} is not between 0 and {self.vocab_size - 1}")
        return self._bytes[id]

    def special(self) -> list[str]:
        """Spellings of the tokens that no text gives, the separator's among them. (A merge makes every other token of
        several bytes.)"""
        value = json.loads(self.to_str())["model"]
        made = {"".join(merge) for merge in value["merges"]}
        spelled = {letter: byte for byte, letter in enumerate(byte_letters())}
        return [
            bytes(map(spelled.__getitem__, token.removeprefix(STOP))).decode(errors="replace")
            for token in value["vocab"]
            if len(token) > 1 and token not in made
        ]

    def byte_counts(self) -> NDArray[np.int64]:
        """Bytes of each token, (V,): summed over a document's ids they are exactly its text's length."""
        return np.array([len(token) for token in self._bytes], dtype=np.int64)


@functools.lru_cache(maxsize=8)
def _of(text: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of this JSON, the same for the same text: each one that encodes leaves 5 to 11 kB behind
    for good (tokenizers 0.23, docs/lab-notes.md)."""
    return tokenizers.Tokenizer.from_str(text)


@contextlib.contextmanager
def _panics(what: object) -> Iterator[None]:
    """A context in which the library's panics become DataErrors: pyo3 derives it from BaseException, and hides its
    class."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{what}: the tokenizer's library failed ({why})") from None


def _pieces(text: str) -> Iterator[str]:
    """The text, cut where every known pattern splits: between the end of a line and a letter or a number, and between
    one of these and a space."""
    start = 0
    while len(text) - start > _PIECE and (border := _BORDER.search(text, start + _PIECE)):
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]


def _training_pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        _refuse_surrogates([text])
        for at in range(0, len(text), _TRAINING_PIECE):
            yield text[at : at + _TRAINING_PIECE]


def _refuse_surrogates(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            at = error.start
            raise DataError(
                f"text: character {text[at]!r} at {at} is half of a surrogate pair, not text"
            ) from None


def _byte_table(inner: tokenizers.Tokenizer) -> list[bytes]:
    """Each token's bytes, from their spelling."""
    spelled = {letter: byte for byte, letter in enumerate(byte_letters())}
    table = [b""] * inner.get_vocab_size()
    for token, id in inner.get_vocab().items():
        if id != Tokenizer.end_of_text and not token.startswith(STOP):
            table[id] = bytes(spelled[character] for character in token)
    return table
