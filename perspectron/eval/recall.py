"""What a design can be taught to remember: small models of it, trained from scratch on the tasks of `eval.tasks` and
`eval.tracking`.

Nothing of the run is used but which design it is: its text and its weights say what it learned, these tasks what it
could. Every text is drawn anew, from streams of their own for training, for watching it and for the test.

Suffixes: B batch, T time.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from perspectron import designs
from perspectron.census import active_parameters
from perspectron.config import ModelConfig, dump, one_of, require
from perspectron.data.loader import IGNORE
from perspectron.eval.subject import Subject
from perspectron.eval.tasks import MQAR, Induction, Needle, SelectiveCopy, Task
from perspectron.eval.tracking import Brackets, Parity, Permutations
from perspectron.files import write_json
from perspectron.model import LanguageModel, build

SOLVED = 0.95
"""Accuracy on texts never trained on that counts as solved."""
STOP = 0.98
"""Accuracy on the texts it is watched by at which training ends: some way past the bar, as the test is on others."""
TRAIN, WATCH, TEST, BEYOND = range(4)  # streams of texts of one seed
WATCH_EVERY, WATCH_TEXTS, TEST_TEXTS = 25, 128, 1024
LESSONS = (4, 2, 1)
"""Training begins with texts of a quarter, then of half the length: what is to be found is found in fewer steps."""
PASSED, LESSON = 0.9, 0.35
"""Accuracy at which the next lesson begins, and the share of the steps after which it does anyway."""
BETAS, CLIP, WARMUP, FINAL = (0.9, 0.98), 1.0, 0.05, 0.1  # of AdamW; shares of the steps and of the rate
VERSION = 1


@dataclass(frozen=True)
class Setting:
    """A task of one size, and for how many steps a design may learn it."""

    task: Task
    steps: int


@dataclass(frozen=True)
class Profile:
    """What is measured, over how many seeds, and the learning rates that are tried."""

    settings: tuple[Setting, ...]
    seeds: int
    rates: tuple[float, ...]


PROFILES = {
    "quick": Profile(
        (Setting(MQAR(32, pairs=4, keys=16, values=16), 400), Setting(Parity(16), 200)),
        seeds=1,
        rates=(3e-3,),
    ),
    "full": Profile(
        (
            Setting(MQAR(32, pairs=4, keys=16, values=16), 600),
            Setting(MQAR(32, pairs=8, keys=16, values=16), 600),
            Setting(MQAR(64, pairs=8, keys=16, values=16, gaps="uniform"), 600),
            Setting(SelectiveCopy(32, letters=4), 400),
            Setting(Induction(32, kinds=32), 400),
            Setting(Needle(32), 300),
            Setting(Needle(128), 300),
            Setting(Permutations(16, n=3), 400),
            Setting(Parity(16), 400),
            Setting(Brackets(32), 400),
        ),
        seeds=3,
        rates=(3e-3, 1e-3),
    ),
}


@dataclass(frozen=True)
class Options:
    """profile: "quick" or "full". seeds: how many. rates: learning rates; the first that solves a setting with the
    first seed is taken for the others, the best when none does. None is as the profile says. batch_tokens: texts of a
    batch are so many that they have about this many tokens together."""

    profile: Literal["quick", "full"] = "quick"
    seeds: int | None = None
    rates: tuple[float, ...] | None = None
    batch_tokens: int = 2048
    d_model: int = 64
    layers: int = 2

    def __post_init__(self) -> None:
        one_of(self.profile, PROFILES, "profile")
        require(self.seeds is None or self.seeds >= 1, "seeds", self.seeds, "≥ 1")
        given = self.rates is None or (len(self.rates) >= 1 and min(self.rates) > 0)
        require(given, "rates", self.rates, "one or more numbers > 0")
        for name in ("batch_tokens", "d_model", "layers"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")

    @property
    def asked(self) -> Profile:
        """The profile, with what is given instead."""
        profile = PROFILES[self.profile]
        return replace(profile, seeds=self.seeds or profile.seeds, rates=self.rates or profile.rates)


@dataclass(frozen=True)
class Solved:
    """accuracy: over all answers of texts not trained on. beyond: over those past the trained length, in texts of twice
    it. steps: trained, fewer than allowed when it was solved before. seconds: of a processor, the test included.
    curve: (length of the texts, accuracy) while it was watched."""

    accuracy: float
    beyond: float | None
    steps: int
    seconds: float
    curve: tuple[tuple[int, float], ...]


def stream(seed: int, which: int) -> np.random.Generator:
    """Where the texts of a seed come from; which: TRAIN, WATCH, TEST or BEYOND."""
    return np.random.default_rng([seed, which])


def config_for(design: str, task: Task, d_model: int = 64, layers: int = 2) -> ModelConfig:
    """The design at a small size, able to read the task at twice its length.

    Embeddings start at about unit length at least. At the 0.02 of a model for text, what the first layer writes drowns
    the tokens, and 500 steps leave even the transformer at the guess of 1/pairs in recall (docs/lab-notes.md).
    """
    config = designs.small(
        design, vocab_size=task.vocab_size, d_model=d_model, layers=layers, seq_len=2 * task.length
    )
    return replace(config, embedding_std=max(config.embedding_std, config.d_token**-0.5))


def solve_task(
    config: ModelConfig,
    task: Task,
    *,
    steps: int,
    batch_tokens: int = 2048,
    lr: float = 3e-3,
    seed: int = 0,
) -> Solved:
    """Train a new model on the task until it is solved or `steps` are done, on about `batch_tokens` tokens each.

    AdamW without decay, the rate rising, then falling along a cosine. A function of its arguments, but for `seconds`; a
    loss that is not finite ends the training.
    """
    require(config.vocab_size >= task.vocab_size, "vocab_size", config.vocab_size, f"≥ {task.vocab_size}")
    model, course, start = build(config, seed), Course(task, steps, seed), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
    texts, step = stream(seed, TRAIN), 0
    while step < steps and not course.done:
        for group in optimizer.param_groups:
            group["lr"] = lr * _share(step, steps)
        model.set_step(step)
        lesson = course.lesson
        ids_BT, targets_BT = lesson.draw(texts, max(1, batch_tokens // lesson.length))
        loss = model(ids_BT, targets=targets_BT).objective()
        if not math.isfinite(loss.item()):
            break
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        course.watch(model, step)
    found = accuracy(model, *task.draw(stream(seed, TEST), TEST_TEXTS))
    seconds = time.process_time() - start
    return Solved(found, beyond(model, task, seed), step, seconds, tuple(course.curve))


class Course:
    """Lessons, from the shortest to the task itself. done: the task is solved. curve: (length of the lesson, accuracy)
    each time it was watched."""

    def __init__(self, task: Task, steps: int, seed: int) -> None:
        self.lessons = [task.shorter(times) for times in LESSONS]
        self.watched = [lesson.draw(stream(seed, WATCH), WATCH_TEXTS) for lesson in self.lessons]
        self.at, self.steps, self.curve, self.done = 0, steps, list[tuple[int, float]](), False

    @property
    def lesson(self) -> Task:
        return self.lessons[self.at]

    def watch(self, model: LanguageModel, step: int) -> None:
        """Go on to the next lesson when this one is passed, or its steps are over."""
        last, over = self.at == len(self.lessons) - 1, step >= (self.at + 1) * LESSON * self.steps
        found = 0.0
        if step % WATCH_EVERY == 0:
            found = accuracy(model, *self.watched[self.at])
            self.curve.append((self.lesson.length, found))
        self.done = last and found >= STOP
        if not last and (over or found >= PASSED):
            self.at += 1


def _share(step: int, steps: int) -> float:
    """Of the peak learning rate."""
    warmup = max(1.0, WARMUP * steps)
    fall = FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warmup) * fall


def accuracy(model: LanguageModel, ids_BT: Tensor, targets_BT: Tensor) -> float:
    """Share of the answers asked for that the model gives, the likeliest id counting as its answer."""
    right = 0
    with torch.inference_mode():
        for ids, targets in zip(ids_BT.split(64), targets_BT.split(64), strict=True):
            right += int((model.head(model.hidden(ids)[0]).argmax(-1) == targets).sum())
    return right / int((targets_BT != IGNORE).sum())


def beyond(model: LanguageModel, task: Task, seed: int) -> float | None:
    """Accuracy past the task's length, in texts of twice it; None where the model cannot read so far."""
    length = task.length
    if 0 < model.config.positions < 2 * length:
        return None
    ids_BT, targets_BT = task.longer(2).draw(stream(seed, BEYOND), TEST_TEXTS // 4)
    return accuracy(
        model, ids_BT, torch.cat([torch.full_like(targets_BT[:, :length], IGNORE), targets_BT[:, length:]], 1)
    )


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """Of the design that the run's model has. What is done is kept in the run's folder, task by task."""
    return recall(
        designs.design_of(subject.model.config), options, subject.run / f"recall-{options.profile}.json"
    )


def recall(
    design: str, options: Options, kept: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Every setting of the profile, by task. `kept`: a file written after each setting; what it holds of the same
    design and options is not measured again. `say` is told a line for each setting."""
    head = {"version": VERSION, "design": design, "options": dump(options)}
    done = _done(kept, head)
    for setting in options.asked.settings:
        key = _key(setting)
        if key not in done:
            config = config_for(design, setting.task, options.d_model, options.layers)
            done[key] = measure_setting(config, setting, options)
            if kept is not None:
                write_json(kept, head | {"done": done})
        say(_line(setting.task.name, done[key]))
    tasks: dict[str, Any] = {}
    for setting in options.asked.settings:
        task = setting.task
        about = {
            "about": task.about,
            "theory": task.theory,
            "chance": task.chance,
            "solved": SOLVED,
            "settings": [],
        }
        found = done[_key(setting)]
        tasks.setdefault(task.name, about)["settings"].append(found)
    return head | {"tasks": tasks}


def measure_setting(config: ModelConfig, setting: Setting, options: Options) -> dict[str, Any]:
    """One setting over the seeds: what was asked, what came of it, and by which rate."""
    task = setting.task

    def solved(lr: float, seed: int) -> Solved:
        return solve_task(
            config, task, steps=setting.steps, batch_tokens=options.batch_tokens, lr=lr, seed=seed
        )

    tried = dict[float, Solved]()
    for lr in options.asked.rates:
        tried[lr] = solved(lr, 0)
        if tried[lr].accuracy >= SOLVED:
            break
    best = max(tried, key=lambda lr: tried[lr].accuracy)
    runs = [tried[best], *(solved(best, seed) for seed in range(1, options.asked.seeds))]
    return {
        **task.sizes(),
        "chance": task.chance,
        "parameters": active_parameters(config),
        "state_bytes": _state_bytes(config, task),
        "lr": best,
        "rates": {str(lr): run.accuracy for lr, run in tried.items()},
        "accuracy": [run.accuracy for run in runs],
        "beyond": [run.beyond for run in runs],
        "steps": [run.steps for run in runs],
        "steps_allowed": setting.steps,
        "seconds": sum(run.seconds for run in (*tried.values(), *runs[1:])),
    }


def _state_bytes(config: ModelConfig, task: Task) -> int:
    """Of what the model remembers of one text, after its last token."""
    with torch.inference_mode():
        return build(config).hidden(task.draw(stream(0, TEST), 1)[0])[1].nbytes


def _key(setting: Setting) -> str:
    return f"{setting.task.name} {setting.task.sizes()} in {setting.steps} steps"


def _done(kept: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    if kept is None or not kept.is_file():
        return {}
    found = json.loads(kept.read_text(encoding="utf-8"))
    done: dict[str, Any] = found["done"] if {key: found.get(key) for key in head} == head else {}
    return done


def lines(result: dict[str, Any]) -> list[str]:
    """For a person at the terminal."""
    about = f"recall of {result['design']}, trained from scratch at width {result['options']['d_model']}:"
    return [about, *(_line(name, s) for name, task in result["tasks"].items() for s in task["settings"])]


def _line(name: str, setting: dict[str, Any]) -> str:
    found = setting["accuracy"]
    sizes = ", ".join(
        f"{k} {v}" for k, v in setting.items() if k in ("length", "pairs", "letters", "n", "gaps")
    )
    verdict = "solved" if min(found) >= SOLVED else "not solved" if max(found) < SOLVED else "solved by some"
    values = " ".join(f"{value:.3f}" for value in found)
    return f"{name} ({sizes}): {values}, chance {setting['chance']:.3f}, {verdict}"
