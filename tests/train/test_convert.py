"""Conversion: what is taken over, what is learned, and resuming."""

import shutil
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from perspectron import presets
from perspectron.data.loader import IGNORE, Batch
from perspectron.eval.conversion import Options, lines, measure
from perspectron.eval.subject import Subject
from perspectron.model.config import BlockConfig, Law5Config, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import config_of
from perspectron.model.model import build
from perspectron.model.transfer import Heads
from perspectron.opening import open_model
from perspectron.train import checkpoint, loop
from perspectron.train.convert import run as conversions
from perspectron.train.convert.build import attention_in, heads_of, in_place, student, targets, transferred
from perspectron.train.convert.config import LONGER, RATES, SHARES, ConvertConfig
from perspectron.train.convert.layers import LayerTrainer, costs, kept
from perspectron.train.convert.run import Conversion
from perspectron.train.convert.run import config_of as asked_of
from perspectron.train.estimate import Estimate
from perspectron.train.optim import OptimConfig
from perspectron.util.config import dump
from perspectron.util.errors import CheckpointError, ConfigError
from perspectron.util.files import write_json
from tests.refusals import refused

TARGETS = ("perspective2", "gdn", "kda", "gla", "ssd", "rwkv7")


def attending(**options):
    """Two layers of attention whose heads are as wide as the model."""
    mixer = config_of("attention", **{"heads": 2} | options)
    blocks = (BlockConfig(mixer, SwiGLUConfig(32)),) * 2
    return ModelConfig("transformer", 300, 32, blocks)


@pytest.fixture(scope="module")
def teacher(runs, tmp_path_factory):
    run = tmp_path_factory.mktemp("teacher") / "run"
    optim = OptimConfig(lr=1e-2, warmup=5)
    runs.trainer(run, attending(), steps=60, eval_every=0, save_every=0, optim=optim).fit()
    return run


def config(teacher, runs, **options):
    made = {"tokens": 6000, "seq_len": 32, "batch_size": 4, "keep": 2, "window": 16, "dtype": "float32"}
    return ConvertConfig(str(teacher), data=str(runs.data), **made | options)


def conversion(folder, teacher, runs, **options):
    folder.mkdir(exist_ok=True)
    return Conversion(folder, config(teacher, runs, **options), runs.tokenizer, runs.shards)


def logits(model):
    ids = torch.arange(48).reshape(2, 24) % 300
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_heads": 1}, {"qk_norm": "head"}, {"qk_norm": "all"}, {"bias": True}, {"head_dim": 8}, {"window": 8}],
    ids=str,
)  # fmt: skip
def test_a_model_whose_layers_are_all_kept_is_its_teacher(options):
    model = build(attending(**options))
    same = transferred(model, student(model.config, "gdn", [], 0), {}, seed=3)
    assert torch.equal(logits(same), logits(model))
    wide = transferred(model, student(model.config, "gdn", [], 64), {}, seed=3)
    torch.testing.assert_close(logits(wide), logits(model), rtol=1e-6, atol=1e-6)


def test_kept_attention_reads_what_it_read_where_others_read_the_token_before():
    model = build(attending())
    config = student(model.config, "perspective2", [1], 0)
    assert config.shift
    made = transferred(model, config, heads_of(model, batches()), seed=3)
    x_BTD = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))
    (own, its), outputs = (m.blocks[0] for m in (made, model)), []
    for block in (own, its):
        state = block.init_state(2, x_BTD.device, x_BTD.dtype)
        outputs.append(block.mixed(x_BTD, state, None, None)[0])
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)


