"""Training on synthetic tasks: who can see learns, who cannot stays at chance, and what is done is kept."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from perspectron import build, presets
from perspectron.data.loader import IGNORE
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.eval import recall
from perspectron.eval.recall import SOLVED, Options, Profile, Setting, Solved, config_for, solve_task
from perspectron.eval.subject import Subject
from perspectron.eval.tasks import MQAR, Needle, SelectiveCopy
from perspectron.eval.tracking import Parity
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.opening import Folder, Opened
from perspectron.util.config import dump, load
from perspectron.util.errors import ConfigError
from tests.refusals import refused

EASY = SelectiveCopy(8, letters=1, kinds=4)


def blind(vocab_size: int) -> ModelConfig:
    """Knows where it is and which token it reads, and mixes nothing over time."""
    block = BlockConfig(None, SwiGLUConfig(32))
    return ModelConfig("blind", vocab_size, 32, (block,) * 2, positions=64, embedding_std=32**-0.5)


def windowed(vocab_size: int, window: int, layers: int = 2) -> ModelConfig:
    block = BlockConfig(WindowGQAConfig(heads=2, kv_heads=1, window=window), SwiGLUConfig(32))
    return ModelConfig("windowed", vocab_size, 32, (block,) * layers, embedding_std=32**-0.5)


def noise(chance: float, answers: int) -> float:
    """Four standard deviations of a guess."""
    return 4 * math.sqrt(chance * (1 - chance) / answers)


@pytest.mark.parametrize("design", ["transformer", "perspective"])
def test_a_small_model_learns_an_easy_task(design):
    found = solve_task(config_for(design, EASY, d_model=32), EASY, steps=200, batch_tokens=256)
    assert found.accuracy >= SOLVED
    assert found.steps < 200 and found.watched >= recall.STOP


@pytest.mark.parametrize("task", [EASY, Parity(8)], ids=lambda task: task.name)
def test_without_a_mixer_over_time_it_stays_at_chance(task):
    found = solve_task(blind(task.vocab_size), task, steps=60, batch_tokens=256)
    # answers of one text of parity go together
    assert found.accuracy == pytest.approx(task.chance, abs=noise(task.chance, recall.TEST_TEXTS))


@pytest.mark.parametrize(
    ("window", "distance", "sees", "steps"), [(1, 4, False, 40), (4, 8, False, 200), (4, 7, True, 200)]
)
def test_a_window_sees_as_far_as_theory_says(window, distance, sees, steps):
    """W tokens in each of L layers: L · (W - 1) tokens back; the value stands at distance - 1."""
    task = Needle(12, distance=distance, facts=1, keys=2, values=2, words=4)
    found = solve_task(windowed(task.vocab_size, window), task, steps=steps, batch_tokens=384)
    if sees:
        assert found.accuracy >= SOLVED
    else:
        assert found.accuracy == pytest.approx(task.chance, abs=noise(task.chance, recall.TEST_TEXTS))


def test_a_seed_gives_the_same_training_and_another_seed_another():
    task = replace(EASY, kinds=16)  # not yet solved after so few steps
    config = config_for("gla", task, d_model=32)
    one, same, other = (
        replace(solve_task(config, task, steps=30, batch_tokens=64, seed=seed), seconds=0)
        for seed in (1, 1, 2)
    )
    assert one == same != other


def test_accuracy_is_that_of_counting():
    task = MQAR(16, pairs=3, keys=8, values=8)
    model = build(config_for("transformer", task, d_model=32), seed=1)
    ids_BT, targets_BT = task.draw(recall.stream(0, recall.TEST), 70)
    right = asked = 0
    for ids, targets in zip(ids_BT, targets_BT.tolist(), strict=True):
        logits_TV = model(ids[None]).logits[0]
        for t, target in enumerate(targets):
            if target != IGNORE:
                asked += 1
                right += int(logits_TV[t].argmax()) == target
    assert recall.accuracy(model, ids_BT, targets_BT) == right / asked and asked == 3 * 70


def test_beyond_counts_only_what_stands_past_the_trained_length():
    """A model that knows parity by heart up to the trained length, and then says 0."""
    task = Parity(8)

    class Heart:
        device = recall.CPU
        config = config_for("transformer", task)

        def hidden(self, ids):
            return (ids, None)

        def head(self, ids):
            said = ids.cumsum(1) % 2
            said[:, task.length :] = 0
            return recall.torch.nn.functional.one_hot(said, 2)

    assert recall.accuracy(Heart(), *task.draw(recall.stream(0, recall.TEST), 50)) == 1
    assert recall.beyond(Heart(), task, task.longer(2), 0) == pytest.approx(
        0.5, abs=noise(0.5, recall.BEYOND_TEXTS)
    )


@pytest.mark.parametrize(
    ("found", "lengths"),
    [
        ([0.5, 0.95, 0.0, 0.0, 0.97, 0.99], [8] * 50 + [16] * 75 + [32] * 25),  # passed at steps 50 and 125
        ([0.0] * 16, [8] * 140 + [16] * 140 + [32] * 120),
    ],
)
def test_lessons_go_on_when_passed_or_when_their_time_is_over(monkeypatch, found, lengths):
    task = MQAR(32, pairs=4)
    course, done = recall.Course(task, 400, seed=0), found[-1] >= recall.STOP
    monkeypatch.setattr(recall, "accuracy", lambda *_: found.pop(0))
    for step, length in enumerate(lengths):
        assert course.lesson == replace(task, length=length, pairs=max(2, length // 8))
        assert not course.done
        course.watch(None, step + 1)
    assert course.done == done


def test_a_table_of_positions_that_ends_is_not_read_past():
    config = replace(config_for("gpt2", EASY), positions=EASY.length)
    assert recall.beyond(build(config), EASY, EASY.longer(2), 0) is None


def test_a_vocabulary_too_small_is_an_error():
    with refused(ConfigError, "vocab_size", 4):
        solve_task(blind(4), EASY, steps=1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"profile": "slow"}, ["profile", "slow"]),
        ({"seeds": 0}, ["seeds", 0]),
        ({"rates": ()}, ["rates"]),
        ({"batch_tokens": 0}, ["batch_tokens", 0]),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(changes, named):
    with refused(ConfigError, *named):
        Options(**changes)


def test_options_load_as_the_command_line_gives_them():
    options = Options("full", seeds=2, rates=(1e-3,))
    assert load(Options, dump(options)) == options
    assert options.asked == replace(recall.PROFILES["full"], seeds=2, rates=(1e-3,))
    assert Options().asked == recall.PROFILES["quick"]


@pytest.mark.parametrize("profile", recall.PROFILES)
@pytest.mark.parametrize("design", presets.DESIGNS)
def test_every_design_can_read_every_setting_at_twice_its_length(design, profile):
    for setting in recall.PROFILES[profile].settings:
        config = config_for(design, setting.task)
        assert config.positions in (0, 2 * setting.task.length)
        assert config.vocab_size >= setting.task.longer(2).vocab_size


@pytest.fixture
def trained(monkeypatch):
    """What is trained, without training: [(setting's length, rate, seed)]. The test likes another rate than the texts
    that are watched."""
    calls = []

    def solve(config, task, *, steps, batch_tokens, lr, seed, device, also):
        calls.append((task.length, lr, seed))
        watched = 0.99 if lr < 0.002 and task.length == 32 else 0.3 + lr
        others = {recall.difference(task, other): 0.125 for other in also}
        return Solved(1 - watched, watched, 0.25, steps, 1.0, others)

    far = (MQAR(64, pairs=1),)
    settings = (Setting(MQAR(16, pairs=2), 5), Setting(MQAR(32, pairs=2), 5, far), Setting(Parity(8), 5))
    monkeypatch.setattr(recall, "solve_task", solve)
    monkeypatch.setitem(recall.PROFILES, "quick", Profile(settings, seeds=2, rates=(3e-3,), layers=1))
    return calls


def test_the_first_rate_that_solves_is_taken_and_else_the_best_never_by_the_test(trained):
    result = recall.recall("gla", Options(rates=(3e-3, 1e-3, 5e-4)))
    assert trained == [
        *[(16, 3e-3, 0), (16, 1e-3, 0), (16, 5e-4, 0), (16, 3e-3, 1)],
        *[(32, 3e-3, 0), (32, 1e-3, 0), (32, 1e-3, 1)],
        *[(8, 3e-3, 0), (8, 1e-3, 0), (8, 5e-4, 0), (8, 3e-3, 1)],
    ]
    mqar, parity = result["tasks"]["mqar"], result["tasks"]["parity"]
    assert [s["lr"] for s in mqar["settings"]] == [3e-3, 1e-3]
    assert mqar["settings"][1]["accuracy"] == pytest.approx([0.01, 0.01])
    assert mqar["settings"][1]["beyond"] == [0.25, 0.25]
    assert [s["also"] for s in mqar["settings"]] == [{}, {"length 64, pairs 1": [0.125, 0.125]}]
    assert mqar["settings"][1]["sizes"] == MQAR(32, pairs=2).sizes()
    assert mqar["settings"][1]["rates"] == {"0.003": 0.303, "0.001": 0.99}
    assert (mqar["chance"], parity["chance"], mqar["solved"]) == (1 / 64, 1 / 2, SOLVED)
    assert len(parity["settings"]) == 1
    assert (result["profile"], result["seeds"], result["options"]["layers"]) == ("quick", [0, 1], 1)
    first, *rest = recall.lines(result)
    assert first == "recall of gla, trained from scratch at width 64 with 1 gla, 2 seeds (profile quick):"
    assert len(rest) == 3 and rest[1].endswith("not solved; length 64, pairs 1 0.125 0.125")
    assert "0.010 0.010, past its length 0.250 0.250, chance 0.016" in rest[1]


def test_seeds_go_on_from_the_one_given(trained):
    result = recall.recall("gla", Options(), seed=7)
    assert [seed for _, _, seed in trained] == [7, 8] * 3 and result["seeds"] == [7, 8]


def test_the_watched_accuracy_is_not_that_of_the_test(monkeypatch):
    """A model that is right about the texts it is watched by, and about no others."""
    shown = {recall.WATCH_TEXTS: 1.0, recall.TEST_TEXTS: 0.0, recall.BEYOND_TEXTS: 0.5}
    monkeypatch.setattr(recall, "accuracy", lambda model, ids_BT, targets_BT: shown[len(ids_BT)])
    found = solve_task(config_for("gla", EASY, d_model=32), EASY, steps=1, batch_tokens=64)
    assert (found.watched, found.accuracy, found.beyond) == (1.0, 0.0, 0.5)


def test_the_small_perspective_model_is_what_the_profile_says():
    task = MQAR(32, pairs=4)
    kinds = {
        name: [block.mixer.kind for block in config_for("perspective", task, 64, profile.layers).blocks]
        for name, profile in recall.PROFILES.items()
    }
    assert kinds == {"quick": ["pdr"] * 2, "full": ["pdr"] * 3 + ["window_gqa"], "long": ["pdr"] * 2}
    assert config_for("perspective", task, 64, 4).blocks[3].mixer.window == task.length // 2
    assert config_for("perspective2[window=8]", task).blocks[1].mixer.window == 8


def subject_in(folder: Path, **known: object) -> Subject:
    model = build(presets.small("gla", vocab_size=16))
    return Subject(Opened(Folder(folder, model.config, **known), model, None), None, 8)


def test_what_was_done_before_a_stop_is_not_done_again(trained, tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    subject = subject_in(tmp_path)

    write = recall.write_json

    def stop(path, value):
        write(path, value)
        raise KeyboardInterrupt

    kept = tmp_path / "recall-quick.json"
    monkeypatch.setattr(recall, "write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        recall.recall("gla", Options(), kept, device=subject.model.device)
    monkeypatch.setattr(recall, "write_json", write)
    before = len(trained)
    assert {length for length, _, _ in trained} == {16}
    result = recall.measure(subject)
    assert not any(length == 16 for length, _, _ in trained[before:])
    after = len(trained)
    assert recall.measure(subject) == result and len(trained) == after
    assert json.loads(json.dumps(result)) == result
    recall.measure(subject, Options(d_model=32))  # other options: anew
    assert len(trained) == after + after
    recall.measure(replace(subject, seed=1))  # another seed too
    assert len(trained) == 3 * after
    assert not list(checkpoint.iterdir())


def test_a_variant_is_asked_and_not_its_design(trained, tmp_path, monkeypatch):
    asked, solve = list[ModelConfig](), recall.solve_task
    monkeypatch.setattr(recall, "solve_task", lambda config, *own, **known: asked.append(config)
                        or solve(config, *own, **known))  # fmt: skip
    for name, variant in (("gdn[negative=true]", True), ("gdn", False)):
        asked.clear()
        model = build(presets.small(name, vocab_size=16))
        result = recall.measure(Subject(Opened(Folder(tmp_path, model.config), model, None), None, 8))
        assert result["design"] == name
        assert {config.blocks[0].mixer.negative for config in asked} == {variant}
    assert presets.variant_of(presets.get("gla-tiny")) == "gla"


def test_an_artifact_is_left_as_it_is(trained, tmp_path):
    recall.measure(subject_in(tmp_path, quant={}))
    assert not list(tmp_path.iterdir())
