"""Facts told in a conversation: who sees all answers all, who sees little guesses, and nothing else tells."""

import itertools
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from perspectron.eval import conversation, reading
from perspectron.eval.conversation import ANIMALS, PEOPLE, Options, measure
from perspectron.util.errors import ConfigError
from tests.eval.conftest import VOCAB, Config
from tests.refusals import refused

FEW = Options(distances=(64, 300), facts=3, conversations=1)


@dataclass
class Read:
    """A state that is what was read."""

    ids: list[int]

    @property
    def nbytes(self) -> int:
        return len(self.ids)

    def fork(self) -> "Read":
        return Read([*self.ids])


class Copying:
    """In place of a model: says what followed the longest of the endings of its text that it saw before, in the last
    `window` tokens."""

    def __init__(self, window: int, positions: int = 0) -> None:
        self.window, self.config = window, Config(positions)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def init_state(self, rows: int) -> Read:
        assert rows == 1
        return Read([])

    def hidden(self, ids_1T, state, **_):
        state.ids += ids_1T[0].tolist()
        assert not self.config.positions or len(state.ids) <= self.config.positions
        ends = range(len(state.ids) - ids_1T.shape[1], len(state.ids))
        return [state.ids[: end + 1][-self.window :] for end in ends], state, {}

    def head(self, texts):
        said = torch.tensor([[self.next(ids) for ids in texts]])
        return torch.nn.functional.one_hot(said, VOCAB) * 10.0

    def next(self, ids):
        def alike(end):
            pairs = zip(ids[end::-1], ids[::-1], strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        return ids[1 + max(range(len(ids) - 1), key=alike)] if len(ids) > 1 else 0


def test_who_sees_all_answers_all_and_who_sees_little_guesses(subject):
    near, far = measure(subject(Copying(10_000)), FEW)["distances"].values()
    assert near["accuracy"] == near["exact"] == far["accuracy"] == far["exact"] == 1
    assert near["answers"] == far["answers"] == 3
    assert 64 <= near["tokens"] < 250 and 300 <= far["tokens"] < 450
    little = measure(subject(Copying(60)), FEW)["distances"]["300"]
    assert little["exact"] == 0 and little["accuracy"] <= 0.5


@pytest.mark.parametrize("design", ["perspective", "transformer"])
def test_answers_are_those_of_one_pass_over_the_whole_text(subject, design, monkeypatch):
    subject, before, said = subject(design), [], conversation._said

    def read(subject, ids_BT, state):
        before.extend(ids_BT[0].tolist())
        return reading.read(subject, ids_BT, state)

    def answer(subject, state, ids, answers):
        found = said(subject, state, ids, answers)
        for animal, tokens in answers.items():
            with torch.no_grad():
                logits_TV = subject.model(torch.tensor([[*before, *ids, *tokens]])).logits[
                    0, -len(tokens) - 1 : -1
                ]
            log_p_TV = logits_TV.log_softmax(1)
            likely = log_p_TV[range(len(tokens)), tokens].sum().item()
            assert found[animal] == (pytest.approx(likely, abs=1e-3), log_p_TV.argmax(1).tolist() == tokens)
        return found

    monkeypatch.setattr(conversation, "read", read)
    monkeypatch.setattr(conversation, "_said", answer)
    found = measure(subject, Options(distances=(32, 100), facts=3, conversations=1))
    assert found["distances"]["100"]["answers"] == 3 and found["distances"]["100"]["state_bytes"] > 0


def test_what_is_right_if_drawn_greedily_is_a_share_of_all_questions():
    cell = {"accuracy": 0.28, "exact": 0.16, "state_bytes": 9.0}
    line = conversation.lines({"facts": 8, "conversations": 4, "chance": 1 / 8, "distances": {"64": cell}})[1]
    assert "0.280 right, 0.160 right if drawn greedily" in line and "of them" not in line


def test_a_seed_gives_the_same_conversations_and_another_others(subject):
    model = Copying(60)
    assert measure(subject(model), FEW) == measure(subject(model), FEW)
    draws = [str(conversation.facts(np.random.default_rng(seed), 8)) for seed in range(4)]
    assert len(set(draws)) == 4


def test_neither_other_turns_nor_questions_tell_anything():
    turns = conversation.other_turns(np.random.default_rng(0))
    for message in itertools.chain.from_iterable(itertools.islice(turns, 400)):
        words = message["content"].replace("'", " ").replace(".", " ").split()
        assert not set(words) & {*ANIMALS, *PEOPLE}
    for person in PEOPLE:
        asked, opening = conversation.question(person)
        assert not set(f"{asked['content']} {opening}".replace("?", " ").split()) & set(ANIMALS)
    pairs = [
        pair for seed in range(400) for pair in conversation.facts(np.random.default_rng(seed), 8).items()
    ]
    counts = [pairs.count((person, animal)) for person in PEOPLE for animal in ANIMALS]
    assert min(counts) > 10 and max(counts) < 60 and sum(counts) == 3200  # 33 of each, were it even


def test_what_a_table_of_positions_does_not_reach_is_named(subject):
    found = measure(subject(Copying(10_000, positions=500)), FEW)
    assert found["distances"]["64"]["accuracy"] == 1 and found["distances"]["300"] is None
    assert len(conversation.lines(found)) == 3


def test_no_table_of_positions_is_read_past_its_end(subject):
    def enough(positions: int) -> bool:
        return measure(subject(Copying(10_000, positions=positions)), FEW)["distances"]["64"] is not None

    sizes = range(1, 500)
    needed = sizes[bisect_left(sizes, True, key=enough)]
    for positions in range(needed, needed + 8):
        measure(subject(Copying(10_000, positions=positions)), FEW)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"distances": ()}, "distances"),
        ({"distances": (0,)}, "distances"),
        ({"facts": 1}, "facts"),
        ({"facts": 9}, "facts"),
        ({"conversations": 0}, "conversations"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(changes, field):
    with refused(ConfigError, field):
        Options(**changes)
