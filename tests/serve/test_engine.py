"""The engine: who joins, who waits, who leaves, and what a failed step costs."""

import contextlib
import copy
import itertools
import queue
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future

import pytest
import torch
import torch.utils._pytree as pytree

from perspectron.data.specials import Specials
from perspectron.decode.constrain import Matcher, json_schema
from perspectron.decode.drafts import NGrams, Pace
from perspectron.decode.generate import generate
from perspectron.decode.row import Piece, Row
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.serve.engine import FAIR, Closed, Engine, Full, Job, row_by_row_cost
from perspectron.util.errors import ConfigError, PerspectronError
from tests.decode.conftest import make
from tests.decode.test_processors import STAGES, Failing
from tests.decode.test_rows import GREEDY, SETTINGS, prompt_of
from tests.decode.test_store import small
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


@pytest.mark.parametrize("stage", ["begin", *STAGES, "end"])
def test_a_text_whose_hook_raises_ends_with_the_error_and_the_others_go_on(engine, stage) -> None:
    plain = [Asked(engine, prompt_of(9, number), 6) for number in (0, 1)]
    engine.submit([one.job for one in plain])
    expected = [one.ids() for one in plain]
    for prompt in (9, 200):
        asked = [Asked(engine, prompt_of(9, number), 6) for number in (0, 1)]
        broken = Asked(engine, prompt_of(prompt, 2), 4)
        broken.job.hooks = [Failing(stage, 0 if stage in ("begin", "prompt") else 3)]
        engine.submit([asked[0].job, broken.job, asked[1].job])
        event = None
        while not isinstance(event, PerspectronError):
            event = broken.events.get(timeout=PATIENCE)
            event = getattr(event, "error", None) or event
        assert str(event) == "hook Failing: ValueError: no more"
        assert [one.ids() for one in asked] == expected
    until(lambda: not engine.active)
    assert engine.counters.failed == 2 and engine.counters.finished == 6
    assert not engine._rows._rows and not engine._rows._hooks


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


class Pieces:
    """The order in which pieces are read: the length of the text that each is of. With a gate before the engine's next
    turn, so that what is asked meanwhile is all there when it goes on."""

    def __init__(self, engine: Engine, monkeypatch) -> None:
        self.engine, self.order, self.open = engine, list[int](), threading.Event()
        self.after = dict[int, threading.Event]()
        """Held shut after so many pieces, until they are set."""
        read, call = Rows._read_chunk, Session._call

        def noted(length: int) -> None:
            self.order.append(length)
            if len(self.order) in self.after:
                assert self.after[len(self.order)].wait(30)

        def of_row(rows: Rows, row) -> torch.Tensor:
            found = read(rows, row)
            noted(len(row.unread) - 1)
            return found

        def of_session(session: Session, count: int) -> torch.Tensor:
            found = call(session, count)
            noted(len(session.tokens))
            return found

        monkeypatch.setattr(Rows, "_read_chunk", of_row)
        monkeypatch.setattr(Session, "_call", of_session)

        def gate() -> Generator[int, None, None]:
            assert self.open.wait(30)
            return
            yield

        engine.run(gate())


def reading(engine: Engine, ids: list[int]) -> Generator[int, None, Session]:
    session = engine.session()
    yield from session.reading(ids)
    return session


def test_of_unread_prompts_and_states_the_shortest_goes_first_and_the_longest_goes_on(
    engine, monkeypatch
) -> None:
    """Order of the pieces, in calls of 128 tokens: one in four goes to whoever has waited longest."""
    pieces = Pieces(engine, monkeypatch)
    long, middle, short = (Asked(engine, prompt_of(n, k), 1) for k, n in enumerate((2000, 700, 4)))
    engine.submit([long.job])
    state = engine.run(reading(engine, prompt_of(1000, 3)))
    engine.submit([middle.job]), engine.submit([short.job])
    pieces.open.set()
    for one in (long, middle, short):
        one.ids()
    assert state.result(30).tokens == prompt_of(1000, 3)
    assert pieces.order.index(4) <= 2, "a prompt of four waits for no long one"
    ends = {n: len(pieces.order) - pieces.order[::-1].index(n) for n in (4, 700, 1000, 2000)}
    assert sorted(ends, key=lambda n: ends[n]) == [4, 700, 1000, 2000], pieces.order
    assert {n: pieces.order.count(n) for n in ends} == {4: 1, 700: 6, 1000: 7, 2000: 16}
    first = pieces.order[: ends[1000]]
    assert first.count(2000) >= len(first) // (3 * FAIR), "and the long one goes on meanwhile"


