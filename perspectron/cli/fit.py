"""One training at the terminal: what it says before, while it runs, and at its end."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from perspectron.cli.console import Console, progress
from perspectron.cli.options import differences, print_json
from perspectron.cli.progress import Work
from perspectron.data import Shards, Split, Tokenizer
from perspectron.eval import perplexity
from perspectron.eval.subject import Subject
from perspectron.eval.written import heats, written
from perspectron.opening import open_model
from perspectron.train import checkpoint
from perspectron.train.config import Layout, RunConfig, launched
from perspectron.train.estimate import Estimate, require_room, slow
from perspectron.train.loggers import Kind, logger
from perspectron.train.loop import Trainer
from perspectron.train.metrics import HELDOUT, Metrics, measured, read_metrics
from perspectron.train.pace import Pace
from perspectron.train.page import PAGE
from perspectron.train.prepare import prepare, training_batches
from perspectron.train.resume import how_to_go_on
from perspectron.util import registry
from perspectron.util.config import require
from perspectron.util.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    PerspectronError,
    StorageError,
)
from perspectron.util.files import locked, plain, read_json, remove, write_json
from perspectron.util.machine import memory_kept, pick_device
from perspectron.util.numbers import duration

CLOSING = 3.0  # seconds from the last checkpoint to the end: compressors, the page's pictures of a memory
WHOLE_SHARE, WHOLE_SECONDS = 0.1, 5.0
"""Share of a training's time, or seconds if they are more, that reading all held-out text may take."""


def fit(
    run: Path,
    config: RunConfig,
    *,
    ended: list[Path] | None = None,
    allow_changed: bool = False,
    as_json: bool = False,
    settle: Callable[[RunConfig, Shards], RunConfig] = lambda config, _: config,
    ends: float | None = None,
    log: Kind = "",
    layout: Layout = Layout(),  # noqa: B008
) -> int:
    """Prepare the data, train, and say where the results are; the command's exit code. A run that cannot start leaves
    nothing behind. ended: checkpoints of a run that gets more steps, as `extend` returns them. settle: fills in the
    parts of the config that depend on the text. ends: time of the monotonic clock to keep to. layout: how several
    processes share the training. StorageError: another process trains in the folder."""
    console, started = progress(), time.monotonic()
    if config.recipe is not None:
        alone = "plain for several processes; leave torchrun out for the stages"
        require(not launched(), "recipe", "staged", alone)
        recipe().plan(run, config)  # errors come before the text is read
    alone = "0 for several processes, which would not drop what one does"
    require(config.model.dropout == 0 or not launched(), "dropout", config.model.dropout, alone)
    device = pick_device(config.train.device)
    require_room(config, device, layout.held(device.type))
    new = not run.is_dir()
    with locked(run, checkpoint.RUN_LOCK), memory_kept():
        trainer: Trainer | None = None
        with nothing_left(run, new):
            with Work("reading and encoding the text") as work:
                tokenizer, shards, summary = prepare(run, config, tell=work.read)
            if tokenizer.vocab_size < config.model.vocab_size and not config.train.init:
                config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
            training_batches(config, shards)  # too little text is an error before anything is measured
            with Work("timing this machine"):
                config = settle(config, shards)
            if ended is None:
                config = same_as_before(run, config)
            if config.recipe is None:
                with Work(f"building {config.model.name}"):
                    options: dict[str, Any] = {"ended": ended or (), "allow_changed": allow_changed}
                    if launched():
                        from perspectron.cli import together  # torch.distributed takes long to import

                        paced = ends is not None
                        trainer = together.trainer(run, config, tokenizer, shards, paced=paced, **options)
                    else:
                        trainer = Trainer(run, config, tokenizer, shards, **options)
        empty = _prompts_alone(shards.split("train"), config.train.seq_len)
        for line in [summary, *empty, *slow(device, config.train.dtype)]:
            console.print(line)
        finished = checkpoint.path_of(run, config.train.steps).is_dir()
        if trainer is None:
            code = _fit_staged(run, config, tokenizer, shards, allow_changed, as_json, console, log)
        else:
            code = _fit_plain(trainer, as_json, console, started, ends, log)
    if finished and code == 0:
        console.print(
            f"this run is already finished, at {config.train.steps:,} steps; {how_to_go_on(run, config)}"
        )
    return code


