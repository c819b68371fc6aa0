"""What a module reports beside its output: quantities that the trainer adds to the loss, or only writes down."""

from typing import NamedTuple

from torch import Tensor


class Term(NamedTuple):
    """value: one number, written with the metrics; weight: its part in the loss, 0 for a diagnostic."""

    value: Tensor
    weight: float = 0.0
