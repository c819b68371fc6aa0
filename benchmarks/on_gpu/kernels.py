"""Our recurrences beside fla-core's, and the device's bandwidth and matrix products as ceilings.

A width of 1,024 at lengths around 2,048 comes first, extremes last. Rows are so many that all of them have 32,768
tokens. Ours take float32, fla's bfloat16 (their usual) and, in some units, float32; each side's outputs and gradients
are compared with float64 over the first tokens of a row, and with each other over all.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from on_gpu import frame, recurrences, sides, tuning
from on_gpu.frame import Place, Unit

ABOUT = (
    "Recurrences beside fla-core's: forward, backward, one token; with the copy bandwidth and bf16 products"
)
LIMIT = 240

NAMES = ("gla", "ssd", "gdn", "kda", "rwkv7", "pdr")
FORMS = {"rwkv7": 5, "gla": 4, "gla64": 4, "ssd": 2, "kda": 2, "gdn": 1, "pdr": 0}
"""Processes that compile each of fla's recurrences, about as its kernels have forms; one more has ours."""


def units(place: Place) -> Iterable[Unit]:
    """In order of worth."""
    tuning.load(place.folder)
    yield Unit("ceilings", partial(ceilings, place), 4 << 30, 5)
    yield Unit("compile d 1024", partial(compiled, place, (1024,), FORMS), 16 << 30, 60)
    for name in NAMES:
        yield _sequence(place, name, 1024, 2048)
    for name in NAMES:
        yield Unit(f"{name} one token d 1024", partial(sides.one_token, place, name, (1024,)), 1 << 30, 5)
    if place.rehearsed:
        yield Unit(
            "ssd one token in a graph", partial(sides.one_token, place, "ssd", (1024,), graph=True), 0, 5
        )
        yield Unit("gla torch.compile one token", partial(sides.compiled_step, place, "gla"), 0, 60)
        return
    for name in NAMES:
        yield _sequence(place, name, 1024, 8192)
    for name in NAMES:
        yield Unit(
            f"{name} one token in a graph d 1024",
            partial(sides.one_token, place, name, (1024,), graph=True),
            1 << 30,
            5,
        )
    once = {name: min(1, n) for name, n in FORMS.items()}
    yield Unit("compile d 512, 4096", partial(compiled, place, (4096, 512), once), 16 << 30, 40)
    for d, T in ((4096, 2048), (1024, 32768), (512, 2048), (1024, 512)):
        for name in NAMES:
            yield _sequence(place, name, d, T)
    for name in ("gla", "ssd", "gdn"):
        yield Unit(
            f"{name} one token d 512, 4096", partial(sides.one_token, place, name, (512, 4096)), 2 << 30, 8
        )
    forms = {"gla": 6, "ssd": 4, "gdn": 4}
    yield Unit("compile float32", partial(compiled, place, (1024,), forms, "float32"), 16 << 30, 60)
    for name in forms:
        run = partial(sides.sequence, place, name, 1024, 2048, torch.float32)
        yield Unit(f"{name} d 1024 T 2048, fla in float32", run, _needs(1024), 30)
    for name in ("gla", "gdn"):
        yield Unit(f"{name} torch.compile one token", partial(sides.compiled_step, place, name), 1 << 30, 40)


def _sequence(place: Place, name: str, d: int, T: int) -> Unit:
    run = partial(sides.sequence, place, name, d, T, torch.bfloat16)
    return Unit(f"{name} d {d} T {T}", run, _needs(d), 10 if d > 1024 or T > 8192 else 6)


def _needs(d: int) -> int:
    """Bytes: about thirty tensors of the model's width, and the reference's states."""
    return 30 * sides.TOKENS * d * 4 + (4 << 30)


# ---------------------------------------------------------------- ceilings


def ceilings(place: Place) -> dict[str, Any]:
    """Bytes/s of a large copy, read and written ones, and operations/s of products of random matrices."""
    size, n = (1 << 14, 64) if place.rehearsed else (1 << 28, 8192)
    a, b = torch.empty(size, device=place.device).normal_(), torch.empty(size, device=place.device)
    x, y = (torch.randn(n, n, device=place.device) for _ in "xy")
    x16, y16 = x.bfloat16(), y.bfloat16()

    def full(precision: str) -> Tensor:
        with sides.precise(precision):
            return x @ y

    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: b.copy_(a),
        "bf16 product": lambda: x16 @ y16,
        "tf32 product": lambda: full("high"),
        "float32 product": lambda: full("highest"),
    }
    times = frame.in_turns(place, calls)
    work = {"copy": 2 * size * 4.0} | dict.fromkeys(list(calls)[1:], 2.0 * n**3)
    speeds = {name: work[name] / frame.spread(taken)["median"] for name, taken in times.items()}
    return {
        "seconds": {name: frame.spread(taken) for name, taken in times.items()},
        "copy_bytes": 8 * size,
        "product": f"{n} x {n} x {n}, normal numbers",
        "bytes/s": speeds.pop("copy"),
        "flop/s": speeds,
    }


# ---------------------------------------------------------------- compiling


def compiled(
    place: Place, widths: tuple[int, ...], shards: Mapping[str, int], dtype: str = "bfloat16"
) -> dict[str, Any]:
    """All kernels for these widths, each recurrence's by so many processes: without this each unit would compile for
    minutes."""
    tuning.ready(place)
    tuning.keep(place)
    jobs = [
        {
            "name": name,
            "d": sides.width(place, d),
            "B": sides.rows(place, 2048),
            "dtype": dtype,
            "shard": i,
            "shards": n,
        }
        for d in widths
        for name, n in shards.items()
        for i in range(n + (len(recurrences.KINDS[name].backends) > 1 and dtype == "bfloat16"))
    ]
    return tuning.compile_all(place, jobs, min(100.0, place.left / 2))
