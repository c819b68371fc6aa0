"""Checkpoints: each is a folder that is written atomically and verified before use.

RUN/checkpoints/step-00000100/ holds model.safetensors, training.safetensors (optimizer moments, random state)
and checkpoint.json (step, data position, held-out result, size and digest of the other two and its own digest).
"""

import hashlib
import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perspectron.config import dump, load, unlike
from perspectron.data.tokenizer import Tokenizer
from perspectron.errors import CheckpointError, ConfigError
from perspectron.experts.ternary import SHARE
from perspectron.files import (
    atomic,
    load_tensors,
    opened,
    read_json,
    remove,
    safe_join,
    save_tensors,
    sha256,
    sweep,
    temporary_beside,
    write_json,
)
from perspectron.model import LanguageModel, allocated, require_memory
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.optim import falls_at

FORMAT = "perspectron-checkpoint-1"
RUN_LOCK = ".run.lock"
"""Held while a run is trained; beside it `compare` keeps its cells by a lock of its own."""
MODEL, TRAINING, INDEX = "model.safetensors", "training.safetensors", "checkpoint.json"


@dataclass(frozen=True)
class Progress:
    """The progress of a run: updates and tokens done, seconds spent, the loader's position, and held-out bits per byte
    at this step (None if not measured)."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loader: dict[str, int] = field(default_factory=dict)
    heldout: float | None = None


@dataclass(frozen=True)
class Record:
    """Size and digest of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A folder, what its index says of the run, and its other files. config: as it was when this was written;
    tokenizer: its fingerprint."""

    path: Path
    progress: Progress
    config: RunConfig
    tokenizer: str
    files: dict[str, Record]


def folder(run: Path) -> Path:
    """CheckpointError: a link that leads out of the run."""
    return safe_join(run, "checkpoints", CheckpointError)


def path_of(run: Path, step: int) -> Path:
    return folder(run) / f"step-{step:08d}"


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
        save_tensors(temporary / MODEL, model.state_dict())
        if optimizer is not None:
            save_tensors(temporary / TRAINING, _training_state(model, optimizer))
        parts = {part.name: part for part in temporary.iterdir()}
        files = {name: {"bytes": part.stat().st_size, "sha256": sha256(part)} for name, part in parts.items()}
        index: dict[str, Any] = {
            "format": FORMAT,
            "progress": asdict(progress),
            "config": dump(config),
            "tokenizer": tokenizer.fingerprint,
            "files": files,
        }
        index["digest"] = _digest(index)
        (temporary / INDEX).write_text(json.dumps(index, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    prune(run, config.train)
    return path


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
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _training_state(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors


def prune(run: Path, train: TrainConfig) -> None:
    """Drop the checkpoints that are not to be kept; `save` does it, unless it was killed before."""
    there = found_in(run)
    stay = [*there[-train.keep :], _best(there), *extendable(there, train)[-1:]]
    for checkpoint in there:
        if checkpoint not in stay:  # hidden first: a kill must not leave half of one in sight
            hidden = temporary_beside(checkpoint.path)
            os.replace(checkpoint.path, hidden)
            remove(hidden)


def extendable(there: list[Checkpoint], train: TrainConfig) -> list[Checkpoint]:
    """Those that a run with more steps would have come to as well: from before a constant rate fell."""
    return [c for c in there if c.progress.step <= falls_at(train.steps, train.optim)]


def _best(there: list[Checkpoint]) -> Checkpoint:
    """The lowest held-out loss; the newest where none was measured."""
    measured = [(c.progress.heldout, i) for i, c in enumerate(there) if c.progress.heldout is not None]
    return there[min(measured)[1]] if measured else there[-1]


def paths(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, oldest first, whatever is in them. CheckpointError: one is a link that leads
    out of the run."""
    there = sorted(path for path in folder(run).glob("step-*") if path.name[len("step-") :].isdecimal())
    for path in there:
        safe_join(run, f"{path.parent.name}/{path.name}", CheckpointError)
    return there


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder; CheckpointError unless its index is as it was written. The other files are
    not verified yet."""
    index = read_json(safe_join(path, INDEX, CheckpointError), CheckpointError)
    try:
        digest = index.pop("digest")
        if index["format"] != FORMAT:
            raise CheckpointError(f"{path / INDEX}: format {index['format']!r}, must be {FORMAT!r}")
        if digest != _digest(index):
            raise CheckpointError(f"{path / INDEX}: damaged, it does not match its digest")
        known = index | {"config": _run_config(index["config"])}
        whole = load(_Index, known, str(path / INDEX))
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{path / INDEX}: not the index of a checkpoint") from None
    except ConfigError as error:
        raise CheckpointError(f"{error}") from None
    if not {MODEL} <= whole.files.keys() <= {MODEL, TRAINING}:
        names = ", ".join(map(repr, whole.files))[:200] or "none"
        raise CheckpointError(f"{path / INDEX}: files are {names}, must be {MODEL} and perhaps {TRAINING}")
    if path.name.startswith("step-") and path.name != path_of(path, whole.progress.step).name:
        raise CheckpointError(f"{path / INDEX}: of step {whole.progress.step}, its folder is {path.name}")
    for name in ("step", "tokens", "seconds"):
        if (value := getattr(whole.progress, name)) < 0:
            raise CheckpointError(f"{path / INDEX}: progress.{name} is {value}, must be ≥ 0")
    return Checkpoint(path, whole.progress, whole.config, whole.tokenizer, whole.files)


@dataclass(frozen=True)
class _Index:
    """checkpoint.json, without its digest."""

    format: str
    progress: Progress
    config: RunConfig
    tokenizer: str
    files: dict[str, Record]


def _run_config(values: Any) -> Any:
    """The values of a run's config. One that 0.1 wrote names no order of the windows: it keeps the first."""
    return {"order": 1} | values if isinstance(values, dict) else values


