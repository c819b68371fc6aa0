"""Hooks of decoding: a user's own, transformers' logits processors, and one that fails in the middle of a batch."""

import copy
import itertools

import pytest
import torch

from perspectron.data.specials import Specials
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.processors import Hook, Mark
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.util.errors import ConfigError, PerspectronError, StateError
from tests.decode.conftest import drain
from tests.refusals import refused

PROMPTS = ["the cat", "", "Row 7 of", "and then the mat", "of 49"]
WARM = SamplingConfig(temperature=1.0, seed=3)
STAGES = ["prompt", "hidden", "logits", "verdict", "took"]


class Failing(Hook):
    """Raises at one stage, once its row has drawn so many tokens."""

    def __init__(self, stage: str, after: int = 0, error: Exception | None = None) -> None:
        self.after, self.drawn = after, 0
        self.error = ValueError("no more") if error is None else error
        kept = getattr(self, stage)

        def fail(*args, **more):
            if self.drawn >= self.after:
                raise self.error
            return kept(*args, **more)

        setattr(self, stage, fail)

    def took(self, id: int) -> bool:
        self.drawn += 1
        return False

    def logits(self, logits_NV, step):
        self.drawn = step.row.drawn
        return logits_NV


def _leaves(talk):
    return [x for x in torch.utils._pytree.tree_leaves(talk.state) if isinstance(x, torch.Tensor)]


def _drawn(pieces, row):
    return [piece for piece in pieces if piece.row == row]


def _rows(model, tokenizer, hooks_of_third=(), **settings):
    rows = Rows(model, tokenizer, **settings)
    for number, prompt in enumerate(PROMPTS):
        rows.add(prompt, max_tokens=6, sampling=WARM, logprobs=2, hooks=hooks_of_third if number == 2 else ())
    return rows


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_row_whose_hook_raises_ends_and_the_others_keep_every_bit(model, tokenizer, stage, together):
    plain, after = _rows(model, tokenizer, together=together), 0 if stage == "prompt" else 3
    failing = _rows(model, tokenizer, [Failing(stage, after)], together=together)
    expected, pieces = drain(plain), drain(failing)
    for row in (0, 1, 3, 4):
        assert _drawn(pieces, row) == _drawn(expected, row)
        assert all(map(torch.equal, _leaves(plain.conversation(row)), _leaves(failing.conversation(row))))
    *before, last = _drawn(pieces, 2)
    assert before == _drawn(expected, 2)[: len(before)] and len(before) == after
    assert (last.id, last.finished) == (None, "error")
    assert type(last.error) is PerspectronError and str(last.error) == "hook Failing: ValueError: no more"
    assert isinstance(last.error.__cause__, ValueError)
    assert failing.remove(2).rows == 1 and failing.active == []


class Wanting(Hook):
    """Has one token taken, whatever was drawn."""

    def __init__(self, token) -> None:
        self.token = token

    def verdict(self, step, id):
        return Mark(token=self.token)


@pytest.mark.parametrize("token", [10**6, -1, 1.5])
def test_a_token_that_there_is_not_ends_the_row_whose_hook_wants_it(perspective, tokenizer, token):
    expected = drain(_rows(perspective, tokenizer))
    pieces = drain(_rows(perspective, tokenizer, [Wanting(token)]))
    for row in (0, 1, 3, 4):
        assert _drawn(pieces, row) == _drawn(expected, row)
    [ended] = _drawn(pieces, 2)
    assert ended.finished == "error"
    with refused(PerspectronError, "Wanting"):
        raise ended.error


def test_a_token_of_a_tensor_is_taken_and_saved(perspective, tokenizer, tmp_path):
    session = Session(perspective, tokenizer).read("the cat")
    session.say(2, hooks=[Wanting(torch.tensor(7))])
    session.save(tmp_path / "a")
    assert Session.load(tmp_path / "a", perspective, tokenizer).tokens[-2:] == [7, 7]


def test_an_error_of_ours_in_a_hook_is_said_as_it_is_and_generate_raises_it(perspective, tokenizer):
    error = ConfigError("width = 3, must be 4")
    with refused(ConfigError, "width", 3):
        generate(perspective, tokenizer, ["x"], hooks=[Failing("hidden", error=error)])
    with refused(PerspectronError, "Failing", "ValueError"):
        generate(perspective, tokenizer, ["x"], hooks=[Failing("begin")])


def test_a_session_stays_as_it_was_when_a_hook_raises(perspective, tokenizer):
    session = Session(perspective, tokenizer).read("the cat")
    fork = session.fork()
    with refused(PerspectronError, "Failing"):
        session.say(9, hooks=[Failing("took", 4)])
    assert session.text == fork.text and session.say(9) == fork.say(9)


