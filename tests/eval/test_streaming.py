"""The score with memory carried: against steps token by token, and against attention with its mask written out."""

import math
import random

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from perspectron import presets
from perspectron.data import Split, Tokenizer, encode, open_corpus
from perspectron.designs.transformer.mla import MLAConfig
from perspectron.eval import perplexity
from perspectron.eval.perplexity import mean_context, streaming, streaming_state_bytes
from perspectron.model import cache
from perspectron.model.cache import Cache, ringed
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.model import build
from perspectron.model.ring import Ring
from perspectron.train.heldout import heldout
from perspectron.util.errors import ConfigError
from tests.designs.test_mixers import randomise
from tests.refusals import refused

WINDOW, TOKENS = 11, 90
TABLES = ("adr", "lens", "gpt2")  # of positions
GROWING = ("transformer", "adr2", "lens2", "mla")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of very different lengths."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "texts").mkdir()
    draw = random.Random(0)
    for i in range(20):
        words = draw.choices(["quick", "brown", "größer", "→", "fox", "and"], k=(2, 40, 5, 60)[i % 4])
        (root / "texts" / f"{i:02}.txt").write_text(f"Number {i}: {' '.join(words)}.\n", encoding="utf-8")
    corpus = open_corpus(str(root / "texts"), heldout=0.5)
    tokenizer = Tokenizer.train((document.text for document in corpus.documents("train")), 300)
    return tokenizer, encode(corpus, tokenizer, root / "data").split("heldout")


def model_of(design: str):
    """A small model in float64 whose numbers are all drawn anew."""
    if design == "mla":
        block = BlockConfig(MLAConfig(2, 10, 6, 4, 5), None)
        config = ModelConfig("mla", 300, 32, (block, block))
    else:
        config = presets.small(design, vocab_size=300, d_model=32, layers=2, seq_len=32)
    model = build(config)
    randomise(model, 3)
    with torch.no_grad():
        model.embedding.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(4))
    return model.double()


def bits(nats, ids, tokenizer) -> float:
    return sum(nats) / math.log(2) / sum(len(tokenizer.token_bytes(id)) for id in ids[1:])


def pieces(split, tokens: int = TOKENS):
    """The ids, and each document among them as (start, stop)."""
    starts = [start for start in split.starts.tolist() if start < tokens]
    return split.read(0, tokens).tolist(), list(zip(starts, [*starts[1:], tokens], strict=True))


@pytest.mark.parametrize("design", [*(name for name in presets.DESIGNS if name not in TABLES), "mla"])
@torch.inference_mode()
def test_streaming_is_what_single_steps_with_a_ring_compute(data, design, monkeypatch):
    tokenizer, split = data
    model = model_of(design)
    ids, documents = pieces(split)
    assert len(documents) > 1 and max(stop - start for start, stop in documents) > 3 * WINDOW
    nats = []
    for start, stop in documents:
        state = ringed(model.init_state(1, capacity=1), WINDOW)
        for at in range(start, min(stop, TOKENS - 1)):
            output = model(torch.tensor([[ids[at]]]), state)
            nats.append(-output.logits[0, 0].log_softmax(0)[ids[at + 1]].item())
            state = output.state
    expected = bits(nats, ids, tokenizer)
    for chunk in (7, 1024):
        monkeypatch.setattr(perplexity, "CHUNK", chunk)
        found = streaming(model, split, tokenizer, window=WINDOW, limit_tokens=TOKENS)
        assert found.bits_per_byte == pytest.approx(expected, rel=1e-9)
    single = streaming(model.float(), split, tokenizer, window=WINDOW, limit_tokens=TOKENS)
    assert single.bits_per_byte == pytest.approx(expected, rel=1e-5)
    assert found.tokens == TOKENS - 1
    assert found.state_bytes == state.nbytes
    assert single.state_bytes < found.state_bytes
    windows = heldout(model, split, tokenizer, seq_len=WINDOW, limit_tokens=TOKENS)
    assert abs(windows.bits_per_byte - expected) > 1e-6


