"""Recall in a conversation: facts told at its beginning, other turns, then questions, further and further away.

Each person's animal is told, by a chat template if the model has one, and none twice. The answer is begun for the
model; of the animals told, the likeliest counts as its answer. A model that remembers the animals but not whose they
are guesses one of them; `exact` is the share of all questions that it would have answered rightly if it had drawn
greedily.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perspectron.data.template import PLAIN, Template
from perspectron.eval.reading import read
from perspectron.eval.subject import Subject
from perspectron.model.state import LMState
from perspectron.util.config import require

PEOPLE = ("Ann", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry")
ANIMALS = ("ant", "bear", "crow", "deer", "fox", "goat", "horse", "lion", "owl", "pig", "rat", "wolf")
THINGS = ("pens", "cups", "books", "chairs", "lamps", "coats", "stamps", "tickets", "bricks", "plates")
PLACES = ("the market", "the station", "the office", "the library", "the harbour", "the school")
Message = dict[str, str]


@dataclass(frozen=True)
class Options:
    """distances: tokens between the last fact and a question, at least; longer ones than a table of positions has are
    left out by name. facts: told in a conversation. conversations: how many."""

    distances: tuple[int, ...] = (64, 256, 1024, 4096)
    facts: int = 8
    conversations: int = 4

    def __post_init__(self) -> None:
        require(len(self.distances) >= 1, "distances", list(self.distances), "one or more")
        require(min(self.distances) >= 1, "distances", list(self.distances), "each ≥ 1")
        require(2 <= self.facts <= len(PEOPLE), "facts", self.facts, f"in [2, {len(PEOPLE)}]")
        require(self.conversations >= 1, "conversations", self.conversations, "≥ 1")


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """`distances`, by distance: accuracy among the animals told, exact, tokens that lay between (mean), answers, bytes
    of the state; None where the table of positions ends before. ConfigError: the template changes earlier messages when
    others follow."""
    template = subject.opened.template() or Template.named(PLAIN)
    asked: dict[int, list[dict[str, float]]] = {distance: [] for distance in sorted(set(options.distances))}
    for talk in range(options.conversations):
        rng = np.random.default_rng([subject.seed, talk])
        for distance, answers in _talk(subject, template, rng, list(asked), options.facts):
            asked[distance] += answers
    return {
        "facts": options.facts,
        "conversations": options.conversations,
        "chance": 1 / options.facts,
        "template": Path(template.name).name,
        "distances": {
            str(distance): None
            if not answers
            else {key: float(np.mean([answer[key] for answer in answers])) for key in answers[0]}
            | {"answers": len(answers)}
            for distance, answers in asked.items()
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    about = f"{result['facts']} facts told at the beginning of {result['conversations']} conversations, asked later"
    return [
        f"{about} (chance {result['chance']:.3f}):",
        *map(_line, *zip(*result["distances"].items(), strict=True)),
    ]


def _line(distance: str, found: dict[str, float] | None) -> str:
    if found is None:
        return f"{int(distance):>7,} tokens ago: not read, the table of positions ends before"
    rest = f"{found['exact']:.3f} right if drawn greedily, state of {found['state_bytes']:,.0f} bytes"
    return f"{int(distance):>7,} tokens ago: {found['accuracy']:.3f} right, {rest}"


def facts(rng: np.random.Generator, count: int) -> dict[str, str]:
    """Persons and their animals, both chosen and ordered at random."""
    people, animals = rng.permutation(PEOPLE)[:count], rng.permutation(ANIMALS)[:count]
    return dict(zip(people.tolist(), animals.tolist(), strict=True))


def telling(person: str, animal: str) -> list[Message]:
    """The turn in which a fact is told."""
    return _turn(f"Please remember that {person}'s animal is the {animal}.", "I will remember that.")


def question(person: str) -> tuple[Message, str]:
    """The message that asks for a fact, and what its answer begins with."""
    return {"role": "user", "content": f"Which animal is {person}'s?"}, f"{person}'s animal is the"


def other_turns(rng: np.random.Generator) -> Iterator[list[Message]]:
    """Turns on other things, for ever."""
    while True:
        a, b = rng.integers(10, 1000, size=2).tolist()
        thing, (here, there) = THINGS[rng.integers(len(THINGS))], rng.permutation(PLACES)[:2].tolist()
        yield (
            _turn(f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
            _turn(f"I took {a} {thing} from {here} to {there}.", f"So {there} has {a} {thing} more now."),
            _turn(f"Which is more, {a} or {b}?", f"{max(a, b)} is more than {min(a, b)}."),
            _turn(
                f"How far is it from {here} to {there}?", f"It is about {a} metres from {here} to {there}."
            ),
        )[rng.integers(4)]


def _turn(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _talk(
    subject: Subject, template: Template, rng: np.random.Generator, distances: list[int], count: int
) -> Iterator[tuple[int, list[dict[str, float]]]]:
    """Distances that one conversation reaches, with its answers there."""
    told, most = facts(rng, count), subject.model.config.positions
    messages = [message for fact in told.items() for message in telling(*fact)]
    ids, state = _ids(subject, template, messages), subject.model.init_state(1)
    start, done, turns = len(ids), 0, other_turns(rng)
    for distance in distances:
        while len(ids) - start < distance:
            each = len(ids) * 2 // len(messages)  # tokens of a turn
            for _ in range(max(1, (distance - len(ids) + start) // max(1, each))):
                messages += next(turns)
            longer = _ids(subject, template, messages)
            require(longer[: len(ids)] == ids, "template", template.name, "one that keeps earlier messages")
            ids = longer
        asking = [(person, *_asked(subject, template, messages, person, len(ids))) for person in told]
        ends = (len(rest) + max(map(len, answers.values())) - 1 for _, rest, answers in asking)
        if 0 < most < len(ids) + max(ends):
            return
        if done < len(ids):
            state, done = read(subject, torch.tensor([ids[done:]]), state), len(ids)
        said = [_said(subject, state.fork(), rest, answers) for _, rest, answers in asking]
        yield (
            distance,
            [
                {
                    "accuracy": float(
                        max(told.values(), key=lambda animal: scores[animal][0]) == told[person]
                    ),
                    "exact": float(scores[told[person]][1]),
                    "tokens": float(len(ids) - start),
                    "state_bytes": float(state.nbytes),
                }
                for person, scores in zip(told, said, strict=True)
            ],
        )


def _ids(subject: Subject, template: Template, messages: list[Message]) -> list[int]:
    """The messages as the model reads them, from the beginning of a text on."""
    specials = subject.tokenizer.specials
    ids = template.ids(messages, subject.tokenizer, add_generation_prompt=False)
    return [*specials.prefix, *specials.bare(ids)]


def _asked(
    subject: Subject, template: Template, messages: list[Message], person: str, read: int
) -> tuple[list[int], dict[str, list[int]]]:
    """(ids after the first `read`: the question, and the beginning that all answers share; the rest of the answer, by
    animal)."""
    message, opening = question(person)
    tokenizer, specials = subject.tokenizer, subject.tokenizer.specials
    asking = [*specials.prefix, *specials.bare(template.ids([*messages, message], tokenizer))]
    answers = {animal: specials.bare(tokenizer.encode(f"{opening} {animal}")) for animal in ANIMALS}
    same = next(i for i, ids in enumerate(zip(*answers.values(), strict=False)) if len(set(ids)) > 1)
    begun = next(iter(answers.values()))[:same]
    return [*asking[read:], *begun], {animal: ids[same:] for animal, ids in answers.items()}


def _said(
    subject: Subject, state: LMState, ids: list[int], answers: dict[str, list[int]]
) -> dict[str, tuple[float, bool]]:
    """Log-likelihood of each answer after these ids, and whether it would be drawn greedily; the state handed in is
    used up."""
    log_p_TV, state = _read(subject, state, ids)
    first_1V = log_p_TV[-1:]
    found = {}
    for animal, tokens in answers.items():
        log_p_TV = first_1V
        if tokens[1:]:
            log_p_TV = torch.cat([log_p_TV, _read(subject, state.fork(), tokens[:-1])[0]])
        likely, greedy = log_p_TV[torch.arange(len(tokens)), tokens], log_p_TV.argmax(1).tolist() == tokens
        found[animal] = (likely.sum().item(), greedy)
    return found


def _read(subject: Subject, state: LMState, ids: list[int]) -> tuple[torch.Tensor, LMState]:
    """log p [T,V] of what follows each of these ids, and the state after them; the state handed in is used up."""
    model = subject.model
    with torch.inference_mode(), subject.opened.autocast():
        hidden_1TD, state, _ = model.hidden(
            torch.tensor([ids], device=model.device), state, consume_state=True
        )
        return model.head(hidden_1TD)[0].float().log_softmax(1).cpu(), state
