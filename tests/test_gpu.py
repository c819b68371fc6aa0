"""The command for a GPU: rehearsed on this CPU, cut off at random moments, and what it refuses."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.on_gpu import frame, page
from benchmarks.on_gpu.frame import Place, Skip, Unit
from tests.long import length

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
CUTS = int(os.environ.get("GPU_CUTS", length(3, 1)))
"""Times that the rehearsal of SHORT is cut off; where GPU_CUTS sets another number, that of REHEARSED."""
SHORT = ("streaming", "long")
REHEARSED = length(gpu.STAGES, tuple(stage for stage in gpu.STAGES if stage not in ("selftest", "suite")))
"""Both of those left out rehearse tests that run here anyway."""


def run(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, **more)


def place(folder: Path, seconds: float = 60) -> Place:
    return Place(torch.device("cpu"), False, time.time() + seconds, folder)


def kept(folder: Path, stage: str = "some") -> dict[str, Any]:
    return json.loads((folder / f"{stage}.json").read_text())["units"]


def contents(folder: Path) -> dict[str, Any]:
    """What the files of a run have, without its figures: the units of each stage, and how each ended."""
    files = {path.name: frame.read(path) for path in folder.glob("[a-z]*.json")}
    return {
        name: (
            found["done"],
            {unit: min(set(how) - {"seconds", "commit"}) for unit, how in found["units"].items()},
        )
        for name, found in files.items()
    }


# ---------------------------------------------------------------- the whole


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a rehearsal."""
    folder = tmp_path_factory.mktemp("gpu") / "whole"
    start = time.time()
    done = run("--out", folder, "--rehearse", "--stages", *REHEARSED)
    print(f"{time.time() - start:.0f} s")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


def test_the_rehearsal_runs_every_stage_to_its_end(rehearsed: Path) -> None:
    found = contents(rehearsed)
    assert set(found) == {f"{stage}.json" for stage in REHEARSED}
    assert all(done for done, _ in found.values())
    assert all(units for _, units in found.values())
    assert all(how in ("result", "skipped") for _, units in found.values() for how in units.values())


@pytest.mark.nightly
def test_cut_off_at_random_moments_it_ends_with_the_same_files(rehearsed: Path, tmp_path: Path) -> None:
    draw = random.Random(os.environ.get("GPU_SEED", "0"))
    stages = REHEARSED if "GPU_CUTS" in os.environ else SHORT
    arguments = ["--out", str(tmp_path / "cut"), "--rehearse", "--resume", "--stages", *stages]
    for _ in range(CUTS):
        child = subprocess.Popen([*COMMAND, *arguments], start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            child.wait(draw.uniform(1, 12 if stages is SHORT else 40))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)  # only it: what it started must end by itself
            child.wait()
    done = run(*arguments)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    whole = contents(rehearsed)
    assert contents(tmp_path / "cut") == {f"{stage}.json": whole[f"{stage}.json"] for stage in stages}


# ---------------------------------------------------------------- units


def test_a_unit_that_has_a_result_is_not_measured_again(tmp_path: Path) -> None:
    calls = []

    def units() -> list[Unit]:
        return [Unit(name, lambda name=name: {"calls": calls.append(name) or len(calls)}) for name in "ab"]

    assert frame.measure("some", units()[:1], place(tmp_path))
    assert frame.measure("some", units(), place(tmp_path))
    assert calls == ["a", "b"]
    assert {name: found["result"] for name, found in kept(tmp_path).items()} == {
        "a": {"calls": 1},
        "b": {"calls": 2},
    }


def test_a_unit_that_fails_leaves_the_others_and_is_tried_again_last(tmp_path: Path) -> None:
    order = []

    def failing() -> dict[str, Any]:
        order.append("failing")
        if order.count("failing") == 1:
            raise ValueError("no luck")
        return {}

    def other(name: str) -> Unit:
        return Unit(name, lambda: {"at": order.append(name)})

    assert not frame.measure("some", [Unit("failing", failing), other("a")], place(tmp_path))
    assert kept(tmp_path)["failing"]["failed"] == "ValueError: no luck"
    assert frame.measure("some", [Unit("failing", failing), other("a"), other("b")], place(tmp_path))
    assert order == ["failing", "a", "b", "failing"]


