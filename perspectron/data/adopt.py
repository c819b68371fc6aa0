"""Tokenizers of other programs as ours: byte-level BPE, with the separator moved to id 0."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perspectron.data import bpe
from perspectron.data.bpe import END_OF_TEXT, byte_letters
from perspectron.data.tokenizer import STOP, Tokenizer
from perspectron.util.errors import DataError

SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<|begin_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")
"""Spellings of the token between documents where no id says which one it is: the first that is there counts."""


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

    DataError, naming the field, for every other kind (`bpe.parse`), added tokens that text gives, and stops that are
    none of the special tokens.
    """
    learned = bpe.parse(bpe.read(path), path)
    added = {token.content: token.id for token in learned.added}
    vocab = learned.vocab | added
    spellings = {token.id: token.content for token in learned.added}
    named = (spellings[id] for id in ids if type(id) is int and id in spellings)
    known = (spelling for spelling in SEPARATORS if spelling in vocab)
    separator = next(named, None) or next(known, None)
    if separator is None:
        raise DataError(f"{path}: no token between documents, must have one of {', '.join(SEPARATORS)}")
    for token in learned.added:
        if not token.special and token.content != separator:
            raise DataError(
                f"{path}: added token {token.content!r} is not special, so text gives it; no tokenizer of ours can"
            )
    ends = {_id_of(stop, vocab, path) for stop in stops}
    at = vocab.pop(separator)
    if not 0 <= at <= len(vocab):  # beyond, a matrix may have no row
        raise DataError(
            f"{path}: the id of {separator!r} is {at!r}, must be a whole number in 0 … {len(vocab)}"
        )
    vocab = {token: at if id == 0 else id for token, id in vocab.items()}
    ends = {at if id == 0 else 0 if id == at else id for id in ends} - {0}
    vocab = {END_OF_TEXT: 0} | _bytewise(vocab, {separator, *added}, ends, path)
    return Adopted(Tokenizer.parse(bpe.to_json(vocab, learned.merges, learned.pattern), path), at, separator)


def _id_of(stop: int | str, vocab: dict[str, int], path: Path) -> int:
    """The id of a token that ends texts. DataError: it is of none."""
    if (stop not in vocab.values()) if isinstance(stop, int) else (stop not in vocab):
        raise DataError(f"{path}: it has no token {stop!r}, which ends texts by the files beside it")
    return stop if isinstance(stop, int) else vocab[stop]


def _bytewise(vocab: dict[str, int], added: set[str], stops: set[int], path: Path) -> dict[str, int]:
    """The vocabulary; special tokens that are not spelled in bytes are now, or, where that is another's spelling or the
    separator's here, get one of their own. Those of `stops` say so."""
    letters, spelled = byte_letters(), dict[str, int]()
    known = set(letters)
    for token, id in vocab.items():
        spelling = token if known.issuperset(token) else "".join(letters[byte] for byte in token.encode())
        if spelling == END_OF_TEXT or (spelling != token and spelling in vocab):
            spelling = f"<|special{id}|>"
        if id in stops and not spelling.startswith(STOP):
            if token not in added:
                raise DataError(
                    f"{path}: id {id}, which ends texts, is {token!r}, must be of a special token"
                )
            spelling = f"{STOP}{spelling}"
        spelled[spelling] = id
    return spelled
