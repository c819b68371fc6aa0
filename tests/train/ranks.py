"""What test_parallel starts as another process, `python -m tests.train.ranks DATA OUT`: it computes one-process runs,
then forks ranks that train the same together, and writes what came out to OUT/*.json.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP loads it: here once, and not in each rank
import torch.distributed as dist

from perspectron.data import Shards, Tokenizer, open_shards
from perspectron.train import checkpoint
from perspectron.train.config import Layout, RunConfig, TrainConfig
from perspectron.train.loop import Trainer
from perspectron.train.optim import OptimConfig
from perspectron.train.parallel import ParallelTrainer
from perspectron.train.team import Team
from perspectron.util.errors import PerspectronError
from tests.long import some
from tests.train.conftest import small

EXPERTS = {"ternary": True, "int8_activations": True, "delta": 0.001, "diversity": 0.01}
FAMILIES = (
    "perspective-tiny",
    "perspective2-tiny",
    "adr-tiny",
    "lens-tiny",
    "drm-104k",
    "ssd-tiny",
    "transformer-tiny",
)
TAUGHT = "-taught"
"""The end of the name of a model that also learns from another run."""
SPLIT = ("perspective-tiny", "perspective2-tiny", "gla-tiny", "ssd-tiny", "transformer-tiny", "gpt2-tiny")
"""Models whose texts are split among ranks."""


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def fork(
    size: int, work: Callable[[int], None], local: int | None = None, present: int | None = None
) -> list[int]:
    """The process ids of ranks that do `work`; `local` of them count as one machine, `present` of them come."""
    port, children = free_port(), []
    for rank in range(size if present is None else present):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % (local or size)),
                "LOCAL_WORLD_SIZE": str(local or size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            work(rank)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except PerspectronError as error:
            print(f"{rank}: {error}", file=sys.stderr, flush=True)
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return children


def wait(children: list[int], seconds: float = 1000.0) -> list[int]:
    """The exit codes of all; those that do not end in time are killed, and have code -9."""
    codes, until = dict.fromkeys(children, -9), time.monotonic() + seconds
    left = set(children)
    while left and time.monotonic() < until:
        for child in list(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
                left.discard(child)
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [codes[child] for child in children]


class Cases:
    """Makes the runs of a test in one folder."""

    def __init__(self, data: Path, out: Path) -> None:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        self.out = out
        self.tokenizer: Tokenizer = Tokenizer.load(data / "tokenizer.json")
        self.shards: Shards = open_shards(data)

    def config(self, name: str, steps: int = 3, **train: Any) -> RunConfig:
        if name.endswith(TAUGHT):
            name, train = name.removesuffix(TAUGHT), train | {"teacher": str(self.out / "one-gpt2-tiny")}
        model = small(
            name, **(EXPERTS if name == "perspective-tiny" else {"layers": 2} if name != "drm-104k" else {})
        )
        if name == "transformer-tiny":  # the tokens before come from another rank
            model = replace(model, input_conv=("k", "network"))
        if name == "gla-tiny":
            model = replace(model, shift=("k", "v", "network"))
        settings: dict[str, Any] = {
            "steps": steps, "batch_size": 4, "seq_len": 32, "dtype": "float32", "device": "cpu", "eval_every": 0,
            "eval_tokens": 300, "save_every": 0, "optim": OptimConfig(lr=3e-3, warmup=3, schedule="constant"),
        }  # fmt: skip
        return RunConfig(model, TrainConfig(**settings | train))

    def folder(self, name: str) -> Path:
        run = self.out / name
        if not run.exists():
            run.mkdir()
            self.tokenizer.save(run / "tokenizer.json")
        return run

    def alone(self, run: str, config: RunConfig, **options: Any) -> None:
        trainer = Trainer(self.folder(run), config, self.tokenizer, self.shards)
        self._fitted(trainer, run, True, **options)

    def shared(self, team: Team, layout: Layout, run: str, config: RunConfig, **options: Any) -> None:
        team.of_first(lambda: self.folder(run))
        trainer = ParallelTrainer(team, layout, self.folder(run), config, self.tokenizer, self.shards)
        self._fitted(trainer, run, team.rank == 0, **options)

    def _fitted(self, trainer: Trainer, run: str, first: bool, until: int | None = None) -> None:
        lines = list[dict[str, Any]]()
        trainer.fit(until, report=lines.append)
        weights = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in trainer.model.state_dict().items()
        }
        if first:
            torch.save((lines, weights), self.out / f"{run}.pt")

    def apart(self, run: str, other: str) -> dict[str, float]:
        """How far two runs are from each other."""
        (one, mine), (two, its) = (
            torch.load(self.out / f"{name}.pt", weights_only=True) for name in (run, other)
        )
        found = {"loss": 0.0, "grad_norm": 0.0, "aux": 0.0, "heldout_bits_per_byte": 0.0}
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            for key in set(found) & a.keys() - {"aux"}:
                found[key] = max(found[key], abs(a[key] - b[key]))
            for key, value in a.get("aux", {}).items():
                found["aux"] = max(found["aux"], abs(value - b["aux"][key]))
        assert mine.keys() == its.keys()
        found["weights"] = max((mine[name].double() - its[name].double()).abs().max().item() for name in mine)
        return found

    def write(self, name: str, value: Any) -> None:
        (self.out / f"{name}.json").write_text(json.dumps(value))


# (ranks, layout, model, how a run of it is called); in the short form some models of the layouts of two ranks
LAYOUTS = [
    *((2, Layout("fsdp"), name, f"fsdp2-{name}") for name in some(FAMILIES, 4, "fsdp")),
    (2, Layout("fsdp", expert_parallel=2), "perspective-tiny", "experts2"),
    *((2, Layout("fsdp", context_parallel=2), name, f"context2-{name}")
      for name in (*some(SPLIT, 3, "context"), f"ssd-tiny{TAUGHT}")),
    (4, Layout("fsdp"), "perspective-tiny", "fsdp4"),
    (4, Layout("ddp"), "drm-104k", "ddp4"),
    (4, Layout("hsdp"), "perspective-tiny", "hsdp4"),
    (4, Layout("hsdp", expert_parallel=2), "perspective-tiny", "experts2of4"),
    (4, Layout("fsdp", expert_parallel=4), "perspective-tiny", "experts4"),
    (4, Layout("fsdp", context_parallel=4), "perspective2-tiny", "context4"),
    (4, Layout("ddp", context_parallel=2), "perspective-tiny", "context2of4"),
]  # fmt: skip


def equal(cases: Cases, steps: int) -> None:
    """Runs of two and four ranks against those of one process."""
    names = {name for _, _, name, _ in LAYOUTS} | {"gpt2-tiny"}  # which another one learns from
    for name in sorted(names):
        cases.alone(f"one-{name}", cases.config(name, steps))
    for size in (2, 4):

        def work(rank: int, size: int = size) -> None:
            with Team() as team:
                for ranks, layout, name, run in LAYOUTS:
                    if ranks == size:
                        cases.shared(team, layout, run, cases.config(name, steps))

        codes = wait(fork(size, work, local=2), 300)
        cases.write(f"equal{size}", codes)
    cases.write("apart", {run: cases.apart(run, f"one-{name}") for _, _, name, run in LAYOUTS})


def reshard(cases: Cases) -> None:
    """One run by 4, 2, 1 and 4 processes, in turn, against one process."""
    config = cases.config("perspective-tiny", 4, save_every=1)
    cases.alone("whole", config)
    codes = list[list[int]]()
    for size, until in ((4, 1), (2, 2), (1, 3), (4, 4)):

        def work(rank: int, until: int = until) -> None:
            with Team() as team:
                cases.shared(team, Layout(), "resumed", config, until=until)

        if size == 1:
            cases.alone("resumed", config, until=until)
        else:
            codes.append(wait(fork(size, work)))
    cases.write("reshard", codes)
    whole, resumed = (
        [json.loads(line) for line in (cases.out / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "resumed")
    )
    cases.write("losses", [[line["loss"] for line in lines if "loss" in line] for lines in (whole, resumed)])


def bad(cases: Cases) -> None:
    """What several ranks are told that cannot train together: exit codes, and what rank 0 says."""
    found = dict[str, Any]()

    def said(name: str, size: int, work: Callable[[int], None], **options: Any) -> None:
        log = cases.out / f"{name}.log"
        before = os.dup(2)
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
            try:
                codes = wait(fork(size, work, **options), 60)
            finally:
                os.dup2(before, 2)
        found[name] = {"codes": codes, "said": log.read_text().splitlines()}

    def missing(rank: int) -> None:
        with Team(meeting=2.0):
            pass

    def rows(rank: int) -> None:
        with Team() as team:
            cases.shared(team, Layout(), "rows", cases.config("ssd-tiny"))

    def differ(rank: int) -> None:
        with Team() as team:
            team.same("data", f"of {rank // 2}", "let all of them read the same folder, or copies of it")

    def command(rank: int) -> None:
        sys.argv = ["perspectron", "train", f"--seed={rank}"]
        with Team():
            pass

    def full(rank: int) -> None:
        with Team() as team:
            if rank == 1:  # as if its disk were full
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            cases.shared(team, Layout(), "full", cases.config("ssd-tiny"))

    said("missing", 3, missing, present=2)
    said("rows", 3, rows)
    said("differ", 3, differ)
    said("command", 2, command)
    said("full", 2, full)
    cases.write("bad", found)
    cases.write("left", sorted(path.name for path in (cases.out / "full" / "checkpoints").iterdir()))


def signalled(cases: Cases) -> None:
    """A signal to one of two ranks; their exit codes are what `fit` returns."""

    def work(rank: int) -> None:
        with Team() as team:
            team.of_first(lambda: cases.folder("signalled"))
            given = (cases.folder("signalled"), cases.config("ssd-tiny"), cases.tokenizer, cases.shards)
            trainer = ParallelTrainer(team, Layout(), *given)
            step = trainer.step

            def interrupted() -> dict[str, Any]:
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                return step()

            trainer.step = interrupted  # type: ignore[method-assign]
            stopped = trainer.fit()
        raise SystemExit(stopped)

    codes = wait(fork(2, work))
    steps = [c.progress.step for c in checkpoint.found_in(cases.out / "signalled")]
    cases.write("signalled", {"codes": codes, "steps": steps})


def killed(cases: Cases, kills: int) -> None:
    """Kill ranks in turn at some time, saves included; the others end, and the run goes on."""
    draw, config = random.Random(0), cases.config("perspective-tiny", 400, save_every=3, batch_size=4, keep=3)
    rows = list[dict[str, Any]]()
    for number in range(kills):

        def work(rank: int) -> None:
            with Team(gone=20.0) as team:
                cases.shared(team, Layout(), "killed", config)

        victim, before = draw.randrange(4), len(_lines(cases.out / "killed"))
        children = fork(4, work)
        until = time.monotonic() + 1000
        while len(_lines(cases.out / "killed")) < before + 4 + draw.randrange(4) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(children[victim], signal.SIGKILL)
        began = time.monotonic()
        codes = wait(children)
        step = max((c.progress.step for c in checkpoint.found_in(cases.out / "killed")), default=0)
        row = {"number": number, "victim": victim, "codes": codes, "step": step}
        rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
        print(rows[-1], flush=True)
    whole = replace(config, train=replace(config.train, steps=rows[-1]["step"] + 3))
    shutil.rmtree(cases.out / "killed-one", ignore_errors=True)
    cases.alone("killed-one", config, until=whole.train.steps)
    cases.alone("killed", config, until=whole.train.steps)
    cases.write("killed", rows)
    losses = [
        [line["loss"] for line in _lines(cases.out / run) if "loss" in line]
        for run in ("killed", "killed-one")
    ]
    cases.write("killed-losses", losses)


def _lines(run: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


if __name__ == "__main__":
    data, out = map(Path, sys.argv[1:3])
    assert not dist.is_initialized()
    made = Cases(data, out)
    equal(made, 2)
    reshard(made)
    bad(made)
    signalled(made)
    killed(made, 1)
