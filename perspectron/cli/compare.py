"""`perspectron compare`."""

import os
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from perspectron.cli.console import Console, progress
from perspectron.cli.options import BatchSize, Device, Encoding, Jobs, SeqLen, count, say, table
from perspectron.cli.progress import Work
from perspectron.compare import measure, pool, results, run
from perspectron.compare.plan import (
    PLAN,
    STUDY,
    Plan,
    Settings,
    check_designs,
    models_of_designs,
    plan,
    read,
    threads_for,
    vocabulary_in,
)
from perspectron.compare.pool import Ended
from perspectron.compare.report import tables
from perspectron.compare.report.summary import STREAMING, ranked
from perspectron.compare.run import Cell, Rate
from perspectron.data import absolute, with_encoding
from perspectron.eval.suites import BESIDE_LOSS
from perspectron.train.estimate import slow
from perspectron.util.config import between_commas, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import locked
from perspectron.util.machine import pick_device

DESIGNS = "perspective,adr,lens,drm,gpt2,transformer,gla,ssd"
QUICK: dict[str, Any] = {
    "out": Path("runs/quick"), "designs": "perspective2,transformer+,gla+", "params": "300k", "tokens": "200k",
    "seeds": 1, "rates": (4e-3,), "warmups": (0.1,), "suites": "", "jobs": 2,
}  # fmt: skip
"""Values that --quick gives to options that are not typed."""
OF_STDLIB: dict[str, Any] = {"heldout": 0.01, "dev": 0.01}
"""Further values of --quick for its default text, stdlib, which is larger than most."""


