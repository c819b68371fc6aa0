"""Checkpoints: each is a folder that is written atomically and verified before use.

RUN/checkpoints/step-00000100/ holds model.safetensors, training.safetensors (optimizer moments, random state) and
checkpoint.json (step, data position, held-out result, size and digest of the other two and its own digest). A
checkpoint by several ranks holds shards in place of the first two (`perspectron.train.sharded`).
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from perspectron.data.corpus import RULES
from perspectron.data.shuffle import ORDER
from perspectron.data.tokenizer import Tokenizer
from perspectron.experts.ternary import SHARE
from perspectron.model.model import LanguageModel, require_memory, shape_of
from perspectron.train import lora, moments
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.optim import falls_at
from perspectron.train.weights import fill, same_tensors
from perspectron.util.config import dump, load, meant_beside, unlike
from perspectron.util.errors import CheckpointError, ConfigError
from perspectron.util.files import (
    Record,
    atomic,
    read_json,
    remove,
    safe_join,
    sweep,
    temporary_beside,
    write_json,
)
from perspectron.util.schema import checked
from perspectron.util.tensors import load_tensors, save_tensors

RUN_LOCK = ".run.lock"
"""Lock held while a run is trained; `compare` guards its cells by a lock of its own beside it."""
MODEL, TRAINING, INDEX = "model.safetensors", "training.safetensors", "checkpoint.json"
SHARD = re.compile(r"shard-\d{5}-model-00001-of-00001\.safetensors")
"""The name of a rank's shard, as torch.distributed.checkpoint has it."""


Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class Progress:
    """The progress of a run: updates and tokens done, seconds spent, the loader's position, and held-out bits per byte
    at this step (None if not measured)."""

    step: Count = 0
    tokens: Count = 0
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    loader: dict[str, int] = field(default_factory=dict)
    heldout: float | None = None


class _Index(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="perspectron-checkpoint-1"
):
    """Contents of checkpoint.json."""

    progress: Progress
    config: dict[str, Any]
    tokenizer: str
    files: dict[str, Record]
    digest: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, what its index says of the run, and its other files. config: the run's when it was
    written; tokenizer: its fingerprint."""

    path: Path
    progress: Progress
    config: RunConfig
    tokenizer: str
    files: dict[str, Record]


class Known(NamedTuple):
    """A run's config, as values of its JSON and validated."""

    values: dict[str, Any]
    config: RunConfig


def folder(run: Path) -> Path:
    """The folder of a run's checkpoints. CheckpointError: it is a link that leads out of the run."""
    return safe_join(run, "checkpoints", CheckpointError)


def path_of(run: Path, step: int) -> Path:
    return folder(run) / _name(step)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def save(
    run: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer | None,
    progress: Progress,
) -> Path:
    """Write a checkpoint and drop those that are neither among the last `keep`, nor the best, nor the last before a
    constant rate falls. Without an optimizer it holds the weights alone, and training cannot go on from it."""
    path = path_of(run, progress.step)
    with atomic(path) as temporary:
        temporary.mkdir()
        save_tensors(temporary / MODEL, lora.merged(model) if lora.is_adapted(model) else model.state_dict())
        if optimizer is not None:
            save_tensors(temporary / TRAINING, moments.training_state(model, optimizer))
        files = {part.name: Record.of(part) for part in temporary.iterdir()}
        write_index(temporary, config, tokenizer, progress, files)
    prune(run, config.train)
    return path


