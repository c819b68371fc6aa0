"""Values that a module reports beside its output: quantities that the trainer adds to the loss or only logs."""

from typing import NamedTuple

from torch import Tensor


class Term(NamedTuple):
    """value: one number. weight: its weight in the loss, 0 for a diagnostic. rest: a further contribution to the loss,
    from adding terms of different weights. blocks: how many blocks reported it."""

    value: Tensor
    weight: float = 0.0
    rest: Tensor | float = 0.0
    blocks: int = 1

    def mean(self) -> Tensor:
        """The value that is logged."""
        return self.value / self.blocks

    def penalty(self) -> Tensor | float:
        """The contribution to the loss."""
        return self.weight * self.value + self.rest if self.weight else self.rest

    def times(self, share: float) -> "Term":
        """That share of the value and of the contribution to the loss."""
        return self._replace(value=self.value * share, rest=self.rest * share)

    def plus(self, other: "Term") -> "Term":
        """The sum of both, each with its own weight."""
        rest = self.rest + other.rest
        if other.weight != self.weight:
            rest = rest + (other.weight - self.weight) * other.value
        return Term(self.value + other.value, self.weight, rest, self.blocks + other.blocks)


def merged(terms: dict[str, Term], more: dict[str, Term]) -> dict[str, Term]:
    """All terms by name; the sum of those that both have."""
    return terms | {name: terms[name].plus(term) if name in terms else term for name, term in more.items()}
