"""More steps for a finished run, where its schedule allows it."""

from dataclasses import replace
from pathlib import Path

from perspectron.train import checkpoint
from perspectron.train.config import RunConfig
from perspectron.train.optim import falls_at
from perspectron.util.errors import CheckpointError, ConfigError


def how_to_go_on(run: Path, config: RunConfig) -> str:
    """Advice on training beyond the run's last step, as the end of a sentence. More steps need a checkpoint from before
    the rate fell, which 0.1 did not keep."""
    if _ends(config) or not checkpoint.extendable(checkpoint.found_in(run), config.train):
        return f"start a new run from its weights: perspectron train --init {run} --out NEW"
    return f"give it more steps: perspectron train --resume {run} --steps N, N above {config.train.steps:,}"


def extend(run: Path, steps: int) -> tuple[RunConfig, list[Path]]:
    """The config of a run with a constant rate with more steps, and its checkpoints from after the rate fell: from
    them it cannot go on. What becomes ternary does so at the steps it did. Nothing is written: a Trainer that is given
    both sets these aside once it has read an older one.

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
