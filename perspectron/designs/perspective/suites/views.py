"""Perspectives on held-out text: do they know where the model is wrong, and what do they add to its entropy?

Every perspective reads the text by itself, teacher-forced. Uncertainties are judged by how well they tell tokens that
the model gets wrong: area under ROC and precision–recall curves, and under risk against coverage (less is better).

Shapes: N tokens, P perspectives with the base first, V vocabulary, B rows, T time.
"""

import math
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perspectron.data.loader import IGNORE, windows
from perspectron.designs.perspective.measures import compared, divergence, entropy, probabilities
from perspectron.designs.perspective.suites.detection import auroc, fitted_probe, of_probe, paired, quality
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig
from perspectron.eval.calibration import Predictions, summary
from perspectron.eval.reading import ROWS
from perspectron.eval.subject import Subject
from perspectron.experts.router import Views
from perspectron.opening import open_model
from perspectron.ops.attention import places
from perspectron.util.config import require
from perspectron.util.errors import DataError
from perspectron.util.stats import Floats

BANDS = 4


@dataclass(frozen=True)
class Options:
    """tokens: held-out tokens, in windows as in training, from all over the text. from_layer: as in decoding. other:
    folder of a run trained by itself on the same text, whose disagreement is the ceiling. surrogate: for models without
    experts. target_flag: share of the triggered tokens above the threshold."""

    tokens: int = 8192
    from_layer: int = 0
    surrogate: bool = False
    other: str = ""
    target_flag: float = 0.1

    def __post_init__(self) -> None:
        require(self.tokens >= 2, "tokens", self.tokens, "≥ 2")
        require(0 < self.target_flag < 1, "target_flag", self.target_flag, "in (0, 1)")


@dataclass
class Columns:
    """Measurements at N tokens. target: their ids. top: greatest probability of the base [N]. wrong: the base's
    likeliest token is not the target. hidden: the head's input, of the base [N,D]. votes: likeliest token of each
    perspective [N,P]. scores: uncertainties [N] by name. log_base, log_mixture: [N,V], float32. window: the number of
    each token's window."""

    target: Tensor
    top: Floats
    wrong: Floats
    hidden: Tensor
    votes: Tensor
    scores: dict[str, Floats]
    log_base: Tensor
    log_mixture: Tensor
    window: Any


@torch.inference_mode()
def collect(subject: Subject, config: PerspectivesConfig, tokens: int) -> Columns:
    """Read held-out tokens from every perspective. DataError: the text is shorter than asked."""
    looked, split = Perspectives(subject.model, config), subject.text
    if split.tokens < tokens:
        raise DataError(f"{split.name}: {split.tokens:,} tokens; ask for as many or fewer, not {tokens:,}")
    parts, first = list[dict[str, Any]](), 0
    for batch in windows(split, seq_len=subject.seq_len, batch_size=ROWS, limit_tokens=tokens, spread=True):
        real_BT = batch.targets_BT != IGNORE
        target_N = batch.targets_BT[real_BT]
        V = subject.tokenizer.vocab_size
        logits_PNV, hidden_ND = all_views(looked, batch.ids_BT, batch.reset_BT, real_BT, V)
        more = {"window": real_BT.nonzero()[:, 0] + first, "hidden": hidden_ND}
        parts.append(_row(logits_PNV, target_N) | more)
        first += len(batch.ids_BT)
    scores = {name: _joined([part["scores"][name] for part in parts]) for name in parts[0]["scores"]}
    rest = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "scores"}
    top, wrong = (rest[name].double().numpy() for name in ("top", "wrong"))
    base, mixture, window = rest["log_base"], rest["log_mixture"], rest["window"].numpy()
    return Columns(rest["target"], top, wrong, rest["hidden"], rest["votes"], scores, base, mixture, window)


