"""Every operation and backend against float64: outputs, final states, gradients, gates of 0 and 1, odd lengths, bf16.

One unit a case, so that what is slow to compile or breaks leaves the others. The record that has `auto` take Triton's
kernels is written once all cases have been tried and hold, as `perspectron selftest` does.
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from on_gpu import frame
from on_gpu.frame import Place, Result, Unit
from perspectron.ops import selftest
from perspectron.ops.case import Case
from perspectron.ops.cases import cases
from perspectron.ops.selftest import Row
from perspectron.ops.triton import record

ABOUT = "every operation and backend against float64"
LIMIT = 150


def units(place: Place) -> Iterator[Unit]:
    """One of each operation first; a rehearsal tries only these."""
    tried = cases(place.device)
    first = {case.op: case for case in reversed(tried)}
    tried = (
        list(first.values())
        if place.rehearsed
        else sorted(tried, key=lambda case: case is not first[case.op])
    )
    names = [f"{case.op} ({case.shape})" for case in tried]
    together = [name for name, case in zip(names, tried, strict=True) if "triton" in case.backends]
    if together:
        yield Unit("cases of Triton, together", partial(compiled, place, len(together)), seconds=45)
    for name, case in zip(names, tried, strict=True):
        yield Unit(name, partial(_compared, case, name, place), seconds=4.0 if name in together else 1.0)
    # Of this machine and these versions: on another one it is written anew.
    now = record.conditions(place.device) | ({"rehearsed": "yes"} if place.rehearsed else {})
    name = f"record {zlib.crc32(json.dumps(now).encode()):08x}"
    yield Unit(name, partial(_record, now, names, place), seconds=0.5)


SHARDS = 8
"""Processes that try the cases of Triton: one would compile all kernels one after the other."""


def compiled(place: Place, count: int) -> Result:
    """Run the cases of Triton by several processes. The milliseconds that they find are those of a busy GPU."""
    shards = 1 if place.rehearsed else SHARDS
    code = "import sys; from on_gpu import selftest; selftest.shard(*sys.argv[1:])"
    path = os.pathsep.join(
        [str(frame.ROOT), str(frame.ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    running = []
    for number in range(shards):
        of = count if place.rehearsed else shards  # in a rehearsal a single case
        command = [sys.executable, "-c", code, str(place.folder), str(number), str(of)]
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    try:
        codes = [process.wait(max(1.0, place.left - 5)) for process in running]
    except subprocess.TimeoutExpired:
        codes = []
    finally:
        for process in running:
            process.kill()
            process.wait()
    return {"processes": shards, "exit": codes}


def shard(folder: str, number: str, of: str) -> None:
    """Try every so manieth case of Triton, and write its rows to a file of this shard."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path, rows = _shard(Path(folder), number), dict[str, Any]()
    for case in [case for case in cases(device) if "triton" in case.backends][int(number) :: int(of)]:
        rows[f"{case.op} ({case.shape})"] = [asdict(row) for row in selftest.rows(case, device)]
        frame.write(path, rows)


def _shard(folder: Path, number: str) -> Path:
    return folder / f".selftest.{number}.json"


def _compared(case: Case, name: str, place: Place) -> Result:
    """The rows, those of a shard if there are any. RuntimeError, with their errors, if one does not hold: the case is
    tried again by `--resume`."""
    found = [frame.read(path).pop(name, None) for path in place.folder.glob(_shard(Path(), "*").name)]
    rows = [Row(**row) for row in next(filter(None, found), [])]
    if not rows or not all(row.holds for row in rows):
        rows = list(selftest.rows(case, place.device))
    if broken := [row for row in rows if not row.holds]:
        raise RuntimeError("does not hold: " + "; ".join(map(_told, broken)))
    return {"rows": [asdict(row) | {"holds": row.holds} for row in rows]}


def _told(row: Row) -> str:
    if row.failed is not None:
        return f"{row.backend} raised {row.failed}"
    errors = f"outputs {row.forward} (bound {row.forward_bound})"
    if row.gradients is not None:
        errors += f", gradients {row.gradients} (bound {row.gradients_bound})"
    return f"{row.backend}: {errors}"


def _record(now: dict[str, str], names: list[str], place: Place) -> Result:
    """The record, once all hold. RuntimeError, naming them, while some do not: it is tried again by `--resume`."""
    done = frame.read(place.folder / "selftest.json").get("units", {})
    found = {name: done.get(name, {}).get("result") for name in names}
    if missing := [name for name, result in found.items() if result is None]:
        raise RuntimeError(
            f"no record: {len(missing)} cases do not hold or are missing: {', '.join(missing)}"
        )
    rows: list[dict[str, Any]] = [row for result in found.values() for row in result["rows"]]
    file = record.write(now, rows, True)
    record.passed.cache_clear()
    return {"record": file.name, "rows": len(rows), "auto_takes_triton": record.passed(place.device)}