class Idle(Hook):
    """Changes nothing, and looks at all there is."""

    keeps_before = True

    def verdict(self, step, id):
        assert step.look(step.hidden_1D).shape == step.logits_1V.shape
        if len(step.row.unread) == 1 and step.row.drawn:
            now, before = step.state.document_length_B, step.before.document_length_B
            assert int(now) == int(before) + 1 == step.position + 1
        return Mark()


@pytest.mark.parametrize("together", [True, False])
def test_what_hooks_do_not_touch_keeps_its_bits(model, tokenizer, together):
    plain, watched = (
        _rows(model, tokenizer, together=together, hooks=hooks) for hooks in ((), [Idle(), Hook()])
    )
    for expected, piece in zip(drain(plain), drain(watched), strict=True):
        assert (piece.id, piece.likely, piece.logprob) == (expected.id, expected.likely, expected.logprob)
        assert piece.verdicts == {"Idle": Mark()} and expected.verdicts == {}
    for row in range(5):
        assert all(map(torch.equal, _leaves(plain.remove(row)), _leaves(watched.remove(row))))


class Ban:
    """A logits processor as users of transformers write them, which changes its scores in place."""

    def __init__(self, id: int) -> None:
        self.id, self.seen = id, []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.seen.append(input_ids[0].tolist())
        scores[:, self.id] = -torch.inf
        return scores


def test_a_logits_processor_sees_all_of_a_session_wherever_it_was_cut(perspective, tokenizer, tmp_path):
    ids, short = [5 + at % 90 for at in range(400)], SamplingConfig(temperature=0, repetition_window=3)
    for sampling in (SamplingConfig(temperature=0), short):
        waits, read = (Session(perspective, tokenizer) for _ in range(2))
        waits.append(ids)
        read.read(ids[:260]).read(ids[260:]).save(tmp_path / "a")
        loaded = Session.load(tmp_path / "a", perspective, tokenizer)
        for session in (waits, read, loaded):
            ban = Ban(1)
            session.say(2, sampling=sampling, hooks=[ban])
            assert ban.seen == [[0, *ids], [0, *ids, session.tokens[400]]]


def test_a_logits_processor_sees_what_a_conversation_remembers_once(perspective, tokenizer, tmp_path):
    session, ban = Session(perspective, tokenizer).read([*[7] * 130, 0, 8, 9]), Ban(1)
    session.save(tmp_path / "a")
    talk = Conversation.load(tmp_path / "a", perspective)
    assert talk.pending[0][-3:] == [0, 8, 9]  # of which recent has two
    generate(perspective, tokenizer, [[4]], max_tokens=1, conversation=talk, hooks=[ban])
    assert ban.seen == [[*[7] * 130, 0, 8, 9, 4]]


