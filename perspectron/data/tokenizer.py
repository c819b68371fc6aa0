"""Byte-level BPE: any text to ids and back, without loss."""

import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from perspectron.data import worker
from perspectron.util.errors import DataError
from perspectron.util.files import parse_json, read_text, write_text

END_OF_TEXT = "<|endoftext|>"
STOP = "<|stop|>"
"""Prefix of an imported model's tokens that end texts as the separator does. No text gives them, as every known pattern
splits here."""
MOST_BYTES = 64 << 20
"""Bytes of a tokenizer's file."""
MOST_TOKENS = 1 << 24

# GPT-4's pattern with bounded runs: a megabyte of one letter is then many short words, not one that BPE takes
# quadratic time to merge. Marks count as letters, so that words of Indic scripts stay whole.
_PATTERN = "|".join(
    [
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]{1,64}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,8}",
        r"\s{0,64}[\r\n]{1,8}",
        r"\s{1,64}(?!\S)",
        r"\s{1,64}",
    ]
)
GPT2_PATTERN = "|".join(
    [
        r"'(?:[sdmt]|ll|ve|re)",
        r" ?\p{L}{1,256}",
        r" ?\p{N}{1,256}",
        r" ?[^\s\p{L}\p{N}]{1,256}",
        r"\s{1,256}(?!\S)",
        r"\s{1,256}",
    ]
)
_LLAMA3_PATTERN = "|".join(
    [
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?\p{L}{1,256}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]{1,256}[\r\n]{0,256}",
        r"\s{0,256}[\r\n]{1,256}",
        r"\s{1,256}(?!\S)",
        r"\s{1,256}",
    ]
)
PATTERNS = (_PATTERN, GPT2_PATTERN, _LLAMA3_PATTERN)
"""Split patterns that a file may have, all of which take linear time on any text: what versions of this library wrote,
the newest first, and what GPT-2 and Llama 3 split by, with bounds of ours."""
_TRAINING_PIECE = 2**18
_PIECE = 2**16
_RUN = 2**20
_BORDER = re.compile(r"\n(?=[^\W_])|[^\W_](?= )")


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
        return cls(_of(inner.to_str(pretty=True)))  # as `save` writes it

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
                pair = ("".join(letters[:end]), letters[end])
                if "".join(pair) not in vocab:
                    vocab["".join(pair)] = len(vocab)
                    merges.append(pair)
        value = json.loads(blank(special=[END_OF_TEXT]).to_str())
        value["model"] |= {"vocab": vocab, "merges": merges}
        return cls(tokenizers.Tokenizer.from_str(json.dumps(value)))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer written by `save`. DataError: missing, damaged, or of another kind."""
        try:
            text = read_text(path, MOST_BYTES)
        except FileNotFoundError:
            raise DataError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"{path}: not a tokenizer file ({why})") from None
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, path: Path) -> "Tokenizer":
        """A tokenizer of what `to_str` gives. DataError, naming `path`, as `load`."""
        try:
            value = parse_json(text)
        except ValueError as error:
            raise DataError(f"{path}: not a tokenizer file ({error})") from None
        # Before the library sees it: of a token with a huge id it makes a table up to there, and patterns are run.
        _require_known(value, path)
        vocab = _checked_vocab(value["model"], path)
        try:
            with _panics(path):
                inner = _of(text)
        except DataError:
            raise
        except Exception as error:  # the Rust side raises bare Exception for anything malformed
            raise DataError(f"{path}: not a tokenizer file ({_line(error)})") from None
        _require_known(json.loads(inner.to_str()), path, whole=True)  # what the file left out, too
        if inner.get_vocab() != vocab:
            raise DataError(f"{path}: model.vocab does not survive a round trip")
        return cls(inner)

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

    def encode_items(self, items: Sequence[worker.Item], dtype: str) -> worker.Encoded:
        """Documents as arrays of ids, on all cores: of each a prompt, which may be empty, and a text. DataError as
        `encode_batch`."""
        try:
            with _panics("text"):
                return worker.encode(self._inner, items, dtype)
        except (TypeError, UnicodeEncodeError):
            _refuse_surrogates(text for item in items for text in item)
            raise

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


def blank(pattern: str = _PATTERN, special: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """The library's tokenizer before it has learned anything."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    return inner


