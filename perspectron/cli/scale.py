"""`perspectron scale`."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

from rich.table import Table

from perspectron.cli.compare import finish
from perspectron.cli.console import Console, progress
from perspectron.cli.options import BatchSize, Device, Jobs, SeqLen, count, table
from perspectron.cli.progress import Work
from perspectron.compare import pool, run, scaling
from perspectron.compare.laws import Point, losses_at
from perspectron.compare.plan import (
    PLAN,
    STUDY,
    Plan,
    models_of_designs,
    plan,
    threads_for,
    vocabulary_in,
)
from perspectron.compare.report.scaling import CROSSING, crossing_rows, sentence, write
from perspectron.compare.report.summary import WINDOWS
from perspectron.compare.run import Rate
from perspectron.compare.scaling import Study
from perspectron.data import absolute, with_encoding
from perspectron.eval.timing import Setting, seconds_per_step
from perspectron.presets import title
from perspectron.util.config import between_commas, dump, load, meant_beside, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import locked, read_json, write_json
from perspectron.util.machine import threads_of
from perspectron.util.numbers import fixed, short

GROWING = ("sizes", "per_parameter")
DESIGNS = "transformer,perspective2,rwkv7,gdn,ssd,gla"


@dataclass(frozen=True)
class Scale:
    """Compare designs at several sizes, with as many tokens for each parameter, and draw the lines that they follow.

    Example: perspectron scale --designs transformer,ssd --sizes 100k,300k,1M --out runs/scale

    In slices, of an hour each: perspectron scale --minutes 60 --out runs/scale

    Go on: perspectron scale --resume runs/scale

    On another machine: copy scale-results.json alone into the new folder; trainings that finished are not repeated.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--out", "--designs", "--sizes", "--per-parameter", "--data", "--minutes", "--resume",
    )  # fmt: skip
    out: Path | None = None
    """Output folder; with the same options as before, the study resumes there, and with more --sizes or
    --per-parameter it grows."""
    resume: Path | None = None
    """Folder of a study to resume; all other options but --minutes and --jobs come from there."""
    designs: str = DESIGNS
    """Designs, separated by commas, as in `compare`."""
    sizes: str = "300k,1M,2M"
    """Active parameters of each size, growing."""
    per_parameter: str = "20"
    """Tokens to train on for each parameter; several, such as 5,20, also show what more of them are worth."""
    seeds: int = Study.seeds
    """Number of trainings of each design and size."""
    data: str = Study.data
    """Text, as in `compare`."""
    encoding: str = ""
    """Encoding of the text (default: UTF-8)."""
    heldout: float = Study.heldout
    """Share of the text that is held out."""
    dev: float = Study.dev
    """Share of the text on which rates are chosen."""
    vocab_size: int = Study.vocab_size
    """Size of the vocabulary of all sizes; 0 is what suits the smallest."""
    seq_len: SeqLen = Study.seq_len
    batch_size: BatchSize = Study.batch_size
    rates: tuple[float, ...] = Study.rates
    """Peak learning rates that each design tries at the smallest size, over a whole training (default: the rate of the
    design). From size to size the rate falls by N^-0.4, N being the parameters."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Autocast for all designs."""
    device: Device = Study.device
    minutes: float | None = None
    """Stop after so many minutes, having saved everything."""
    jobs: Jobs = 1

    def __call__(self) -> int:
        require(self.jobs >= 1, "jobs", self.jobs, "≥ 1")
        require(self.minutes is None or self.minutes > 0, "minutes", self.minutes, "> 0")
        out, console = self.resume or self.out, progress()
        if out is None or (self.resume and self.out):
            raise ConfigError("scale needs --out DIR for a new study, or --resume DIR to continue one")
        study = self._study(out)
        with _until(self.minutes) as late:
            try:
                code = self._all(out, study, console)
            except pool.StoppedBy as stop:
                code = 128 + stop.number
        found = write(out, study)
        console.print(_table(study, found))
        console.print(sentence(found))
        if crossings := crossing_rows(found):
            console.print(table("where lines cross", CROSSING, crossings))
        console.print(f"report: {out / scaling.PAGE}; numbers: {out / scaling.RESULTS}")
        if late.is_set():
            console.print(
                f"stopped after {self.minutes:g} minutes; go on with: perspectron scale --resume {out}"
            )
            return 0
        return code

    def _study(self, out: Path) -> Study:
        """The study of the options, or of the folder to resume. ConfigError: another study began in the folder."""
        known = _known(out)
        other = (out / PLAN).is_file() and (known is None or not scaling.planned(out, known))
        require(not other, "out", str(out), "another folder: a comparison is there")
        if self.resume is not None:
            alone = self == Scale(resume=self.resume, minutes=self.minutes, jobs=self.jobs)
            require(alone, "resume", str(out), "the only option besides --minutes and --jobs")
            if known is None:
                raise ConfigError(f"no study at {out}{meant_beside(out)}")
            return known
        study = Study(
            tuple(between_commas(self.designs)), tuple(count(size, "sizes") for size in between_commas(self.sizes)),
            tuple(self._ratios()), self.seeds, absolute(with_encoding(self.data, self.encoding)), self.heldout,
            self.dev, vocabulary_in(self.data, self.vocab_size), self.seq_len, self.batch_size, self.rates, self.dtype,
            self.device,
        )  # fmt: skip
        if known is not None and (scaling.planned(out, known) or scaling.results_in(out)):
            if not scaling.planned(out, known) and scaling.results_in(out).get("ids"):
                known = replace(known, data=study.data)  # by its ids it is known wherever it is
            for name in scaling.unlike(known, study):
                more = ", or more of them" if name in GROWING else ""
                value, asked = dump(known)[name], dump(study)[name]
                require(False, name, asked, f"{value} as in {out}{more}, or give a new folder as --out")
            for name in GROWING:
                study = replace(study, **{name: max(getattr(known, name), getattr(study, name), key=len)})
            if study != known:
                scaling.checked(study)
            return study
        scaling.checked(study)
        with locked(out):
            write_json(out / STUDY, dump(study))
        return study

    def _ratios(self) -> list[float]:
        try:
            return [float(ratio) for ratio in between_commas(self.per_parameter)]
        except ValueError:
            raise ConfigError(
                f"per_parameter = {self.per_parameter}, must be numbers, such as 5,20"
            ) from None

    def _all(self, out: Path, study: Study, console: Console) -> int:
        """The comparison at each point, from the smallest on."""
        with locked(out), Work("encoding the text and planning"):
            scaling.encode_text(out, study)
            before, every = scaling.kept(out, study), set(product(study.designs, range(study.seeds)))
            whole = [at for at in study.points if before.get(at) == every]
            plans = {
                at: self._plan(out, study, at, before.get(at, set()))
                for at in study.points
                if at not in whole
            }
            write_json(out / STUDY, dump(study))  # one that grows is kept once it can be trained
        for name, some in {
            scaling.folder_of(out, at).name: f"{len(before[at])} of {len(every)} trainings"
            for at in study.points
            if before.get(at)
        }.items():
            console.print(f"{name}: {some} are those of {out / scaling.RESULTS} and not repeated")
        lines = scaling.results_in(out, study).get("cells", [])
        if others := len(lines) - sum(map(len, scaling.lines_in(out, study).values())):
            console.print(f"{out / scaling.RESULTS}: {others} lines of other designs or seeds are left out")
        if len(study.points) == 1:
            console.print("one size has no line; give --sizes or --per-parameter two or more for that")
        if estimated := _estimate(out, plans, before, self.jobs):
            console.print(estimated)
        code = 0
        for at, what in plans.items():
            folder = scaling.folder_of(out, at)
            if rates := scaling.transferred(out, study, at):
                run.keep_rates(folder, {name: Rate(lr, scaling.WARMUP) for name, lr in rates.items()})
            ended = finish(
                folder, what, self.jobs, console, f"scale --resume {out}",
                lambda tried: Rate(scaling.lowest(tried), scaling.WARMUP), before.get(at, set()),
            )  # fmt: skip
            if ended >= 128:
                raise pool.StoppedBy(ended - 128)
            code = code or ended
            write(out, study)
        return code

    def _plan(self, out: Path, study: Study, at: Point, before: set[tuple[str, int]]) -> Plan:
        folder = scaling.folder_of(out, at)
        scaling.keep(out, at, before)
        scaling.text_at(out, study, at)
        return plan(folder, "designs", study.settings(at), models_of_designs, threads_for(self.jobs))


