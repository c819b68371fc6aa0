"""Loss by position against plain forwards, and what more context gains where that is known."""

import itertools
import math
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from perspectron import presets
from perspectron.data import encode, open_corpus
from perspectron.eval import position, reading
from perspectron.eval.position import Options, measure
from perspectron.eval.reading import longest, nats, span, stretches
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import refused


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_in_chunks_as_in_one_pass(subject, design, monkeypatch):
    subject = subject(design, model_dtype=torch.float64)
    ids_NT = stretches(subject.split, 60, 3)[0]
    whole_NT = nats(subject, ids_NT)[0]
    monkeypatch.setattr(reading, "CHUNK", 3 * 7)
    torch.testing.assert_close(nats(subject, ids_NT)[0], whole_NT, rtol=0, atol=1e-9)
    with torch.no_grad():
        logits_BTV = subject.model(ids_NT[:, :-1]).logits
    plain_BT = -logits_BTV.log_softmax(2).gather(2, ids_NT[:, 1:, None])[..., 0]
    torch.testing.assert_close(whole_NT, plain_BT, rtol=0, atol=1e-9)


def test_no_loss_knows_what_follows(subject):
    subject = subject("perspective", model_dtype=torch.float64)
    ids_NT = stretches(subject.split, 60, 2)[0]
    other_NT = ids_NT.clone()
    other_NT[:, 41:] = 5
    before, after = (nats(subject, ids)[0] for ids in (ids_NT, other_NT))
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 40], after[:, 40])


def test_bins_are_those_of_plain_counting(subject):
    subject = subject("transformer", model_dtype=torch.float64)
    found = measure(subject, Options(tokens=4 * 128, stretches=4, contexts=()))
    assert (found["longest"], found["stretches"], found["carried"]) == (128, 4, True)
    lengths = [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 128)]
    assert [(b["from"], b["to"]) for b in found["bins"]] == lengths
    starts = [s for s, e in itertools.pairwise([*subject.split.starts, subject.split.tokens]) if e - s > 128]
    nats, size = np.zeros(128), np.zeros(128)
    for start in starts[:4]:
        ids = torch.from_numpy(subject.split.read(start, start + 129))
        with torch.no_grad():
            logits_TV = subject.model(ids[None, :-1]).logits[0].log_softmax(1)
        for t, target in enumerate(ids[1:].tolist()):
            nats[t] -= logits_TV[t, target].item()
            size[t] += len(subject.tokenizer.token_bytes(target))
    for b in found["bins"]:
        part = slice(b["from"], b["to"])
        assert b["tokens"] == 4 * (b["to"] - b["from"])
        assert b["bits_per_byte"] == pytest.approx(nats[part].sum() / math.log(2) / size[part].sum())


def test_what_is_not_learned_is_no_target(subject):
    """Prompts: of each document, half."""
    it = subject("transformer", model_dtype=torch.float64)
    halves = copy(it.split)
    halves.learned = halves.starts + 65
    object.__setattr__(it, "split", halves)
    found = measure(it, Options(tokens=4 * 128, stretches=4, contexts=(16,)))
    plain = measure(subject("transformer", model_dtype=torch.float64), Options(4 * 128, 4, (16,)))
    assert found["bins"][-1] == plain["bins"][-1] and found["bins"][-1]["tokens"] == 4 * 64
    assert all(b["tokens"] == 0 and math.isnan(b["bits_per_byte"]) for b in found["bins"][:-1])
    assert found["past"]["16"] == plain["past"]["16"]
    halves.learned = halves.starts + 125
    assert measure(it, Options(4 * 128, 4, (16,)))["past"]["16"]["tokens"] == 4 * 4


