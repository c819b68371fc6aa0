"""`perspectron perspective gate`."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from perspectron.cli.options import Json, answer, table
from perspectron.cli.progress import Work
from perspectron.designs.perspective.pdr import PDR
from perspectron.designs.perspective.recipe import rows_of
from perspectron.designs.perspective.stats import loads, mean, use
from perspectron.experts.stats import experts_of
from perspectron.model.model import LanguageModel
from perspectron.model.parts import split_inputs
from perspectron.opening import Opened, open_model
from perspectron.ops import pdr
from perspectron.presets import TOLERANCE, design_of
from perspectron.train import checkpoint
from perspectron.train.heldout import heldout
from perspectron.util.config import require
from perspectron.util.errors import ConfigError
from perspectron.util.hooks import hooked

OURS, RIVAL = ("perspective", "perspective2"), "gla"
SCAN, GINI, TERNARY = 1e-5, 0.15, 1.10
TOKENS = 4096
"""Tokens of text that experts and scans are measured on."""


@dataclass(frozen=True)
class Run:
    """A run's own numbers. bits_per_byte: of its best checkpoint, on `measured` tokens of the split `measured_on`, in
    windows of seq_len. text: a digest of it, as encoded."""

    path: Path
    design: str
    parameters: int
    tokens: int
    bits_per_byte: float
    text: str
    measured_on: str
    measured: int
    seq_len: int


@dataclass(frozen=True)
class Condition:
    """One of the four conditions. holds: None where nothing here decides it."""

    name: str
    bound: str
    measured: str
    holds: bool | None


@dataclass(frozen=True)
class Gate:
    """Check the four conditions that Perspective's document sets before a larger model is trained.

    Example: perspectron perspective gate runs/letters runs/routed

    For PDR's loss beside GLA's, give runs of both with as many parameters and tokens.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs: perspective and gla with as many parameters and tokens, and runs with experts."""
    json: Json = False

    def __call__(self) -> int:
        require(len(self.runs) >= 1, "runs", list(self.runs), "one or more folders of runs")
        with Work("measuring"):
            opened = [open_model(path) for path in self.runs]
            conditions = [
                perplexity([read(one) for one in opened]),
                scans(opened),
                experts(opened),
                conversion([one.folder.path for one in opened]),
            ]
        said = verdict(conditions)
        words = {True: "holds", False: "fails", None: "not measured"}
        rows = [(c.name, c.bound, c.measured, words[c.holds]) for c in conditions]
        fields = {"conditions": [asdict(condition) for condition in conditions], "verdict": said}
        return answer(self.json, fields, table("", ("condition", "bound", "measured", ""), rows), said)


def verdict(conditions: Sequence[Condition]) -> str:
    """The plan's rule: proceed where all four hold."""
    if failed := [condition.name for condition in conditions if condition.holds is False]:
        return f"do not proceed: {'; '.join(failed)}"
    if missing := [condition.name for condition in conditions if condition.holds is None]:
        return f"not decided: {'; '.join(missing)}"
    return "proceed: all four conditions hold"


def read(opened: Opened) -> Run:
    """The numbers of a run. ConfigError: it is not a run of a training, or not at its end, or has not been measured."""
    path, config = opened.folder.path, opened.folder.run
    require(config is not None, "runs", str(path), "the folder of a run, not an artifact")
    assert config is not None
    assert opened.checkpoint is not None
    train, bits = config.train, opened.checkpoint.progress.heldout
    if bits is None or checkpoint.found_in(path)[-1].progress.step < train.steps:
        raise ConfigError(f"{path}: no loss at its end; finish it with: perspectron train --resume {path}")
    shards = opened.shards(path)
    on = "heldout" if config.recipe else train.measured_on
    there = shards.split(on).tokens
    return Run(
        path,
        _design(opened),
        sum(parameter.numel() for parameter in opened.model.parameters()),
        train.steps * train.batch_size * train.seq_len * train.accumulate,
        bits,
        shards.digest[:12],
        on,
        min(train.eval_tokens or there, there),
        train.seq_len,
    )


def _design(opened: Opened) -> str:
    try:
        return design_of(opened.folder.model)
    except ConfigError:
        return ""


