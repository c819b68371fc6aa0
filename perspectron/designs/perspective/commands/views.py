"""`perspectron perspective views`."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from perspectron.cli.options import Device, Json, answer, open_model
from perspectron.cli.progress import Work
from perspectron.designs.perspective.suites.views import collect, fit
from perspectron.designs.perspective.views import PerspectivesConfig, save_calibration
from perspectron.eval.subject import Subject
from perspectron.util.config import require


@dataclass(frozen=True)
class PerspectivesOf:
    """Fit, on held-out text, when a disagreement between views of the experts matters.

    Example: perspectron perspective views runs/routed --out calibration.json

    Then: perspectron generate runs/routed "the" --perspectives --calibration calibration.json
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of an artifact, with routed experts."""
    out: Path
    """File to write."""
    tokens: int = 8192
    """Tokens of the held-out text to read."""
    flag: float = 0.1
    """Share of the unsure tokens that should exceed the threshold of disagreement."""
    trigger: float | None = None
    """Share of tokens whose likeliest token has so little probability that the views are asked (default: those below
    0.6, or with an entropy above 3 nats)."""
    probe: float | None = None
    """Share of tokens for which a linear probe of what the head reads, fitted to tell where the model is wrong, asks
    the views, too (default: no probe). With --trigger 0 it alone does."""
    from_layer: int = 0
    """First layer in which the views differ."""
    device: Device = "auto"
    json: Json = False

    def __call__(self) -> int:
        require(self.tokens >= 2, "tokens", self.tokens, "≥ 2")
        require(0 < self.flag < 1, "flag", self.flag, "in (0, 1)")
        require(self.trigger is None or 0 <= self.trigger < 1, "trigger", self.trigger, "in [0, 1)")
        require(self.probe is None or 0 < self.probe < 1, "probe", self.probe, "in (0, 1)")
        opened = open_model(self.run, device=self.device)
        trained = opened.folder.trained
        with tempfile.TemporaryDirectory() as scratch, Work("reading the held-out text"):
            split = opened.shards(Path(scratch)).split("heldout")
            subject = Subject(opened, split, 128 if trained is None else trained.seq_len)
            config = PerspectivesConfig(from_layer=self.from_layer)
            found = collect(subject, config, self.tokens)
            config, rates = fit(found, config, self.flag, self.trigger, self.probe)
        save_calibration(self.out, config, opened.model, opened.tokenizer.fingerprint, rates)
        fields: dict[str, Any] = {"threshold": config.threshold, "trigger_p": config.trigger_p, **rates}
        said = f"threshold {config.threshold:.3f} bits, temperature {config.temperature:.2f}"
        told = (
            f"asked at {rates['triggered']:.1%} of {rates['tokens']:,} tokens, flagged {rates['flagged']:.2%}"
        )
        if self.probe is not None:
            areas = rates["auroc"]
            told += (
                "; no AUROC: the second half of the tokens is all right or all wrong"
                if math.isnan(areas["probe"])
                else f"; AUROC for wrong tokens {areas['probe']:.3f}, of entropy {areas['entropy']:.3f}"
            )
        return answer(self.json, fields, f"{said}; {told}; in {self.out}")
