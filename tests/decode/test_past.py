"""The past of a text: its log, the token since which an answer is so, another beginning, two memories as one."""

import copy
import json
import math
import random
from contextlib import nullcontext

import pytest
import torch

from perspectron import presets
from perspectron.data.specials import Specials
from perspectron.data.tokenizer import Tokenizer
from perspectron.decode.apart import diff
from perspectron.decode.history import digest, entries, history, noted
from perspectron.decode.merge import merge, merging
from perspectron.decode.past import Until, bisect, rebase, until_of
from perspectron.decode.session import Session
from perspectron.model.model import build
from perspectron.model.tuned import parts
from perspectron.util.errors import ConfigError, StateError
from tests.decode.conftest import VOCAB, make
from tests.decode.recalling import Letters, recalling
from tests.decode.test_rows import GREEDY, equal, prompt_of
from tests.decode.test_store import small
from tests.foreign_tokenizers import KINDS
from tests.refusals import refused


def planted(at: int, tokens: int = 20_000) -> list[int]:
    """Letters, with the fact that x comes after K, which ends with the token `at`, counted from 1."""
    draw = random.Random(at)
    ids = [draw.randrange(1, 27) for _ in range(tokens)]
    ids[at - 2 : at] = Letters().encode("Kx")
    return ids


@pytest.fixture(scope="module")
def recaller():
    return recalling()


@pytest.mark.parametrize(("at", "tokens"), [(13_337, 20_000), (2, 500), (500, 500)])
def test_bisect_finds_a_planted_fact(recaller, at, tokens) -> None:
    session = Session(recaller, Letters()).read(planted(at, tokens))
    found = bisect(session, "K", "x", max_tokens=1)
    assert (found.token, found.spelled, found.after) == (at, "x", "x")
    assert found.readings <= 20 and found.before != "x" and "Kx" in found.around
    assert session.tokens == planted(at, tokens)


def test_conditions_are_expressions_and_probabilities_too(recaller, tmp_path) -> None:
    Session(recaller, Letters()).read(planted(300, 500)).save(tmp_path / "a")
    session = Session.load(tmp_path / "a", recaller, Letters())
    for until in ("/^[w-z]$/", "p(x) > 0.5", until_of("x")):
        assert bisect(session, "K", until, max_tokens=1).token == 300
    for until in ("/(/", "p(x) > 1", ""):
        with refused(ConfigError, "until"):
            until_of(until)


@pytest.mark.parametrize("until", ["p(x) > 1.2.3", "p(x) > .", "p(x) > 2", "p(x) > nan", "p(x) > much"])
def test_a_bound_that_is_no_probability_is_refused(until) -> None:
    with refused(ConfigError, "until"):
        until_of(until)


def test_what_never_or_always_holds_is_refused_with_both_answers(recaller) -> None:
    session = Session(recaller, Letters()).read(planted(300, 500))
    for until in ("y", "p(a)>0"):
        with refused(ConfigError, "until", 0, 500):
            bisect(session, "K", until, max_tokens=1)
    with refused(ConfigError, "ask"):
        bisect(session, "", "x")
    with refused(ConfigError, "tokens", 0):
        bisect(Session(recaller, Letters()), "K", "x")


@pytest.mark.parametrize("design", ["perspective2", "transformer"])
def test_each_reading_has_the_bits_of_the_session_as_it_was(design, tokenizer, tmp_path, monkeypatch) -> None:
    """Drawn tokens and a file included; the way back is the one that `at` has."""
    model = small(design)
    session = Session(model, tokenizer, chunk=16).read(prompt_of(40, 1))
    session.say(9, sampling=GREEDY)
    session.read(prompt_of(30, 2)).save(tmp_path / "a")
    session, asked, seen = Session.load(tmp_path / "a", model, tokenizer, chunk=16), prompt_of(3, 9), {}

    def recorded(then, tokens):
        T, fork = len(then.tokens) - 3, then.fork()
        seen[T] = yield from fork.predicting([1])
        return T >= 23, ""

    assert bisect(session, asked, Until("recorded", recorded)).token == 23
    monkeypatch.undo()
    fresh = Session.load(tmp_path / "a", model, tokenizer, chunk=16)
    for T in seen:
        then = fresh.at(T)
        then.append(asked)
        expected = list_of(then.predicting([1]))
        assert torch.equal(seen[T], expected)


