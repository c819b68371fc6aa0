"""Files of byte-level BPE, as the tokenizers library writes them: which of them can be read, and what they learned."""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tokenizers
from msgspec import Struct
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
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {pattern: pattern for pattern in (_PATTERN, GPT2_PATTERN, _LLAMA3_PATTERN)} | {
    _LLAMA3: _LLAMA3_PATTERN
}
"""Split patterns that a file may have, and by which its text is split: what this library writes, and what GPT-2 and
Llama 3 split by, with bounds of ours. All take linear time on any text; those of strangers may take exponential."""

Merge = tuple[str, str]


class Added(Struct):
    """A token beside those that BPE learned. special: text never gives it."""

    id: int
    content: str
    special: bool


class _Split(Struct, tag="Split"):
    pattern: dict[str, str]
    behavior: Literal["Isolated"]
    invert: bool = False


class _ByteLevel(Struct, tag="ByteLevel"):
    add_prefix_space: bool = True
    use_regex: bool = True


class _Sequence(Struct, tag="Sequence"):
    pretokenizers: list[_Split | _ByteLevel]


class _Model(Struct):
    type: Literal["BPE"]
    vocab: dict[str, int]
    merges: list[list[str] | str]
    dropout: Any = None
    byte_fallback: Any = False
    ignore_merges: Any = False
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None


class _File(Struct):
    """What decides how a file's tokenizer encodes; the rest is of no consequence here."""

    model: _Model
    pre_tokenizer: _Sequence | _Split | _ByteLevel
    normalizer: None = None
    added_tokens: list[Added] | None = None


class Learned(NamedTuple):
    """What a file says of a tokenizer: ids by token, pairs of tokens to merge, a value of PATTERNS, added tokens."""

    vocab: dict[str, int]
    merges: list[list[str]]
    pattern: str
    added: list[Added]


def read(path: Path) -> str:
    """The text of a tokenizer's file. DataError: there is none, or it is too large."""
    try:
        return read_text(path, MOST_BYTES)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: not a tokenizer file ({why})") from None


def parse(text: str, path: Path) -> Learned:
    """What the text of a tokenizer's file says, without asking the library, which would believe all of it. DataError,
    naming `path` and the field, for every kind but BPE on bytes that splits by one of PATTERNS."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise DataError(f"{path}: not a tokenizer file ({error})") from None
    file = checked(value, _File, DataError, f"{path}: not a tokenizer file")
    model = file.model
    for name in _Model.__struct_fields__[3:]:
        if getattr(model, name):
            raise DataError(
                f"{path}: model.{name} is {short(getattr(model, name))}, only byte-level BPE without can be read"
            )
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.merges]
    return Learned(model.vocab, merges, _pattern(file.pre_tokenizer, path), file.added_tokens or [])


def _pattern(pre: _Sequence | _Split | _ByteLevel, path: Path) -> str:
    """Our pattern that splits as this pre-tokenizer does."""
    parts = pre.pretokenizers if isinstance(pre, _Sequence) else [pre]
    match parts:
        case [*_, _ByteLevel(add_prefix_space=True)]:
            raise DataError(f"{path}: pre_tokenizer: add_prefix_space is True, must be false to be read")
        case [_ByteLevel(use_regex=True)]:
            return GPT2_PATTERN
        case [_Split(pattern={"Regex": regex}, invert=False), _ByteLevel(use_regex=False)]:
            if regex in PATTERNS:
                return PATTERNS[regex]
            wanted = f"pattern is {short(regex)}, must be that of GPT-2, Llama 3 or this library"
            raise DataError(f"{path}: pre_tokenizer: {wanted}")
    kinds = [type(part).__name__.removeprefix("_") for part in parts]
    raise DataError(
        f"{path}: pre_tokenizer is {kinds}, must split words as GPT-2, Llama 3 or this library do"
    )


def require_whole(vocab: dict[str, int], merges: list[list[str]], path: Path) -> None:
    """DataError: ids are not 0 to n − 1 with END_OF_TEXT at 0, a token is not spelled in bytes, a byte has none, or a
    merge is not of tokens into one."""
    n = len(vocab)
    if not n <= MOST_TOKENS:
        raise DataError(f"{path}: ids are {n}, must be at most {MOST_TOKENS}")
    for token, id in vocab.items():
        if not 0 <= id < n:
            raise DataError(f"{path}: id of token {short(token)} is {short(id)}, must be in 0 … {n - 1}")
    if len(set(vocab.values())) != n or vocab.get(END_OF_TEXT) != 0:
        raise DataError(f"{path}: ids are not 0 to {n - 1} with {END_OF_TEXT} at 0")
    alphabet = set(byte_letters())
    if missing := alphabet - vocab.keys():
        raise DataError(f"{path}: {len(missing)} of 256 bytes have no token, so it is not byte-level")
    for token in vocab:
        if not token or not alphabet.issuperset(token):
            raise DataError(f"{path}: token {short(token)} is not spelled in bytes, so it is not byte-level")
    tokens = vocab.keys() - {END_OF_TEXT}
    for i, merge in enumerate(merges):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= tokens:
            raise DataError(f"{path}: model.merges[{i}] is {short(merge)}, must be of two tokens into one")


def to_json(vocab: dict[str, int], merges: list[list[str]], pattern: str = _PATTERN) -> str:
    """The file of a tokenizer that has learned this."""
    value = json.loads(blank(pattern, special=True).to_str())
    value["model"] |= {"vocab": vocab, "merges": merges}
    return json.dumps(value)


def blank(pattern: str = _PATTERN, *, special: bool = False) -> tokenizers.Tokenizer:
    """The library's tokenizer before it has learned anything. special: with END_OF_TEXT."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_TEXT] if special else [])
    return inner


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other = iter(range(256, 512))
    return [chr(byte if byte in printable else next(other)) for byte in range(256)]


def short(value: Any) -> str:
    """A value for a line of text."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