@dataclass(frozen=True)
class Compare:
    """Train designs on your text at equal parameters and tokens, measure them, and write a report.

    Example: perspectron compare --params 1M --tokens 1M --seeds 1 --out runs/compare

    Your text: perspectron compare --designs perspective2,gpt2 --data letters.txt --tokens 20M --out runs/mine

    A first look in two minutes, from which nothing follows: perspectron compare --quick --data letters.txt

    Resume after an interruption: perspectron compare --resume runs/compare

    Only rewrite the page of a results.json: perspectron compare --report runs/compare/results.json

    One report of several, made one after another: perspectron compare --report a/results.json b/results.json --out c
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--quick", "--out", "--designs", "--data", "--params", "--tokens", "--seeds", "--jobs", "--resume",
    )  # fmt: skip
    out: Path | None = None
    """Output folder; with the same options as before, the comparison resumes there."""
    resume: Path | None = None
    """Folder of a comparison to resume; all other options come from there."""
    quick: bool = False
    """A first look in about two minutes on two cores: three designs, 300,000 parameters, 200,000 tokens, one seed, one
    learning rate and no suites, but for what is typed. It shows what a comparison is; no conclusion follows from it."""
    report: tuple[Path, ...] = ()
    """Write the page of this results.json beside it, without training; of several, on the same text, budget and seeds,
    one results.json with its page in --out."""
    designs: str = DESIGNS
    """Designs to compare, separated by commas; a variant is written as "gla[embedding_norm=false]"."""
    params: str = "5M"
    """Active parameters of each design, within 2%."""
    tokens: str = "20M"
    """Tokens that each design is trained on."""
    seeds: int = Settings.seeds
    """Number of trainings of each design, with different weights and order of the text."""
    data: str = Settings.data
    """ "stdlib", "sources" or "prose" (of the packages installed), "books", a text file, a folder, a table such as
    .jsonl, or a folder written by `tokenize`."""
    encoding: Encoding = ""
    heldout: float = Settings.heldout
    """Share of the text that is held out and read once, at the end."""
    dev: float = Settings.dev
    """Share of the text that is used to choose learning rates and not for training."""
    match: Literal["tokens", "flops", "time", "state"] = Settings.match
    """Budget that is equal besides parameters: tokens, the transformer's FLOPs or time at --tokens, or the first
    design's bytes of recurrent state, within 5%."""
    state: int = Settings.state
    """With --match state: bytes of state; 0 takes the first design's."""
    vocab_size: int = Settings.vocab_size
    """Size of the vocabulary; 0 derives it from the parameters."""
    seq_len: SeqLen = Settings.seq_len
    batch_size: BatchSize = Settings.batch_size
    rates: tuple[float, ...] = Settings.rates
    """Peak learning rates to try for each design, extended if the best is at an end; a single one is used without a
    trial."""
    warmups: tuple[float, ...] = Settings.warmups
    """Warm-up lengths as shares of the updates, each tried with each rate."""
    rate_share: float = Settings.rate_share
    """Share of the tokens for each trial."""
    dtype: Literal["auto", "float32", "bfloat16"] = Settings.dtype
    """Autocast for all designs; "auto" takes bfloat16 if it is measured to be faster."""
    device: Device = Settings.device
    suites: str = ",".join(BESIDE_LOSS)
    """Suites to measure trained models with, besides their loss."""
    recall: Literal["quick", "full", "long"] = Settings.recall
    """Recall tasks: "quick" is two with one seed, "full" all with three seeds, which takes much longer, "long" many
    pairs and facts that are combined, with one."""
    jobs: Jobs = 1

    def __call__(self) -> int:
        require(self.jobs >= 1, "jobs", self.jobs, "≥ 1")
        console = progress()
        if self.report:
            console.print(f"report: {self._report()}")
            return 0
        folder = self.resume or self.out
        if folder is None or (self.resume and self.out):
            raise ConfigError("compare needs --out DIR for a new comparison, or --resume DIR to continue one")
        if self.resume is not None:
            alone = self == Compare(resume=self.resume, jobs=self.jobs)
            require(
                alone,
                "resume",
                str(self.resume),
                "the only option besides --jobs: the others come from that folder",
            )
            what = read(folder)
            bound = "a comparison; a search goes on with the command of perspectron search that began it"
            require(what.kind != "search", "resume", str(folder), bound)
            study = folder.resolve().parent
            bound = f"no part of a study, which has the rates: perspectron scale --resume {study}"
            require(not (study / STUDY).is_file(), "resume", str(folder), bound)
            return finish(folder, what, self.jobs, console)
        settings = self.settings()
        self._require_effect(settings)
        if self.quick:
            one = len(self.rates) * len(self.warmups) == 1
            short = f"seeds: {self.seeds}, tokens: {self.tokens}{', one learning rate for all designs' if one else ''}"
            say(f"a first look ({short}), from which no conclusion follows")
        vocab_size = vocabulary_in(self.data, self.vocab_size)
        check_designs(replace(settings, vocab_size=vocab_size))  # said before the text is read
        with locked(folder), Work("encoding the text and planning"):
            what = plan(folder, "designs", settings, models_of_designs, threads_for(self.jobs))
        return finish(folder, what, self.jobs, console)

    def _report(self) -> Path:
        """Write the page of results that exist already: its path."""
        one, out = len(self.report) == 1, self.out
        alone = self == Compare(report=self.report, out=None if one else out)
        bound = (
            "the only option: nothing is trained"
            if one
            else "with --out DIR and no other option: nothing is trained"
        )
        given = " ".join(map(str, self.report))
        require(alone and (one or out is not None), "report", given, bound)
        if out is None:
            return results.write_page(self.report[0])
        whole = results.merged(self.report)
        require(not (out / PLAN).exists(), "out", str(out), "a folder without a comparison of its own")
        with locked(out):
            results.write(out, whole)
        return out / results.PAGE

    def _require_effect(self, settings: Settings) -> None:
        """ConfigError for an option that would do nothing."""
        recalls = "recall" in settings.suites or self.recall == Settings.recall
        require(recalls, "recall", self.recall, "left out where --suites has no recall")
        tried = len(self.rates) * len(self.warmups) > 1 or self.rate_share == Settings.rate_share
        require(
            tried, "rate_share", self.rate_share, "left out: with one rate and one warm-up nothing is tried"
        )

    def settings(self) -> Settings:
        return Settings(
            tuple(between_commas(self.designs)), count(self.params, "params"), count(self.tokens, "tokens"), self.seeds,
            absolute(with_encoding(self.data, self.encoding)),
            self.heldout, self.dev, self.match, self.vocab_size, self.seq_len, self.batch_size, self.rates,
            self.warmups, self.rate_share, self.dtype, self.device, suites=tuple(between_commas(self.suites)),
            recall=self.recall, state=self.state,
        )  # fmt: skip


def defaults(arguments: Sequence[str]) -> Compare:
    """The command whose values are the defaults of options left out: with --quick, those of QUICK."""
    typed = {word.split("=")[0] for word in arguments}
    if "--quick" not in typed or "--resume" in typed:  # which refuses --quick, as any other option
        return Compare()
    return Compare(**QUICK, **({} if "--data" in typed else OF_STDLIB))


