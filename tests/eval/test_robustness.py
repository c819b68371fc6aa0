"""Contexts that change as said, targets that do not, and a state that is the same after it was on disk."""

import math
from copy import copy

import pytest
import torch

from perspectron import presets
from perspectron.eval import robustness
from perspectron.eval.reading import byte_counts, nats, stretches
from perspectron.eval.robustness import Options, corrupted, lines, measure, shuffled
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import refused

IDS = torch.arange(1, 3 * 41 + 1).view(3, 41)


@pytest.mark.parametrize("window", [2, 7, 40, 1000])
def test_shuffling_stays_within_its_windows_and_leaves_the_first(window):
    found = shuffled(IDS, window, seed=0)
    assert torch.equal(found[:, 0], IDS[:, 0])
    for start in range(1, 41, window):
        part = slice(start, start + window)
        assert torch.equal(found[:, part].sort(1).values, IDS[:, part])
    assert (found != IDS).float().mean() > 0.3
    assert not torch.equal(found[0] - IDS[0], found[1] - IDS[1])
    assert torch.equal(found, shuffled(IDS, window, seed=0))
    assert not torch.equal(found, shuffled(IDS, window, seed=1))


def test_corruption_is_as_much_as_asked_and_grows():
    ids = torch.zeros(50, 401, dtype=torch.int64)
    before = ids.bool()
    for share in (0.05, 0.1, 0.4, 1.0):
        hit = corrupted(ids, share, torch.arange(1, 300), seed=0) != 0
        assert hit[:, 1:].float().mean().item() == pytest.approx(share, abs=0.01)
        assert not hit[:, 0].any()
        assert hit[before].all()
        before = hit
    found = corrupted(ids, 1.0, torch.arange(1, 300), seed=0)[:, 1:]
    assert (found.min().item(), found.max().item()) == (1, 299)
    assert torch.equal(corrupted(ids, 0.0, torch.arange(1, 300), seed=0), ids)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("design", presets.DESIGNS)
def test_a_state_from_disk_goes_on_to_the_bit(subject, design, dtype):
    found = measure(subject(design, dtype=dtype), Options(tokens=256, windows=(), shares=()))
    assert found["resumed_equal"] is True
    assert found["resumed"] == found["whole"]


def test_a_state_that_came_back_otherwise_is_told(subject, monkeypatch):
    monkeypatch.setattr(robustness, "load_state", lambda _, model: model.init_state(4))
    found = measure(subject(), Options(tokens=256))
    assert found["resumed_equal"] is False
    assert found["resumed"] != found["whole"]
    assert found["worse"]["no_context"]["bits_per_byte"] != 0
    assert "NOT the same" in robustness.lines(found)[1]


def test_the_numbers_are_those_of_plain_reading(subject):
    subject = subject("perspective", model_dtype=torch.float64)
    found = measure(subject, Options(tokens=4 * 64, windows=(4,), shares=(0.0, 0.3)))
    ids_NT, learned_NT = stretches(subject.split, 64, 4)
    assert (found["context"], found["stretches"], found["tokens"]) == (48, 4, 64)
    text_bytes = byte_counts(subject.tokenizer, ids_NT[:, 49:], learned_NT[:, 48:]).sum().item()

    def bits(*context: torch.Tensor) -> float:
        read = torch.cat([*context, ids_NT[:, 48:]], 1)
        return nats(subject, read)[0][:, -16:].sum().item() / math.log(2) / text_bytes

    whole = bits(ids_NT[:, :48])
    assert found["bits_per_byte"] == pytest.approx(whole, rel=1e-9)
    assert found["whole"] == pytest.approx(whole * math.log(2) * text_bytes / 64, rel=1e-9)
    assert found["no_context"] == pytest.approx(bits(), rel=1e-9)
    other = bits(shuffled(ids_NT[:, :48], 4, 0))
    assert found["shuffled"]["within_4"] == pytest.approx(other, rel=1e-9)
    assert found["worse"]["shuffled_within_4"]["bits_per_byte"] == pytest.approx(other - whole, abs=1e-9)
    assert set(found["shuffled"]) == {"within_4", "whole"}
    assert found["worse"]["corrupted_0.0"]["bits_per_byte"] == 0
    other = bits(corrupted(ids_NT[:, :48], 0.3, torch.arange(1, subject.tokenizer.vocab_size), 0))
    assert found["corrupted"][1]["bits_per_byte"] == pytest.approx(other, rel=1e-9)


def test_what_is_not_learned_is_no_target(subject):
    it, halves = subject("perspective", model_dtype=torch.float64), copy(subject("perspective").split)
    object.__setattr__(it, "split", halves)
    halves.learned = halves.starts + 57  # of targets at 49 to 64 the last eight
    found = measure(it, Options(tokens=4 * 64, windows=(4,), shares=(0.3,)))
    ids_NT = stretches(halves, 64, 4)[0]
    text_bytes = byte_counts(it.tokenizer, ids_NT[:, 57:]).sum().item()
    expected = nats(it, ids_NT)[0][:, -8:].sum().item()
    assert found["tokens"] == 32 and found["resumed_equal"]
    assert found["bits_per_byte"] == pytest.approx(expected / math.log(2) / text_bytes, rel=1e-9)
    assert found["whole"] == pytest.approx(expected / 32, rel=1e-9)
    halves.learned = halves.starts + 4096
    with refused(DataError, halves.name):
        measure(it, Options(tokens=4 * 64))


def test_a_model_to_which_all_is_alike_does_not_care(subject):
    subject = subject()
    with torch.no_grad():
        subject.model.embedding.weight.zero_()
    found = measure(subject, Options(tokens=512))
    assert len(found["worse"]) == 1 + 3 + 4
    assert all(more == {"bits_per_byte": 0, "low": 0, "high": 0} for more in found["worse"].values())


def test_few_stretches_have_no_interval(subject):
    found = measure(subject(), Options(tokens=3 * 64))
    assert found["stretches"] == 3
    assert all((more["low"], more["high"]) == (None, None) for more in found["worse"].values())
    assert robustness.lines(found)[-1].endswith("(no interval, 3 stretches are too few)")
    found = measure(subject(), Options(tokens=4 * 64))
    assert all(more["low"] < more["high"] for more in found["worse"].values())


def test_it_depends_on_the_seed_alone(subject):
    one, other = (measure(subject(seed=seed), Options(tokens=256)) for seed in (0, 1))
    assert measure(subject(seed=0), Options(tokens=256)) == one
    assert one["whole"] == other["whole"]
    assert one["corrupted"] != other["corrupted"]


def test_windows_that_the_context_is_too_short_for_are_told(subject):
    found = measure(subject(), Options(tokens=256, windows=(4, 1000)))
    assert found["too_long"] == [1000] and set(found["shuffled"]) == {"within_4", "whole"}
    assert f"shuffled within 1000: not measured, the context has {found['context']} tokens" in lines(found)


def test_out_of_bounds_is_named(subject):
    for wrong in ({"tokens": -1}, {"windows": (1,)}, {"shares": (1.5,)}):
        with refused(ConfigError, *wrong):
            Options(**wrong)
    with refused(ConfigError, "seq_len", 1):
        measure(subject(seq_len=1))
