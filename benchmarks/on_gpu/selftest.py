"""Every operation and backend against float64: outputs, final states, gradients, gates of 0 and 1, odd lengths, bf16.

One unit a case, so that what is slow to compile or breaks leaves the others. The record that has `auto` take Triton's
kernels is written once all cases have been tried and hold, as `perspectron selftest` does.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

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
    for name, case in zip(names, tried, strict=True):
        yield Unit(name, partial(_compared, case, place), seconds=4.0 if "triton" in case.backends else 1.0)
    # Of this machine and these versions: on another one it is written anew.
    now = record.conditions(place.device) | ({"rehearsed": "yes"} if place.rehearsed else {})
    name = f"record {zlib.crc32(json.dumps(now).encode()):08x}"
    yield Unit(name, partial(_record, now, names, place), seconds=0.5)


def _compared(case: Case, place: Place) -> Result:
    """The rows. RuntimeError, with their errors, if one does not hold: the case is tried again by `--resume`."""
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