def test_a_unit_is_not_begun_without_its_memory_or_time(tmp_path: Path) -> None:
    def never() -> dict[str, Any]:
        raise AssertionError("it was begun")

    def skipped() -> dict[str, Any]:
        raise Skip("fla-core is not installed")

    units = [Unit("large", never, needs=1 << 60), Unit("absent", skipped), Unit("long", never, seconds=100)]
    assert not frame.measure("some", units, place(tmp_path))
    found = kept(tmp_path)
    assert found["large"]["skipped"].startswith(f"needs {1 << 60:,} bytes of memory, ")
    assert found["absent"] == {"skipped": "fla-core is not installed"}
    assert found["long"]["left"].startswith("it takes about 100 s, and ")


def test_a_unit_that_does_not_end_is_stopped_and_the_stage_goes_on(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; import torch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from benchmarks.on_gpu import frame\n"
        "frame.LONGEST = 0.5\n"
        f"folder, since = Path({str(tmp_path)!r}), {time.time()}\n"
        "place = frame.Place(torch.device('cpu'), False, time.time() + 60, folder, since)\n"
        "units = [frame.Unit('endless', lambda: time.sleep(60), seconds=0.1), frame.Unit('next', dict)]\n"
        "print(frame.measure('some', units, place))"
    )
    codes = [subprocess.run([sys.executable, "-c", program]).returncode for _ in range(2)]
    assert codes == [frame.AGAIN, 0]
    assert kept(tmp_path)["endless"]["failed"] == "stopped after 0.5 s"
    assert "result" in kept(tmp_path)["next"]


# ---------------------------------------------------------------- the page


def test_the_page_says_what_the_results_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python benchmarks/on_gpu/page.py"


def test_the_page_of_a_rehearsal_has_a_table_of_every_stage(rehearsed: Path) -> None:
    text = page.tables(rehearsed)
    assert text.count("| --- |") >= len(REHEARSED)


def test_without_results_the_page_says_that_nothing_ran(tmp_path: Path) -> None:
    assert page.tables(tmp_path).strip() == page.NOTHING


@pytest.mark.nightly
def test_a_run_whose_reader_has_gone_goes_on(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, "--out", tmp_path / "new", "--rehearse", "--stages", "long"], stdout=subprocess.PIPE
    )
    child.stdout.close()
    assert child.wait() == 0
    assert contents(tmp_path / "new")["long.json"][0]


# ---------------------------------------------------------------- what it refuses


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal(*arguments): the line with which the command ends, called in this process, which has loaded torch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(gpu.time, "sleep", lambda seconds: None)  # for a run that was killed to end

    def refusal(*arguments: object) -> str:
        with pytest.raises(SystemExit) as stop:
            gpu.main([*map(str, arguments)])
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1
        return said

    return refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line_and_names_the_rehearsal(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "new")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "no GPU" in done.stderr and "--rehearse" in done.stderr
    assert not (tmp_path / "new").exists()


def test_results_of_another_gpu_are_not_joined(tmp_path: Path, refusal: Callable[..., str]) -> None:
    frame.write(tmp_path / "kernels.json", {"conditions": {"device": "NVIDIA H200"}, "units": {}})
    assert "was measured on NVIDIA H200, this is" in refusal("--out", tmp_path, "--rehearse", "--resume")


def test_results_that_are_there_are_not_overwritten(tmp_path: Path, refusal: Callable[..., str]) -> None:
    frame.write(tmp_path / "kernels.json", {"conditions": {}, "units": {}})
    assert "--resume" in refusal("--out", tmp_path, "--rehearse")


def test_a_stage_without_what_it_needs_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'xxhash'")

    monkeypatch.setattr(gpu, "import_module", absent)
    args = gpu._parsed(["--out", str(tmp_path)])
    with gpu._locked(tmp_path) as lock:
        assert gpu._stage(args, "streaming", time.time() + 60, lock) == 1
    assert "streaming is left out: No module named 'xxhash'" in capsys.readouterr().out


def test_two_runs_do_not_share_a_folder(tmp_path: Path, refusal: Callable[..., str]) -> None:
    with gpu._locked(tmp_path):
        assert "is in use by another run" in refusal("--out", tmp_path, "--rehearse")


def test_the_wheels_are_what_the_package_and_the_stages_need_beyond_what_is_there() -> None:
    line = run("--wheels", "3.13").stdout
    assert line.startswith("pip download --only-binary=:all:") and "--python-version 3.13" in line
    names = {gpu._name(word.strip("'\n")) for word in line.split(" wheels ")[1].split(" ")}
    assert {"tyro", "rich", "xxhash", "scipy", "fla-core", "hypothesis"} <= names
    assert not names & gpu.THERE
