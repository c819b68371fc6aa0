"""What a module reports beside its output: quantities that the trainer adds to the loss, or only writes down."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Term(NamedTuple):
    """value: one number, written with the metrics; weight: its part in the loss, 0 for a diagnostic."""

    value: Tensor
    weight: float = 0.0


def gathered(reports: Iterable[dict[str, Term]]) -> dict[str, Term]:
    """Of all blocks, by name: losses (with a weight) add up, diagnostics are averaged over those that report them."""
    found = dict[str, list[Term]]()
    for report in reports:
        for name, term in report.items():
            found.setdefault(name, []).append(term)
    whole = dict[str, Term]()
    for name, terms in found.items():
        total, weight = sum(term.value for term in terms[1:]) + terms[0].value, terms[0].weight
        whole[name] = Term(total if weight else total / len(terms), weight)
    return whole