@contextlib.contextmanager
def _panics(what: object) -> Iterator[None]:
    """A context in which the library's panics become DataErrors: pyo3 derives it from BaseException, and hides its
    class."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: the tokenizer's library failed ({_line(error)})") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@cache
def _template() -> Any:
    """All that a tokenizer's file says, but for what it learned: that is None here, as is the pattern."""
    value = json.loads(blank(special=[END_OF_TEXT]).to_str())
    value["model"] |= {"vocab": None, "merges": None}
    value["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = None
    return value


_LEARNED = ("model.vocab", "model.merges", "pre_tokenizer.pretokenizers[0].pattern.Regex")
_NEEDED = ("model", "model.type", "added_tokens", "pre_tokenizer", "decoder", *_LEARNED)


def _require_known(value: Any, path: Path, *, whole: bool = False) -> None:
    """DataError, naming the first field, unless a tokenizer's file is one of ours but for what it learned, and splits
    by one of PATTERNS. Fields that the library fills in may be missing; whole: none may."""
    _require_like(value, _template(), path, "", whole)
    pattern = value["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    if pattern not in PATTERNS:
        raise DataError(f"{path}: pattern is {_short(pattern)}, must be the one that this library writes")


def _require_like(value: Any, wanted: Any, path: Path, where: str, whole: bool) -> None:
    if where in _LEARNED:
        return
    name = where or "file"
    if type(value) is not type(wanted):
        raise DataError(f"{path}: not a tokenizer file ({name} is {_short(value)}, must be {_short(wanted)})")
    if isinstance(wanted, dict):
        for key in wanted | value:
            at = f"{where}.{key}" if where else key
            if key not in wanted:
                raise DataError(
                    f"{path}: not a tokenizer of this library (it has {_short(at)}, which none has)"
                )
            if key in value:
                _require_like(value[key], wanted[key], path, at, whole)
            elif whole or at in _NEEDED or at.startswith("pre_tokenizer."):
                raise DataError(f"{path}: not a tokenizer file (it has no {at})")
        return
    if isinstance(wanted, list):
        if len(value) != len(wanted):
            raise DataError(
                f"{path}: not a tokenizer of this library ({name} has {len(value)} entries, must have {len(wanted)})"
            )
        for i, pair in enumerate(zip(value, wanted, strict=True)):
            _require_like(*pair, path, f"{where}[{i}]", whole)
    elif value != wanted:
        raise DataError(
            f"{path}: not a tokenizer of this library ({name} is {_short(value)}, must be {_short(wanted)})"
        )


def _short(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _checked_vocab(model: dict[str, Any], path: Path) -> dict[str, int]:
    """The ids of a file's tokens. DataError: they are not 0 to n − 1 with END_OF_TEXT at 0, a token is not spelled in
    bytes, a byte has none, or a merge is not of tokens into one."""
    vocab, merges = model["vocab"], model["merges"]
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise DataError(f"{path}: not a tokenizer file (model.vocab or model.merges is of another type)")
    n = len(vocab)
    if not n <= MOST_TOKENS:
        raise DataError(f"{path}: ids are {n}, must be at most {MOST_TOKENS}")
    for token, id in vocab.items():
        if type(id) is not int or not 0 <= id < n:
            raise DataError(f"{path}: id of token {_short(token)} is {_short(id)}, must be in 0 … {n - 1}")
    if len(set(vocab.values())) != n or vocab.get(END_OF_TEXT) != Tokenizer.end_of_text:
        raise DataError(f"{path}: ids are not 0 to {n - 1} with {END_OF_TEXT} at {Tokenizer.end_of_text}")
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    if missing := alphabet - vocab.keys():
        raise DataError(f"{path}: {len(missing)} of 256 bytes have no token, so it is not byte-level")
    for token in vocab:
        if not token or not alphabet.issuperset(token):
            raise DataError(f"{path}: token {_short(token)} is not spelled in bytes, so it is not byte-level")
    text = vocab.keys() - {END_OF_TEXT}
    for i, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge  # so the library before 0.20
        whole = isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        if not whole or not {*pair, "".join(pair)} <= text:
            raise DataError(f"{path}: model.merges[{i}] is {_short(merge)}, must be of two tokens into one")
    return vocab


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


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other = iter(range(256, 512))
    return [chr(byte if byte in printable else next(other)) for byte in range(256)]


def _byte_table(inner: tokenizers.Tokenizer) -> list[bytes]:
    """Each token's bytes, from their spelling."""
    spelled = {letter: byte for byte, letter in enumerate(byte_letters())}
    table = [b""] * inner.get_vocab_size()
    for token, id in inner.get_vocab().items():
        if id != Tokenizer.end_of_text and not token.startswith(STOP):
            table[id] = bytes(spelled[character] for character in token)
    return table
