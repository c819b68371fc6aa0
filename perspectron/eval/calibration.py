"""Calibration of a model's probabilities: ECE of the most likely token, Brier score, reliability diagram.

Bins hold equal numbers of tokens, which makes every gap equally certain. Bins of equal width would hold few tokens at
high confidence, whose gaps are mostly noise. (Both kinds are in use: Naeini et al. 2015; Nixon et al. 2019, who find
equal counts more stable.)
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perspectron.data.loader import IGNORE, windows
from perspectron.eval.reading import LEAST, ROWS
from perspectron.eval.subject import Subject
from perspectron.util.config import require
from perspectron.util.errors import DataError
from perspectron.util.stats import Floats, bootstrap, middle

SIMULATIONS = 100


@dataclass(frozen=True)
class Options:
    """tokens: from all over the text, in windows as in training; 0 is all. bins: of equally many tokens."""

    tokens: int = 16384
    bins: int = 15

    def __post_init__(self) -> None:
        require(self.tokens == 0 or self.tokens >= 2, "tokens", self.tokens, "0 or ≥ 2")
        require(self.bins >= 1, "bins", self.bins, "≥ 1")


class Predictions(NamedTuple):
    """Columns of N tokens: the probability of the most likely one, whether it was right, the Brier score, and the
    number of the window that it is in."""

    confidence_N: Floats
    correct_N: Floats
    brier_N: Floats
    window_N: NDArray[np.int64]


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """Calibration of a model on its held-out text, as `summary` describes it."""
    return summary(predictions(subject, options.tokens or None), options.bins, subject.seed)


def predictions(subject: Subject, limit: int | None) -> Predictions:
    """A model's predictions at `limit` tokens from all over the held-out text; a window starts from an empty state."""
    model, parts, first = subject.model, list[Predictions](), 0
    with torch.inference_mode(), subject.opened.autocast():
        for batch in windows(
            subject.text, seq_len=subject.seq_len, batch_size=ROWS, limit_tokens=limit, spread=True
        ):
            reset = None if batch.reset_BT is None else batch.reset_BT.to(model.device)
            hidden_BTD, _, _ = model.hidden(batch.ids_BT.to(model.device), reset_BT=reset)
            real_BT = batch.targets_BT != IGNORE
            row_N = real_BT.nonzero()[:, 0]
            logits_NV = model.head(hidden_BTD[real_BT.to(model.device)][None])[0]
            target_N = batch.targets_BT[real_BT].to(model.device)
            parts.append(Predictions(*judged(logits_NV, target_N), (row_N + first).numpy()))
            first += len(batch.ids_BT)
    found = Predictions(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    if not len(found.window_N):
        raise DataError(f"{subject.text.name}: no completion among the tokens measured; measure more of it")
    return found


def judged(logits_NV: Tensor, target_N: Tensor) -> tuple[Floats, Floats, Floats]:
    """Confidence, correctness and Brier score of each token. Brier: Σ over the vocabulary of (p − [it is the target])²,
    between 0 and 2, which is Σp² − 2 p of the target + 1."""
    p_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).softmax(1)
    confidence_N, guess_N = p_NV.max(1)
    of_target_N = p_NV.gather(1, target_N[:, None])[:, 0].double()
    brier_N = p_NV.square().sum(1).double() - 2 * of_target_N + 1
    columns = (confidence_N.double(), (guess_N == target_N).double(), brier_N)
    confidence, correct, brier = (column.cpu().numpy() for column in columns)
    return confidence, correct, brier


