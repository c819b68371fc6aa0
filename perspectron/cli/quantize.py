"""`perspectron quantize`."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from perspectron.cli.options import Json, answer, say_template, table
from perspectron.cli.progress import Work
from perspectron.data import Corpus, Shards, Split, Tokenizer, encode, open_corpus, origin
from perspectron.data.template import Template
from perspectron.model.model import LanguageModel
from perspectron.opening import Opened, describe, load, open_model
from perspectron.quant.convert import Report, convert, linear_for
from perspectron.stream.artifact import expert_files, save_artifact
from perspectron.train.config import TrainConfig
from perspectron.train.heldout import heldout
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, DataError


@dataclass(frozen=True)
class Quantize:
    """Pack a trained model into a few bits per weight, as a folder to use like a run.

    `generate`, `eval` and `inspect` accept it. Dense layers get 2, 4 or 8 bits, embeddings and heads 8. Experts go
    into separate files that can be read one by one: ours become ternary, imported ones are packed like the layers.

    Example: perspectron quantize runs/letters --out runs/letters-2bit

    On another text: perspectron quantize runs/letters --out runs/letters-4bit --linear 4bit --calibrate other.txt
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run or of one of its checkpoints."""
    out: Path
    """Folder to write."""
    calibrate: str | None = None
    """Text to calibrate rounding on (GPTQ): a file, a folder or "stdlib"; "none" rounds each weight to nearest
    (default: the run's training text; of an imported model "stdlib")."""
    windows: int | None = None
    """Number of calibration windows, each as long as in training (default: 128, of an imported model 32)."""
    linear: Literal["2bit", "4bit", "int8", "4bit32", "8bit32"] | None = None
    """Format of the dense layers; 32: with a scale for each 32 columns (default: 2bit, with a
    tokenizer of others, as imported models have, 4bit32)."""
    tokens: int = 0
    """Number of held-out tokens to measure the loss on; 0 is all."""
    json: Json = False

    def __call__(self) -> int:
        require(self.windows is None or self.windows >= 1, "windows", self.windows, "≥ 1")
        require(self.tokens == 0 or self.tokens >= 2, "tokens", self.tokens, "0 or ≥ 2")
        nearest = self.calibrate == "none"
        require(
            self.windows is None or not nearest, "windows", self.windows, "left out with --calibrate none"
        )
        require(not self.out.exists(), "out", str(self.out), "a new folder")
        folder = describe(self.run)
        config = folder.of_run()
        expert_files(folder.model)  # too many are refused now, not when all is packed
        with Work(f"loading {self.run}"):
            opened = open_model(self.run)
        model, tokenizer = opened.model, opened.tokenizer
        imported = not config.train.data
        linear, windows = (
            self.linear or linear_for(tokenizer.specials.reset),
            self.windows or (32 if imported else 128),
        )
        with tempfile.TemporaryDirectory() as scratch:
            shards = None if imported else self._shards(opened, Path(scratch))
            bound = "left out: the run has no text of which some was held out, or it is not at hand"
            require(self.tokens == 0 or shards is not None, "tokens", self.tokens, bound)
            held = None if shards is None else shards.split("heldout")
            calibrate = "stdlib" if imported and self.calibrate is None else self.calibrate
            text = self._text(calibrate, shards, opened, Path(scratch) / "calibrate")
            ids_nT = None if text is None else sampled(text, windows, config.train.seq_len)
            with Work("measuring the held-out loss"):
                before = None if held is None else self._measure(model, held, tokenizer, config.train)
            with Work(f"packing {config.model.name}"):
                report = convert(model, linear, ids_nT)
            with Work(f"writing {self.out}"):
                save_artifact(model, tokenizer, self.out, trained=opened.folder.trained)
                origin.carry(opened.folder.path, self.out)
                if (template := Template.of(opened.folder.path)) is not None:
                    template.save(self.out)
                small, tokenizer = load(self.out)
            with Work("measuring the held-out loss again"):
                after = None if held is None else self._measure(small, held, tokenizer, config.train)
        return self._answer(config.model.name, report, before, after)

    def _shards(self, opened: Opened, scratch: Path) -> Shards | None:
        """The run's own text, if it is at hand."""
        try:
            return opened.shards(scratch)
        except DataError:
            return None

    def _text(
        self, calibrate: str | None, shards: Shards | None, opened: Opened, scratch: Path
    ) -> Split | None:
        if calibrate == "none":
            return None
        if calibrate is not None:
            return encode(_corpus(calibrate, opened), opened.tokenizer, scratch).split("train")
        if shards is None:
            raise ConfigError(
                'calibrate = None, must be given: the run\'s text is not available ("none" rounds to nearest)'
            )
        return shards.split("train")

    def _measure(self, model: LanguageModel, held: Split, tokenizer: Tokenizer, train: TrainConfig) -> float:
        """Held-out bits per byte."""
        limit = self.tokens or None
        return heldout(model, held, tokenizer, seq_len=train.seq_len, limit_tokens=limit).bits_per_byte

    def _answer(self, name: str, report: Report, before: float | None, after: float | None) -> int:
        written = sum(file.stat().st_size for file in self.out.rglob("*") if file.is_file())
        formats = report.bytes | ({"experts": report.expert_bytes} if report.experts else {})
        fields: dict[str, Any] = {
            "model": name, "out": str(self.out), "bytes_before": report.before, "bytes_after": sum(formats.values()),
            "bytes_by_format": formats, "bytes_written": written, "bits_per_byte_before": before,
            "bits_per_byte_after": after, "kept": report.kept,
        }  # fmt: skip
        rows = [
            ("bytes in memory", f"{report.before:,}", f"{sum(formats.values()):,}"),
            *((f"  {format}", "", f"{count:,}") for format, count in formats.items()),
            ("bytes on disk", "", f"{written:,}"),
        ]
        if before is not None and after is not None:
            rows.append(("held-out bits per byte", f"{before:.4f}", f"{after:.4f}"))
        return answer(self.json, fields, table(f"{name} in {self.out}", ("", "before", "after"), rows))


def _corpus(calibrate: str, opened: Opened) -> Corpus:
    """The text to calibrate on. Records without one are chats by the template of the run's training, if it has one."""
    try:
        return open_corpus(calibrate, heldout=0.01)
    except DataError:
        template = origin.template_of_prompts(opened.folder.path)
        if template is None:
            raise
        corpus = open_corpus(calibrate, heldout=0.01, template=template)
        say_template(calibrate, template)
        return corpus


def sampled(split: Split, windows: int, length: int) -> Tensor:
    """Windows of ids [n,T] from all over a text. DataError: it is too short for one."""
    count = min(windows, split.tokens // length)
    if count < 1:
        raise DataError(f"{split.name}: {split.tokens} tokens to calibrate on, must be at least {length}")
    last = split.tokens - length
    starts = [i * last // max(1, count - 1) for i in range(count)]
    return torch.stack([torch.from_numpy(split.read(start, start + length)) for start in starts])
