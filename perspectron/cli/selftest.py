"""`perspectron selftest`."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from perspectron.cli.options import Json, answer, say, table
from perspectron.cli.progress import Work

if TYPE_CHECKING:
    from perspectron.ops.selftest import Row


@dataclass(frozen=True)
class Selftest:
    """Compare every operation with its reference on a device, in each way that it runs there, and print speeds.

    Each is computed from fixed inputs in float32 and bfloat16, forward and with gradients, with gates of 0, 1 and 1e-30
    among them, and compared with the reference in float64. The result is kept in the cache ($XDG_CACHE_HOME, else
    ~/.cache). Where it holds on a GPU with Triton, PDR, GLA, SSD, the delta rules and packed matrices run Triton's
    kernels there from then on. The exit code is 1 if an error is over its bound or an operation fails.

    Example: perspectron selftest
    """

    device: str = "auto"
    """The device: cpu, cuda, cuda:1; "auto" is CUDA where there is one."""
    json: Json = False

    def __call__(self) -> int:
        from perspectron.ops import selftest
        from perspectron.ops.triton import record
        from perspectron.util.machine import pick_device

        device = pick_device(self.device)
        now, rows = record.conditions(device), []
        with Work(f"testing operations on {device}"):
            for row in selftest.run(device):
                rows.append(row)
        broken = [row for row in rows if not row.holds]
        found = [asdict(row) | {"holds": row.holds} for row in rows]
        kept = record.write(now, found, not broken)
        head = ("operation", "sizes", "backend", "outputs ≤ bound", "gradients ≤ bound", "ms")
        answer(
            self.json,
            {"conditions": now, "rows": found, "holds": not broken, "record": str(kept)},
            table(f"{now['device']}, torch {now['torch']}, triton {now['triton']}", head, map(_cells, rows)),
            f"{len(rows) - len(broken)} of {len(rows)} within their bounds; kept in {kept}",
        )
        for row in broken:
            how = "is over its bound" if row.failed is None else f"failed: {row.failed}"
            say(f"{row.op} by {row.backend} ({row.shape}) {how}")
        return int(bool(broken))


def _cells(row: "Row") -> tuple[str, ...]:
    if row.failed is not None or row.forward is None or row.ms is None:
        return row.op, row.shape, row.backend, "failed", "", ""
    gradients = "none"
    if row.gradients is not None:
        gradients = (
            f"{row.gradients:.1e} {_sign(row.gradients, row.gradients_bound)} {row.gradients_bound:.0e}"
        )
    forward = f"{row.forward:.1e} {_sign(row.forward, row.forward_bound)} {row.forward_bound:.0e}"
    return row.op, row.shape, row.backend, forward, gradients, f"{row.ms:.1f}"


def _sign(error: float, bound: float | None) -> str:
    return "≤" if bound is None or error <= bound else ">"
