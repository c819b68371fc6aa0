"""Measures what the gates of PDR know of Python's syntax, layer by layer: is there a lens that changes with depth?
(docs/designs/perspective.md#lenses)

Three questions of the decays γ [T,D] of a layer at the tokens of held-out source: how many bits they share with exact
labels (`labels.py`), how well a linear map of them tells the label, and what freezing them costs.

Shapes: T tokens, D rows of a layer's state, C values of a label, Q bins.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from perspectron.designs.perspective.suites.labels import LABELS, labels, of_tokens
from perspectron.eval.gates import gates_of, recorded
from perspectron.eval.subject import Subject
from perspectron.model.model import LanguageModel
from perspectron.util.config import at_least, require
from perspectron.util.errors import DataError
from perspectron.util.hooks import hooked
from perspectron.util.stats import Floats
from perspectron.util.streams import stream

WINDOWS = False  # whole files are read
BINS = 8  # of a decay, with equally many tokens each
RIDGE = 1e-2
PAIRS, CONTEXT, CHANGED = 64, 32, 16  # windows of so many tokens, of which one is changed

Labels = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Options:
    """tokens: most tokens of held-out source. longest: most tokens read from the beginning of a file."""

    tokens: int = 20_000
    longest: int = 1024

    def __post_init__(self) -> None:
        at_least(64, self, "tokens", "longest")


class Source(NamedTuple):
    """A file: what is read of it, and the labels of the tokens."""

    ids: list[int]
    labels: Labels


def layers_of(model: LanguageModel) -> dict[int, torch.nn.Module]:
    """The modules that give logits of decays for each row, by number of the layer. ConfigError: there are none."""
    found = gates_of(model)
    require(len(found) > 0, "model", model.config.name, "one with PDR layers, such as perspective")
    return found


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """Findings by layer and label: `bits`, the mean and largest mutual information over rows less that with the labels
    of another file; `probe`, the held-out accuracy of a linear map of all rows, beside the commonest value; `frozen`,
    nats that freezing a layer's decays at their means costs, by value of the label. `contrast`: |Δγ| over |Δh| where
    one earlier token is another. `rank`: of bits with depth."""
    model = subject.model
    layers_of(model)
    sources = list(read(subject, options))
    if len(sources) < 4:
        raise DataError(f"{len(sources)} files of Python in the held-out text, need at least 4")
    gates, nats = zip(*(_gates(subject, source.ids) for source in sources), strict=True)
    together = {number: np.concatenate([each[number] for each in gates]) for number in gates[0]}
    true, other = _joined([s.labels for s in sources]), _joined(_exchanged(sources, subject.seed))
    split = sum(len(source.ids) for source in sources[: len(sources) // 2])
    frozen = {number: _frozen(subject, number, sources, together[number]) for number in together}
    plain = np.concatenate(nats)
    layers = []
    for number, gamma_TD in together.items():
        by_label = {}
        for name in LABELS:
            bits_D = information(gamma_TD, true[name]) - information(gamma_TD, other[name])
            right, common = probe(gamma_TD, true[name], split)
            cost = frozen[number] - plain
            by_label[name] = {
                "bits": float(bits_D.mean()),
                "largest_bits": float(bits_D.max()),
                "probe": right,
                "commonest": common,
                "frozen": [
                    float(cost[true[name] == value].mean()) if (true[name] == value).any() else None
                    for value in range(len(LABELS[name]))
                ],
            }
        layers.append({"layer": number, "frozen": float((frozen[number] - plain).mean()), "labels": by_label})
    depth = np.arange(len(layers))
    return {
        "files": len(sources),
        "tokens": len(plain),
        "layers": layers,
        "rank": {
            name: correlation(depth, np.array([layer["labels"][name]["bits"] for layer in layers]))
            for name in LABELS
        },
        "contrast": contrast(model, [s.ids for s in sources], subject.seed),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    of = f"{result['tokens']:,} tokens of {result['files']} files"
    said = [f"bits that gates share with labels, {of} (probe beside the commonest value)"]
    for layer, contrast_ in zip(result["layers"], result["contrast"], strict=True):
        cells = [
            f"{name} {each['bits']:.4f} ({each['probe'] - each['commonest']:+.1%})"
            for name, each in layer["labels"].items()
        ]
        said.append(
            f"layer {layer['layer']}: {', '.join(cells)}; frozen {layer['frozen']:+.3f} nats; |Δγ|/|Δh| {contrast_:.4f}"
        )
    ranks = ", ".join(f"{name} {value:+.1f}" for name, value in result["rank"].items())
    return [*said, f"rank correlation of bits with depth: {ranks}"]


# ---------------------------------------------------------------- source and gates


def read(subject: Subject, options: Options) -> Iterator[Source]:
    """The beginnings of held-out files that are Python, with the labels of their tokens."""
    split, left = subject.text, options.tokens
    silent, last = subject.tokenizer.specials.silent, min(split.tokens, 8 * options.tokens)
    starts = [*split.starts[split.starts < last].tolist(), last]
    for start, stop in itertools.pairwise(starts):
        if left <= 0:
            return
        own = [id for id in split.read(start, stop).tolist() if id not in silent]
        pieces = [subject.tokenizer.token_bytes(id) for id in own]
        try:
            each = labels(b"".join(pieces).decode()) if len(own) >= 32 else None
        except UnicodeDecodeError:
            each = None
        if each is not None:
            kept = min(options.longest, left)
            yield Source(own[:kept], {n: v[:kept] for n, v in of_tokens(pieces, each).items()})
            left -= min(kept, len(own))


@torch.no_grad()
def _gates(subject: Subject, ids: list[int]) -> tuple[dict[int, Floats], Floats]:
    """Decays [T,D] of each layer at the tokens of a file, and the nats of each token."""
    gates, logits_TV = recorded(subject.model, ids, subject.tokenizer.specials)
    return {number: p_TD.sigmoid().numpy() for number, p_TD in gates.items()}, _nats(logits_TV, ids)


def _nats(logits_TV: Tensor, ids: list[int]) -> Floats:
    return F.cross_entropy(logits_TV[:-1].double().cpu(), torch.tensor(ids), reduction="none").numpy()


@torch.no_grad()
def _frozen(subject: Subject, number: int, sources: list[Source], gamma_TD: Floats) -> Floats:
    """The nats of each token with a layer's decays at their means."""
    mean_D = torch.from_numpy(gamma_TD.mean(0).clip(1e-9, 1 - 1e-9)).logit()
    gate, special = layers_of(subject.model)[number], subject.tokenizer.specials
    with gate.register_forward_hook(lambda _, __, p_BTD: mean_D.to(p_BTD).expand_as(p_BTD)):
        nats = [_nats(recorded(subject.model, source.ids, special)[1], source.ids) for source in sources]
    return np.concatenate(nats)


