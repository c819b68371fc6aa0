"""Resuming a run: from which checkpoint, whether its config has changed, and more steps for a finished one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perspectron.data import is_encoded, open_shards
from perspectron.train import checkpoint
from perspectron.train.checkpoint import Checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.optim import falls_at
from perspectron.util.config import dump, unlike
from perspectron.util.errors import CheckpointError, ConfigError, PerspectronError, StorageError
from perspectron.util.files import remove

WITHOUT_EFFECT = ("init", "keep", "save_every", "eval_every", "eval_tokens")
"""Settings of a training that have no effect on updates after the first."""

OF_TEXT = ("data", "heldout", "tokenizer", "template")
"""Settings of a training that have no effect once its text is encoded."""

OF_STATE = ("lora", "optim.optimizer")
"""Settings of a training on which what a checkpoint holds beside the weights depends."""

OF_ORDER = ("seed", "seq_len")
"""Settings on which the order of the windows depends, in the midst of which a run goes on."""


def set_aside(path: Path, why: str) -> None:
    """Rename a checkpoint to {why}-step-…, so that it no longer counts as the run's but can still be looked at."""
    try:
        remove(path.with_name(f"{why}-{path.name}"))
        path.rename(path.with_name(f"{why}-{path.name}"))
    except OSError as error:
        raise StorageError(f"{path}: not renamed ({error.strerror})") from error


def changes(saved: RunConfig, config: RunConfig) -> list[str]:
    """The differences between a run's config and the one that a checkpoint was written with, a line for each value:
    "seed was 0, is 1". Only what affects the next update is listed: not more steps of a constant schedule, nor a dtype
    that was settled since."""
    before: dict[str, Any] = dump(saved.train)
    now: dict[str, Any] = dump(config.train)
    now |= {name: before[name] for name in WITHOUT_EFFECT}
    if saved.train.optim.schedule == "constant":
        for share in ("ternary_from", "ternary_until"):
            if math.isclose(before[share] * before["steps"], now[share] * now["steps"], abs_tol=1e-6):
                before[share] = now[share]
        before["steps"] = max(before["steps"], now["steps"])
    since = config.turns[len(saved.turns) :]
    if saved.turns == config.turns[: len(saved.turns)] and since and since[0].steps == saved.train.steps:
        before["steps"] = now["steps"]  # a turn is in the config before it takes effect
    elif saved.turns != config.turns:
        before["turns"], now["turns"] = saved.turns, config.turns
    if before["dtype"] == "auto":
        before["dtype"] = now["dtype"]
    if Path(before["teacher"]).parts[-2:] == Path(now["teacher"]).parts[-2:]:
        before["teacher"] = now["teacher"]  # a stage of the same recipe, in a run that was moved
    data, where = now["data"], Path(before["data"])
    if (
        is_encoded(data)
        and where.name == Path(data).name
        and (not where.exists() or _alike(where, Path(data)))
    ):
        before["data"] = data  # a folder that was moved or copied; the loader knows its text by a digest
    told = [f"{name} was {old}, is {new}" for name, old, new in unlike(before, now)]
    if saved.taught and config.taught and saved.taught != config.taught:
        told.insert(0, f"teacher was {saved.taught[:12]}, is {config.taught[:12]}: its weights are others")
    if saved.id and config.id and saved.id != config.id:
        told.insert(0, f"id was {saved.id[:12]}, is {config.id[:12]}: it is of another run")
    return told


def _alike(first: Path, second: Path) -> bool:
    """True if both are folders with the same ids of the same text."""
    try:
        return open_shards(first, verify=False).digest == open_shards(second, verify=False).digest
    except PerspectronError:
        return False


