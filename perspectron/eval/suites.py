"""The suites of `perspectron eval RUN --suite NAME`: those of every model, and those that designs register.

A suite is a module with a frozen dataclass `Options`, `measure(subject, options) -> dict` of plain JSON values, and
`lines(result) -> list[str]` for the terminal. It is imported on first use. What a `Suite` says of it, a
design's says as `READS_TEXT`, `DRAWS` and `WINDOWS`; all three are true of one that does not.
"""

from dataclasses import dataclass
from typing import Any

from perspectron.util import registry
from perspectron.util.config import one_of


@dataclass(frozen=True)
class Suite:
    """module: its full name. reads_text: it measures on the held-out text. draws: it depends on the subject's seed.
    windows: and on the length of its windows."""

    module: str
    reads_text: bool = True
    draws: bool = False
    windows: bool = True

    @property
    def code(self) -> Any:
        """The module, imported: `Options`, `measure` and `lines`."""
        return registry.at(self.module)


GENERAL = {
    "perplexity": Suite("perspectron.eval.perplexity"),
    "position": Suite("perspectron.eval.position", windows=False),
    "calibration": Suite("perspectron.eval.calibration", draws=True),
    "robustness": Suite("perspectron.eval.robustness", draws=True),
    "cost": Suite("perspectron.eval.cost", reads_text=False),
    "recall": Suite("perspectron.eval.recall", reads_text=False, draws=True),
}
CONVERSATION = {"conversation": Suite("perspectron.eval.conversation", reads_text=False, draws=True)}
"""Suites of models that hold conversations; not for a comparison of new models."""
CONVERTED = {"conversion": Suite("perspectron.eval.conversion", draws=True, windows=False)}
"""Suites of runs that `convert` made."""
SUITES = GENERAL | CONVERSATION | CONVERTED
BESIDE_LOSS = tuple(name for name in GENERAL if name != "perplexity")
"""Suites of a comparison."""
OF_TEXT = tuple(name for name in BESIDE_LOSS if GENERAL[name].reads_text)
"""Suites that measure a trained model; the others measure its design."""


def names() -> list[str]:
    """The names of all suites."""
    return [*SUITES, *registry.places("suites")]


def suite_of(name: str) -> Suite:
    """The suite of that name. ConfigError: there is none."""
    if one_of(name, names(), "suite") in SUITES:
        return SUITES[name]
    place, code = registry.places("suites")[name], registry.part("suites", name)
    own = {"reads_text": True, "draws": True, "windows": True}
    return Suite(place, **{field: getattr(code, field.upper(), known) for field, known in own.items()})
