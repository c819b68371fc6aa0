"""The suites of `perspectron eval RUN --suite NAME`.

A suite is a module with a frozen dataclass `Options`, `measure(subject, options) -> dict` of plain JSON values, and
`lines(result) -> list[str]` for the terminal. It is imported on first use.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Suite:
    """module: in `perspectron`. reads_text: it measures on the held-out text. draws: it depends
    on the subject's seed. on_device: it runs the subject's model, or one of its own on the same device."""

    module: str
    reads_text: bool = True
    draws: bool = False
    on_device: bool = True

    @property
    def code(self) -> Any:
        """The module, imported: `Options`, `measure` and `lines`."""
        return import_module(f"perspectron.{self.module}")


SUITES = {
    "perplexity": Suite("eval.perplexity"),
    "position": Suite("eval.position"),
    "calibration": Suite("eval.calibration", draws=True),
    "robustness": Suite("eval.robustness", draws=True),
    "perspectives": Suite("designs.perspective.suites.views", draws=True),
    "depth": Suite("designs.perspective.suites.depth", draws=True),
    "cost": Suite("eval.cost", reads_text=False),
    "recall": Suite("eval.recall", reads_text=False, on_device=False),
}
BESIDE_LOSS = tuple(name for name in SUITES if name not in ("perplexity", "perspectives", "depth"))
"""Suites of a comparison: those that apply to every design."""
OF_TEXT = tuple(name for name in BESIDE_LOSS if SUITES[name].reads_text)
"""Suites that measure a trained model; the others measure its design."""
