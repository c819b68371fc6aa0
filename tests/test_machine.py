"""What a machine says of itself, and which program ran."""

import subprocess
import sys

import pytest

import perspectron
from perspectron import machine


def test_the_commit_that_ran(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "perspectron"
    package.mkdir()
    (package / "__init__.py").write_text("1\n")
    monkeypatch.setattr(perspectron, "__file__", str(package / "__init__.py"))
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
    monkeypatch.setattr(perspectron, "__file__", str(package / "__init__.py"))
    assert machine.commit() == f"version {perspectron.__version__}"


def test_the_processor_and_its_cores():
    assert "core" in machine.processor() or machine.torch.cuda.is_available()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_kept_memory_stays_with_the_process_until_the_end_of_the_block():
    """In a process of its own, whose allocator it is: 160 MB, taken and freed."""
    program = (
        "import torch; from perspectron import machine\n"
        "def pages(): return int(open('/proc/self/statm').read().split()[1])\n"
        "def taken_and_freed():\n"
        "    blocks = [torch.ones(1 << 20) for _ in range(40)]\n"
        "    del blocks\n"
        "before = pages()\n"
        "with machine.memory_kept():\n"
        "    taken_and_freed()\n"
        "    inside = pages()\n"
        "after = pages()\n"
        "taken_and_freed()\n"
        "print(inside - before, after - before, pages() - before)\n"
    )
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)
    inside, after, later = (int(word) * 4096 for word in printed.split())
    assert inside > 100e6
    assert max(after, later) < 20e6
