"""The units of the stage `kernels`: sequences and single tokens, each by our backends and by fla-core.

Each side is compared with float64 over the first tokens of a row, outputs and gradients, and with the other over all.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from on_gpu import frame, recurrences, tuning
from on_gpu.frame import Place
from perspectron.ops.triton import record

TOKENS = 32768
CHECKED = 256
"""Tokens that are compared with float64."""
SLOW = 0.05
"""Seconds of a forward pass from which on its backward pass is left out."""
TURNS = 1.2
"""Seconds that the turns of a unit take, as far as three rounds are enough."""

Timed = dict[str, list[float]]
Values = recurrences.Values


def width(place: Place, d: int) -> int:
    return max(128, d // 8) if place.rehearsed else d


def rows(place: Place, T: int) -> int:
    return 1 if place.rehearsed else TOKENS // T


def length(place: Place, T: int) -> int:
    return 3 if place.rehearsed else T


@contextmanager
def precise(precision: str) -> Iterator[None]:
    """Products of float32 in this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def shares(place: Place, seconds: float, least: float, flops: float) -> dict[str, float | None]:
    """What part of the copy's bandwidth and of the bf16 product's speed a time comes to."""
    found = frame.read(place.folder / "kernels.json").get("units", {}).get("ceilings", {}).get("result")
    return {
        "bytes/s": least / seconds,
        "of_copy": least / seconds / found["bytes/s"] if found else None,
        "flop/s": flops / seconds,
        "of_bf16_product": flops / seconds / found["flop/s"]["bf16 product"] if found else None,
    }


# ---------------------------------------------------------------- sequences


def _same(key: str, x: Tensor) -> Tensor:
    return x


class Side:
    """One implementation with its inputs: run gives the outputs of leaves, do is the gradient of outputs, all as the
    side has them; ours converts to our layout. precision: of float32's products. sizes: bytes of a number and of a
    gate."""

    def __init__(
        self, name: str, leaves: Values, run: Callable[[Values], Tensor], do: Tensor, precision: str = "highest",
        sizes: tuple[int, int] = (4, 4), ours: Callable[[str, Tensor], Tensor] = _same,
    ) -> None:  # fmt: skip
        self.name, self.leaves, self.run, self.do, self.ours = name, leaves, run, do, ours
        self.precision, (self.size, self.gate) = precision, sizes

    def forward(self) -> Tensor:
        with torch.no_grad(), precise(self.precision):
            return self.run(self.leaves)

    def both(self, do: Tensor | None = None) -> tuple[Tensor, ...]:
        """The gradients of all leaves."""
        leaves = {key: x.detach().requires_grad_() for key, x in self.leaves.items()}
        with precise(self.precision):
            return torch.autograd.grad(self.run(leaves), list(leaves.values()), self.do if do is None else do)

    def errors(self, exact: Values, tokens: int) -> tuple[dict[str, float], Tensor]:
        """Against float64 over the first tokens of the first row, gradients those of these tokens' outputs; and all
        outputs, in our layout."""
        time_ = 1 if self.name == "pdr" or self.ours is not _same else 2
        do = self.do.clone()
        do.narrow(time_, tokens, do.shape[time_] - tokens).zero_()
        o = self.ours("o", self.forward())
        gradients = dict(zip(self.leaves, self.both(do), strict=True))
        found = {"o": o} | {key: self.ours(key, x) for key, x in gradients.items()}
        return recurrences.error(found, {key: x for key, x in exact.items() if key in found}), o


