"""Sampling: filters, and draws that depend only on the logits and (seed, stream, count).

Shapes: B batch, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real

import torch
from torch import Tensor

from perspectron.util.config import require
from perspectron.util.errors import ConfigError, NonFiniteError
from perspectron.util.streams import gumbel

ROUNDING = 1e-12
"""A sum or a logarithm may be off by this much without changing which tokens pass."""


@dataclass(frozen=True)
class SamplingConfig:
    """The rules by which the next token is drawn. The fields apply in this order.

    repetition_penalty: logits of the last `repetition_window` tokens are divided by it where positive and
        multiplied where negative; 1 is off.
    temperature: logits are divided by it; 0 takes the most likely token.
    top_k: keep so many of the most likely tokens; 0 is off.
    top_p: keep the fewest most likely tokens that together reach this probability; 1 is off.
    min_p: keep tokens at least so many times as probable as the most likely one; 0 is off.
    seed: seed of the noise; each row of a batch has a stream of its own under it.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "repetition_window", "seed"):
            value = getattr(self, name)
            require(isinstance(value, Integral), name, value, "a whole number")
            object.__setattr__(self, name, int(value))  # numpy's have too few bits for the noise
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            require(isinstance(getattr(self, name), Real), name, getattr(self, name), "a number")
        require(0 <= self.temperature < math.inf, "temperature", self.temperature, "≥ 0 and finite")
        require(self.top_k >= 0, "top_k", self.top_k, "≥ 0")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "> 0 and ≤ 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "≥ 0 and ≤ 1")
        penalty = self.repetition_penalty
        require(0 < penalty < math.inf, "repetition_penalty", penalty, "> 0 and finite")
        require(self.repetition_window >= 1, "repetition_window", self.repetition_window, "≥ 1")
        require(0 <= self.seed < 2**64, "seed", self.seed, "≥ 0 and < 2^64")