def resume(
    run: Path,
    restore: Callable[[Checkpoint], None],
    ended: Sequence[Path] = (),
    config: RunConfig | None = None,
    set_aside: Callable[[Path, str], None] = set_aside,
    allow_changed: bool = False,
) -> tuple[Checkpoint | None, CheckpointError | None]:
    """Restore the newest checkpoint that verifies and set damaged newer ones aside, so that no good one is dropped for
    their sake: (it, or None for a run without checkpoints; the first damage). Those in `ended`, as `extend` gives them,
    are passed over and then set aside too. CheckpointError, and nothing changed, when none verifies; ConfigError, and
    nothing changed, when it was trained by another config than `config`, or with allow_changed by one whose training
    cannot go on so."""
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in reversed([path for path in checkpoint.paths(run) if path not in ended]):
        try:
            newest = checkpoint.read(path)
            if config is not None:
                _require_same(run, newest, config, allow_changed)
            restore(newest)
        except CheckpointError as error:
            damaged.append((path, error))
            continue
        for bad, _ in damaged:
            set_aside(bad, "damaged")
        for path in ended:
            set_aside(path, "ended")
        return newest, damaged[0][1] if damaged else None
    if damaged:
        raise damaged[0][1]
    return None, None


def _require_same(run: Path, newest: Checkpoint, config: RunConfig, allow_changed: bool) -> None:
    told = changes(newest.config, config)
    if never := [line for line in told if line.split(" was ")[0] in fixed(config.train)]:
        told, advice = never, "restore it; another needs a new run"
    else:
        told, advice = told * (not allow_changed), "restore it, or accept the change with --allow-changed"
    if told:
        since = f"changed since {newest.path.name} was written ({'; '.join(told[:4])})"
        raise ConfigError(f"{run / 'config.json'}: {since}; {advice}")


def fixed(train: TrainConfig) -> tuple[str, ...]:
    """Settings of a training that stay as they were where it goes on."""
    return (*OF_STATE, *OF_ORDER) if is_encoded(train.data) else (*OF_STATE, *OF_ORDER, *OF_TEXT)


def how_to_go_on(run: Path, config: RunConfig) -> str:
    """Advice on training beyond the run's last step, as the end of a sentence. More steps need a checkpoint from before
    the rate fell, which 0.1 did not keep."""
    if _ends(config) or not checkpoint.extendable(checkpoint.found_in(run), config.train):
        return f"start a new run from its weights: perspectron train --init {run} --out NEW"
    return f"give it more steps: perspectron train --resume {run} --steps N, N above {config.train.steps:,}"


def extend(run: Path, steps: int) -> tuple[RunConfig, list[Path]]:
    """The config of a run with a constant rate with more steps, and its checkpoints from after the rate fell, from
    which it cannot go on. Experts become ternary at the same steps as before. Nothing is written: a Trainer that is
    given both sets these aside once it has read an older one.

    ConfigError when its schedule or recipe ends where it was planned to, or it has as many steps already;
    CheckpointError when no such checkpoint is left.
    """
    config = checkpoint.load_config(run)
    train = config.train
    if why := _ends(config):
        raise ConfigError(
            f"{run}: {why} ends at the step it was planned for, {train.steps}; {how_to_go_on(run, config)}"
        )
    if steps <= train.steps:
        raise ConfigError(f"steps = {steps}, must be above the {train.steps} that the run has")
    there = checkpoint.found_in(run)
    good = checkpoint.extendable(there, train)
    if there and not good:
        fall = falls_at(train.steps, train.optim)
        raise CheckpointError(
            f"{run}: no checkpoint is left from before its rate fell, at step {fall}; {how_to_go_on(run, config)}"
        )
    share = train.steps / steps
    train = replace(
        train, steps=steps, ternary_from=train.ternary_from * share, ternary_until=train.ternary_until * share
    )
    return replace(config, train=train), [ended.path for ended in there[len(good) :]]


def _ends(config: RunConfig) -> str:
    """The part of a config that fixes its number of steps; "" where none does."""
    if config.recipe is not None:
        return "a staged recipe"
    if config.turns:
        return "a run that was kept to a time"
    return "" if config.train.optim.schedule == "constant" else f"a {config.train.optim.schedule} schedule"
