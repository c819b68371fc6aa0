"""What test_resume starts as another process: `driver.py RUN DATA CONFIG KILLS`.

Trains RUN to its end in forked children. The first KILLS of them are killed with SIGKILL: in turn anywhere
after their start, in the midst of a step, and while they write a checkpoint. Prints a JSON summary.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from perspectron.config import load
from perspectron.data import Tokenizer, open_shards
from perspectron.train.config import RunConfig
from perspectron.train.loop import Trainer

torch.set_num_threads(1)
KINDS = ("anywhere", "step", "save")


def train(run: Path, data: Path, config: RunConfig) -> int:
    """Fork a child that goes on with the run to its end; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        Trainer(run, config, Tokenizer.load(data / "tokenizer.json"), open_shards(data)).fit()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def wait_for(seen, child: int) -> None:
    """Poll until `seen()`; give up when the child ended (that is a failure: it had steps left)."""
    limit = time.monotonic() + 60
    while not seen():
        time.sleep(0.0005)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) or time.monotonic() > limit:
            raise SystemExit("the child ended before it could be killed")


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main(run: Path, data: Path, config: RunConfig, kills: int) -> None:
    Trainer(run.with_name("warm-up"), config, Tokenizer.load(data / "tokenizer.json"), open_shards(data))
    draw = random.Random(0)  # torch has now loaded what it loads late, so that children start fast
    checkpoints, inside, alive = run / "checkpoints", 0, []
    for number in range(kills):
        kind = KINDS[number % len(KINDS)]
        before = size(run / "metrics.jsonl")
        child = train(run, data, config)
        if kind == "save":
            halves = f".{child}-*.tmp"
            wait_for(lambda halves=halves: any(checkpoints.glob(halves)), child)
            time.sleep(draw.choice([0, draw.uniform(0, 0.003), draw.uniform(0, 0.01)]))
        elif kind == "step":
            grown = 200 * draw.randint(1, 3)  # a line is about that long
            wait_for(lambda more=before + grown: size(run / "metrics.jsonl") >= more, child)
            time.sleep(draw.uniform(0, 0.01))
        else:
            end, enough = time.monotonic() + draw.uniform(0, 0.15), before + 600
            wait_for(lambda e=end, s=enough: time.monotonic() > e or size(run / "metrics.jsonl") > s, child)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"kill {number}: the child ended by itself, status {status}")
        inside += any(checkpoints.glob(".*.tmp"))
        alive.append(len(list(checkpoints.glob("step-*"))))
    _, status = os.waitpid(train(run, data, config), 0)
    print(json.dumps({"inside": inside, "checkpoints": alive, "status": status}))


if __name__ == "__main__":
    run, data, config, kills = sys.argv[1:]
    main(Path(run), Path(data), load(RunConfig, json.loads(Path(config).read_text())), int(kills))
