"""Held-out loss in bits per byte, which is comparable across tokenizers, and in perplexity per token.

Two scores. Windows: separate windows of the training length, each from an empty state. Streaming: memory carried
through each document from its start, as in use; attention that has no window of its own sees the last tokens, as many
as a training window has, in a ring, so that no design's state grows with the text.
"""

import gzip
import lzma
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from perspectron.data.shards import Split
from perspectron.data.tokenizer import Tokenizer
from perspectron.eval.subject import Subject
from perspectron.model.cache import ringed
from perspectron.model.model import LanguageModel
from perspectron.train.heldout import Heldout, heldout
from perspectron.util.config import require

CHUNK = 1024
"""Tokens of a document that are read at once."""


@dataclass(frozen=True)
class Streaming(Heldout):
    """The loss with memory carried. state_bytes: of one document, however long, in the model's dtype."""

    state_bytes: int


def streaming(
    model: LanguageModel,
    split: Split,
    tokenizer: Tokenizer,
    *,
    window: int,
    limit_tokens: int | None = None,
    dtype: torch.dtype | None = None,
) -> Streaming:
    """The loss over the same targets as `heldout`, with memory that is carried through each document and emptied at the
    start of the next. Attention to all earlier tokens sees the last `window`, itself counted; rotary positions count
    on. dtype: of autocast.

    ConfigError: window < 1, or the model cannot be read so: its learned table of positions ends, or its state grows
    with the text in a way that a ring does not end.
    """
    size = streaming_state_bytes(model, window)
    found = heldout(
        model,
        split,
        tokenizer,
        seq_len=CHUNK,
        limit_tokens=limit_tokens,
        carry=True,
        dtype=dtype,
        start=ringed(model.init_state(1, capacity=1), window),
    )
    return Streaming(**asdict(found), state_bytes=size)


def streaming_state_bytes(model: LanguageModel, window: int) -> int:
    """Bytes of the state of one document in `streaming`. ConfigError as there."""
    require(window >= 1, "window", window, "≥ 1")
    name, table = model.config.name, model.config.positions
    bound = "0 to be read as a stream: a table of positions ends within a document"
    require(table == 0, f"{name}: positions", table, bound)
    sizes = [ringed(model.init_state(1, capacity=n, device="meta"), window).nbytes for n in (1, 2 * window)]
    require(sizes[0] == sizes[1], f"{name}: bytes of state", sizes[1], f"{sizes[0]}, as of an empty document")
    return sizes[0]


def mean_context(split: Split, seq_len: int = 0) -> float:
    """Tokens that stand before a target, in its window of `seq_len` tokens and its document; 0: in its document."""
    at = np.arange(split.tokens - 1)
    starts = np.asarray(split.starts)
    begins = np.concatenate([[0], starts])[np.searchsorted(starts, at, side="right")]
    begins = np.maximum(begins, at // seq_len * seq_len) if seq_len else begins
    return float((at + 1 - begins).mean())


@dataclass(frozen=True)
class Options:
    """tokens: of the text, from its start; 0 is all. carry: as in `heldout`."""

    tokens: int = 0
    carry: bool = False


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """The fields of `Heldout`, and the compressors' results for the same bytes."""
    result = heldout(
        subject.model,
        subject.text,
        subject.tokenizer,
        seq_len=subject.seq_len,
        limit_tokens=options.tokens or None,
        carry=options.carry,
        dtype=subject.opened.folder.dtype,
    )
    others = compressors(text_of(subject.text, subject.tokenizer, options.tokens or subject.text.tokens))
    whole = not 0 < options.tokens < subject.text.tokens
    return asdict(result) | {"whole": whole, "compressors": others}


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    return [said(result), f"perplexity {result['perplexity']:.1f} per token, {result['tokens']:,} tokens"]


def said(result: dict[str, Any]) -> str:
    """The loss, the text that it is of, and compressors of the same bytes: one sentence wherever it is told."""
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in result["compressors"].items())
    text = f"{'all' if result['whole'] else 'the first'} {result['text_bytes']:,} held-out bytes"
    return f"{result['bits_per_byte']:.3f} bits per byte on {text} ({others} on the same bytes)"


def text_of(split: Split, tokenizer: Tokenizer, tokens: int) -> bytes:
    """The bytes that the first `tokens` ids of a split stand for, or those of them that are learned."""
    stop = min(tokens, split.tokens)
    ids = split.read(0, stop)[split.is_learned(0, stop)]
    return b"".join(map(tokenizer.token_bytes, ids.tolist()))


def compressors(text: bytes) -> dict[str, float]:
    """Bits per byte that `gzip -9` and `xz -9` need for the same bytes."""
    sizes = {"gzip -9": len(gzip.compress(text, 9)), "xz -9": len(lzma.compress(text, preset=9))}
    return {name: 8 * size / max(len(text), 1) for name, size in sizes.items()}