def sequence(place: Place, name: str, d: int, T: int, dtype: torch.dtype) -> dict[str, Any]:
    """Forward, and forward with backward, of our backends and of fla's chunks, from no state."""
    d, B, T, other = width(place, d), rows(place, T), length(place, T), recurrences.BESIDE.get(name, name)
    tokens, kind = min(CHECKED, T - 1), recurrences.KINDS[name]
    values, exact, do = _case(place, name, B, T, d, tokens)
    sides, leaves = {}, recurrences.ours(name, values)
    for backend in kind.backends:
        sides[backend] = Side(name, leaves, partial(_run, name, backend), do)
    if "triton" in kind.backends and not place.rehearsed:  # the interpreter has one precision
        sides["triton, tf32"] = Side(name, leaves, partial(_run, name, "triton"), do, "high")
    found, outputs = _checked(sides, exact, tokens)
    if other != name:
        values, exact, do = _case(place, other, B, T, d, tokens)
    try:
        fla, stands_in = _theirs(place, other, values, do, dtype)
        checked, more = _checked({"fla": fla}, exact, tokens)
        found |= {"fla": checked["fla"] | stands_in}
        sides["fla"] = fla
        tuning.keep(place)
        if other == name and outputs and more:
            mine = next(iter(outputs.values()))
            found["fla"]["apart"] = recurrences.error({"o": more["fla"]}, {"o": mine})["o"]
    except Exception as why:
        found["fla"] = {"failed": f"{type(why).__name__}: {str(why)[:1000]}"}
    outputs.clear()
    del exact
    sides = {side: one for side, one in sides.items() if "failed" not in found[side]}
    times = {"forward": _timed(place, {side: one.forward for side, one in sides.items()}, found)}
    slow = [side for side in times["forward"] if min(times["forward"][side]) > SLOW]
    for side in slow:
        found[side]["forward + backward"] = f"left out: forward alone takes more than {SLOW} s"
    rest = {side: sides[side].both for side in times["forward"] if side not in slow}
    times["forward + backward"] = _timed(place, rest, found)
    for way, taken in times.items():
        for side, seconds in taken.items():
            found[side][way] = _figures(place, sides[side], d, B * T, seconds, way != "forward")
    return {
        "shape": {"d": d, "B": B, "T": T, "heads": recurrences.heads(kind, d), "K": kind.K, "V": kind.V},
        "fla": {"recurrence": other, "dtype": str(dtype), "notes": tuning.NOTES},
        "checked_tokens": tokens,
        "sides": found,
        "fla_seconds_by_ours": {way: _ratios(taken) for way, taken in times.items()},
    }


def _case(place: Place, name: str, B: int, T: int, d: int, tokens: int) -> tuple[Values, Values, Tensor]:
    """Inputs, what is exact of the first tokens (with the gradient of logarithms too), and a gradient of outputs."""
    values = recurrences.drawn(name, B, T, d, place.device)
    do = torch.randn_like(values["v"]).bfloat16().float()
    leaves = recurrences.ours(name, values)
    exact = recurrences.naive(name, leaves, do, tokens)
    gate = leaves["gate"][tuple(slice(0, n) for n in exact["gate"].shape)]
    return values, exact | {"log": exact["gate"] * gate}, do


def _run(name: str, backend: str, leaves: Values) -> Tensor:
    return recurrences.run_ours(name, leaves, None, backend)[0]


def _theirs(
    place: Place, name: str, values: Values, do: Tensor, dtype: torch.dtype
) -> tuple[Side, dict[str, str]]:
    """fla's side; where it cannot run interpreted, in a rehearsal, our reference in its place, saying so."""
    tuning.ready(place)
    leaves = recurrences.theirs(name, values, dtype)
    size = leaves["q"].element_size()
    side = Side(
        name, leaves, lambda given: recurrences.run_theirs(name, given, None, steps=False, last=False)[0],
        do.transpose(1, 2).to(dtype).contiguous(), "highest", (size, leaves["log"].element_size()),
        partial(recurrences.of_theirs, name),
    )  # fmt: skip
    try:
        side.both()
        return side, {}
    except Exception as why:
        if not place.rehearsed:
            raise
        stands_in = f"our reference: fla's kernels do not run interpreted ({type(why).__name__})"
        own = recurrences.ours(name, values)
        return Side(name, own, partial(_run, name, "naive"), do), {"is": stands_in}


