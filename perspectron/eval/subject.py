"""What a suite measures."""

from dataclasses import dataclass
from pathlib import Path

import torch

from perspectron.data.shards import Split
from perspectron.data.tokenizer import Tokenizer
from perspectron.model import LanguageModel


@dataclass(frozen=True)
class Subject:
    """A model and the text it has not seen; `perspectron.train.subject` opens that of a run.

    run: its folder. split: held-out text; None for suites that read none. seq_len: tokens of a window, as in training.
    dtype: autocast to it; None is none. seed: of what a suite draws.
    """

    run: Path
    model: LanguageModel
    tokenizer: Tokenizer
    split: Split | None
    seq_len: int
    dtype: torch.dtype | None = None
    seed: int = 0

    @property
    def text(self) -> Split:
        """The held-out text, for suites that read it."""
        assert self.split is not None
        return self.split