def _prompts_alone(split: Split, seq_len: int) -> list[str]:
    """A line to print if a tenth or more of the windows hold prompts alone and are left out; else none."""
    windows = (split.tokens - 1) // seq_len
    share = 1 - len(split.windows_learned(seq_len)) / max(windows, 1)
    if windows == 0 or share < 0.1:
        return []
    told = "are prompts alone and left out; of longer ones (--seq-len) fewer are"
    return [f"about {share:.0%} of the windows of {seq_len} tokens {told}"]


@contextlib.contextmanager
def nothing_left(run: Path, new: bool) -> Iterator[None]:
    """Remove what the block wrote if it fails before the run has a config; the folder too if it is new."""
    before = {path for path in run.iterdir() if path.name != checkpoint.RUN_LOCK}
    try:
        yield
    except PerspectronError as error:
        if not isinstance(error, StorageError) and not (run / "config.json").exists():
            for path in [run] if new and not before else set(run.iterdir()) - before:
                remove(path)
        raise


def _fit_plain(
    trainer: Trainer, as_json: bool, console: Console, started: float, ends: float | None, log: Kind
) -> int:
    run, begun = trainer.run_dir, trainer.progress.step
    try:
        stopped = _fit(trainer, as_json, console, ends=ends, log=log)
    except NonFiniteError as error:
        rate, saved = trainer.config.train.optim.lr, checkpoint.found_in(run)
        kept = f"; {run} holds step {saved[-1].progress.step}" if saved else ""
        raise NonFiniteError(
            f"{error}{kept}. Start again in another folder with a lower learning rate: --lr {rate / 2:g} --out {run}-2"
        ) from None
    if stopped is not None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            console.print(
                f"stopped and saved at step {trainer.progress.step}; resume with: perspectron train --resume {run}"
            )
        return 128 + stopped
    if trainer.best < math.inf and (trainer.progress.step > begun or not _concluded(trainer)):
        for line in _ending(trainer, time.monotonic() - started):
            console.print(line)
    return 0


def _ending(trainer: Trainer, seconds: float) -> list[str]:
    """The closing lines of a run: its result as `eval` tells it, and what to do next."""
    run, began = trainer.run_dir, time.monotonic()
    result = _result(trainer)
    if trainer.page is not None:
        trainer.page.end("finished", result=result, heats=[] if launched() else heats(trainer))
    seconds += time.monotonic() - began
    lines = [f"done in {duration(seconds)}: {result}; page: {run / PAGE}"]
    course = [bits for line in read_metrics(run) if "loss" not in line for _, bits in [measured(line)]]
    if course and course[-1] > 1.01 * trainer.best:
        lines.append(
            f"the loss rose to {course[-1]:.3f} towards the end, and the best checkpoint was kept: "
            "train for less time, or on more text"
        )
    return [
        *lines,
        "next:",
        f"  perspectron generate {run} --max-tokens 200",
        f"  perspectron chat {run}",
        f"  perspectron eval {run}",
    ]


def _result(trainer: Trainer) -> str:
    """The loss of the best checkpoint on all of the held-out text, beside compressors of it, as `eval` measures it, and
    kept as RUN/heldout.json; where that takes long or is not to be read yet, the best loss on a sample, in words."""
    run, train, split = trainer.run_dir, trainer.config.train, trainer.heldout_split
    if not _reads_all(trainer):
        on = "held-out" if train.measured_on == "heldout" else "dev"
        tokens = min(train.eval_tokens or split.tokens, split.tokens)
        return (
            f"best {on} {trainer.best:.3f} bits per byte on {tokens:,} of {split.tokens:,} tokens of it, a sample; "
            "all held-out text, beside gzip and xz, is for eval"
        )
    with Work("measuring on the held-out text"):
        opened = open_model(run)
        opened.model.to(trainer.device)
        found = perplexity.measure(Subject(opened, split, train.seq_len))
    step = None if opened.checkpoint is None else opened.checkpoint.progress.step
    write_json(run / HELDOUT, {"step": step} | plain(found))
    return perplexity.said(found)


