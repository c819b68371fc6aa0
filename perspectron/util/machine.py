"""The machine: devices, processor, free memory, and the commit of the running program."""

import ctypes
import functools
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any, Self

import torch

from perspectron.util.errors import ConfigError
from perspectron.util.version import __version__

OMP_PAUSE_SOFT = 1  # of OpenMP 5.0
LARGE = 1 << 21  # bytes of a large page
MADV_COLLAPSE = 25  # of Linux from 6.1 on
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
RETURNED = {M_MMAP_THRESHOLD: 1 << 20, M_TRIM_THRESHOLD: 1 << 17, M_TOP_PAD: 1 << 17}


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA if available. ConfigError if there is no such device."""
    there = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        name = "cuda" if len(there) > 1 else "cpu"
    if (f"{name}:0" if name == "cuda" else name) not in there:
        raise ConfigError(f"device = {name!r}, must be one that this machine has: auto, {', '.join(there)}")
    return torch.device(name)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    call: Callable[[], object], device: torch.device, clock: Callable[[], float] | None = None
) -> float:
    """Seconds that a call takes, with the work that it leaves to the device; by another clock than `time.perf_counter`
    if one is given."""
    now = clock or time.perf_counter
    synchronise(device)
    start = now()
    call()
    synchronise(device)
    return now() - start


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Let PyTorch use so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processor() -> str:
    """The GPU, or the name of the processor and how many cores this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str:
    """The commit of the checkout that runs, and whether the program differs from it; the version where it is installed
    without one."""
    here = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> list[str]:
        with suppress(OSError):
            command = ["git", "-C", str(here), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        return []

    top, *head = git("rev-parse", "--show-toplevel", "--short=12", "HEAD") or [""]
    if not head or Path(top) != here:
        return f"version {__version__}"
    changed = any(git("status", "--porcelain", "--", "perspectron", "benchmarks"))
    return head[0] + (" with changes" if changed else "")


def free_memory() -> int:
    """Bytes available without swapping, on the machine and in the process's container."""
    free = int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_AVPHYS_PAGES"))
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                free = int(line.split()[1]) * 1024
    return max(0, min(free, *(limit - used for limit, used in _limits())))


def memory() -> int:
    """The most memory that this process can have in bytes: the machine's, or its container's."""
    whole = int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
    return min(whole, *(limit for limit, _ in _limits()))


def _limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, bytes used) of each control group around the process that limits memory; what is used does not count
    files that the kernel can drop. The last is no limit."""
    found = list[tuple[int, int]]()
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, names, path = line.split(":", 2)  # of version 2 without names
            if names and "memory" not in names.split(","):
                continue
            top = root / "memory" if names else root
            limit, used = ("limit_in_bytes", "usage_in_bytes") if names else ("max", "current")
            for part in (path, *map(str, PurePosixPath(path).parents)):
                group = top / part.strip("/")
                with suppress(OSError, ValueError):  # "max" is no number
                    found.append((int((group / f"memory.{limit}").read_text()), 0))
                    stat = dict(each.split() for each in (group / "memory.stat").read_text().splitlines())
                    idle = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                    found[-1] = found[-1][0], int((group / f"memory.{used}").read_text()) - idle
    return [*found, (1 << 62, 0)]


def return_memory() -> None:
    """Have large blocks given back to the system when they are freed. The C library keeps them once it has seen one
    freed, and pieces of what a prompt took stay for good: 80 MB in full size."""
    with _HEAP.lock:
        if _HEAP.keeping == 0:
            _mallopt(RETURNED)


@contextmanager
def memory_kept() -> Iterator[None]:
    """A context in which freed memory stays with the process, until the outermost such context ends. An update of a
    training and a chunk of a prompt free what the next one takes; to give it back to the system and get it again, page
    by page, is some 7% of an update at 2 M parameters and 20% of a prompt at 135 M (docs/lab-notes.md). What is free at
    the end goes back."""
    with _HEAP.lock:
        _HEAP.keeping += 1
        if _HEAP.keeping == 1:
            _mallopt({M_MMAP_THRESHOLD: 1 << 25, M_TRIM_THRESHOLD: (1 << 31) - 1, M_TOP_PAD: 1 << 26})
    try:
        yield
    finally:
        with _HEAP.lock:
            _HEAP.keeping -= 1
            if _HEAP.keeping == 0:
                _mallopt(RETURNED)
                trim()


class _Heap:
    """keeping: how many contexts of `memory_kept` are open."""

    def __init__(self) -> None:
        self.lock, self.keeping = threading.Lock(), 0


_HEAP = _Heap()


def in_large_pages() -> None:
    """Have what the C library's heap holds now in pages of 2 MB. With pages of 4 kB a processor looks up so many
    addresses that an update at 2 M parameters takes 2 to 5% longer (docs/lab-notes.md). For Linux, where a process may
    ask for them; elsewhere nothing changes."""
    with suppress(OSError, AttributeError):
        maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        madvise = ctypes.CDLL(None).madvise
        for line in maps:
            if line.endswith("[heap]"):
                start, end = (int(place, 16) for place in line.split()[0].split("-"))
                start, end = -(-start // LARGE) * LARGE, end // LARGE * LARGE
                if start < end:
                    madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """A context in which numbers too small for full precision count as zero, as in every command: in this thread, and
    in those that share its operations, which take this over when they start and so end before and after. The
    program's other threads, and theirs, are left as they are."""
    before = sys.float_info.min / 2 == 0
    torch.set_flush_denormal(True)
    _end_workers()
    try:
        yield
    finally:
        if not before:
            torch.set_flush_denormal(False)
            _end_workers()


def _end_workers() -> None:
    """End the threads that share this thread's operations; the next operation starts others. Of OpenMP as torch for
    Linux brings it; elsewhere they take over what this thread has, or nothing, in commands, too."""
    if (pause := of_process("omp_pause_resource_all")) is not None:
        pause(OMP_PAUSE_SOFT)


def trim() -> None:
    """Give free memory of the C library back to the system."""
    if (function := of_process("malloc_trim")) is not None:
        function(0)


@functools.cache
def of_process(name: str) -> Any:
    """A function by its name, of the libraries that the process has, such as C's; None where they have none, and
    elsewhere than on Linux."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def _mallopt(options: dict[int, int]) -> None:
    if (mallopt := of_process("mallopt")) is not None:
        for option, value in options.items():
            mallopt(option, value)


class Peak:
    """`with Peak() as peak: …`; then `peak.bytes` is how far resident memory rose above where it stood at the
    beginning (None where there is no /proc).

    The kernel's high-water mark is set back first. getrusage's ru_maxrss cannot be: it holds the peak of
    importing torch and, in a subprocess, that of the process which started it.
    """

    bytes: int | None = None

    def __enter__(self) -> Self:
        self._before: int | None = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._before = resident()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self.bytes = max(0, _status("VmHWM") - self._before)


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    with suppress(OSError):
        return _status("VmRSS")
    return 0


def peak_resident() -> int:
    """The most bytes that this process had in memory, since the last `Peak` began; 0 where the system does not tell."""
    with suppress(OSError):
        return _status("VmHWM")
    return 0


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, which a closing terminal sends; a second one acts at once. One that is
    ignored, as SIGHUP under nohup, stays so, and so does a handler that is not Python's, of a program that embeds it.
    Outside the main thread none are collected."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: its for number, its in before.items() if its not in (signal.SIG_IGN, None)}

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