def filtered(
    logits_BV: Tensor, config: SamplingConfig, recent: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """Logits [B,V] in float64 whose softmax is what `sample` draws from: −inf where a token is excluded.

    Each row is shifted so that its largest is 0. At least one token always stays; of equals, those of lower
    id. recent: the tokens so far, row by row, for the penalty. A logit of −inf excludes its token. Rows that are
    `non_finite` have none to draw.
    """
    logits_BV = logits_BV.double()
    if recent is not None and config.repetition_penalty != 1:
        logits_BV = _penalised(logits_BV, recent, config)
    logits_BV = logits_BV - logits_BV.amax(1, keepdim=True)
    top_k = config.top_k
    if config.temperature == 0:
        top_k = 1
    else:
        logits_BV = logits_BV / config.temperature
    if 0 < top_k < logits_BV.shape[1]:
        logits_BV = logits_BV.masked_fill(~_most_likely(logits_BV, top_k), -math.inf)
    if config.top_p < 1:
        logits_BV = logits_BV.masked_fill(~_nucleus(logits_BV, config.top_p), -math.inf)
    if config.min_p > 0:
        logits_BV = logits_BV.masked_fill(logits_BV < math.log(config.min_p) - ROUNDING, -math.inf)
    return logits_BV


def sample(
    logits_BV: Tensor,
    recent: Sequence[Sequence[int]],
    drawn: int | Sequence[int],
    config: SamplingConfig | Sequence[SamplingConfig],
    streams: Sequence[int] | None = None,
) -> Tensor:
    """One token id per row [B], int64, on the CPU.

    drawn: how many tokens each row has drawn before. config: of all rows, or one per row. streams: of noise, one per
    row; its number when None. A row's draw depends on its logits, (seed, stream, drawn) and nothing else: not on the
    batch, the device or torch's generators. The same noise falls on each id whatever the logits (Gumbel-max), so
    logits that differ by a rounding error hardly ever differ in the draw.
    NonFiniteError for a row that is `non_finite`; ConfigError where an argument has not one entry per row.
    """
    B, V = logits_BV.shape
    counts = [drawn] * B if isinstance(drawn, int) else drawn
    configs = [config] * B if isinstance(config, SamplingConfig) else config
    streams = range(B) if streams is None else streams
    lists = {"recent": recent, "drawn": counts, "config": configs, "streams": streams}
    for field, rows in lists.items():
        if len(rows) != B:
            raise ConfigError(f"{field} has {len(rows)} rows, must be as many as logits has, {B}")
    logits_BV = logits_BV.cpu()
    for row in non_finite(logits_BV):
        value = logits_BV[row].max().item()
        raise NonFiniteError(f"logits of row {row}: the largest is {value}, must be finite")
    if all(own is configs[0] for own in configs):
        alike = {configs[0]: list(range(B))} if B else {}
    else:
        alike = dict[SamplingConfig, list[int]]()
        for row, own in enumerate(configs):
            alike.setdefault(replace(own, seed=0), []).append(row)
    id_B = torch.empty(B, dtype=torch.int64)
    for own, rows in alike.items():
        few_NV = logits_BV if len(rows) == B else logits_BV[rows]
        kept_NV = filtered(few_NV, own, [recent[row] for row in rows])
        if own.temperature == 0:
            id_B[rows] = kept_NV.argmax(1)
            continue
        few = own.top_k > 0 or own.top_p < 1 or own.min_p > 0
        for row, kept_V in zip(rows, kept_NV, strict=True):
            key, count = configs[row].seed | streams[row] << 64, counts[row]
            if few:
                id_K = (kept_V > -math.inf).nonzero()[:, 0]
                noise_K = torch.from_numpy(gumbel(key, count, V, id_K.numpy()))
                id_B[row] = id_K[(kept_V[id_K] + noise_K).argmax()]
            else:
                id_B[row] = (kept_V + torch.from_numpy(gumbel(key, count, V))).argmax()
    return id_B


def non_finite(logits_BV: Tensor) -> list[int]:
    """Rows that cannot be drawn from: a NaN, a +inf, or nothing but −inf."""
    largest_B = logits_BV.amax(1)  # NaN if there is one
    return (~largest_B.isfinite()).nonzero()[:, 0].tolist()


def _penalised(logits_BV: Tensor, recent: Sequence[Sequence[int]], config: SamplingConfig) -> Tensor:
    """Repetition penalty of CTRL (Keskar et al. 2019, §4.1)."""
    seen_BV, V = torch.zeros_like(logits_BV, dtype=torch.bool), logits_BV.shape[1]
    for row, ids in enumerate(recent):
        last = list(ids[-config.repetition_window :])
        require(all(0 <= id < V for id in last), "recent", last, f"ids ≥ 0 and < {V}")
        seen_BV[row, last] = True
    penalty, most = config.repetition_penalty, torch.finfo(logits_BV.dtype).max
    changed_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV & logits_BV.isfinite(), changed_BV.clamp(-most, most), logits_BV)


def _most_likely(logits_BV: Tensor, k: int) -> Tensor:
    """The k largest of each row [B,V]; which of equals `topk` returns is not defined, so those are counted."""
    least_B1 = logits_BV.topk(k).values[:, -1:]
    above_BV, equal_BV = logits_BV > least_B1, logits_BV == least_B1
    return above_BV | (equal_BV & (equal_BV.cumsum(1) <= k - above_BV.sum(1, keepdim=True)))


def _nucleus(logits_BV: Tensor, top_p: float) -> Tensor:
    """Tokens [B,V] before which, from the most likely on, less than `top_p` is reached."""
    keep_BV, V = torch.zeros_like(logits_BV, dtype=torch.bool), logits_BV.shape[1]
    # Of a large vocabulary few are sorted: all that are less likely than this together reach less than 1 − top_p.
    least = (1 - top_p) / (2 * V)
    for keep_V, logits_V, probability_V in zip(keep_BV, logits_BV, logits_BV.softmax(1), strict=True):
        id_N = (probability_V >= least).nonzero()[:, 0]
        id_N = id_N[logits_V[id_N].sort(descending=True, stable=True).indices]
        probability_N = probability_V[id_N]
        before_N = probability_N.cumsum(0) - probability_N
        keep_V[id_N[before_N < top_p - ROUNDING]] = True
        keep_V[id_N[:1]] = True
    return keep_BV


def logprobs(logits_V: Tensor, id: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Log-probabilities, in nats, of a token and of the most likely ones."""
    log_V = logits_V.double().log_softmax(0)
    values, likely = log_V.topk(count)
    return float(log_V[id]), tuple(zip(likely.tolist(), values.tolist(), strict=True))
