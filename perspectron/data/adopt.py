"""Tokenizers of other programs as ours: byte-level BPE, with the separator moved to id 0."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from perspectron.data.tokenizer import END_OF_TEXT, GPT2_PATTERN, MOST_BYTES, PATTERNS, Tokenizer, blank
from perspectron.errors import DataError
from perspectron.files import parse_json, read_text

SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
"""Spellings of the token between documents, the first that is there counts."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WRITTEN = {_LLAMA3: PATTERNS[2]}
"""Patterns as others write them, unbounded, and ours that split the same but for longer runs."""


class Adopted(NamedTuple):
    """A tokenizer, and the id that its separator had: ids 0 and that one have changed places, so the rows of a
    model's matrices must as well."""

    tokenizer: Tokenizer
    separator: int


def adopt(path: Path) -> Adopted:
    """Read a tokenizer.json: one of ours, with or without what transformers adds to it, or byte-level BPE that splits
    as GPT-2 or Llama 3 do. Other special tokens keep their ids, and text never gives them.

    DataError, naming the field, for every other kind: SentencePiece, a normalizer, words that skip the merges.
    """
    try:
        value = parse_json(read_text(path, MOST_BYTES))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a tokenizer file ({error})") from None
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise DataError(f"{path}: not a tokenizer file (it has no model.vocab by token)")
    for name, wanted in (("type", "BPE"), ("byte_fallback", False), ("ignore_merges", False)):
        if model.get(name, wanted) != wanted:
            raise DataError(f"{path}: model.{name} is {model[name]!r}, only byte-level BPE can be read")
    if value.get("normalizer") is not None:
        raise DataError(
            f"{path}: normalizer is {value['normalizer'].get('type')!r}, must be none: text is kept as it is"
        )
    pattern = _pattern(value.get("pre_tokenizer"), path)
    added = {token["content"]: token["id"] for token in value.get("added_tokens") or ()}
    vocab = model["vocab"] | added
    separator = next((spelling for spelling in SEPARATORS if spelling in vocab), None)
    if separator is None:
        raise DataError(f"{path}: no token between documents, must have one of {', '.join(SEPARATORS)}")
    at = vocab.pop(separator)
    first = next((token for token, id in vocab.items() if id == 0), None)
    if first is not None:
        vocab[first] = at
    template = json.loads(blank(pattern, [END_OF_TEXT]).to_str())
    template["model"] |= {"vocab": {END_OF_TEXT: 0} | _bytewise(vocab), "merges": model.get("merges")}
    return Adopted(Tokenizer.parse(json.dumps(template), path), at)


def _bytewise(vocab: dict[str, int]) -> dict[str, int]:
    """The vocabulary; special tokens that are not spelled in bytes get a spelling of their own that is."""
    known = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return {token if known.issuperset(token) else f"<|special{id}|>": id for token, id in vocab.items()}


def _pattern(pre: Any, path: Path) -> str:
    """Our pattern that splits as this pre-tokenizer does."""
    parts = (pre.get("pretokenizers") or [pre]) if isinstance(pre, dict) else []
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True) and not parts[0].get("add_prefix_space"):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        written = (parts[0].get("pattern") or {}).get("Regex")
        if written in PATTERNS or written in _WRITTEN:
            return _WRITTEN.get(written, written)
    raise DataError(
        f"{path}: pre_tokenizer is {kinds or None}, must split words as GPT-2, Llama 3 or this library do"
    )