def _reads_all(trainer: Trainer) -> bool:
    """True if a run's end measures all of the held-out text."""
    if launched() or trainer.config.train.measured_on == "dev":
        return False
    takes = _whole(trainer, trainer.progress.seconds / max(1, trainer.progress.step))
    return takes <= _patience(trainer.progress.seconds)


def _concluded(trainer: Trainer) -> bool:
    """False for a finished run that was killed before its result was kept."""
    if not _reads_all(trainer):
        return True
    step = checkpoint.best_of(checkpoint.found_in(trainer.run_dir)).progress.step
    try:
        return bool(read_json(trainer.run_dir / HELDOUT, CheckpointError)["step"] == step)
    except (CheckpointError, KeyError, TypeError):
        return False


def _whole(trainer: Trainer, each: float) -> float:
    """Seconds to read all held-out text twice, where reading a token costs about half of training on it. each: seconds
    of an update."""
    train = trainer.config.train
    return each * trainer.heldout_split.tokens / (train.batch_size * train.seq_len * train.accumulate)


def _patience(seconds: float) -> float:
    """Seconds that reading all held-out text may take after so many of training."""
    return max(WHOLE_SECONDS, WHOLE_SHARE * seconds)


def recipe() -> Any:
    """The module of the staged recipe, which a design brings."""
    return registry.part("recipes", "staged")


def _fit_staged(
    run: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    shards: Shards,
    allow_changed: bool,
    as_json: bool,
    console: Console,
    log: Kind,
) -> int:
    def train(trainer: Trainer, stage: Any) -> int | None:
        console.print(f"{stage.number}  {stage.name}")
        return _fit(trainer, as_json, console, {"stage": stage.name}, log=log)

    def report(row: dict[str, Any]) -> None:
        if as_json:
            print_json(row)
        console.print(stage_line(row))

    options = {"fit": train, "report": report, "allow_changed": allow_changed}
    stopped: int | None = recipe().staged(run, config, tokenizer, shards, **options)
    if stopped is not None:
        with contextlib.suppress(OSError):  # of a terminal that was closed
            console.print(f"stopped and saved; resume with: perspectron train --resume {run}")
        return 128 + stopped
    console.print(f"stages: {run / recipe().ROWS}; page: {run / PAGE}")
    return 0


def stage_line(row: dict[str, Any]) -> str:
    """The end of a stage, in words."""
    text = f"   {row['stage']}: held-out {row['heldout_bits_per_byte']:.3f} bits per byte"
    if row["layers"]:
        text += f", Gini {row['gini']:.3f}, reach {row['reach']:.2f}, delta {row['delta']:.3f}"
    return text


def same_as_before(run: Path, config: RunConfig) -> RunConfig:
    """The config of the run if it has one, which settled what was "auto". ConfigError when another is asked."""
    if not (run / "config.json").is_file():
        return config
    saved = checkpoint.load_config(run)
    config = replace(config, rule=saved.rule)  # its text is encoded already
    if config.train.dtype == "auto":
        config = replace(config, train=replace(config.train, dtype=saved.train.dtype))
    if config == saved:
        return saved
    what = "another model"
    if config.model == saved.model:
        flag, (_, there) = next(iter(differences(config, saved).items()))
        what = f"{flag} {there}"
    raise ConfigError(f"{run}: the run was started with {what}; use --resume {run}, or a new --out")


