"""Held-out loss in bits per byte, which is comparable across tokenizers, and in perplexity per token.

Two scores. Windows: separate windows of the training length, each from an empty state. Streaming: memory carried
through each document from its start, as in use; attention that has no window of its own sees the last tokens, as many
as a training window has, in a ring, so that no design's state grows with the text.
"""

import bz2
import gzip
import lzma
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from perspectron.data.reading import ZSTD
from perspectron.data.shards import Split
from perspectron.data.tokenizer import Tokenizer
from perspectron.eval.subject import Subject
from perspectron.model.cache import ringed
from perspectron.model.model import LanguageModel
from perspectron.train.heldout import Heldout, heldout
from perspectron.util.config import require
from perspectron.util.errors import ConfigError

CHUNK = 1024
"""Tokens of a document that are read at once."""
PRIMED = 64 << 20
"""Bytes that a compressor reads before the text: as far as xz -9 looks back."""


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


def mean_context(split: Split, seq_len: int = 0, tokens: int = 0) -> float:
    """Mean number of tokens before a target, in its window of `seq_len` tokens and its document; 0: in its document.
    Over the targets among the first `tokens` of the split; 0 is all."""
    stop = min(tokens or split.tokens, split.tokens)
    at = np.arange(stop - 1)[split.is_learned(1, stop)]
    starts = np.asarray(split.starts)
    begins = np.concatenate([[0], starts])[np.searchsorted(starts, at, side="right")]
    begins = np.maximum(begins, at // seq_len * seq_len) if seq_len else begins
    return float((at + 1 - begins).mean())


@dataclass(frozen=True)
class Options:
    """tokens: of the text, from its start; 0 is all."""

    tokens: int = 0

    def __post_init__(self) -> None:
        require(self.tokens == 0 or self.tokens >= 2, "tokens", self.tokens, "0 or ≥ 2")


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """The fields of `Heldout` in windows, and `context`, the mean tokens before a target; under "streaming" those of
    `Streaming` with theirs, or None with the reason under "why"; and compressors' results for the same bytes."""
    split, model, limit = subject.text, subject.model, options.tokens or None
    dtype, window = subject.opened.folder.dtype, subject.seq_len
    result = heldout(model, split, subject.tokenizer, seq_len=window, limit_tokens=limit, dtype=dtype)
    streamed, why = None, None
    try:
        streaming_state_bytes(model, window)
    except ConfigError as error:
        why = str(error)
    else:
        carried = streaming(model, split, subject.tokenizer, window=window, limit_tokens=limit, dtype=dtype)
        streamed = asdict(carried) | {"context": mean_context(split, 0, options.tokens)}
    return asdict(result) | {
        "seq_len": window,
        "context": mean_context(split, window, options.tokens),
        "streaming": streamed,
        "why": why,
        "whole": not 0 < options.tokens < split.tokens,
        "compressors": compressors(text_of(split, subject.tokenizer, options.tokens or split.tokens)),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    window, streamed = result["seq_len"], result["streaming"]
    carried = f"not scored, {result['why']}"
    if streamed:
        carried = (
            f"{streamed['bits_per_byte']:.3f}, memory carried through each document ({streamed['context']:,.0f} "
            f"tokens before a target on average), attention to at most the last {window:,}; "
            f"{streamed['state_bytes']:,} bytes of state"
        )
    return [
        said(result),
        f"windows: {result['bits_per_byte']:.3f}, separate windows of {window:,} tokens from an empty state "
        f"({result['context']:,.0f} tokens before a target on average)",
        f"streaming: {carried}",
        f"perplexity {result['perplexity']:.1f} per token in windows, {result['tokens']:,} tokens",
    ]


def said(result: dict[str, Any]) -> str:
    """A sentence with the loss, the text it was measured on, and compressors on the same bytes."""
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in result["compressors"].items())
    text = f"{'all' if result['whole'] else 'the first'} {result['text_bytes']:,} held-out bytes"
    return f"{result['bits_per_byte']:.3f} bits per byte on {text} ({others} on the same bytes)"


def text_of(split: Split, tokenizer: Tokenizer, stop: int, start: int = 0) -> bytes:
    """The bytes of the ids from `start` to `stop` of a split; if it has prompts, of completions alone."""
    stop = min(stop, split.tokens)
    ids = split.read(start, stop)[split.is_learned(start, stop)]
    return b"".join(map(tokenizer.token_bytes, ids.tolist()))


def end_of(split: Split, tokenizer: Tokenizer) -> bytes:
    """The last PRIMED bytes of a split, or all."""
    parts, start = list[bytes](), split.tokens
    while start and sum(map(len, parts)) < PRIMED:
        stop, start = start, max(0, start - 2**20)
        parts.insert(0, text_of(split, tokenizer, stop, start))
    return b"".join(parts)[-PRIMED:]


def compressors(text: bytes, before: bytes = b"") -> dict[str, float]:
    """Bits per byte that compressors need for a text, alone and, if `before` is given (the training text), primed by
    it: how much longer the archive of both is. xz and zstd look back over all of it, gzip over 32 kB; bzip2 has blocks
    of 900 kB."""

    def bits(size: int) -> float:
        return 8 * size / max(len(text), 1)

    found = {name: bits(len(pack(text))) for name, pack in COMPRESSORS.items()}
    primed = {
        name: len(pack(before + text)) - len(pack(before)) for name, pack in COMPRESSORS.items() if before
    }
    return found | {f"{name}, primed": bits(size) for name, size in primed.items()}


def _xz(text: bytes) -> bytes:
    window = min(max(PRIMED, len(text)), 2 * PRIMED)
    return lzma.compress(text, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window}])


def _zstd(text: bytes) -> bytes:
    zstd = import_module(ZSTD)
    setting, window = zstd.CompressionParameter, (2 * PRIMED).bit_length() - 1
    options: dict[int, int] = {setting.compression_level: 22, setting.window_log: window}
    return zstd.compress(text, options=options | {setting.enable_long_distance_matching: 1})


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda text: gzip.compress(text, 9),
    "bzip2 -9": lambda text: bz2.compress(text, 9),
    "xz -9": _xz,
    "zstd -22": _zstd,
}