def finish(
    folder: Path,
    what: Plan,
    jobs: int,
    console: Console,
    again: str = "",
    choose: Callable[[list[dict[str, Any]]], run.Rate] = run.best,
    without: Container[tuple[str, int]] = (),
) -> int:
    """Do what is left of a plan, and return the exit code. again: the command that resumes it. choose: the rate of an
    arm, from those that were tried. without: (arm, seed) of trainings that are not wanted."""
    try:
        with locked(folder):
            for line in _summary(what):
                console.print(line)
            results.note_conditions(folder, what, jobs)
            rates, tried = run.choose_rates(
                folder, what, lambda cells: train(folder, what, cells, jobs, console), choose
            )
            console.print(
                "learning rates: " + ", ".join(_chosen(tried[name], rates[name], name) for name in rates)
            )
            cells = [cell for cell in run.cells(folder, what, rates) if (cell.arm, cell.seed) not in without]
            at_once = len(what.arms) * -(-jobs // len(what.arms))
            for end in range(at_once, len(cells) + at_once, at_once):  # results are written after each seed
                train(folder, what, cells[end - at_once : end], jobs, console)
                failed = _measure(folder, what, cells, jobs, console, last=end >= len(cells))
                found = results.collect(folder, what, rates, tried)
                results.write(folder, found)
    except pool.StoppedBy as stop:
        console.print(f"stopped and saved; resume with: perspectron {again or f'compare --resume {folder}'}")
        return 128 + stop.number
    console.print(_table(found))
    console.print(f"report: {folder / results.PAGE}; numbers: {folder / results.RESULTS}")
    missing = [cell for cell in cells if run.trained(cell).status == "missing"]
    for cell in missing:
        console.print(f"not trained: {cell.arm}, seed {cell.seed} (see {cell.folder / pool.LOG})")
    return 1 if missing or failed else 0


def _table(found: dict[str, Any]) -> Table:
    """Both scores of each arm, the state of one that streams, and the compressors."""
    both = ranked(found), ranked(found, STREAMING)
    whole = tables.ranking(*both, found["plan"]["reference"], found["compressors"], "")
    columns = [
        whole.head.index(name) for name in ("", "windows", "streaming", "streaming, state", "parameters")
    ]
    rows = [[row[column].text for column in columns] for row in whole.rows]
    return table("held-out bits per byte", [whole.head[column] for column in columns], rows)


def _measure(
    folder: Path, what: Plan, cells: list[Cell], jobs: int, console: Console, *, last: bool
) -> list[Ended]:
    """Run the suites on trained cells and return the jobs that failed. Costs come last and alone, so that nothing
    disturbs their timings."""
    threads, failed = what.settings.threads, list[Ended]()
    finished = [cell for cell in cells if run.trained(cell).status == "finished"]

    def ended(end: Ended) -> None:
        if end.code != 0:
            failed.append(end)
        said = "" if end.code == 0 else f"  not measured: {end.said} (exit code {end.code})"
        console.print(f"measured {end.job.name}  {end.seconds:.0f} s{said}")

    pool.work(measure.jobs(folder, what.settings, finished), jobs, threads, ended=ended)
    if last and "cost" in what.settings.suites:
        pool.work(measure.cost_jobs(folder), 1, threads, ended=ended)
    return failed


def _chosen(tried: list[dict[str, Any]], rate: Rate, name: str) -> str:
    """The rate of an arm, in words, and whether one outside of those tried may be better."""
    end = "; the last one tried, others may be better" if run.at_an_end(tried, rate) else ""
    return f"{name} {rate.lr:g} ({rate.warmup:.0%} warm-up{end})"


def _summary(what: Plan) -> list[str]:
    s, here, arms = what.settings, threads_for(1), len(what.arms)
    lines = [
        f"{arms} {'arms' if what.kind == 'ablations' else 'designs'} × {s.seeds} seeds, {s.params:,} parameters, "
        f"{s.tokens:,} tokens ({s.match} matched), windows of {s.seq_len}, {s.dtype}, "
        f"{s.threads} thread{'s' * (s.threads > 1)} each"
    ]
    lines += slow(pick_device(s.device), s.dtype)
    if "OMP_NUM_THREADS" in os.environ and here != s.threads:
        lines.append(
            f"OMP_NUM_THREADS is {here}; this comparison began with {s.threads} and goes on so, as other numbers of "
            "threads add in another order"
        )
    if run.alike(what):
        lines.append("warm-ups that are as long in a trial are tried once, as the shortest")
    return lines


def train(folder: Path, what: Plan, cells: list[Cell], jobs: int, console: Console) -> None:
    """Train cells with a bar that counts updates."""
    total, done = sum(cell.steps for cell in cells), {cell: run.reached(cell) for cell in cells}
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total, completed=sum(done.values()))

        def look(running: list[Cell]) -> None:
            done.update({cell: run.reached(cell) for cell in running})
            names = ", ".join(f"{cell.arm} {cell.seed}" for cell in running)
            bar.update(task, completed=sum(done.values()), description=names)

        def ended(cell: Cell, end: Ended) -> None:
            done[cell] = cell.steps
            console.print(_line(cell, end, "dev" if what.settings.dev else "held out"))

        run.train(folder, what, cells, jobs, ended=ended, look=look)


def _line(cell: Cell, end: Ended, split: str) -> str:
    state = run.trained(cell)
    head = f"{cell.arm}  seed {cell.seed}  rate {cell.rate.lr:g}, {cell.rate.warmup:.0%} warm-up  {end.seconds:.0f} s  "
    if state.bits is not None:
        return head + f"{state.bits:.4f} bits per byte, {split}"
    return head + f"{state.status}: {state.why} (exit code {end.code})"
