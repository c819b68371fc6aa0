"""`perspectron convert`."""

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import tyro

from perspectron.cli.console import progress
from perspectron.cli.fit import fit_with_a_bar, nothing_left
from perspectron.cli.options import Device, answer, count, print_json, table
from perspectron.cli.progress import Work
from perspectron.data import Tokenizer, absolute, open_shards
from perspectron.data.template import OWN, PLAIN
from perspectron.opening import describe
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.convert.build import in_place, student
from perspectron.train.convert.config import SHARES, TEXT, WINDOW, ConvertConfig, fitting, require_both
from perspectron.train.convert.run import Conversion, config_of, noted
from perspectron.train.estimate import slow
from perspectron.train.loop import Trainer
from perspectron.train.pace import Pace
from perspectron.train.prepare import held_out_before, prepare
from perspectron.util.config import require
from perspectron.util.errors import ConfigError
from perspectron.util.files import locked, remove
from perspectron.util.machine import memory_kept, pick_device

MINUTES = 10.0  # where nothing says how long


@dataclass(frozen=True)
class Convert:
    """Turn a model with attention into one with a recurrence in most layers, which learns from it.

    Example: perspectron convert runs/letters --to gdn --out runs/recurrent

    Resume after an interruption: perspectron convert --resume runs/recurrent

    What was lost, by position and in recall, and what is gained: perspectron eval runs/recurrent --suite conversion
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--to", "--data", "--out", "--template", "--keep-attention", "--window", "--minutes", "--tokens",
        "--teacher-mix", "--resume",
    )  # fmt: skip
    run: tyro.conf.Positional[Path | None] = None
    """Folder of a run with attention, trained here or imported."""
    to: str = "perspective2"
    """Design whose recurrence takes the place of attention: perspective2, gdn, kda, gla, ssd or rwkv7."""
    data: str = ""
    """Text to learn from, as `train` takes it (default: the one that the run was trained on)."""
    template: str = ""
    """Chat template for a text of prompts and completions or of messages, as `train` takes it: "own" is the run's
    (default: "own" if the run was trained with a template, and on this text)."""
    out: Path | None = None
    """New folder of the run."""
    keep_attention: int = 4
    """Keep attention in one of so many attention layers, those that are costly to convert; 0 is none."""
    window: int | None = None
    """Tokens that attention which is kept sees; 0 leaves it as it is (default: 512, or the run's window in training,
    if that is shorter)."""
    minutes: float | None = None
    """End after this many minutes (default: 10, if --tokens is not given)."""
    tokens: str | None = None
    """Train on this many tokens in all, such as 2M, instead of --minutes."""
    teacher_mix: float = 1.0
    """Share of the teacher's distribution in the loss of stage `whole`; the rest is the text's."""
    resume: Path | None = None
    """Folder of a conversion to resume; all other options come from there."""
    seed: int = 0
    """Seed of new weights and of the order of the text."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast, as `train` has it."""
    device: Device = "auto"
    json: bool = False
    """Print JSON lines."""

    def __call__(self) -> int:
        began = time.monotonic()
        if self.resume is not None:
            typed = replace(self, resume=None, json=False)
            require(typed == Convert(), "resume", str(self.resume), "alone: all else comes from there")
            return self._go(self.resume, config_of(self.resume), None)
        if self.run is None or self.out is None:
            raise ConfigError("convert needs RUN and --out DIR, or --resume DIR")
        require(not self.out.exists(), "out", str(self.out), "a new folder; or use --resume")
        with Work("planning"):
            config = self._asked(self.run)
        return self._go(self.out, config, began)

    def _asked(self, run: Path) -> ConvertConfig:
        """The conversion that the options ask for. ConfigError, before a weight is read, if it is not possible."""
        described = describe(run)
        trained, model = described.of_run().train, described.model
        minutes = MINUTES if self.minutes is None and self.tokens is None else self.minutes or 0.0
        require(self.keep_attention != 1, "keep_attention", 1, "0 or ≥ 2: of 1, nothing is converted")
        layers = list(in_place(model, self.to))
        bound = "0: attention stays in at least one layer, and here is only one"
        require(self.keep_attention == 0 or len(layers) > 1, "keep_attention", self.keep_attention, bound)
        require(bool(self.data or trained.data), "data", None, "given: the run does not name its text")
        device, data = pick_device(self.device), absolute(self.data or trained.data)
        tokens = 0 if self.tokens is None else count(self.tokens, "tokens")
        window = min(WINDOW, trained.seq_len) if trained.data else WINDOW
        share = trained.heldout if trained.data else ConvertConfig.heldout
        share = min([share, *held_out_before(TrainConfig(data=data, init=str(run.resolve())))])
        template = self.template or (OWN if trained.template and data == trained.data else "")
        plain = data == trained.data and not trained.template
        bound = f"left out: {run} was trained on this text without one; or name another text"
        require(not (template and plain), "template", template, bound)
        if template not in ("", PLAIN, OWN) and Path(template).exists():
            template = str(Path(template).resolve())
        config = ConvertConfig(
            str(run.resolve()), self.to, data, self.keep_attention,
            window if self.window is None else self.window, tokens, minutes,
            *fitting(model, trained, tokens, device),
            heldout=share, seed=self.seed, dtype=self.dtype, device=self.device,
            template=template, teacher_mix=self.teacher_mix,
        )  # fmt: skip
        for stage in SHARES if config.tokens else ():
            config.steps(stage, model.positions)
        require_both(model, student(model, self.to, layers, config.window), config, device)
        return config

    def _go(self, run: Path, config: ConvertConfig, began: float | None) -> int:
        console = progress()
        model = describe(Path(config.teacher)).model
        train = TrainConfig(
            data=config.data, heldout=config.heldout, template=config.template, init=config.teacher
        )
        asked = RunConfig(model, train)
        longest = config.train(TEXT, 1, 1, model.positions)
        new = not run.exists()
        run.mkdir(parents=True, exist_ok=True)
        with locked(run, checkpoint.RUN_LOCK), memory_kept():
            with nothing_left(run, new):
                with Work("reading and encoding the text") as work:
                    noted(run, config)
                    if new or not (run / "data" / "manifest.json").is_file():
                        tokenizer, shards, summary = prepare(run, asked, tell=work.read)
                    else:  # the text as it was encoded, whatever has become of its files
                        tokenizer, shards = Tokenizer.load(run / "tokenizer.json"), open_shards(run / "data")
                        summary = f"{config.data}, as encoded before"
                    its = Tokenizer.load(checkpoint.run_of(Path(config.teacher)) / "tokenizer.json")
                    same = its.fingerprint == tokenizer.fingerprint
                    require(
                        same,
                        "data",
                        config.data,
                        f"encoded as {config.teacher} encodes",
                    )
                    there = shards.split("train").tokens
                    bound = f"a text of more tokens than a window, {longest.seq_len:,}: here are {there:,}"
                    require(there > longest.seq_len, "data", config.data, bound)
                with Work(f"loading {config.teacher}"):
                    conversion = Conversion(run, config, tokenizer, shards, began, Work)
            for line in [summary, *slow(conversion.device, config.dtype)]:
                console.print(line)

            def fit(trainer: Trainer, stage: str, ends: float | None) -> int | None:
                console.print(f"{stage}: {trainer.config.train.steps:,} updates")
                pace = None if ends is None else Pace(ends)
                if self.json:
                    return trainer.fit(report=lambda line: print_json({"stage": stage} | line), pace=pace)
                return fit_with_a_bar(trainer, console, pace, ends, lambda line: None)

            def report(row: dict[str, Any]) -> None:
                if self.json:
                    print_json(row)
                console.print(f"{row['stage']}: held-out {row['bits_per_byte']:.3f} bits per byte")

            try:
                stopped = conversion.go(fit, report)
            except ConfigError:  # the minutes are too few
                if new and not checkpoint.paths(conversion.folder(1)):
                    remove(run)
                raise
        if stopped is not None:
            with contextlib.suppress(OSError):
                console.print(f"stopped and saved; resume with: perspectron convert --resume {run}")
            return 128 + stopped
        following = f"next: perspectron eval {run} --suite conversion"
        return answer(self.json, conversion.notes, *_tables(conversion.notes), following)


def _tables(notes: dict[str, Any]) -> list[Any]:
    """The report for a terminal."""
    rows, (first, *_) = notes["rows"], notes["rows"]
    lines = [
        (row["stage"], f"{row['tokens']:,}", f"{row['bits_per_byte']:.4f}",
         f"{row['bits_per_byte'] / first['bits_per_byte'] - 1:+.1%}")
        for row in rows
    ]  # fmt: skip
    head = ("after", "tokens", "bits per byte", "over the teacher")
    layers = [
        (str(row["layer"]), f"{row['cost']:+.4f}", "attention" if row["attention"] else "converted")
        for row in notes["layers"]
    ]
    return [
        table("held-out loss", head, lines),
        table("nats a token that converting a layer alone costs", ("layer", "cost", ""), layers),
    ]
