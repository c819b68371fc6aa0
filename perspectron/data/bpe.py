"""Files of the tokenizers library: the parts that its own loading does not check, and the byte-level BPE that this
library trains."""

import json
import re
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from msgspec import Struct, field
from tokenizers import decoders, models, pre_tokenizers

from perspectron.util.errors import DataError
from perspectron.util.files import parse_json, read_text
from perspectron.util.schema import checked

END_OF_TEXT = "<|endoftext|>"
MOST_BYTES = 64 << 20
"""Bytes of a tokenizer's file."""
MOST_TOKENS = 1 << 24

# GPT-4's pattern with bounded runs: a megabyte of one letter is then many short words, not one that BPE takes
# quadratic time to merge. Marks count as letters, so that words of Indic scripts stay whole.
PATTERN = "|".join(
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
"""The pattern by which the tokenizers of this library split words."""

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte's spelling as a token that stands for it where a character is unknown."""
_ALIAS = "".join(chr(ord("a") + byte % 26) for byte in secrets.token_bytes(24))


class Added(Struct):
    """A token that was added to those of the model. special: a template may write it, a user cannot."""

    content: str
    special: bool = False


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str = "BPE"
    dropout: float | None = None
    unk_token: str | None = None


class _File(Struct):
    """The part of a file that is checked here; the rest is the library's to check."""

    model: _Model
    added_tokens: list[Added] | None = field(default=None)


class Read(NamedTuple):
    """A parsed file of the tokenizers library. value: its JSON. added: its added tokens. also: spellings of those that
    are special though the file does not say so, as they begin or end texts."""

    value: dict[str, Any]
    added: list[Added]
    also: frozenset[str] = frozenset()

    @property
    def special(self) -> list[str]:
        """Spellings of the special added tokens. The letter of a byte is none of them unless it begins or ends texts,
        whatever the file says: texts are made of it, and some models are padded with "!". Nor is one of `fallback`."""
        letters = self.fallback.union(set(byte_letters()) - self.also)
        tokens = (token for token in self.added if token.special or token.content in self.also)
        return [token.content for token in tokens if token.content not in letters]

    @property
    def fallback(self) -> frozenset[str]:
        """Spellings of special added tokens that stand for the bytes of unknown characters, in a BPE that finds them by
        these spellings. It must not give them to a word that spells one."""
        model = self.value["model"]
        if (
            not isinstance(model["vocab"], dict)
            or not model.get("byte_fallback")
            or model.get("ignore_merges")
        ):
            return frozenset()
        tokens = {token.content for token in self.added if token.special} - self.also
        return frozenset(token for token in tokens & model["vocab"].keys() if BYTE.fullmatch(token))

    @property
    def ours(self) -> bool:
        """True of byte-level BPE with no added token but END_OF_TEXT, as id 0: what this library trains."""
        vocab, added = self.value["model"]["vocab"], self.value.get("added_tokens") or []
        return (
            [(token.content, token.special) for token in self.added] == [(END_OF_TEXT, True)]
            and added[0].get("id") == 0
            and self.value["model"].get("type", "BPE") == "BPE"
            and isinstance(vocab, dict)
            and vocab.get(END_OF_TEXT) == 0
        )

    @property
    def bounded(self) -> bool:
        """True if texts are split by PATTERN alone, so that it is known where long ones can be cut."""
        pre = self.value.get("pre_tokenizer")
        parts = pre.get("pretokenizers") if isinstance(pre, dict) else None
        first = parts[0] if isinstance(parts, list) and parts else None
        split = first.get("pattern") if isinstance(first, dict) else None
        return split == {"Regex": PATTERN} and self.value.get("normalizer") is None


def read(path: Path) -> str:
    """The text of a tokenizer's file. DataError: it is missing, unreadable or too large."""
    try:
        return read_text(path, MOST_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: not a tokenizer file ({why})") from None


def parse(text: str, path: object) -> Read:
    """Parse and check a file before the library sees it, which makes tables as long as the highest id. DataError,
    naming `path` and the field: not such a file, an id out of bounds, or a model that draws which tokens it makes."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path}: not a tokenizer file ({error})") from None
    file: _File = checked(value, _File, DataError, f"{path}: not a tokenizer file")
    if file.model.dropout:
        raise DataError(
            f"{path}: model.dropout is {file.model.dropout}, must be null: texts have one reading"
        )
    vocab = file.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < MOST_TOKENS:
            raise DataError(f"{path}: model.vocab has id {id}, must be in 0 … {MOST_TOKENS - 1}")
    return Read(value, file.added_tokens or [])


def aliased(file: Read) -> tuple[str, dict[str, str]]:
    """(the JSON of a tokenizer in which special tokens have secret names, so that no text can be encoded as one; these
    names by spelling). They are random letters, drawn once for each process: nobody who does not know them can write
    them. In the vocabulary, too, special tokens have only these names, as Unigram makes whatever is in it, and no merge
    makes one. No normaliser sees a name, which it could take apart, and each is found within a word, too. What stands
    for a byte of an unknown character is in the vocabulary alone, and no merge makes it."""
    value, fallback = file.value, file.fallback
    names = {content: f"<{_ALIAS}{_letters(i)}>" for i, content in enumerate(file.special)}
    model: dict[str, Any] = dict(value["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): id for token, id in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("merges"), list):
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names, fallback)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        token | {"content": names[token["content"]], "normalized": False, "single_word": False}
        if token["content"] in names
        else token
        for token in value.get("added_tokens") or []
        if token["content"] not in fallback
    ]
    # Texts are neither truncated nor padded here.
    inner = value | {"model": model, "added_tokens": added, "truncation": None, "padding": None}
    return json.dumps(inner), names


def _touches(merge: object, names: dict[str, str], into: Collection[str]) -> bool:
    """True of a merge of, or into, one of the tokens that have other names, or into one of `into`."""
    match merge:
        case str():
            pair = merge.split(" ")
        case [str(), str()]:
            pair = list(merge)
        case _:
            return False
    whole = "".join(pair)
    return whole in into or not names.keys().isdisjoint([*pair, whole])


def _letters(number: int) -> str:
    """A number as six letters."""
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(6))


def blank() -> tokenizers.Tokenizer:
    """The library's tokenizer before it has learned anything."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other = iter(range(256, 512))
    return [chr(byte if byte in printable else next(other)) for byte in range(256)]
