"""Stage (f): one long training that only a GPU allows, of 20 M parameters on 400 M tokens, by five designs.

Every design reads the same windows of `sources` and `prose`, the texts of the packages that are installed, in the same
order and by the same schedule. The rate is constant after its warm-up and falls over the last fifth alone: a run that
was cut off anywhere compares with the others at the same tokens, which a cosine over 400 M tokens would not allow.

The designs are trained in turns, a slice of some seconds each, in the order of DESIGNS. A slice ends with a checkpoint
in DIR/long/DESIGN, from which the next one goes on, on another day too. Each is a unit, which keeps the points of the
learning curve that it adds; points are at the same tokens for all designs.
"""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from on_gpu.frame import ROOT, Place, Result, Skip, Unit, read
from on_gpu.training import SIZES, Size, config_of
from perspectron import presets
from perspectron.data import Corpus, Tokenizer, is_encoded, open_corpus, open_shards
from perspectron.eval.budget import size_of
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.loop import Trainer
from perspectron.train.metrics import measured, noting, read_metrics
from perspectron.train.optim import OptimConfig
from perspectron.util.errors import DataError

ABOUT = "one long training: 20 M parameters, 400 M tokens, five designs in turns, resumable"
LIMIT = 1500
DESIGNS = ("perspective2", "transformer", "transformer[shift=true,first_values=true]", "gdn", "rwkv7")
TOKENS = 400_000_000
TINY = Size(0, 512, 2, 32)  # of the rehearsal
SOURCES = ("code=0.98:sources prose=0.02:prose", "sources")
"""Prose is read about as often as code: there is some 2% of it. A machine without any has sources alone; where torch is
not among the packages of the running Python, the code beside it."""
LEAST = 20_000_000  # bytes of text: of fewer, 400 M tokens are more than 60 passes
SAMPLE = 16_000_000  # bytes of text that the tokenizer is learned from: of all it would take minutes
HELDOUT = 0.05
WARMUP = 200  # updates
EVERY, MEASURED = 64, 1 << 17  # updates between measurements, held-out tokens of each
SLICE, ENDING = 20.0, 6.0  # seconds of a slice, seconds that its end takes: a measurement and a checkpoint
REHEARSED = 4  # updates of the whole training in a rehearsal, which has two slices


def units(place: Place) -> Iterable[Unit]:
    """The text, then slices in turns. A design is passed over, for this run, after a slice that did not end well."""
    yield Unit("text", partial(text, place), seconds=40)
    if not (is_encoded(str(text_of(place))) or _kept(place, "text")):
        return
    trainers: dict[str, Trainer] = {}
    slices = {
        design: _slices(place, design, trainers) for design in DESIGNS[: 2 if place.rehearsed else None]
    }
    while slices:
        for design, own in list(slices.items()):
            unit = next(own, None)
            if unit is not None:
                yield unit
            if unit is None or not _kept(place, unit.name):
                del slices[design]


def _slices(place: Place, design: str, trainers: dict[str, Trainer]) -> Iterator[Unit]:
    """The slices of a design, until one that is kept has ended its training."""
    for number in itertools.count(1):
        name, run = f"{design} {number}", partial(slice_of, place, design, number, trainers)
        yield Unit(name, run, seconds=SLICE + 2 * ENDING)
        if (_kept(place, name) or {}).get("ended"):
            return


def _kept(place: Place, unit: str) -> Result | None:
    """The result of a unit, if it has one."""
    found: Result | None = _units(place).get(unit, {}).get("result")
    return found


def _results(place: Place, design: str) -> list[Result]:
    """The results of a design's slices."""
    units = _units(place)
    return [
        unit["result"]
        for name, unit in units.items()
        if name.rpartition(" ")[0] == design and "result" in unit
    ]


def _units(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = read(place.folder / "long.json").get("units", {})
    return found


# ---------------------------------------------------------------- the text


def text_of(place: Place) -> Path:
    return place.folder / "long" / "text"


def text(place: Place) -> Result:
    """A tokenizer of a sample of the text, and all of it encoded, on every core."""
    begun, folder = time.time(), place.folder / "long"
    folder.mkdir(exist_ok=True)
    source, corpus = _corpus(place)
    size, vocab = size_of(corpus), (TINY if place.rehearsed else SIZES["20M"]).vocab
    Tokenizer.train(_sample(corpus, size), vocab).save(folder / "tokenizer.json")
    learned = time.time()
    command = [
        sys.executable,
        "-m",
        "perspectron",
        "tokenize",
        source,
        "--out",
        str(text_of(place)),
        "--json",
    ]
    command += ["--tokenizer", str(folder / "tokenizer.json"), "--heldout", str(HELDOUT)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr[-1000:]}")
    facts = json.loads(done.stdout)
    return {
        "source": source,
        "digest": facts["digest"],
        "vocab_size": facts["vocab_size"],
        "train": facts["train"],
        "heldout": facts["heldout"],
        "passes": steps_of(place) * tokens_of(place) / facts["train"]["tokens"],
        "learning_seconds": round(learned - begun, 1),
        "encoding_seconds": round(time.time() - learned, 1),
    }


def _corpus(place: Place) -> tuple[str, Corpus]:
    """(what is read, it opened). Skip: this machine has no text."""
    if place.rehearsed:
        path = place.folder / "long" / "numbers.txt"
        path.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(2000)))
        return str(path), open_corpus(str(path), HELDOUT)
    least = ""
    for source in (*SOURCES, f"{Path(torch.__file__).parents[1]}/**/*.py"):
        try:
            corpus = open_corpus(source, HELDOUT)
        except DataError as why:
            least += f"; {source}: {why}"
            continue
        if (size := size_of(corpus)) >= LEAST:
            return source, corpus
        least += f"; {source}: {size:,.0f} bytes, fewer than {LEAST:,}"
    raise Skip(f"no text to train on{least}")


