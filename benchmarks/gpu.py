"""Everything that has to be known from a GPU, in one command that keeps what it has.

    python benchmarks/gpu.py --out DIR            on the GPU, 25 minutes
    python benchmarks/gpu.py --out DIR --resume   go on with what is missing, on another day too
    python benchmarks/gpu.py --out DIR --rehearse every line of it on a CPU, with tiny shapes, in three minutes
    python benchmarks/gpu.py --wheels             the line that downloads what it needs, for a machine without network

It needs this checkout, Python 3.11 to 3.13, torch ≥ 2.11, Triton ≥ 3.6, numpy, safetensors and tokenizers; what is
missing of the rest it says, and goes on without. The stages, in order of worth, are modules of `benchmarks/on_gpu`.
Each runs in a process of its own with a limit and writes DIR/STAGE.json, which is replaced after every measurement. The
exit code is 0 if all is there, 1 if something failed or is left, 2 for what cannot be begun.
"""

import argparse
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module, metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from on_gpu import watch  # noqa: E402

STAGES = ("selftest", "suite", "kernels", "training", "decoding", "streaming", "long")
THERE = {"torch", "triton", "numpy", "safetensors", "tokenizers"}
"""What every machine must have; the wheels are the rest."""
GRACE = 20
"""Seconds that a stage may go on after its time before it is stopped."""
TORCH, TRITON = (2, 11), (3, 6)
"""The least versions."""


