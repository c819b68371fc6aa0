"""docs/add-a-mixer.md, followed to the letter in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\S+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKS = """
import torch
from perspectron import build, presets
from perspectron.designs.ema.mixer import EMA
from perspectron.designs.ema import op as ema

model = build(presets.get("ema", layers=2, d_model=16, longest=50.0))
halflives = 1 / -torch.sigmoid(model.blocks[1].mixer.decay_D).log2()
assert halflives.min().isclose(torch.tensor(1.0)) and halflives.max().isclose(torch.tensor(50.0), rtol=1e-3)
draw = torch.Generator().manual_seed(0)
for T in (0, 1, 63, 64, 65):
    x = torch.randn(2, T, 5, generator=draw).double().requires_grad_()
    gate = torch.rand(2, T, 5, generator=draw).double().requires_grad_()
    state = torch.randn(2, 5, generator=draw).double().requires_grad_()
    fast, plain = ema.scan(x, gate, state), ema.naive(x, gate, state)
    torch.testing.assert_close(fast, plain)
    losses = [y.square().sum() + (2 * end).sum() for y, end in (fast, plain)]
    inputs = (x, gate, state) if T else (state,)
    torch.testing.assert_close(*(torch.autograd.grad(loss, inputs) for loss in losses))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The package, the contract tests, and what the page adds to them."""
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "perspectron", root / "perspectron", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tests" / "designs").mkdir(parents=True)
    needed = ("conftest.py", "extras.py", "long.py", "refusals.py", "designs/test_mixers.py")
    for name in ("pyproject.toml", *(f"tests/{name}" for name in needed)):
        shutil.copy(ROOT / name, root / name)
    for language, name, code in page():
        if language == "python":
            add(root / name, code)
    return root


def page() -> list[tuple[str, str, str]]:
    """(language, file or label, text) of every block."""
    return BLOCK.findall((ROOT / "docs" / "add-a-mixer.md").read_text(encoding="utf-8"))


def add(path: Path, code: str) -> None:
    """Write a new file: the page changes none that is there."""
    assert not path.exists()
    path.parent.mkdir(exist_ok=True)
    path.write_text(code, encoding="utf-8")


def run(clone: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(clone)}
    done = subprocess.run(
        [sys.executable, *command], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_contract_tests_pass(clone):
    (command,) = [code for _, label, code in page() if label == "contract"]
    said = run(clone, *command.split()[1:], "-p", "no:cacheprovider")
    assert "passed" in said or "[100%]" in said


def test_the_op_and_the_start_are_what_the_page_says(clone):
    run(clone, "-c", CHECKS)


def test_it_is_trained_and_listed_by_its_name(clone):
    (clone / "text.txt").write_text("the cat sat on the mat, and the dog sat on the log. " * 200)
    sizes = ["--set", "layers=2", "d_model=32", "hidden=32", "vocab_size=280", "longest=100.0"]
    options = ["--data", "text.txt", "--out", "run", "--steps", "3", "--batch-size", "2", "--seq-len", "32"]
    run(clone, "-m", "perspectron", "train", "--preset", "ema", *sizes, *options)
    assert '"name": "ema"' in (clone / "run" / "config.json").read_text()
    run(clone, "-m", "perspectron.cli.catalogue")
    assert "a moving average of each channel" in run(clone, "-m", "perspectron", "list")


def test_it_is_exported_to_onnx(clone):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run(clone, "-m", "perspectron", "export", "run", "--onnx", "ema.onnx")
    assert (clone / "ema.onnx").stat().st_size > 0


def test_its_design_is_solved_for_a_comparison(clone):
    code = "from perspectron import presets; print(presets.solve('ema', 300_000, vocab_size=512, seq_len=64))"
    assert "EMAConfig" in run(clone, "-c", code)


def test_its_code_is_clean_once_imports_are_sorted(clone):
    pytest.importorskip("ruff")
    files = sorted({name for language, name, _ in page() if language == "python"})
    run(clone, "-m", "ruff", "check", "--fix", *files)
