"""The page of a run: equal to its metrics while it trains and after, over stops, and no part of the training."""

import gc
import html
import json
import math
import re
import weakref
from dataclasses import replace

import pytest
import torch

import perspectron
from perspectron.decode.generate import generate
from perspectron.eval import written as of_model
from perspectron.eval.written import heats, written
from perspectron.train import page
from perspectron.train.metrics import read_metrics
from perspectron.train.page import PAGE, SAMPLES, History, course, losses, prompts, read_samples
from perspectron.util.errors import NonFiniteError
from perspectron.util.numbers import printable
from perspectron.util.page import Curve, drawn, ticks
from tests.train.conftest import small
from tests.train.test_resume import DROPPED, EXPERTS


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """A page for each line, and samples at each measurement."""
    monkeypatch.setattr(page, "EVERY", 0.0)
    monkeypatch.setattr(page, "SHARE", math.inf)
    monkeypatch.setattr(page, "OF_SAMPLES", math.inf)


def facts(text: str) -> dict[str, str]:
    return {html.unescape(k): html.unescape(v) for k, v in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)}


def rows(text: str) -> list[list[str]]:
    return [
        re.findall(r"<(?:td|th scope=\"row\")>(.*?)</", row) for row in re.findall("<tr>(.*?)</tr>", text)
    ][1:]


def state(text: str) -> str:
    return re.search(r'<b id="state">(.*?)</b>', text)[1]


def agrees(run, text):
    """True if a page says what metrics.jsonl does."""
    lines = read_metrics(run)
    last = next(line for line in reversed(lines) if "loss" in line)
    held = [line for line in lines if "heldout_bits_per_byte" in line]
    told = facts(text)
    scale = page.bits_per_nat(held)
    (name,) = [key for key in told if key.startswith("training loss")]
    assert ("nats" in name) == (scale is None)
    assert told[name] == f"{last['loss'] * (scale or 1):.3f}"
    assert told["tokens per second"] == f"{last['tokens_per_second']:,.0f}"
    if held:
        best = min(line["heldout_bits_per_byte"] for line in held)
        assert told["best held-out loss, bits per byte"] == f"{best:.3f}"
    assert [(row[0], row[-1]) for row in rows(text)] == [
        (str(line["step"]), f"{line['heldout_bits_per_byte']:.3f}") for line in held
    ]


def test_it_says_what_the_metrics_do_while_it_trains_and_after(runs, tmp_path):
    trainer, seen = runs.trainer(tmp_path, steps=8), []

    def report(line):
        seen.append(text := (tmp_path / PAGE).read_text())
        agrees(tmp_path, text)
        assert "training" in state(text) and f"{line['step']} of 8" in state(text)
        assert {"time left", "peak memory of training", "parameters"} <= facts(text).keys()

    trainer.fit(report=report, write=written)
    assert len(set(seen)) == len(seen) == 10
    assert all("location.reload" in text for text in seen)
    text = (tmp_path / PAGE).read_text()
    agrees(tmp_path, text)
    assert "location.reload" not in text and "time left" not in facts(text)
    assert "of 8" not in state(text)
    assert text.count("<figure") == 3 and "http" not in text


def test_it_stands_still_between_two_pages(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "EVERY", 1e6)
    seen = []
    runs.trainer(tmp_path, steps=6).fit(report=lambda _: seen.append((tmp_path / PAGE).read_text()))
    assert len(set(seen)) == 1
    agrees(tmp_path, (tmp_path / PAGE).read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"model": EXPERTS, "recompute": True}, {"model": DROPPED}, {"model": "transformer-tiny"},
        {"dtype": "bfloat16"}, {"model": small("gpt2-tiny", positions=32)},
    ],
    ids=["plain", "experts", "dropout", "transformer", "bfloat16", "positions"],
)  # fmt: skip
def test_samples_change_no_bit(runs, tmp_path, settings):
    before, modes = torch.get_rng_state(), set()

    def watched(model, tokenizer, texts):
        modes.add(model.training)
        state = torch.get_rng_state()
        found = written(model, tokenizer, texts)
        assert torch.equal(torch.get_rng_state(), state)
        modes.add(model.training)
        return found

    one, other = runs.trainer(tmp_path / "one", **settings), runs.trainer(tmp_path / "two", **settings)
    torch.set_rng_state(before)
    one.fit(write=watched)
    torch.set_rng_state(before)
    other.fit()
    runs.assert_same(runs.outcome(one), runs.outcome(other))
    assert modes == {True}
    assert [line["step"] for line in read_samples(tmp_path / "one")] == [4, 8, 12, 14]
    assert not (tmp_path / "two" / SAMPLES).exists()


