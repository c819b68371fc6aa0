"""`perspectron eval`."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

import perspectron
from perspectron.config import require
from perspectron.data import Split, Tokenizer, encode, open_corpus
from perspectron.device import pick_device
from perspectron.eval.perplexity import Heldout, compressors, heldout
from perspectron.train import checkpoint
from perspectron.train.prepare import prepare


@dataclass(frozen=True)
class Eval:
    """Held-out loss of a run, in bits per byte and perplexity, beside gzip and xz on the same bytes.

    Example: perspectron eval runs/quickstart/perspective

    Another text, with the run's tokenizer: perspectron eval runs/quickstart/perspective --data letters.txt --json
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, or of one of its checkpoints."""
    data: str | None = None
    """Another corpus instead of the run's; its held-out part is measured."""
    heldout: float = 0.5
    """With --data: which share of it to hold out."""
    seq_len: int | None = None
    """Tokens in a window (default: as in training)."""
    carry: bool = False
    """Let the state go on from window to window; only a document's start empties it."""
    tokens: int = 0
    """Measure the first so many tokens; 0 is all."""
    device: str = "auto"
    """ "auto" is CUDA where there is one."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        require(self.seq_len is None or self.seq_len >= 1, "seq_len", self.seq_len, "≥ 1")
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        model, tokenizer = perspectron.load(self.run)
        model.to(pick_device(self.device))
        config = checkpoint.load_config(checkpoint.run_of(self.run))
        with tempfile.TemporaryDirectory() as scratch:
            split = self._split(tokenizer, Path(scratch))
            result = heldout(
                model,
                split,
                tokenizer,
                seq_len=self.seq_len or config.train.seq_len,
                limit_tokens=self.tokens or None,
                carry=self.carry,
                dtype=torch.bfloat16 if config.train.dtype == "bfloat16" else None,
            )
            others = compressors(text_of(split, tokenizer, result.tokens + 1))
        if self.json:
            print(json.dumps(asdict(result) | {"compressors": others}))
        else:
            print(report(config.model.name, result, others))
        return 0

    def _split(self, tokenizer: Tokenizer, scratch: Path) -> Split:
        if self.data is not None:
            return encode(open_corpus(self.data, self.heldout), tokenizer, scratch).split("heldout")
        run = checkpoint.run_of(self.run)
        config = checkpoint.load_config(run)
        return prepare(run, config)[1].split("heldout")


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
