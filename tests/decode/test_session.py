"""A session's text is a function of its calls: pieces, forks, files and ways back change no bit of it."""

import copy
import dataclasses
import gc
import random
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch

from perspectron import presets
from perspectron.data.specials import Specials
from perspectron.decode.apart import diff
from perspectron.decode.conversation import Conversation
from perspectron.decode.drafts import NGrams
from perspectron.decode.generate import generate
from perspectron.decode.marks import Marks, held
from perspectron.decode.past import bisect, rebase
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.model.model import build
from perspectron.model.state import LMState, read_state, save_state
from perspectron.util.errors import ConfigError, StateError
from tests.decode.conftest import VOCAB, drain, make
from tests.decode.test_rows import GREEDY, SETTINGS, equal, prompt_of
from tests.decode.test_store import CHUNK, small
from tests.refusals import refused

SAMPLED = SETTINGS[2]


def session_of(model, tokenizer, **options) -> Session:
    return Session(model, tokenizer, chunk=CHUNK, **options)


def test_it_says_what_generate_says(model, tokenizer) -> None:
    prompt = prompt_of(300, 1)
    expected = generate(model, tokenizer, [prompt], max_tokens=9, sampling=SAMPLED)
    session, heard = Session(model, tokenizer).read(prompt), []
    assert session.say(9, sampling=SAMPLED, on_text=heard.append) == expected.texts[0] == "".join(heard)
    assert session.tokens == prompt + expected.ids[0]
    on = generate(model, tokenizer, [""], max_tokens=5, sampling=SAMPLED, conversation=expected.conversation)
    assert session.say(5, sampling=SAMPLED) == on.texts[0]


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_no_way_there_changes_a_bit(design: str, tokenizer, tmp_path) -> None:
    """Read in pieces, forked, saved, loaded, gone back to any token and forth again."""
    model, text = small(design), prompt_of(21, 1)
    straight = session_of(model, tokenizer).read(text)
    straight.say(11, sampling=SAMPLED)
    straight.read(text[:13]).say(3, sampling=SAMPLED)
    session, store = session_of(model, tokenizer), PrefixStore(model, chunk=CHUNK)
    for piece in (text[:3], text[3:4], [], text[4:]):
        session.read(piece)
        session.save(tmp_path / "one")
        session = Session.load(tmp_path / "one", model, tokenizer, chunk=CHUNK, store=store).fork()
    session.say(5, sampling=SAMPLED), session.fork().say(3)
    session.save(tmp_path / "one")
    session = Session.load(tmp_path / "one", model, tokenizer, chunk=CHUNK, store=store)
    session.say(6, sampling=SAMPLED)
    session.read(text[:6])
    session = session.at(len(session.tokens)).read(text[6:13])
    session.say(3, sampling=SAMPLED)
    assert session.tokens == straight.tokens
    equal(session._state, straight._state)
    for token in (0, 8, 21, 25, 32, 40):
        back = session.at(token)
        assert back.tokens == straight.tokens[:token]
        if token == 25:  # 4 of the 11 tokens that were drawn there
            back.say(7, sampling=SAMPLED)
            assert back.tokens == straight.tokens[:32]
            back.read(text[:13]).say(3, sampling=SAMPLED)
            equal(back._state, straight._state)


