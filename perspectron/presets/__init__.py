"""Named models: designs, which are functions of sizes, and presets, which are designs at certain sizes.

The folders of `perspectron.designs` enter them. A design is found by its own name, too: at its default sizes by `get`,
and so by `train --preset`, and by `compare --designs`, which solves its sizes for a budget (`fit.py`).
"""

from perspectron.presets.fit import TOLERANCE, small, solve, vocabulary
from perspectron.presets.frame import enter_framed, enter_recurrences
from perspectron.presets.rates import DESIGN, PASSES, TOKENS_PER_PARAMETER, rate, warmup
from perspectron.presets.table import (
    DESIGNS,
    PRESETS,
    design_of,
    get,
    names,
    sizes,
    title,
    training,
    variant,
    variant_of,
)
from perspectron.util import registry

__all__ = [
    "DESIGN",
    "DESIGNS",
    "PASSES",
    "PRESETS",
    "TOKENS_PER_PARAMETER",
    "TOLERANCE",
    "design_of",
    "get",
    "names",
    "rate",
    "sizes",
    "small",
    "solve",
    "title",
    "training",
    "variant",
    "variant_of",
    "vocabulary",
    "warmup",
]

enter_recurrences()
for _design in registry.designs().values():
    if _design.presets:
        registry.at(f"{_design.package}.{_design.presets}")
enter_framed()
