"""The reference: every public name has a docstring that is prose and an example, and every example runs."""

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import perspectron
from perspectron import presets, training
from perspectron.designs.adr import gru
from perspectron.designs.drm import op as drm
from perspectron.designs.lens import op as lens
from perspectron.ops import attention, conv, delta, gla, pdr, sequences

DOCS = Path(__file__).parents[1] / "docs"
OPS = (
    pdr.scan, gla.scan, delta.scan, delta.scan_rwkv7, gru.scan, drm.scan, lens.features, attention.attend,
    conv.convolve, sequences.resets,
)  # fmt: skip


def public() -> dict[str, Any]:
    """What `perspectron`, its presets and its operations promise, by name."""
    found = {name: getattr(perspectron, name) for name in perspectron.__all__}
    found["train"] = training.train
    found |= {f"presets.{name}": getattr(presets, name) for name in presets.__all__}
    found |= {f"{op.__module__}.{op.__name__}": op for op in OPS}
    return {
        name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where the examples run, beside a run."""
    place = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        text = "".join(
            f"KING: QUEEN number {i} went over {i * 7 % 13} hills to the sea.\n" for i in range(500)
        )
        sizes = {"layers": 1, "d_model": 16, "hidden": 16, "rank": 4, "heads": 2, "kv_heads": 1, "window": 16}
        sizes["vocab_size"] = 300
        options = {"seq_len": 16, "batch_size": 2, "eval_tokens": 64, "dtype": "float32", "quiet": True}
        perspectron.train(
            text=text, out="runs/play", steps=3, preset="perspective2-tiny", sizes=sizes, **options
        )
    return place


@pytest.mark.parametrize("name", public())
def test_every_public_name_is_described_and_its_example_runs(name, place, monkeypatch):
    monkeypatch.chdir(place)
    value = public()[name]
    described = inspect.getdoc(value) or ""
    head = re.split(r"\n\n|(?<=[.:])\s", described)[0]
    assert head[:1].isupper() and len(head.split()) > 2, described
    names = {"perspectron": perspectron, "torch": torch}
    tests = doctest.DocTestParser().get_doctest(described, names, name, None, None)
    assert tests.examples, f"{name} has no example"
    failed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    runner.run(tests, out=failed.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(failed)


def test_the_reference_shows_every_public_name():
    shown = {
        module
        for page in (DOCS / "reference").glob("*.md")
        for module in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    assert {value.__module__ for value in public().values()} - shown == set()
    assert len(set(shown)) == len([line for line in _lines() if line.startswith("::: ")])


def _lines() -> Iterator[str]:
    for page in (DOCS / "reference").glob("*.md"):
        yield from page.read_text().splitlines()