def test_a_long_prompt_comes_to_its_end_however_many_short_ones_come(engine, monkeypatch) -> None:
    pieces = Pieces(engine, monkeypatch)
    long = Asked(engine, prompt_of(1000, 0), 1)
    engine.submit([long.job])
    pieces.open.set()
    shorts = 0
    while long.events.empty():
        with contextlib.suppress(Full):
            engine.submit([Asked(engine, prompt_of(20 + shorts % 7, shorts), 1).job])
            shorts += 1
    long.ids()
    gaps = [at for at, length in enumerate(pieces.order) if length == 1000]
    assert len(gaps) == 8 and max(b - a for a, b in itertools.pairwise(gaps)) <= 3 * FAIR, pieces.order


def test_the_order_in_which_prompts_are_read_changes_no_bit(tokenizer, monkeypatch) -> None:
    """Each text as it is alone, whatever is read between its pieces: prompts, states and texts under way."""
    model = make("perspective-tiny").double()
    engine = Engine(model, tokenizer, store=PrefixStore(model), rows=4, queue=99, together=True)
    pieces, lengths = Pieces(engine, monkeypatch), (700, 300, 1100, 5)
    asked = [Asked(engine, prompt_of(n, n), 6, SETTINGS[k % 4]) for k, n in enumerate(lengths)]
    engine.submit([one.job for one in asked])
    states = [engine.run(reading(engine, prompt_of(n, n + 1))) for n in (600, 900)]
    pieces.open.set()
    got = [one.ids() for one in asked]
    monkeypatch.undo()
    changes = sum(a != b for a, b in itertools.pairwise(pieces.order))
    assert changes > 8, "they do take turns"
    for k, (n, ids) in enumerate(zip(lengths, got, strict=True)):
        alone = generate(model, tokenizer, [prompt_of(n, n)], max_tokens=6, sampling=SETTINGS[k % 4])
        assert ids == alone.ids[0]
    for n, state in zip((600, 900), states, strict=True):
        alone, made = Session(model, tokenizer).read(prompt_of(n, n + 1)), state.result(30)
        assert made.tokens == alone.tokens and made._calls == alone._calls
        for one, other in zip(pytree.tree_leaves(made._state), pytree.tree_leaves(alone._state), strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    engine.close()


def test_prompts_that_begin_alike_are_read_once_between_them(engine, monkeypatch) -> None:
    pieces, same = Pieces(engine, monkeypatch), prompt_of(900, 0)
    asked = [Asked(engine, [*same, *end], 1) for end in ([], [], [5] * 300)]
    engine.submit([one.job for one in asked])
    pieces.open.set()
    one, two, three = (one.ids() for one in asked)
    assert one == two and len(three) == 1
    assert len(pieces.order) == 8 + 3, "901 tokens are 8 calls, and 1,201 have three that differ"
    assert sorted(one.job.spared for one in asked) == [0, 896, 901]


def test_what_is_let_go_stops_within_one_piece(engine, monkeypatch) -> None:
    """A prompt and states that are read, or wait: no piece of theirs is read after the one under way."""
    pieces = Pieces(engine, monkeypatch)
    pieces.after = {5: threading.Event()}
    long = Asked(engine, prompt_of(5000, 0), 1)
    engine.submit([long.job])
    states = [engine.run(reading(engine, prompt_of(4000 + n, n))) for n in range(4)]
    pieces.open.set()
    while len(pieces.order) < 5:
        time.sleep(0.001)
    engine.cancel([long.job])
    assert all(state.cancel() for state in states)
    pieces.after[5].set()
    after = Asked(engine, prompt_of(3, 0), 2)
    engine.submit([after.job])
    assert len(after.ids()) == 2
    assert len(pieces.order) == 5 + 1 and pieces.order[-1] == 3
    assert not engine._tasks and long.events.empty() and engine.counters.failed == 0


def test_no_more_states_are_half_read_than_there_are_rows(engine, monkeypatch) -> None:
    pieces = Pieces(engine, monkeypatch)
    states = [engine.run(reading(engine, prompt_of(n, n))) for n in (1000, 990, 980, 300)]
    with pytest.raises(Full):
        engine.run(reading(engine, []))
    pieces.open.set()
    for state in states:
        state.result(30)
    ends = {n: len(pieces.order) - pieces.order[::-1].index(n) for n in (1000, 990, 980, 300)}
    assert pieces.order.index(300) >= min(ends.values()), "the fourth begins when one of three is over"


def test_a_result_that_nobody_waits_for_any_more_costs_nobody_else(engine) -> None:
    """It is cancelled while its last piece is read: between the engine's look at it and its end."""
    lost, begun, there = Asked(engine, prompt_of(3, 0), 60), list[Future](), threading.Event()

    def late(end: type[Exception] | None) -> Generator[int, None, None]:
        yield 0
        assert there.wait(30) and begun.pop(0).cancel()
        if end is not None:
            raise end
        return

    engine.submit([lost.job])
    for end in (None, ValueError):
        begun.append(engine.run(late(end)))
    there.set()
    assert len(lost.ids()) == 60 and engine.counters.failed == 0 and not begun


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


def test_others_step_between_the_grammars_that_are_compiled(engine, monkeypatch) -> None:
    """Of which one may take a second: sixteen at once would hold everybody up for so long."""
    constraint, log, step = json_schema({"type": "object"}, engine.tokenizer), list[str](), Rows.step
    begin = constraint.begin

    def begun(row: Row) -> Matcher:
        log.append("grammar")
        return begin(row)

    def stepped(rows, *args):
        log.append("step")
        return step(rows, *args)

    object.__setattr__(constraint, "begin", begun)
    monkeypatch.setattr(Rows, "step", stepped)
    asked = [Asked(engine, prompt_of(3, n), 4) for n in range(3)]
    for one in asked:
        one.job.hooks = [constraint]
    engine.submit([one.job for one in asked])
    assert all(one.ids() for one in asked)
    at = [number for number, what in enumerate(log) if what == "grammar"]
    assert len(at) == 3 and all("step" in log[one:other] for one, other in itertools.pairwise(at))


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
    with monkeypatch.context() as patch:  # what fails when a text ends is told to it, too
        patch.setattr("perspectron.decode.session.Session.leave", lambda *_: 1 / 0)
        engine.submit([(lost := Asked(engine, prompt_of(3, 0), 1)).job])
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


def test_a_text_without_the_prefix_is_read_without_it_and_one_half_known_is_not_read(tokenizer) -> None:
    """As a chat template may leave the prefix out, which then is in no later turn either."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.specials = Specials((1,), frozenset({2}), end=2)
    model = make("perspective-tiny")
    engine = Engine(model, tokenizer, store=PrefixStore(model), rows=3, queue=2, together=True)

    def spared(session: Session, ids: list[int], count: int) -> int:
        session.append(ids, whole=True)
        asked = Asked(engine, [], count)
        asked.job.session, asked.job.min_tokens = session, count
        engine.submit([asked.job])
        asked.ids()
        until(lambda: not engine._later and not engine._jobs)
        return asked.job.spared

    one, other = engine.session(), engine.session().remembered(model.init_state(1), [7])
    assert spared(one, prompt_of(100, 0), 200) == 0
    assert spared(engine.session(), one.tokens, 1) >= 300 - 128
    spared(other, prompt_of(100, 1), 200)
    for ids in (other.tokens, [1, *other.tokens]):
        assert spared(engine.session(), ids, 1) == 0
    engine.close()


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


def test_an_engine_that_reads_drafts_says_the_same(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(Pace, "most", lambda self, hopes, rows, longest: longest)
    monkeypatch.setattr(Pace, "pays", True)
    model, told = small("perspective2"), list[list[list[int | None]]]()
    for drafts in (None, NGrams(5)):
        for together in (False, True):
            engine = Engine(model, tokenizer, rows=3, queue=9, together=together, drafts=drafts)
            asked = [Asked(engine, prompt_of(9, n) * 3, 20, SETTINGS[n % 2]) for n in range(6)]
            engine.submit([one.job for one in asked])
            told.append([one.ids() for one in asked])
            engine.close()
    assert told[:2] == told[2:]
    assert drafts is not None
    assert drafts.counts.accepted > 0
