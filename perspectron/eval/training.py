"""Cost of training a design: tokens a second, in turns with other designs, and memory at its peak.

A step is forward, loss with every term, backward and AdamW, on random tokens. Shapes: B batch, T time.

As a program (`python -m perspectron.eval.training`) it reads one setting as JSON and writes what `_alone` found.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from perspectron.eval.contexts import FREE_SHARE, free
from perspectron.eval.timing import take_turns, timed
from perspectron.model.config import ModelConfig, dump, load, require
from perspectron.model.model import build
from perspectron.train.estimate import PER_LOGIT, PER_PARAMETER
from perspectron.train.optim import OptimConfig, optimizer_of
from perspectron.util.machine import Peak, pick_device, return_memory, trim

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Setting:
    """Windows and tokens of a training step, and its device."""

    batch_size: int = 8
    seq_len: int = 256
    device: str = "cpu"

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "batch_size", self.batch_size, "≥ 1")
        require(self.seq_len >= 1, "seq_len", self.seq_len, "≥ 1")

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len


def check(config: ModelConfig, setting: Setting) -> None:
    """ConfigError where a table of positions is too short."""
    positions = config.positions or setting.seq_len
    bound = f"≤ positions = {positions}, the learned table of {config.name}"
    require(setting.seq_len <= positions, "seq_len", setting.seq_len, bound)


def stepper(config: ModelConfig, setting: Setting) -> Callable[[Dtype], None]:
    """A call of which is one step of a random model."""
    device = pick_device(setting.device)
    model = build(config).to(device).train()
    draw, shape = torch.Generator().manual_seed(0), (setting.batch_size, setting.seq_len + 1)
    ids_BT = torch.randint(config.vocab_size, shape, generator=draw).to(device)
    optimizer = optimizer_of(model, OptimConfig())

    def step(dtype: Dtype) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            objective = model(ids_BT[:, :-1], targets=ids_BT[:, 1:]).objective()
        objective.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_per_step(
    configs: Mapping[str, ModelConfig], setting: Setting, dtypes: Sequence[Dtype], rounds: int
) -> dict[str, dict[Dtype, list[float]]]:
    """Seconds of a step by design and dtype, once a round; all take turns."""
    device = pick_device(setting.device)
    turns: dict[tuple[str, Dtype], Callable[[], float]] = {}
    for name, config in configs.items():
        step = stepper(config, setting)
        for dtype in dtypes:
            turns[name, dtype] = timed(partial(step, dtype), device)
    seconds = take_turns(turns, rounds)
    return {name: {dtype: seconds[name, dtype] for dtype in dtypes} for name in configs}


# Memory


def peaks(configs: Mapping[str, ModelConfig], setting: Setting, dtype: Dtype) -> dict[str, int | str]:
    """Bytes by which memory rises in the first step, weights, gradients and optimizer included, or why there is no
    answer. Each in a process of its own."""
    beside = asdict(setting) | {"dtype": dtype, "threads": torch.get_num_threads()}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    answers: dict[str, int | str] = {}
    for name, config in configs.items():
        done = subprocess.run(
            [sys.executable, "-m", "perspectron.eval.training"], input=json.dumps({"config": dump(config)} | beside),
            capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        answers[name] = (
            f"exit code {done.returncode}: {last[0]}" if done.returncode else json.loads(done.stdout)
        )
    return answers


def _alone(spec: dict[str, Any]) -> int | str:
    """The peak of one step in this process, or why it was not made."""
    config = load(ModelConfig, spec["config"])
    setting = Setting(spec["batch_size"], spec["seq_len"], spec["device"])
    device = pick_device(setting.device)
    torch.set_num_threads(spec["threads"])
    torch.set_flush_denormal(True)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(config).parameters())
    needs = PER_PARAMETER * parameters + PER_LOGIT * setting.tokens * config.vocab_size
    if needs > FREE_SHARE * (there := free(device)):
        return f"needs {needs / 1e9:.1f} GB or more, over half of the {there / 1e9:.1f} GB free"
    return_memory()
    few = replace(setting, batch_size=1, seq_len=min(16, setting.seq_len))
    stepper(config, few)(spec["dtype"])  # loads libraries
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        stepper(config, setting)(spec["dtype"])
        return torch.cuda.max_memory_allocated(device) - before
    trim()
    with Peak() as peak:
        stepper(config, setting)(spec["dtype"])
    return "this system does not tell" if peak.bytes is None else peak.bytes


if __name__ == "__main__":
    try:
        answer: object = _alone(json.load(sys.stdin))
    except Exception as error:
        answer = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    print(json.dumps(answer))
