"""The engine: who joins, who waits, who leaves, and what a failed step costs."""

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from perspectron.decode.batch import Piece
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.store import PrefixStore
from perspectron.errors import ConfigError, PerspectronError
from perspectron.serve.engine import Closed, Engine, Full, Job, row_by_row_cost
from tests.decode.conftest import make
from tests.decode.test_rows import GREEDY, SETTINGS, prompt_of
from tests.waiting import PATIENCE, until


@pytest.fixture
def engine(tokenizer) -> Iterator[Engine]:
    model = make("perspective-tiny")
    engine = Engine(model, tokenizer, store=PrefixStore(model), rows=3, queue=2, together=True)
    yield engine
    engine.close()


class Asked:
    """A job and what it emits."""

    def __init__(
        self, engine: Engine, prompt: list[int], count: int, sampling: SamplingConfig = GREEDY
    ) -> None:
        self.events: queue.Queue[object] = queue.Queue()
        session = engine.session()
        session.append(prompt)
        self.job = Job(session, count, self.events.put, sampling)

    def ids(self) -> list[int | None]:
        found: list[Piece] = []
        while not found or found[-1].finished is None:
            event = self.events.get(timeout=PATIENCE)
            assert isinstance(event, Piece), event
            found.append(event)
        return [piece.id for piece in found]


@pytest.mark.parametrize("together", [True, False])
def test_rows_come_and_go_and_say_what_they_say_alone(tokenizer, together) -> None:
    model = make("perspective-tiny").double()
    engine = Engine(model, tokenizer, store=PrefixStore(model), rows=3, queue=99, together=together)
    asked = []
    for number in range(9):
        sampling, length = SETTINGS[number % 4], (3, 200, 40)[number % 3]
        asked.append(Asked(engine, prompt_of(length, number % 2), 4 + number, sampling))
        engine.submit([asked[-1].job])
    for number, one in enumerate(asked):
        prompt, sampling = one.job.session.tokens, SETTINGS[number % 4]
        got = one.ids()
        prompt = prompt[: (3, 200, 40)[number % 3]]
        assert got == generate(model, tokenizer, [prompt], max_tokens=4 + number, sampling=sampling).ids[0]
        assert one.job.session.tokens == prompt + got
    engine.close()
    assert engine.counters.finished == 9 and engine.active == engine.waiting == 0


def test_a_long_prompt_is_read_between_the_steps_of_others(engine) -> None:
    short, long = Asked(engine, prompt_of(3, 0), 10**6), Asked(engine, prompt_of(2000, 1), 1)
    engine.submit([short.job])
    while not short.job.ids:
        time.sleep(0.001)
    before = len(short.job.ids)
    engine.submit([long.job])
    long.ids()
    assert len(short.job.ids) - before >= 15, "2,001 tokens are 16 chunks, and a step goes with each"
    engine.cancel([short.job])


def test_the_queue_takes_all_of_a_request_or_none(engine) -> None:
    busy = [Asked(engine, prompt_of(3, n), 10**6) for n in range(5)]
    engine.submit([one.job for one in busy])
    more = [Asked(engine, prompt_of(3, n), 1) for n in range(3)]
    while engine.active < 3:
        time.sleep(0.001)
    with pytest.raises(Full):
        engine.submit([one.job for one in more])
    engine.cancel([one.job for one in busy])
    until(lambda: not (engine.active or engine.waiting))
    assert [len(one.ids()) for one in more if engine.submit([one.job]) is None] == [1, 1, 1]
    assert engine.counters.cancelled == 5


def test_a_row_that_is_let_go_is_gone_within_two_steps(engine) -> None:
    one, two = Asked(engine, prompt_of(3, 0), 10**6), Asked(engine, prompt_of(3, 1), 10**6)
    engine.submit([one.job, two.job])
    while len(one.job.ids) < 3:
        time.sleep(0.001)
    engine.cancel([one.job])
    drawn = len(one.job.ids)
    until(lambda: engine.active == 1)
    assert len(one.job.ids) - drawn <= 2
    engine.cancel([two.job])


def test_what_cannot_begin_is_an_event_and_a_failed_step_costs_those_under_way(engine, monkeypatch) -> None:
    wrong = Asked(engine, prompt_of(3, 0), 0)
    engine.submit([wrong.job])
    assert isinstance(wrong.events.get(timeout=PATIENCE), ConfigError)
    lost = Asked(engine, prompt_of(3, 0), 10**6)
    engine.submit([lost.job])
    while not lost.job.ids:
        time.sleep(0.001)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "head", lambda *_: 1 / 0)
        while not isinstance(event := lost.events.get(timeout=PATIENCE), PerspectronError):
            pass
    assert "a step failed" in str(event) and engine.counters.failed == 2
    lost = Asked(engine, prompt_of(3, 0), 10**6)  # what fails beside a step
    engine.submit([lost.job])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_deliver", lambda *_: 1 / 0)
        assert isinstance(lost.events.get(timeout=PATIENCE), PerspectronError)
    with monkeypatch.context() as patch:
        patch.setattr("perspectron.decode.session.Session.enter", lambda *_, **__: 1 / 0)
        engine.submit([(lost := Asked(engine, prompt_of(3, 0), 5)).job])
        assert isinstance(lost.events.get(timeout=PATIENCE), PerspectronError)
    after = Asked(engine, prompt_of(3, 0), 5)
    engine.submit([after.job])
    assert len(after.ids()) == 5


def test_when_nobody_waits_what_was_said_is_read_for_the_next_turn(engine) -> None:
    one = Asked(engine, prompt_of(100, 0), 200)
    engine.submit([one.job])
    said = [id for id in one.ids() if id is not None]
    assert len(said) == 200
    until(lambda: not engine._later)
    two = Asked(engine, prompt_of(100, 0) + said, 1)
    engine.submit([two.job])
    two.ids()
    assert two.job.spared >= 101 + len(said) - 128


def test_it_finishes_what_it_has_and_takes_no_more(engine) -> None:
    one = Asked(engine, prompt_of(3, 0), 30)
    engine.submit([one.job])
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert len(one.ids()) == 30
    closing.join(30)
    with pytest.raises(Closed):
        engine.submit([one.job])
    with pytest.raises(Closed):
        engine.run(iter(()))


def test_the_faster_way_is_chosen_by_measuring(tokenizer, monkeypatch) -> None:
    model = make("perspective-tiny")
    assert row_by_row_cost(model, 4) > 0
    for cost, together in ((1.05, False), (1.5, True)):
        monkeypatch.setattr("perspectron.serve.engine.row_by_row_cost", lambda *_, cost=cost: cost)
        engine = Engine(model, tokenizer)
        assert engine.together is together and engine.cost == cost
        engine.close()
    assert torch.is_inference_mode_enabled() is False