def all_views(
    looked: Perspectives, ids_BT: Tensor, reset_BT: Tensor | None, real_BT: Tensor, V: int
) -> tuple[Tensor, Tensor]:
    """Logits [P,N,V] at the real tokens of a batch, from an empty state, and the head's input of the base [N,D]."""
    model, (B, T), config = looked.model, ids_BT.shape, looked.config
    ids_BT = ids_BT.to(model.device)
    reset_BT = None if reset_BT is None else reset_BT.to(model.device)
    position_BT = places(
        torch.zeros(B, dtype=torch.int64, device=model.device), T, reset_BT, None
    ).position_BT
    found, read = list[Tensor](), list[Tensor]()
    for index in range(len(looked.names)):
        views = None
        if index > 0 and not config.surrogate:
            one: Views = looked.views(index, B)
            views = replace(one, position_BT=position_BT)
        if index == 0 or views is not None:
            hidden_BTD, _, _ = model.hidden(ids_BT, reset_BT=reset_BT, views=views)
            read.append(hidden_BTD[real_BT.to(model.device)])
            found.append(model.head(read[-1][None])[0].cpu()[:, :V])
    if config.surrogate:
        others_NPV = looked.stand_ins(read[0], found[0], position_BT.cpu()[real_BT].tolist())
        found += list(others_NPV.unbind(1))
    return torch.stack(found), read[0].cpu()


def _row(logits_PNV: Tensor, target_N: Tensor) -> dict[str, Any]:
    p_NPV = probabilities(logits_PNV).transpose(0, 1)
    base_NV, mixture_NV = p_NPV[:, 0], p_NPV.mean(1)
    top_N, guess_N = base_NV.max(1)
    apart_N, more_N = compared(p_NPV)
    scores = {"1 - max p0": 1 - top_N, "entropy": entropy(base_NV), "D": apart_N, "I": more_N}
    for i, j in combinations(range(p_NPV.shape[1]), 2):
        scores[f"D({i},{j})"] = divergence(p_NPV[:, i], p_NPV[:, j])
    scores["1 - max mixture"] = 1 - mixture_NV.amax(1)
    return {
        "target": target_N,
        "top": top_N,
        "wrong": guess_N != target_N,
        "votes": p_NPV.argmax(2),
        "scores": scores,
        "log_base": base_NV.log().float(),
        "log_mixture": mixture_NV.log().float(),
    }


def _joined(parts: list[Tensor]) -> Floats:
    column: Floats = torch.cat(parts).double().numpy()
    return column


# ---------------------------------------------------------------- temperatures and thresholds


def nll(log_NV: Tensor, target_N: Tensor, temperature: float) -> float:
    """Mean nats of the targets under p^(1/T), normalised."""
    return float(-(log_NV.double() / temperature).log_softmax(1).gather(1, target_N[:, None]).mean())


def fitted(log_NV: Tensor, target_N: Tensor) -> float:
    """The temperature of least loss, with its logarithm in [−2, 2]."""
    from scipy.optimize import minimize_scalar

    least = minimize_scalar(
        lambda x: nll(log_NV, target_N, math.exp(x)), bounds=(-2.0, 2.0), method="bounded"
    )
    return math.exp(least.x)


def fit(
    found: Columns,
    config: PerspectivesConfig,
    target_flag: float,
    target_trigger: float | None = None,
    target_probe: float | None = None,
) -> tuple[PerspectivesConfig, dict[str, Any]]:
    """The config fitted to held-out text, and the rates that it gives there.

    The threshold is the (1 − target_flag) quantile of D among triggered tokens; trigger_p gives target_trigger, or
    stays. Temperatures are fitted on the first half, the expected calibration errors are those of the second. With
    target_probe a probe is fitted on the first half, to tell where the base is wrong; its threshold is exceeded by that
    share of the second, and that of D and the rates are the second's. DataError: no token is unsure, or, with a probe,
    all are wrong or none."""
    require(0 < target_flag < 1, "target_flag", target_flag, "in (0, 1)")
    if target_trigger is not None:
        require(0 <= target_trigger < 1, "target_trigger", target_trigger, "in [0, 1)")
        level = float(np.quantile(found.top, target_trigger)) if target_trigger else 0.0
        config = replace(config, trigger_p=min(level, 1.0), trigger_entropy=1e9)
    more = dict[str, Any]()
    if target_probe is not None:
        config, more["auroc"] = probed(found, config, target_probe)
    half = len(found.top) // 2
    read = slice(0 if target_probe is None else half, None)  # a probe asks otherwise where it was fitted
    asked = unsure(found, config)[read]
    apart = found.scores["D"][read]
    if not asked.any():
        raise DataError(
            "calibration: no token was unsure enough to ask; read more tokens or raise target_trigger"
        )
    threshold = min(1.0, max(0.0, float(np.quantile(apart[asked], 1 - target_flag))))
    of = slice(0, half)
    config = replace(
        config, threshold=threshold, temperature=fitted(found.log_mixture[of], found.target[of]),
        base_temperature=fitted(found.log_base[of], found.target[of]),
    )  # fmt: skip
    split = asked & (apart >= threshold)
    alone = np.array([len(set(votes)) == len(votes) for votes in found.votes[read].tolist()])
    rates = {
        "tokens": len(asked),
        "triggered": float(asked.mean()),
        "disagreed": float(split.mean()),
        "flagged": float((split & alone).mean()),
        "ece": {name: one["ece"] for name, one in errors(found, config, slice(half, None)).items()},
    }
    return config, rates | more