def found_in(run: Path) -> list[Checkpoint]:
    """The checkpoints of a run whose index reads, oldest first; their contents are not verified yet."""
    return _readable(paths(run))[0]


def _readable(folders: list[Path]) -> tuple[list[Checkpoint], list[CheckpointError]]:
    there, errors = [], []
    for path in folders:
        try:
            there.append(read(path))
        except CheckpointError as error:
            errors.append(error)
    return there, errors


def verify(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, naming the file, unless every byte is as it was written."""
    for name, expected in checkpoint.files.items():
        part = safe_join(checkpoint.path, name, CheckpointError)
        with opened(part, CheckpointError) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.bytes:
                raise CheckpointError(f"{part}: {size} bytes, must be {expected.bytes}")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected.sha256:
            raise CheckpointError(f"{part}: damaged, its SHA-256 is not {expected.sha256[:12]}…")


def restore(
    checkpoint: Checkpoint,
    model: LanguageModel,
    tokenizer: Tokenizer,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Load verified weights and, if given, the optimizer's moments and the random state. CheckpointError if the
    checkpoint is damaged or belongs to another model config or tokenizer."""
    verify(checkpoint)
    if checkpoint.config.model != model.config:
        name, there, here = next(iter(unlike(dump(checkpoint.config.model), dump(model.config))))
        told = f"{name} is {there!r}, there {here!r}"
        raise CheckpointError(
            f"{checkpoint.path}: has another model config than the run's config.json ({told})"
        )
    _check_tokenizer(checkpoint.path, checkpoint.tokenizer, tokenizer)
    fill(model, _tensors(checkpoint.path / MODEL), checkpoint.path / MODEL)
    if optimizer is None:
        return
    if TRAINING not in checkpoint.files:
        raise CheckpointError(
            f"{checkpoint.path}: holds only weights, so training cannot resume from it; start a new run with --init"
        )
    _restore_training(checkpoint.path / TRAINING, model, optimizer)


def _restore_training(path: Path, model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's moments and the random state. CheckpointError unless each is what this model's are."""
    tensors = _tensors(path)
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        shapes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        state = {key: tensors.pop(f"{key}.{name}") for key in shapes if f"{key}.{name}" in tensors}
        for key, value in state.items():
            if value.shape != shapes[key] or not value.is_floating_point() or len(state) < len(shapes):
                raise CheckpointError(
                    f"{path}: {key}.{name} is {value.dtype} {list(value.shape)}, must be as in training"
                )
        if state and not 0 <= state["step"].item() < math.inf:
            raise CheckpointError(f"{path}: step.{name} is {state['step'].item()}, must be ≥ 0 and finite")
        moments[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
    random, random_cuda = tensors.pop("rng.cpu", None), tensors.pop("rng.cuda", None)
    if random is None or tensors:
        why = f"has {min(tensors)}" if tensors else "lacks rng.cpu"
        raise CheckpointError(f"{path}: {why}, must hold this model's training state")
    try:
        torch.set_rng_state(random)
        if random_cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_cuda)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path}: no random state ({error})") from None
    optimizer.state.update(moments)


def start_from(run: Path, model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Copy the weights that `load_run` returns into `model`, which keeps its own progress of ternary conversion.
    CheckpointError if shapes, names or the tokenizer differ."""
    source, its = load_run(run)
    _check_tokenizer(run, its.fingerprint, tokenizer)
    weights = {name: value for name, value in source.state_dict().items() if not name.endswith(SHARE)}
    own = {name: value for name, value in model.state_dict().items() if name.endswith(SHARE)}
    fill(model, weights | own, run)


def _check_tokenizer(path: Path, fingerprint: str, tokenizer: Tokenizer) -> None:
    if fingerprint != tokenizer.fingerprint:
        raise CheckpointError(
            f"{path}: trained with tokenizer {fingerprint[:12]}, the one here is {tokenizer.fingerprint[:12]}"
        )


def fill(model: LanguageModel, tensors: dict[str, Tensor], path: Path) -> None:
    """Load the tensors; CheckpointError that names the first which does not fit."""
    own = model.state_dict()
    for name in own | tensors:
        here, there = (_kind(side[name]) if name in side else "missing" for side in (own, tensors))
        if here != there:
            raise CheckpointError(f"{path}: weights of another model ({name} is {there} there, {here} here)")
    if model.device.type == "meta":
        allocated(model)  # now that what is to be in it has been seen
    model.load_state_dict(tensors)


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _tensors(path: Path) -> dict[str, Tensor]:
    return load_tensors(path, CheckpointError, "a checkpoint's tensors")[1]


def load_config(run: Path) -> RunConfig:
    """The resolved config of a run; CheckpointError if there is none."""
    values = read_json(run / "config.json", CheckpointError)
    return load(RunConfig, _run_config(values), f"{run / 'config.json'}")


def save_config(run: Path, config: RunConfig) -> None:
    write_json(run / "config.json", dump(config))


def run_of(path: Path) -> Path:
    """The run's folder: `path`, or the one that the checkpoint `path` belongs to."""
    return path.resolve().parent.parent if (path / INDEX).exists() else path


def load_run(run: Path) -> tuple[LanguageModel, Tokenizer]:
    """The model and tokenizer of `open_run`, with the same errors."""
    return open_run(run)[1:]


def open_run(run: Path) -> tuple[Checkpoint, LanguageModel, Tokenizer]:
    """A run's best held-out checkpoint (its newest where none was measured), its model and its tokenizer; `run` may
    also be one checkpoint's folder.

    A damaged checkpoint gives a warning, and the newest valid one is used. CheckpointError if the run, its config or
    its tokenizer is missing or damaged, or no checkpoint is valid.
    """
    there, errors = _readable([run] if (run / INDEX).exists() else paths(run))
    run = run_of(run)
    config, tokenizer = load_config(run), Tokenizer.load(run / "tokenizer.json")
    with torch.device("meta"):
        model = LanguageModel(config.model)
    require_memory(model)
    if there:  # the best last, where the first is taken from
        there.append(there.pop(there.index(_best(there))))
    for checkpoint in reversed(there):
        try:
            restore(checkpoint, model, tokenizer)
        except CheckpointError as error:
            errors.append(error)
            continue
        if errors:
            warnings.warn(f"{errors[0]}; using {checkpoint.path.name}", stacklevel=2)
        return checkpoint, model, tokenizer
    raise errors[0] if errors else CheckpointError(f"{folder(run)}: no checkpoint in it")