def write_index(
    path: Path, config: RunConfig, tokenizer: Tokenizer, progress: Progress, files: dict[str, Record]
) -> None:
    """Write checkpoint.json, which makes a checkpoint of the files in a folder."""
    index = msgspec.to_builtins(_Index(progress, dump(config), tokenizer.fingerprint, files))
    index["digest"] = _digest(index)
    (path / INDEX).write_text(json.dumps(index, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def export(
    run: Path, config: RunConfig, tokenizer: Tokenizer, model: LanguageModel, progress: Progress
) -> None:
    """Write these weights as a run in a new folder, to load, measure and generate from. Leftovers of a killed process
    are removed."""
    for place in (run, folder(run)):
        sweep(place)
    save_config(run, config)
    tokenizer.save(run / "tokenizer.json")
    save(run, config, tokenizer, model, None, progress)


def _digest(index: dict[str, Any]) -> str:
    """SHA-256, in hex, of all fields but the digest."""
    fields = {name: value for name, value in index.items() if name != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def prune(run: Path, train: TrainConfig) -> None:
    """Drop the checkpoints that are not to be kept; `save` does it, unless it was killed before."""
    there = found_in(run)
    stay = [*there[-train.keep :], best_of(there), *extendable(there, train)[-1:]]
    for checkpoint in there:
        if checkpoint not in stay:  # hidden first: a kill must not leave half of one in sight
            hidden = temporary_beside(checkpoint.path)
            os.replace(checkpoint.path, hidden)
            remove(hidden)


def extendable(there: list[Checkpoint], train: TrainConfig) -> list[Checkpoint]:
    """Checkpoints that a run with more steps would have reached too: those from before a constant rate fell."""
    return [c for c in there if c.progress.step <= falls_at(train.steps, train.optim)]


def best_of(there: list[Checkpoint]) -> Checkpoint:
    """The checkpoint with the lowest held-out loss; the newest where none was measured."""
    measured = [(c.progress.heldout, i) for i, c in enumerate(there) if c.progress.heldout is not None]
    return there[min(measured)[1]] if measured else there[-1]


def paths(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, oldest first, whatever is in them. CheckpointError: one is a link that leads
    out of the run."""
    there = sorted(path for path in folder(run).glob("step-*") if path.name[len("step-") :].isdecimal())
    for path in there:
        safe_join(run, f"{path.parent.name}/{path.name}", CheckpointError)
    return there


def read(path: Path, known: Known | None = None) -> Checkpoint:
    """The checkpoint in a folder; CheckpointError unless its index is as it was written. The other files are not
    verified yet. known: the run's config; a checkpoint with the same one is not validated anew."""
    where = path / INDEX
    values = read_json(safe_join(path, INDEX, CheckpointError), CheckpointError)
    index = checked(values, _Index, CheckpointError, where)
    if index.digest != _digest(values):
        raise CheckpointError(f"{where}: damaged, it does not match its digest")
    try:
        config = (
            known.config
            if known and repr(known.values) == repr(index.config)
            else run_config(index.config, where)
        )
    except ConfigError as error:
        raise CheckpointError(f"{error}") from None
    if not ({MODEL} <= index.files.keys() <= {MODEL, TRAINING} or _of_ranks(index.files)):
        names = ", ".join(map(repr, index.files))[:200] or "none"
        raise CheckpointError(
            f"{where}: files are {names}, must be {MODEL} and perhaps {TRAINING}, or a shard of each rank"
        )
    if path.name.startswith("step-") and path.name != _name(index.progress.step):
        raise CheckpointError(f"{where}: of step {index.progress.step}, its folder is {path.name}")
    return Checkpoint(path, index.progress, config, index.tokenizer, index.files)


def _of_ranks(files: Iterable[str]) -> bool:
    """True if these are shards that ranks wrote."""
    return bool(files) and all(SHARD.fullmatch(name) for name in files)


def run_config(values: Any, where: object) -> RunConfig:
    """A run's config from JSON. ConfigError as `load`; CheckpointError for one of a version that is no longer read."""
    for name, versions in (("order", (ORDER,)), ("rule", RULES)):
        if isinstance(values, dict) and (stored := values.get(name)) not in versions:
            known = " or ".join(map(str, versions))
            raise CheckpointError(
                f"{where}: {name} is {stored!r}, must be {known}; other versions are no longer read: train it again"
            )
    return load(RunConfig, values, str(where))


def found_in(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run whose index reads, oldest first; their contents are not verified yet."""
    return _readable(paths(run))[0]


def _readable(
    folders: list[Path], known: Known | None = None
) -> tuple[list[Checkpoint], list[CheckpointError]]:
    there, errors = [], []
    for path in folders:
        try:
            there.append(read(path, known))
        except CheckpointError as error:
            errors.append(error)
    return there, errors


def verify(checkpoint: Checkpoint, part: int = 0, parts: int = 1) -> None:
    """Raise CheckpointError, naming the file, unless every byte is as it was written, and for other tensors in the
    folder. part, parts: of every `parts` files, check only number `part`."""
    there = {path.name for path in checkpoint.path.glob("*.safetensors")}
    if more := sorted(there - checkpoint.files.keys()):
        raise CheckpointError(f"{checkpoint.path / more[0]}: is not of this checkpoint")
    for name, record in list(checkpoint.files.items())[part::parts]:
        record.check(checkpoint.path, name, CheckpointError)


def restore(
    checkpoint: Checkpoint,
    model: LanguageModel,
    tokenizer: Tokenizer,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Load verified weights and, if given, the optimizer's moments and the random state. CheckpointError if the
    checkpoint is damaged or belongs to another model config or tokenizer."""
    verify(checkpoint)
    check(checkpoint, model, tokenizer, optimizer is not None)
    if _of_ranks(checkpoint.files):
        from perspectron.train import sharded  # torch's distributed checkpoints take long to import

        tensors = sharded.whole(checkpoint.path)
        training = {n: tensors.pop(n) for n in list(tensors) if n.startswith(moments.OF_TRAINING)}
        fill(model, tensors, checkpoint.path)
    else:
        weights = _tensors(checkpoint.path / MODEL)
        training = {} if optimizer is None else _tensors(checkpoint.path / TRAINING)
        if lora.is_adapted(model):
            weights = lora.unmerged(model, weights, training)
        fill(model, weights, checkpoint.path / MODEL)
    if optimizer is not None:
        moments.restore(checkpoint.path / TRAINING, training, model, optimizer)


def check(checkpoint: Checkpoint, model: LanguageModel, tokenizer: Tokenizer, training: bool) -> None:
    """CheckpointError, before a tensor is read, unless the checkpoint is of this model and tokenizer and, if `training`
    is to go on, holds more than weights."""
    if checkpoint.config.model != model.config:
        name, there, here = next(iter(unlike(dump(checkpoint.config.model), dump(model.config))))
        told = f"{name} is {there!r}, there {here!r}"
        raise CheckpointError(
            f"{checkpoint.path}: has another model config than the run's config.json ({told})"
        )
    _check_tokenizer(checkpoint.path, checkpoint.tokenizer, tokenizer)
    if training and MODEL in checkpoint.files and TRAINING not in checkpoint.files:
        raise CheckpointError(
            f"{checkpoint.path}: holds only weights, so training cannot resume from it; start a new run with --init"
        )


def start_from(run: Path, model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Copy the weights that `load_run` returns into `model`, with the progress of their ternary conversion.
    CheckpointError if shapes, names or the tokenizer differ."""
    fill(model, weights_from(run, model.state_dict(), tokenizer), run)


def weights_from(run: Path, own: dict[str, Tensor], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """A run's tensors; where `own` is made ternary and the run is not, the conversion is at its start. Errors as
    `start_from`."""
    source, its = load_run(run)
    _check_tokenizer(run, its.fingerprint, tokenizer)
    shares = {name: torch.zeros_like(value) for name, value in own.items() if name.endswith(SHARE)}
    weights = shares | {n: v for n, v in source.state_dict().items() if n in shares or not n.endswith(SHARE)}
    same_tensors(own, weights, run)
    return weights


def _check_tokenizer(path: Path, fingerprint: str, tokenizer: Tokenizer) -> None:
    if fingerprint != tokenizer.fingerprint:
        raise CheckpointError(
            f"{path}: trained with tokenizer {fingerprint[:12]}, the one here is {tokenizer.fingerprint[:12]}"
        )


def _tensors(path: Path) -> dict[str, Tensor]:
    return load_tensors(path, CheckpointError, "a checkpoint's tensors")[1]


def load_config(run: Path) -> RunConfig:
    """The resolved config of a run; CheckpointError if there is none."""
    return _known(run).config


def _known(run: Path) -> Known:
    """A run's config.json, validated once."""
    there = (run / "config.json").is_file()
    values = read_json(run / "config.json", CheckpointError) if there else None
    if run.suffix == ".gguf" or (isinstance(values, dict) and "architectures" in values):
        raise CheckpointError(f"no run at {run}, but a model of others: perspectron import {run} --out DIR")
    if values is None:
        raise CheckpointError(f"no run at {run}{meant_beside(run)}")
    return Known(values, run_config(values, run / "config.json"))


def save_config(run: Path, config: RunConfig) -> None:
    write_json(run / "config.json", dump(config))


def run_of(path: Path) -> Path:
    """The run's folder: `path`, or the one that the checkpoint `path` belongs to."""
    return path.resolve().parent.parent if (path / INDEX).exists() else path


@dataclass(frozen=True)
class OpenedRun:
    """A run's folder and config, one of its checkpoints, the model with its weights and the tokenizer."""

    folder: Path
    config: RunConfig
    checkpoint: Checkpoint
    model: LanguageModel
    tokenizer: Tokenizer


def load_run(run: Path) -> tuple[LanguageModel, Tokenizer]:
    """The model and tokenizer of `open_run`, with the same errors."""
    opened = open_run(run)
    return opened.model, opened.tokenizer


def open_run(run: Path) -> OpenedRun:
    """A run with the weights of its best held-out checkpoint, or of its newest where none was measured; `run` may also
    be one checkpoint's folder. The model is in eval mode.

    A damaged checkpoint gives a warning, and the newest valid one is used. CheckpointError if the run, its config or
    its tokenizer is missing or damaged, or no checkpoint is valid.
    """
    one, run = (run / INDEX).exists(), run_of(given := run)
    known, tokenizer = _known(run), Tokenizer.load(run / "tokenizer.json")
    there, errors = _readable([given] if one else paths(run), known)
    model = shape_of(known.config.model)
    require_memory(model)
    if there:  # the best last, as the last is tried first
        there.append(there.pop(there.index(best_of(there))))
    for checkpoint in reversed(there):
        try:
            restore(checkpoint, model, tokenizer)
        except CheckpointError as error:
            errors.append(error)
            continue
        if errors:
            warnings.warn(f"{errors[0]}; using {checkpoint.path.name}", stacklevel=2)
        return OpenedRun(run, known.config, checkpoint, model.eval(), tokenizer)
    raise errors[0] if errors else CheckpointError(f"{folder(run)}: no checkpoint in it")