def probed(
    found: Columns, config: PerspectivesConfig, share: float
) -> tuple[PerspectivesConfig, dict[str, float]]:
    """The config with a probe fitted on the first half, which asks at a share of the second; and on the second, how
    well the probe and the entropy tell what is wrong."""
    require(0 < share < 1, "target_probe", share, "in (0, 1)")
    half = len(found.wrong) // 2
    normal_D = fitted_probe(found.hidden[:half], found.wrong[:half])
    scores = {"probe": (found.hidden.double() @ normal_D).numpy(), "entropy": found.scores["entropy"]}
    level = float(np.quantile(scores["probe"][half:], 1 - share))
    config = replace(config, probe=tuple(normal_D.tolist()), trigger_probe=level)
    return config, {name: auroc(score[half:], found.wrong[half:]) for name, score in scores.items()}


def unsure(found: Columns, config: PerspectivesConfig) -> Any:
    """True [N] where the perspectives would be asked."""
    top_N, entropy_N = (torch.from_numpy(column) for column in (found.top, found.scores["entropy"]))
    return config.unsure(top_N, entropy_N, found.hidden).numpy()


def errors(found: Columns, config: PerspectivesConfig, of: slice, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Expected calibration errors, with intervals, of each possible confidence."""
    target_N, votes_N = found.target[of], found.votes[of]
    apart_N, wrong_N = found.scores["D"][of], found.wrong[of]
    result = {}
    for name, log_NV, temperature in (
        ("base", found.log_base, 1.0),
        ("base with temperature", found.log_base, config.base_temperature),
        ("mixture", found.log_mixture, 1.0),
        ("mixture with temperature", found.log_mixture, config.temperature),
    ):
        sure_N, guess_N = (log_NV[of].double() / temperature).softmax(1).max(1)
        result[name] = _ece(sure_N.numpy(), (guess_N == target_N).double().numpy(), found.window[of], seed)
    agree_N = (votes_N == votes_N[:, :1]).sum(1).double().numpy()
    document = {
        "document: 1 - a/tau": np.clip(1 - apart_N / max(config.threshold, 1e-9), 0, 1),
        "document: votes/4 - 0.25": agree_N / 4 - 0.25,
    }
    for name, sure in document.items():
        result[name] = _ece(sure, 1 - wrong_N, found.window[of], seed)
    return result


def _ece(sure_N: Floats, right_N: Floats, window_N: Any, seed: int) -> dict[str, Any]:
    zero = np.zeros_like(sure_N)
    whole = summary(Predictions(sure_N, right_N, zero, window_N - window_N.min()), 15, seed)
    return {"ece": whole["ece"], "low": whole["ece_low"], "high": whole["ece_high"]}


# ---------------------------------------------------------------- the suite


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """Rates, losses, calibration and error detection, as `lines` prints them. `adds`: AUROC of the sum of the ranks of
    D and entropy less that of entropy; `beats`: that of D less that of three forwards with Gumbel noise in the routing;
    both with the 95% of resampled windows. `probe`: as `of_probe` has it; None where the first half is all wrong, or
    all right."""
    routed = not options.surrogate
    require(routed or options.from_layer == 0, "from_layer", options.from_layer, "left out with surrogate")
    config = PerspectivesConfig(from_layer=options.from_layer, surrogate=options.surrogate, seed=subject.seed)
    found = collect(subject, config, options.tokens)
    config, rates = fit(found, config, options.target_flag)
    wrong, scores = found.wrong, dict(found.scores)
    if routed:
        noisy = replace(config, kinds=("base", "perturbed", "perturbed", "perturbed"))
        scores["D, Gumbel"] = collect(subject, noisy, options.tokens).scores["D"]
    if options.other:
        other = Subject(open_model(Path(options.other)), subject.split, subject.seq_len, subject.seed)
        theirs = collect(other, replace(config, kinds=config.kinds[:2]), options.tokens)
        pairs = zip(found.log_base.split(512), theirs.log_base.split(512), strict=True)
        apart = [divergence(a.double().exp(), b.double().exp()) for a, b in pairs]
        scores["D, two models"] = _joined(apart)
    from scipy.stats import rankdata

    both = rankdata(scores["D"]) + rankdata(scores["entropy"])
    seeds = (wrong, found.window, subject.seed)
    asked = unsure(found, config)
    low, high = asked & (scores["D"] < config.threshold), asked & (scores["D"] >= config.threshold)
    edges = np.array_split(np.argsort(scores["D"], kind="stable"), BANDS)
    half = len(found.top) // 2
    told = {name: scores[name] for name in ("entropy", "1 - max p0")}
    mixed = 0 < wrong[:half].sum() < half
    return {
        "tokens": len(wrong),
        "surrogate": config.surrogate,
        "perspectives": list(Perspectives(subject.model, config).names),
        "threshold": config.threshold,
        "temperature": config.temperature,
        "base_temperature": config.base_temperature,
        "rates": rates,
        "nats": {"base": nll(found.log_base, found.target, 1.0), "mixture": nll(found.log_mixture, found.target, 1.0)},
        "top1": {
            "base": float(1 - wrong.mean()),
            "mixture": float((found.log_mixture.argmax(1) == found.target).double().mean()),
        },
        "accuracy_below": float(1 - wrong[low].mean()) if low.any() else None,
        "accuracy_above": float(1 - wrong[high].mean()) if high.any() else None,
        "bands": [float(1 - wrong[at].mean()) for at in edges],
        "ece": errors(found, config, slice(half, None), subject.seed),
        "detection": {name: quality(score, wrong) for name, score in scores.items()},
        "adds": paired(both, scores["entropy"], *seeds),
        "against_entropy": paired(scores["D"], scores["entropy"], *seeds),
        "beats": paired(scores["D"], scores["D, Gumbel"], *seeds) if routed else None,
        "probe": of_probe(found.hidden, wrong, told, *seeds[1:]) if mixed else None,
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    rates, nats, top = result["rates"], result["nats"], result["top1"]
    names = ", ".join(result["perspectives"]) + (" (surrogate)" if result["surrogate"] else "")
    asked = f"asked at {rates['triggered']:.1%} of tokens, flagged {rates['flagged']:.2%}"
    losses = f"nats per token {nats['base']:.4f}, of the mixture {nats['mixture']:.4f}"
    said = [
        f"{names}, {result['tokens']:,} tokens",
        f"{asked}; threshold {result['threshold']:.3f} bits",
        f"{losses}; right {top['base']:.1%}, {top['mixture']:.1%}",
        "right by quarters of D: " + ", ".join(f"{band:.1%}" for band in result["bands"]),
    ]
    for name, one in result["ece"].items():
        bounds = "" if one["low"] is None else f" ({one['low']:.4f} to {one['high']:.4f})"
        said.append(f"ECE of {name}: {one['ece']:.4f}{bounds}")
    said.append("what tells errors       AUROC   AUPR   risk–coverage")
    for name, one in result["detection"].items():
        said.append(f"{name:<22} {one['auroc']:>6.4f} {one['aupr']:>6.4f}   {one['risk_coverage']:.4f}")
    for name, what in (
        ("adds", "D with entropy, over entropy"),
        ("beats", "D over Gumbel noise in the routing"),
    ):
        if (one := result[name]) is not None:
            said.append(
                f"AUROC of {what}: {one['difference']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
            )
    if (probe := result["probe"]) is not None:
        areas = (f"{name} {one['auroc']:.4f}" for name, one in probe["detection"].items())
        shares = (
            f"{name} {one['share']:.1%}, wrong {one['wrong'] or 0:.1%}"
            for name, one in probe["asked"].items()
        )
        said.append(f"a probe fitted on the first half, AUROC on the second: {', '.join(areas)}")
        said.append(f"asked at 20%: {'; '.join(shares)}")
    return said
