"""A run that keeps to a time: its length changes, and what it did can be done again to the bit."""

import itertools
import json
import math

import pytest

from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, Turn
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import learning_rate
from perspectron.train.pace import Pace
from perspectron.train.resume import extend
from perspectron.util.errors import ConfigError
from tests.refusals import refused


class Machine:
    """A clock that every update moves on by as long as the machine takes for it then."""

    def __init__(self, seconds):
        self.now, self.seconds, self.done = 100.0, seconds, 0

    def __call__(self) -> float:
        return self.now

    def update(self) -> None:
        self.now += self.seconds(self.done)
        self.done += 1


def course(seconds, planned: int, ends: float = 60.0) -> tuple[float, int]:
    """(when a run ended that was to take `ends` seconds, the updates it made)."""
    machine = Machine(seconds)
    pace, step, steps = Pace(100.0 + ends, closing=1.0, clock=machine), 0, planned
    while step < steps:
        machine.update()
        step += 1
        pace.updated()
        if step < steps:
            steps = pace.steps(step, steps, 0)
            assert steps > step
    return machine.now - 100.0 + 1.0, step


@pytest.mark.parametrize(
    ("seconds", "updates"),
    [
        (lambda i: 0.1, 590),
        (lambda i: 0.3, 197),  # three times slower than it was thought to be
        (lambda i: 0.03, 1967),  # and three times faster
        (lambda i: 0.1 if i < 300 else 0.3, 397),  # busy from the middle on
        (lambda i: 0.1 if i < 560 else 0.4, 567),  # busy at the end
        (lambda i: 0.05 + 0.1 * (i % 2), 590),
        (lambda i: 8.0, 7),
    ],
)
def test_a_run_ends_on_time_on_any_machine(seconds, updates):
    took, made = course(seconds, planned=590)
    assert took == pytest.approx(60, abs=max(3.0, seconds(0)))
    assert made == pytest.approx(updates, rel=0.06, abs=1)


def test_measurements_to_come_are_set_aside():
    """Each takes 2 s, of which the first is a surprise."""
    machine = Machine(lambda i: 0.1)
    pace, step, steps = Pace(160.0, clock=machine), 0, 600
    while step < steps:
        machine.update()
        step += 1
        pace.updated()
        steps = pace.steps(step, steps, -(-steps // 60) - step // 60) if step < steps else steps
        if step % 60 == 0 or step == steps:
            machine.now += 2.0
            pace.paused()
    assert machine.now - 100 == pytest.approx(60, abs=3)


def config(runs, *turns: Turn, steps: int) -> RunConfig:
    return RunConfig(runs.small("transformer-tiny"), runs.config(steps=steps).train, turns=turns)


def test_a_turned_run_ends_where_its_schedule_ends(runs):
    turned = config(runs, Turn(20, 100), Turn(30, 60), steps=40)
    assert turned.schedule.steps == 100
    places = [turned.place(step) for step in range(41)]
    assert places[:21] == [float(step) for step in range(21)]
    assert places[30] == pytest.approx(20 + 10 * 80 / 40)
    assert places[40] == pytest.approx(100)
    assert all(a < b for a, b in itertools.pairwise(places))
    rates = [learning_rate(place, 100, turned.train.optim) for place in places]
    drops = [(a - b) / rates[10] for a, b in itertools.pairwise(rates[10:])]
    assert max(drops) < 0.15 and min(drops) >= 0
    assert config(runs, steps=40).place(17) == 17.0


@pytest.mark.parametrize("turns", [(Turn(40, 50),), (Turn(20, 50), Turn(10, 50))])
def test_turns_that_cannot_have_been_are_refused(runs, turns):
    with refused(ConfigError, "at"):
        config(runs, *turns, steps=30)


class Turning:
    """A pace that asks for other lengths at certain updates."""

    ends = float("inf")

    def __init__(self, asked: dict[int, int]):
        self.asked = asked

    def updated(self) -> None: ...
    def paused(self) -> None: ...

    def steps(self, step: int, steps: int, pauses: int) -> int:
        return self.asked.get(step, steps)


@pytest.mark.parametrize("until", [2, 5, 6, 9])
def test_a_turned_run_that_was_stopped_ends_with_the_same_bits(runs, tmp_path, until):
    """Longer from update 3 on and shorter from 8 on; stopped before, between and after."""
    asked = {3: 20, 8: 12}
    whole = runs.trainer(tmp_path / "whole")
    assert whole.fit(pace=Turning(asked)) is None
    assert whole.progress.step == 12
    first = runs.trainer(tmp_path / "parts")
    first.fit(until=until, pace=Turning(asked))
    second = runs.start(tmp_path / "parts", checkpoint.load_config(tmp_path / "parts"))
    assert second.progress.step == until
    second.fit(pace=Turning({step: steps for step, steps in asked.items() if step > until}))
    runs.assert_same(runs.outcome(second), runs.outcome(whole))
    rates = [
        [line["lr"] for line in read_metrics(run) if "lr" in line]
        for run in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert rates[0] == rates[1] and len(rates[0]) == 12


def test_a_turn_stands_in_the_config_before_it_is_taken(runs, tmp_path):
    """Killed right after it, from a checkpoint before it, the run takes it again."""
    whole = runs.trainer(tmp_path / "whole")
    whole.fit(pace=Turning({5: 9}))
    killed = runs.trainer(tmp_path / "killed", save_every=3, eval_every=0)
    killed.fit(until=3)
    for _ in range(2):
        killed.step()
    killed.turn(9)
    again = runs.start(tmp_path / "killed", checkpoint.load_config(tmp_path / "killed"))
    assert (again.progress.step, again.config.train.steps) == (3, 9)
    again.fit()
    assert again.progress.step == 9
    ours, theirs = again.model.state_dict(), whole.model.state_dict()
    assert [name for name in ours if not ours[name].equal(theirs[name])] == []


def test_a_turn_that_somebody_else_wrote_is_told(runs, tmp_path):
    run = runs.trainer(tmp_path)
    run.fit(until=6)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["turns"] = [{"at": 3, "steps": 40}]
    path.write_text(json.dumps(values))
    with refused(ConfigError, "turns"):
        runs.start(tmp_path, checkpoint.load_config(tmp_path))


def test_a_turned_run_is_given_no_more_steps(runs, tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.fit(until=4)
    trainer.turn(10)
    with refused(ConfigError, 10):
        extend(tmp_path, 30)
    assert math.isfinite(trainer.best)
