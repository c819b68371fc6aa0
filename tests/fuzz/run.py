"""Reading mutants in a child process with limits: what came of each, and which of them must not be.

The parent only watches: a child that dies by a signal, or that stands still, is a failure of the mutant it was at, and
another child goes on after it.
"""

import contextlib
import faulthandler
import io
import logging
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from perspectron.cli.main import main
from perspectron.util.errors import PerspectronError
from tests.fuzz.formats import IMPORTED, NAMES, Format, Samples
from tests.fuzz.imported import imported
from tests.fuzz.mutate import mutated

HANG = 2.0  # seconds of a processor for one mutant, and SLOWER times as many as the good file takes
SLOWER = 20
STANDSTILL = 1800.0  # seconds by the clock
ROOM = 64 << 20  # bytes that reading may take beside the file
EVERY = 250  # mutants of which one is also given to the program


class Hang(BaseException):
    pass


@dataclass
class Outcome:
    """Counts by what happened, and the failures in words."""

    name: str
    mutants: int = 0
    seconds: float = 0.0
    most_memory: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def row(self) -> str:
        c = self.counts
        names = ("refused", "unchanged", "other", "signals", "tracebacks", "hangs", "memory", "believed")
        return (
            f"| {self.name} | {self.mutants:,} | "
            + " | ".join(f"{c[n]:,}" for n in names)
            + (f" | {self.most_memory / 2**20:.1f} | {self.seconds:,.0f} |")
        )


COLUMNS = (
    *(
        "format",
        "mutants",
        "refused",
        "same contents",
        "other contents, resealed",
        "signals",
        "tracebacks",
        "hangs",
    ),
    *("over memory", "believed", "most memory, MiB", "seconds"),
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def whole(name: str, mutants: int, seed: int) -> Outcome:
    """Make a format's sample, in memory where the machine has a folder for that, and read its mutants."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        if name.startswith(IMPORTED):
            made = imported(name, Path(place) / "base")
        else:
            made = Samples(Path(place) / "base").make(NAMES.get(name, name))
        return fuzz(made, mutants, seed, Path(place))


def fuzz(made: Format, mutants: int, seed: int, scratch: Path) -> Outcome:
    """Read so many mutants of a format. Mutant i of a seed is always the same."""
    outcome, done = Outcome(made.name), 0
    shared = mmap.mmap(-1, 64)  # index of the mutant that is read now
    start = time.monotonic()
    while done < mutants and len(outcome.failures) < 50:
        results = tempfile.TemporaryFile()  # noqa: SIM115
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _child(made, range(done, mutants), seed, scratch, shared, results)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        status, stood = _watch(child, shared)
        done = struct.unpack("q", shared[:8])[0] + 1
        for line in _lines(results):
            kind, _, text = line.partition(" ")
            if kind == "memory-most":
                outcome.most_memory = max(outcome.most_memory, int(text))
                continue
            outcome.counts[kind] += 1
            outcome.mutants += 1
            if text:
                outcome.failures.append(f"{kind}: {text}")
        if stood or os.WIFSIGNALED(status):
            kind = "hangs" if stood else "signals"
            outcome.counts[kind] += 1
            outcome.mutants += 1
            why = "stands still" if stood else signal.Signals(os.WTERMSIG(status)).name
            outcome.failures.append(f"{kind}: mutant {done - 1}: {why}")
        elif os.WEXITSTATUS(status):
            raise RuntimeError(f"{made.name}: the child ended with {os.WEXITSTATUS(status)}")
    outcome.seconds = time.monotonic() - start
    return outcome


def _watch(child: int, shared: mmap.mmap) -> tuple[int, bool]:
    """(wait status, whether it was killed because it stood still)."""
    last, since = -1, time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, False
        now = struct.unpack("q", shared[:8])[0]
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > STANDSTILL:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return 0, True
        time.sleep(0.05)


def _lines(results: Any) -> list[str]:
    with results:
        results.seek(0)
        return results.read().decode(errors="replace").splitlines()


def _child(made: Format, indices: range, seed: int, scratch: Path, shared: mmap.mmap, results: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.disable()  # a crash is told by the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _hung)
    work = scratch / f"{made.name}-{os.getpid()}"
    shutil.copytree(made.folder, work)
    path = work / made.path.relative_to(made.folder) if made.path != made.folder else work
    good = {name: (work / name).read_bytes() for name in made.files}
    wanted = made.read(path)
    began = time.process_time()
    for _ in range(3):
        made.read(path)
    hang = HANG + SLOWER * (time.process_time() - began) / 3
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + made.bytes + 4 * ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    most = 0
    sys.stderr.flush()
    for index in indices:
        shared[:8] = struct.pack("q", index)
        draw = random.Random(f"{seed} {made.name} {index}")
        name = draw.choice(list(good))
        (work / name).write_bytes(mutated(good[name], draw, made.files[name]))
        sealed = draw.randrange(3) > 0
        if sealed:
            with contextlib.suppress(Exception):
                made.reseal(path)
        size = made.bytes + (work / name).stat().st_size - len(good[name])
        Path("/proc/self/clear_refs").write_text("5")
        standing = _resident()
        kind, text = _one(made, path, wanted, sealed, hang)
        grown = _peak() - standing
        most = max(most, grown)
        if not text and grown > size + ROOM:
            kind, text = "memory", f"took {grown / 2**20:.0f} MiB"
        if not text and index % EVERY == 0 and made.command is not None:
            kind, text = _program(made.command(path), kind)
        where = f" mutant {index} ({name}): {' '.join(text.split())[-400:]}" if text else ""
        results.write(f"{kind}{where}\n".encode(errors="replace"))
        results.flush()  # the next one may end this process
        for other, data in good.items():
            (work / other).write_bytes(data)
    results.write(f"memory-most {most}\n".encode())
    results.flush()
    shutil.rmtree(work)


def _one(made: Format, path: Path, wanted: str, sealed: bool, hang: float) -> tuple[str, str]:
    """(what happened, in words where it must not)."""
    signal.setitimer(signal.ITIMER_PROF, hang)
    try:
        found = made.read(path)
    except PerspectronError as error:
        lines = str(error).splitlines()
        ours = len(lines) == 1 and len(lines[0]) < 1000 and lines[0].isprintable()
        return "refused", "" if ours else f"message of {len(lines)} lines: {str(error)[:300]!r}"
    except Hang:
        return "hangs", f"over {hang:.1f} s of a processor"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return "tracebacks", f"{type(error).__name__}: {str(error)[:200]} at {place.filename}:{place.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if found == wanted:
        return "unchanged", ""
    if made.sealed and not sealed:
        return "believed", "other contents were accepted"
    return "other", ""


def _program(command: list[str], kind: str) -> tuple[str, str]:
    """The same through the command line, in this process."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(command)
    except BaseException as error:
        return "tracebacks", f"{' '.join(command)}: {type(error).__name__}: {error}"
    if code not in (0, 2) or (code == 2 and len(said.getvalue().strip().splitlines()) != 1):
        return "tracebacks", f"{' '.join(command)}: exit code {code}: {said.getvalue()[:200]}"
    return kind, ""


def _hung(number: int, frame: object) -> None:
    raise Hang


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
