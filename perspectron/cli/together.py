"""One training by several processes: rank 0 runs the command, the others do as it says."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perspectron.data import Shards, Tokenizer, open_shards
from perspectron.train.config import Layout, RunConfig
from perspectron.train.pace import Pace
from perspectron.train.parallel import ParallelTrainer
from perspectron.train.team import Team
from perspectron.util.config import dump, load
from perspectron.util.files import sha256

NEVER = 1e9  # seconds: rank 0's clock decides

_here: list[tuple[Team, Layout]] = []  # the team that this process belongs to


def together(command: Callable[[], int], layout: Layout) -> int:
    """Run a command that trains in rank 0, while the other processes that were started only train: the exit code."""
    with Team() as team:
        _here.append((team, layout))
        try:
            if team.rank > 0:
                return _follow(team, layout)
            code = command()
            team.tell({})  # lets the others end if there was nothing to train
            return code
        finally:
            _here.pop()


def trainer(
    run: Path, config: RunConfig, tokenizer: Tokenizer, shards: Shards, *, paced: bool, **options: Any
) -> ParallelTrainer:
    """Rank 0's trainer, after telling the others to make theirs. paced: the training ends at a given time."""
    team, layout = _here[-1]
    order = {
        "run": str(run.resolve()),
        "config": dump(config),
        "shards": str(shards.path.resolve()),
        "paced": paced,
        "ended": [str(path.resolve()) for path in options["ended"]],
        "allow_changed": options["allow_changed"],
    }
    team.tell(order)
    _same_text(team, shards, tokenizer)
    return ParallelTrainer(team, layout, run, config, tokenizer, shards, **options)


def _same_text(team: Team, shards: Shards, tokenizer: Tokenizer) -> None:
    text = sha256(shards.path / "manifest.json") + tokenizer.fingerprint
    team.same("data", text, "let all of them read the same folder, or copies of it")


def _follow(team: Team, layout: Layout) -> int:
    """Train as rank 0 tells."""
    order = team.hear()
    if not order:
        return 0
    run, ended = Path(order["run"]), [Path(path) for path in order["ended"]]
    config: RunConfig = load(RunConfig, order["config"], "config")
    shards, tokenizer = open_shards(Path(order["shards"])), Tokenizer.load(run / "tokenizer.json")
    _same_text(team, shards, tokenizer)
    options = {"ended": ended, "allow_changed": order["allow_changed"]}
    made = ParallelTrainer(team, layout, run, config, tokenizer, shards, **options)
    if made.progress.step < made.config.train.steps:
        made.estimate()
    stopped = made.fit(pace=Pace(time.monotonic() + NEVER) if order["paced"] else None)
    return 0 if stopped is None else 128 + stopped
