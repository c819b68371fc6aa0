"""What test_resume starts as another process: `driver.py RUN DATA CONFIG KILLS`.

Trains RUN to its end in forked children. The first KILLS of them are killed with SIGKILL: in turn in their start, in
the midst of a step, and while they write a checkpoint, early in each at first and late at last. Prints a JSON summary.
"""

import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import torch
from killing import calls_in, dies_in

from perspectron.data import Tokenizer, open_shards
from perspectron.train.config import RunConfig
from perspectron.train.loop import Trainer
from perspectron.util.config import load

torch.set_num_threads(1)
KINDS = ("resume", "step", "save")


def trainer_of(run: Path, data: Path, config: RunConfig) -> Trainer:
    return Trainer(run, config, Tokenizer.load(data / "tokenizer.json"), open_shards(data))


def train(run: Path, data: Path, config: RunConfig, death: tuple[str, int, int] | None = None) -> int:
    """Fork a child that goes on with the run to its end, or to its death; its wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    signal.alarm(900)  # a child that hangs ends
    try:
        if death:
            dies_in(Trainer, *death)
        trainer_of(run, data, config).fit()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(run: Path, data: Path, config: RunConfig, kills: int) -> None:
    warm = trainer_of(run.with_name("warm-up"), data, config)  # torch loads what it loads late
    warm.fit(until=2)
    calls = {name: calls_in(getattr(warm, name)) for name in KINDS}
    draw = random.Random(0)
    checkpoints, inside, alive = run / "checkpoints", 0, []
    for number in range(kills):
        kind = KINDS[number % len(KINDS)] if alive else "step"
        turn = draw.randint(1, 3) if kind == "step" else 1
        share = (number // len(KINDS) + draw.random()) / -(-kills // len(KINDS))
        status = train(run, data, config, (kind, turn, 1 + int(share * calls[kind])))
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"kill {number}: the child ended by itself, status {status}")
        inside += any(checkpoints.glob(".*.tmp"))
        alive.append(len(list(checkpoints.glob("step-*"))))
    status = train(run, data, config)
    print(json.dumps({"inside": inside, "checkpoints": alive, "status": status}))


if __name__ == "__main__":
    run, data, config, kills = sys.argv[1:]
    main(Path(run), Path(data), load(RunConfig, json.loads(Path(config).read_text())), int(kills))
