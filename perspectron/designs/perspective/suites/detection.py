"""Detection of wrong tokens: how well measures of uncertainty tell them, and a probe fitted to tell them.

Shapes: N tokens, D model width.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perspectron.designs.perspective.safety import probe
from perspectron.util.errors import DataError
from perspectron.util.stats import Floats, bootstrap, middle

SHARE = 0.2  # of tokens that the document asks more views about


def auroc(score_N: Floats, wrong_N: Floats) -> float:
    """Probability that a wrong token has the higher score than a right one, ties counting half; NaN without both."""
    from scipy.stats import rankdata

    bad = wrong_N.sum()
    pairs = bad * (len(wrong_N) - bad)
    return float((rankdata(score_N)[wrong_N > 0].sum() - bad * (bad + 1) / 2) / pairs) if pairs else math.nan


def quality(score_N: Floats, wrong_N: Floats) -> dict[str, float]:
    """Areas under ROC, precision–recall (of what is wrong), and risk against coverage."""
    order = np.argsort(-score_N, kind="stable")
    count_N = np.arange(1, len(order) + 1)
    found_N = wrong_N[order]
    precision_N = found_N.cumsum() / count_N
    area = float((precision_N * found_N).sum() / max(found_N.sum(), 1))
    risk_N = wrong_N[order[::-1]].cumsum() / count_N
    return {"auroc": auroc(score_N, wrong_N), "aupr": area, "risk_coverage": float(risk_N.mean())}


def paired(one_N: Floats, other_N: Floats, wrong_N: Floats, window_N: Any, seed: int) -> dict[str, float]:
    """Difference of two AUROCs, with 95% of resampled windows."""
    groups = [np.flatnonzero(window_N == w) for w in np.unique(window_N)]

    def resampled(index: Any) -> Floats:
        rows = [np.concatenate([groups[w] for w in draw]) for draw in index.reshape(-1, index.shape[-1])]
        found = [auroc(one_N[at], wrong_N[at]) - auroc(other_N[at], wrong_N[at]) for at in rows]
        return np.nan_to_num(found).reshape(
            index.shape[:-1]
        )  # where a draw has no wrong token, or no right one

    low, high = middle(bootstrap(resampled, len(groups), seed)) if len(groups) > 1 else (math.nan, math.nan)
    return {"difference": auroc(one_N, wrong_N) - auroc(other_N, wrong_N), "low": low, "high": high}


def fitted_probe(hidden_ND: Tensor, wrong_N: Floats) -> Tensor:
    """The unit normal [D] in the head's input, from right tokens to wrong ones. DataError: there are not both."""
    wrong = torch.from_numpy(wrong_N > 0)
    if not 0 < int(wrong.sum()) < len(wrong):
        raise DataError(
            f"probe: {int(wrong.sum())} of {len(wrong)} tokens are wrong, must be some; read more tokens"
        )
    return probe(hidden_ND[~wrong].double(), hidden_ND[wrong].double())


def of_probe(
    hidden_ND: Tensor, wrong_N: Floats, others: dict[str, Floats], window_N: Any, seed: int
) -> dict[str, Any]:
    """A probe fitted on the first half of the tokens against other uncertainties, on the second.

    detection: `quality` of each, and of the probe's rank with the entropy's. against_entropy, adds: AUROC of the probe,
    and of both ranks, less that of entropy, with 95% of resampled windows. asked: for the probe and for each other, the
    share of the last quarter above the level that `SHARE` of the third quarter exceeds, and how often the model is
    wrong there. DataError as `fitted_probe`.
    """
    from scipy.stats import rankdata

    half, last = len(wrong_N) // 2, len(wrong_N) * 3 // 4
    normal_D = fitted_probe(hidden_ND[:half], wrong_N[:half])
    scores = {"probe": (hidden_ND.double() @ normal_D).numpy(), **others}
    fresh = {name: score[half:] for name, score in scores.items()}
    fresh["probe with entropy"] = rankdata(fresh["probe"]) + rankdata(fresh["entropy"])
    wrong, rest = wrong_N[half:], (wrong_N[half:], window_N[half:], seed)
    asked = {}
    for name, score in scores.items():
        above = score[last:] > np.quantile(score[half:last], 1 - SHARE)
        asked[name] = {
            "share": float(above.mean()),
            "wrong": float(wrong_N[last:][above].mean()) if above.any() else None,
        }
    return {
        "tokens": len(wrong),
        "detection": {name: quality(score, wrong) for name, score in fresh.items()},
        "against_entropy": paired(fresh["probe"], fresh["entropy"], *rest),
        "adds": paired(fresh["probe with entropy"], fresh["entropy"], *rest),
        "asked": asked,
    }