def test_no_token_ends_the_text_of_a_tokenizer_without_any(perspective, tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.specials = Specials()
    expected = generate(perspective, tokenizer, ["the cat"], max_tokens=4)
    assert generate(perspective, tokenizer, ["the cat"], max_tokens=4, min_tokens=3).ids == expected.ids


def test_a_logits_processor_sees_the_text_and_changes_what_is_drawn_but_no_logprob(perspective, tokenizer):
    settings = {"max_tokens": 5, "sampling": SamplingConfig(temperature=0)}
    plain = generate(perspective, tokenizer, ["the cat"], **settings)
    ban = Ban(plain.ids[0][0])
    made = generate(perspective, tokenizer, ["the cat"], **settings, hooks=[ban])
    assert ban.id not in made.ids[0] and made.verdicts == {}
    text = [0, *tokenizer.encode("the cat"), *made.ids[0]]
    assert ban.seen == [text[: len(text) - 5 + drawn] for drawn in range(5)]
    rows = Rows(perspective, tokenizer, hooks=[ban])
    rows.add("the cat", max_tokens=1, sampling=settings["sampling"], logprobs=1)
    ((id, logprob),) = rows.step()[0].likely
    assert id == ban.id and logprob > -torch.inf
    assert (
        Session(perspective, tokenizer).read("the cat").say(**settings, hooks=[Ban(ban.id)]) == made.texts[0]
    )


def test_processors_of_transformers_work_as_they_are(perspective, tokenizer):
    transformers = pytest.importorskip("transformers")
    processors = transformers.LogitsProcessorList(
        [transformers.NoRepeatNGramLogitsProcessor(2), transformers.SuppressTokensLogitsProcessor([5, 9])]
    )
    settings = {"max_tokens": 40, "sampling": SamplingConfig(temperature=0)}
    for hooks in ([processors], list(processors)):
        made = generate(perspective, tokenizer, PROMPTS, **settings, hooks=hooks)
        for prompt, ids in zip(PROMPTS, made.ids, strict=True):
            text = [0, *tokenizer.encode(prompt), *ids]
            start = len(text) - len(ids)
            pairs = [*itertools.pairwise(text)]
            assert all(pair not in pairs[: at - 1] for at, pair in enumerate(pairs[start - 1 :], start))
            assert not {5, 9} & {*ids}


class Steering(Hook):
    """Forgets everything after the first token, so that the rest is as after no text."""

    def __init__(self, model) -> None:
        self.model = model

    def verdict(self, step, id):
        if step.row.drawn == 0:
            step.state = self.model.init_state(1)


@pytest.mark.parametrize("together", [True, False])
def test_a_hook_changes_the_state_of_its_row_alone(perspective, tokenizer, together):
    plain = _rows(perspective, tokenizer, together=together)
    changed = _rows(perspective, tokenizer, [Steering(perspective)], together=together)
    expected, pieces = drain(plain), drain(changed)
    for row in (0, 1, 3, 4):
        assert _drawn(pieces, row) == _drawn(expected, row)
    first, *rest = _drawn(pieces, 2)
    alone = Rows(perspective, tokenizer, together=together)
    talk = plain.conversation(2)
    began = type(talk)(
        perspective.init_state(1), [[first.id]], [[*tokenizer.encode(PROMPTS[2]), first.id]], [1]
    )
    alone.add("", max_tokens=5, sampling=WARM, logprobs=2, conversation=began, stream=2)
    assert [piece.id for piece in drain(alone)] == [piece.id for piece in rest]


class Shift(Hook):
    """Changes what the head reads of its row."""

    def hidden(self, hidden_ND, step):
        return -hidden_ND


def test_a_hook_changes_what_the_head_reads_of_its_row_alone(model, tokenizer):
    expected = drain(_rows(model, tokenizer))
    pieces = drain(_rows(model, tokenizer, [Shift()]))
    for row in (0, 1, 3, 4):
        assert _drawn(pieces, row) == _drawn(expected, row)
    assert _drawn(pieces, 2) != _drawn(expected, 2)


class Stop(Hook):
    """Stops its row before the token after so many, or takes another token."""

    name = "stop"

    def __init__(self, at: int, token: int | None = None) -> None:
        self.at, self.token = at, token

    def verdict(self, step, id):
        return Mark(flagged=True, token=self.token, stop=step.row.drawn == self.at)


@pytest.mark.parametrize("drawn", [0, 3])
def test_a_session_goes_on_after_a_hook_stopped_it(perspective, tokenizer, drawn):
    session, other = (Session(perspective, tokenizer).read("the cat") for _ in range(2))
    said = session.say(9, sampling=WARM, hooks=[Stop(drawn)])
    if drawn:
        assert other.say(drawn, sampling=WARM) == said
    else:
        assert said == ""
    assert session.tokens == other.tokens
    assert session.fork().say(5, sampling=WARM) == other.fork().say(5, sampling=WARM)
    assert session.read(" mat").say(5, sampling=WARM) == other.read(" mat").say(5, sampling=WARM)


@pytest.mark.parametrize("drawn", [0, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_texts_go_on_after_a_hook_stopped_them(model, tokenizer, tmp_path, drawn, rows):
    """With or without a prompt: as they would have without the hook."""
    prompts = [[5 + at % 90 for at in range(150 + row)] for row in range(rows)]
    whole = generate(model, tokenizer, prompts, max_tokens=9, sampling=WARM)
    made = generate(model, tokenizer, prompts, max_tokens=9, sampling=WARM, hooks=[Stop(drawn)])
    assert made.ids == [ids[:drawn] for ids in whole.ids] and made.finished == ["unsafe"] * rows
    talk = {"conversation": made.conversation, "sampling": WARM}
    on = generate(model, tokenizer, [""] * rows, max_tokens=9 - drawn, **talk)
    assert on.ids == [ids[drawn:] for ids in whole.ids]
    more = generate(model, tokenizer, [*[""] * (rows - 1), "x"], max_tokens=2, **talk)
    assert more.ids[:-1] == [ids[drawn : drawn + 2] for ids in whole.ids[:-1]]
    if rows == 1:
        made.conversation.save(tmp_path / "talk", model)
        session = Session.load(tmp_path / "talk", model, tokenizer)
        session.say(9 - drawn, sampling=WARM)
        assert session.tokens[-(9 - drawn) :] == on.ids[0]


def test_what_the_store_has_is_read_to_its_end_where_a_hook_may_stop(perspective, tokenizer):
    ids, store = [0, *[5 + at % 90 for at in range(255)]], PrefixStore(perspective)
    for _ in range(2):
        rows = Rows(perspective, tokenizer, store=store)
        row = rows.add(ids, max_tokens=3, hooks=[Stop(0)])
        drain(rows)
        assert rows.spared(row) in (0, 128) and rows.remove(row).pending == [ids[128:]]


def test_a_hook_takes_another_token_and_stops(perspective, tokenizer):
    made = generate(perspective, tokenizer, ["the", "x"], max_tokens=9, hooks=[Stop(2, token=7)])
    assert made.ids == [[7, 7]] * 2 and made.finished == ["unsafe"] * 2
    assert [len(row) for row in made.verdicts["stop"]] == [3, 3]
    made = generate(perspective, tokenizer, ["the"], max_tokens=9, hooks=[Stop(2), Stop(99)])
    assert made.finished == ["unsafe"] and {*made.verdicts} == {"stop", "stop 2"}


class Wide(Hook):
    def logits(self, logits_NV, step):
        return logits_NV[:, :-1]


def test_bad_hooks_are_said_in_a_line(perspective, tokenizer):
    with refused(PerspectronError, "Wide"):
        generate(perspective, tokenizer, ["x"], hooks=[Wide()])
    with refused(ConfigError, "hooks", "safety"):
        generate(perspective, tokenizer, ["x"], hooks=["safety"])
    session = Session(perspective, tokenizer).read("x")
    for wrong in (
        {"hooks": None},
        {"hooks": Wide()},
        {"stop_ids": None},
        {"stop_ids": 3},
        {"sampling": None},
    ):
        with refused(ConfigError, *wrong):
            generate(perspective, tokenizer, ["x"], **wrong)
        with refused(ConfigError, *wrong):
            session.say(1, **wrong)


class Private(Hook):
    shares_prefixes = False

    def prompt(self, ids, state, *, begins, last):
        self.read = [*getattr(self, "read", []), *ids]


def test_a_row_that_shares_no_prefix_reads_its_prompt_itself(perspective, tokenizer):
    rows = Rows(perspective, tokenizer, store=PrefixStore(perspective))
    ids = [5 + at % 90 for at in range(400)]
    rows.add(ids, max_tokens=1)
    drain(rows)
    own, shared = Private(), rows.add(ids, max_tokens=1, stream=0)
    private = rows.add(ids, max_tokens=1, stream=0, hooks=[own])
    pieces = drain(rows)
    assert own.read == [0, *ids] and rows.spared(private) == 0 < rows.spared(shared)
    assert len({piece.id for piece in pieces}) == 1


class Stopping(Hook):
    """Stops its row before a token."""

    def __init__(self, at: int) -> None:
        self.at = at

    def verdict(self, step, id):
        return Mark(stop=step.row.drawn == self.at)


def test_a_session_says_what_was_held_back_when_a_hook_stopped_it(perspective, tokenizer):
    text = generate(perspective, tokenizer, ["the cat"], max_tokens=2, sampling=WARM).texts[0]
    pieces, stop = [], [text[-1] + "\0"]  # so that the last character may begin it
    session = Session(perspective, tokenizer).read("the cat")
    said = session.say(6, sampling=WARM, hooks=[Stopping(2)], stop=stop, on_text=pieces.append)
    assert text and said == text == "".join(pieces)


def test_a_hook_that_fails_while_its_row_reads_leaves_no_other_row_behind(perspective, tokenizer):
    rows = Rows(perspective, tokenizer, chunk=2)
    failing, other = (
        rows.add("and then the", max_tokens=1, hooks=hooks) for hooks in ([Failing("prompt")], [])
    )
    before = rows.unread[other]
    assert [piece.row for piece in rows.step()] == [failing]
    assert rows.unread == {other: before - 2}


@pytest.mark.parametrize("together", [False, True])
def test_there_is_no_state_before_the_first_token_after_a_prompt(perspective, tokenizer, together) -> None:
    class Looking(Hook):
        keeps_before = True
        kept = True

        def logits(self, logits_NV, step):
            if step.row.drawn or not self.kept:
                assert step.before.batch_size == 1
            return logits_NV

    look = Looking()
    rows = Rows(perspective, tokenizer, together=together, hooks=[look])
    first = rows.add("the cat", max_tokens=6, min_tokens=6)
    rows.step(), rows.step()
    look.kept = False
    second = rows.add("and then", max_tokens=6, min_tokens=6)
    found = {piece.row: piece.error for piece in rows.step()}
    assert found[first] is None
    assert isinstance(found[second], StateError) and "keeps_before" in str(found[second])