@pytest.mark.parametrize("design", GROWING)
@torch.inference_mode()
def test_a_ring_is_attention_with_an_explicit_mask(data, design, monkeypatch):
    tokenizer, split = data
    model = model_of(design)
    found = streaming(model, split, tokenizer, window=WINDOW, limit_tokens=TOKENS)
    whole = heldout(model, split, tokenizer, seq_len=TOKENS, carry=True, limit_tokens=TOKENS)
    assert abs(whole.bits_per_byte - found.bits_per_byte) > 1e-6

    def explicit(q, k, v, state, at, *, scale=None, **_):
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        hidden = (back < 0) | (back >= WINDOW)
        scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * (scale or q.shape[3] ** -0.5)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), state

    monkeypatch.setattr(cache, "attend", explicit)
    ids, documents = pieces(split)
    nats = []
    for start, stop in documents:
        logits_TV = model(torch.tensor([ids[start:stop]])).logits[0].log_softmax(1)
        nats += [-row[id].item() for row, id in zip(logits_TV, ids[start + 1 : stop + 1], strict=False)]
    assert found.bits_per_byte == pytest.approx(bits(nats, ids, tokenizer), rel=1e-9)


@torch.inference_mode()
def test_a_window_longer_than_every_document_is_full_attention(data):
    tokenizer, split = data
    model = model_of("transformer")
    found = streaming(model, split, tokenizer, window=split.tokens)
    whole = heldout(model, split, tokenizer, seq_len=64, carry=True)
    assert found.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=1e-9)
    assert (found.tokens, found.text_bytes) == (split.tokens - 1, split.text_bytes)


def test_the_bytes_of_a_ring_are_those_of_its_keys_and_values():
    model = model_of("transformer")
    mixer = model.config.blocks[0].mixer
    per_layer = 2 * 8 * mixer.groups * mixer.width(model.config.d_model) * 256 + 8
    assert streaming_state_bytes(model, 256) == len(model.config.blocks) * per_layer
    recurrent = model_of("kda")
    assert streaming_state_bytes(recurrent, 256) == streaming_state_bytes(recurrent, 8)


def test_no_cache_is_left_and_what_is_no_cache_stays():
    state = model_of("adr2").init_state(1)
    kept = pytree.tree_leaves(ringed(state, 5), is_leaf=lambda part: isinstance(part, Cache | Ring))
    assert not any(isinstance(part, Cache) for part in kept)
    assert [part.k_BGWK.shape[2] for part in kept if isinstance(part, Ring)] == [5, 5]
    assert any(isinstance(part, torch.Tensor) for part in kept)


def test_the_mean_context_is_that_of_plain_counting(data):
    _, split = data
    for seq_len in (0, 16, 100):
        seen, count = [], 0
        begins = set(split.starts.tolist())
        for at in range(split.tokens - 1):
            count = 0 if at in begins or (seq_len and at % seq_len == 0) else count
            count += 1
            seen.append(count)
        assert mean_context(split, seq_len) == pytest.approx(np.mean(seen))


def test_the_context_of_completions_is_that_of_what_is_learned():
    """Two documents of 100 tokens; the last 10 of each are learned, and the id that begins the second."""
    split = Split("heldout", [np.zeros(200, np.uint16)], np.array([0, 100]), 200)
    split.learned = np.array([90, 190])
    assert mean_context(split) == pytest.approx(np.mean([*range(90, 101), *range(90, 100)]))
    assert mean_context(split, 0, 150) == pytest.approx(np.mean(range(90, 101)))


def test_no_window_and_a_table_of_positions_are_refused(data):
    tokenizer, split = data
    with refused(ConfigError, "window", 0):
        streaming(model_of("transformer"), split, tokenizer, window=0)
    for design in TABLES:
        with refused(ConfigError, design, "positions", 32):
            streaming(model_of(design), split, tokenizer, window=8)


def test_a_state_that_grows_beside_its_caches_is_refused(data, monkeypatch):
    tokenizer, split = data
    monkeypatch.setattr(perplexity, "ringed", lambda state, window: state)
    with refused(ConfigError, "transformer"):
        streaming(model_of("transformer"), split, tokenizer, window=8)