def test_samples_are_what_the_checkpoint_writes_after_the_same_prompts(runs, tmp_path):
    trainer = runs.trainer(tmp_path, steps=8)
    trainer.fit(write=written)
    lines = read_samples(tmp_path)
    asked = [[text["prompt"] for text in line["texts"]] for line in lines]
    assert asked == [prompts(trainer.heldout_split, trainer.tokenizer)] * 2
    model, tokenizer = perspectron.load(tmp_path / "checkpoints" / "step-00000008")
    options = {"max_tokens": of_model.TOKENS, "sampling": of_model.SAMPLING}
    texts = [printable(text) for text in generate(model, tokenizer, asked[-1], **options).texts]
    assert [text["text"] for text in lines[-1]["texts"]] == texts
    shown = (tmp_path / PAGE).read_text()
    assert all(
        str(html.escape(text)) in shown.replace("&#34;", "&quot;").replace("&#39;", "&#x27;")
        for text in texts
    )


def test_samples_take_no_more_than_their_share(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "OF_SAMPLES", 0.0)
    runs.trainer(tmp_path).fit(write=written)
    assert [line["step"] for line in read_samples(tmp_path)] == [4, 14]  # the first and the last


def test_a_resumed_run_keeps_its_history(runs, tmp_path):
    runs.trainer(tmp_path).fit(until=9, write=written)
    text = (tmp_path / PAGE).read_text()
    assert "9 of 14" in state(text) and "location.reload" not in text
    agrees(tmp_path, text)
    with (tmp_path / SAMPLES).open("a") as file:  # of an update that is made again, and a torn line
        file.write(
            json.dumps({"step": 12, "tokens": 1, "texts": [{"prompt": "a", "text": "not kept"}]}) + '\n{"st'
        )
    again = runs.trainer(tmp_path)
    again.fit(write=written)
    assert [line["step"] for line in read_samples(tmp_path)] == [4, 8, 12, 14]
    text = (tmp_path / PAGE).read_text()
    agrees(tmp_path, text)
    assert "not kept" not in text and len(rows(text)) == 4
    written_then = (tmp_path / PAGE).read_bytes()
    runs.trainer(tmp_path).fit(write=written)
    assert (tmp_path / PAGE).read_bytes() == written_then


def test_a_hostile_text_stays_text(runs, tmp_path):
    bad = "</pre><script>alert('x')</script>\x1b[31m"
    run = tmp_path / "<img src=x onerror=alert(1)>\udcff"
    config = runs.config(steps=2)
    config = replace(config, model=replace(config.model, name='"><svg onload=alert(2)>'))
    runs.start(run, config).fit(write=lambda model, tokenizer, texts: [bad for _ in texts])
    text = (run / PAGE).read_text()
    assert not re.search(r"<script>alert|<img|<svg onload|\x1b", text)
    assert "&lt;script&gt;alert" in text and "&lt;img src=x" in text


@pytest.mark.parametrize("name", [PAGE, SAMPLES])
def test_a_page_that_cannot_be_written_is_said_once(runs, tmp_path, name):
    trainer, other = runs.trainer(tmp_path / "one"), runs.trainer(tmp_path / "two")
    (tmp_path / "one" / name / "full").mkdir(parents=True)
    with pytest.warns(UserWarning, match=name) as said:
        trainer.fit(write=written)
    assert len(said) == 1
    other.fit()
    runs.assert_same(runs.outcome(trainer), runs.outcome(other))


def test_samples_that_cannot_be_drawn_are_said_once_and_the_training_goes_on(runs, tmp_path):
    def fails(model, tokenizer, texts):
        raise NonFiniteError("a logit is nan")

    trainer, other = runs.trainer(tmp_path / "one"), runs.trainer(tmp_path / "two")
    with pytest.warns(UserWarning, match="a logit is nan") as said:
        trainer.fit(write=fails)
    assert len(said) == 1
    other.fit()
    runs.assert_same(runs.outcome(trainer), runs.outcome(other))


def test_a_training_that_fails_says_so(runs, tmp_path, monkeypatch):
    trainer = runs.trainer(tmp_path)

    def step():
        raise NonFiniteError("step 1: loss is <nan>")

    monkeypatch.setattr(trainer, "step", step)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    text = (tmp_path / PAGE).read_text()
    assert "loss is &lt;nan&gt;" in state(text) and 'class="state failed"' in text


def line(step, loss=1.0, **more):
    return {
        "step": step,
        "tokens": 8 * step,
        "seconds": step / 2,
        "loss": loss,
        "tokens_per_second": 16.0,
    } | more


def test_a_long_course_has_few_points_and_the_same_means():
    history = History()
    for step in range(1, 5001):
        history.note(line(step, loss=step, aux={"route_gate": 0.5}))
    points = history.points("loss", "tokens")
    assert page.POINTS / 2 < len(points) < 2 * page.POINTS
    size = points[0][0] / 8
    for n, (tokens, mean) in enumerate(points[:-1]):
        assert tokens == 8 * size * (n + 1) and mean == pytest.approx(size * n + (size + 1) / 2)
    assert points[-1][0] == 40_000
    assert [figure.title for figure in history.figures()][-1] == "route gate"


