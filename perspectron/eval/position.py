"""Held-out loss by position, and whether context beyond the training length helps.

A stretch lies within one document and is read from an empty state, as in training, so a target at position t follows
exactly the t + 1 tokens of the stretch before it. All stretches are equally long: every bin is over the same ones. Of
prompts and completions only what is learned counts as a target.

Text gets easier or harder along a document, so that a falling curve does not show that context helps. `falls_past`
does: the same targets, the last N/2 of each stretch, are read again after only the N tokens before them.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perspectron.eval.reading import (
    LEAST,
    ROWS,
    bits_per_byte,
    byte_counts,
    longest,
    nats,
    span,
    stretches,
)
from perspectron.eval.subject import Subject
from perspectron.util.config import require


@dataclass(frozen=True)
class Options:
    """tokens: to read, over all stretches; 0 is as many as give the longest stretches that there are, and the default
    suffices for 8,192 tokens of context. stretches: their number. contexts: lengths past which the loss may still fall;
    each needs a stretch of twice as many tokens."""

    tokens: int = 8 * 16384
    stretches: int = 8
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(self.stretches >= 1, "stretches", self.stretches, "≥ 1")
        require(all(n >= 2 for n in self.contexts), "contexts", list(self.contexts), "each ≥ 2")


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """Loss by position. bins: bits per byte of targets at positions from ≤ t < to. falls_past: by context N, True if
    the interval of the gain is above 0, False if it is not (no proof of the contrary), None where it was not measured,
    for a reason that `why` gives. past: gain in bits per byte by more context than N, with a 95% interval over the
    stretches (Student's t). longest: tokens of a stretch. carried: read past the training window; designs with a
    table of positions stop at its end, in the same stretches. DataError without a document of two tokens."""
    most = options.tokens // options.stretches if options.tokens else subject.text.tokens
    table = subject.model.config.positions
    length = longest(subject.text, options.stretches, most)
    ids_NT, learned_NT = stretches(subject.text, length, options.stretches)
    if 0 < table < length:  # the beginnings of what other designs read
        length, ids_NT, learned_NT = table, ids_NT[:, : table + 1], learned_NT[:, :table]
    whole_NT = torch.cat([nats(subject, ids_BT)[0] for ids_BT in ids_NT.split(ROWS)]).masked_fill(
        ~learned_NT, 0
    )
    bytes_NT = byte_counts(subject.tokenizer, ids_NT[:, 1:], learned_NT)
    gains = {str(N): _gain(subject, ids_NT, learned_NT, whole_NT, bytes_NT, N) for N in options.contexts}
    past = {N: None if isinstance(gain, str) else gain for N, gain in gains.items()}
    return {
        "seq_len": subject.seq_len,
        "longest": length,
        "stretches": len(ids_NT),
        "contexts": list(options.contexts),
        "bins": _bins(whole_NT, bytes_NT, learned_NT),
        "carried": table == 0 and length > subject.seq_len,
        "falls_past": {N: None if gain is None else gain["low"] > 0 for N, gain in past.items()},
        "past": past,
        "why": {N: gain for N, gain in gains.items() if isinstance(gain, str)},
    }


def _bins(nats_NT: Tensor, bytes_NT: Tensor, learned_NT: Tensor) -> list[dict[str, Any]]:
    """Bits per byte at positions 0, 1, 2-3, 4-7, …"""
    edges = [0, *(2**k for k in range((nats_NT.shape[1] - 1).bit_length())), nats_NT.shape[1]]
    edges = list(dict.fromkeys(edges))
    bins = []
    for low, high in itertools.pairwise(edges):
        part = slice(low, high)
        value = bits_per_byte(nats_NT[:, part], bytes_NT[:, part])
        tokens = int(learned_NT[:, part].sum())
        size = int(bytes_NT[:, part].sum())
        bins.append({"from": low, "to": high, "tokens": tokens, "bytes": size, "bits_per_byte": value})
    return bins


def _gain(
    subject: Subject, ids_NT: Tensor, learned_NT: Tensor, whole_NT: Tensor, bytes_NT: Tensor, context: int
) -> dict[str, Any] | str:
    """Bits per byte that the last context/2 targets of each stretch lose when reading begins `context` tokens before
    the first of them; or why that was not measured."""
    table, length, targets = subject.model.config.positions, ids_NT.shape[1] - 1, context // 2
    if 0 < table < 2 * context:
        return f"the table of positions ends at {table}, {2 * context} are needed"
    if length < 2 * context:
        return f"stretches of {length} tokens, {2 * context} are needed"
    if len(ids_NT) < LEAST:
        return f"{len(ids_NT)} stretches, an interval needs {LEAST}"
    short_NT = torch.cat([nats(subject, part)[0] for part in ids_NT[:, -(context + targets) :].split(ROWS)])
    bytes_NT, learned_NT = bytes_NT[:, -targets:], learned_NT[:, -targets:]
    lost_NT = short_NT[:, -targets:].double().masked_fill(~learned_NT, 0) - whole_NT[:, -targets:].double()
    bounds = span(lost_NT.sum(1), bytes_NT.sum(1))
    if bounds is None:
        return "the targets are of no bytes"
    gain = bits_per_byte(lost_NT, bytes_NT)
    return {"tokens": int(learned_NT.sum()), "bits_per_byte": gain, "low": bounds[0], "high": bounds[1]}


def lines(result: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    text = [
        f"bits per byte by position, over {result['stretches']} stretches of {result['longest']:,} tokens"
        f" (trained on {result['seq_len']:,})"
    ]
    text += [f"{b['from']:>6,} to {b['to'] - 1:>6,}  {b['bits_per_byte']:.3f}" for b in result["bins"]]
    for N, gain in result["past"].items():
        if gain is None:
            text.append(f"past {int(N):,}: not measured, {result['why'][N]}")
            continue
        verdict = "falls" if result["falls_past"][N] else "does not measurably fall"
        span = f"{gain['low']:+.4f} to {gain['high']:+.4f}"
        text.append(
            f"past {int(N):,}: {verdict}; more context gains {gain['bits_per_byte']:+.4f} ({span}) bits per byte"
        )
    return text
