"""`perspectron eval`."""

import json
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import tyro

from perspectron.cli.artifacts import open_model
from perspectron.cli.train import assignment
from perspectron.config import load, one_of, require
from perspectron.data import Split, Tokenizer, encode, open_corpus, open_shards
from perspectron.device import pick_device
from perspectron.eval.subject import Subject
from perspectron.eval.suites import SUITES, Suite, plain
from perspectron.model import LanguageModel
from perspectron.stream.artifact import Trained
from perspectron.stream.engine import StreamedModel
from perspectron.train import checkpoint
from perspectron.train.prepare import prepare
from perspectron.train.subject import dtype_of

HELDOUT = 0.5  # of another text
SEQ_LEN = 128  # of a window, where nothing says how long they were in training


@dataclass(frozen=True)
class Eval:
    """Measure a run: held-out loss in bits per byte beside gzip and xz, or another suite.

    Example: perspectron eval runs/quickstart/perspective

    Another text, with the run's tokenizer: perspectron eval runs/quickstart/perspective --data letters.txt --json

    Another measure: perspectron eval runs/quickstart/perspective --suite calibration --set bins=10
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of an artifact."""
    suite: str = "perplexity"
    """perplexity, position, calibration, robustness, cost or recall."""
    set: tuple[str, ...] = ()
    """Options of the suite, as KEY=VALUE."""
    data: str | None = None
    """Another corpus instead of the one of training; its held-out part is measured."""
    heldout: float | None = None
    """With --data: which share of it to hold out (default: half)."""
    seq_len: int | None = None
    """Tokens in a window (default: as in training)."""
    carry: bool = False
    """Of perplexity: let the state go on from window to window; only a document's start empties it."""
    tokens: int | None = None
    """Measure the first so many tokens; 0 is all (default: all, or as many as are quick in another suite)."""
    cache: str | None = None
    """Memory for the experts of an artifact, as 512M or 2G (default: what the machine has free)."""
    device: str = "auto"
    """ "auto" is CUDA where there is one."""
    seed: int | None = None
    """Of what a suite draws (default: 0)."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        suite = SUITES[one_of(self.suite, SUITES, "suite")]
        require(self.seq_len is None or self.seq_len >= 1, "seq_len", self.seq_len, "≥ 1")
        require(self.tokens is None or self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(self.heldout is None or 0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2⁶³)")
        self._refuse_what_does_nothing(suite)
        options = self._options(suite)
        model, tokenizer = open_model(self.run, self.cache)
        model.to(pick_device(self.device))
        trained, dtype = self._trained(model)
        with tempfile.TemporaryDirectory() as scratch:
            split = self._split(model, tokenizer, trained, Path(scratch)) if suite.reads_text else None
            seq_len = self.seq_len or trained.seq_len
            subject = Subject(self.run, model, tokenizer, split, seq_len, dtype, self.seed or 0)
            result = suite.measure(subject, options)
        if self.json:
            print(json.dumps(plain(result)))
        else:
            print(f"{model.config.name}: " + "\n".join(suite.lines(result)))
        return 0

    def _refuse_what_does_nothing(self, suite: Suite) -> None:
        """ConfigError for what was given and does nothing in this suite."""
        texts, name = ("data", "heldout", "seq_len"), f"left out with suite {self.suite}, which"
        for field in texts if not suite.reads_text else ():
            value = getattr(self, field)
            require(value is None, field, value, f"{name} reads no text")
        require(
            self.heldout is None or self.data is not None, "heldout", self.heldout, "left out without --data"
        )
        require(suite.draws or self.seed is None, "seed", self.seed, f"{name} does not depend on it")
        require(suite.on_device or self.device == "auto", "device", self.device, f"{name} runs on the CPU")

    def _options(self, suite: Suite) -> Any:
        """The suite's options, as given. ConfigError for one that it does not have."""
        given = dict(map(assignment, self.set))
        known = [field.name for field in fields(suite.options)]
        if self.carry:
            given["carry"] = True
        if self.tokens is not None:
            given["tokens"] = self.tokens
        for name in given:
            bound = f"one of {', '.join(known)}" if known else "left out, it has none"
            require(name in known, f"option of suite {self.suite}", name, bound)
        return load(suite.options, given, f"suite {self.suite}")

    def _trained(self, model: LanguageModel) -> tuple[Trained, torch.dtype | None]:
        """The text and the window of training, and what to compute in."""
        if isinstance(model, StreamedModel):
            return model.header.trained or Trained("", HELDOUT, SEQ_LEN), None
        train = checkpoint.load_config(checkpoint.run_of(self.run)).train
        return Trained(train.data, train.heldout, train.seq_len), dtype_of(self.run)

    def _split(self, model: LanguageModel, tokenizer: Tokenizer, trained: Trained, scratch: Path) -> Split:
        if self.data is not None:
            return encode(open_corpus(self.data, self.heldout or HELDOUT), tokenizer, scratch).split(
                "heldout"
            )
        if isinstance(model, StreamedModel):
            require(
                trained.data != "", "data", None, "given: the artifact does not say what it was trained on"
            )
            return heldout_of(trained, tokenizer, scratch)
        run = checkpoint.run_of(self.run)
        return prepare(run, checkpoint.load_config(run))[1].split("heldout")


def heldout_of(trained: Trained, tokenizer: Tokenizer, scratch: Path) -> Split:
    """The held-out text of a training."""
    if (Path(trained.data) / "manifest.json").is_file():
        return open_shards(Path(trained.data)).split("heldout")
    return encode(open_corpus(trained.data, trained.heldout), tokenizer, scratch).split("heldout")