def test_what_few_updates_report_has_the_mean_of_those():
    history = History()
    for step in range(1, 5002):
        history.note(line(step, loss=1.0, aux={} if step % 3 else {"drift": 0.5}))
    points = history.points("drift", "tokens")
    assert points and {mean for _, mean in points} == {0.5}
    assert [figure.title for figure in history.figures()][-1] == "drift"


@pytest.mark.parametrize("value", [None, math.nan, math.inf], ids=str)
def test_what_is_not_finite_is_no_point(value):
    history = History()
    for step in range(1, 5):
        history.note(line(step, aux={"drift": value if step == 2 else 0.5}))
    assert [mean for _, mean in history.points("drift", "tokens")] == [0.5] * 3


@pytest.mark.parametrize(
    "values", [[2.0, 2.0], [0.0], [1e8, 5.0, 4.0], [3e-7, 1e-7], [6.0, 0.0], [1e300, -1e300]], ids=str
)
def test_figures_hold_any_finite_losses(values):
    history = History()
    for step, value in enumerate(values, 1):
        history.note(line(step, value))
    history.note({"step": len(values), "heldout_bits_per_byte": values[-1], "heldout_perplexity": 1.0})
    for figure in history.figures():
        paths = " ".join(path + dots for _, path, dots in figure.lines)
        numbers = [float(number) for number in re.findall(r"-?[\d.]+|nan|inf", paths)]
        assert numbers and all(-1001 <= number <= 2001 for number in numbers)
        assert all(-1 <= at <= 101 for at, _ in (*figure.x_ticks, *figure.y_ticks))


def test_losses_of_several_models_share_their_axes():
    """A token of 2 bytes: 1.4 nats of it are about a bit per byte."""
    one, other = History(), History()
    for history, loss in ((one, 2.8), (other, 1.4)):
        history.note(line(1, loss))
        history.note(line(2, loss))
        bits = loss / math.log(4)
        history.note({"step": 2, "heldout_bits_per_byte": bits, "heldout_perplexity": math.exp(loss)})
    by_tokens, by_time = losses({"<one>": one, "other": other})
    assert by_tokens.x == "tokens" and by_time.x != "tokens" and "bits per byte" in by_tokens.title
    first, second = (
        [c for c, *_ in by_tokens.lines if c.colour == colour] for colour in ("accent", "second")
    )
    assert first[0].name == "<one>" and first[0].points[0][1] == pytest.approx(2 * second[0].points[0][1])
    assert first[1].dots and first[1].points == [(16, pytest.approx(2.8 / math.log(4)))]


def test_a_figure_puts_points_where_its_ticks_are():
    figure = drawn("title", "x", [Curve("a", [(0.0, 10.0), (5.0, 0.0), (10.0, 10.0)])])
    ((_, path, _),) = figure.lines
    (x0, y0), (_, y1), (x2, _) = ((float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path))
    places = {text: at for at, text in figure.y_ticks}
    assert (x0, x2) == (0, 1000)
    assert 10 * places["10"] == pytest.approx(y0, abs=0.1) and 10 * places["0"] == pytest.approx(y1, abs=0.1)
    assert drawn("title", "x", [Curve("a", [])]) is None
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])


def test_a_course_of_nothing_has_no_figure(tmp_path):
    assert course(tmp_path).figures() == [] and course(tmp_path).facts() == []


def test_a_memory_that_fades_has_pictures(runs, tmp_path):
    made = heats(runs.trainer(tmp_path / "one", small("perspective2-tiny")))
    assert 1 <= len(made) <= of_model.LAYERS and all(svg.startswith("<svg") for svg in made)
    assert heats(runs.trainer(tmp_path / "two", "transformer-tiny")) == []


def test_a_trainer_and_its_text_are_gone_with_it(runs, tmp_path):
    """No circle of the page keeps them until the garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        trainer = runs.trainer(tmp_path / "run", steps=2)
        trainer.fit(write=written)
        known = weakref.ref(trainer)
        del trainer
        assert known() is None
    finally:
        gc.enable()


def test_a_figure_is_drawn_of_whatever_stands_in_a_file_of_metrics():
    """Such files are edited by hand, too."""
    for points in ([(-3.0, 1.0), (-2.0, 2.0)], [(1.0, 0.0), (5e-324, 5e-324)], [(0.0, 1.0), (0.0, 1.0)]):
        figure = drawn("loss", "tokens", [Curve("", points)])
        assert "nan" not in figure.lines[0][1] and "inf" not in figure.lines[0][1]
    assert drawn("loss", "tokens", [Curve("", [(1.0, -1e308), (2.0, 1e308)])]) is None
    assert ticks(0.0, 0.0) == ticks(1.0, 0.0) == ticks(-1e308, 1e308) == []