def _known(out: Path) -> Study | None:
    """The study of a folder, or of the results alone that were copied there; None if there is none."""
    if (out / STUDY).is_file():
        study: Study = load(Study, read_json(out / STUDY, ConfigError), str(out / STUDY))
    elif found := scaling.results_in(out):
        study = load(Study, found["study"], str(out / scaling.RESULTS))
    else:
        return None
    return study


@contextmanager
def _until(minutes: float | None) -> Iterator[threading.Event]:
    """Context in which the process gets SIGTERM after this many minutes; the event is set if it was sent for that."""
    late = threading.Event()
    if minutes is None:
        yield late
        return

    def end() -> None:
        late.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def stop(number: int, _: object) -> None:
        raise pool.StoppedBy(number)

    before, timer = signal.signal(signal.SIGTERM, stop), threading.Timer(60 * minutes, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def _estimate(
    out: Path, plans: dict[Point, Plan], before: dict[Point, set[tuple[str, int]]], jobs: int
) -> str:
    """How long the trainings that are left take, in words, estimated from a few updates of each model; "" if
    none is."""
    seconds, cells = 0.0, 0
    for at, what in plans.items():
        s = what.settings
        assert s.dtype != "auto"
        known = dict.fromkeys(what.arms, Rate(0.0, 0.0))  # whatever they are
        left = Counter(
            cell.arm
            for cell in run.cells(scaling.folder_of(out, at), what, known)
            if (cell.arm, cell.seed) not in before.get(at, set()) and run.trained(cell).status == "missing"
        )
        if not left:
            continue
        models = {name: arm.model for name, arm in what.arms.items() if name in left}
        optims = {name: what.arms[name].optim for name in models}
        with threads_of(s.threads):
            each = seconds_per_step(models, Setting(s.batch_size, s.seq_len, s.device), [s.dtype], 1, optims)
        seconds += sum(min(each[name][s.dtype]) * what.arms[name].steps * left[name] for name in models)
        cells += left.total()
    if not cells:
        return ""
    hours = f"{seconds / jobs / 3600:.1f} hours on this machine"
    return f"{cells} trainings left, about {hours}, besides rates that are tried"


def _table(study: Study, found: dict[str, Any]) -> Table:
    """Mean losses by point, and how fast they fall."""
    many = len(study.per_parameter) > 1
    heads = [short(at.size) + (f" × {at.ratio:g}" if many else "") for at in study.points]
    at = [losses_at(found, point, WINDOWS) for point in study.points]
    rows = []
    for name in study.designs:
        law = found["laws"][WINDOWS].get(name, {})
        means = [_mean(each.get(name, {}), study.seeds) for each in at]
        falls = [fixed(law[x]["mean"], 4) if law.get(x) else "–" for x in ("alpha", "beta")]
        rows.append([title(name), *means, *falls])
    return table("held-out bits per byte, in windows", ["", *heads, "α", "β"], rows)


def _mean(losses: dict[int, float], seeds: int) -> str:
    """The mean over seeds, and how many there are if some are missing."""
    if not losses:
        return "–"
    return fixed(fmean(losses.values())) + (
        "" if len(losses) == seeds else f" ({len(losses)} of {seeds} seeds)"
    )