def summary(predicted: Predictions, bins: int = 15, seed: int = 0) -> dict[str, Any]:
    """ece: mean gap between confidence and accuracy of the bins. ece_low, ece_high: 95% of bootstrapped windows (tokens
    of a window depend on each other), less the bias that resampling adds, because a gap has no sign; None with fewer
    than LEAST windows. ece_calibrated: the ECE that a model with exactly right confidences would show on as many
    tokens. bins: the reliability diagram."""
    N = len(predicted.confidence_N)
    bins = min(bins, N)
    bin_N = np.empty(N, dtype=np.int64)
    bin_N[np.argsort(predicted.confidence_N, kind="stable")] = np.arange(N) * bins // N
    window_N = np.unique(predicted.window_N, return_inverse=True)[1]  # without those of prompts alone
    gap_WK = _sums(predicted.confidence_N - predicted.correct_N, window_N, bin_N, bins)
    count_WK = _sums(np.ones(N), window_N, bin_N, bins)
    ece = float(_ece(gap_WK.sum(0), N))
    low, high = _span(gap_WK, count_WK, ece, seed) or (None, None)
    count_K = count_WK.sum(0)
    confidence_K, correct_K = (
        np.bincount(bin_N, x, bins) for x in (predicted.confidence_N, predicted.correct_N)
    )
    return {
        "tokens": N,
        "ece": ece,
        "ece_low": low,
        "ece_high": high,
        "ece_calibrated": _calibrated(predicted.confidence_N, bin_N, bins, seed),
        "brier": float(predicted.brier_N.mean()),
        "accuracy": float(predicted.correct_N.mean()),
        "confidence": float(predicted.confidence_N.mean()),
        "bins": [
            {"confidence": float(c / n), "accuracy": float(a / n), "count": int(n)}
            for c, a, n in zip(confidence_K, correct_K, count_K, strict=True)
        ],
    }


def _span(gap_WK: Floats, count_WK: Floats, ece: float, seed: int) -> tuple[float, float] | None:
    if len(gap_WK) < LEAST:
        return None

    def resampled(index: NDArray[np.int64]) -> Floats:
        return _ece(gap_WK[index].sum(-2), tokens_W[index].sum(-1))

    tokens_W = count_WK.sum(1)
    ece_R = bootstrap(resampled, len(gap_WK), seed)
    low, high = middle(ece_R - (ece_R.mean() - ece))
    return max(low, 0.0), high


def _ece(gap_K: Floats, tokens: Floats | int) -> Floats:
    """Σ over bins of |Σ over tokens of confidence − correct|, over the tokens; over the last axis."""
    ece: Floats = np.abs(gap_K).sum(-1) / tokens
    return ece


def _sums(value_N: Floats, window_N: NDArray[np.int64], bin_N: NDArray[np.int64], bins: int) -> Floats:
    """Sums of the values by window and bin [W, K]."""
    shape = (int(window_N.max()) + 1, bins)
    sums = np.bincount(window_N * bins + bin_N, value_N, math.prod(shape))
    return sums.astype(np.float64).reshape(shape)


def _calibrated(confidence_N: Floats, bin_N: NDArray[np.int64], bins: int, seed: int) -> float:
    """Mean ECE of simulated models whose tokens are right with exactly the stated probability."""
    draw = np.random.Generator(np.random.PCG64([seed, 1]))
    N = len(confidence_N)
    gaps = (confidence_N - (draw.random(N) < confidence_N) for _ in range(SIMULATIONS))
    return float(np.mean([_ece(_sums(gap_N, np.zeros_like(bin_N), bin_N, bins)[0], N) for gap_N in gaps]))


def lines(result: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    low, high = result["ece_low"], result["ece_high"]
    bounds = "no interval: too few windows" if low is None else f"{low:.4f} to {high:.4f}"
    text = [
        f"ECE {result['ece']:.4f} ({bounds}); perfect calibration would show"
        f" {result['ece_calibrated']:.4f} on {result['tokens']:,} tokens",
        f"Brier {result['brier']:.4f}, accuracy {result['accuracy']:.1%}, mean confidence {result['confidence']:.1%}",
        "confidence  accuracy  tokens",
    ]
    return text + [
        f"{b['confidence']:>10.3f}  {b['accuracy']:>8.3f}  {b['count']:>6,}" for b in result["bins"]
    ]
