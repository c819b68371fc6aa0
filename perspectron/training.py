"""Training from Python, planned as `perspectron train` plans it."""

import json
import math
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from perspectron import presets
from perspectron.cli.progress import silence
from perspectron.cli.train import Train, of_run, resumed
from perspectron.data import Tokenizer
from perspectron.data.mixture import joined
from perspectron.model.model import LanguageModel
from perspectron.opening import open_model
from perspectron.train.config import TrainConfig
from perspectron.train.optim import OptimConfig
from perspectron.util.config import load, one_of, require
from perspectron.util.errors import ConfigError, PerspectronError
from perspectron.util.files import remove, write_text
from perspectron.util.machine import flushing_denormals

TEXT, TEXTS = "text.txt", "text.jsonl"
"""Files in a run's folder that keep one text that was given as it is, or several."""


class Trained(NamedTuple):
    """The result of a training: the model with the weights of its best held-out checkpoint, its tokenizer, the folder
    of the run, and that checkpoint's held-out bits per byte (None where nothing was measured).

        >>> text = "KING: QUEEN went over the hills. " * 300
        >>> trained = perspectron.train(text=text, steps=2, params=300_000, seq_len=16, quiet=True)
        >>> trained.folder.as_posix(), trained.bits_per_byte > 0
        ('runs/text', True)
    """

    model: LanguageModel
    tokenizer: Tokenizer
    folder: Path
    bits_per_byte: float | None