class Repeating:
    """A split of 12 documents of 600 tokens in which every token is the one `period` tokens ago."""

    name = "heldout"
    starts, tokens = np.arange(12) * 600, 12 * 600

    def __init__(self, period=100):
        self.period = period

    def is_learned(self, start, stop):
        return np.ones(stop - start, bool)

    def read(self, start, stop):
        blocks = np.random.Generator(np.random.PCG64(0)).integers(1, 257, (12, 1, self.period))
        whole = np.tile(blocks, (1, -(-600 // self.period), 1)).reshape(12, -1)[:, :600]
        return whole.reshape(-1)[start:stop]


class Long(Repeating):
    """8 documents, each long enough for 8,192 tokens of context."""

    starts, tokens = np.arange(8) * 16400, 8 * 16400

    def read(self, start, stop):
        blocks = np.random.Generator(np.random.PCG64(0)).integers(1, 257, (8, 1, 100))
        return np.tile(blocks, (1, 164, 1)).reshape(-1)[start:stop]


def test_more_context_gains_where_it_holds_what_is_needed(subject, periodic):
    """Within 32 + 16 tokens nothing repeats, so all targets gain the same; past 128 there is nothing to gain."""
    subject = subject(periodic(100))
    object.__setattr__(subject, "split", Repeating())
    found = measure(subject, Options(tokens=0, stretches=12, contexts=(32, 128, 512)))
    assert found["longest"] == 512
    assert found["falls_past"] == {"32": True, "128": False, "512": None}
    gain = found["past"]["32"]
    per_token = math.log2(0.9 * 300)
    ids_NT, learned_NT = stretches(Repeating(), 512, 12)
    text_bytes = int(reading.byte_counts(subject.tokenizer, ids_NT[:, -16:], learned_NT[:, -16:]).sum())
    assert gain["tokens"] == 12 * 16
    assert gain["bits_per_byte"] == pytest.approx(per_token * 12 * 16 / text_bytes, rel=1e-5)
    assert gain["low"] <= gain["bits_per_byte"] <= gain["high"]
    assert found["past"]["128"]["bits_per_byte"] == pytest.approx(0, abs=1e-6)
    assert found["why"] == {"512": "stretches of 512 tokens, 1024 are needed"}


@pytest.mark.parametrize(("period", "targets"), [(32, 0), (33, 1), (47, 15), (48, 16)])
def test_a_context_holds_exactly_as_many_tokens_as_it_says(subject, periodic, period, targets):
    """16 targets are read again after 32 tokens: of one with a period of 33 the first target gains, of one with 32
    none does, and only a period of 48 lies before what the last target sees."""
    subject = subject(periodic(period))
    object.__setattr__(subject, "split", Repeating(period))
    gain = measure(subject, Options(tokens=0, stretches=12, contexts=(32,)))["past"]["32"]
    ids_NT, learned_NT = stretches(Repeating(period), 512, 12)
    text_bytes = int(reading.byte_counts(subject.tokenizer, ids_NT[:, -16:], learned_NT[:, -16:]).sum())
    expected = math.log2(0.9 * 300) * 12 * targets / text_bytes
    assert gain["bits_per_byte"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_gain_that_is_not_there_is_seen_as_rarely_as_said(count):
    """One in 40 intervals lies above zero; quantiles of resampled stretches would at 4 be one in ten."""
    draw, texts = np.random.Generator(np.random.PCG64(0)), 4000
    nats = torch.from_numpy(draw.normal(0, 30, (texts, count)))
    text_bytes = torch.from_numpy(draw.integers(100, 400, (texts, count)))
    found = [span(nats_N, bytes_N) for nats_N, bytes_N in zip(nats, text_bytes, strict=True)]
    above, below = np.mean([low > 0 for low, _ in found]), np.mean([high < 0 for _, high in found])
    assert 0.015 < above < 0.035
    assert 0.015 < below < 0.035
    sure = [span(nats_N + 300, bytes_N) for nats_N, bytes_N in zip(nats[:200], text_bytes, strict=False)]
    assert np.mean([low > 0 for low, _ in sure]) > 0.95


def test_the_interval_by_hand():
    """1, 2, 3 and 4 bits of a byte each: deviation √(5/3), error half of it, times Student's 3.18245."""
    bits, one = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4)
    half = 3.18245 * math.sqrt(5 / 3) / 2
    assert span(bits * math.log(2), one) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-4)
    assert span(bits * math.log(2), 10 * one) == pytest.approx((0.25 - half / 10, 0.25 + half / 10), abs=1e-5)
    assert span(3 * one * math.log(2), one) == pytest.approx((3, 3))
    assert span(bits[:3], one[:3]) is None
    assert span(bits, 0 * one) is None


def test_few_stretches_have_no_interval(subject):
    found = measure(subject(), Options(tokens=0, stretches=3, contexts=(32,)))
    assert found["falls_past"] == {"32": None}
    assert found["why"] == {"32": "3 stretches, an interval needs 4"}


def test_the_default_reads_past_8192_tokens_where_the_text_does(subject, periodic):
    subject = subject(periodic(100))
    object.__setattr__(subject, "split", Long())
    found = measure(subject)
    assert found["longest"] == 16384
    assert found["falls_past"] == {"128": False, "512": False, "2048": False, "8192": False}


def test_a_design_with_a_table_reads_the_beginnings_of_what_others_read(subject, text, tmp_path, monkeypatch):
    """Also where documents that are too short for others would be long enough for its table."""
    for i in range(16):
        (tmp_path / f"{i:02}.txt").write_text(f"{i}: " + "quick brown fox and " * (20 if i < 8 else 200))
    split = encode(open_corpus(str(tmp_path), heldout=0.5), text[0], tmp_path / "data").split("train")
    read = dict[str, list[torch.Tensor]]()

    def kept(one, ids_BT):
        read.setdefault(one.model.config.name, []).append(ids_BT)
        return nats(one, ids_BT)

    monkeypatch.setattr(position, "nats", kept)
    for design in ("gpt2", "gla"):
        measure(replace(subject(design), split=split), Options(tokens=4 * 256, stretches=4, contexts=()))
    short, whole = (torch.cat(parts) for parts in read.values())
    assert short.shape[1] == 65 < whole.shape[1]
    assert short.tolist() == whole[:, :65].tolist()


@pytest.mark.parametrize("design", ["gpt2", "adr", "lens"])
def test_a_table_of_positions_ends_the_reading(subject, design):
    found = measure(subject(design), Options(tokens=0, stretches=4, contexts=(32, 64)))
    assert (found["longest"], found["carried"]) == (64, False)
    assert found["falls_past"]["32"] is not None
    assert found["falls_past"]["64"] is None
    assert found["why"] == {"64": "the table of positions ends at 64, 128 are needed"}


def test_a_measurement_is_the_same_again(subject):
    subject, options = subject(), Options(tokens=1024, contexts=(32,))
    found = measure(subject, options)
    assert measure(subject, options) == found
    assert "past 32: " in position.lines(found)[-1]


def test_stretches_lie_in_one_document_and_in_as_many_as_there_are(text):
    split = text[1]
    ids_NT = stretches(split, 150, 200)[0]
    assert not (ids_NT[:, 1:] == 0).any()
    sizes = np.diff([*split.starts, split.tokens])
    first = (ids_NT[:, 0] == 0).sum()
    assert first == (sizes > 150).sum() == split.documents
    assert (ids_NT[:first, 0] == 0).all()
    assert len(ids_NT) == ((sizes - 1) // 150).sum()
    assert torch.equal(stretches(split, 150, 3)[0], ids_NT[:3])


def test_the_longest_stretch_leaves_enough_of_them():
    split = SimpleNamespace(name="x", starts=np.array([0, 20, 31]), tokens=36)  # 19, 10 and 4 inputs
    lengths = [longest(split, count, 1000) for count in (1, 2, 3, 4, 33, 34)]
    assert lengths == [16, 8, 8, 4, 1, 16]
    assert longest(split, 1, 7) == 4
    with refused(DataError, "x", 2):
        longest(SimpleNamespace(name="x", starts=np.array([0]), tokens=1), 1, 8)


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"stretches": 0}, {"contexts": (1,)}])
def test_options_out_of_bounds_are_named(wrong):
    with refused(ConfigError, *wrong):
        Options(**wrong)