def _joined(each: list[Labels]) -> Labels:
    return {name: np.concatenate([one[name] for one in each]) for name in LABELS}


def _exchanged(sources: list[Source], seed: int) -> list[Labels]:
    """For each file, the labels of another, repeated to its length."""
    order = torch.randperm(len(sources), generator=stream(seed, "files")).tolist()
    other = dict(zip(order, order[1:] + order[:1], strict=True))
    return [
        {name: np.resize(sources[other[i]].labels[name], len(source.ids)) for name in LABELS}
        for i, source in enumerate(sources)
    ]


# ---------------------------------------------------------------- measures


def information(gamma_TD: Floats, label_T: NDArray[np.int64]) -> Floats:
    """Mutual information [D] in bits of each row's decay, in bins of equally many tokens, and a label."""
    T, D = gamma_TD.shape
    rank_TD = gamma_TD.argsort(0, kind="stable").argsort(0, kind="stable")
    bin_TD = rank_TD * BINS // T
    C = int(label_T.max()) + 1
    code_TD = (np.arange(D) * BINS + bin_TD) * C + label_T[:, None]
    joint_DQC = np.bincount(code_TD.ravel(), minlength=D * BINS * C).reshape(D, BINS, C) / T
    apart_DQC = joint_DQC.sum(2, keepdims=True) * joint_DQC.sum(1, keepdims=True)
    ratio = np.divide(joint_DQC, apart_DQC, out=np.ones_like(joint_DQC), where=joint_DQC > 0)
    bits_D: Floats = (joint_DQC * np.log2(ratio)).sum((1, 2))
    return bits_D


def probe(gamma_TD: Floats, label_T: NDArray[np.int64], split: int) -> tuple[float, float]:
    """(accuracy on the tokens from `split` on, of a linear map fitted to those before; that of the commonest value
    there)."""
    logit_TD = np.log(gamma_TD.clip(1e-9)) - np.log((1 - gamma_TD).clip(1e-9))
    mean_D, spread_D = logit_TD[:split].mean(0), logit_TD[:split].std(0) + 1e-9
    x_TD = np.concatenate([(logit_TD - mean_D) / spread_D, np.ones((len(logit_TD), 1))], 1)
    target_TC = np.eye(int(label_T.max()) + 1)[label_T[:split]]
    train = x_TD[:split]
    weight = np.linalg.solve(train.T @ train + RIDGE * split * np.eye(x_TD.shape[1]), train.T @ target_TC)
    right = float(((x_TD[split:] @ weight).argmax(1) == label_T[split:]).mean())
    return right, float((label_T[split:] == np.bincount(label_T[:split]).argmax()).mean())


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Spearman's rank correlation; 0 of fewer than three."""
    if len(a) < 3:
        return 0.0
    from scipy.stats import spearmanr

    return float(np.nan_to_num(spearmanr(a, b).statistic))


@torch.no_grad()
def contrast(model: LanguageModel, texts: list[list[int]], seed: int) -> list[float]:
    """Median, of each layer, of |Δγ| / |Δh| after a token that was replaced: how much further gates differ than what
    the layer reads."""
    draw = stream(seed, "contrast")
    long = [ids for ids in texts if len(ids) >= CONTEXT]
    chosen = [long[i % len(long)] for i in range(PAIRS)] if long else []
    windows = []
    for ids in chosen:
        start = int(torch.randint(len(ids) - CONTEXT + 1, (1,), generator=draw))
        one = ids[start : start + CONTEXT]
        other = list(one)
        other[CHANGED] = int(torch.randint(1, model.config.vocab_size, (1,), generator=draw))
        windows += [one, other]
    seen: dict[int, list[Tensor]] = {}

    def keep(number: int) -> Callable[..., None]:
        return lambda _, inputs, p_BTD: seen.setdefault(number, []).extend([inputs[0], torch.sigmoid(p_BTD)])

    with hooked(gate.register_forward_hook(keep(number)) for number, gate in layers_of(model).items()):
        model.hidden(torch.tensor(windows, device=model.device))
    ratios = []
    for h_BTD, gamma_BTD in (seen[number] for number in sorted(seen)):
        moved, read_ = (
            (x[::2] - x[1::2])[:, CHANGED + 1 :].norm(dim=-1).flatten() for x in (gamma_BTD, h_BTD)
        )
        ratios.append((moved / read_.clamp_min(1e-12)).median().item())
    return ratios
