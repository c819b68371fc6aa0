"""Recall: what a design can learn to remember. Small models are trained from scratch on the tasks of `eval.tasks`,
`eval.tracking` and `eval.reasoning`.

Only the run's design is used, not its text or weights: these tasks show what the design could learn. Texts for
training, validation and test come from separate random streams. Validation ends a training and chooses the rate; the
test decides nothing.

Suffixes: B batch, T time.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from perspectron import presets
from perspectron.data.loader import IGNORE
from perspectron.eval.profiles import PROFILES, Profile, Setting
from perspectron.eval.subject import Subject
from perspectron.eval.tasks import Task
from perspectron.model.census import active_parameters
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.model import LanguageModel, build
from perspectron.util.config import at_least, dump, one_of, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import read_json, write_json

CPU = torch.device("cpu")
SOLVED = 0.95
"""Accuracy on the texts of the test that counts as solved."""
STOP = 0.98
"""Accuracy on the validation texts at which training ends: above SOLVED, as the test is on other texts."""
TRAIN, WATCH, TEST, BEYOND = range(4)  # streams of texts of one seed
WATCH_EVERY, WATCH_TEXTS, TEST_TEXTS = 25, 128, 1024
BEYOND_TEXTS, LEAST_TEXTS, BEYOND_TOKENS = TEST_TEXTS // 4, 16, 65536  # of a task that was not trained on
AT_ONCE = 16384  # tokens whose logits are in memory
LESSONS = (4, 2, 1)
"""Training begins with texts of a quarter, then of half the length, on which the solution is found in fewer steps."""
PASSED, LESSON = 0.9, 0.35
"""Accuracy at which the next lesson begins, and the share of the steps after which it does anyway."""
BETAS, CLIP, WARMUP, FINAL = (0.9, 0.98), 1.0, 0.05, 0.1  # of AdamW; shares of the steps and of the rate
VERSION = 3


@dataclass(frozen=True)
class Options:
    """profile: "quick", "full", or "long": many pairs, long texts, facts that are combined. seeds: how many. rates:
    learning rates, tried in order with the first seed; the first that solves a setting on the validation texts is taken
    for all seeds, or the best if none does. layers: of a model. None is as the profile says. batch_tokens: tokens of
    all texts of a batch together, about."""

    profile: Literal["quick", "full", "long"] = "quick"
    seeds: int | None = None
    rates: tuple[float, ...] | None = None
    batch_tokens: int = 2048
    d_model: int = 64
    layers: int | None = None

    def __post_init__(self) -> None:
        one_of(self.profile, PROFILES, "profile")
        require(self.seeds is None or self.seeds >= 1, "seeds", self.seeds, "≥ 1")
        named = self.rates is None or (len(self.rates) >= 1 and min(self.rates) > 0)
        require(named, "rates", self.rates, "one or more numbers > 0")
        require(self.layers is None or self.layers >= 1, "layers", self.layers, "≥ 1")
        at_least(1, self, "batch_tokens", "d_model")

    @property
    def asked(self) -> Profile:
        """The profile, with the options that are given in place of its own."""
        profile = PROFILES[self.profile]
        seeds, rates = self.seeds or profile.seeds, self.rates or profile.rates
        return replace(profile, seeds=seeds, rates=rates, layers=self.layers or profile.layers)


@dataclass(frozen=True)
class Solved:
    """Result of a training. accuracy: over the answers of the test. watched: of the validation texts. beyond: of those
    past the trained length, in texts of twice it. steps: trained, fewer than allowed if it was solved before. seconds:
    of a processor, the test included. also: accuracy by variant, None where the model cannot read so far."""

    accuracy: float
    watched: float
    beyond: float | None
    steps: int
    seconds: float
    also: dict[str, float | None] = field(default_factory=dict)


def stream(seed: int, which: int) -> np.random.Generator:
    """The random stream that the texts of a seed are drawn from. which: TRAIN, WATCH, TEST or BEYOND."""
    return np.random.default_rng([seed, which])


def config_for(design: str, task: Task, d_model: int = 64, layers: int = 2) -> ModelConfig:
    """The design at a small size, able to read the task at twice its length.

    Embeddings start at about unit length at least. At the 0.02 of a model for text, what the first layer writes drowns
    the tokens, and 500 steps leave even the transformer at the guess of 1/pairs in recall (docs/lab-notes.md). A window
    that the name does not give is half a text, as `presets.solve` has it: one that saw all of it would leave nothing to
    the other layers.
    """
    config = presets.small(
        design, vocab_size=task.vocab_size, d_model=d_model, layers=layers, seq_len=2 * task.length
    )
    if "window" not in presets.variant(design)[1]:
        blocks = tuple(_within(block, max(1, task.length // 2)) for block in config.blocks)
        config = replace(config, blocks=blocks)
    return replace(config, embedding_std=max(config.embedding_std, config.d_token**-0.5))


def _within(block: BlockConfig, window: int) -> BlockConfig:
    mixer: Any = block.mixer
    return replace(block, mixer=replace(mixer, window=window)) if getattr(mixer, "window", None) else block


def solve_task(
    config: ModelConfig,
    task: Task,
    *,
    steps: int,
    batch_tokens: int = 2048,
    lr: float = 3e-3,
    seed: int = 0,
    device: torch.device = CPU,
    also: Sequence[Task] = (),
) -> Solved:
    """Train a new model on the task until it is solved or `steps` are done, on about `batch_tokens` tokens each.

    AdamW without decay, the rate rising, then falling along a cosine. A function of its arguments, but for `seconds`; a
    loss that is not finite ends the training. also: variants that the trained model is measured on.
    """
    require(config.vocab_size >= task.vocab_size, "vocab_size", config.vocab_size, f"≥ {task.vocab_size}")
    model, course, start = build(config, seed).to(device), Course(task, steps, seed), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
    texts, step = stream(seed, TRAIN), 0
    while step < steps and not course.done:
        for group in optimizer.param_groups:
            group["lr"] = lr * _share(step, steps)
        model.set_step(step)
        lesson = course.lesson
        ids_BT, targets_BT = lesson.draw(texts, max(1, batch_tokens // lesson.length))
        loss = model(ids_BT.to(device), targets=targets_BT.to(device)).objective()
        if not math.isfinite(loss.item()):
            break
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        course.watch(model, step)
    right = accuracy(model, *task.exam(stream(seed, TEST), TEST_TEXTS))
    watched, past = accuracy(model, *course.watched[-1]), beyond(model, task, task.longer(2), seed)
    others = {difference(task, other): beyond(model, task, other, seed) for other in also}
    return Solved(right, watched, past, step, time.process_time() - start, others)


class Course:
    """Lessons, from the shortest to the task itself. done: the task is solved."""

    def __init__(self, task: Task, steps: int, seed: int) -> None:
        self.lessons = [task.shorter(times) for times in LESSONS]
        self.watched = [lesson.exam(stream(seed, WATCH), WATCH_TEXTS) for lesson in self.lessons]
        self.at, self.steps, self.done = 0, steps, False

    @property
    def lesson(self) -> Task:
        return self.lessons[self.at]

    def watch(self, model: LanguageModel, step: int) -> None:
        """Go on to the next lesson when this one is passed, or its steps are over."""
        last, over = self.at == len(self.lessons) - 1, step >= (self.at + 1) * LESSON * self.steps
        right = accuracy(model, *self.watched[self.at]) if step % WATCH_EVERY == 0 else 0.0
        self.done = last and right >= STOP
        if not last and (over or right >= PASSED):
            self.at += 1


def _share(step: int, steps: int) -> float:
    """The share of the peak learning rate at a step."""
    warmup = max(1.0, WARMUP * steps)
    fall = FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / warmup) * fall


def accuracy(model: LanguageModel, ids_BT: Tensor, targets_BT: Tensor) -> float:
    """Share of the answers asked for that the model gives, the likeliest id counting as its answer."""
    right, rows = 0, max(1, min(64, AT_ONCE // ids_BT.shape[1]))
    with torch.inference_mode():
        for ids, targets in zip(ids_BT.split(rows), targets_BT.split(rows), strict=True):
            said = model.head(model.hidden(ids.to(model.device))[0]).argmax(-1)
            right += int((said == targets.to(model.device)).sum())
    return right / int((targets_BT != IGNORE).sum())


def beyond(model: LanguageModel, trained: Task, task: Task, seed: int) -> float | None:
    """Accuracy on a task that the model was not trained on, in the second half of texts that are longer than those it
    was trained on; None where the model cannot read so far."""
    if 0 < model.config.positions < task.length:
        return None
    texts = max(LEAST_TEXTS, min(BEYOND_TEXTS, BEYOND_TOKENS // task.length))
    ids_BT, targets_BT = task.exam(stream(seed, BEYOND), texts)
    if task.length > trained.length:
        targets_BT[:, : task.length // 2] = IGNORE
    return accuracy(model, ids_BT, targets_BT)


def difference(task: Task, other: Task) -> str:
    """The sizes in which a variant of a task differs from it, as text: "length 256, pairs 8"."""
    return ", ".join(f"{name} {size}" for name, size in other.sizes().items() if size != task.sizes()[name])


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """Recall of the design that the run's model has, in float32 on the device it is on, from its seed on. Each setting
    that is done is kept in the run's folder; the folder of an artifact is left as it is."""
    folder = subject.opened.folder
    kept = None if folder.quant is not None else folder.path / f"recall-{options.profile}.json"
    return recall(
        presets.variant_of(subject.model.config),
        options,
        kept,
        seed=subject.seed,
        device=subject.model.device,
    )