def _checked(sides: Mapping[str, Side], exact: Values, tokens: int) -> tuple[dict[str, Any], Values]:
    """Errors of each side, or how it failed; and the outputs."""
    found, outputs = {}, {}
    for name, side in sides.items():
        try:
            errors, outputs[name] = side.errors(exact, tokens)
            found[name] = {"errors": errors}
        except Exception as why:  # the others' figures are kept
            found[name] = {"failed": f"{type(why).__name__}: {str(why)[:1000]}"}
    return found, outputs


def _timed(place: Place, calls: Mapping[str, Callable[[], object]], found: dict[str, Any]) -> Timed:
    """Seconds in turns, after two calls of each: one that compiles, one that says how many rounds there is time for."""
    seconds, working = 0.0, {}
    for name, call in calls.items():
        try:
            call()
            place.wait()
            start = time.perf_counter()
            call()
            place.wait()
            seconds, working[name] = seconds + time.perf_counter() - start, call
        except Exception as why:
            found[name]["failed"] = f"{type(why).__name__}: {str(why)[:1000]}"
    return frame.in_turns(place, working, max(3, min(9, int(TURNS / max(seconds, 1e-6)))), 1)


def _figures(
    place: Place, side: Side, d: int, tokens: int, seconds: list[float], backward: bool
) -> dict[str, Any]:
    spread = frame.spread(seconds)
    least = recurrences.least_bytes(side.name, d, tokens, side.size, side.gate, backward=backward)
    flops = recurrences.flops(side.name, d, tokens, backward=backward)
    return {
        "seconds": spread,
        "tokens/s": tokens / spread["median"],
        "least_bytes": least,
        "flops": flops,
        **shares(place, spread["median"], least, flops),
    }


def _ratios(times: Timed) -> dict[str, dict[str, float]]:
    """fla's seconds by ours: above 1 where ours is faster."""
    if "fla" not in times:
        return {}
    return {side: frame.ratio(times["fla"], taken) for side, taken in times.items() if side != "fla"}


# ---------------------------------------------------------------- one token


def one_token(place: Place, name: str, widths: tuple[int, ...], graph: bool = False) -> dict[str, Any]:
    """A step from a state, for 1 and 64 rows; in a CUDA graph if wanted. Ours writes into its state, fla a new one."""
    return {
        f"d {width(place, d)}, {B} rows": _one_token(place, name, width(place, d), B, graph)
        for d in widths
        for B in ((1,) if place.rehearsed else (1, 64))
    }


def _one_token(place: Place, name: str, d: int, B: int, graph: bool) -> dict[str, Any]:
    other = recurrences.BESIDE.get(name, name)
    values, first = (
        recurrences.drawn(name, B, 1, d, place.device),
        recurrences.state(name, B, d, place.device),
    )
    leaves, found, calls = recurrences.ours(name, values), {}, {}
    backends = ("auto", *(x for x in recurrences.KINDS[name].backends if x == "triton"))
    with torch.no_grad():
        exact = _exact_step(name, leaves, first)
        for backend in backends:
            found[backend] = _attempt(
                partial(recurrences.run_ours, name, leaves, first, backend), exact, _same
            )
            calls[backend] = recurrences.step(name, backend, leaves, first.clone())
        if other != name:
            values, first = (
                recurrences.drawn(other, B, 1, d, place.device),
                recurrences.state(other, B, d, place.device),
            )
            exact = _exact_step(other, recurrences.ours(other, values), first)
        try:
            tuning.ready(place)
            given = recurrences.theirs(other, values, torch.bfloat16)
            calls["fla"] = partial(recurrences.run_theirs, other, given, first, steps=True, last=True)
            found["fla"] = _attempt(calls["fla"], exact, partial(recurrences.of_theirs, other))
        except Exception as why:
            found["fla"] = {"failed": f"{type(why).__name__}: {str(why)[:1000]}"}
        calls = {side: call for side, call in calls.items() if "failed" not in found.get(side, {"failed": 0})}
        if graph:
            calls = _captured(place, calls, found)
        times = _timed(place, calls, found)
    for side, seconds in times.items():
        at = other if side == "fla" else name
        state = recurrences.state_floats(at, d) * B * 4
        size = 2 if side == "fla" else 4
        gate = size if recurrences.KINDS[at].half else 4
        least = 2 * state + recurrences.least_bytes(at, d, B, size, gate, backward=False)
        spread = frame.spread(seconds)
        flops = recurrences.flops(at, d, B, backward=False)
        found[side] |= {"seconds": spread, "tokens/s": B / spread["median"], "least_bytes": least}
        found[side] |= shares(place, spread["median"], least, flops)
    auto = "triton" if place.device.type == "cuda" and record.passed(place.device) else "step"
    return {
        "auto_is": auto if name in ("pdr", "gla", "ssd") else "step",
        "state_bytes": first.numel() * 4,
        "sides": found,
        "fla_seconds_by_ours": _ratios(times),
    }


