"""RUN/index.html: the progress and results of a training, on one page that is rewritten while it runs.

RUN/samples.jsonl holds what the model wrote at each measurement after the same prompts, which begin lines of the text
that is not trained on."""

import itertools
import json
import math
import shlex
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from perspectron.data import Split, Tokenizer
from perspectron.model.model import LanguageModel, shape_of
from perspectron.train.config import RunConfig, launched
from perspectron.train.metrics import Metrics, bits_per_nat, measured, read_metrics
from perspectron.util.config import dump
from perspectron.util.errors import PerspectronError
from perspectron.util.files import append_to, parse_json, read_text, write_text
from perspectron.util.machine import peak_resident
from perspectron.util.numbers import duration, fixed, grouped, printable, short, size
from perspectron.util.page import Cell, Curve, Drawn, Point, Table, drawn, page_template

if TYPE_CHECKING:
    from perspectron.train.loop import Trainer
    from perspectron.train.pace import Pace

PAGE, SAMPLES = "index.html", "samples.jsonl"
POINTS = 400  # of a curve, at most twice as many
EVERY = 5.0  # seconds from one page to the next, at least
SHARE, OF_SAMPLES = 0.004, 0.005  # shares of the time that pages, and samples, may take
PROMPTS, LETTERS = 3, 32  # prompts, and letters of each, at most
AROUND = 64  # tokens in which a prompt is looked for
MOST_SAMPLES = 1 << 26  # bytes
SHOWN, ROWS = 6, 100  # times at which samples are shown; rows of a table, at most
CONTEXT = 8192  # tokens after which the bytes of a state are given
Write = Callable[[LanguageModel, Tokenizer, Sequence[str]], list[str]]
"""A function that has a model continue each of some texts."""