def perplexity(runs: Sequence[Run]) -> Condition:
    """PDR's loss is no higher than GLA's. ConfigError for runs that cannot be compared: of other sizes, tokens or text,
    or measured on other text; also for runs of two designs with PDR."""
    name, bound = "PDR's loss is no higher than GLA's", "≤ GLA"
    ours, theirs = ([run for run in runs if run.design in designs] for designs in (OURS, (RIVAL,)))
    if not ours or not theirs:
        lacks = "a dense run of perspective" if not ours else "a run of gla"
        return Condition(name, bound, f"needs {lacks}", None)
    first = ours[0]
    for run in ours:
        require(
            run.design == first.design,
            f"design of {run.path}",
            run.design,
            f"{first.design}, as {first.path}",
        )
    for run in (*ours, *theirs):
        apart = abs(run.parameters / first.parameters - 1)
        near = f"within {TOLERANCE:.0%} of {first.parameters:,}, those of {first.path}"
        require(apart <= TOLERANCE, f"parameters of {run.path}", run.parameters, near)
        for field in ("tokens", "text", "measured_on", "measured", "seq_len"):
            its, own = getattr(first, field), getattr(run, field)
            require(own == its, f"{field} of {run.path}", own, f"{its}, as {first.path}")
    own, gla = (statistics.fmean(run.bits_per_byte for run in group) for group in (ours, theirs))
    counts = f"{len(ours)} and {len(theirs)} runs, {first.tokens / 1e6:.3g} M tokens"
    return Condition(name, bound, f"{own:.3f} against {gla:.3f} bits per byte ({counts})", own <= gla)


@torch.no_grad()
def scans(opened: Sequence[Opened]) -> Condition:
    """The scan that runs gives what the plain loop gives, on what the trained layers read."""
    errors = [error for one in opened if (error := scan_error(one.model, _ids(one))) is not None]
    name, bound = "the scan is the recurrence", f"≤ {SCAN:g}"
    if not errors:
        return Condition(name, bound, "needs a run of perspective", None)
    worst = max(errors)
    return Condition(name, bound, f"{worst:.1e} of the largest output, {len(errors)} runs", worst <= SCAN)


@torch.no_grad()
def scan_error(model: LanguageModel, ids: list[int]) -> float | None:
    """The scan that a trained PDR layer runs, beside the plain loop on the same inputs: the largest difference of an
    output over the largest output, over layers of `pdr`; None without one."""
    errors = list[float]()

    def compare(mixer: PDR, arguments: tuple[Any, ...]) -> None:
        x_q, x_k, x_v, x_p = split_inputs(arguments[0], len(mixer.inputs))
        gamma_BTD = torch.sigmoid(mixer.p_proj(mixer.p_down(x_p)).float())
        inputs = [mixer.q_proj(x_q), mixer.k_proj(x_k), mixer.v_proj(x_v), gamma_BTD]
        found, _ = pdr.scan(*inputs, scale=mixer.config.scale)
        expected, _ = pdr.scan(*(x.double() for x in inputs), scale=mixer.config.scale, backend="naive")
        errors.append(((found - expected).abs().max() / expected.abs().max()).item())

    hooks = [
        module.register_forward_pre_hook(compare) for module in model.modules() if isinstance(module, PDR)
    ]
    with hooked(hooks):
        model.hidden(torch.tensor([ids], device=model.device))
    return max(errors, default=None)


def _ids(opened: Opened) -> list[int]:
    split = opened.shards(opened.folder.path).split("train")
    return [*opened.tokenizer.specials.start, *split.read(0, min(split.tokens, TOKENS // 8)).tolist()]


def experts(opened: Sequence[Opened]) -> Condition:
    """Imbalance of the experts' use, on text of the training."""
    name, bound, found = "experts are used evenly in training", f"Gini < {GINI:g}", []
    for one in opened:
        if experts_of(one.model):
            assert one.folder.run is not None
            with loads(one.model) as by_layer:
                shards = one.shards(one.folder.path)
                train = one.folder.run.train
                heldout(one.model, shards.split("train"), one.tokenizer, seq_len=train.seq_len,
                        limit_tokens=TOKENS, spread=True, masked=True)  # fmt: skip
            found.append(mean(use(by_layer), "gini") or 0.0)
    if not found:
        return Condition(name, bound, "needs a run with experts", None)
    return Condition(
        name, bound, f"{max(found):.3f}, mean of the layers, {len(found)} runs", max(found) < GINI
    )


def conversion(paths: Sequence[Path]) -> Condition:
    """Perplexity after the experts became ternary over that before, of staged runs."""
    name, bound, found = "ternary experts cost little", f"perplexity × < {TERNARY:.2f}", []
    for path in paths:
        after = {row["stage"]: row["heldout_perplexity"] for row in rows_of(path)}
        if {"differentiate", "ternary"} <= after.keys():
            found.append(after["ternary"] / after["differentiate"])
    if not found:
        return Condition(name, bound, "needs a run of the staged recipe", None)
    return Condition(name, bound, f"× {max(found):.3f}, {len(found)} runs", max(found) < TERNARY)
