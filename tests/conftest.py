"""One thread (small matmuls stall on two), scratch memory that starts as NaN, and the device of the run."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # read when CUDA starts; deterministic products need it

import pytest
import torch

from tests import extras, long

torch.set_num_threads(1)
# A shell starts background jobs deaf to interrupts, and their children, those of tests too, would be deaf as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
CACHE = tempfile.mkdtemp(prefix="perspectron-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = CACHE  # nothing in the user's own


SMALLEST = 5e-324

# On CUDA some operations have no deterministic way, and say so; a thread's first product says that it starts CUDA.
WARNED = ("deterministic", "no current CUDA context")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--vectors: a folder of conformance vectors for tests/designs/drm. --device: see tests/places.py."""
    parser.addoption("--vectors", type=Path, default=Path(__file__).parent / "vectors", metavar="DIR")
    parser.addoption(
        "--device", choices=("cpu", "cuda", "away"), default="cpu", help="where the tests' tensors lie"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The device of the run is torch's default device from here on, for the session's fixtures too."""
    # A conftest's hooks are not asked about a folder whose own conftest fails; a plugin's are.
    config.pluginmanager.register(extras, "extras")
    config.addinivalue_line("markers", "cpu_only(reason): about the CPU alone; left out on another device")
    for line in long.MARKERS:
        config.addinivalue_line("markers", line)
    name = config.getoption("--device")
    os.environ["TRITON_INTERPRET"] = (
        "1"  # kernels run on a CPU; Triton asks when it is imported, by whatever test
    )
    if name == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: this machine has no CUDA device that PyTorch can use")
    if name == "cuda":
        for said in WARNED:
            config.addinivalue_line("filterwarnings", f"ignore:.*{said}.*")
    if name != "cpu":
        from tests import places

        # without its number PyTorch would ask a new tensor of its own for it, which lies on the CPU
        mode = places.OfAway(places.AWAY) if name == "away" else places.OfTheRun(torch.device(name, 0))
        mode.__enter__()  # for as long as the process lasts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = items
    if config.getoption("--device") != "cpu":
        kept = [item for item in kept if not item.get_closest_marker("cpu_only")]
    if not long.LONG and not any("::" in argument for argument in config.args):
        kept = long.shortened(kept, long.is_whole(config))
    if long.is_whole(config):
        kept = long.drawn(kept)
    there = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in there])
    items[:] = long.in_order(kept)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The collector of garbage need not look at thousands of tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Of the run; it is torch's default device, so a helper asks `torch.get_default_device()`."""
    return torch.get_default_device()


@pytest.fixture(autouse=True)
def poisoned_memory(device: torch.device) -> Iterator[None]:
    """`torch.empty` gives NaN, so that reading what nothing wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def numbers_as_they_are() -> Iterator[None]:
    """No test leaves numbers that are too small for full precision counted as zero: later ones would meet it."""
    yield
    if SMALLEST * 1 == 0:
        torch.set_flush_denormal(False)
        pytest.fail("the test left torch.set_flush_denormal(True) behind")
