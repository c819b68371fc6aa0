"""A run as what the suites of `perspectron.eval` measure."""

from pathlib import Path

import torch

from perspectron.device import pick_device
from perspectron.eval.subject import Subject
from perspectron.train import checkpoint
from perspectron.train.prepare import prepare


def open_subject(run: Path, *, device: str = "auto", seed: int = 0) -> Subject:
    """The best checkpoint of a run, or the one whose folder `run` is, on the text and in the precision of training.

    Errors as `checkpoint.load_run` and `prepare` raise them; ConfigError for a device that is not there.
    """
    model, tokenizer = checkpoint.load_run(run)
    folder = checkpoint.run_of(run)
    config = checkpoint.load_config(folder)
    return Subject(
        run=run,
        model=model.to(pick_device(device)),
        tokenizer=tokenizer,
        split=prepare(folder, config)[1].split("heldout"),
        seq_len=config.train.seq_len,
        dtype=dtype_of(folder),
        seed=seed,
    )


def dtype_of(run: Path) -> torch.dtype | None:
    """What a run computes in, as in training; None is float32, without autocast. Errors as `checkpoint.load_config`."""
    dtype = checkpoint.load_config(checkpoint.run_of(run)).train.dtype
    return torch.bfloat16 if dtype == "bfloat16" else None