def recall(
    design: str,
    options: Options,
    kept: Path | None = None,
    *,
    seed: int = 0,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Every setting of the profile, by task, over as many seeds as the profile says from `seed` on. `kept`: a file
    written after each setting; what it holds of the same design, options, seed and device is not measured again."""
    asked = options.asked
    options = replace(options, seeds=asked.seeds, rates=asked.rates, layers=asked.layers)
    small = config_for(design, asked.settings[0].task, options.d_model, asked.layers)
    head = {
        "version": VERSION,
        "design": design,
        "profile": options.profile,
        "seeds": list(range(seed, seed + asked.seeds)),
        "options": dump(options),
        "device": device.type,
        "mixers": [block.mixer.kind for block in small.blocks if block.mixer is not None],
    }
    done = _done(kept, head)
    for setting in asked.settings:
        key = _key(setting)
        if key not in done:
            config = config_for(design, setting.task, options.d_model, asked.layers)
            done[key] = measure_setting(config, setting, options, seed=seed, device=device)
            if kept is not None:
                write_json(kept, head | {"done": done})
    tasks: dict[str, Any] = {}
    for setting in asked.settings:
        task = setting.task
        about = {
            "about": task.about,
            "theory": task.theory,
            "chance": task.chance,
            "solved": SOLVED,
            "settings": [],
        }
        tasks.setdefault(task.name, about)["settings"].append(done[_key(setting)])
    return head | {"tasks": tasks}


def measure_setting(
    config: ModelConfig, setting: Setting, options: Options, *, seed: int = 0, device: torch.device = CPU
) -> dict[str, Any]:
    """The result of one setting over the seeds, with its sizes and the learning rate that was taken."""
    task, steps, asked = setting.task, setting.steps, options.asked

    def solved(lr: float, seed: int) -> Solved:
        size = options.batch_tokens
        return solve_task(
            config, task, steps=steps, batch_tokens=size, lr=lr, seed=seed, device=device, also=setting.also
        )

    tried = dict[float, Solved]()
    for lr in asked.rates:
        tried[lr] = solved(lr, seed)
        if tried[lr].watched >= SOLVED:
            break
    best = max(tried, key=lambda lr: tried[lr].watched)
    runs = [tried[best], *(solved(best, seed + i) for i in range(1, asked.seeds))]
    return {
        **task.sizes(),
        "sizes": task.sizes(),
        "chance": task.chance,
        "parameters": active_parameters(config),
        "state_bytes": _state_bytes(config, task),
        "lr": best,
        "rates": {str(lr): run.watched for lr, run in tried.items()},
        "accuracy": [run.accuracy for run in runs],
        "beyond": [run.beyond for run in runs],
        "also": {name: [run.also[name] for run in runs] for name in runs[0].also},
        "steps": [run.steps for run in runs],
        "steps_allowed": setting.steps,
        "seconds": sum(run.seconds for run in (*tried.values(), *runs[1:])),
    }


def _state_bytes(config: ModelConfig, task: Task) -> int:
    """Bytes of the state after the last token of one text."""
    with torch.inference_mode():
        return build(config).hidden(task.draw(stream(0, TEST), 1)[0])[1].nbytes


def _key(setting: Setting) -> str:
    also = "".join(f", also {difference(setting.task, other)}" for other in setting.also)
    return f"{setting.task.name} {setting.task.sizes()} in {setting.steps} steps{also}"


def _done(kept: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    if kept is None or not kept.is_file():
        return {}
    before = read_json(kept, ConfigError)
    if not isinstance(before, dict) or not isinstance(before.get("done"), dict):
        raise ConfigError(f"{kept}: not the results of this suite")
    done: dict[str, Any] = before["done"] if {key: before.get(key) for key in head} == head else {}
    return done


def lines(result: dict[str, Any]) -> list[str]:
    """The result as lines for the terminal."""
    options, seeds = result["options"], len(result["seeds"])
    layers = ", ".join(f"{count} {kind}" for kind, count in Counter(result["mixers"]).items())
    about = f"recall of {result['design']}, trained from scratch at width {options['d_model']} with {layers},"
    about += f" {seeds} seed{'s' if seeds > 1 else ''} (profile {result['profile']}):"
    return [about, *(_line(name, s) for name, task in result["tasks"].items() for s in task["settings"])]


def _line(name: str, setting: dict[str, Any]) -> str:
    accuracies = setting["accuracy"]
    shown = ("length", "pairs", "letters", "facts", "n", "gaps", "things", "hops", "operations", "modulus")
    sizes = ", ".join(f"{k} {v}" for k, v in setting["sizes"].items() if k in shown)
    verdict = (
        "solved"
        if min(accuracies) >= SOLVED
        else "not solved"
        if max(accuracies) < SOLVED
        else "solved by some seeds"
    )
    values = " ".join(f"{value:.3f}" for value in accuracies)
    past = [f"{value:.3f}" for value in setting["beyond"] if value is not None]
    further = f", past its length {' '.join(past)}" if past else ""
    others = "".join(
        f"; {other} " + " ".join("–" if value is None else f"{value:.3f}" for value in each)
        for other, each in setting["also"].items()
    )
    return f"{name} ({sizes}): {values}{further}, chance {setting['chance']:.3f}, {verdict}{others}"