@pytest.mark.parametrize("left", [40, 12, 1])
def test_an_answer_is_as_long_as_the_positions_allow(tokenizer, left) -> None:
    session, seen = Session(small("gpt2"), tokenizer), set()
    session.read(prompt_of(session.left - left - 3, 1))

    def asked(then, tokens):
        seen.add(tokens)
        said = yield from then.saying(tokens, sampling=GREEDY)
        return len(then.tokens) > 25, said

    bisect(session, prompt_of(3, 9), Until("asked", asked))
    assert seen == {min(left, 16)}


def list_of(steps):
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_a_log_says_what_was_read_and_drawn_when_and_from_where(
    model, tokenizer, tmp_path, monkeypatch
) -> None:
    now = [1000]
    monkeypatch.setattr("perspectron.decode.history.time.time", lambda: now[0])
    session = Session(model, tokenizer).read(prompt_of(9, 1))
    now[0] = 2000
    session.say(4, sampling=GREEDY)
    session.save(tmp_path / "a")
    now[0] = 3000
    later = Session.load(tmp_path / "a", model, tokenizer)
    later.read(prompt_of(5, 2)).save(tmp_path / "b")
    told = history(tmp_path / "b")
    steps = [(e.start, e.stop, e.what, e.when) for e in told.entries]
    assert steps == [
        (0, 9, "read", 1000), (9, 13, "drawn", 2000), (13, 13, "from", 3000), (13, 18, "read", 3000),
    ]  # fmt: skip
    assert (
        told.entries[2].parent == history(tmp_path / "a").digest == session.digest == told.entries[1].digest
    )
    assert told.entries == later.log and told.digest == later.digest == told.entries[-1].digest
    assert (told.tokens, told.drawn, told.whole, list(told.ids)) == (18, 4, True, later.tokens)
    assert told.model == model.fingerprint()
    early = later.at(11)
    assert [(e.stop, e.what) for e in early.log] == [(9, "read"), (11, "drawn"), (11, "from")]
    assert digest([1, 2], [0, 1]) != digest([1, 2], [0, 0])


def test_a_file_without_a_log_has_one_without_times(model, tokenizer, tmp_path) -> None:
    from perspectron.decode.generate import generate

    talk = generate(model, tokenizer, [prompt_of(5, 1)], max_tokens=3).conversation
    talk.save(tmp_path / "bare", model)
    told = history(tmp_path / "bare")
    assert (told.whole, told.tokens, told.entries[0].when) == (False, 1, None)
    generate(model, tokenizer, ["a", "b"], max_tokens=3).conversation.save(tmp_path / "two", model)
    with refused(StateError, tmp_path / "two"):
        history(tmp_path / "two")


def test_a_long_log_keeps_its_origins_and_about_all_times(monkeypatch) -> None:
    monkeypatch.setattr("perspectron.decode.history.MOST_EVENTS", 32)
    now, events = [1000], []
    monkeypatch.setattr("perspectron.decode.history.time.time", lambda: now[0])
    for now[0] in range(1001, 2001):
        noted(events, now[0] - 1000)
        if now[0] % 300 == 7:
            noted(events, now[0] - 1000, "from", str(now[0]))
    assert len(events) <= 32
    found = entries([5] * 1000, [0] * 1000, 0, events)
    origins = [(e.stop, e.when, e.parent) for e in found if e.what == "from"]
    assert origins == [(n - 1000, n, str(n)) for n in (1207, 1507, 1807)]
    assert all(e.when - 1000 == e.stop and e.stop - e.start <= 128 for e in found)
    for number in range(100):
        noted(events, 1000, "from", str(number))
    assert len(events) <= 32 and events[-1][3] == "99"


@pytest.mark.parametrize(
    "log",
    [
        5,
        [[1, 2]],
        [[9, 1, "text", ""]],
        [[1, -1, "text", ""]],
        [[1, 1, "odd", ""]],
        [[2, 1, "text", ""], [1, 1, "text", ""]],
    ],
)
def test_a_log_of_a_stranger_is_refused(model, tokenizer, tmp_path, log) -> None:
    session = Session(model, tokenizer).read([5, 6])
    session._events = log
    session.save(tmp_path / "a")
    for read in (history, lambda path: Session.load(path, model, tokenizer)):
        with refused(StateError, "log", tmp_path / "a"):
            read(tmp_path / "a")


