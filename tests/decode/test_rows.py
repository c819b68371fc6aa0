"""A session: rows join and leave at any step, and each is as it would be alone."""

import dataclasses
import random

import pytest
import torch
import torch.utils._pytree as pytree

from perspectron.data import Tokenizer
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.reading import prefill
from perspectron.decode.row import Piece
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.errors import ConfigError, NonFiniteError, StateError
from tests.decode.conftest import VOCAB, drain, make
from tests.refusals import refused

GREEDY = SamplingConfig(temperature=0.0)
SETTINGS = [
    GREEDY,
    SamplingConfig(temperature=0.8, seed=3),
    SamplingConfig(temperature=1.2, min_p=0.01, repetition_penalty=1.3, seed=3),
    SamplingConfig(temperature=2.0, top_k=50, top_p=0.9, repetition_window=4, seed=2**64 - 1),
]


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ids(pieces: list[Piece], row: int) -> list[int | None]:
    return [piece.id for piece in pieces if piece.row == row]


def text(pieces: list[Piece], row: int) -> str:
    return "".join(piece.text for piece in pieces if piece.row == row)


def equal(a: LMState, b: LMState) -> None:
    mine, other = pytree.tree_leaves(a), pytree.tree_leaves(b)
    assert len(mine) == len(other)
    for x, y in zip(mine, other, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_one_row_is_generate_bit_for_bit(model: LanguageModel, tokenizer: Tokenizer) -> None:
    for sampling, length in zip(SETTINGS, (1, 40, 700, 9), strict=True):
        prompt = prompt_of(length, length)
        expected = generate(model, tokenizer, [prompt], max_tokens=9, sampling=sampling)
        session = Rows(model, tokenizer, together=False)
        row = session.add(prompt, max_tokens=9, sampling=sampling)
        pieces = drain(session)
        assert [ids(pieces, row), text(pieces, row)] == [expected.ids[0], expected.texts[0]]
        talk = session.remove(row)
        equal(talk.state, expected.conversation.state)
        assert talk.pending == expected.conversation.pending


@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_the_same_whoever_joins_and_leaves(double, tokenizer: Tokenizer, seed: int) -> None:
    """Rows with settings of their own come and go at random steps; each draws what it draws alone."""
    draw = random.Random(seed)
    session, wanted, pieces, kept = Rows(double, tokenizer, chunk=16), {}, [], {}
    for step in range(24):
        if step < 18 and draw.random() < 0.5:
            sampling, length = draw.choice(SETTINGS), draw.choice([1, 5, 16, 17, 90])
            count, prompt = draw.randint(1, 12), prompt_of(length, draw.randrange(100))
            row = session.add(prompt, max_tokens=count, sampling=sampling, stream=7)
            wanted[row] = (prompt, count, sampling)
        if session.active and draw.random() < 0.25:
            row = draw.choice(session.active)
            kept[row] = session.remove(row)
        pieces += session.step()
    pieces += drain(session)
    assert len(wanted) > 4 and kept
    for row, (prompt, count, sampling) in wanted.items():
        alone = Rows(double, tokenizer)
        alone.add(prompt, max_tokens=count, sampling=sampling, stream=7)
        expected = ids(drain(alone), 0)
        if row not in kept:
            assert ids(pieces, row) == expected and session.remove(row).pending == [expected[-1:]]
            continue
        before = ids(pieces, row)  # taken out: what came is the beginning, and it goes on to the same end
        assert before == expected[: len(before)]
        again, left = Rows(double, tokenizer), count - len(before)
        if left and 0 not in before and kept[row].pending[0]:
            again.add("", max_tokens=left, sampling=sampling, stream=7, conversation=kept[row])
            assert before + ids(drain(again), 0) == expected
    assert not session.active


def test_greedy_and_sampled_rows_stand_side_by_side(model: LanguageModel, tokenizer: Tokenizer) -> None:
    prompt, session = prompt_of(9, 0), Rows(model, tokenizer)
    for sampling in SETTINGS:
        session.add(prompt, max_tokens=15, sampling=sampling, stream=0)
    pieces = drain(session)
    assert len({tuple(ids(pieces, row)) for row in range(4)}) == 4
    for row, sampling in enumerate(SETTINGS):
        alone = generate(model, tokenizer, [prompt], max_tokens=15, sampling=sampling)
        assert ids(pieces, row) == alone.ids[0]


def test_streams_of_one_seed_are_apart_and_collide_with_no_other_seed(model, tokenizer: Tokenizer) -> None:
    session, prompt = Rows(model, tokenizer), prompt_of(9, 0)
    for seed in range(3):
        for stream in range(3):
            session.add(
                prompt, max_tokens=12, sampling=SamplingConfig(temperature=2.0, seed=seed), stream=stream
            )
    same = session.add(prompt, max_tokens=12, sampling=SamplingConfig(temperature=2.0, seed=1), stream=1)
    pieces = drain(session)
    assert len({tuple(ids(pieces, row)) for row in range(9)}) == 9
    assert ids(pieces, same) == ids(pieces, 4)


def test_a_long_prompt_does_not_keep_the_others_waiting(perspective, tokenizer: Tokenizer) -> None:
    session = Rows(perspective, tokenizer, chunk=8)
    short = session.add(prompt_of(3, 0), max_tokens=99, sampling=GREEDY)
    session.step()
    long = session.add(prompt_of(39, 1), max_tokens=99, sampling=GREEDY)
    steps = [[piece.row for piece in session.step()] for _ in range(6)]
    assert steps == [[short]] * 4 + [[short, long]] * 2, (
        "40 tokens, with the one before the document: 5 chunks"
    )


def test_a_row_that_leaves_takes_its_memory_along(tokenizer: Tokenizer) -> None:
    """A short row that stood beside a long one has the cache of a short row, and it costs as much."""
    model, alone = make("transformer-tiny"), Rows(make("transformer-tiny"), tokenizer)
    session = Rows(model, tokenizer)
    long, short = (session.add(prompt_of(n, n), max_tokens=30, sampling=GREEDY) for n in (600, 5))
    alone.add(prompt_of(5, 5), max_tokens=30, sampling=GREEDY)
    for _ in range(10):
        session.step(), alone.step()
    session.remove(long)
    sizes = [other.conversation(row).state.nbytes for other, row in ((session, short), (alone, 0))]
    assert sizes[0] == sizes[1]
    for _ in range(5):
        session.step(), alone.step()
    talks = session.conversation(short), alone.conversation(0)
    assert [cache.used for cache in talks[0].state.layers] == [cache.used for cache in talks[1].state.layers]
    assert talks[0].state.nbytes == talks[1].state.nbytes


def test_leaving_while_the_prompt_is_read(double: LanguageModel, tokenizer: Tokenizer) -> None:
    prompt, sampling = prompt_of(50, 2), SETTINGS[1]
    expected = generate(double, tokenizer, [prompt], max_tokens=9, sampling=sampling)
    for steps in (0, 1, 2):
        session = Rows(double, tokenizer, chunk=16)
        other = session.add(prompt_of(70, 3), max_tokens=9)
        row = session.add(prompt, max_tokens=9, sampling=sampling, stream=0)
        for _ in range(steps):
            assert session.step() == []
        talk = session.remove(row)
        assert talk.pending == [[0, *prompt][16 * steps :]] and talk.recent == [prompt]
        on = generate(double, tokenizer, [""], max_tokens=9, sampling=sampling, conversation=talk)
        assert on.ids == expected.ids
        assert session.active == [other]


def test_a_conversation_taken_on_the_way_goes_on_as_the_row_does(model, tokenizer: Tokenizer) -> None:
    session = Rows(model, tokenizer)
    rows = [session.add(prompt_of(n, n), max_tokens=20, sampling=SETTINGS[2]) for n in (5, 30)]
    before = [piece for _ in range(8) for piece in session.step()]
    talk = session.conversation(rows[1])
    rest = drain(session)
    assert len(ids(before, 1)) == 8 and talk.drawn == [8]
    again = Rows(model, tokenizer)
    row = again.add("", max_tokens=12, sampling=SETTINGS[2], conversation=talk, stream=1)
    assert ids(drain(again), row) == ids(rest, 1)


def test_rows_of_a_conversation_part_and_stack(double: LanguageModel, tokenizer: Tokenizer) -> None:
    texts = ["The cat", " sat on the mat, and then", "R"]
    whole = generate(double, tokenizer, texts, max_tokens=9, sampling=SETTINGS[1]).conversation
    parts = [whole.take(row) for row in (2, 0, 1)]
    stacked = Conversation.stack(parts)
    on = generate(double, tokenizer, [""] * 3, max_tokens=9, sampling=GREEDY, conversation=stacked)
    expected = generate(double, tokenizer, [""] * 3, max_tokens=9, sampling=GREEDY, conversation=whole)
    assert [on.ids[1], on.ids[2], on.ids[0]] == expected.ids
    with refused(StateError, 3):
        whole.take(3)


def test_stop_strings_and_ends_are_each_rows_own(double: LanguageModel, tokenizer: Tokenizer) -> None:
    free = generate(double, tokenizer, ["The cat"], max_tokens=40, sampling=SETTINGS[2])
    stop = free.texts[0][5:8]
    session = Rows(double, tokenizer)
    first = session.add("The cat", max_tokens=40, sampling=SETTINGS[2], stream=0, stop=[stop])
    second = session.add("The cat", max_tokens=40, sampling=SETTINGS[2], stream=0)
    third = session.add("The cat", max_tokens=3, sampling=SETTINGS[2], stream=0)
    pieces = drain(session)
    ends = {piece.row: piece.finished for piece in pieces if piece.finished is not None}
    assert ends == {first: "stop", second: free.finished[0], third: "length"}
    assert text(pieces, first) == free.texts[0][: free.texts[0].find(stop)]
    assert text(pieces, second) == free.texts[0] and ids(pieces, third) == free.ids[0][:3]


def test_a_row_that_is_not_finite_ends_alone(perspective: LanguageModel, tokenizer: Tokenizer) -> None:
    session = Rows(perspective, tokenizer)
    good = session.add(prompt_of(5, 5), max_tokens=9, sampling=GREEDY)
    broken = prefill(perspective, [prompt_of(5, 5)])[1]
    bad_layers = tuple(pytree.tree_map_only(torch.Tensor, spoiled, layer) for layer in broken.layers)
    talk = Conversation(dataclasses.replace(broken, layers=bad_layers), [[1]], [[]], [0])
    bad = session.add([2, 3], max_tokens=9, sampling=GREEDY, conversation=talk)
    pieces = drain(session)
    (last,) = (piece for piece in pieces if piece.row == bad)
    assert (last.id, last.text, last.finished) == (None, "", "error") and isinstance(
        last.error, NonFiniteError
    )
    alone = generate(perspective, tokenizer, [prompt_of(5, 5)], max_tokens=9, sampling=GREEDY)
    assert ids(pieces, good) == alone.ids[0]
    assert session.remove(bad).pending == [[]] and not session.active


def spoiled(leaf: torch.Tensor) -> torch.Tensor:
    return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf


def test_rows_that_are_not_there_and_options_that_cannot_be_leave_nothing_behind(
    perspective: LanguageModel, tokenizer: Tokenizer
) -> None:
    session = Rows(perspective, tokenizer)
    assert session.step() == [] and session.active == []
    for row in (0, -1):
        for call in (session.remove, session.conversation):
            with refused(StateError, "row", row):
                call(row)
    for named, options in (
        (["max_tokens", 0], {"max_tokens": 0}),
        (["stop", "ab"], {"stop": "ab"}),
        (["stream", -1], {"stream": -1}),
        ([0, VOCAB], {"prompt": [VOCAB]}),
    ):
        with refused(ConfigError, *named):
            session.add(**({"prompt": "x", "max_tokens": 1} | options))
    two = generate(perspective, tokenizer, ["x", "y"], max_tokens=1).conversation
    with refused(StateError, 2):
        session.add("x", max_tokens=1, conversation=two)
    other = generate(make("perspective-tiny"), tokenizer, ["x"], max_tokens=1).conversation
    with refused(StateError):
        session.add("x", max_tokens=1, conversation=other)
    row = session.add("x", max_tokens=1)
    assert row == 0 and session.active == [0], "what was refused left nothing behind"


def test_a_row_that_has_read_its_prompt_reads_no_more_and_is_unharmed(model, tokenizer) -> None:
    rows = Rows(model, tokenizer)
    row, pieces = rows.add("the", max_tokens=5), []
    pieces += rows.step([row])
    with refused(StateError, "row", row):
        rows.step([row])
    pieces += drain(rows)
    alone = Rows(model, tokenizer)
    alone.add("the", max_tokens=5)
    assert ids(pieces, row) == ids(drain(alone), 0)
