"""The native library under address and undefined-behaviour sanitizers: its kernels and the step of a packed model, with
states that a stranger forged among them. A write past a buffer ends the process there, where it may go unseen here.

Each test with a few of its cases. It runs nightly, or where it is asked for by its name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import sys
from pathlib import Path
import perspectron.native.library as library
library._places = lambda: [Path(sys.argv[1])]
import itertools, pytest
from perspectron import native
from tests.long import some
assert native.available(), native.reason()

class Few:
    def pytest_collection_modifyitems(self, items):
        functions = itertools.groupby(items, lambda item: item.nodeid.split("[")[0])
        items[:] = [item for name, cases in functions for item in some(list(cases), 3, name)]

sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Few()]))
"""
PROBE = "#include <vector>\nint main(int n, char**) { std::vector<int> v(3); return v.data()[n + 5]; }\n"


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory) -> str:
    """What the process must load first. Skips where no compiler has the sanitizers."""
    if not shutil.which("g++") or not shutil.which("cmake"):
        pytest.skip("no g++ or no CMake")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text(PROBE)
    flags = ["-fsanitize=address,undefined", "-o", str(folder / "probe")]
    if subprocess.run(
        ["g++", str(folder / "probe.cpp"), *flags], capture_output=True, check=False
    ).returncode:
        pytest.skip("g++ has no sanitizers")
    done = subprocess.run([str(folder / "probe")], capture_output=True, text=True, check=False)
    assert "heap-buffer-overflow" in done.stderr  # they see what they must see
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    return " ".join(
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    )


@pytest.mark.nightly
def test_kernels_and_steps_stay_in_their_buffers(preloaded, tmp_path):
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DSANITIZE=ON"],
        ["cmake", "--build", str(tmp_path), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    environment = os.environ | {
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    tests = [f"tests/native/test_{name}.py" for name in ("products", "scan", "training", "tape")]
    tests += [
        "tests/stream/test_recorded.py",
        *map(str, (ROOT / "tests" / "designs").glob("*/test_kernel.py")),
    ]
    tests += ["-k", "not compiled and not trace"]  # those show that the kernels are not called
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "_native.so"), *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
