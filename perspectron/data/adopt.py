"""Tokenizers of other programs as ours: byte-level BPE, with the separator moved to id 0."""

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perspectron.data.tokenizer import (
    END_OF_TEXT,
    GPT2_PATTERN,
    MOST_BYTES,
    PATTERNS,
    STOP,
    Tokenizer,
    blank,
    byte_letters,
)
from perspectron.util.errors import DataError
from perspectron.util.files import parse_json, read_text

SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
"""Spellings of the token between documents where no id says which one it is: the first that is there counts."""
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WRITTEN = {_LLAMA3: PATTERNS[2]}
"""Patterns as others write them, unbounded, and ours that split the same but for longer runs."""


class Adopted(NamedTuple):
    """A tokenizer, and the id and spelling that its separator had: ids 0 and that one have changed places, so the rows
    of a model's matrices must as well."""

    tokenizer: Tokenizer
    separator: int
    spelling: str = END_OF_TEXT


def adopt(path: Path, ids: Sequence[Any] = (), stops: Sequence[int | str] = ()) -> Adopted:
    """Read a tokenizer.json: one of ours, with or without what transformers adds to it, or byte-level BPE that splits
    as GPT-2 or Llama 3 do. The separator is the first of `ids` that an added token has, else one of SEPARATORS. stops:
    ids or spellings of tokens that end a text too. Other special tokens keep their ids, and text never gives them.

    DataError, naming the field, for every other kind: SentencePiece, a normalizer, words that skip the merges, merges
    that are left out by chance, added tokens that text gives, stops that are none of the special tokens.
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
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise DataError(f"{path}: model.{name} is {model[name]!r}, must be null to be read")
    if value.get("normalizer") is not None:
        kind = (
            value["normalizer"].get("type") if isinstance(value["normalizer"], dict) else value["normalizer"]
        )
        raise DataError(f"{path}: normalizer is {kind!r}, must be none: text is kept as it is")
    pattern = _pattern(value.get("pre_tokenizer"), path)
    added = _added(value.get("added_tokens"), path)
    separator = _separator(added, model["vocab"], ids, path)
    for token in added:
        if not token["special"] and token["content"] != separator:
            raise DataError(
                f"{path}: added token {token['content']!r} is not special, so text gives it; no tokenizer of ours can"
            )
    vocab = model["vocab"] | {token["content"]: token["id"] for token in added}
    for token, id in vocab.items():
        if type(id) is not int:
            raise DataError(f"{path}: the id of {token[:80]!r} is {str(id)[:80]!r}, must be a whole number")
    ends = {_id_of(stop, vocab, path) for stop in stops}
    at = vocab.pop(separator)
    if not 0 <= at <= len(vocab):  # beyond, a matrix may have no row
        raise DataError(
            f"{path}: the id of {separator!r} is {at!r}, must be a whole number in 0 … {len(vocab)}"
        )
    first = next((token for token, id in vocab.items() if id == 0), None)
    if first is not None:
        vocab[first] = at
    ends = {0 if id == at else at if id == 0 else id for id in ends} - {0}
    vocab = {END_OF_TEXT: 0} | _bytewise(
        vocab, {separator, *(token["content"] for token in added)}, ends, path
    )
    template = json.loads(blank(pattern, [END_OF_TEXT]).to_str())
    template["model"] |= {"vocab": vocab, "merges": model.get("merges")}
    return Adopted(Tokenizer.parse(json.dumps(template), path), at, separator)


def _added(tokens: Any, path: Path) -> list[dict[str, Any]]:
    """The added tokens. DataError unless each has its content, id and whether it is special."""
    tokens = [] if tokens is None else tokens
    kinds = {"content": str, "id": int, "special": bool}
    for token in tokens if isinstance(tokens, list) else [tokens]:
        if not isinstance(token, dict) or any(
            type(token.get(name)) is not kind for name, kind in kinds.items()
        ):
            raise DataError(
                f"{path}: added_tokens has {token!r}, must have objects with content, id and special"
            )
    return list(tokens)


def _separator(added: list[dict[str, Any]], vocab: dict[str, Any], ids: Sequence[Any], path: Path) -> str:
    """The spelling of the token between documents."""
    spellings = {token["id"]: token["content"] for token in added}
    for id in ids:
        if type(id) is int and id in spellings:
            return str(spellings[id])
    there = vocab.keys() | {token["content"] for token in added}
    found = next((spelling for spelling in SEPARATORS if spelling in there), None)
    if found is None:
        raise DataError(f"{path}: no token between documents, must have one of {', '.join(SEPARATORS)}")
    return found


def _id_of(stop: int | str, vocab: dict[str, Any], path: Path) -> Any:
    """The id of a token that ends texts. DataError: it is of none."""
    found = stop in vocab.values() if isinstance(stop, int) else stop in vocab
    if not found:
        raise DataError(f"{path}: it has no token {stop!r}, which ends texts by the files beside it")
    return stop if isinstance(stop, int) else vocab[stop]


def _bytewise(vocab: dict[str, int], added: Container[str], stops: set[int], path: Path) -> dict[str, int]:
    """The vocabulary; special tokens that are not spelled in bytes are now, or, where that is another's spelling or the
    separator's here, get one of their own. Those of `stops` say so."""
    letters, spelled = byte_letters(), dict[str, int]()
    known = set(letters)
    for token, id in vocab.items():
        own = token if known.issuperset(token) else "".join(letters[byte] for byte in token.encode())
        if own == END_OF_TEXT or (own != token and own in vocab):
            own = f"<|special{id}|>"
        if id in stops and not own.startswith(STOP):
            if token not in added:
                raise DataError(
                    f"{path}: id {id}, which ends texts, is {token!r}, must be of a special token"
                )
            own = f"{STOP}{own}"
        spelled[own] = id
    return spelled


def _pattern(pre: Any, path: Path) -> str:
    """Our pattern that splits as this pre-tokenizer does."""
    parts = (pre.get("pretokenizers") or [pre]) if isinstance(pre, dict) else []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise DataError(f"{path}: pre_tokenizer.pretokenizers is {parts!r}, must be a list of objects")
    kinds = [part.get("type") for part in parts]
    if parts and parts[-1].get("add_prefix_space"):
        raise DataError(
            f"{path}: add_prefix_space is {parts[-1]['add_prefix_space']!r}, must be false to be read"
        )
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        for name, wanted in (("behavior", "Isolated"), ("invert", False)):
            if parts[0].get(name) != wanted:
                raise DataError(f"{path}: {name} is {parts[0].get(name)!r}, must be {wanted!r} to be read")
        written = parts[0].get("pattern")
        written = written.get("Regex") if isinstance(written, dict) else None
        if isinstance(written, str) and (written in PATTERNS or written in _WRITTEN):
            return _WRITTEN.get(written, written)
    raise DataError(
        f"{path}: pre_tokenizer is {kinds or None}, must split words as GPT-2, Llama 3 or this library do"
    )
