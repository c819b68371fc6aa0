"""What a machine says of itself, and which program ran."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest
import torch

import perspectron
from perspectron.util import machine


def test_the_commit_that_ran(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "perspectron"
    package.mkdir()
    (package / "__init__.py").write_text("1\n")
    monkeypatch.setattr(machine, "__file__", str(package / "util" / "machine.py"))
    assert machine.commit() == f"version {perspectron.__version__}"
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "--short=12", "HEAD")
    assert machine.commit() == head
    (package / "__init__.py").write_text("2\n")
    assert machine.commit() == f"{head} with changes"


def test_a_checkout_that_holds_the_installed_package_is_not_its_own(tmp_path, monkeypatch):
    """A virtual environment inside somebody's repository."""
    package = tmp_path / "venv" / "perspectron"
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(machine, "__file__", str(package / "util" / "machine.py"))
    assert machine.commit() == f"version {perspectron.__version__}"


def test_the_processor_and_its_cores():
    assert "core" in machine.processor() or machine.torch.cuda.is_available()


ALLOCATIONS = """
import torch
from perspectron.util import machine
def pages(): return int(open("/proc/self/statm").read().split()[1])
def taken_and_freed():
    blocks = [torch.ones(1 << 20) for _ in range(40)]
    del blocks
"""


def risen(program: str) -> list[int]:
    """The bytes that a process of its own, whose allocator it is, prints as pages after 160 MB were taken and freed."""
    printed = subprocess.check_output([sys.executable, "-c", ALLOCATIONS + program], text=True)
    return [int(word) * 4096 for word in printed.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_kept_memory_stays_with_the_process_until_the_end_of_the_block():
    inside, after = risen(
        "before = pages()\n"
        "with machine.memory_kept():\n"
        "    taken_and_freed()\n"
        "    inside = pages()\n"
        "print(inside - before, pages() - before)\n"
    )
    assert inside > 100e6
    assert after < 20e6


def large_pages() -> bool:
    """True if a process may ask for large pages, and get them at once."""
    known = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    version = tuple(map(int, os.uname().release.split(".")[:2])) if sys.platform == "linux" else (0, 0)
    return version >= (6, 1) and known.exists() and "[never]" not in known.read_text()


@pytest.mark.skipif(not large_pages(), reason="Linux from 6.1 on, with transparent large pages")
def test_what_the_heap_holds_goes_into_large_pages():
    (large,) = risen(
        "with machine.memory_kept():\n"
        "    kept = [torch.ones(1 << 20) for _ in range(40)]\n"
        "    machine.in_large_pages()\n"
        "    found = next(line for line in open('/proc/self/smaps_rollup') if line.startswith('AnonHuge'))\n"
        "    assert all(block.sum() == 1 << 20 for block in kept)\n"
        "print(int(found.split()[1]) // 4)\n"
    )
    assert large > 100e6


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_after_the_block_large_memory_goes_back_when_it_is_freed():
    """Nothing is taken in the block: where a small object lies above what was freed there, the hole below it stays the
    heap's, and what is taken later may go into it."""
    (after,) = risen(
        "with machine.memory_kept(): pass\nbefore = pages()\ntaken_and_freed()\nprint(pages() - before)\n"
    )
    assert after < 20e6


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_block_within_another_ends_nothing():
    (inside,) = risen(
        "before = pages()\n"
        "with machine.memory_kept():\n"
        "    with machine.memory_kept(): pass\n"
        "    taken_and_freed()\n"
        "    print(pages() - before)\n"
    )
    assert inside > 100e6


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_limits_memory(version, tmp_path, monkeypatch):
    """Of the groups around a process the narrowest, and files that can be dropped are free."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    own.write_text("0::/a/b\n" if version == 2 else "3:cpu:/x\n7:memory,hugetlb:/a/b\n")
    limit, used = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")

    def group(path, most, now, idle):
        folder = (root if version == 2 else root / "memory") / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"memory.{limit}").write_text(f"{most}\n")
        (folder / f"memory.{used}").write_text(f"{now}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {idle}\n")

    group("a", 1 << 20, 1 << 19, 0)
    group("a/b", "max" if version == 2 else (1 << 63) - 4096, 0, 0)
    group("", 1 << 21, 1 << 21, 1 << 20)
    found = machine._limits(root, own)
    assert (1 << 20, 1 << 19) in found and (1 << 21, 1 << 20) in found
    monkeypatch.setattr(machine, "_limits", lambda: found)
    assert machine.memory() == 1 << 20 and machine.free_memory() == 1 << 19
    monkeypatch.setattr(machine, "_limits", lambda: [(1 << 20, 1 << 21), (1 << 62, 0)])
    assert machine.free_memory() == 0


def test_without_a_container_memory_is_the_machines(tmp_path):
    assert machine._limits(tmp_path, tmp_path / "none") == [(1 << 62, 0)]
    assert 0 < machine.free_memory() <= machine.memory()


def denormals() -> int:
    """How many of many numbers are left after a product that is too small for full precision."""
    small = torch.full((1 << 20,), 3e-36)
    return int(((small * 1e-3).view(torch.int32) != 0).sum())


@pytest.mark.cpu_only
@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot choose")
def test_denormals_are_flushed_in_all_threads_of_an_operation_and_in_no_other(monkeypatch):
    """Also if they had started before, and as it was afterwards."""
    asked, found = Queue(), Queue()

    def beside():
        torch.set_num_threads(2)
        while asked.get():
            found.put(denormals())

    def other() -> int:
        asked.put(True)
        return found.get()

    before = torch.get_num_threads()
    thread = threading.Thread(target=beside)
    thread.start()
    torch.set_num_threads(2)
    try:
        assert denormals() == other() == 1 << 20
        with machine.flushing_denormals():
            assert denormals() == 0
            with machine.flushing_denormals():
                assert denormals() == 0
            assert denormals() == 0 and other() == 1 << 20
        assert denormals() == other() == 1 << 20
    finally:
        torch.set_num_threads(before)
        asked.put(False)
        thread.join()
