"""`perspectron quantize`."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import perspectron
from perspectron.config import require
from perspectron.data import Shards, Split, Tokenizer, encode, open_corpus
from perspectron.errors import ConfigError, DataError
from perspectron.eval.perplexity import heldout
from perspectron.model import LanguageModel
from perspectron.quant.convert import QuantConfig, Report, convert
from perspectron.stream.artifact import Trained, is_artifact, save_artifact
from perspectron.train import checkpoint
from perspectron.train.config import TrainConfig
from perspectron.train.prepare import prepare


@dataclass(frozen=True)
class Quantize:
    """A trained model in few bits, as a folder that `generate`, `eval` and `inspect` take like a run.

    Dense layers in 2, 4 or 8 bits, embeddings and heads in 8, experts ternary and in files of their own, to be read
    one by one.

    Example: perspectron quantize runs/routed --out runs/routed-2bit

    On another text: perspectron quantize runs/gpt2 --out runs/gpt2-4bit --linear 4bit --calibrate letters.txt
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, or of one of its checkpoints."""
    out: Path
    """Folder to write."""
    calibrate: str | None = None
    """Text on which rounding is calibrated (GPTQ): a file, a folder or "stdlib"; "none" rounds each weight to the
    nearest (default: the run's own training text)."""
    windows: int = 128
    """Of that text, each as long as in training."""
    linear: Literal["2bit", "4bit", "int8"] = "2bit"
    """Format of the dense layers."""
    deltas: bool = False
    """Store an expert as its changes from a neighbour on the torus where that is smaller."""
    tokens: int = 0
    """Measure held-out loss on the first so many tokens; 0 is all."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        require(self.windows >= 1, "windows", self.windows, "≥ 1")
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(not self.out.exists(), "out", str(self.out), "a new folder")
        require(not is_artifact(self.run), "run", str(self.run), "a run: an artifact is in few bits already")
        model, tokenizer = perspectron.load(self.run)
        run = checkpoint.run_of(self.run)
        config = checkpoint.load_config(run)
        trained = Trained(config.train.data, config.train.heldout, config.train.seq_len)
        with tempfile.TemporaryDirectory() as scratch:
            shards = self._shards(run)
            held = None if shards is None else shards.split("heldout")
            text = self._text(shards, tokenizer, Path(scratch) / "calibrate")
            ids_nT = None if text is None else sampled(text, self.windows, config.train.seq_len)
            before = None if held is None else self._measure(model, held, tokenizer, config.train)
            report = convert(model, QuantConfig(linear=self.linear), ids_nT)
            save_artifact(model, tokenizer, self.out, deltas=self.deltas, trained=trained)
            small, tokenizer = perspectron.load(self.out)
            after = None if held is None else self._measure(small, held, tokenizer, config.train)
        self._print(config.model.name, report, before, after)
        return 0

    def _shards(self, run: Path) -> Shards | None:
        """The run's own text, if it is at hand."""
        try:
            return prepare(run, checkpoint.load_config(run))[1]
        except DataError:
            return None

    def _text(self, shards: Shards | None, tokenizer: Tokenizer, scratch: Path) -> Split | None:
        if self.calibrate == "none":
            return None
        if self.calibrate is not None:
            return encode(open_corpus(self.calibrate, heldout=0.01), tokenizer, scratch).split("train")
        if shards is None:
            raise ConfigError(
                'calibrate = None, must be given: the run\'s text is not at hand ("none": round)'
            )
        return shards.split("train")

    def _measure(self, model: LanguageModel, held: Split, tokenizer: Tokenizer, train: TrainConfig) -> float:
        """Held-out bits per byte."""
        limit = self.tokens or None
        return heldout(model, held, tokenizer, seq_len=train.seq_len, limit_tokens=limit).bits_per_byte

    def _print(self, name: str, report: Report, before: float | None, after: float | None) -> None:
        written = sum(file.stat().st_size for file in self.out.rglob("*") if file.is_file())
        fields: dict[str, Any] = {
            "model": name,
            "out": str(self.out),
            "bytes_before": report.before,
            "bytes_after": sum(report.bytes.values()) + report.expert_bytes,
            "bytes_by_format": report.bytes | ({"experts": report.expert_bytes} if report.experts else {}),
            "bytes_written": written,
            "bits_per_byte_before": before,
            "bits_per_byte_after": after,
            "kept": report.kept,
        }
        if self.json:
            print(json.dumps(fields))
        else:
            Console(highlight=False).print(_table(fields))


def sampled(split: Split, windows: int, length: int) -> Tensor:
    """Windows of ids [n,T] from all over a text. DataError: it is too short for one."""
    count = min(windows, split.tokens // length)
    if count < 1:
        raise DataError(f"{split.name}: {split.tokens} tokens to calibrate on, must be at least {length}")
    last = split.tokens - length
    starts = [i * last // max(1, count - 1) for i in range(count)]
    return torch.stack([torch.from_numpy(split.read(start, start + length)) for start in starts])


def _table(fields: dict[str, Any]) -> Table:
    table = Table(title=f"{fields['model']} in {fields['out']}", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_row("bytes in memory", f"{fields['bytes_before']:,}", f"{fields['bytes_after']:,}")
    for format, count in fields["bytes_by_format"].items():
        table.add_row(f"  {format}", "", f"{count:,}")
    table.add_row("bytes on disk", "", f"{fields['bytes_written']:,}")
    bits = [fields["bits_per_byte_before"], fields["bits_per_byte_after"]]
    if None not in bits:
        table.add_row("held-out bits per byte", *(f"{value:.4f}" for value in bits))
    return table
