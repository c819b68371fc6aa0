"""Who measures when, with a clock that only tests move."""

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.eval import timing
from perspectron.eval.timing import MOST, Spread, take_turns, timed


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_contenders_alternate_and_the_first_round_is_not_told():
    order = []

    def called(name, answers):
        def call():
            order.append(name)
            return next(answers)

        return call

    found = take_turns({"a": called("a", iter([9, 1, 2])), "b": called("b", iter([8, 3, 4]))}, 2)
    assert "".join(order) == "abbaab"
    assert found == {"a": [1, 2], "b": [3, 4]}


@pytest.mark.parametrize(("cost", "expected"), [(0.5, 9), (1.0, 4), (6.0, 2), (1e-6, 2 * MOST)])
def test_quick_ones_go_on_for_some_seconds_and_slow_ones_end(clock, cost, expected):
    def call():
        clock[0] += cost
        return cost

    assert len(take_turns({"a": call}, 2, seconds=5.0)["a"]) == expected


def test_what_is_left_to_a_device_counts(clock, monkeypatch):
    def finish(device):
        clock[0] += 2.0

    monkeypatch.setattr(torch.cuda, "synchronize", finish)
    assert timed(lambda: None, torch.device("cuda"), lambda: clock[0])() == 2.0
    assert timed(lambda: None, clock=lambda: clock[0])() == 0.0


def test_a_spread_is_the_median_and_the_middle_half():
    assert Spread.middle([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.middle([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_what_the_prompt_and_warming_up_read_from_disk_is_no_tokens(monkeypatch):
    """A prompt reads 1,000 bytes, waiting for a second for them; a token of those that warm up 100, and others 7."""
    model = perspectron.build(presets.get("perspective-tiny", d_model=32, rank=16, vocab_size=50))
    prefill, stepped = timing.prefill, timing.stepped
    reads, read, waited = iter([100.0] * timing.WARMUP + [7.0] * 3), [0.0], [0.0]

    def prompt(model, prompts):
        read[0], waited[0] = read[0] + 1000, waited[0] + 1
        return prefill(model, prompts)

    def token(*arguments):
        read[0] += next(reads)
        return stepped(*arguments)

    monkeypatch.setattr(timing, "prefill", prompt)
    monkeypatch.setattr(timing, "stepped", token)
    monkeypatch.setattr(model, "disk_reads", lambda: (read[0], waited[0]))
    found = timing.bench(model, 50, [1, 2, 3], 3)
    assert (found.missed, found.waited) == (7, 0)
