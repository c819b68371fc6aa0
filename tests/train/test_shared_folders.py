"""A run's folder that others touch: locks, leftovers, changed configs, damaged metrics, folders that cannot be written.

Each refusal is one line that says what to do, and changes nothing.
"""

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from perspectron.cli.main import main
from perspectron.train import checkpoint, loop, metrics
from perspectron.util import files
from perspectron.util.errors import StorageError
from perspectron.util.files import atomic, locked, sweep, write_json
from tests.refusals import in_a_line, refused, warned
from tests.waiting import PATIENCE, until

HOLDER = """
import fcntl, os, sys, time
os.makedirs(sys.argv[1], exist_ok=True)
fcntl.flock(os.open(os.path.join(*sys.argv[1:]), os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX | fcntl.LOCK_NB)
print("has it", flush=True)
time.sleep(36000)
"""


@contextlib.contextmanager
def held(folder: Path, name: str = checkpoint.RUN_LOCK):
    """Another process has the folder meanwhile; it is killed at the end."""
    command = [sys.executable, "-c", HOLDER, str(folder), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "has it\n"
            yield process
        finally:
            process.kill()


TRAIN = [
    *[
        "train",
        "--preset",
        "perspective-tiny",
        "--steps",
        "6",
        "--batch-size",
        "2",
        "--seq-len",
        "32",
        "--eval-every",
        "3",
        "--save-every",
        "1",
    ],
    *[
        "--keep",
        "9",
        "--eval-tokens",
        "64",
        "--dtype",
        "float32",
        "--set",
        "vocab_size=300",
        "d_model=32",
        "layers=2",
        "hidden=32",
    ],
    *["rank=8", "heads=2", "kv_heads=1", "window=16"],
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat number {i}. " * 100)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text) -> Path:
    """A run that has its last checkpoint still to come; harm a copy of it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main([*TRAIN, "--data", str(text), "--out", str(run)]) == 0
    for path in (run / "checkpoints" / "step-00000006",):
        shutil.rmtree(path)
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def refusal(capsys, *arguments: str) -> str:
    """What a command says that must end with exit code 2 and one line."""
    assert main(list(arguments)) == 2
    return capsys.readouterr().err.splitlines()[-1]


def go_on(run: Path, *more: str) -> int:
    return main(["train", "--resume", str(run), *more])


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_lock_is_one_processs_and_ends_with_it(tmp_path):
    with held(tmp_path) as process:
        with refused(StorageError, tmp_path), locked(tmp_path, checkpoint.RUN_LOCK):
            pass
        process.kill()  # not asked to give it back
        process.wait()
        with locked(tmp_path, checkpoint.RUN_LOCK), locked(tmp_path, checkpoint.RUN_LOCK):
            pass
        with held(tmp_path):
            pass


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with refused(StorageError, tmp_path / "file"), locked(tmp_path / "file"):
        pass
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with refused(StorageError, tmp_path), locked(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_left_alone(run, capsys):
    before = snapshot(run)
    with held(run):
        in_a_line(refusal(capsys, "train", "--resume", str(run)), run)
    assert snapshot(run) == before | {checkpoint.RUN_LOCK: b""}
    assert go_on(run) == 0


@pytest.mark.nightly
def test_fifty_starts_on_one_folder_hurt_nobody(tmp_path, text):
    """The first trains to its end; the others are told that somebody is there, or that there is a run."""
    words = f"train --preset perspective-tiny --data {text} --out run --steps 12 --batch-size 2 --seq-len 32"
    words += " --eval-every 4 --save-every 4 --eval-tokens 64 --dtype float32 --set vocab_size=300 d_model=32 layers=2"
    words += " hidden=32 rank=8 heads=2 kv_heads=1 window=16"
    script = (
        "import os, sys\n"
        "from perspectron.cli.main import main\n"
        "import perspectron.cli.train\n"
        "children = []\n"
        "for i in range(50):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os._exit(main(sys.argv[1:]))\n"
        "    children.append(child)\n"
        "print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *words.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    codes = json.loads(done.stdout.splitlines()[-1])
    assert sorted(set(codes)) == [0, 2], done.stderr[-2000:]
    assert codes.count(0) == 1
    assert "Traceback" not in done.stderr
    run = tmp_path / "run"
    checkpoint.load_run(run)
    assert [line["step"] for line in metrics.read_metrics(run) if "loss" in line] == list(range(1, 13))
    assert list(run.rglob(".*.tmp")) == []


def test_what_a_living_process_writes_is_not_swept(tmp_path):
    other = f".{os.getppid()}-0123456789abcdef.tmp"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [other, f".{dead.pid}-0123456789abcdef.tmp", ".somebody.else.tmp", ".x.tmp"]
    for name in names:
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other, ".somebody.else.tmp", ".x.tmp"])


def test_a_changed_config_is_told_and_taken_when_asked(run, capsys):
    values = json.loads((run / "config.json").read_text())
    values["train"]["optim"]["lr"] *= 2
    write_json(run / "config.json", values)
    before = snapshot(run)
    said = refusal(capsys, "train", "--resume", str(run))
    in_a_line(said, "optim.lr", "--allow-changed")
    assert snapshot(run) == before
    assert go_on(run, "--allow-changed") == 0
    assert go_on(run) == 0  # its last checkpoint is of the changed one now


FIXED = [("data", "other.txt"), ("heldout", 0.4), ("tokenizer", "bytes"), ("seed", 5), ("seq_len", 8)]


@pytest.mark.parametrize(("name", "value"), FIXED)
def test_a_change_of_an_encoded_text_is_not_taken(run, capsys, name, value):
    values = json.loads((run / "config.json").read_text())
    values["train"][name] = value
    write_json(run / "config.json", values)
    before = snapshot(run)
    said = refusal(capsys, "train", "--resume", str(run))
    in_a_line(said, name, value)
    assert "--allow-changed" not in said
    in_a_line(refusal(capsys, "train", "--resume", str(run), "--allow-changed"), name, value)
    assert snapshot(run) == before


def test_a_checkpoint_of_another_run_is_told(run, capsys):
    values = json.loads((run / "config.json").read_text())
    assert len(values["id"]) == 32
    assert {c.config.id for c in checkpoint.found_in(run)} == {values["id"]}
    write_json(run / "config.json", values | {"id": "0" * 32})
    in_a_line(refusal(capsys, "train", "--resume", str(run)), run)


def test_damaged_metrics_are_left_out_and_the_run_goes_on(run):
    path = run / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] < 6]
    harmful = ["{", "[]", "null", "3", '{"step": 1}', '{"step": 1e99, "loss": 1}', '{"step": -1, "loss": 1}',
               '{"step": NaN, "loss": 1}', '{"step": 1, "loss": "x"}', "[" * 50_000, "\0" * 100, "é\udcff",
               *(f'{{"step": 1, "heldout_bits_per_byte": 1.0, "heldout_perplexity": {wrong}}}'
                 for wrong in ('"x"', "0", "-1.5", "true", "null", "[]", "1" + "0" * 400))]  # fmt: skip
    path.write_bytes("\n".join([*harmful, *lines, "\udc80"]).encode(errors="surrogateescape") + b"\n")
    with warned(len(harmful) + 1, 1):
        kept = metrics.read_metrics(run)
    assert kept == [json.loads(line) for line in lines]
    with warned(path):
        assert go_on(run) == 0
    assert path.read_text().splitlines()[: len(lines)] == lines


def test_a_reported_number_that_is_not_finite_damages_no_line(run, recwarn):
    with metrics.noting(run, lambda line: None, []) as note:
        update = {"tokens": 9, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0, "seconds": 1.0}
        note({"step": 7, "loss": 1.0, **update, "aux": {"far": math.inf, "near": 0.5}})
    metrics.forget(run, 7)
    assert metrics.read_metrics(run)[-1]["aux"] == {"far": None, "near": 0.5}
    assert not recwarn.list


def test_a_line_cut_short_by_a_crash_is_no_news(run, recwarn):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    metrics.read_metrics(run)
    assert not recwarn.list


def test_a_closed_terminal_saves(tmp_path):
    """SIGHUP ends a training as SIGTERM does; under nohup it does nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests themselves may run under nohup
    try:
        with loop.signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
            until(lambda: caught == [signal.SIGHUP])
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with loop.signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
        assert caught == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_is_not_pythons_stays(monkeypatch):
    there, found = signal.getsignal(signal.SIGHUP), signal.getsignal
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGHUP else found(number)
    )
    with loop.signals():
        assert found(signal.SIGHUP) is there and found(signal.SIGTERM) is not found(signal.SIGHUP)
    assert found(signal.SIGHUP) is there


@pytest.fixture
def in_memory(tmp_path):
    """A folder on a disk in memory, if there is one: no wait for a disk."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if place.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_sixteen_threads_save_one_path(in_memory):
    """No error, no leftover, and each time what is read is one of them whole."""
    path, errors, seen = in_memory / "state.json", [], set()

    def save(number: int) -> None:
        try:
            for turn in range(1000):
                write_json(path, [number] * (100 + turn % 60))
                seen.update(json.loads(path.read_text()))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert seen == set(range(16))
    assert [file.name for file in in_memory.iterdir()] == ["state.json"]


@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "device"])
def test_what_is_no_file_is_not_written_over(tmp_path, kind):
    target = tmp_path / "target"
    path = Path("/dev/full") if kind == "device" else tmp_path / "path"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind != "device":
        path.symlink_to(target)
        if kind == "link":
            target.write_text("mine")
    before = sorted(tmp_path.iterdir())
    with refused(StorageError, path):
        write_json(path, 1)
    assert sorted(tmp_path.iterdir()) == before
    assert not target.exists() or target.read_text() == "mine"


def test_cleaning_up_does_not_hide_the_error(tmp_path, monkeypatch):
    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(ValueError, match="the real one"), atomic(tmp_path / "a") as temporary:  # noqa: PT012
        temporary.write_text("x")
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: broken(temporary))
        raise ValueError("the real one")


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)):
        pytest.skip("this user cannot mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("room", [0, 8_000, 20_000, 100_000, 400_000, 700_000, 1_200_000])
def test_a_disk_that_is_full_in_any_phase_ends_the_command_and_no_more(small_disk, text, room, capsys):
    """Encoding, config, metrics, checkpoints: one line, exit code 2, and what is there goes on once there is room."""
    ballast, run = small_disk / "ballast", small_disk / "run"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - room))
    arguments = [*TRAIN, "--data", str(text), "--out", str(run)]
    assert os.strerror(errno.ENOSPC) in refusal(capsys, *arguments)
    assert list(run.rglob(".*.tmp")) == []
    ballast.unlink()
    assert main(["train", "--resume", str(run)] if (run / "config.json").is_file() else arguments) == 0
    assert [line["step"] for line in metrics.read_metrics(run) if "loss" in line] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_cannot_be_written_is_read(small_disk, run, capsys):
    """A run on it is read as any other; what would write says so."""
    shutil.copytree(run, small_disk / "run")
    assert mount("-o", "remount,ro", str(small_disk))
    for place in (["--resume", str(small_disk / "run")], [*TRAIN[1:], "--out", str(small_disk / "new")]):
        assert os.strerror(errno.EROFS) in refusal(capsys, "train", *place)
    assert main(["inspect", str(small_disk / "run")]) == 0
    assert main(["generate", str(small_disk / "run"), "the", "--max-tokens", "3"]) == 0


def test_refusing_a_folder_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with refused(OSError):
            files.open_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_lock_file_that_was_deleted_locks_nothing(tmp_path):
    """Who waited with the old file open must not take it for the lock."""
    with held(tmp_path):
        (tmp_path / checkpoint.RUN_LOCK).unlink()
        with locked(tmp_path, checkpoint.RUN_LOCK), held_by_another_fails(tmp_path):
            pass


@contextlib.contextmanager
def held_by_another_fails(folder: Path):
    command = [sys.executable, "-c", HOLDER, str(folder), checkpoint.RUN_LOCK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert "BlockingIOError" in done.stderr
    yield


def test_what_this_process_left_when_it_had_the_number_before_is_swept(tmp_path):
    """In a container a program has the same process number each time."""
    left = tmp_path / f".{os.getpid()}-0123456789abcdef.tmp"
    left.touch()
    with atomic(tmp_path / "a") as temporary:
        temporary.write_text("x")
        sweep(tmp_path)
        assert temporary.exists()
    assert not left.exists()


def test_threads_that_write_one_folder(tmp_path):
    errors = []

    def save(number: int) -> None:
        try:
            for _ in range(40):
                with atomic(tmp_path / "folder") as temporary:
                    temporary.mkdir()
                    (temporary / "number").write_text(str(number))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (tmp_path / "folder" / "number").read_text() in "0123"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_id_of_a_run_stays(run, text):
    """Also for who makes the trainer from a config without one."""
    values = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", {key: value for key, value in values.items() if key != "id"})
    assert go_on(run) == 0
    assert json.loads((run / "config.json").read_text())["id"] == values["id"]
