"""What is chosen for the minutes, the tokens or the passes that there are."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from perspectron import presets
from perspectron.data import Tokenizer, encode, open_corpus
from perspectron.eval import budget, timing
from perspectron.eval.budget import Budget, sized
from perspectron.model.census import active_parameters
from perspectron.model.model import build
from perspectron.train.checkpoint import INDEX, save_config
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.optim import optimizer_of
from perspectron.util.errors import ConfigError
from tests.refusals import refused

MANY = 1e12
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="pip install 'perspectron[lora]'")


@pytest.fixture
def machine(monkeypatch):
    """One that takes 0.6 ns for a parameter and a token, and has any memory."""
    timed = []

    def seconds_of(model, train):
        timed.append(active_parameters(model))
        return 6e-10 * active_parameters(model) * train.batch_size * train.seq_len

    monkeypatch.setattr(budget, "seconds_of", seconds_of)
    monkeypatch.setattr(budget, "room", lambda device: 10**12)
    return timed


@pytest.mark.parametrize("seconds", [60, 600, 6000])
def test_the_size_is_the_one_that_reads_so_many_tokens_in_the_time(machine, seconds):
    made = active_parameters(sized("perspective2", Budget(minutes=10), TrainConfig(), MANY, seconds, 0))
    tokens = seconds / (6e-10 * made)
    assert tokens / made == pytest.approx(presets.TOKENS_PER_PARAMETER, rel=0.15)
    assert len(machine) <= 2  # a few seconds of timing


@pytest.mark.parametrize("seconds", [0, -2.5])
def test_where_no_time_is_left_the_smallest_is_chosen_so_that_the_minutes_are_refused_by_name(
    machine, seconds
):
    made = sized("perspective2", Budget(minutes=0.1), TrainConfig(), MANY, seconds, 0)
    assert active_parameters(made) < 300_000


def test_the_size_follows_from_tokens_and_from_passes(machine):
    train, ratio = TrainConfig(), presets.TOKENS_PER_PARAMETER
    tokens = sized("perspective2", Budget(tokens=4_000_000), train, MANY, 0, 0)
    assert active_parameters(tokens) == pytest.approx(4e6 / ratio, rel=0.06)
    passes = sized("perspective2", Budget(passes=2), train, 2_000_000, 0, 0)
    assert passes == tokens
    assert machine == []


@pytest.mark.parametrize(("takes", "dtype", "wanted"), [
    (0.1, "auto", ["float32", "bfloat16"] * 3), (9.0, "auto", ["float32", "bfloat16"]), (9.0, "float32", ["float32"]),
])  # fmt: skip
def test_a_slow_update_is_timed_once(monkeypatch, takes, dtype, wanted):
    clock, calls = iter(x * takes for x in range(100)), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(budget, "stepper", lambda *_: calls.append)
    monkeypatch.setattr(budget, "precisions", lambda device: ["float32", "bfloat16"])
    train = TrainConfig(dtype=dtype, accumulate=2, device="cpu")
    assert budget.seconds_of(presets.get("transformer-tiny"), train) == pytest.approx(2 * takes)
    assert sorted(calls) == sorted(wanted)


@pytest.mark.parametrize("part", [
    {"only": ("*norm*",)}, {"recompute": True}, pytest.param({"lora": "rank=1", "init": "x"}, marks=needs_peft),
])  # fmt: skip
def test_what_is_timed_is_the_training_that_was_asked_for(monkeypatch, part):
    made = []

    def kept(model, optim):
        made.append(model)
        return optimizer_of(model, optim)

    monkeypatch.setattr(timing, "optimizer_of", kept)
    train = TrainConfig(batch_size=2, seq_len=16, dtype="float32", device="cpu", **part)
    budget.seconds_of(presets.get("transformer-tiny", vocab_size=300, d_model=32, layers=2), train)
    (model,) = made
    learned, every = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (False, True)
    )
    assert model.recompute == train.recompute
    assert (learned == every) == train.recompute and learned


@pytest.mark.parametrize("vocab_size", [200, 400])
def test_the_pass_of_a_teacher_is_timed_too(monkeypatch, tmp_path, vocab_size):
    step, read = tmp_path / "checkpoints" / "step-00000001", []
    step.mkdir(parents=True)
    (step / INDEX).write_text("{}")
    sizes = {"vocab_size": vocab_size, "d_model": 32, "layers": 3}
    save_config(tmp_path, RunConfig(presets.get("transformer-tiny", **sizes), TrainConfig()))

    def kept(config):
        model = build(config)
        model.register_forward_hook(lambda *_: read.append(len(model.blocks)))
        return model

    monkeypatch.setattr(budget, "build", kept)
    train = TrainConfig(batch_size=2, seq_len=16, dtype="float32", device="cpu", teacher=str(tmp_path))
    assert budget.seconds_of(presets.get("transformer-tiny", **sizes | {"vocab_size": 300}), train) > 0
    assert set(read) == {3} and len(read) > 1


def test_a_teacher_without_the_positions_is_refused_by_the_length_of_windows(tmp_path):
    step = tmp_path / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / INDEX).write_text("{}")
    model = presets.small("gpt2", vocab_size=300, d_model=32, layers=1, seq_len=16)
    save_config(tmp_path, RunConfig(model, TrainConfig()))
    train = TrainConfig(batch_size=2, seq_len=32, dtype="float32", device="cpu", teacher=str(tmp_path))
    with refused(ConfigError, "seq_len", 32, allowed := model.positions, tmp_path):
        budget.seconds_of(presets.get("transformer-tiny", vocab_size=300), train)
    assert allowed == 16


def test_a_run_of_no_design_is_settled_where_it_begins_with_its_weights(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("One line of many.\n" * 3000)
    corpus = open_corpus(str(tmp_path / "text.txt"), 0.1)
    tokenizer = Tokenizer.train(["One line of many."], 260)
    text = encode(corpus, tokenizer, tmp_path / "data")
    model = replace(presets.get("transformer-tiny", vocab_size=260), name="mamba-130m")
    config = RunConfig(model, TrainConfig(init="x", seq_len=16, batch_size=2))
    made = budget.settled(config, frozenset(), Budget(tokens=3200), text, 0.0)
    assert made.train.steps == 100 and made.train.optim.lr == config.train.optim.lr
    with refused(ConfigError, "mamba-130m"):
        budget.settled(
            replace(config, train=replace(config.train, init="")), frozenset(), Budget(tokens=3200), text, 0.0
        )


def test_a_long_text_is_estimated_from_the_share_that_was_read(tmp_path, monkeypatch):
    """As if it were over 64 MiB."""
    (tmp_path / "text.txt").write_text("One line of many.\n" * 300_000)
    corpus = open_corpus(str(tmp_path / "text.txt"), 0.1)
    whole = budget.size_of(corpus)
    monkeypatch.setattr(budget, "ENOUGH", whole // 3)
    assert (
        budget.size_of(corpus) == pytest.approx(whole, rel=1e-3) == pytest.approx(0.9 * 5_400_000, rel=1e-3)
    )


@pytest.mark.parametrize("mixture", [True, False])
def test_a_long_text_beside_a_short_one_is_estimated_by_bytes(tmp_path, monkeypatch, mixture):
    (tmp_path / "long.txt").write_text("One line of many.\n" * 100_000)
    short = tmp_path / "short.jsonl"
    short.write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(200)))
    source = f"long=0.5:{tmp_path / 'long.txt'} short=0.5:{short}" if mixture else str(tmp_path)
    corpus = open_corpus(source, 0.1)
    whole = budget.size_of(corpus)
    monkeypatch.setattr(budget, "ENOUGH", whole // 3)
    assert budget.size_of(corpus) == pytest.approx(whole, rel=1e-2)


def test_short_trainings_warm_up_for_longer():
    steps = (1, 10, 600, 1200, 3000)
    assert [presets.warmup(number) for number in steps] == [1, 2, 120, 120, 300]


def test_a_short_text_has_a_small_model_whatever_the_time(machine):
    made = sized("perspective2", Budget(minutes=600), TrainConfig(), 100_000, 36000, 0)
    assert active_parameters(made) == pytest.approx(
        presets.PASSES * 1e5 / presets.TOKENS_PER_PARAMETER, rel=0.06
    )


def test_a_model_that_would_not_fit_is_halved_until_it_does(machine, monkeypatch):
    monkeypatch.setattr(budget, "room", lambda device: 2 * 10**9)
    made = sized("perspective2", Budget(tokens=10**9), TrainConfig(), MANY, 0, 0)
    assert 5e6 < active_parameters(made) < 2e9 / 16 / 2


@pytest.mark.parametrize(("room", "most"), [(10**12, 65536), (2 * 10**9, 2543), (10**6, 257)])
def test_characters_get_half_of_the_room(machine, monkeypatch, room, most):
    monkeypatch.setattr(budget, "room", lambda device: room)
    assert budget.largest_vocabulary(TrainConfig(batch_size=32, seq_len=256)) == most


def test_a_given_vocabulary_is_kept_though_it_needs_a_larger_model(machine):
    made = sized("perspective2", Budget(tokens=1000), TrainConfig(), MANY, 0, 8192)
    assert made.vocab_size == 8192 and active_parameters(made) > 200_000


@pytest.mark.parametrize("minutes", [0.01, 0.0, -3.0, 1e9])
def test_minutes_that_are_none(minutes):
    with refused(ConfigError, "minutes"):
        Budget(minutes=minutes)


def test_rates_come_from_the_table_and_fall_with_the_size(monkeypatch):
    monkeypatch.setitem(presets.rates.RATES, "gla", 4e-3)
    assert presets.rate("gla", 2_000_000) == 4e-3
    assert presets.rate("gla", 16_000_000) == pytest.approx(4e-3 * 8**presets.rates.FALL, rel=0.05)
    assert presets.rate("gla", 500_000) == pytest.approx(4e-3 * 0.25**presets.rates.FALL, rel=0.05)
    assert presets.rate("gla", 1) == 1.6e-2
    assert presets.rate("gla", 2_000_000, 3_000_000) == presets.rate("gla", 2_000_000, 1000) == 4e-3
    assert presets.rate("gla", 2_000_000, 48_000_000) == pytest.approx(4e-3 * 16**-0.32, rel=0.05)
    assert presets.rate("adr", 2_000_000) == 4e-3 and presets.rate("kda", 2_000_000) == 8e-3
    assert set(presets.rates.RATES) <= set(presets.DESIGNS)
