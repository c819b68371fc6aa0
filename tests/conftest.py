"""One thread (small matmuls stall on two), and scratch memory that starts as NaN."""

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that reading what nothing wrote shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
