"""fla-core's kernels choose among up to dozens of forms of themselves when first called. This makes that affordable:

- All forms are compiled beforehand by several processes at once, which fill Triton's cache; each takes its share.
- Of more than six forms of a kernel, six from all over their list are tried.
- The choice is by a few milliseconds of each form, not a hundred.
- A kernel that has chosen for one number of heads and rows keeps the form for others.

On a CPU, interpreted, the first form is taken.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from on_gpu import frame, recurrences

FORMS = 6
"""Forms of a kernel that are tried at most: to compile all of them for five recurrences takes minutes."""
MADE: list[Any] = []
"""All tuners, as they are made."""
NOTES: list[str] = []
"""What was done to fla."""
KEPT: dict[str, list[tuple[list[str], dict[str, Any]]]] = {}
"""What other processes chose: a kernel's keys, and the form of each."""


def ready(place: frame.Place) -> None:
    """Prepare Triton's tuner, once, before fla is imported. Skip: there is no fla, or no Triton."""
    for name, needs in (("fla", "fla-core"), ("triton", "triton")):
        if find_spec(name) is None:
            raise frame.Skip(f"{needs} is not installed")
    from triton.runtime.autotuner import Autotuner

    if getattr(Autotuner, "ready", False):
        return
    if place.rehearsed:
        os.environ["FLA_CACHE_RESULTS"] = "0"
    made, pruned = Autotuner.__init__, Autotuner.prune_configs

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        MADE.append(self)

    def prune(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        forms = pruned(self, kwargs)
        if place.rehearsed:
            return forms[:1]
        forms = forms[:: -(-len(forms) // FORMS)] if forms else forms
        return [kept] if (kept := _kept(self, kwargs)) is not None else forms

    Autotuner.__init__, Autotuner.prune_configs = make, prune
    _unchecked()
    Autotuner.do_bench = property(lambda self: _quick, lambda self, value: None)
    Autotuner.ready = True


def _unchecked() -> None:
    """Have fla run a kernel whose gradients are wrong by some versions of Triton, which it refuses: its time is as it
    would be, and its errors are measured."""
    with suppress(ImportError):
        from fla.ops.common import chunk_o

        if not getattr(chunk_o, "TRITON_ABOVE_3_7_1", True):
            chunk_o.TRITON_ABOVE_3_7_1 = True
            NOTES.append(
                "gradients by chunk_bwd_dqkwg, which fla refuses with this Triton, as they are wrong"
            )


def _quick(call: Callable[[], object], quantiles: object = None, **_: object) -> list[float]:
    """Milliseconds of a call: the median of 5, without what the first one compiles."""
    call()
    if not torch.cuda.is_available():
        return [1.0] * 3
    torch.cuda.synchronize()
    taken = []
    for _turn in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return [sorted(taken)[2]] * 3


def _kept(tuner: Any, kwargs: dict[str, Any]) -> Any:
    """The form chosen for a shape that differs by batch and heads alone; None if there is none."""
    given = {name: x for name, x in {**tuner.nargs, **kwargs}.items() if name in tuner.arg_names}
    names = [name for name in tuner.keys if name in given]
    key = [given[name] for name in names] + [x.dtype for x in given.values() if hasattr(x, "dtype")]
    matter = [i for i in range(len(key)) if i >= len(names) or names[i] not in ("B", "H", "HV")]
    here = [([str(x) for x in other], form) for other, form in tuner.cache.items()]
    for other, form in here + KEPT.get(tuner.base_fn.__name__, []):
        if len(other) == len(key) and all(other[i] == str(key[i]) for i in matter):
            from triton import Config

            return Config(**form) if isinstance(form, dict) else form
    return None


def keep(place: frame.Place) -> None:
    """Write what was chosen, for processes that compile and for a run that is resumed."""
    for tuner in MADE:
        kept = KEPT.setdefault(tuner.base_fn.__name__, [])
        for key, form in tuner.cache.items():
            names = [str(x) for x in key]
            if all(names != other for other, _ in kept):
                fields = ("kwargs", "num_warps", "num_stages", "num_ctas")
                kept.append((names, {name: getattr(form, name) for name in fields}))
    frame.write(place.folder / ".kernels.forms.json", KEPT)


def load(folder: Path) -> None:
    """Read what `keep` wrote."""
    KEPT.update(frame.read(folder / ".kernels.forms.json"))


# ---------------------------------------------------------------- compiling beforehand


def compile_all(place: frame.Place, jobs: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Run `job` for each in processes of its own, all at once, for so many seconds at most."""
    start, jobs = time.time(), [job | {"folder": str(place.folder)} for job in jobs]
    if place.rehearsed:
        for one in (jobs[0], next(one for one in jobs if one["name"] == "pdr")):
            job(one)
        return {"jobs": len(jobs), "run": 2, "seconds": time.time() - start}
    ends = []
    code = "import json, sys; from on_gpu import tuning; tuning.job(json.loads(sys.argv[1]))"
    path = os.pathsep.join(
        [str(frame.ROOT), str(frame.ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    )
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FLA_CACHE_RESULTS": "0"}
    with ExitStack() as files:
        running = []
        for one in jobs:
            said = files.enter_context(tempfile.TemporaryFile())
            command = [sys.executable, "-c", code, json.dumps(one)]
            running.append((subprocess.Popen(command, env=environment, stderr=said), said))
        for one, (process, said) in zip(jobs, running, strict=True):
            try:
                process.wait(timeout=max(0.1, seconds - (time.time() - start)))
                said.seek(0)
                end = "done" if process.returncode == 0 else said.read().decode(errors="replace")[-500:]
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                end = "cut off"
            label = f"{one['name']} {one['d']} {one['shard']}"
            ends.append({"job": label, "end": end, "after": round(time.time() - start, 1)})
    return {"jobs": ends, "seconds": time.time() - start}


def job(given: dict[str, Any]) -> None:
    """Compile one recurrence of fla, forward, backward and the step; of forms to choose from, the share `shard` of
    `shards`; or, past the last share, ours. Nothing that a kernel computes is used."""
    cuda = torch.cuda.is_available()
    place = frame.Place(torch.device("cuda" if cuda else "cpu"), not cuda, 0.0, Path(given["folder"]))
    ready(place)
    load(place.folder)
    parts: tuple[Callable[..., None], ...] = (_compile_chunks, _compile_step)
    parts, failed = (_compile_ours,) if given["shard"] == given["shards"] else parts, []
    with _only_compiled(given["shard"], given["shards"]):
        for part in parts:
            try:
                part(given, place)
            except Exception as why:  # the other parts are compiled
                failed.append(f"{part.__name__}: {type(why).__name__}: {str(why)[:300]}")
    if failed and cuda:
        raise SystemExit("; ".join(failed))


@contextmanager
def _only_compiled(shard: int, shards: int) -> Iterator[None]:
    """Tuners compile their share of their forms and run none."""
    from triton.runtime.autotuner import Autotuner

    before = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        forms = self.prune_configs(kwargs)
        for form in forms[shard::shards]:
            with suppress(Exception):
                self.fn.run(*args, **(kwargs | {"warmup": True}), **form.all_kwargs())

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = before


def _compile_chunks(given: dict[str, Any], place: frame.Place) -> None:
    name, dtype = given["name"], getattr(torch, given["dtype"])
    leaves = recurrences.theirs(
        name, recurrences.drawn(name, given["B"], 128, given["d"], place.device), dtype
    )
    with torch.no_grad():
        recurrences.run_theirs(name, leaves, None, steps=False, last=False)
    o, _ = recurrences.run_theirs(
        name, {key: x.requires_grad_() for key, x in leaves.items()}, None, steps=False, last=False
    )
    torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))


def _compile_step(given: dict[str, Any], place: frame.Place) -> None:
    name, dtype, d = given["name"], getattr(torch, given["dtype"]), given["d"]
    leaves = recurrences.theirs(name, recurrences.drawn(name, 1, 1, d, place.device), dtype)
    with torch.no_grad():
        first = recurrences.state(name, 1, d, place.device)
        recurrences.run_theirs(name, leaves, first, steps=True, last=True)


def _compile_ours(given: dict[str, Any], place: frame.Place) -> None:
    name, d = given["name"], given["d"]
    leaves = recurrences.ours(name, recurrences.drawn(name, 1, 20, d, place.device))
    for backend in recurrences.KINDS[name].backends:
        if backend == "torch":
            continue
        with torch.no_grad():
            recurrences.run_ours(name, leaves, None, backend)
        wanted = {key: x.detach().requires_grad_() for key, x in leaves.items()}
        o, _ = recurrences.run_ours(name, wanted, None, backend)
        torch.autograd.grad(o, list(wanted.values()), torch.ones_like(o))
