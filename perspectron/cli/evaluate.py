"""`perspectron eval`."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

from perspectron.cli.artifacts import open_model
from perspectron.config import require
from perspectron.data import Split, Tokenizer, encode, open_corpus, open_shards
from perspectron.device import pick_device
from perspectron.eval.perplexity import Heldout, compressors, heldout
from perspectron.model import LanguageModel
from perspectron.stream.artifact import Trained
from perspectron.stream.engine import StreamedModel
from perspectron.train import checkpoint
from perspectron.train.prepare import prepare

SEQ_LEN = 128  # of a window, where nothing says how long they were in training


@dataclass(frozen=True)
class Eval:
    """Held-out loss of a run, in bits per byte and perplexity, beside gzip and xz on the same bytes.

    Example: perspectron eval runs/quickstart/perspective

    Another text, with the run's tokenizer: perspectron eval runs/quickstart/perspective --data letters.txt --json
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of an artifact."""
    data: str | None = None
    """Another corpus instead of the one of training; its held-out part is measured."""
    heldout: float = 0.5
    """With --data: which share of it to hold out."""
    seq_len: int | None = None
    """Tokens in a window (default: as in training)."""
    carry: bool = False
    """Let the state go on from window to window; only a document's start empties it."""
    tokens: int = 0
    """Measure the first so many tokens; 0 is all."""
    cache: str | None = None
    """Memory for the experts of an artifact, as 512M or 2G (default: what the machine has free)."""
    device: str = "auto"
    """ "auto" is CUDA where there is one."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        require(self.seq_len is None or self.seq_len >= 1, "seq_len", self.seq_len, "≥ 1")
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        model, tokenizer = open_model(self.run, self.cache)
        model.to(pick_device(self.device))
        trained, dtype = self._trained(model)
        with tempfile.TemporaryDirectory() as scratch:
            split = self._split(model, tokenizer, trained, Path(scratch))
            result = heldout(
                model,
                split,
                tokenizer,
                seq_len=self.seq_len or trained.seq_len,
                limit_tokens=self.tokens or None,
                carry=self.carry,
                dtype=dtype,
            )
            others = compressors(text_of(split, tokenizer, result.tokens + 1))
        if self.json:
            print(json.dumps(asdict(result) | {"compressors": others}))
        else:
            print(report(model.config.name, result, others))
        return 0

    def _trained(self, model: LanguageModel) -> tuple[Trained, torch.dtype | None]:
        """The text and the window of training, and what to compute in."""
        if isinstance(model, StreamedModel):
            return model.header.trained or Trained("", self.heldout, SEQ_LEN), None
        train = checkpoint.load_config(checkpoint.run_of(self.run)).train
        dtype = torch.bfloat16 if train.dtype == "bfloat16" else None
        return Trained(train.data, train.heldout, train.seq_len), dtype

    def _split(self, model: LanguageModel, tokenizer: Tokenizer, trained: Trained, scratch: Path) -> Split:
        if self.data is not None:
            return encode(open_corpus(self.data, self.heldout), tokenizer, scratch).split("heldout")
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


def text_of(split: Split, tokenizer: Tokenizer, tokens: int) -> bytes:
    """The bytes that the first `tokens` ids of a split stand for."""
    return b"".join(map(tokenizer.token_bytes, split.read(0, tokens).tolist()))


def report(name: str, result: Heldout, others: dict[str, float]) -> str:
    """Lines for a person."""
    lines = [
        f"{name}: {result.bits_per_byte:.3f} bits per byte, perplexity {result.perplexity:.1f} per token"
    ]
    lines += [f"{other}: {bits:.3f} bits per byte" for other, bits in others.items()]
    return "\n".join([*lines, f"over {result.text_bytes:,} held-out bytes, {result.tokens:,} tokens"])
