"""The subject of a suite: an opened model and a text that it has not seen."""

from dataclasses import dataclass

from perspectron.data.shards import Split
from perspectron.data.tokenizer import Tokenizer
from perspectron.model.model import LanguageModel
from perspectron.opening import Opened


@dataclass(frozen=True)
class Subject:
    """An opened model and the text it has not seen.

    split: held-out text; None for suites that read none. seq_len: tokens of a window, as in training. seed: of what a
    suite draws.
    """

    opened: Opened
    split: Split | None
    seq_len: int
    seed: int = 0

    @property
    def model(self) -> LanguageModel:
        return self.opened.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.opened.tokenizer

    @property
    def text(self) -> Split:
        """The held-out text, for suites that read it."""
        assert self.split is not None
        return self.split
