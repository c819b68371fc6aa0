"""Other processes: in order, alone in their folders, and none outlives the one that started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perspectron.compare import pool
from perspectron.compare.pool import Job, StoppedBy
from perspectron.util.errors import StorageError
from perspectron.util.files import locked
from tests.refusals import refused
from tests.waiting import PATIENCE, until

SCRIPT = """
import pathlib, signal, sys, time
folder, code, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def save(*_):
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / "began").touch()
time.sleep(seconds)
print("the last line")
sys.exit(code)
"""
PARENT = """
import pathlib, sys
from perspectron.compare import pool
folder = pathlib.Path(sys.argv[1])
pool.work([pool.Job("a", folder, ("pool_script", str(folder), "0", "3600"))], 1, 1)
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    """A module that the jobs run."""
    (tmp_path / "pool_script.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(pool.__file__).parents[2])]))


def job(tmp_path: Path, name: str, code: int = 0, seconds: float = 0.0) -> Job:
    folder = tmp_path / name
    return Job(name, folder, ("pool_script", str(folder), str(code), str(seconds)))


def test_jobs_end_with_their_code_and_last_line(tmp_path):
    ends, most = {}, []
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", code=3), job(tmp_path, "c", seconds=0.6)]
    pool.work(jobs, 2, 1, ended=lambda e: ends.update({e.job.name: e}), look=lambda r: most.append(len(r)))
    assert {name: end.code for name, end in ends.items()} == {"a": 0, "b": 3, "c": 0}
    assert ends["b"].said == "the last line"
    assert ends["c"].seconds >= 0.6
    assert max(most) <= 2


def test_a_signal_lets_them_save_and_starts_no_other(tmp_path):
    jobs = [job(tmp_path, "a", seconds=3600), job(tmp_path, "b", seconds=3600)]

    def look(running: list[Job]) -> None:
        if (tmp_path / "a" / "began").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedBy) as stopped:
        pool.work(jobs, 1, 1, look=look)
    assert stopped.value.number == signal.SIGTERM
    assert (tmp_path / "a" / "saved").exists()
    assert not (tmp_path / "b").exists()
    with locked(tmp_path / "a"):
        pass  # nobody holds it any more


def test_a_signal_in_the_last_pause_is_heard(tmp_path):
    def look(running: list[Job]) -> None:
        if not running:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedBy):
        pool.work([job(tmp_path, "a")], 1, 1, look=look)


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel tells children of their parent's death on Linux"
)
def test_none_outlives_a_parent_that_was_killed(tmp_path):
    folder = tmp_path / "a"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)])
    until((folder / "began").exists)
    with refused(StorageError, folder), locked(folder):
        pass
    parent.kill()
    parent.wait()
    until((folder / "saved").exists)
    with locked(folder, patience=PATIENCE):
        pass


def test_children_run_this_package_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "perspectron").mkdir()
    (tmp_path / "perspectron" / "__init__.py").write_text("raise SystemExit('the other perspectron')")
    (tmp_path / "which.py").write_text("import perspectron; print(perspectron.__file__)")
    monkeypatch.chdir(tmp_path)
    ends = []
    pool.work([Job("a", tmp_path / "a", ("which",))], 1, 1, ended=ends.append)
    assert Path(ends[0].said).parent == Path(pool.__file__).parents[1]
