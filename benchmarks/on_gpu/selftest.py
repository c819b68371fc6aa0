"""Every operation and backend against float64: outputs, final states, gradients, gates of 0 and 1, odd lengths, bf16.

One unit a case, so that what is slow to compile or breaks leaves the others. The record that has `auto` take Triton's
kernels is written once all cases have been tried and hold, as `perspectron selftest` does.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from on_gpu import frame
from on_gpu.frame import Place, Result, Unit
from perspectron.ops import selftest
from perspectron.ops.case import Case
from perspectron.ops.cases import cases
from perspectron.ops.triton import record

ABOUT = "every operation and backend against float64"
LIMIT = 150


def units(place: Place) -> Iterator[Unit]:
    """Those with Triton's kernels first, each of which is compiled on first use. A rehearsal tries one of each op."""
    tried = sorted(cases(place.device), key=lambda case: "triton" not in case.backends)
    if place.rehearsed:
        tried = list({case.op: case for case in tried}.values())
    names = [f"{case.op} ({case.shape})" for case in tried]
    for name, case in zip(names, tried, strict=True):
        yield Unit(name, partial(_compared, case, place), seconds=4.0 if "triton" in case.backends else 1.0)
    # Of this machine and these versions: on another one it is written anew.
    now = record.conditions(place.device) | ({"rehearsed": "yes"} if place.rehearsed else {})
    kept = record.path(now).stem
    yield Unit(kept, partial(_record, now, names, place), seconds=0.5)


def _compared(case: Case, place: Place) -> Result:
    rows = [asdict(row) | {"holds": row.holds} for row in selftest.rows(case, place.device)]
    return {"rows": rows, "holds": all(row["holds"] for row in rows)}


def _record(now: dict[str, str], names: list[str], place: Place) -> Result:
    """RuntimeError, naming them, while cases are missing or do not hold: it is tried again by `--resume`."""
    done = frame.read(place.folder / "selftest.json").get("units", {})
    found = {name: done.get(name, {}).get("result") for name in names}
    missing = [name for name, result in found.items() if result is None]
    rows: list[dict[str, Any]] = [
        row for result in found.values() if result is not None for row in result["rows"]
    ]
    broken = [f"{row['op']} by {row['backend']} ({row['shape']})" for row in rows if not row["holds"]]
    if missing:
        raise RuntimeError(f"no record: {len(missing)} cases are missing: {', '.join(missing)}")
    file = record.write(now, rows, not broken)
    if broken:
        raise RuntimeError(f"the record says that {len(broken)} do not hold: {', '.join(broken)}")
    record.passed.cache_clear()
    return {
        "record": file.name,
        "rows": len(rows),
        "holds": True,
        "auto_takes_triton": record.passed(place.device),
    }
