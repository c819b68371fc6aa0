"""One thread (small matmuls stall on two), and scratch memory that starts as NaN."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
CACHE = tempfile.mkdtemp(prefix="perspectron-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = CACHE  # nothing in the user's own


def pytest_addoption(parser: pytest.Parser) -> None:
    """--vectors: a folder of conformance vectors for tests/test_conformance.py."""
    parser.addoption("--vectors", type=Path, default=Path(__file__).parent / "vectors", metavar="DIR")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that reading what nothing wrote shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
