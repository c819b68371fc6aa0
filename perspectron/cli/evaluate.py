"""`perspectron eval`."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from perspectron.cli.options import (
    Cache,
    Device,
    Json,
    OpenedFrom,
    Sets,
    answer,
    assignments,
    open_model,
    say,
    say_template,
)
from perspectron.cli.progress import Work
from perspectron.data import Split, encode, open_corpus, with_encoding
from perspectron.data.origin import template_of_prompts
from perspectron.eval.subject import Subject
from perspectron.eval.suites import Suite, suite_of
from perspectron.opening import Opened
from perspectron.util.config import load, require

HELDOUT = 0.5  # share of another text that is held out
SEQ_LEN = 128  # tokens of a window where nothing says how long they were in training


@dataclass(frozen=True)
class Eval:
    """Measure a run: held-out loss in bits per byte, in windows and with memory carried, beside compressors, or another
    suite.

    Example: perspectron eval runs/letters

    Another text, with the run's tokenizer: perspectron eval runs/letters --data other.txt --json

    Another suite: perspectron eval runs/letters --suite calibration --set bins=10
    """

    FIRST: ClassVar[tuple[str, ...]] = ("--suite", "--set", "--data", "--tokens", "--json")
    run: OpenedFrom
    suite: str = "perplexity"
    """perplexity, position, calibration, robustness, cost, recall, conversation, conversion (of a run
    that `convert` made), perspectives or depth."""
    set: Sets = ()
    """Options of the suite, as KEY=VALUE."""
    data: str | None = None
    """Another corpus instead of the training corpus; its held-out part is measured."""
    encoding: str = ""
    """Encoding of --data, such as utf-16, latin-1 or cp1252 (default: UTF-8)."""
    heldout: float | None = None
    """Share of --data to hold out (default: half)."""
    seq_len: int | None = None
    """Tokens in a window, and of the ring that attention has with memory carried (default: as in training)."""
    tokens: int | None = None
    """Number of tokens to measure, in suite perplexity from the start, in others from all over the text; 0 is all
    (default: all, or fewer in the other suites)."""
    cache: Cache = None
    device: Device = "auto"
    seed: int | None = None
    """Seed of a suite's random numbers (default: 0)."""
    json: Json = False

    def __call__(self) -> int:
        suite = suite_of(self.suite)
        require(self.seq_len is None or self.seq_len >= 1, "seq_len", self.seq_len, "≥ 1")
        require(self.tokens is None or self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(self.heldout is None or 0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2⁶³)")
        self._refuse_what_does_nothing(suite)
        options = self._options(suite)
        opened = open_model(self.run, self.cache, device=self.device)
        trained = opened.folder.trained
        with tempfile.TemporaryDirectory() as scratch:
            with Work("reading the text"):
                split = self._heldout(opened, Path(scratch)) if suite.reads_text else None
            seq_len = self.seq_len or (SEQ_LEN if trained is None else trained.seq_len)
            with Work(f"measuring {self.suite}"):
                result = suite.code.measure(Subject(opened, split, seq_len, self.seed or 0), options)
        first, *lines = suite.code.lines(result)
        return answer(self.json, result, f"{opened.folder.model.name}: {first}", *lines)

    def _refuse_what_does_nothing(self, suite: Suite) -> None:
        """ConfigError for an option that does nothing in this suite."""
        texts, name = ("data", "heldout", "seq_len"), f"left out with suite {self.suite}, which"
        for field in texts if not suite.reads_text else ():
            value = getattr(self, field)
            require(value is None, field, value, f"{name} reads no text")
        require(suite.windows or self.seq_len is None, "seq_len", self.seq_len, f"{name} reads no windows")
        for field, value in (("heldout", self.heldout), ("encoding", self.encoding or None)):
            require(value is None or self.data is not None, field, value, "left out without --data")
        require(suite.draws or self.seed is None, "seed", self.seed, f"{name} does not depend on it")

    def _options(self, suite: Suite) -> Any:
        """The suite's options. ConfigError for one that it does not have."""
        values = assignments(self.set)
        if self.tokens is not None:
            values["tokens"] = self.tokens
        return load(suite.code.Options, values, f"suite {self.suite}")

    def _heldout(self, opened: Opened, scratch: Path) -> Split:
        """The text to measure on: that of --data, else what training held out."""
        if self.data is None:
            return opened.shards(scratch).split("heldout")
        source, share = with_encoding(self.data, self.encoding), self.heldout or HELDOUT
        template = template_of_prompts(opened.folder.path)
        corpus = open_corpus(source, share, template=template)
        say_template(self.data, template)
        shards = encode(corpus, opened.tokenizer, scratch)
        for line in corpus.notes():
            say(line)
        return shards.split("heldout")
