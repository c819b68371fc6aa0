"""What a stage of `benchmarks/gpu.py` is made of: units, measured in order of worth, each kept as soon as it ends.

A stage is a module of this folder with ABOUT, one line; LIMIT, the seconds it may have of 25 minutes; and
`units(place)`. A stage runs in a process of its own. Its file, DIR/STAGE.json, is replaced after every unit, so a run
that is cut off at any moment keeps all units that ended, and `--resume` measures the others.
"""

import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "benchmarks")) if path not in sys.path]

from on_gpu.watch import say  # noqa: E402
from perspectron.util import machine  # noqa: E402

Result = Mapping[str, Any]
AGAIN = 3
"""The exit code of a stage that has to go on in a new process."""
LONGEST = 60.0
"""Seconds that any unit may take."""


class Place(NamedTuple):
    """Where a stage runs. until: the time (`time.time`) at which it must have ended. rehearsed: on a CPU, with shapes
    so small that every line runs and the figures say nothing. folder: of the run's files. since: the time at which the
    run began; a unit that failed in it is not tried again."""

    device: torch.device
    rehearsed: bool
    until: float
    folder: Path
    since: float = math.inf

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.time()

    def wait(self) -> None:
        """Return once the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> int:
        """Bytes of the device's memory that are free."""
        if self.device.type != "cuda":
            return machine.free_memory()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


class Skip(Exception):
    """A unit that cannot run here; the message says what is missing."""


class Unit(NamedTuple):
    """One measurement. run: gives what is written, in types of JSON. needs: bytes of device memory, 0 if few. seconds:
    about how long it takes; it is not begun with less time left."""

    name: str
    run: Callable[[], Result]
    needs: int = 0
    seconds: float = 5.0


def measure(stage: str, units: Iterable[Unit], place: Place) -> bool:
    """Run the units that have no result yet, those that were tried before last; True if each has one or cannot have
    one here. A unit that takes five times as long as it should, or leaves the GPU in error, ends this process with the
    exit code AGAIN, for the stage to go on in another."""
    path = place.folder / f"{stage}.json"
    kept = read(path).get("units", {})
    whole: dict[str, Any] = {"stage": stage, "conditions": conditions(place), "done": False, "units": kept}
    failed: list[Unit] = []

    def in_order() -> Iterator[Unit]:
        """Units that are open; a stage may make the next one by what the last one gave."""
        for unit in units:
            before = kept.get(unit.name, {})
            if "failed" in before and before["at"] < place.since:
                failed.append(unit)
            elif not {"result", "failed"} & set(before):
                yield unit
        yield from failed

    for unit in in_order():
        if unit.seconds > place.left and not place.rehearsed:
            found = {"left": f"it takes about {unit.seconds:.0f} s, and {max(0, place.left):.0f} s were left"}
        elif unit.needs > (free := place.free()):
            found = {"skipped": f"needs {unit.needs:,} bytes of memory, {free:,} are free"}
        else:
            write(path, whole | {"running": unit.name})
            found = _watched(unit, path)
        say(f"{stage}: {unit.name}: {_line(found)}")
        kept[unit.name] = found
        write(path, whole)
        if _broken(place):
            os._exit(AGAIN)
    done = all("result" in found or "skipped" in found for found in kept.values())
    write(path, whole | {"done": done})
    return done


def _watched(unit: Unit, path: Path) -> dict[str, Any]:
    """What a unit gives; where it takes far too long the process ends, and the unit has failed."""
    most = max(LONGEST, 5 * unit.seconds)

    def end() -> None:
        say(f"{path.stem}: {unit.name}: stopped after {most:g} s")
        stopped(path, f"stopped after {most:g} s")
        os._exit(AGAIN)

    watch = threading.Timer(most, end)
    watch.daemon = True
    watch.start()
    try:
        return _run(unit)
    finally:
        watch.cancel()


def stopped(path: Path, why: str) -> None:
    """Write that the unit which runs has failed."""
    whole = read(path)
    if (name := whole.pop("running", None)) is not None:
        whole["units"][name] = {"failed": why, "at": time.time()}
        write(path, whole)


def _broken(place: Place) -> bool:
    """True if the GPU answers no more, as after an access to memory that is not there."""
    try:
        place.wait()
    except RuntimeError:
        return True
    return False


def _run(unit: Unit) -> dict[str, Any]:
    start = time.time()
    try:
        result = unit.run()
    except Skip as why:
        return {"skipped": str(why)}
    except torch.OutOfMemoryError as why:
        return {"skipped": f"out of memory: {why}"}
    except Exception as why:  # a unit's fault leaves the others
        traceback.print_exc()
        return {"failed": f"{type(why).__name__}: {str(why)[:2000]}", "at": time.time()}
    return {"result": result, "seconds": round(time.time() - start, 2), "commit": machine.commit()}


def _line(found: Mapping[str, Any]) -> str:
    (key, value) = next(iter(found.items()))
    return f"{found['seconds']} s" if key == "result" else f"{key}: {str(value)[:300]}"


def read(path: Path) -> dict[str, Any]:
    """What a stage has kept; nothing of a file that is not there or was cut off."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def write(path: Path, whole: Mapping[str, Any]) -> None:
    """Replace a file in one piece."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


def conditions(place: Place) -> dict[str, Any]:
    """The machine and the versions of a stage."""
    cuda, found = place.device.type == "cuda", {"device": device_name(place.device)}
    if cuda:
        about = torch.cuda.get_device_properties(place.device)
        found |= {"memory": about.total_memory, "multiprocessors": about.multi_processor_count}
        found |= {"cuda": torch.version.cuda or torch.version.hip, "driver": _driver()}
    return found | {
        "torch": torch.__version__,
        "triton": version("triton"),
        "fla": version("fla-core"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rehearsed": place.rehearsed,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine.processor()


def version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    with suppress(OSError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
        )
    return "unknown"


# ---------------------------------------------------------------- time


def in_turns(
    place: Place, calls: Mapping[str, Callable[[], object]], rounds: int = 9, warm: int = 2
) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns: the first `warm` rounds are not counted. A call that is short is repeated
    within a round until it takes 2 ms, and divided."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = dict.fromkeys(calls, 1)
    if place.rehearsed:
        rounds, warm = 2, 1
    for turn in range(warm + rounds):
        for name, call in calls.items():
            seconds = _timed(place, call, repeats[name])
            if turn < warm:
                repeats[name] = 1 if place.rehearsed else max(1, min(200, round(2e-3 / max(seconds, 1e-6))))
            else:
                times[name].append(seconds)
    return times


def _timed(place: Place, call: Callable[[], object], repeats: int) -> float:
    place.wait()
    if place.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "count": len(values),
    }


def ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """above / below, pair by pair: median, least and greatest."""
    return spread([a / b for a, b in zip(above, below, strict=True)])