def _fit(
    trainer: Trainer,
    as_json: bool,
    console: Console,
    beside: dict[str, str] | None = None,
    ends: float | None = None,
    log: Kind = "",
) -> int | None:
    """Train to the end with a bar, or with JSON lines, each of which also has the fields of `beside`. ends: time to
    keep to."""
    if trainer.damaged is not None:
        console.print(f"warning: {trainer.damaged}; resuming from step {trainer.progress.step}")
    closing = CLOSING
    if trainer.progress.step < trainer.config.train.steps:
        with Work("a first pass"):
            estimate = trainer.estimate()
        takes = _whole(trainer, estimate.seconds)
        step, tokens = trainer.progress.step, trainer.heldout_split.tokens
        seconds = estimate.whole(trainer.config, tokens, step) if ends is None else ends - time.monotonic()
        if takes <= _patience(seconds):
            closing += takes
        for line in _plan(trainer, estimate, seconds + closing * (ends is None)):
            console.print(line)
    pace = None if ends is None else Pace(ends, closing=closing)
    text = trainer.shards.split("train")
    with logger(log, trainer.run_dir, trainer.config, text, trainer.progress.step) as logged:
        if as_json:

            def lines(line: Metrics) -> None:
                print_json((beside or {}) | line)
                logged(line)

            return trainer.fit(report=lines, pace=pace, write=written)
        return fit_with_a_bar(trainer, console, pace, ends, logged)


def fit_with_a_bar(
    trainer: Trainer,
    console: Console,
    pace: Pace | None,
    ends: float | None,
    logged: Callable[[Metrics], None],
) -> int | None:
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    ) as bar:
        speed = Speed(trainer.progress.step)
        task = bar.add_task("", total=trainer.config.train.steps, completed=trainer.progress.step)

        def report(line: Metrics) -> None:
            logged(line)
            steps = trainer.config.train.steps
            said = speed.line(line, steps, ends)
            if "loss" in line:
                bar.update(task, completed=line["step"], total=steps, description=said)
            if "loss" not in line or (not console.is_terminal and speed.due(line["step"], steps)):
                console.print(said)

        return trainer.fit(report=report, pace=pace, write=written)


def _plan(trainer: Trainer, estimate: Estimate, seconds: float) -> list[str]:
    """The opening lines of a run: what will be trained, for how long, all that follows included, and in what memory."""
    config, step = trainer.config, trainer.progress.step
    train, steps = config.train, config.train.steps
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    batch = train.batch_size * train.seq_len * train.accumulate
    passes = steps * batch / (trainer.loader.windows * train.seq_len)
    begin = f"resuming from step {step:,} of {steps:,}" if step else f"{steps:,} updates of {batch:,} tokens"
    return [
        f"{config.model.name}: {size / 1e6:.2f} M parameters, {train.dtype}, {trainer.device}, "
        f"{train.optim.title}, learning rate {train.optim.lr:g}",
        f"{begin}: {steps * batch / 1e6:.3g} M tokens, {passes:.2g} passes over the text",
        f"about {duration(seconds)}, until {time.strftime('%H:%M:%S', time.localtime(time.time() + seconds))}; "
        f"{estimate.bytes / 1e9:.1f} GB of memory",
        f"to watch it, open {trainer.run_dir / PAGE} in a browser",
    ]


class Speed:
    """Lines that a training prints as it goes, with speed and time left estimated from the last updates."""

    EVERY = 10.0  # seconds between lines where there is no terminal

    def __init__(self, step: int) -> None:
        self._recent = deque([(time.monotonic(), step, 0)], maxlen=32)
        self._said = -math.inf

    def line(self, line: Metrics, steps: int, ends: float | None) -> str:
        """A line of metrics, in words."""
        head = f"step {line['step']:,}/{steps:,}"
        if "loss" not in line:
            text, bits = measured(line)
            return f"{head}  {text} {bits:.3f} bits per byte"
        now = time.monotonic()
        self._recent.append((now, line["step"], line["tokens"]))
        first, last = self._recent[0], self._recent[-1]
        each = (now - first[0]) / max(1, last[1] - first[1])
        left = (steps - line["step"]) * each if ends is None else max(0.0, ends - now)
        return f"{head}  loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s  {duration(left)} left"

    def due(self, step: int, steps: int) -> bool:
        """True if a line is to be printed where lines are not written over."""
        now = time.monotonic()
        if now - self._said < self.EVERY and step < steps:
            return False
        self._said = now
        return True
