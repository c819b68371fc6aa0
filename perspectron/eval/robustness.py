"""Robustness: the change in loss when the state was saved and loaded, and when the context is shuffled or corrupted.

Every stretch lies within one document: a context and, in its last quarter, a continuation. Only the continuation's
tokens are targets (of prompts and completions, those that are learned), and they are always read unchanged: only the
context differs.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perspectron.eval.reading import (
    ROWS,
    bits_per_byte,
    byte_counts,
    longest,
    nats,
    read,
    span,
    stretches,
)
from perspectron.eval.subject import Subject
from perspectron.model.state import LMState, load_state, save_state
from perspectron.util.config import require
from perspectron.util.errors import DataError


@dataclass(frozen=True)
class Options:
    """tokens: of all stretches together; 0 is the whole text. windows: in which a context's tokens are shuffled; the
    whole context is always tried too. shares: of a context's tokens that become random ones."""

    tokens: int = 4096
    windows: tuple[int, ...] = (4, 16)
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(all(n >= 2 for n in self.windows), "windows", list(self.windows), "each ≥ 2")
        require(all(0 <= s <= 1 for s in self.shares), "shares", list(self.shares), "each in [0, 1]")


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """whole: nats per token after the true context; resumed: with the state saved and loaded between context and
    continuation; resumed_equal: the same loss at every token, bit for bit. Then bits per byte after the true context,
    none, one shuffled within windows or as a whole, and one of which a share is random tokens. too_long: windows that
    the context is too short for. worse: how many more bits per byte each of these needs than the true context, with its
    95% interval (`reading.span`).
    ConfigError for a seq_len of 1; DataError without a document of 3 tokens, or where nothing that is learned follows a
    context."""
    require(subject.seq_len >= 2, "seq_len", subject.seq_len, "≥ 2, for a context and a continuation")
    length = max(2, longest(subject.text, ROWS, subject.seq_len))
    ids_NT, learned_NT = stretches(
        subject.text, length, max(1, (options.tokens or subject.text.tokens) // length)
    )
    at = length - max(1, length // 4)
    context_NT, rest_NT = ids_NT[:, :at], ids_NT[:, at:]
    learned_NT = learned_NT[:, at:]
    targets = int(learned_NT.sum())
    if not targets:
        raise DataError(f"{subject.text.name}: no completion goes on where the {at} tokens of context end")
    bytes_NT = byte_counts(subject.tokenizer, rest_NT[:, 1:], learned_NT)
    whole_NT = _continued(subject, context_NT, rest_NT).masked_fill(~learned_NT, 0)
    resumed_NT = _continued(subject, context_NT, rest_NT, on_disk).masked_fill(~learned_NT, 0)
    silent, seed = subject.tokenizer.specials.silent, subject.seed
    words = torch.tensor([id for id in range(subject.tokenizer.vocab_size) if id not in silent])
    windows = {f"within_{n}": n for n in options.windows if n < at} | {"whole": at}
    contexts = {"no_context": context_NT[:, :0]}
    contexts |= {f"shuffled_{name}": shuffled(context_NT, n, seed) for name, n in windows.items()}
    contexts |= {f"corrupted_{share}": corrupted(context_NT, share, words, seed) for share in options.shares}
    lost = {
        name: _continued(subject, before_NT, rest_NT).masked_fill(~learned_NT, 0)
        for name, before_NT in contexts.items()
    }
    bits = {name: bits_per_byte(lost_NT, bytes_NT) for name, lost_NT in lost.items()}
    return {
        "context": at,
        "too_long": [n for n in options.windows if n >= at],
        "stretches": len(ids_NT),
        "tokens": targets,
        "whole": whole_NT.double().sum().item() / targets,
        "resumed": resumed_NT.double().sum().item() / targets,
        "resumed_equal": torch.equal(whole_NT, resumed_NT),
        "bits_per_byte": bits_per_byte(whole_NT, bytes_NT),
        "no_context": bits["no_context"],
        "shuffled": {name: bits[f"shuffled_{name}"] for name in windows},
        "corrupted": [
            {"share": share, "bits_per_byte": bits[f"corrupted_{share}"]} for share in options.shares
        ],
        "worse": {name: _worse(whole_NT, lost_NT, bytes_NT) for name, lost_NT in lost.items()},
    }


def _worse(whole_NT: Tensor, lost_NT: Tensor, bytes_NT: Tensor) -> dict[str, float | None]:
    more_N = (lost_NT.double() - whole_NT.double()).sum(1)
    low, high = span(more_N, bytes_NT.sum(1)) or (None, None)
    return {"bits_per_byte": bits_per_byte(more_N, bytes_NT), "low": low, "high": high}


def shuffled(context_NT: Tensor, window: int, seed: int) -> Tensor:
    """The tokens after the first, in random order within windows of so many; the first may be the separator."""
    draw = torch.Generator().manual_seed(seed)
    N, T = context_NT.shape
    random_NT = torch.rand(N, T, generator=draw, dtype=torch.float64)
    key_NT = random_NT + (torch.arange(T) - 1).div(window, rounding_mode="floor")
    return context_NT.gather(1, key_NT.argsort(1))


def corrupted(context_NT: Tensor, share: float, words_V: Tensor, seed: int) -> Tensor:
    """Each token after the first becomes, with probability `share`, a random one of these. With the same seed a larger
    share corrupts what a smaller one does, and more."""
    draw = torch.Generator().manual_seed(seed)
    hit_NT = torch.rand(context_NT.shape, generator=draw) < share
    hit_NT[:, :1] = False
    other_NT = words_V[torch.randint(len(words_V), context_NT.shape, generator=draw)]
    return torch.where(hit_NT, other_NT, context_NT)


def on_disk(subject: Subject, state: LMState) -> LMState:
    """The state, saved to a file and loaded from it."""
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder) / "state", state, subject.model)
        return load_state(Path(folder) / "state", subject.model).to(subject.model.device)


def _continued(
    subject: Subject,
    context_NT: Tensor,
    rest_NT: Tensor,
    between: Callable[[Subject, LMState], LMState] = lambda _, state: state,
) -> Tensor:
    """Nats of the targets of `rest_NT` after the context; `between` is done to the state."""
    lost = []
    for context_BT, rest_BT in zip(context_NT.split(ROWS), rest_NT.split(ROWS), strict=True):
        length = context_BT.shape[1] + rest_BT.shape[1]
        state = subject.model.init_state(len(rest_BT), capacity=length)
        if context_BT.shape[1]:
            state = read(subject, context_BT, state)
        lost.append(nats(subject, rest_BT, between(subject, state))[0])
    return torch.cat(lost)


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    same = "the same at every token" if result["resumed_equal"] else "NOT the same"
    text = [
        f"loss on {result['tokens']:,} tokens after {result['context']:,} tokens of context",
        f"uninterrupted {result['whole']:.6f} nats per token, state from disk {result['resumed']:.6f}: {same}",
        f"true context: {result['bits_per_byte']:.4f} bits per byte",
    ]
    for name, more in result["worse"].items():
        few = f"no interval, {result['stretches']} stretches are too few"
        bounds = few if more["low"] is None else f"{more['low']:+.4f} to {more['high']:+.4f}"
        text.append(f"{name.replace('_', ' ')}: {more['bits_per_byte']:+.4f} ({bounds})")
    for n in result["too_long"]:
        text.append(f"shuffled within {n}: not measured, the context has {result['context']:,} tokens")
    return text