def _sample(corpus: Corpus, size: float) -> Iterator[str]:
    """Documents from all over the text, about SAMPLE bytes in all; the whole of less."""
    share = SAMPLE / max(1, size)
    for number, document in enumerate(corpus.documents("train")):
        if int((number + 1) * share) > int(number * share) or share >= 1:
            yield document.text


# ---------------------------------------------------------------- slices


def run_of(place: Place, design: str) -> Path:
    """The folder of a design's run."""
    name = "".join(letter if letter.isalnum() else "-" for letter in design).strip("-")
    return place.folder / "long" / name


def size_here(place: Place) -> Size:
    return TINY if place.rehearsed else SIZES["20M"]


def tokens_of(place: Place) -> int:
    """Tokens of an update."""
    size = size_here(place)
    return size.rows * size.T


def steps_of(place: Place) -> int:
    """Updates of the whole training."""
    return REHEARSED if place.rehearsed else TOKENS // tokens_of(place)


def config(place: Place, design: str) -> RunConfig:
    """The run: the rate that searches of the design found, scaled to the size."""
    size = size_here(place)
    rate = presets.rate(design.partition("[")[0], size.params or 2_000_000)
    warmup = min(WARMUP, steps_of(place) // 4)
    return RunConfig(
        config_of(design, size),
        TrainConfig(
            data=str(text_of(place).resolve()),
            heldout=HELDOUT,
            steps=steps_of(place),
            batch_size=size.rows,
            seq_len=size.T,
            dtype="bfloat16",
            device=place.device.type,
            eval_every=EVERY,
            eval_tokens=128 if place.rehearsed else MEASURED,
            save_every=0,
            keep=1,
            optim=OptimConfig(lr=rate, schedule="constant", warmup=warmup),
        ),
    )


def trainer_of(place: Place, design: str) -> Trainer:
    """A trainer at the run's newest checkpoint. The folder may have moved since, and the device may be another."""
    if not is_encoded(str(text_of(place))):
        text(place)
    tokenizer, shards = Tokenizer.load(text_of(place) / "tokenizer.json"), open_shards(text_of(place), False)
    run = run_of(place, design)
    run.mkdir(parents=True, exist_ok=True)
    tokenizer.save(run / "tokenizer.json")
    trainer = Trainer(run, config(place, design), tokenizer, shards, allow_changed=True)
    known = max((result["tokens"] for result in _results(place, design)), default=0)
    if trainer.progress.tokens < known:
        raise RuntimeError(
            f"{run}: at {trainer.progress.tokens:,} tokens, and results go to {known:,}; bring the folder long that "
            "belongs to them, or take another --out"
        )
    return trainer


def slice_of(place: Place, design: str, number: int, trainers: dict[str, Trainer]) -> Result:
    """Some seconds of a design's training, up to a checkpoint; in a rehearsal half of it, whatever a run that was cut
    off before had done of this slice."""
    begun = time.time()
    if design not in trainers:
        trainers[design] = trainer_of(place, design)
    trainer, steps = trainers[design], steps_of(place)
    run, first = trainer.run_dir, trainer.progress
    until = min(time.time() + SLICE, place.until - ENDING)
    last = min(steps, number * steps // 2) if place.rehearsed else steps
    every = 1 if place.rehearsed else EVERY
    built = time.time() - begun
    with noting(run, lambda _: None, []) as note:
        while trainer.progress.step < last:
            note(trainer.step())
            step = trainer.progress.step
            if step % every == 0 or step == steps:
                note(trainer.measure())
            if time.time() >= until:
                break
    saving = time.time()
    trainer.save()
    done = trainer.progress
    return {
        "step": done.step,
        "tokens": done.tokens,
        "seconds_of_training": done.seconds,
        "tokens_per_second": round((done.tokens - first.tokens) / max(1e-9, done.seconds - first.seconds)),
        "params": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "curve": _points(place, design, run),
        "built": round(built, 2),
        "saved": round(time.time() - saving, 2),
        "ended": done.step == steps,
    }


def _points(place: Place, design: str, run: Path) -> list[dict[str, float]]:
    """The points of the learning curve that no slice of the design has kept: tokens, held-out bits per byte, and the
    training loss, the mean of the updates since the point before."""
    known = max(
        (point["tokens"] for result in _results(place, design) for point in result["curve"]), default=0
    )
    points, losses, tokens = list[dict[str, float]](), list[float](), 0
    for line in read_metrics(run):
        if "loss" in line:
            losses.append(line["loss"])
            tokens = line["tokens"]
        elif losses:
            if tokens > known:
                bits, loss = measured(line)[1], sum(losses) / len(losses)
                points.append({"tokens": tokens, "bits_per_byte": round(bits, 5), "loss": round(loss, 5)})
            losses = []
    return points
