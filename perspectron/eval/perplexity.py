"""Held-out loss in bits per byte, which is comparable across tokenizers, and in perplexity per token."""

import gzip
import lzma
from dataclasses import asdict, dataclass
from typing import Any

from perspectron.data.shards import Split
from perspectron.data.tokenizer import Tokenizer
from perspectron.eval.subject import Subject
from perspectron.train.heldout import heldout


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
