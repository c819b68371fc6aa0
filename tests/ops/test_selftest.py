"""The operations' test of themselves, its record, and what `auto` makes of it on a GPU."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from perspectron.cli.main import main
from perspectron.ops import case, cases, conv, dispatch, gla, layer_cases, pdr, selftest
from perspectron.ops.triton import record
from perspectron.ops.triton import scan as on_gpu
from perspectron.util.errors import StorageError
from tests.refusals import refused

pytestmark = pytest.mark.cpu_only(
    "the test that runs on a device is `perspectron selftest`, a stage of its own"
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of its own, and small memories."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cases, "_sizes", lambda _: [(1, 9, 5, 3)])
    monkeypatch.setattr(selftest, "REPEATS", 1)
    clear = record.passed.cache_clear
    clear()
    yield tmp_path / "perspectron"
    clear()


def test_every_operation_holds_and_the_record_says_so(folder, capsys):
    assert main(["selftest", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] and all(row["holds"] and row["ms"] > 0 for row in found["rows"])
    pairs = {(row["op"], row["backend"]) for row in found["rows"]}
    assert {
        ("pdr", "torch"),
        ("gla", "torch"),
        ("ssd", "auto"),
        ("windowed", "auto"),
        ("gru", "torch"),
    } < pairs
    ops = {op for op, _ in pairs}
    assert ops > {"delta", "gated delta", "rwkv7", "attention", "lens", "drm", "experts", "packed"}
    assert ops > {"conv", "eligibility", "cached", "rope", "entropy", "norm", "gated", "decayed", "shifted"}
    assert {row["op"] for row in found["rows"] if row["shape"].endswith("bf16")} > {
        "attention",
        "experts",
        "gru",
    }
    (kept,) = folder.iterdir()
    assert str(kept) == found["record"]
    assert json.loads(kept.read_text())["conditions"] == record.conditions(CPU)


def test_a_wrong_operation_is_told_and_kept(folder, monkeypatch, capsys):
    tree = pdr.TREE.run
    wrong = SimpleNamespace(run=lambda *x: tuple(1.0001 * y for y in tree(*x)))
    monkeypatch.setattr(pdr, "TREE", wrong)
    assert main(["selftest", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    told = [line for line in captured.err.splitlines() if "over its bound" in line]
    assert told == ["perspectron: pdr by torch (B 1, T 9, D 5, R 3) is over its bound"]
    assert "1.0e-04 > 2e-06" in captured.out and "…" not in captured.out
    (kept,) = folder.iterdir()
    assert json.loads(kept.read_text())["holds"] is False


def test_numbers_that_are_not_finite_do_not_hold(monkeypatch):
    monkeypatch.setattr(cases, "_others", lambda *_: [])

    def wrong(q, k, v, gate, state):
        nan = (q.sum() + k.sum() + gate.sum()) * torch.nan
        return v * nan, state * nan

    monkeypatch.setattr(gla, "TREE", SimpleNamespace(run=wrong))
    rows = [row for row in selftest.run(CPU) if row.op == "gla" and row.backend == "torch"]
    assert rows and not any(row.holds for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["convolve", "naive"])
def test_an_operation_that_raises_fails_by_name_and_the_others_go_on(broken, monkeypatch, capsys):
    def raises(*_, **__):
        raise RuntimeError("no\nkernel image")

    if broken == "convolve":
        monkeypatch.setattr(conv, "convolve", raises)
    else:
        monkeypatch.setattr(layer_cases.experts, "naive", raises)
    op = "conv" if broken == "convolve" else "experts"
    assert main(["selftest", "--device", "cpu", "--json"]) == 1
    captured = capsys.readouterr()
    rows = json.loads(captured.out)["rows"]
    failed = [row for row in rows if row["failed"] is not None]
    assert len(failed) > 2 and {row["op"].split(",")[0] for row in failed} == {op}
    assert all(row["forward"] is row["ms"] is None and not row["holds"] for row in failed)
    assert all(row["holds"] for row in rows if row not in failed) and len(rows) > 50
    assert captured.err.count("RuntimeError: no kernel image") == len(failed)
    assert main(["selftest", "--device", "cpu"]) == 1


@pytest.mark.parametrize("found", [torch.ones(2, 3), torch.tensor([1.0, torch.nan])])
def test_an_output_of_another_shape_or_not_finite_is_infinitely_wrong(found):
    assert selftest._error(found, torch.ones(2, dtype=torch.float64)) == float("inf")


def test_the_inputs_have_hard_gates():
    gates = case.gates(2, 50, 4)
    for hard in (0.0, 1.0, 1e-30):
        assert 0.05 < (gates == torch.tensor(hard)).double().mean() < 0.15


# ---------------------------------------------------------------- the record


def test_only_a_pass_of_these_conditions_with_triton_counts(monkeypatch):
    now = record.conditions(CPU)

    def passed() -> bool:
        record.passed.cache_clear()
        return record.passed(CPU)

    assert not passed()
    torch_row, triton_row = ({"backend": backend, "holds": True} for backend in ("torch", "triton"))
    failed = {"backend": "torch", "holds": False}
    for rows, holds in (([torch_row], True), ([triton_row], False), ([], True), ([triton_row, failed], True)):
        record.write(now, rows, holds)
        assert not passed()
    file = record.write(now, [torch_row, triton_row], True)
    assert passed()
    with monkeypatch.context() as patch:
        patch.setattr(record, "version", lambda: "another")
        assert not passed()
    assert passed()
    for text in ("", "[]", "{}", '{"rows": [1]}', file.read_text().replace('"holds": true', '"holds": 1')):
        file.write_text(text)
        assert not passed()


def test_without_a_folder_for_a_cache_it_says_so(monkeypatch):
    monkeypatch.setattr(record, "cache_folder", lambda: None)
    with refused(StorageError, "XDG_CACHE_HOME"):
        record.path({})
    assert not record.passed(CPU)


# ---------------------------------------------------------------- auto


def test_auto_takes_triton_on_cuda_once_a_selftest_has_passed(monkeypatch, caplog):
    dispatch._say.cache_clear()
    caplog.set_level(logging.INFO, "perspectron")
    there = SimpleNamespace(device=CUDA)
    monkeypatch.setattr(on_gpu, "obstacle", lambda *_: None)
    monkeypatch.setattr(record, "passed", lambda device: False)
    assert not on_gpu.wanted("auto", 16, there) and not on_gpu.wanted("auto", 16, there)
    assert [line.getMessage().partition("; ")[2] for line in caplog.records] == [
        "to have Triton's kernels, test them once on this machine: perspectron selftest --device cuda"
    ]
    monkeypatch.setattr(record, "passed", lambda device: device == CUDA)
    assert on_gpu.wanted("auto", 16, there) and not on_gpu.wanted("torch", 16, there)
    assert caplog.records[-1].getMessage() == "auto runs Triton's kernels for PDR, GLA and SSD on cuda"
    monkeypatch.setattr(on_gpu, "obstacle", lambda *_: "too wide")
    assert not on_gpu.wanted("auto", 300, there)


def test_on_a_cpu_auto_asks_nothing(monkeypatch):
    for name in ("passed", "version", "conditions"):
        monkeypatch.setattr(record, name, lambda *_: pytest.fail("asked"))
    tensor = torch.ones(1, 2, 3)
    pdr.scan(tensor, tensor, tensor, tensor)
    gla.scan(*4 * [tensor[None]])
