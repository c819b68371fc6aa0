"""Loggers beside metrics.jsonl: TensorBoard, Weights & Biases, and Trackio.

All losses are in bits per byte. Each package is imported when it is asked for.
"""

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from perspectron.data import Split
from perspectron.train.config import RunConfig
from perspectron.train.metrics import bits_per_nat, read_metrics
from perspectron.util.config import dump

Kind = Literal["", "tensorboard", "wandb", "trackio"]
PROJECT = "perspectron"
Log = Callable[[dict[str, float], int], object]


@contextlib.contextmanager
def logger(
    kind: Kind, run: Path, config: RunConfig, text: Split, step: int
) -> Iterator[Callable[[Any], None]]:
    """Yield a function that logs lines of metrics of a run that goes on from `step`; for "" it does nothing.

    text: the training text, whose bytes per token turn nats into bits per byte; for completions, whose bytes lack those
    of the prompts, the last measurement does, and before it the loss is left out. An error of the logger itself ends
    the logging, with a warning, and not the training.
    """
    bits: float | None = text.tokens / max(1, text.text_bytes) / math.log(2)
    if text.learned is not None:
        bits = bits_per_nat(read_metrics(run)) if kind else None
    with contextlib.ExitStack() as stack:
        log: Log | None = None

        def tell(work: Callable[[], Any]) -> Any:
            nonlocal log
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    return work()
            except Exception as error:
                log = None
                warnings.warn(f"{kind}: {error}; metrics.jsonl goes on", stacklevel=2)

        if kind:
            opened = tell(lambda: OPEN[kind](run, config, step))
            if opened is not None:
                log, close = opened
                stack.callback(tell, close)

        def take(line: dict[str, Any]) -> None:
            nonlocal bits
            if text.learned is not None:
                bits = bits_per_nat([line]) or bits
            if log is not None:
                tell(lambda: log(values(line, bits), line["step"]))

        yield take


def values(line: dict[str, Any], bits: float | None) -> dict[str, float]:
    """A line of metrics by the names that loggers group by. bits: bits per byte of a nat per token, if known."""
    if "loss" not in line:
        return {
            f"{split}/bits_per_byte": line[name]
            for split in ("heldout", "dev")
            if (name := f"{split}_bits_per_byte") in line
        }
    found = {f"train/{name}": line[name] for name in ("lr", "grad_norm", "tokens", "tokens_per_second")}
    terms = {f"terms/{name}": value for name, value in line.get("aux", {}).items()}
    return found | terms | ({} if bits is None else {"train/bits_per_byte": bits * line["loss"]})


def _tensorboard(run: Path, config: RunConfig, step: int) -> tuple[Log, Callable[[], object]]:
    """Log into RUN/tensorboard; what an earlier process logged after `step` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(run: Path, config: RunConfig, step: int) -> tuple[Log, Callable[[], object]]:
    """Log into RUN/wandb; WANDB_MODE=offline keeps it there."""
    import wandb

    return _begun(wandb, config, name=run.name, id=config.id, dir=str(run))


def _trackio(run: Path, config: RunConfig, step: int) -> tuple[Log, Callable[[], object]]:
    """Log into Trackio's own folder on this machine (TRACKIO_DIR)."""
    import trackio

    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    return _begun(trackio, config, name=f"{run.name}-{config.id[:8]}", **quiet)


def _begun(library: Any, config: RunConfig, **options: Any) -> tuple[Log, Callable[[], object]]:
    """Log by wandb, or by a library with its interface."""
    begun = library.init(project=PROJECT, config=dump(config), resume="allow", **options)
    return lambda values, step: begun.log(values, step=step), begun.finish


OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