def main(arguments: list[str] | None = None) -> int:
    args = _parsed(arguments)
    if args.child:
        watch.end_with(args.parent)
    if args.wheels is not None:
        print(wheels(args.wheels))
        return 0
    if args.rehearse:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = _device(args.rehearse)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return _child(args, device)
    start, codes = time.time(), {}
    end = start + 60 * args.minutes
    with _locked(args.out) as lock:
        _checked(args, device)
        for name, what in missing():
            watch.say(f"{name} is not installed: {what}")
        for name in [stage for stage in STAGES if stage in args.stages]:
            codes[name] = _stage(args, name, end, lock)
    whole = not any(codes.values())
    watch.say(
        f"{sum(code == 0 for code in codes.values())} of {len(codes)} stages are whole, in {time.time() - start:.0f} s"
    )
    for name in [name for name, code in codes.items() if code]:
        watch.say(
            f"{name}: something failed or is left, see {args.out / f'{name}.json'}; go on with --resume"
        )
    return 0 if whole else 1


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="the folder for results")
    parser.add_argument("--minutes", type=float, default=25, help="for all stages together (%(default)s)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="some of them")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU, with tiny shapes: the figures say nothing"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what is missing in DIR")
    wheels = "print a `pip download` line for this version of Python (%(const)s) on x86-64 Linux, and end"
    parser.add_argument("--wheels", nargs="?", const="3.12", choices=("3.11", "3.12", "3.13"), help=wheels)
    parser.add_argument("--child", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.out is None and args.wheels is None:
        parser.error("--out is missing: the folder for results")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}, must be > 0")
    return args


def _refuse(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    raise SystemExit(2)


def _device(rehearse: bool) -> "torch.device":  # noqa: F821
    """The GPU, or the CPU in a rehearsal. Exit code 2 without torch or a GPU."""
    if find_spec("torch") is None or _release("torch") < TORCH:
        _refuse("torch ≥ 2.11 is not installed")
    import torch

    if rehearse:
        torch.set_num_threads(2)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _refuse("no GPU: torch sees none; `--rehearse` runs every line of this on a CPU")
    return torch.device("cuda")


def _release(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version(name).split("+")[0].split(".")[:2])


def _locked(folder: Path) -> IO[str]:
    """A file that only one run has open with a lock; the processes it starts have it too."""
    lock = (folder / ".lock").open("w")
    for _ in range(
        100
    ):  # those of a run that was killed end within a second, or as soon as what they load lets them
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except OSError:
            time.sleep(0.1)
    lock.close()
    _refuse(f"{folder} is in use by another run of this command")


def _checked(args: argparse.Namespace, device: "torch.device") -> None:  # noqa: F821
    """Exit code 2 where results of DIR cannot be joined by this run's."""
    from on_gpu import frame

    there = {name: frame.read(args.out / f"{name}.json") for name in STAGES}
    there = {name: found for name, found in there.items() if found}
    if there and not args.resume:
        _refuse(f"{args.out} has results of {', '.join(there)}; give --resume to go on, or another folder")
    now = frame.device_name(device)
    for name, found in there.items():
        before = found.get("conditions", {}).get("device")
        if before != now:
            _refuse(f"{args.out / name}.json was measured on {before}, this is {now}: give another folder")


# ---------------------------------------------------------------- a stage


def _stage(args: argparse.Namespace, name: str, end: float, lock: IO[str]) -> int:
    """Run a stage in processes of its own until it has ended or its time has; 0 if all of it is there."""
    from on_gpu import frame

    try:
        stage = import_module(f"on_gpu.{name}")
    except ImportError as why:
        watch.say(f"== {name} is left out: {why}")
        return 1
    limit = stage.LIMIT * args.minutes / 25
    until = end if name == args.stages[-1] else min(end, time.time() + limit)
    watch.say(f"== {name}, at most {max(0, until - time.time()):.0f} s: {stage.ABOUT}")
    command = [sys.executable, str(Path(__file__).resolve()), "--out", str(args.out), "--child", name]
    command += [
        "--parent",
        str(os.getpid()),
        "--since",
        str(time.time()),
        "--until",
        str(until),
        *(["--rehearse"] if args.rehearse else []),
    ]
    code = frame.AGAIN
    while code == frame.AGAIN and (time.time() < until or args.rehearse):
        child = subprocess.Popen(command, pass_fds=[lock.fileno()], start_new_session=True)
        try:
            code = child.wait(max(1, until - time.time()) + GRACE)
        except subprocess.TimeoutExpired:
            frame.stopped(args.out / f"{name}.json", f"stopped at the stage's end, after {limit:.0f} s")
            code = 1
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return code


def _child(args: argparse.Namespace, device: "torch.device") -> int:  # noqa: F821
    from on_gpu import frame

    place = frame.Place(device, args.rehearse, args.until, args.out.resolve(), args.since)
    stage = import_module(f"on_gpu.{args.child}")
    return 0 if frame.measure(args.child, stage.units(place), place) else 1


# ---------------------------------------------------------------- what it needs


def needed() -> dict[str, list[str]]:
    """Requirements beyond THERE: of the package, and of single stages (the extra `gpu-benchmark`)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {
        "perspectron": project["dependencies"],
        "stages": project["optional-dependencies"]["gpu-benchmark"],
    }
    return {name: [line for line in lines if _name(line) not in THERE] for name, lines in groups.items()}


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]


MODULES = {
    "fla-core": "fla",
    "flash-linear-attention": "fla.models",
    "pytest-xdist": "xdist",
    "pytest-timeout": "pytest_timeout",
}
"""The module of a distribution, where its name is another."""


def missing() -> list[tuple[str, str]]:
    """What is not installed, and what is then left out."""
    found = []
    if find_spec("triton") is None or _release("triton") < TRITON:
        found.append(("triton ≥ 3.6", "kernels in Triton, fla-core's and torch.compile are left out or fail"))
    for group, lines in needed().items():
        left = "what needs it fails" if group == "perspectron" else "what is compared with it is left out"
        for name in map(_name, lines):
            module = MODULES.get(name, name)
            try:
                there = find_spec(module) is not None
            except ModuleNotFoundError:
                there = False
            if not there:
                found.append((name, f"{left}; `--wheels` prints how to get it"))
    return found


def wheels(python: str) -> str:
    """The line that downloads the wheels for a machine without network."""
    platforms = (
        "manylinux_2_28_x86_64",
        "manylinux_2_27_x86_64",
        "manylinux_2_17_x86_64",
        "manylinux2014_x86_64",
    )
    command = ["pip", "download", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in platforms:
        command += ["--platform", platform]
    return shlex.join([*command, "-d", "wheels", *chain.from_iterable(needed().values())])


if __name__ == "__main__":
    raise SystemExit(main())
