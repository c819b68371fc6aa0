"""Text to ids and back, by any tokenizer of the tokenizers library, whose file is kept as it came."""

import contextlib
import functools
import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers, trainers

from perspectron.data import added, bpe, specials, world
from perspectron.data.bpe import BYTE, END_OF_TEXT, MOST_TOKENS, blank, byte_letters
from perspectron.data.specials import OURS, Specials
from perspectron.util.errors import ConfigError, DataError
from perspectron.util.files import remove, write_text

_TRAINING_PIECE = 2**18
_PIECE = 2**16
_RUN = 2**22
_BORDER = re.compile(r"\n(?=[^\W_])|[^\W_](?= )")
_STOP = "<|stop|>"
"""Beginning of tokens that end texts, in files that an earlier version imported."""
TIKTOKEN = "tiktoken.model"
"""A vocabulary of another library, as in Kimi's folders: ranks of bytes; how texts are split is only in code."""
_NEAR = "a"
"""Text after which a token is decoded whose text depends on what precedes it."""
__all__ = ["END_OF_TEXT", "MOST_TOKENS", "Tokenizer", "blank", "byte_letters"]


class Tokenizer:
    """A tokenizer of any kind that the tokenizers library has: byte-level or byte-fallback BPE, Unigram, …

    specials: ids that stand for no text. vocab_size: the highest id + 1. Where a tokenizer changes what it encodes, as
    a normaliser does, or lacks a byte, `decode` gives back what it kept. Ordinary added tokens are parsed in every
    text; special ones only where a template's are `marked`.

        >>> tokenizer = perspectron.Tokenizer.train(["to be or not to be"], 300)
        >>> tokenizer.decode(tokenizer.encode("to be")), tokenizer.vocab_size <= 300
        ('to be', True)
    """

    def __init__(self, text: str, file: bpe.Read, place: object) -> None:
        """Make the tokenizer of a file's text, parsed as `file`, with this library's special ids. place: for errors."""
        if "BPEDecoder" in _decoders(file.value.get("decoder")):
            raise DataError(
                f"{place}: decoder is BPEDecoder, must be one that spells a token alike wherever it stands"
            )
        with _panics(place):
            self._inner, names = _of(text, file, place)
        self._text, self._cut = text, file.bounded
        aliases = {name: spelling for spelling, name in names.items()}
        spelled = {aliases.get(name, name): id for name, id in self._inner.get_vocab().items()}
        self.vocab_size: int = max(spelled.values(), default=-1) + 1
        if not 0 < self.vocab_size <= MOST_TOKENS:
            raise DataError(f"{place}: it has {self.vocab_size} ids, must have 1 to {MOST_TOKENS}")
        self.special: Mapping[str, int] = {
            spelling: spelled[spelling] for spelling in names if spelling in spelled
        }
        """Ids of the special added tokens by their spelling."""
        self._spelled, self._names = spelled, names
        self._added = {token.content for token in file.added if token.content}
        whole = [re.escape(token) for token in sorted(self._added, key=len, reverse=True)]
        self._marks = re.compile("|".join(whole)) if whole else None
        self.specials = OURS

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
        return cls.parse(inner.to_str(pretty=True), Path("tokenizer"))

    @classmethod
    def spelled(cls, characters: Iterable[str]) -> "Tokenizer":
        """A tokenizer of 256 bytes, the separator, and these characters, each merged from its bytes, first to last.
        Text is split nowhere else, as the first byte of a character is never a later byte of another."""
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
        inner = blank()
        inner.model = models.BPE(vocab, merges)
        inner.add_special_tokens([END_OF_TEXT])
        return cls.parse(inner.to_str(pretty=True), Path("tokenizer"))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer.json, with the specials.json beside it. Without one, the ids are those of this library where
        it trained the file, and else those that the files of transformers beside it say. DataError: missing, damaged,
        or of a kind that the tokenizers library does not know."""
        return cls.parse(bpe.read(path), path)

    @classmethod
    def of_transformers(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a folder of transformers: of tokenizer.json, or else RWKV's World vocabulary, with the
        special ids of the folder's files. DataError as `load`, and for a folder that has only tiktoken's file."""
        path, vocabulary = folder / "tokenizer.json", folder / world.FILE
        if not path.exists() and (folder / TIKTOKEN).exists():
            raise DataError(
                f"{folder / TIKTOKEN}: of tiktoken, must be a tokenizer.json beside it to be read"
            )
        text = world.loaded(vocabulary) if not path.exists() and vocabulary.exists() else bpe.read(path)
        return cls._beside(text, path)

    @classmethod
    def _beside(cls, text: str, path: Path) -> "Tokenizer":
        """The tokenizer of a file, with what the files of transformers beside it add."""
        made = cls(text, bpe.parse(text, path), path)  # a valid one, into which can be looked
        if (whole := added.complete(text, path.parent)) != text:
            made = cls(whole, bpe.parse(whole, path), path)
        return made._with(made.beside(path.parent), path)

    @classmethod
    def parse(cls, text: str, path: Path, special: Specials | None = None) -> "Tokenizer":
        """A tokenizer of what `to_str` gives, with its special ids, or those of the files beside `path`, as `load`.
        DataError, naming `path`."""
        file = bpe.parse(text, path)
        if file.ours and any(token.startswith(_STOP) for token in file.value["model"]["vocab"]):
            raise DataError(
                f"{path}: an earlier version imported it, with ids of its own; import the model again"
            )
        made, kept = cls(text, file, path), path.with_name(specials.FILE)
        if special is not None:
            made = made._with(special, path)
        elif kept.exists():
            made = made._with(Specials.load(kept), path)
        elif not file.ours:
            made = cls._beside(text, path)
        made.specials.check(path, made.vocab_size)
        return made

    def _with(self, special: Specials, path: Path) -> "Tokenizer":
        """The same with these special ids. Added tokens that begin or end texts are special then, whatever the file
        says, so that no user writes one."""
        made, ids = self, special.stops.union(special.prefix)
        if special.pad is not None and special.pad not in {*ids, *self.special.values()}:
            special = msgspec.structs.replace(special, pad=None)  # of an ordinary token, in files of before
        also = {
            token for token in self._added if self._spelled.get(token) in ids and token not in self.special
        }
        if also:
            file = bpe.parse(self._text, path)._replace(also=frozenset(also))
            made = Tokenizer(self._text, file, path)
        made.specials = special
        return made

    def within(self, rows: int, path: Path) -> "Tokenizer":
        """The same without the special added tokens from id `rows` on, which a model of so many rows cannot read: what
        spells one is text then, also in a template. DataError, naming `path`: other ids are that high, or one of
        `specials`."""
        if self.vocab_size <= rows:
            return self
        value = json.loads(self._text)
        added = value.get("added_tokens") or []
        value["added_tokens"] = [token for token in added if self.special.get(token["content"], 0) < rows]
        text = json.dumps(value, indent=2, ensure_ascii=False)
        less = Tokenizer.parse(text, path, self.specials)
        if less.vocab_size > rows:
            raise DataError(f"{path}: the tokenizer has {self.vocab_size} ids, the model {rows}")
        return less

    def beside(self, folder: Path) -> Specials:
        """The special ids named by the files of transformers in a folder. DataError, naming the field that is wrong."""
        first = self._inner.encode(_NEAR)
        marks = itertools.takewhile(bool, first.special_tokens_mask)
        ids: Mapping[str, int] = self._spelled
        if isinstance(self._inner, world.Longest):  # of which the files of a folder have texts, not letters
            ids = {data.decode(errors="replace"): id for data, id in self._inner.ids.items()} | dict(ids)
        prefix = [id for id, _ in zip(first.ids, marks, strict=False)]
        return specials.beside(folder, ids, prefix, set(self.special.values()))

    def save(self, path: Path) -> None:
        """Write the file as it came, and specials.json beside it where the ids are not those of this library, each
        atomically. StorageError if one cannot be written."""
        write_text(path, self.to_str())
        kept = path.with_name(specials.FILE)
        if self.specials == OURS:
            remove(kept)
        else:
            self.specials.save(kept)

    def to_str(self) -> str:
        """The tokenizer as JSON, as it came."""
        return self._text

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the file's JSON, and of special ids that are not those of this library."""
        canonical = json.dumps(json.loads(self._text), sort_keys=True, separators=(",", ":")).encode()
        return hashlib.sha256(
            canonical + (b"" if self.specials == OURS else self.specials.to_json())
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without prefix. What spells a special token is text like any, unless it is `marked`.
        DataError: half of a surrogate pair, or too long a run that cannot be cut. ConfigError: no text."""
        if not isinstance(text, str):
            raise ConfigError(f"text = {reprlib.repr(text)}, must be one text")
        return list(itertools.chain.from_iterable(self.pieces(text)))

    def marked(self, text: str) -> str:
        """The text of a template with random names in place of the special tokens that it spells. `encode` takes these
        names for the tokens. What users write is put in afterwards, so that it never is one."""
        return text if self._marks is None else self._marks.sub(lambda m: self._names.get(m[0], m[0]), text)

    def pieces(self, text: str) -> Iterator[list[int]]:
        """`encode`, some 65,536 characters at a time where it is known how the text can be cut: the library takes a
        hundred bytes for each token of what it encodes at once."""
        if isinstance(self._inner, world.Longest):
            _refuse_surrogates([text])
            yield from self._inner.pieces(text)
            return
        for piece in _pieces(text) if self._cut else (text,):
            if len(piece) > _RUN:
                run = f"{len(piece):,} characters without a place where it can be cut"
                raise DataError(f"text: {run}, must be ≤ {_RUN:,}: the tokenizer reads them at once")
            yield self.encode_batch([piece])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        try:
            with _panics("text"):
                found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            _refuse_surrogates(texts)
            raise
        return [encoding.ids for encoding in found]

    def encode_items(
        self, items: Iterable[tuple[str, str]], dtype: str, end: int | None = None
    ) -> Iterator[tuple[NDArray[Any], int]]:
        """For each document, a prompt and a text of which either may be empty: (its ids, how many stand before the
        text). The prefix comes first; but for a tokenizer that is not ours, a prompt, in which special tokens are
        `marked`, stays without the prefix if it does not begin with it. Last comes the token that ends texts, where the
        tokenizer has one apart from the prefix and the text does not end so itself, as models of transformers learn to
        end. Where there is neither, only the resets of batches separate documents. end: a token in place of the
        tokenizer's own. DataError as `encode_batch`, or for a document without a token."""
        items = list(items)
        if end is None or not self.specials.ended:
            end = self.specials.end
        encoded = iter(self.encode_batch([text for item in items for text in item if text]))
        for prompt, text in items:
            asked = next(encoded) if prompt else []
            whole = bool(asked) and self.specials.lacks(asked)
            before = asked if whole else [*self.specials.prefix, *self.specials.bare(asked)]
            own = next(encoded) if text else []
            ids = [*before, *own]
            # A prompt without the prefix cannot end the document before it.
            last = self.specials.prefix[0] if whole and not self.specials.ended else end
            if last is not None and self.specials.stops.isdisjoint(own[-2:]):
                ids.append(last)
            if not ids:
                raise DataError(f"text: {text[:40]!r} has no token in this tokenizer")
            yield np.array(ids, dtype), len(before)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` from its beginning, special tokens left out; what is not UTF-8 becomes U+FFFD. DataError: no
        such id."""
        data = b"".join(map(self.token_bytes, ids))
        return data.removeprefix(self._lead).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token within a text (possibly part of a character); none for special ones. An ordinary one
        that also ends texts, as a model may name a line end, keeps its bytes."""
        if not 0 <= id < self.vocab_size:
            raise DataError(f"token id: {id} is not between 0 and {self.vocab_size - 1}")
        return self._bytes[id]

    def spelling(self, id: int) -> str:
        """The spelling of a token in the tokenizer's file."""
        return self._spellings.get(id, f"<|{id}|>")

    @functools.cached_property
    def _spellings(self) -> dict[int, str]:
        return {id: token for token, id in self._spelled.items()}

    def byte_counts(self) -> NDArray[np.int64]:
        """Bytes of each token, (V,). For a tokenizer of ours, their sum over a document's ids is exactly its text's
        length."""
        return np.array([len(token) for token in self._bytes], dtype=np.int64)

    @functools.cached_property
    def _lead(self) -> bytes:
        """Bytes that decoding gives before the first word of a text and that are none of it, as Metaspace's space."""
        if self._joined:
            return b" "
        ids = self.encode(_NEAR)
        data, text = b"".join(map(self.token_bytes, ids)), self._inner.decode(ids).encode()
        return data.removesuffix(text) if data.endswith(text) else b""

    @functools.cached_property
    def _joined(self) -> bool:
        """True if the library puts a space between all tokens, as it does without a decoder, and no token has ▁."""
        return not json.loads(self._text).get("decoder") and not any("▁" in token for token in self._spelled)

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        """Each token's bytes: what its letters spell where the tokenizer is byte-level; the byte of a <0xNN>; the piece
        with spaces for ▁; and else the difference that it makes to the text before it."""
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}
        kinds = _decoders(json.loads(self._text).get("decoder"))
        special = frozenset(self.special.values())
        table, open_ = [b""] * self.vocab_size, list[tuple[str, int]]()
        for token, id in self._spelled.items():
            if id in special:
                continue
            if self._joined:
                table[id] = f" {token}".encode()
            elif "ByteFallback" in kinds and (byte := BYTE.fullmatch(token)):
                table[id] = bytes([int(byte[1], 16)])
            elif token in self._added and (kinds <= _PLAIN or "ByteLevel" in kinds):
                table[id] = token.replace("▁", " " if kinds & _SPACED else "▁").encode()
            elif "ByteLevel" in kinds:
                data = [letters.get(letter) for letter in token]
                table[id] = token.encode() if None in data else bytes(data)  # type: ignore[arg-type]
            elif kinds <= _PLAIN:
                table[id] = token.replace("▁", " ").encode()
            else:
                open_.append((token, id))
        near = self.encode(_NEAR)
        before = self._inner.decode(near)
        for (_, id), text in zip(
            open_, self._inner.decode_batch([[*near, id] for _, id in open_]), strict=True
        ):
            table[id] = text.removeprefix(before).encode()
        for id in self.specials.silent - special:
            if id not in self.encode(table[id].decode(errors="replace")):  # of no text
                table[id] = b""
        return table


_SPACED = frozenset(("Metaspace", "▁"))
"""Decoders that replace ▁ by a space, in added tokens, too."""
_PLAIN = frozenset((*_SPACED, "ByteFallback", "Fuse", "Strip"))
"""Decoders under which a token's text is its spelling, with spaces for ▁."""


def _decoders(value: Any) -> set[str]:
    """The kinds of decoder that a file's decoder is made of; "▁" is one that replaces this by a space."""
    if not isinstance(value, dict):
        return set()
    if value.get("type") == "Sequence":
        return set[str]().union(*(_decoders(part) for part in value.get("decoders", [])))
    if (
        value.get("type") == "Replace"
        and value.get("pattern") == {"String": "▁"}
        and value.get("content") == " "
    ):
        return {"▁"}
    return {str(value.get("type"))}


def _of(text: str, file: bpe.Read, place: object) -> tuple[Any, dict[str, str]]:
    """(the library's tokenizer of a file, with other names for special tokens; these names by spelling), the same for
    the same text: each one that encodes leaves 5 to 11 kB behind for good (tokenizers 0.23, docs/lab-notes.md)."""
    known = _made.get((text, file.also))
    if known is None:
        inner, names = bpe.aliased(file)
        try:
            made = tokenizers.Tokenizer.from_str(inner)
            known = (world.Longest(made, place) if world.is_one(file.value) else made), names
        except DataError:
            raise
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise DataError(f"{place}: the tokenizers library cannot read it ({why})") from None
        while len(_made) >= _KEPT:
            _made.pop(next(iter(_made)))
        _made[text, file.also] = known
    return known


_KEPT = 8
_made: dict[tuple[str, frozenset[str]], tuple[Any, dict[str, str]]] = {}


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
    """The text, cut where our pattern splits: between the end of a line and a letter or a number, and between one of
    these and a space."""
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