class History:
    """The course of a run. A curve has few points however long the run: each is the mean over equally many updates."""

    def __init__(self) -> None:
        self.measured: list[tuple[int, int, float, float]] = []  # step, tokens, seconds, bits per byte
        self.on = "held-out"
        self.last: Metrics = {}
        self._lines: list[Metrics] = []
        self._each = 1
        self.scale: float | None = None
        """Bits per byte for a nat per token; None until it was measured."""

    def note(self, line: Metrics) -> None:
        """Take a line of metrics."""
        if "loss" not in line:
            self.on, bits = measured(line)
            tokens, seconds = self.last.get("tokens", 0), self.last.get("seconds", 0.0)
            self.measured.append((line["step"], tokens, seconds, bits))
            self.scale = bits_per_nat([line]) or self.scale
            return
        self.last = line
        values = {name: line[name] for name in ("loss", "tokens_per_second")} | line.get("aux", {})
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        sums = {name: (value, 1) for name, value in finite.items()}
        if not self._lines or self._lines[-1]["count"] == self._each:
            self._lines.append({"count": 0, "sums": {}})
        self._join(self._lines[-1], {**line, "count": 1, "sums": sums})
        if len(self._lines) >= 2 * POINTS:
            for one, other in zip(self._lines[::2], self._lines[1::2], strict=False):
                self._join(one, other)
            self._lines, self._each = self._lines[::2], 2 * self._each

    @staticmethod
    def _join(one: Metrics, other: Metrics) -> None:
        sums = dict[str, tuple[float, int]]()  # of a quantity: its sum, and the updates that reported it
        for name, (value, count) in other["sums"].items():
            before, counted = one["sums"].get(name, (0.0, 0))
            sums[name] = before + value, counted + count
        one |= {"count": one["count"] + other["count"], "sums": one["sums"] | sums}
        one |= {name: other[name] for name in ("tokens", "seconds")}

    def points(self, name: str, by: str) -> list[Point]:
        """Means of a quantity over "tokens" or "seconds"."""
        found = ((line[by], *line["sums"][name]) for line in self._lines if name in line["sums"])
        return [(at, total / count) for at, total, count in found]

    def figures(self) -> list[Drawn]:
        """Loss by tokens and by time, speed, and each quantity that the model reported."""
        speed = Curve("", self.points("tokens_per_second", "seconds"), thin=True)
        found = [*losses({"": self}), over_time("Tokens per second", [speed, *_smooth(speed, "smoothed")])]
        for name in dict.fromkeys(name for line in self._lines for name in line["sums"]):
            if name not in ("loss", "tokens_per_second"):
                raw = Curve("", self.points(name, "tokens"), thin=True)
                found.append(drawn(name.replace("_", " "), "tokens", [raw, *_smooth(raw, "smoothed")]))
        return [figure for figure in found if figure is not None]

    def losses(self, by: str, name: str, colour: str, scale: float) -> list[Curve]:
        """The training loss over "tokens" or "seconds", and the loss measured on held-out or dev text. name: of the
        model, where there are several; "" draws the loss of each update as well."""
        raw = Curve("", [(at, scale * y) for at, y in self.points("loss", by)], colour, thin=True)
        held = [(line[1 if by == "tokens" else 2], line[3]) for line in self.measured if self.scale]
        if name:
            return [*_smooth(raw, name), Curve("", held, colour, dots=True)]
        return [raw, *_smooth(raw, "training"), Curve(self.on, held, "second", dots=True)]

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of the last training loss, the best measured loss and the tokens read."""
        if not self.last:
            return []
        loss, unit = self.last["loss"] * (self.scale or 1.0), _unit(self.scale)
        facts = [(f"training loss, {unit}", fixed(loss))]
        if self.measured:
            best = min(bits for *_, bits in self.measured)
            facts.append((f"best {self.on} loss, bits per byte", fixed(best)))
        return [*facts, ("tokens read", short(self.last["tokens"]))]


def course(run: Path) -> History:
    """The course of a run so far."""
    history = History()
    for line in read_metrics(run):
        history.note(line)
    return history


def losses(histories: dict[str, History]) -> list[Drawn | None]:
    """The losses of models by tokens and by time, on common axes."""
    whole = all(history.scale for history in histories.values())
    unit, curves = _unit(whole or None), dict[str, list[Curve]]()
    for by in ("tokens", "seconds"):
        pairs = zip(histories.items(), itertools.cycle(("accent", "second", "ink")))
        told = (h.losses(by, name, colour, (h.scale or 1.0) if whole else 1.0) for (name, h), colour in pairs)
        curves[by] = [curve for each in told for curve in each]
    by_tokens = drawn(f"Loss by tokens, {unit}", "tokens", curves["tokens"])
    return [by_tokens, over_time(f"Loss by time, {unit}", curves["seconds"])]


def over_time(title: str, curves: Sequence[Curve]) -> Drawn | None:
    """A figure of curves over seconds of training, in the unit that suits them."""
    spent = max((at for curve in curves for at, _ in curve.points), default=0.0)
    part, clock = (3600, "hours") if spent >= 7200 else (60, "minutes") if spent >= 120 else (1, "seconds")
    scaled = [curve._replace(points=[(at / part, y) for at, y in curve.points]) for curve in curves]
    return drawn(title, f"{clock} of training", scaled)


def _unit(scale: float | None) -> str:
    return "nats per token" if scale is None else "bits per byte"


def _smooth(raw: Curve, name: str) -> list[Curve]:
    """An exponential mean over about a fiftieth of the points; empty for a curve without points."""
    keep, smooth = 1 - 1 / max(2.0, len(raw.points) / 50), list(raw.points[:1])
    for at, value in raw.points[1:]:
        smooth.append((at, keep * smooth[-1][1] + (1 - keep) * value))
    return [Curve(name, smooth, raw.colour)] if smooth else []


# ---------------------------------------------------------------- samples


def prompts(split: Split, tokenizer: Tokenizer) -> list[str]:
    """Beginnings of lines of a split, at even distances."""
    found = list[str]()
    for n in range(PROMPTS):
        start = n * split.tokens // PROMPTS
        text = printable(tokenizer.decode(split.read(start, min(start + AROUND, split.tokens)).tolist()))
        lines = [line.strip() for line in text.splitlines()[1:] if line.strip()] or [text.strip()]
        line = lines[0]
        if len(line) > LETTERS:
            line = line[:LETTERS].rpartition(" ")[0] or line[:LETTERS]
        if line and line not in found:
            found.append(line)
    return found or [""]


def read_samples(run: Path) -> list[dict[str, Any]]:
    """The valid lines of samples.jsonl; none if it cannot be read."""
    found = []
    try:
        lines = read_text(run / SAMPLES, MOST_SAMPLES, errors="replace").splitlines()
    except (OSError, ValueError):
        return []
    for line in lines:
        try:
            value = parse_json(line)
            kept = [{key: str(text[key]) for key in ("prompt", "text")} for text in value["texts"]]
            found.append({"step": int(value["step"]), "tokens": int(value["tokens"]), "texts": kept})
        except (ValueError, TypeError, KeyError):
            continue
    return found


def forget_samples(run: Path, step: int) -> None:
    """Drop the samples from after update `step`."""
    there = read_samples(run)  # empty for an unreadable file, which stays as it is
    kept = [line for line in there if line["step"] <= step]
    if len(kept) < len(there):
        write_text(run / SAMPLES, "".join(json.dumps(line) + "\n" for line in kept))


# ---------------------------------------------------------------- the page


class Shown(NamedTuple):
    """The contents of a page beside the course of a run. state: what the run is doing, in a few words; kind:
    "training", "done" or "failed". every: seconds until the browser loads it anew. heats: pictures of a memory."""

    state: str
    kind: str = "done"
    facts: Sequence[tuple[str, str]] = ()
    result: str = ""
    every: float = 0.0
    heats: Sequence[str] = ()


def parts(config: RunConfig, history: History, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Variables of the page's template that describe a run; a page may have several runs."""
    held = {step: bits for step, *_, bits in history.measured}
    chosen = samples
    if len(samples) > SHOWN:
        chosen = [samples[round(n * (len(samples) - 1) / (SHOWN - 1))] for n in range(SHOWN)]
    shown = []
    for line in reversed(chosen):
        bits = f", {history.on} {held[line['step']]:.3f} bits per byte" if line["step"] in held else ""
        shown.append({"when": f"after {short(line['tokens'])} tokens{bits}", "texts": line["texts"]})
    rows = [
        [Cell(grouped(step)), Cell(grouped(tokens)), Cell(duration(seconds)), Cell(fixed(bits))]
        for step, tokens, seconds, bits in history.measured
    ]
    head = ("step", "tokens", "time", "bits per byte")
    return {
        "name": config.model.name, "figures": history.figures(), "samples": shown,
        "measured": Table(f"Loss, {history.on}", head, rows[:: -(-len(rows) // ROWS) or 1], ()),
    }  # fmt: skip


def rendered(
    run: Path, config: RunConfig, history: History, samples: Sequence[dict[str, Any]], shown: Shown
) -> str:
    """The page of a run."""
    typed = Path(sys.argv[0]).name in (
        "perspectron",
        "__main__.py",
    )  # arguments of a user's own program are not shown
    command = ["perspectron", *sys.argv[1:]] if typed else ["python", sys.argv[0]]
    return page_template("perspectron.train", "page.html.j2").render(
        parts(config, history, samples),
        run=run, shown=shown, facts=history.facts(), written=time.time(), several=launched(),
        config=json.dumps(dump(config), indent=1, ensure_ascii=False),
        command=shlex.join(command), when=time.strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip


def facts_of(config: RunConfig) -> list[tuple[str, str]]:
    """The size of a run's model and of its state."""
    model = shape_of(config.model)
    tokens = config.model.positions or CONTEXT
    state = model.init_state(1, capacity=tokens, device="meta").nbytes
    count = sum(parameter.numel() for parameter in model.parameters())
    return [("parameters", short(count)), (f"memory of {grouped(tokens)} tokens", size(state))]


class Page:
    """The page of a run that is being trained: `with Page(trainer, pace) as page`, and `note` for each line of metrics.
    It is written at most every `EVERY` seconds and in `SHARE` of the time. An error in writing gives one warning."""

    def __init__(self, trainer: "Trainer", pace: "Pace | None" = None, write: Write | None = None) -> None:
        # The trainer holds the page; a cycle of references would keep the text's files open.
        self.trainer: Trainer = weakref.proxy(trainer)
        self.pace, self.write, self.run = pace, write, trainer.run_dir
        self.history, self.samples = course(self.run), read_samples(self.run)
        self._prompts = self.samples[0]["texts"] if self.samples else None
        self._spent = self._due = 0.0
        self._every, self._broken = EVERY, False
        self._recent = deque([(time.monotonic(), trainer.progress.step)], maxlen=32)
        self._facts = facts_of(trainer.config)

    def __enter__(self) -> Self:
        self._write()  # which loads the template once
        self._every = EVERY
        self._due = time.monotonic() + EVERY
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step, steps = self.trainer.progress.step, self.trainer.config.train.steps
        if error is not None:
            self.end(f"ended at step {step:,} of {steps:,}: {str(error) or type(error).__name__}", "failed")
        elif step < steps:
            self.end(f"stopped at step {step:,} of {steps:,}")
        else:
            self.end("finished")

    def note(self, line: Metrics) -> None:
        """Take a line of metrics, and write the page if it is time."""
        self.history.note(line)
        now = time.monotonic()
        if "loss" in line:
            self._recent.append((now, line["step"]))
        if now >= self._due:
            self._write()

    def draw(self) -> None:
        """Have the model write samples, the first time, at the end and as often as their time allows."""
        trainer = self.trainer
        progress = trainer.progress
        last = progress.step == trainer.config.train.steps
        if self.write is None or (self.samples and not last and self._spent > OF_SAMPLES * progress.seconds):
            return
        began = time.monotonic()
        texts = [text["prompt"] for text in self._prompts or []] or prompts(
            trainer.heldout_split, trainer.tokenizer
        )
        self._tried(lambda: self._sample(texts))
        self._spent += time.monotonic() - began

    def end(self, state: str, kind: str = "done", result: str = "", heats: Sequence[str] = ()) -> None:
        """Write the page a last time."""
        self._put(Shown(state, kind, self._now(), result, heats=heats))

    def _sample(self, texts: Sequence[str]) -> None:
        assert self.write is not None
        progress = self.trainer.progress
        written = zip(texts, self.write(self.trainer.model, self.trainer.tokenizer, texts), strict=True)
        self._prompts = [{"prompt": prompt, "text": printable(text)} for prompt, text in written]
        line = {"step": progress.step, "tokens": progress.tokens, "texts": self._prompts}
        self.samples = [*(old for old in self.samples if old["step"] < progress.step), line]
        with append_to(self.run / SAMPLES) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _write(self) -> None:
        began, train = time.monotonic(), self.trainer.config.train
        state = f"training, step {self.trainer.progress.step:,} of {train.steps:,}"
        self._put(Shown(state, "training", [("time left", self._left()), *self._now()], every=self._every))
        took = time.monotonic() - began
        self._every = max(EVERY, took / SHARE)
        self._due = began + self._every

    def _put(self, shown: Shown) -> None:
        def work() -> None:
            page = rendered(self.run, self.trainer.config, self.history, self.samples, shown)
            write_text(self.run / PAGE, page.encode(errors="replace").decode())  # a path need not be UTF-8

        self._tried(work)

    def _tried(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (
            OSError,
            PerspectronError,
            RuntimeError,
        ) as error:  # out of memory, logits that are not finite
            if not self._broken:
                warnings.warn(f"{error}; the training goes on without it", stacklevel=2)
            self._broken = True

    def _left(self) -> str:
        """The time left, by the clock that the training keeps to or by its last updates."""
        (began, first), (now, last) = self._recent[0], self._recent[-1]
        if self.pace is not None and math.isfinite(self.pace.ends):
            return duration(max(0.0, self.pace.ends - time.monotonic()))
        if last == first:
            return "–"
        return duration((self.trainer.config.train.steps - last) * (now - began) / (last - first))

    def _now(self) -> list[tuple[str, str]]:
        cuda = self.trainer.device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self.trainer.device) if cuda else peak_resident()
        speed = self.history.last.get("tokens_per_second")
        facts = [("tokens per second", f"{speed:,.0f}")] if speed else []
        return [*facts, ("peak memory of training", size(most)), *self._facts]