def test_a_way_back_of_which_nothing_is_at_hand(perspective, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("perspectron.decode.marks.MARKED", 1)
    session, draw = session_of(perspective, tokenizer), random.Random(0)
    for turn in range(4):
        session.read(prompt_of(draw.randrange(1, 40), turn)).say(draw.randrange(1, 20), sampling=SAMPLED)
    assert len(session._marks._alive()) == 1
    again = session.at(len(session.tokens) // 2)
    twice = session.at(len(session.tokens) // 3).at(len(session.tokens) // 3)
    assert again.say(30, sampling=SAMPLED) == session.at(len(session.tokens) // 2).say(30, sampling=SAMPLED)
    assert session.tokens[: len(session.tokens) // 3] == twice.tokens


def test_a_session_begins_at_what_is_stored(perspective, tokenizer) -> None:
    store, text = PrefixStore(perspective, chunk=CHUNK), prompt_of(100, 3)
    first = session_of(perspective, tokenizer, store=store).read(text)
    second = session_of(perspective, tokenizer, store=store).read(text[:50]).read(text[50:])
    assert store.counters.tokens_saved == 12 * CHUNK
    assert first.say(9, sampling=GREEDY) == second.say(9, sampling=GREEDY)
    equal(first._state, second._state)


def test_a_text_that_begins_again_has_the_prefix_that_it_is_to_have(model, tokenizer) -> None:
    foreign = copy.copy(tokenizer)
    foreign.specials = Specials((1,), frozenset({2}), end=2)
    session = session_of(model, foreign)
    session.append([20, 21], whole=True)
    assert session._ids[:] == [20, 21]
    session.say(3, sampling=GREEDY)
    again = session.at(0).read([30, 31])
    assert again._ids[:] == [1, 30, 31] and again.tokens == [30, 31]
    assert again.say(3, sampling=GREEDY) == session_of(model, foreign).read([30, 31]).say(3, sampling=GREEDY)


def test_a_file_never_becomes_a_prefix_that_others_begin_with(perspective, tokenizer, tmp_path) -> None:
    """A state that claims to have read what it has not: the store gets nothing that was read after it."""
    text = prompt_of(60, 1)
    Session(perspective, tokenizer, chunk=CHUNK).read(prompt_of(20, 2)).save(tmp_path / "honest")
    state, extra = read_state(tmp_path / "honest", perspective)
    extra["session"]["ids"] = [0, *text[:20]]
    extra["conversation"]["pending"] = [text[15:20]]
    save_state(tmp_path / "lie", state, perspective, extra=extra)
    store = PrefixStore(perspective, chunk=CHUNK)
    liar = Session.load(tmp_path / "lie", perspective, tokenizer, chunk=CHUNK, store=store).read(text[20:])
    liar.at(30).fork().read(text[30:]).say(3)
    honest = session_of(perspective, tokenizer, store=store).read(text)
    plain = session_of(perspective, tokenizer).read(text)
    assert honest.say(5, sampling=SAMPLED) == plain.say(5, sampling=SAMPLED)
    equal(honest._state, plain._state)


def test_generate_and_a_session_take_each_others_files(perspective, tokenizer, tmp_path) -> None:
    talk = generate(perspective, tokenizer, ["The cat"], max_tokens=5, sampling=GREEDY).conversation
    talk.save(tmp_path / "talk", perspective)
    session = Session.load(tmp_path / "talk", perspective, tokenizer)
    assert session.tokens == talk.pending[0]
    session.save(tmp_path / "session")
    back = session.at(0)
    assert session.say(6, sampling=GREEDY) and len(session.at(3).tokens) == 3
    expected = generate(perspective, tokenizer, [""], max_tokens=6, sampling=GREEDY, conversation=talk)
    assert session.tokens[1:] == expected.ids[0]
    loaded = Conversation.load(tmp_path / "session", perspective)
    on = generate(perspective, tokenizer, [""], max_tokens=6, sampling=GREEDY, conversation=loaded)
    assert on.ids == expected.ids and back.tokens == []


def test_generate_goes_on_from_a_sessions_file_with_any_window(perspective, tokenizer, tmp_path) -> None:
    sampling = SamplingConfig(repetition_penalty=30.0, repetition_window=2000)
    session = Session(perspective, tokenizer).read([*range(2, 202), *[2, 3] * 150])
    session.say(3, sampling=sampling), session.save(tmp_path / "long")
    talk, start = Conversation.load(tmp_path / "long", perspective), len(session.tokens)
    made = generate(perspective, tokenizer, [""], max_tokens=12, sampling=sampling, conversation=talk)
    session.say(12, sampling=sampling)
    assert made.ids == [session.tokens[start:]]


def test_a_conversation_that_a_session_goes_on_with_is_the_same_text(
    perspective, tokenizer, tmp_path
) -> None:
    """Its noise and its penalty go on, also through a session's file and on the way back."""
    sampling = SamplingConfig(temperature=1.5, seed=3, repetition_penalty=1.8)

    def drawn(conversation, count: int) -> list[int]:
        options = {"max_tokens": count, "min_tokens": count, "sampling": sampling}
        return generate(perspective, tokenizer, [""], conversation=conversation, **options).ids[0]

    talk = generate(perspective, tokenizer, ["The cat sat"], max_tokens=9, sampling=sampling).conversation
    talk.save(tmp_path / "talk", perspective)
    session = Session.load(tmp_path / "talk", perspective, tokenizer)
    session.save(tmp_path / "unread")
    session = Session.load(tmp_path / "unread", perspective, tokenizer)
    session.say(290, sampling=sampling, min_tokens=290)
    expected = [*talk.pending[0], *drawn(talk, 300)]
    session.save(tmp_path / "on")
    for one in (session.at(2), session, Session.load(tmp_path / "on", perspective, tokenizer)):
        one.say(10, sampling=sampling, min_tokens=10)
        assert one.tokens == expected[: len(one.tokens)]
    assert drawn(Conversation.load(tmp_path / "on", perspective), 10) == expected[291:]


def test_a_keyword_that_say_lacks_is_refused_by_its_own_name(perspective, tokenizer) -> None:
    session = Session(perspective, tokenizer).read("The cat")
    with refused(TypeError, "say", "temperature"):
        session.say(4, temperature=0)
    with refused(TypeError, "saying", "temperature"):
        next(session.saying(4, temperature=0))


def test_of_a_loaded_conversation_no_more_is_gone_back_than_is_known(
    perspective, tokenizer, tmp_path, monkeypatch
) -> None:
    """What stood before it is in the state alone, so that the way back to an early token is none after a reload."""
    talk = generate(perspective, tokenizer, ["The cat"], max_tokens=5, sampling=GREEDY).conversation
    talk.pending[0] = [0]  # as if its document had ended
    talk.save(tmp_path / "talk", perspective)
    session = Session.load(tmp_path / "talk", perspective, tokenizer).read("the cat sat")
    with monkeypatch.context() as patch:
        patch.setattr("perspectron.decode.marks.MARKED", 1)
        session.say(6, sampling=GREEDY)
    early = session.at(2)
    session.save(tmp_path / "session")
    again = Session.load(tmp_path / "session", perspective, tokenizer)
    with refused(ConfigError, "token", 2):
        again.at(2)
    whole = again.at(len(again.tokens)).say(3, sampling=GREEDY)
    assert whole == session.say(3, sampling=GREEDY)
    assert early.tokens == session.tokens[:2] and session.at(2).say(7) == early.say(7)


def test_a_long_text_is_read_in_time_that_grows_as_it_does(perspective, tokenizer, monkeypatch) -> None:
    """What is kept on the way is not looked at again with each call."""
    told = []
    nbytes = LMState.nbytes.fget
    monkeypatch.setattr(LMState, "nbytes", property(lambda state: told.append(1) or nbytes(state)))
    session_of(perspective, tokenizer).read(prompt_of(40 * CHUNK, 1)).fork()
    assert len(told) <= 2 * 40


def test_the_way_back_pauses_before_each_call(perspective, tokenizer) -> None:
    session = session_of(perspective, tokenizer).read(prompt_of(5 * CHUNK, 1))
    session._marks = Marks()
    assert sum(1 for _ in session.back_to(4 * CHUNK)) == 4


def test_what_the_way_back_reads_again_is_marked_again(perspective, tokenizer) -> None:
    """Also where the session had a mark there once, which was released."""
    session = session_of(perspective, tokenizer).read(prompt_of(20 * CHUNK, 1))
    for mark in session._marks._kept.values():
        mark.let_go()
    assert [sum(1 for _ in session.back_to(token * CHUNK)) for token in (15, 15, 7, 16)] == [15, 0, 0, 1]
    assert sorted(session._marks._alive()) == [*range(1, 17)]


def test_seconds_count_all_that_was_read(perspective, tokenizer, monkeypatch) -> None:
    """Also after forks, files that are open and ways back, from marks or from the store."""
    now = [0.0]
    monkeypatch.setattr(
        "perspectron.decode.session.time.perf_counter", lambda: now.__setitem__(0, now[0] + 1) or now[0]
    )
    store, text = PrefixStore(perspective, chunk=CHUNK), prompt_of(20 * CHUNK - 1, 1)
    session = session_of(perspective, tokenizer, store=store).read(text)

    def seconds(own: Session) -> float:
        own.fork().read(prompt_of(2 * CHUNK, 2))
        path = store.path([*own._ids[:], *prompt_of(2 * CHUNK, 2)])
        return store.find(path, most=len(path.ids) - 1).seconds

    assert [seconds(own) for own in (session, session.fork(), session.at(10 * CHUNK))] == [21, 21, 12]
    session._marks = Marks()
    assert seconds(session.at(5 * CHUNK)) == 7, "from the store"
    assert seconds(session.opened(session.begun())) == 21


def test_the_marks_of_all_sessions_are_within_one_bound(tokenizer, monkeypatch) -> None:
    """Those of the text used least recently go first, its oldest first; one alone keeps every second one. Nothing
    that is said afterwards differs."""
    gc.collect()
    model = small("hgrn2")  # whose states are all of one size
    one = model.init_state(1).nbytes
    monkeypatch.setattr("perspectron.decode.marks.MARKED", (bound := held() + 24 * one))
    texts = [session_of(model, tokenizer).read(prompt_of(10 * CHUNK + 1, n)) for n in range(2)]
    assert [list(text._marks._alive()) for text in texts] == [[*range(1, 11)]] * 2
    texts[0].at(3)  # used again: the second is now the one to give
    texts += [session_of(model, tokenizer).read(prompt_of(7 * CHUNK + 1, 2))]
    assert [list(text._marks._alive()) for text in texts] == [
        [*range(1, 11)],
        [*range(4, 11)],
        [*range(1, 8)],
    ]
    texts[2].read(prompt_of(100 * CHUNK, 3))
    left = [sorted(text._marks._alive()) for text in texts]
    assert left[:2] == [[], []] and len(left[2]) >= 12 and max(left[2]) == 107
    assert left[2][0] < 54, "every second one is let go, not the oldest"
    assert held() <= bound
    again = session_of(model, tokenizer).read(prompt_of(10 * CHUNK + 1, 0))
    assert texts[0].at(20).say(5, sampling=SAMPLED) == again.at(20).say(5, sampling=SAMPLED)
    forks = [texts[2].fork() for _ in range(50)]
    assert held() <= bound, "what forks share is there once"
    for number, fork in enumerate(forks):
        fork.read([5 + number] * CHUNK)
    assert held() <= bound and len(forks[-1]._marks._alive()) >= 1
    del texts, forks, again, fork
    gc.collect()
    assert held() <= bound - 24 * one, "and what nobody has counts no more"


def test_what_is_wrong_is_said_and_changes_nothing(perspective, tokenizer, tmp_path) -> None:
    session = Session(perspective, tokenizer)
    session.read("The cat")
    with refused(ConfigError, VOCAB):
        session.read([VOCAB])
    with refused(ConfigError, "text"):
        session.read(b"ab")
    for token in (99, 1.5):
        with refused(ConfigError, "token", token):
            session.at(token)

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.say(30, on_text=stop)
    assert session.text == "The cat"
    assert session.say(9, sampling=GREEDY) == Session(perspective, tokenizer).read("The cat").say(
        9, sampling=GREEDY
    )
    session.save(tmp_path / "a")
    with refused(StateError, tmp_path / "a"):
        Session.load(tmp_path / "a", make("transformer-tiny"), tokenizer)
    table = small("gpt2")
    with refused(ConfigError, 65, "positions", 64):
        Session(table, tokenizer).read([5] * 64)
    with refused(ConfigError, 65, "positions", 64):
        Session(table, tokenizer).read([*[5] * 64, 0, 5])  # also one that ends


def test_what_is_of_another_type_is_refused_by_name(perspective, tokenizer, tmp_path) -> None:
    session = Session(perspective, tokenizer).read("The cat")
    made = partial(generate, perspective, tokenizer, ["The cat"], max_tokens=2)
    for call, name, value in (
        (made, "drafts", "ngram"),
        (made, "conversation", "x"),
        (made, "chunk", 1.5),
        (partial(generate, perspective, tokenizer), "prompts", None),
        (lambda draft_tokens: made(drafts=NGrams(draft_tokens)), "draft_tokens", 1.5),
        (lambda **more: Rows(perspective, tokenizer).add("a", max_tokens=2, **more), "logprobs", 2.5),
        (lambda **more: Rows(perspective, tokenizer).add("a", max_tokens=2, **more), "stream", 2.5),
        (partial(Session, perspective, tokenizer), "start", "x"),
        (partial(PrefixStore, perspective), "chunk", 1.5),
        (partial(session.save, tmp_path / "a"), "extra", [1]),
        (lambda count: list(session.likely([5], count)), "count", -1),
        (partial(diff, session, session), "count", -1),
        (partial(rebase, session, session), "after", 1.5),
        (partial(bisect, session, "x"), "until", 5),
        (partial(bisect, session, "x", "y"), "max_tokens", "2"),
    ):
        with refused(ConfigError, name):
            call(**{name: value})
    assert session.text == "The cat" and not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["expecting", "remembering"])
def test_a_session_goes_on_after_all_was_read(perspective, tokenizer, tmp_path, name) -> None:
    session = Session(perspective, tokenizer).read("The cat")
    expected = session.fork().say(5)
    for _ in getattr(session, name)():
        pass
    session.save(tmp_path / "a")
    for each in (Session.load(tmp_path / "a", perspective, tokenizer), session):
        assert each.say(5) == expected


def test_what_a_session_reads_or_says_while_it_says_is_refused(perspective, tokenizer) -> None:
    """Its state would not have read that, and what two say would be mixed."""
    session, other = (Session(perspective, tokenizer).read("The cat") for _ in range(2))
    steps = session.saying(6, sampling=GREEDY)
    next(steps)
    with refused(StateError):
        session.say(2)
    session.read("xyz")
    with refused(StateError):
        list(steps)
    assert session.tokens == other.read("xyz").tokens
    with refused(StateError):  # at the last token
        session.say(1, sampling=GREEDY, on_text=lambda _: session.say(1, sampling=GREEDY))
    other.say(1, sampling=GREEDY)
    assert session.say(4, sampling=GREEDY) == other.say(4, sampling=GREEDY)


def test_what_is_remembered_but_not_known_takes_positions_too(tokenizer, tmp_path) -> None:
    table = small("gpt2")
    generate(table, tokenizer, [[5] * 50], max_tokens=1).conversation.save(tmp_path / "a", table)
    session = Session.load(tmp_path / "a", table, tokenizer)
    for going_on in (session.read, session.append, lambda ids: [*session.predicting(ids)]):
        with refused(ConfigError, "positions", 64):
            going_on([7] * 13)
    assert len(session.tokens) == 1 and session.left == 13 and session.fork().read([7] * 12).left == 1
    assert session.read([0, *[7] * 63]).left == 1  # another document has them all


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_ids_may_be_any_whole_numbers(kind, perspective, tokenizer, tmp_path) -> None:
    ids, store = prompt_of(20, 1), PrefixStore(perspective, chunk=CHUNK)
    expected = session_of(perspective, tokenizer).read(ids)
    text = expected.say(5, sampling=GREEDY)
    session = session_of(perspective, tokenizer, store=store).read(kind(ids))
    assert session.say(5, sampling=GREEDY) == text
    session.save(tmp_path / "a")
    assert Session.load(tmp_path / "a", perspective, tokenizer).tokens == expected.tokens
    made = generate(perspective, tokenizer, [kind(ids)], max_tokens=5, sampling=GREEDY)
    made.conversation.save(tmp_path / "b", perspective)
    assert made.texts == [text]


@pytest.mark.parametrize("text", [[1.5], ["a"], [[5, 6]], torch.tensor([[5, 6]]), 5, None, b"a"])
def test_what_is_neither_a_text_nor_ids_is_refused_and_leaves_a_session_as_it_was(
    text, perspective, tokenizer
) -> None:
    session = Session(perspective, tokenizer).read("the")
    for reading in (session.read, session.append, lambda text: [*session.likely(text, 1)]):
        with refused(ConfigError, "text"):
            reading(text)
    assert session.text == "the"
    with refused(ConfigError):
        generate(perspective, tokenizer, [text])


@pytest.mark.parametrize(
    "change",
    [
        {"ids": [0, 999]},
        {"calls": [-1, 1]},
        {"calls": [1]},
        {"drawn": [0]},
        {"before": 2},
        {"ids": "x"},
        {"more": 1},
    ],
)
def test_a_file_whose_tokens_do_not_fit_is_refused(perspective, tokenizer, tmp_path, change) -> None:
    talk = {"pending": [[0, 5]], "recent": [[]], "drawn": [0]}
    own = {"ids": [0, 5], "drawn": [0, 0], "calls": [], "before": 1} | change
    with torch.inference_mode():
        save_state(
            tmp_path / "a",
            perspective.init_state(1),
            perspective,
            extra={"conversation": talk, "session": own},
        )
    with refused(StateError, tmp_path / "a"):
        Session.load(tmp_path / "a", perspective, tokenizer)


FORGED = [
    ("conversation", "recent", [[10**9]]), ("conversation", "recent", [[-(10**9)]]), ("conversation", "recent", [[-5]]),
    ("conversation", "recent", [[VOCAB]]), ("conversation", "pending", [[-1]]), ("conversation", "pending", [[VOCAB]]),
    ("conversation", "drawn", [-1]), ("conversation", "drawn", [2**62]), ("conversation", "drawn", [99]),
    ("session", "ids", [0, -1]), ("session", "drawn", [0, 2]), ("session", "calls", [0]), ("session", "before", -2),
    ("session", "before", 10**9),
]  # fmt: skip


@pytest.mark.parametrize(("part", "field", "value"), FORGED)
def test_no_number_of_a_file_is_believed(perspective, tokenizer, tmp_path, part, field, value) -> None:
    """Neither by a session nor by `generate`, where it is there that the number counts."""
    session = Session(perspective, tokenizer).read("The cat")
    session.say(4, sampling=GREEDY), session.save(tmp_path / "good")
    state, extra = read_state(tmp_path / "good", perspective)
    extra[part][field] = value
    save_state(tmp_path / "bad", state, perspective, extra=extra)
    with pytest.raises(StateError):
        Session.load(tmp_path / "bad", perspective, tokenizer)
    if part == "conversation" and value != [99]:
        with refused(StateError, tmp_path / "bad", field):
            Conversation.load(tmp_path / "bad", perspective)


def test_a_conversation_that_was_made_up_is_refused_where_it_would_be_used(perspective, tokenizer) -> None:
    """Also of ids that the model has and the tokenizer has not, as a penalty looks for them among its logits."""
    sampling = SamplingConfig(repetition_penalty=1.3)
    for change in ({"recent": [[VOCAB]]}, {"recent": [[-5]]}, {"drawn": [-1]}):
        talk = generate(perspective, tokenizer, ["The cat"], max_tokens=5, sampling=GREEDY).conversation
        talk = dataclasses.replace(talk, **change)
        with refused(StateError):
            generate(perspective, tokenizer, [""], max_tokens=2, sampling=sampling, conversation=talk)


@pytest.mark.parametrize("name", ["conversation", "session", "log"])
def test_what_is_kept_beside_a_text_takes_no_name_of_its_own(perspective, tokenizer, tmp_path, name) -> None:
    """It was lost, or the file could not be read again."""
    session, path = Session(perspective, tokenizer).read("The cat"), tmp_path / "a"
    talk = generate(perspective, tokenizer, ["The cat"], max_tokens=2).conversation
    for save in (session.save, partial(talk.save, model=perspective)):
        with refused(ConfigError, "extra", name):
            save(path, extra={name: 5})
        save(path, extra={"mine": 5})
        loaded = Session.load(path, perspective, tokenizer)
        loaded.save(path, extra=loaded.extra)
        assert Session.load(path, perspective, tokenizer).extra == {"mine": 5}


def test_a_file_that_was_read_in_larger_calls_is_not_read_again_in_them(
    perspective, tokenizer, tmp_path
) -> None:
    """The way back reads a text in the calls that its file tells: one of a million tokens would take all memory."""
    Session(perspective, tokenizer, chunk=512).read(prompt_of(600, 1)).save(tmp_path / "wide")
    with refused(StateError, tmp_path / "wide", 512, 128):
        Session.load(tmp_path / "wide", perspective, tokenizer)
    wide = Session.load(tmp_path / "wide", perspective, tokenizer, chunk=512)
    assert wide.at(100).tokens == prompt_of(100, 1)


def test_seeds_go_on_where_they_were(perspective, tokenizer) -> None:
    sampling = SamplingConfig(temperature=1.5, seed=9)
    one, two = (Session(perspective, tokenizer).read("The cat") for _ in range(2))
    assert one.say(12, sampling=sampling) == two.say(5, sampling=sampling) + two.say(7, sampling=sampling)


def test_forks_share_a_long_text(perspective, tokenizer) -> None:
    session = Session(perspective, tokenizer)
    session.append(prompt_of(200_000, 1))
    tracemalloc.start()
    forks = [session.fork() for _ in range(50)]
    for fork in forks:
        fork.append([5, 6])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000, "fifty copies would have 160 MB"
    assert forks[0].append([7]) is None and forks[0].tokens[-4:] == [*session.tokens[-1:], 5, 6, 7]
    assert forks[1].tokens == [*session.tokens, 5, 6]


def test_to_say_a_word_takes_no_copy_of_a_long_text(perspective, tokenizer) -> None:
    session = Session(perspective, tokenizer).read("The cat")
    session.say(3)
    session._ids.extend([7] * 200_000)  # as if they had been read and drawn
    session._drawn.extend([True] * 200_000)
    while session._read < len(session._ids) - 1:
        session._count(min(session.chunk, len(session._ids) - 1 - session._read))
    session.say(2)  # the lists grow now, and not again for a while
    session.say(2)
    tracemalloc.start()
    session.say(2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 500_000, "a list of 200,000 has 1.6 MB"
    assert len(session.tokens) == 200_000 + len(tokenizer.encode("The cat")) + 9


def ending(after: int):
    """A hook that lets the token that ends texts be drawn after so many others."""
    left = [after]

    def hook(ids, scores):
        left[0] -= 1
        if left[0] < 0:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 0] = 0
        return scores

    return hook


@pytest.mark.parametrize("design", ["perspective2", "transformer", "gdn"])
def test_what_is_said_after_a_drawn_end_of_text_begins_anew(design: str, tokenizer, tmp_path) -> None:
    model = small(design)
    session = session_of(model, tokenizer).read(prompt_of(15, 1))
    session.say(9, sampling=SAMPLED, hooks=[ending(2)])
    assert session._ids[-1] == tokenizer.specials.reset
    session.save(tmp_path / "one")
    likely = []
    for one in (session.fork(), session_of(model, tokenizer)):
        rows = Rows(model, tokenizer, chunk=CHUNK, together=False)
        one.enter(rows, max_tokens=1, sampling=SAMPLED, stream=0, logprobs=VOCAB)
        likely += [dict(piece.likely) for piece in rows.step()]
    assert likely[0] == pytest.approx(likely[1], rel=1e-4)
    talk = Conversation.load(tmp_path / "one", model)
    again = generate(model, tokenizer, [""], max_tokens=5, sampling=SAMPLED, conversation=talk, chunk=CHUNK)
    assert session.say(5, sampling=SAMPLED) == again.texts[0]


def test_a_drawn_end_of_text_leaves_all_positions_free(tokenizer) -> None:
    model = build(presets.small("gpt2", vocab_size=VOCAB, d_model=32, layers=2, seq_len=24), seed=5)
    assert model.config.positions == 24
    session = session_of(model, tokenizer).read(prompt_of(20, 1))
    session.say(4, sampling=SAMPLED, hooks=[ending(2)])
    rows = Rows(model, tokenizer, chunk=CHUNK)
    session.enter(rows, max_tokens=20, min_tokens=20, stream=0)
    assert len(drain(rows)) == 20


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("design", ["perspective2", "gdn", "transformer"])
def test_an_interrupted_read_is_read_again(design: str, marked: bool, tokenizer, monkeypatch) -> None:
    model, text = small(design), prompt_of(50, 1)
    straight, session = session_of(model, tokenizer).read(text), session_of(model, tokenizer)
    passes = [0]

    def stop(*_) -> None:
        passes[0] += 1
        if not marked:
            monkeypatch.setattr(session._marks, "at", lambda calls: None)
        if passes[0] == 4:
            raise KeyboardInterrupt

    hook = model.blocks[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        session.read(text)
    hook.remove()
    assert 0 < session.done < len(text)
    session.read([])
    equal(session._state, straight._state)


def test_a_session_begins_with_a_trained_state_of_one_row_and_its_model(tokenizer) -> None:
    model, other = small("perspective2"), small("gdn")
    trained = model.init_state(1, tuned=("first",))
    assert session_of(model, tokenizer, start=trained).start is trained
    plain, two = model.init_state(1), model.init_state(2, tuned=("first",))
    for start in (plain, two, other.init_state(1, tuned=("first",))):
        with refused(ConfigError, "start"):
            session_of(model, tokenizer, start=start)