def _exact_step(name: str, leaves: Values, first: Tensor) -> tuple[Tensor, Tensor]:
    doubled = {key: x.double() for key, x in leaves.items()}
    return recurrences.run_ours(name, doubled, first.double(), "naive")


def _attempt(
    call: Callable[[], tuple[Tensor, Tensor]],
    exact: tuple[Tensor, Tensor],
    ours: Callable[[str, Tensor], Tensor],
) -> dict[str, Any]:
    """Errors of the outputs and of the state after, or how it failed."""
    try:
        o, last = call()
        found, wanted = {"o": ours("o", o), "state": last}, dict(zip(("o", "state"), exact, strict=True))
        return {"errors": recurrences.error(found, wanted)}
    except Exception as why:
        return {"failed": f"{type(why).__name__}: {str(why)[:1000]}"}


def _captured(
    place: Place, calls: Mapping[str, Callable[[], object]], found: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    """The replays of graphs of the calls; in a rehearsal the calls."""
    if place.device.type != "cuda":
        return dict(calls)
    made: dict[str, Callable[[], object]] = {}
    for side, call in calls.items():
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            made[side] = graph.replay
        except Exception as why:
            found[side]["failed"] = f"no graph: {type(why).__name__}: {str(why)[:1000]}"
    return made


def compiled_step(place: Place, name: str) -> dict[str, Any]:
    """One token of our "auto" under torch.compile beside the plain one, at a width of 1,024 and 64 rows."""
    d, B = width(place, 1024), 1 if place.rehearsed else 64
    leaves = recurrences.ours(name, recurrences.drawn(name, B, 1, d, place.device))
    first = recurrences.state(name, B, d, place.device)
    plain = recurrences.step(name, "auto", leaves, first.clone())
    backend = "eager" if place.rehearsed else "inductor"
    function = torch.compile(partial(recurrences.run_ours, name), backend=backend)
    with torch.no_grad(), limited(60):
        start = time.perf_counter()
        o, last = function(leaves, first.clone(), "auto")
        place.wait()
        took = time.perf_counter() - start
        errors = recurrences.error(
            {"o": o, "state": last}, dict(zip(("o", "state"), _exact_step(name, leaves, first), strict=True))
        )
        state = first.clone()
        calls = {"plain": plain, "compiled": lambda: function(leaves, state, "auto", consume_state=True)}
        calls["compiled"]()
        times = frame.in_turns(place, calls)
    return {
        "compile_seconds": took,
        "errors": errors,
        "seconds": {side: frame.spread(taken) for side, taken in times.items()},
        "plain_by_compiled": frame.ratio(times["plain"], times["compiled"]),
    }


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """TimeoutError after so many seconds."""

    def end(*_: object) -> None:
        raise TimeoutError(f"cut off after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