def batches():
    ids = torch.randint(300, (2, 24), generator=torch.Generator().manual_seed(0))
    return [Batch(ids, ids, torch.zeros_like(ids, dtype=torch.bool), ids.numel())]


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("options", [{}, {"kv_heads": 1}], ids=str)
def test_matrices_are_taken_over(to, options):
    model = build(attending(**options))
    layers = attention_in(model)
    heads = heads_of(model, batches())
    made = transferred(model, student(model.config, to, layers, 0), heads, seed=3)
    own, its = made.state_dict(), model.state_dict()
    for name in its:
        if ".mixer." not in name:
            assert torch.equal(own[name], its[name]), name
    for index in layers:
        mixer, shift = made.blocks[index].mixer, made.blocks[index].mixer_shift
        mixes = mixer.mix_6D if to == "rwkv7" else shift.mix_ND if shift is not None else torch.zeros(1)
        assert not mixes.any(), "its matrices read what they read in the teacher"
        assert torch.equal(mixer.o_proj.weight, its[f"blocks.{index}.mixer.o_proj.weight"])
        v_rows = heads[index].v_HVD.flatten(0, 1)
        found = [w for n, w in mixer.named_parameters() if n.endswith("proj.weight")]
        assert any(
            (w.unfold(0, 32, 1).mT - v_rows.T.mT).abs().sum((1, 2)).min() == 0 for w in found if len(w) >= 32
        )
    assert torch.isfinite(logits(made)).all()


def test_attention_beside_another_mixer_is_refused_as_that():
    whole = presets.get("transformer-tiny")
    (block, *_) = whole.blocks
    both = replace(block, mixer=config_of("gla", heads=2), beside=block.mixer)
    said = []
    for model in (build(replace(whole, blocks=(both, both)), 0), build(presets.get("gla-tiny"), 0)):
        with pytest.raises(ConfigError) as error:
            attention_in(model)
        said.append(str(error.value))
    assert said[0].count("mixer") > said[1].count("mixer") == 0


@pytest.mark.parametrize("to", ["perspective2", "gla", "gdn"])
@pytest.mark.parametrize("form", ["shift=true", "shift=k+v", "input_conv=true", "input_conv=k+v"])
def test_inputs_read_of_tokens_before_what_those_of_the_teacher_read(to, form):
    """The teacher has one mix for all of its inputs, or one each for some; the recurrence takes them by their names."""
    parts = presets.variant(f"transformer[{form}]")[1]
    sizes = {"vocab_size": 300, "d_model": 32, "layers": 2, "heads": 2, "hidden": 32}
    model = build(presets.get("transformer", **sizes, **parts))
    for block in model.blocks:
        for rows in block.mixer_shift.parameters():
            torch.nn.init.uniform_(rows, 0.1, 0.9)
    made = transferred(model, student(model.config, to, [0, 1], 0), heads_of(model, batches()), seed=3)
    for block, before in zip(made.blocks, model.blocks, strict=True):
        (own,), (its,) = (list(b.mixer_shift.parameters()) for b in (block, before))
        slots = len(block.mixer_shift.mixed)
        rest = [torch.zeros_like(its[0])] * (slots - 3)  # of gates, which attention has none of
        expected = [its[0]] * min(slots, 3) + rest if "true" in form else list(its)
        assert torch.equal(own, torch.stack(expected))
    assert torch.isfinite(logits(made)).all()


