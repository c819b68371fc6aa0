"""Running a conversion in its folder, from where it stopped to its end."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perspectron.data import Shards, Tokenizer, origin
from perspectron.data.loader import Batch
from perspectron.model.census import active_parameters
from perspectron.model.model import LanguageModel
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.convert.build import heads_of, in_place, student, transferred
from perspectron.train.convert.config import (
    LAYERS,
    LEAST_UPDATES,
    TEXT,
    WHOLE,
    ConvertConfig,
    batch_for,
    on_meta,
)
from perspectron.train.convert.layers import LayerTrainer, costs, kept, learning
from perspectron.train.heldout import heldout
from perspectron.train.loop import Trainer
from perspectron.train.pace import Pace
from perspectron.train.prepare import training_batches
from perspectron.util.config import dump, load, meant_beside, require
from perspectron.util.errors import CheckpointError
from perspectron.util.files import read_json, write_json
from perspectron.util.machine import pick_device, seconds_of

FILE, STAGES, FOLDERS = "convert.json", "stages", ("0-taken", "1-layers", "2-chosen", "3-whole")
MEASURED = 65536  # held-out tokens, at most
CLOSING = 0.03  # share of the time that a measurement after a stage may take; it is left for the last one
CHOOSING = 0.1  # of the time, at most: for the layers that keep attention, and the distances that attention looks back
ASKED = 32  # windows for each of these, at most
PASSES = 5  # of the teacher, about which an update takes as long as
Row = dict[str, Any]
Fit = Callable[[Trainer, str, float | None], int | None]
"""Trains a stage until a time of the monotonic clock, if there is one; the signal that ended it, or None."""
Doing = Callable[[str], AbstractContextManager[object]]
"""A function from the name of a piece of work to the context it is done in."""


def paced(trainer: Trainer, name: str, ends: float | None) -> int | None:
    """A `Fit` that reports nothing."""
    return trainer.fit(pace=None if ends is None else Pace(ends))


class Conversion:
    """One conversion. began: time of the monotonic clock from which the minutes of a new one count; None for one that
    goes on. doing: hears of what is done between stages."""

    def __init__(
        self,
        run: Path,
        config: ConvertConfig,
        tokenizer: Tokenizer,
        shards: Shards,
        began: float | None = None,
        doing: Doing = nullcontext,
    ) -> None:
        self.run, self.config, self.tokenizer, self.shards = run, config, tokenizer, shards
        self.notes, self.began, self.doing = noted(run, config), began, doing
        self.device = pick_device(config.device)
        self.teacher = checkpoint.load_run(Path(config.teacher))[0].requires_grad_(False).to(self.device)
        its = self.teacher.fingerprint()
        same = self.notes.setdefault("teacher", its) == its
        require(
            same, "teacher", config.teacher, "as it was when the conversion began: its weights are others now"
        )
        self.layers = list(in_place(self.teacher.config, config.to))

    def folder(self, number: int) -> Path:
        return self.run / STAGES / FOLDERS[number]

    def go(self, fit: Fit = paced, report: Callable[[Row], None] = lambda row: None) -> int | None:
        """Do what is left. Returns the number of the signal that stopped it, or None."""
        if any(row["stage"] == TEXT for row in self.notes["rows"]):
            return None  # the folders of the stages may have been deleted
        if not self.notes["rows"] and self.config.minutes > 0:
            with self.doing("timing a pass of the teacher"):
                self.allot()
        self.note(report, "teacher", self.teacher)
        if not checkpoint.paths(self.folder(0)):
            with self.doing("taking over the teacher's weights"):
                self.take()
        if (signal := self.train(1, LAYERS, fit)) is not None:
            return signal
        self.note(report, "each layer alone", self.folder(1))
        if not checkpoint.paths(self.folder(2)):
            with self.doing("choosing the layers that keep attention"):
                self.choose()
        self.note(report, "layers chosen", self.folder(2))
        if (signal := self.train(3, WHOLE, fit)) is not None:
            return signal
        self.note(report, "the teacher's distribution", self.folder(3))
        if (signal := self.train(4, TEXT, fit)) is not None:
            return signal
        self.note(report, TEXT, self.run)
        return None

    def allot(self) -> None:
        """Note how much text is read where nothing is learned, and how large batches are, by the seconds of a pass of
        the teacher. ConfigError if the minutes are too few, as far as these seconds tell."""
        notes, minutes, seq_len = self.notes, self.config.minutes, self.config.seq_len
        window = seq_len * pass_seconds(self.teacher, seq_len)
        learned = seq_len * 60 * minutes * (1 - CHOOSING) / (PASSES * window)
        self.config = replace(self.config, batch_size=batch_for(learned, seq_len, self.config.batch_size))
        notes["config"] = dump(self.config)
        notes["limit"] = seq_len * max(4, at_most(MEASURED // seq_len, CLOSING * 60 * minutes / window))
        whole = CHOOSING * 60 * minutes / window / (2 + len(self.layers))
        notes["windows"] = at_most(ASKED, whole)

        def least(passes: int) -> float:
            """The least minutes, if an update costs so many passes of the teacher."""
            updates = self.config.batch_size * LEAST_UPDATES * passes / min(self.config.shares.values())
            return window * (updates + 2 + len(self.layers)) / (1 - CLOSING) / 60

        enough = self.began is None or minutes >= least(1)
        require(enough, "minutes", minutes, f"≥ {math.ceil(least(3))}, or else tokens")

    def note(self, report: Callable[[Row], None], name: str, model: LanguageModel | Path) -> None:
        """Measure a stage's model on held-out text, once, and report it."""
        if any(row["stage"] == name for row in self.notes["rows"]):
            return
        tokens = 0
        with self.doing(f"measuring on held-out text: {name}"):
            if isinstance(model, Path):
                opened = checkpoint.open_run(model)
                model, tokens = opened.model.to(self.device), opened.checkpoint.progress.tokens
            found = heldout(
                model, self.shards.split("heldout"), self.tokenizer, seq_len=self.config.seq_len,
                batch_size=self.config.batch_size, limit_tokens=limit_of(self.notes), spread=True,
            )  # fmt: skip
        row = {
            "stage": name,
            "tokens": tokens,
            "bits_per_byte": found.bits_per_byte,
            "measured": found.tokens,
        }
        self.notes["rows"].append(row)
        write_json(self.run / FILE, self.notes)
        report(row)

    def batches(self, number: int) -> list[Batch]:
        """Batches of the training text, so that choices are not made on text they are measured on."""
        windows = int(self.notes.get("windows", 4 * self.config.batch_size))  # of before they were noted
        size = min(windows, self.config.batch_size)
        train = TrainConfig(
            data=self.config.data,
            seed=self.config.seed + number,
            batch_size=size,
            seq_len=self.config.seq_len,
        )
        loader = training_batches(RunConfig(self.teacher.config, train), self.shards)
        return [loader.next_batch() for _ in range(windows // size)]

    def export(self, number: int, model: LanguageModel) -> None:
        steps = self.config.train(LAYERS, 1, 1, 0)
        checkpoint.export(
            self.folder(number), RunConfig(model.config, steps), self.tokenizer, model, checkpoint.Progress()
        )

    def take(self) -> None:
        """Write the model with a recurrence in the place of all attention, before it learns."""
        config = student(self.teacher.config, self.config.to, self.layers, self.config.window)
        heads = heads_of(self.teacher, self.batches(10))
        self.export(0, transferred(self.teacher.cpu(), config, heads, self.config.seed))
        self.teacher.to(self.device)

    def choose(self) -> None:
        """Choose the layers that keep attention, and write the model that has both."""
        learned = checkpoint.load_run(self.folder(1))[0].to(self.device)
        dtype = checkpoint.load_config(self.folder(1)).train.dtype
        cost = costs(self.teacher, learned, self.batches(11), dtype)
        stay = kept(cost, self.config.keep)
        self.notes["layers"] = [
            {"layer": index, "cost": value, "attention": index in stay} for index, value in cost.items()
        ]
        write_json(self.run / FILE, self.notes)
        converted = [index for index in self.layers if index not in stay]
        config = student(self.teacher.config, self.config.to, converted, self.config.window)
        self.export(2, transferred(self.teacher.cpu(), config, learned.cpu(), self.config.seed))
        self.teacher.to(self.device)

    def train(self, number: int, stage: str, fit: Fit) -> int | None:
        """Train a stage, or what is left of it."""
        folder = self.run if stage == TEXT else self.folder(number)
        kind, ends = LayerTrainer if stage == LAYERS else Trainer, None
        if checkpoint.paths(folder):
            with self.doing(f"loading stage {stage}"):
                trainer = kind(folder, checkpoint.load_config(folder), self.tokenizer, self.shards)
        else:
            before = self.folder(number - 1)
            self.tokenizer.save(folder / "tokenizer.json")
            if stage == TEXT:
                origin.carry(checkpoint.run_of(Path(self.config.teacher)), folder)
            timed, before_stage = self.config.minutes > 0, time.monotonic()
            steps = LEAST_UPDATES if timed else self.config.steps(stage, self.teacher.config.positions)
            begun = (folder / "config.json").is_file()  # but stopped before its first checkpoint
            dtype = checkpoint.load_config(folder).train.dtype if begun else self.config.dtype
            planned = self.planned(stage, before, steps, dtype)
            with self.doing(f"preparing stage {stage}"):  # perhaps timing which of two precisions is faster
                trainer = kind(folder, planned, self.tokenizer, self.shards)
            if timed:
                ends = self.ends(stage)
                with self.doing(f"timing an update of stage {stage}"):
                    took = trainer.estimate().seconds
                steps = int((ends - time.monotonic()) / took)
                if stage == LAYERS and steps < LEAST_UPDATES and self.began is not None:
                    whole = LEAST_UPDATES * took / min(self.config.shares.values())
                    least = (whole + before_stage - self.began) / (1 - CLOSING) / 60
                    require(False, "minutes", self.config.minutes, f"≥ {math.ceil(least)}, or else tokens")
                steps = max(steps, LEAST_UPDATES)
                settled = self.planned(stage, before, steps, trainer.config.train.dtype).train
                trainer.config = replace(trainer.config, train=settled)
                checkpoint.save_config(folder, trainer.config)
        if trainer.progress.step >= trainer.config.train.steps:
            return None
        return fit(trainer, stage, ends)

    def planned(self, stage: str, before: Path, steps: int, dtype: str) -> RunConfig:
        """The config of a stage that starts from the folder of the one before."""
        model = checkpoint.load_config(before).model
        more: dict[str, Any] = {"init": str(before.resolve()), "dtype": dtype}
        if "limit" in self.notes:
            more["eval_tokens"] = self.notes["limit"]
        if stage != TEXT:
            mix = self.config.teacher_mix if stage == WHOLE else 1.0
            more |= {"teacher": self.config.teacher, "teacher_mix": mix}
        if stage == LAYERS:
            more["only"] = learning(on_meta(model), self.layers)
        size = active_parameters(model)
        return RunConfig(model, self.config.train(stage, steps, size, model.positions, **more))

    def ends(self, stage: str) -> float:
        """The time at which a stage ends: after its share of the time left, or of all of it in a resumed conversion."""
        now, shares, whole = time.monotonic(), self.config.shares, 60 * self.config.minutes * (1 - CLOSING)
        if self.began is None:
            return now + shares[stage] * whole
        stages = (LAYERS, WHOLE, TEXT)
        share = shares[stage] / sum(shares[name] for name in stages[stages.index(stage) :])
        return now + share * (self.began + whole - now)


def noted(run: Path, config: ConvertConfig) -> dict[str, Any]:
    """The contents of RUN/convert.json, which is created if there is none."""
    if not (run / FILE).is_file():
        write_json(run / FILE, {"config": dump(config), "windows": ASKED, "layers": [], "rows": []})
    notes: dict[str, Any] = read_json(run / FILE, CheckpointError)
    return notes


def at_most(most: int, number: float) -> int:
    return max(1, min(most, int(number)))


def limit_of(notes: dict[str, Any]) -> int:
    """Held-out tokens of each measurement of a conversion."""
    return int(notes.get("limit", MEASURED))


@torch.inference_mode()
def pass_seconds(model: LanguageModel, seq_len: int) -> float:
    """Seconds that a token takes in a pass over one window, measured on the faster of two."""
    ids_BT = torch.zeros(1, seq_len, dtype=torch.int64, device=model.device)
    return min(seconds_of(lambda: model(ids_BT), model.device) for _ in range(2)) / seq_len


def config_of(run: Path) -> ConvertConfig:
    """The config of a conversion. CheckpointError: there is no conversion in the folder."""
    if not (run / FILE).is_file():
        raise CheckpointError(f"no conversion at {run}{meant_beside(run)}")
    notes = read_json(run / FILE, CheckpointError)
    return load(ConvertConfig, notes.get("config") if isinstance(notes, dict) else None, str(run / FILE))