def test_diff_says_where_texts_part_and_what_each_expects(model, tokenizer) -> None:
    a = Session(model, tokenizer).read(prompt_of(70, 1))
    b = a.fork().read(prompt_of(30, 2))
    a.read(prompt_of(20, 3))
    same = diff(a, a.fork(), prompt_of(150, 4))
    assert same.shared == 90 and set(same.kl) == {0.0} and set(same.layers) == {0.0} and len(same.kl) == 150
    found = diff(a, b, prompt_of(150, 4), count=3)
    assert (found.shared, found.tokens) == (70, (90, 100)) and len(found.layers) == len(model.blocks)
    assert max(found.layers) > 0 and found.mean > 0 and len(found.next[0]) == 3
    logits = [list_of(s.fork().predicting(prompt_of(150, 4))).double().log_softmax(1) for s in (a, b)]
    expected = (logits[0].exp() * (logits[0] - logits[1])).sum(1)
    torch.testing.assert_close(torch.tensor(found.kl, dtype=torch.float64), expected, atol=1e-4, rtol=1e-3)
    assert math.isnan(diff(a, b).mean)
    (id, p), *_ = found.next[0]
    assert p == pytest.approx(float(list_of(a.fork().predicting([0])).double().softmax(1)[-1, id]))


@torch.inference_mode()
def test_diff_of_a_bare_prefix_and_of_a_text_without_a_position_left_has_next_tokens(tokenizer) -> None:
    """Also with a tokenizer none of whose ids begins another document."""
    model, other = small("gpt2"), copy.copy(tokenizer)
    other.specials = Specials((1,), frozenset({2}), end=2)
    for own in (tokenizer, other):
        full, empty = Session(model, own).read([5] * 63), Session(model, own)
        found = diff(full, empty, count=1)
        for session, [(id, p)] in zip((full, empty), found.next, strict=True):
            ids_1T = torch.tensor([[*own.specials.prefix, *session.tokens]])
            logits_V = model(ids_1T).logits[0, -1, :VOCAB].double()
            assert id == int(logits_V.argmax()) and p == pytest.approx(
                float(logits_V.softmax(0)[id]), rel=1e-4
            )


def test_a_line_end_that_ends_texts_is_replayed_as_text(tokenizer, tmp_path) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    line = Tokenizer.load(tmp_path / "tokenizer.json").encode("a\nb")[-2]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": line}))
    foreign = Tokenizer.load(tmp_path / "tokenizer.json")
    model = presets.small("ssd", vocab_size=foreign.vocab_size, d_model=32, layers=2, seq_len=64)
    session = Session(build(model).eval(), foreign).read(foreign.encode("the fox\nand the fox"))
    found = rebase(session, Session(small("ssd"), tokenizer))
    assert tokenizer.decode(found.session.tokens) == "the fox\nand the fox"


def test_other_models_and_foreign_ids_are_refused(tokenizer, tmp_path) -> None:
    one, other = (make(design) for design in ("perspective-tiny", "transformer-tiny"))
    a, b = Session(one, tokenizer).read([5, 6]), Session(other, tokenizer).read([5, 6])
    for compare in (diff, merge):
        with refused(StateError):
            compare(a, b)
        with refused(ConfigError, "on", VOCAB, allowed := VOCAB):
            compare(a, a.fork(), [1, allowed])
    a.save(tmp_path / "a")
    with refused(StateError, tmp_path / "a"):
        Session.load(tmp_path / "a", other, tokenizer)


def test_a_text_is_replayed_on_another_beginning(model, tokenizer, tmp_path) -> None:
    session = Session(model, tokenizer).read(prompt_of(20, 1))
    session.say(5, sampling=GREEDY)
    onto = Session(model, tokenizer).read(prompt_of(7, 2))
    found = rebase(session, onto, after=12)
    expected = Session(model, tokenizer).read([*onto.tokens, *session.tokens[12:]])
    assert found.session.tokens == expected.tokens and (found.tokens, found.prefix, found.encoded) == (
        13,
        7,
        None,
    )
    assert found.session.say(6, sampling=GREEDY) == expected.say(6, sampling=GREEDY)
    assert [e.parent for e in found.session.log if e.what == "rebased"] == [session.digest]
    for after in (-1, 26, 25):
        with refused(ConfigError):
            rebase(session, onto, after=after)
    session.save(tmp_path / "a")


def test_a_text_is_replayed_by_a_model_of_another_vocabulary(recaller, model, tokenizer) -> None:
    session = Session(model, tokenizer).read([*tokenizer.encode("the cat sat"), 0, *tokenizer.encode("on")])
    found = rebase(session, Session(recaller, Letters()))
    letters = Letters()
    assert found.session.tokens == [*letters.encode("the cat sat"), 0, *letters.encode("on")]
    assert found.encoded == 14 != found.tokens