def test_the_last_stage_has_longer_windows():
    """As long as the positions allow, unless hardly any updates would be left; as many tokens in an update, or one
    window."""
    for batch_size in (1, 2, 4, 8):
        for tokens, wanted in {40_000: 1, 100_000: 2, 400_000: LONGER, 0: LONGER}.items():
            asked = ConvertConfig(
                "run", tokens=tokens, minutes=float(tokens == 0), seq_len=256, batch_size=batch_size
            )
            for longest in (0, 256, 600, 1024):
                plans = [asked.train(stage, 1, 2_000_000, longest) for stage in SHARES]
                longer = min(wanted, longest // 256 or LONGER)
                assert [plan.seq_len // 256 for plan in plans] == [1, 1, longer]
                assert [plan.batch_size for plan in plans] == [batch_size] * 2 + [
                    max(1, batch_size // longer)
                ]
    asked = ConvertConfig("run", tokens=40_000, seq_len=256, batch_size=1)
    assert sum(asked.steps(stage, 0) for stage in SHARES) > 150


@pytest.mark.parametrize("name", ["shares", "rates"])
def test_shares_and_rates_of_other_stages_are_refused(name):
    for value in (
        {"layers": 1.0},
        {**RATES, "more": 1.0},
        {**RATES, "text": 0.0},
        {**RATES, "text": float("nan")},
    ):
        with refused(ConfigError, name):
            ConvertConfig("run", tokens=1, **{name: value})


def test_the_targets_are_those_that_the_command_names():
    assert set(TARGETS) <= set(targets())


def test_halflives_are_the_quantiles_of_the_distances():
    zero = torch.zeros(1, 1, 1)
    mass = torch.tensor([[0.5, 0.25, 0.0, 0.25]])
    heads = Heads(zero, zero, zero, zero, mass)
    torch.testing.assert_close(heads.halflives(1), torch.tensor([[1.0]], dtype=torch.float64))
    torch.testing.assert_close(heads.halflives(4), torch.tensor([[1.0, 1.0, 1.5, 3.5]], dtype=torch.float64))


def test_attention_to_the_last_tokens_becomes_short_memories():
    """A head that sees 4 tokens has no half-life beyond them, one that sees all has."""
    near, far = (build(attending(window=w, rope_base=None)) for w in (4, None))
    short, long = (heads_of(model, batches())[0].halflives(8).max() for model in (near, far))
    assert short <= 4 < 8 < long


def test_distances_are_of_what_attention_reads_after_norms_and_shifts():
    """With a shift whose queries, keys and values are the token before, they are those of the tokens before; with
    law 5, whose mixers read what the block reads, no norm comes in between."""
    model = build(replace(attending(), shift=True))
    block, (batch,) = model.blocks[0], batches()
    with torch.no_grad():
        block.mixer_shift.mix_ND[:] = 1
        x_BTD = block.mixer_norm(model.embedding(batch.ids_BT))
        before_BTD = torch.nn.functional.pad(x_BTD, (0, 0, 1, 0))[:, :-1]
        expected = block.mixer.heads(before_BTD).mass_HT
        assert (block.mixer.heads(x_BTD).mass_HT - expected).abs().max() > 1e-4
    torch.testing.assert_close(heads_of(model, [batch])[0].mass_HT, expected)
    blocks = tuple(replace(block, residual=Law5Config()) for block in attending().blocks)
    bare = build(replace(attending(), blocks=blocks))
    expected = bare.blocks[0].mixer.heads(bare.embedding(batch.ids_BT)).mass_HT
    torch.testing.assert_close(heads_of(bare, [batch])[0].mass_HT, expected)


def test_narrowed_keys_have_the_products_that_matter():
    q, k = (torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    q[:, 4:] = 0
    heads = Heads(q, k, k, k.transpose(1, 2), torch.ones(2, 4))
    narrow_q, narrow_k = heads.narrowed(4)
    assert narrow_q.shape == narrow_k.shape == (2, 4, 16)
    torch.testing.assert_close(narrow_q.mT @ narrow_k, q.mT @ k, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("to", TARGETS)
def test_the_first_stage_brings_every_layer_nearer(to, runs, tmp_path, teacher):
    made = conversion(tmp_path / "out", teacher, runs, to=to, tokens=24000)
    made.take()
    errors, layered = [], LayerTrainer.errors

    def fit(trainer, stage, ends):
        batch = trainer.batches().next_batch()
        errors.append({k: e.item() for k, e in layered(trainer, batch).items()})
        trainer.fit()
        errors.append({k: e.item() for k, e in layered(trainer, batch).items()})
        before, _ = checkpoint.load_run(made.folder(0))
        for name, weight in trainer.model.state_dict().items():
            if ".mixer" not in name:  # all else is the teacher's, and stays
                assert torch.equal(weight, before.state_dict()[name]), name

    made.train(1, "layers", fit)
    before, after = errors
    assert all(after[index] < 0.8 * before[index] for index in before), errors


def test_a_layer_costs_nothing_where_it_is_the_teachers_own():
    model, other = (build(attending(), seed) for seed in (0, 0))
    torch.nn.init.normal_(other.blocks[1].mixer.o_proj.weight)
    cost = costs(model, other, batches(), "float32")
    assert cost[0] == 0 != cost[1]
    assert kept(cost, 2) == ([1] if cost[1] > 0 else [0])
    assert kept({1: 0.1, 3: 0.5, 5: 0.2, 7: 0.3}, 2) == [3, 7]
    assert kept({1: 0.1, 3: 0.5}, 8) == [3]
    assert kept({1: 0.1, 3: 0.5}, 0) == []


def test_a_layer_costs_as_much_in_small_batches_as_in_one():
    """Also of chats, whose windows have few targets or many."""
    model, other = (build(attending(), seed) for seed in (0, 1))
    ids = torch.randint(300, (4, 24), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    targets[1, 1:] = targets[2, 2:] = IGNORE

    def batch(rows):
        of = targets[rows]
        return Batch(ids[rows], of, torch.zeros_like(of, dtype=torch.bool), int((of != IGNORE).sum()))

    whole = costs(model, other, [batch(slice(4))], "float32")
    each = costs(model, other, [batch(slice(i, i + 1)) for i in range(4)], "float32")
    assert each == pytest.approx(whole, abs=1e-5)
    targets[:] = IGNORE  # of a long prompt alone
    assert costs(model, other, [batch(slice(4))], "float32") == {0: 0.0, 1: 0.0}


def test_a_conversion_is_an_ordinary_run(runs, tmp_path, teacher):
    made, rows = conversion(tmp_path / "out", teacher, runs), []
    assert made.go(report=rows.append) is None
    assert [row["bits_per_byte"] for row in rows] == [row["bits_per_byte"] for row in made.notes["rows"]]
    assert len(rows) == 5
    assert sum(layer["attention"] for layer in made.notes["layers"]) == 1
    opened = checkpoint.open_run(tmp_path / "out")
    mixers = [block.mixer for block in opened.config.model.blocks]
    assert sorted(mixer.kind for mixer in mixers) == ["attention", "pdr2"]
    assert [mixer.window for mixer in mixers if mixer.kind == "attention"] == [16]
    total = sum(row["tokens"] for row in rows)
    assert 0.8 * made.config.tokens <= total <= made.config.tokens
    assert checkpoint.found_in(tmp_path / "out")[-1].progress.step == opened.config.train.steps
    shutil.rmtree(tmp_path / "out" / "stages")
    assert made.go(report=rows.append) is None
    assert len(rows) == 5 and not (tmp_path / "out" / "stages").exists()


def test_the_suite_compares_the_same_targets_with_more_and_fewer_tokens_before_them(runs, tmp_path, teacher):
    """Of the model and of its teacher, past windows of the teacher's training."""
    made = conversion(tmp_path / "out", teacher, runs, seq_len=4, batch_size=32)
    assert made.go() is None
    subject = Subject(open_model(tmp_path / "out"), runs.shards.split("heldout"), seq_len=16)
    found = measure(subject, Options(tokens=4 * 40, texts=2, contexts=(16,), rounds=1))
    for name in ("teacher", "converted"):
        past = found["position"][name]["past"]
        assert list(past) == ["4", "16", "64"]
        assert past["4"]["low"] <= past["4"]["bits_per_byte"] <= past["4"]["high"]
        assert past["64"] is None
    its, own = (found["position"][name]["past"]["16"]["bits_per_byte"] for name in ("teacher", "converted"))
    (said,) = [line for line in lines(found) if line.startswith("more than 16 tokens")]
    assert f"{its:+.3f} (" in said
    assert f"{own:+.3f} (" in said
    assert not any(line.startswith("more than 64") for line in lines(found))


def test_the_text_has_its_share_in_what_the_whole_learns(runs, tmp_path, teacher):
    """Of the loss of stage whole alone."""
    mixes, losses = [], []

    def fit(trainer, name, ends):
        mixes.append((name, trainer.config.train.teacher_mix))
        if name == "whole":
            batch = trainer.batches().next_batch()
            trainer.backward(batch, 1.0)
            gradients = torch.cat(
                [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
            )
            losses.append(gradients.clone())
            return 15
        return trainer.fit(until=1) or (trainer.save() and None)

    for mix in (1.0, 0.5, 0.25):
        conversion(tmp_path / f"{mix}", teacher, runs, teacher_mix=mix).go(fit)
    assert mixes == [pair for mix in (1.0, 0.5, 0.25) for pair in (("layers", 1.0), ("whole", mix))]
    one, half, quarter = losses
    text = 2 * half - one
    torch.testing.assert_close(quarter, 0.25 * one + 0.75 * text, rtol=1e-4, atol=1e-5)
    assert (text - one).norm() > 0.1 * one.norm()
    with refused(ConfigError, "teacher_mix", 1.5):
        conversion(tmp_path / "more", teacher, runs, teacher_mix=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["layers", "whole", "text"])
def test_it_resumes_bit_for_bit(stage, runs, tmp_path, teacher, monkeypatch):
    whole = conversion(tmp_path / "whole", teacher, runs)
    whole.go()

    def stops(trainer, name, ends):
        if name != stage:
            return trainer.fit()
        trainer.fit(until=trainer.config.train.steps // 2)
        return 15

    cut = conversion(tmp_path / "cut", teacher, runs)
    assert cut.go(stops) == 15
    monkeypatch.setitem(RATES, "text", 1.0)  # another version's are not those of what was begun
    monkeypatch.setitem(SHARES, "text", 0.4)
    again = Conversion(tmp_path / "cut", asked_of(tmp_path / "cut"), runs.tokenizer, runs.shards)
    assert again.go() is None
    one, other = (checkpoint.load_run(tmp_path / name)[0].state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.notes["rows"] == again.notes["rows"]
    assert whole.notes["layers"] == again.notes["layers"]


def test_a_stage_killed_before_its_first_checkpoint_keeps_the_dtype_it_chose(
    runs, tmp_path, teacher, monkeypatch
):
    """Another timing would choose another one, and end with other weights."""
    seen = []

    def killed(trainer, name, ends):
        seen.append(trainer.config.train.dtype)
        return 15

    for faster in ("bfloat16", "float32"):
        monkeypatch.setattr(loop, "faster", lambda *_, dtype=faster: dtype)
        conversion(tmp_path / "out", teacher, runs, dtype="auto").go(killed)
    assert seen == ["bfloat16", "bfloat16"]


def test_windows_that_choices_read_are_those_of_the_version_that_began(runs, tmp_path, teacher, monkeypatch):
    made = conversion(tmp_path / "now", teacher, runs, batch_size=2)
    monkeypatch.setattr(conversions, "ASKED", 6)
    again = Conversion(made.run, asked_of(made.run), runs.tokenizer, runs.shards)
    assert [len(c.batches(10)) for c in (made, again)] == [16, 16]
    write_json(
        made.run / "convert.json", {"config": dump(made.config), "layers": [], "rows": []}
    )  # of before
    again = Conversion(made.run, asked_of(made.run), runs.tokenizer, runs.shards)
    assert len(again.batches(10)) == 4


def test_a_teacher_that_has_changed_is_refused(runs, tmp_path, teacher):
    its = tmp_path / "teacher"
    shutil.copytree(teacher, its)
    conversion(tmp_path / "run", its, runs).go(lambda trainer, stage, ends: trainer.fit(until=1) or 2)
    again = Conversion(tmp_path / "run", asked_of(tmp_path / "run"), runs.tokenizer, runs.shards)
    shutil.rmtree(its)
    runs.trainer(its, attending(), steps=1).fit()
    with refused(ConfigError, "teacher", its):
        Conversion(tmp_path / "run", asked_of(tmp_path / "run"), runs.tokenizer, runs.shards)
    notes = {name: value for name, value in again.notes.items() if name != "teacher"}
    write_json(tmp_path / "run" / "convert.json", notes)  # of before
    Conversion(tmp_path / "run", asked_of(tmp_path / "run"), runs.tokenizer, runs.shards)


def test_stopped_where_layers_are_chosen_it_knows_them_later(runs, tmp_path, teacher, monkeypatch):
    cut = conversion(tmp_path / "cut", teacher, runs)

    def note(report, name, model, plain=cut.note):
        if name == "layers chosen":
            raise KeyboardInterrupt
        plain(report, name, model)

    monkeypatch.setattr(cut, "note", note)
    with pytest.raises(KeyboardInterrupt):
        cut.go()
    again = Conversion(tmp_path / "cut", asked_of(tmp_path / "cut"), runs.tokenizer, runs.shards)
    again.go()
    assert {row["layer"] for row in again.notes["layers"]} == set(again.layers)


def test_the_minutes_are_kept_to(runs, tmp_path, teacher, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(conversions.time, "perf_counter", lambda: next(clock) / 1000)
    ends = []

    def fit(trainer, stage, until):
        ends.append((stage, until, trainer.config.train.steps))
        trainer.fit(until=1)
        return None if stage != "text" else 15

    made = conversion(tmp_path / "out", teacher, runs, tokens=0, minutes=1.0)
    made.began = time.monotonic()
    made.go(fit)
    assert [name for name, *_ in ends] == ["layers", "whole", "text"]
    assert ends[0][1] < ends[1][1] < ends[2][1]
    assert ends[2][1] == pytest.approx(made.began + 60 * (1 - conversions.CLOSING))
    assert all(steps >= 8 for *_, steps in ends)


def test_too_few_minutes_are_told_what_would_do(runs, tmp_path, teacher, monkeypatch):
    """What was read and measured before the first stage counts: the bound is beyond the minutes that were asked for."""
    monkeypatch.setattr(conversions.Trainer, "estimate", lambda trainer: Estimate(5.0, 0))
    made = conversion(tmp_path / "out", teacher, runs, tokens=0, minutes=2.0)
    made.began = time.monotonic() - 60 * 3.5
    with pytest.raises(ConfigError, match=r"minutes = 2.0, must be ≥ 8, or else tokens"):
        made.go()
    enough = conversion(tmp_path / "enough", teacher, runs, tokens=0, minutes=8.0)
    enough.began = time.monotonic() - 60 * 3.5
    assert enough.go(lambda trainer, stage, ends: 15) == 15


def test_too_few_minutes_are_refused_after_a_pass_of_the_teacher(runs, tmp_path, teacher, monkeypatch):
    """Nothing that takes long comes before: no text is measured."""
    monkeypatch.setattr(conversions, "pass_seconds", lambda model, seq_len: 0.1)
    made = conversion(tmp_path / "out", teacher, runs, tokens=0, minutes=2.0)
    made.began = time.monotonic()
    with pytest.raises(ConfigError, match=r"minutes = 2.0, must be ≥ \d+, or else tokens"):
        made.go()
    assert not made.notes["rows"]


def test_measurements_take_a_small_part_of_the_minutes(runs, tmp_path, teacher, monkeypatch):
    """The same held-out tokens after each stage, also of a conversion that goes on."""
    said = []

    @contextmanager
    def doing(what):
        said.append(what)
        yield

    monkeypatch.setattr(conversions, "pass_seconds", lambda model, seq_len: 0.05)
    made = conversion(tmp_path / "out", teacher, runs, tokens=0, minutes=10.0)
    made.began, made.doing = time.monotonic(), doing
    made.allot()
    window = 0.05 * made.config.seq_len
    limit, windows = made.notes["limit"], made.notes["windows"]
    assert 0.8 * 0.03 * 600 <= limit * 0.05 <= 0.03 * 600
    assert windows < conversions.ASKED and made.config.batch_size == 1  # for as many updates as there can be
    assert 0.1 * 600 / 2 <= windows * window * (2 + len(made.layers)) <= 0.1 * 600
    assert sum(len(batch.ids_BT) for batch in made.batches(10)) in range(
        windows - made.config.batch_size + 1, windows + 1
    )
    made.go(lambda trainer, stage, ends: trainer.fit(until=1) or (15 if stage == "whole" else None))
    monkeypatch.setattr(conversions, "pass_seconds", None)  # a resumed one asks no more
    again = Conversion(made.run, asked_of(made.run), runs.tokenizer, runs.shards)
    assert again.config.batch_size == 1
    again.go(lambda trainer, stage, ends: trainer.fit(until=2))
    assert {row["measured"] for row in again.notes["rows"]} == {limit}
    assert [what.split(":")[0] for what in said[:3]] == [
        "timing a pass of the teacher", "measuring on held-out text", "taking over the teacher's weights",
    ]  # fmt: skip


def test_what_cannot_be_converted_is_refused(runs, tmp_path, teacher):
    bare = replace(attending(), blocks=(BlockConfig(config_of("gla", heads=2), None),))
    with refused(ConfigError, "run"):
        in_place(bare, "gdn")
    with refused(ConfigError, "to", "perspective2", "gdn", "kda", "ssd"):
        in_place(attending(head_dim=24), "perspective2")
    assert in_place(attending(head_dim=24), "kda")
    with refused(ConfigError, "to", "drm"):
        in_place(attending(), "drm")
    for both, of_them in {(100, 1.0): 2, (0, 0.0): 0}.items():
        with refused(ConfigError, "tokens", "minutes", of_them):
            ConvertConfig("run", tokens=both[0], minutes=both[1])
    with refused(ConfigError, "tokens", 100):
        conversion(tmp_path / "few", teacher, runs, tokens=100).go()
    with refused(ConfigError, "to", "other"):
        config(teacher, runs, to="other")
    with refused(CheckpointError, tmp_path):
        asked_of(tmp_path)


def test_a_perspective_loses_its_attention_too(runs, tmp_path):
    """Its layers read the token before already, and values lean on those of a layer that is no attention."""
    run = tmp_path / "teacher"
    runs.trainer(run, runs.small("perspective2-tiny", kv_heads=2), steps=6, eval_every=0, save_every=0).fit()
    made = conversion(tmp_path / "out", run, runs, to="kda", keep=0)
    assert made.go() is None
    mixers = [block.mixer.kind for block in checkpoint.load_config(tmp_path / "out").model.blocks]
    assert mixers == ["pdr2", "kda", "pdr2", "kda"]
    with refused(ConfigError, "first_values", "rwkv7", "perspective2", "gdn", "kda"):
        student(checkpoint.load_config(run).model, "rwkv7", [1, 3], 0)


def test_a_target_without_a_place_for_attention_is_no_target():
    assert "adr" not in targets()
    assert "transformer" not in targets()


def test_a_model_moved_with_its_stages_goes_on(runs, tmp_path, teacher):
    made = conversion(tmp_path / "out", teacher, runs)
    made.go(lambda trainer, stage, ends: trainer.fit() if stage != "text" else 15)
    shutil.move(tmp_path / "out", tmp_path / "moved")
    again = Conversion(tmp_path / "moved", asked_of(tmp_path / "moved"), runs.tokenizer, runs.shards)
    assert again.go() is None


def test_the_card_names_the_model_it_was(runs, tmp_path, teacher):
    from perspectron.interop.hf.card import card

    shutil.copytree(teacher, run := tmp_path / "run")
    assert "Converted" not in card(open_model(run), "it")
    tokens = checkpoint.open_run(run).checkpoint.progress.tokens
    first, last = (
        {"stage": "text", "tokens": n, "bits_per_byte": 2.5 + n, "measured": 7} for n in (0, tokens)
    )
    write_json(run / conversions.FILE, {"config": {"teacher": str(teacher)}, "rows": [first, last]})
    assert f"Converted from `{teacher.name}`" in (told := " ".join(card(open_model(run), "it").split()))
    assert "2.5000 bits per byte" in told and f"{tokens / 1e6:.3g} M tokens" in told
    last["tokens"] += 1
    write_json(run / conversions.FILE, {"config": {"teacher": str(teacher)}, "rows": [first, last]})
    assert (
        "2.5000" not in (told := card(open_model(run), "it")) and f"conversion from `{teacher.name}`" in told
    )
    write_json(run / conversions.FILE, {"rows": 3})
    with refused(CheckpointError, run / conversions.FILE):
        card(open_model(run), "it")