def train(
    data: str | Path | Sequence[str | Path] | None = None,
    *,
    text: str | Iterable[str] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    minutes: float | None = None,
    tokens: float | str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    design: str | None = None,
    params: int | None = None,
    preset: str = "",
    sizes: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Trained:
    """Train a model on a text, as `perspectron train` does: what is not given is chosen for this machine, the text and
    the time, 5 minutes if nothing says how long. Every checkpoint of the run is on disk, and it can be resumed.

    data: a path or a name that `perspectron train --data` takes, or several with weights, such as "code=0.7:src". text:
    instead, a text as it is, or several, each a document; the run's folder keeps them. out: a new folder for the run
    (default: in runs/, named after the text). resume: a run to go on with; only more `steps` may be given with it.
    minutes, tokens (such as 2e6 or "20M"), epochs, steps: how long to train, one of them. design, params: the model's
    design, and its parameters (default: what the time or the tokens can train). sizes: instead of params, sizes of
    the design to replace (None: the design's own), and vocab_size beside it. preset: instead of a design, a preset with
    such sizes. quiet: print no progress. options: any field of `perspectron.train.config.TrainConfig` or of its
    `optim`, such as lr, batch_size, seq_len, init, lora, tokenizer, template, device or seed.

    An interrupt saves the run and ends as KeyboardInterrupt, which names it; a second one ends at once. Every other
    error is a PerspectronError: ConfigError for what is not allowed, DataError for a text that cannot be read or is too
    short, StorageError for a full disk, NonFiniteError for a loss that is not finite. Nothing is left of a run that
    could not start.

        >>> import perspectron
        >>> text = "".join(f"The number {i} comes before {i + 1}. " for i in range(2000))
        >>> model, tokenizer, folder, bits = perspectron.train(
        ...     text=text, out="numbers", steps=4, preset="perspective2-tiny", seq_len=32, quiet=True
        ... )
        >>> folder.name, bits > 0
        ('numbers', True)
    """
    asked = {"minutes": minutes, "tokens": tokens, "epochs": epochs, "steps": steps}
    lengths = [name for name, value in asked.items() if value is not None]
    require(
        len(lengths) < 2, " and ".join(lengths), "given", "one of them: each sets the length of the training"
    )
    measures = {"minutes": minutes, "epochs": epochs, "params": params}
    for name, value in (measures if isinstance(tokens, str) else measures | {"tokens": tokens}).items():
        finite = value is None or (isinstance(value, Real) and math.isfinite(value))
        require(finite, name, value, "a finite number")
    kinds: dict[str, tuple[Any, Any, str]] = {
        "data": (data, str | Path | Sequence, "a path, or several with weights"),
        "text": (text, Iterable, "a text, or several"),
        "sizes": (sizes, Mapping, "values by the names of sizes"),
        "out": (out, str | Path, "the path of a folder"),
        "resume": (resume, str | Path, "the path of a run"),
        "design": (design, str, "the name of a design"),
    }
    for name, (value, kind, bound) in kinds.items():
        fits = value is None or (isinstance(value, kind) and not isinstance(value, bytes))
        require(fits, name, value, bound)
    texts = None if text is None else [text] if isinstance(text, str) else list(text)
    model = {"design": design, "params": params, "preset": preset or None, "sizes": sizes or None}
    if resume is not None:
        left_out = {"data": data, "text": text, "out": out} | model | asked | options | {"steps": None}
        for name, value in left_out.items():
            require(value is None, name, value, "left out with resume, which takes only more steps")
        saved = of_run(resumed(Path(resume)))
        more = saved.train if steps is None else replace(saved.train, steps=steps)
        return _trained(replace(saved, resume=Path(resume), train=more), quiet)
    if design is not None:
        presets.variant(design)
        for name, value in (its := presets.training(design)).items():
            require(name not in options, name, options.get(name), f"left out, as {design} has {name}={value}")
        options |= its
    for name in ("design", "params"):
        for other, instead in {"preset": preset, "init": options.get("init")}.items():
            require(not instead or model[name] is None, name, model[name], f"left out with {other}")
    require(params is None or params >= 1, "params", params, "≥ 1")
    given_sizes = {key: _plain(value) for key, value in (sizes or {}).items() if value is not None}
    solved = params is None or set(given_sizes) <= {"vocab_size"}
    require(solved, "params", params, "left out with sizes other than vocab_size")
    config = _settings({**options, "steps": steps} if steps is not None else options)
    sources = joined([str(data)] if isinstance(data, str | Path) else [str(source) for source in data or ()])
    one = bool(sources) + (texts is not None)
    require(one == 1 or (one == 0 and config.init != ""), "data, text", f"{one} of them", "one of them given")
    command = Train(
        train=config, out=None if out is None else Path(out), preset=preset, sizes=given_sizes,
        minutes=minutes, tokens=None if tokens is None else str(round(tokens) if isinstance(tokens, float) else tokens),
        epochs=epochs, given=(*options, *(["steps"] if steps is not None else ())), began=time.monotonic(),
        design=design or presets.DESIGN, params=params or 0,
    )  # fmt: skip
    if texts is not None:
        return _with_texts(command, texts, quiet)
    given = (*command.given, "data") if sources else command.given
    return _trained(replace(command, train=replace(config, data=sources or config.data), given=given), quiet)


def _plain(size: Any) -> Any:
    """A size in Python's own types, where it is a number of NumPy's or torch's, or a list of these."""
    if isinstance(size, list | tuple):
        return [_plain(item) for item in size]
    return size.item() if getattr(size, "ndim", None) == 0 else size


def _settings(options: Mapping[str, Any]) -> TrainConfig:
    """The settings of a training and its optimizer, by name. ConfigError for one that neither has, or a value of
    another type."""
    here, optim = ({field.name for field in fields(cls)} for cls in (TrainConfig, OptimConfig))
    values: dict[str, Any] = {"optim": {}}
    for name, value in options.items():
        one_of(name, sorted((here | optim) - {"optim", "data"}), "option")
        plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        (values if name in here else values["optim"])[name] = plain
    return load(TrainConfig, values, "options")


def _with_texts(command: Train, texts: list[str], quiet: bool) -> Trained:
    """Train on texts, which the run's folder keeps. Nothing of them is left of a run that could not start."""
    wrong = [text for text in texts if not isinstance(text, str)]
    require(len(texts) > 0 and not wrong, "text", wrong[0] if wrong else texts, "a text, or several")
    try:
        texts[0].encode()
    except UnicodeEncodeError as error:
        require(
            len(texts) > 1, "text", texts[0][error.start], "of whole characters, no half of a surrogate pair"
        )
    run = _free(replace(command, train=replace(command.train, data="text"), given=("data",)).folder())
    new, place = not run.exists(), run / (TEXT if len(texts) == 1 else TEXTS)
    require(
        not place.exists(), "out", str(run), f"a folder without {place.name}, which the texts would replace"
    )
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    write_text(place, texts[0] if len(texts) == 1 else "".join(lines))
    data: dict[str, Any] = {
        "out": run,
        "train": replace(command.train, data=str(place)),
        "given": (*command.given, "data"),
    }
    try:
        return _trained(replace(command, **data), quiet)
    except PerspectronError:
        if not (run / "config.json").exists():
            remove(run if new else place)
        raise


def _free(run: Path) -> Path:
    """The folder, for a new run. ConfigError: it is a run already."""
    if (run / "config.json").exists():
        raise ConfigError(f"out: {run} is a run already; go on with resume={str(run)!r}, or name a new out")
    return run


def _trained(command: Train, quiet: bool) -> Trained:
    """Run a command for training, and open the run that it leaves."""
    run = command.resume or _free(command.folder())
    with silence(quiet), flushing_denormals():
        code = replace(command, out=None if command.resume else run)()
    if code not in (0, 128 + signal.SIGINT):  # another signal, which asks the program to end
        raise SystemExit(code)
    if code:
        raise KeyboardInterrupt(f"stopped and saved; go on with perspectron.train(resume={str(run)!r})")
    opened = open_model(run)
    heldout = None if opened.checkpoint is None else opened.checkpoint.progress.heldout
    return Trained(opened.model, opened.tokenizer, run, heldout)