def test_a_merge_of_two_tokens_is_the_text_itself_but_for_rounding(tokenizer) -> None:
    """What B's first layer reads does not depend on A, so that a model of one layer is exact."""
    model = recalling()
    letters = Letters()
    a, b = Session(model, letters).read("Kx"), Session(model, letters).read("abcabcL")
    found = merge(a, b, letters.encode("aKx"))
    assert found.kl < 1e-9 < found.alone
    found.session.append("K")
    assert found.session.say(1, sampling=GREEDY) == "x"


@pytest.mark.parametrize("design", [d for d in presets.DESIGNS if d not in ("adr", "lens", "gpt2")])
def test_a_merge_is_nearer_than_the_second_text_alone_or_refused(design, tokenizer, tmp_path) -> None:
    model = small(design)
    a, b = (Session(model, tokenizer, chunk=16).read(prompt_of(n, n)) for n in (21, 18))
    try:
        found = merge(a, b, prompt_of(20, 3))
    except ConfigError:
        with refused(ConfigError, "merge", model.config.name):
            merge(a, b, prompt_of(20, 3))
        return
    assert found.kl < found.alone
    found.session.save(tmp_path / "c")
    again = Session.load(tmp_path / "c", model, tokenizer)
    assert {e.parent for e in again.log} >= {a.digest, b.digest}
    equal(again._state.filled(), found.session._state.filled())
    again.say(3)


def test_a_merge_is_judged_on_as_many_tokens_as_there_are_positions_left(tokenizer) -> None:
    model = small("gpt2")
    for tokens, probe in ((21, 23), (43, 1)):
        a, b = (Session(model, tokenizer).read(prompt_of(n, n)) for n in (tokens, 19))
        found = merge(a, b)
        assert len(found.probe) == probe and found.kl < found.alone
    with refused(ConfigError, "on"):
        merge(a.read([5]), b)


def test_a_merge_counts_positions_by_document(tokenizer) -> None:
    model = small("gpt2")
    a = Session(model, tokenizer).read([*prompt_of(30, 1), 0, *prompt_of(30, 2)])
    b = Session(model, tokenizer).read([*prompt_of(10, 3), 0, *prompt_of(50, 4)])
    with refused(ConfigError, "merge", model.config.name):  # nothing of a is left
        merge(a, b, [5])
    found = merge(a, b.at(10), prompt_of(20, 5))
    assert found.kl < found.alone
    for tokens, probe, fits in ((32, 1, True), (33, 1, False), (34, 0, False)):
        c = Session(model, tokenizer).read(prompt_of(tokens, 6))
        with nullcontext() if fits else refused(ConfigError, "positions", 65, 64):
            next(merging(a, c, [5] * probe))  # before the work


def test_a_merge_of_nothing_or_of_a_text_that_is_not_known_is_refused(tokenizer, tmp_path) -> None:
    model = make("perspective-tiny")
    a, b = Session(model, tokenizer).read([5, 6, 7]), Session(model, tokenizer)
    for pair in ((a, b), (b, a)):
        with refused(ConfigError, "texts"):
            merge(*pair)
    bare = a.remembered(model.init_state(1), [5])
    with refused(StateError):
        merge(a, bare)
    with refused(StateError):
        rebase(bare, a)
    with refused(ConfigError, "merge", model.config.name):
        merge(a, a.fork().begun().read([0, 5, 0]), [5])  # B forgets all that was before it


def test_texts_that_begin_with_a_trained_memory_are_merged_and_compared(tokenizer) -> None:
    model = make("perspective-tiny")
    start = model.init_state(1, tuned=("offset", "first"))
    draw = torch.Generator().manual_seed(0)
    for part in parts(start):
        part.offset.normal_(generator=draw)
        part.first.normal_(generator=draw)
    start = model.begun(start)
    a, b = (Session(model, tokenizer, start=start).read(prompt_of(n, n)) for n in (30, 12))
    found = merge(a, b, prompt_of(20, 3))
    assert found.kl < found.alone
    plain = Session(model, tokenizer).read(prompt_of(30, 30))
    assert max(diff(a, plain, [5, 6]).layers) > 0 < diff(a, plain, [5, 6]).mean
    b.read([0, 5])
    with refused(ConfigError, "text"):
        merge(a, b)
