"""Drafts change no bit, greedy or sampled, alone and in batches; what cannot be is refused by name."""

import gc
import random
import weakref

import pytest
import torch
import torch.utils._pytree as pytree

from perspectron import native
from perspectron.cli.chat import Chat, Talk
from perspectron.data import Tokenizer
from perspectron.decode import drafts as source
from perspectron.decode.constrain import json_schema
from perspectron.decode.drafts import Draft, Drafter, DraftModel, NGrams, Pace
from perspectron.decode.generate import generate
from perspectron.decode.processors import Hook
from perspectron.decode.row import Row
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.model import build
from perspectron.quant.convert import convert
from perspectron.util.errors import ConfigError
from tests.decode.conftest import VOCAB
from tests.decode.test_rows import GREEDY, SETTINGS, equal, prompt_of
from tests.decode.test_store import small
from tests.decode.test_tuned import KINDS, trained
from tests.refusals import refused

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.reason())),
    pytest.mark.cpu_only("drafts are read by recordings, which are steps on the CPU"),
]


class Knows(Drafter):
    """Drafts of known texts, with one token in four made wrong."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(5)
        self.texts = texts

    def begin(self, row: Row) -> Draft:
        return _Knows(self, row)


class _Knows(Draft):
    def __init__(self, of: Knows, row: Row) -> None:
        super().__init__(row)
        self.of, self.draw = of, random.Random(row.stream)

    def propose(self, most: int) -> list[int]:
        start = self.row.drawn
        ids = self.of.texts[self.row.stream][start : start + self.draw.randint(0, most)]
        return [id if self.draw.random() < 0.75 else self.draw.randrange(VOCAB) for id in ids]


@pytest.fixture
def always(monkeypatch):
    """Drafts are as long as they may be."""
    monkeypatch.setattr(Pace, "most", lambda self, hopes, rows, longest: longest)
    monkeypatch.setattr(Pace, "pays", True)


def drawn(model, tokenizer, together: bool, drafts: Drafter | None, rows: int):
    """Of each row, what its pieces say, its state and what waits."""
    under, said = Rows(model, tokenizer, together=together, drafts=drafts), {}
    for n in range(rows):
        prompt, sampling = prompt_of(3 + 9 * n, n), SETTINGS[n % 4]
        said[under.add(prompt, max_tokens=6 + 5 * n, sampling=sampling, logprobs=2, stream=n)] = []
    while under.active:
        for piece in under.step():
            said[piece.row].append((piece.id, piece.logprob, piece.likely, piece.text, piece.finished))
    return [(pieces, under.remove(row)) for row, pieces in said.items()]


def check(model, tokenizer, together: bool, rows: int) -> Drafter:
    wanted = drawn(model, tokenizer, together, None, rows)
    drafts = Knows([[piece[0] for piece in pieces] for pieces, _ in wanted])
    for (said, talk), (pieces, other) in zip(
        drawn(model, tokenizer, together, drafts, rows), wanted, strict=True
    ):
        assert said == pieces
        assert (talk.pending, talk.recent, talk.drawn) == (other.pending, other.recent, other.drawn)
        leaves = (pytree.tree_leaves(one.state.take(0)) for one in (talk, other))
        assert all(torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*leaves, strict=True))
    assert drafts.counts.accepted > 0 or rows == 1
    return drafts


@pytest.mark.parametrize(
    "design", ["perspective2", "transformer", "gdn", "lens2", "gpt2", "adr", "mamba3[shift=true]"]
)
def test_drafts_change_no_bit(design, tokenizer: Tokenizer, always) -> None:
    """All designs: `benchmarks/drafts.py`."""
    model = small(design)
    check(model, tokenizer, True, 4)
    check(model, tokenizer, False, 2)


def test_drafts_of_a_packed_model_change_no_bit(tokenizer: Tokenizer, always) -> None:
    model = small("transformer")
    convert(model, "4bit32")
    check(model, tokenizer, True, 9)


def test_drafts_of_several_tokens_run_in_one_call(tokenizer: Tokenizer, always) -> None:
    drafts = check(small("perspective2"), tokenizer, True, 5)
    assert drafts.counts.runs < drafts.counts.accepted < drafts.counts.drafted


@pytest.mark.parametrize("window", [5, 64])
def test_a_window_goes_back(window: int, tokenizer: Tokenizer, always) -> None:
    block = BlockConfig(AttentionConfig(4, kv_heads=2, window=window), SwiGLUConfig(40))
    check(build(ModelConfig("windowed", VOCAB, 32, (block,) * 2), 1).eval(), tokenizer, True, 4)


def test_a_session_that_goes_on_says_the_same(tokenizer: Tokenizer, always) -> None:
    model, told = small("perspective2"), list[tuple[str, list[int]]]()
    for drafts in (None, NGrams()):
        session = Session(model, tokenizer, chunk=16, drafts=drafts)
        for text in ("the cat sat on the mat, the cat sat", " and then", ""):
            session.read(text).say(40, sampling=GREEDY)
        session = session.at(len(session.tokens) - 9)
        session.say(30, sampling=SETTINGS[1])
        told.append((session.text, session.tokens))
    assert told[0] == told[1]
    assert drafts is not None
    assert drafts.counts.drafted > 0


def test_a_talk_reads_drafts(tokenizer: Tokenizer, always, tmp_path, capsys) -> None:
    model, told = small("perspective2"), list[str]()
    for drafts in (None, NGrams()):
        talk = Talk(model, tokenizer, Chat(tmp_path, max_tokens=40), sampling=GREEDY, drafts=drafts)
        talk.answer("the cat sat on the mat, the cat sat")
        told.append(talk.now.session.text)
    assert told[0] == told[1]
    assert drafts is not None
    assert drafts.counts.drafted > 0


@pytest.mark.parametrize("kind", ["n-grams", "model"])
def test_drafts_of_a_text_that_goes_on_read_what_is_new(
    kind, tokenizer: Tokenizer, always, monkeypatch
) -> None:
    """Not the text again at each answer; of a branch, which begins otherwise, they do."""
    read, model, known = list[int](), small("perspective2"), list[tuple[str, list[int]]]()
    step, learn = source.read, source._Places.learn

    def counted(model, ids, *others, **options):
        read.append(len(ids[0]))
        return step(model, ids, *others, **options)

    def learned(places, ids):
        read.append(len(ids) - places.known)
        learn(places, ids)

    monkeypatch.setattr(source, "read", counted)
    monkeypatch.setattr(source._Places, "learn", learned)
    for drafter in (NGrams() if kind == "n-grams" else DraftModel(model, tokenizer, tokenizer), None):
        session, took = Session(model, tokenizer, drafts=drafter), list[int]()
        for turn in range(6):
            session.read(list(range(5, 205)) if not turn else " the cat sat")
            session.say(5, sampling=GREEDY if turn % 2 else SETTINGS[1])
            took.append(sum(read))
            read.clear()
        known.append((session.text, session.tokens))
        if drafter is not None:
            assert took[0] >= 200 and 0 < max(took[1:]) < 30, took
            branch = session.at(150)
            branch.read(" and then").say(5, sampling=GREEDY)
            assert sum(read) > 150
            read.clear()
            session.fork().read(" on").say(3, sampling=GREEDY)
            assert 0 < sum(read) < 30, "what was read last of it is at hand"
            read.clear()
    assert known[0] == known[1]


def test_n_grams_follow_what_stood_there(tokenizer: Tokenizer) -> None:
    row = Rows(small("gdn"), tokenizer)
    handle = row.add([1, 2, 3, 4, 9, 2, 3], max_tokens=3, whole=True)
    draft = NGrams().begin(row._own(handle))
    assert draft.propose(3) == [4, 9, 2]
    assert draft.propose(8) == [4, 9, 2, 3, 4, 9, 2, 3]
    row._own(handle).ids.extend([7])
    assert draft.propose(3) == []


def test_a_model_drafts_what_it_draws(tokenizer: Tokenizer, always) -> None:
    """With the noise of the text: the model itself is never wrong."""
    model = small("perspective2")
    drafts = DraftModel(model, tokenizer, tokenizer, longest=4)
    for sampling in (GREEDY, SamplingConfig(temperature=1.0, seed=3)):
        prompts = [prompt_of(20, 1), prompt_of(7, 2)]
        wanted = generate(model, tokenizer, prompts, max_tokens=20, sampling=sampling)
        found = generate(model, tokenizer, prompts, max_tokens=20, sampling=sampling, drafts=drafts)
        assert found.ids == wanted.ids
    assert drafts.counts.accepted >= 0.9 * drafts.counts.drafted > 0


def test_a_grammar_stops_and_penalties_hold(tokenizer: Tokenizer, always) -> None:
    pytest.importorskip("llguidance")
    model, told = small("transformer"), []
    for drafts in (None, NGrams(6)):
        rows = Rows(model, tokenizer, drafts=drafts)
        grammar = json_schema({"type": "object"}, tokenizer)
        penal = SamplingConfig(temperature=1.0, repetition_penalty=1.4, repetition_window=8)
        rows.add("the cat", max_tokens=40, hooks=[grammar], sampling=SETTINGS[1])
        rows.add("the cat sat the cat sat", max_tokens=40, stop=["at"], min_tokens=9, sampling=GREEDY)
        rows.add("the cat sat the cat sat", max_tokens=40, sampling=penal)
        pieces = []
        while rows.active:
            pieces += [(piece.row, piece.id, piece.text, piece.finished) for piece in rows.step()]
        told.append(pieces)
    assert told[0] == told[1]
    assert drafts is not None
    assert drafts.counts.drafted > 0


def test_a_hook_that_sees_the_state_sees_that_of_steps(tokenizer: Tokenizer, always) -> None:
    class Looks(Hook):
        keeps_before = True

        def logits(self, logits_NV, step):
            seen.append(
                [x.sum().item() for x in pytree.tree_leaves(step.state) if isinstance(x, torch.Tensor)]
            )
            return logits_NV

    model, told = small("gdn"), []
    for drafts in (None, NGrams(4)):
        seen = list[list[float]]()
        generate(model, tokenizer, ["the cat sat, the cat"], max_tokens=12, hooks=[Looks()], drafts=drafts)
        told.append(seen)
    assert told[0] == told[1]


def test_drafts_that_are_never_right_cost_little() -> None:
    """A token more costs a fifth of a step here; steps and longer runs have noise of a half."""
    draw, pace, hopes, lost, steps = random.Random(0), Pace(), 0.5, 0.0, 400
    for _ in range(steps):
        noise = 1 + draw.random() / 2
        if count := pace.most(hopes, 1, 15):
            pace.read(1 + count, 1, noise * (1 + 0.2 * count))
            hopes, lost = 0.85 * hopes, lost + 0.2 * count
        else:
            pace.stepped(noise)
            hopes += 0.01 * (0.5 - hopes)
    assert 0 < lost < 0.03 * steps


def test_drafts_that_are_right_grow_longer() -> None:
    pace = Pace()
    for _ in range(5):
        pace.stepped(1.0)
    short = pace.most(0.3, 1, 15)
    for _ in range(9):
        pace.read(8, 1, 1.5)
        for _ in range(7):
            pace.saved(1)
    assert 0 < short < pace.most(0.9, 1, 15) <= 15
    assert pace.most(0.9, 8, 15) < pace.most(0.9, 1, 15), "a step of 8 rows is shared by them"


def test_rows_that_join_and_leave_change_no_bit(tokenizer: Tokenizer, always) -> None:
    model = small("lens2")
    alone = [
        generate(model, tokenizer, [prompt_of(9, n), [1]], max_tokens=24, sampling=GREEDY).ids[0]
        for n in range(5)
    ]
    rows, said = Rows(model, tokenizer, drafts=Knows(alone)), dict[int, list[int]]()
    for n in range(5):
        said[rows.add(prompt_of(9, n), max_tokens=24 if n % 2 else 11, sampling=GREEDY, stream=n)] = []
        for _ in range(4):
            for piece in rows.step():
                said[piece.row].append(piece.id)
        if n == 2:
            said[99] = alone[1][: len(said.pop(1))]
            rows.remove(1)
    while rows.active:
        for piece in rows.step():
            said[piece.row].append(piece.id)
    for n in (0, 2, 3, 4):
        assert said[n] == alone[n][: len(said[n])]


def test_what_cannot_be_is_refused_by_name(tokenizer: Tokenizer) -> None:
    block = BlockConfig(AttentionConfig(4, window=5), SwiGLUConfig(40))
    model = build(ModelConfig("windowed", VOCAB, 32, (block,)), 1).eval()
    with refused(ConfigError, "draft_tokens", 6, "window"):
        Rows(model, tokenizer, drafts=NGrams(6))
    Rows(model, tokenizer, drafts=NGrams(5))
    assert NGrams().fits(model) == 5
    with refused(ConfigError, "draft_tokens", 0):
        Rows(model, tokenizer, drafts=NGrams(0))
    other = Tokenizer.train(["something else altogether"] * 9, 270)
    with refused(ConfigError, "draft", "vocabulary"):
        DraftModel(model, other, tokenizer)


@pytest.mark.parametrize("design", ["gla", "rwkv7"])
@pytest.mark.parametrize(
    "kinds",
    [((), ("offset",), KINDS), (("gates",), ("offset",), ()), (("first",), ("offset",), ("first", "gates"))],
    ids=["a plain row first", "gates first", "first memories first"],
)
def test_rows_with_trained_memories_of_other_kinds_read_drafts(
    design, kinds, tokenizer: Tokenizer, always
) -> None:
    """A row alone has fewer parts in its state than the batch."""
    model = small(design)
    starts = [trained(model, own, seed) if own else None for seed, own in enumerate(kinds)]

    def answers(drafts: Drafter | None) -> list[tuple]:
        rows, handles = Rows(model, tokenizer, together=True, drafts=drafts), []
        for n, start in enumerate(starts):
            session = Session(model, tokenizer, start=start)
            session.append(prompt_of(5 + 3 * n, n))
            handles.append(session.enter(rows, max_tokens=12, sampling=SETTINGS[n], stream=n, logprobs=2))
        pieces = []
        while rows.active:
            pieces += rows.step()
        said = [[(p.id, p.logprob, p.likely) for p in pieces if p.row == handle] for handle in handles]
        return [(own, rows.remove(handle).state) for own, handle in zip(said, handles, strict=True)]

    wanted = answers(None)
    drafts = Knows([[piece[0] for piece in own] for own, _ in wanted])
    for (own, state), (other, before) in zip(answers(drafts), wanted, strict=True):
        assert own == other
        equal(state, before)
    assert drafts.counts.accepted > 0


def test_rows_that_left_are_not_kept_where_drafts_were_given_up(tokenizer: Tokenizer) -> None:
    rows = Rows(small("gdn"), tokenizer, drafts=NGrams())
    row = rows.add("the cat", max_tokens=4)
    rows.step()
    assert rows._drawing._drafts
    rows._drawing.drafter = None  # as where the model reads none after all
    while rows.active:
        rows.step()
    rows.remove(row)
    assert not rows._drawing._drafts


def test_a_model_that_reads_no_drafts_is_not_kept(tokenizer: Tokenizer, always) -> None:
    """What refuses it has a traceback, whose frames hold the model."""
    model = small("perspective-experts")
    drawn(model, tokenizer, True, NGrams(), 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
