"""A design is a place: without its folder, its kernel and its tests the rest runs as before.

`REST="tests" pytest tests/designs/test_remove_a_design.py` runs all other tests there too, as far as they do not ask
for the design by name.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long import length

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GONE = ["perspectron/designs/drm", "perspectron/native/csrc/drm.inl", "tests/designs/drm"]
REST = ("tests/test_goldens.py", "tests/util/test_registry.py", "tests/ops/test_dispatch.py")
REST += length(("tests/model/test_block.py",), ())
IMPORTS = """
import importlib, pkgutil, perspectron
for module in pkgutil.walk_packages(perspectron.__path__, "perspectron."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert not error.name.startswith("perspectron"), error
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory) -> Path:
    """A copy of the checkout without DRM."""
    root = tmp_path_factory.mktemp("rest")
    skipped = shutil.ignore_patterns("__pycache__", "lib")
    for name in ("perspectron", "tests", "benchmarks", "claims", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=skipped)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md"):
        shutil.copy(ROOT / name, root / name)
    for name in GONE:
        path = root / name
        assert path.exists(), name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return root


def run(root: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_core_names_no_design():
    """In its imports; what it says of one in comments is not its business."""
    named = re.compile(r"^\s*(from|import) perspectron\.designs", re.MULTILINE)
    core = [p for p in (ROOT / "perspectron").rglob("*.py") if "designs" not in p.relative_to(ROOT).parts]
    assert [str(p) for p in core if named.search(p.read_text(encoding="utf-8"))] == []


def test_no_design_needs_another():
    """But for the window attention of the transformer's folder, which Perspective has every fourth layer."""
    imports = re.compile(r"^\s*(?:from|import) perspectron\.designs\.(\w+)", re.MULTILINE)
    found = {
        (folder.name, other)
        for folder in (ROOT / "perspectron/designs").iterdir()
        for path in folder.rglob("*.py")
        for other in imports.findall(path.read_text(encoding="utf-8"))
        if other != folder.name
    }
    assert found == {("perspective", "transformer")}


def test_every_module_imports(rest):
    run(rest, "-c", IMPORTS)


def test_the_others_are_listed_and_trained(rest):
    (rest / "text.txt").write_text("the cat sat on the mat, and the dog sat on the log. " * 200)
    options = ["--data", "text.txt", "--out", "run", "--steps", "2", "--batch-size", "2", "--seq-len", "32"]
    run(rest, "-m", "perspectron", "train", "--preset", "perspective2-tiny", "--set", "layers=2", *options)
    assert run(rest, "-m", "perspectron", "generate", "run", "the cat", "--max-tokens", "8").strip()
    run(rest, "-m", "perspectron.cli.catalogue")
    listed = run(rest, "-m", "perspectron", "list")
    assert "perspective2" in listed and not re.search(r"^\s*drm", listed, re.MULTILINE)


@pytest.mark.nightly
def test_the_tests_of_the_rest_pass(rest):
    files = os.environ["REST"].split() if "REST" in os.environ else REST
    kept = ["-k", "not drm and not DRM", "--ignore", "tests/test_messages.py"]  # its list has those of DRM
    run(rest, "-m", "pytest", "-p", "no:cacheprovider", *kept, *files)
