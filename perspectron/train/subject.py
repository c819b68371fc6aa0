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
        dtype=torch.bfloat16 if config.train.dtype == "bfloat16" else None,
        seed=seed,
    )
