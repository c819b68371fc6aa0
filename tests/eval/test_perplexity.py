"""Bits per byte against a plain, slow computation."""

import bz2
import gzip
import itertools
import json
import lzma
import math
import random
from pathlib import Path

import pytest
import torch

from perspectron import build, presets
from perspectron.data import Split, Tokenizer, encode, open_corpus
from perspectron.data.template import Template
from perspectron.eval import perplexity
from perspectron.eval.perplexity import Options, compressors, end_of, measure, text_of
from perspectron.eval.subject import Subject
from perspectron.opening import Folder, Opened
from perspectron.train.heldout import Heldout, heldout
from perspectron.util.errors import DataError
from tests.foreign_tokenizers import KINDS
from tests.refusals import refused

MODELS = ("perspective-tiny", "transformer-tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[Tokenizer, Split]:
    """Documents of very different lengths, in letters of one to four bytes."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "texts").mkdir()
    draw = random.Random(0)
    words = ["quick", "brown", "größer", "→", "日本語", "🦊", "fox", "and"]
    for i in range(24):
        text = f"Number {i}: " + " ".join(draw.choices(words, k=draw.choice([0, 3, 9, 60]))) + ".\n"
        (root / "texts" / f"{i}.txt").write_text(text, encoding="utf-8")
    corpus = open_corpus(str(root / "texts"), heldout=0.5)
    tokenizer = Tokenizer.train((document.text for document in corpus.documents("train")), 300)
    return tokenizer, encode(corpus, tokenizer, root / "data").split("heldout")


def small(name: str, dtype: torch.dtype = torch.float32):
    """A model whose predictions are far from uniform."""
    sizes = {"d_model": 32, "layers": 4, "hidden": 32, "rank": 8, "heads": 2, "kv_heads": 1, "window": 16}
    own = {key: size for key, size in sizes.items() if presets.sizes(name).get(key) is not None}
    model = build(presets.get(name, **own, vocab_size=300), seed=1).to(dtype)
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    return model


def surprise(model, ids: list[int], fresh_at: set[int]) -> list[float]:
    """Nats at each of ids[1:], in float64, token by token's log-softmax; state emptied before `fresh_at`."""
    borders = sorted({0, *(i for i in fresh_at if 0 < i < len(ids) - 1), len(ids) - 1})
    nats = []
    for start, stop in itertools.pairwise(borders):
        with torch.no_grad():
            logits = model.double()(torch.tensor([ids[start:stop]])).logits[0]
        for row, target in zip(logits, ids[start + 1 : stop + 1], strict=True):
            nats.append(-torch.log_softmax(row.double(), 0)[target].item())
    assert len(nats) == len(ids) - 1
    return nats


def plain(nats: list[float], ids: list[int], tokenizer: Tokenizer) -> Heldout:
    text_bytes = sum(len(tokenizer.token_bytes(id)) for id in ids[1:])
    bits = sum(nats) / math.log(2)
    return Heldout(bits / text_bytes, math.exp(sum(nats) / len(nats)), len(nats), text_bytes)


def assert_close(found: Heldout, expected: Heldout, rel: float) -> None:
    assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=rel)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=rel * 20)
    assert (found.tokens, found.text_bytes) == (expected.tokens, expected.text_bytes)


def separators(ids: list[int]) -> set[int]:
    return {i for i, id in enumerate(ids) if id == 0}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("limit", [None, 2, 65, 66, 200])
def test_windows_equal_the_plain_computation(data, model, limit):
    tokenizer, split = data
    model = small(model)
    ids = split.read(0, split.tokens if limit is None else limit).tolist()
    found = heldout(model, split, tokenizer, seq_len=16, batch_size=4, limit_tokens=limit)
    fresh = separators(ids) | set(range(0, len(ids), 16))
    expected = plain(surprise(model, ids, fresh), ids, tokenizer)
    assert_close(found, expected, 1e-5)
    if limit is None:
        assert found.text_bytes == split.text_bytes
        assert found.tokens == split.tokens - 1
        assert split.tokens > 250 and len(separators(ids)) >= 4


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seq_len", [7, 16, 400])
def test_carry_equals_one_long_forward_per_document(data, model, seq_len):
    tokenizer, split = data
    model = small(model)
    ids = split.read(0, split.tokens).tolist()
    found = heldout(model, split, tokenizer, seq_len=seq_len, carry=True)
    expected = plain(surprise(model, ids, separators(ids)), ids, tokenizer)
    assert_close(found, expected, 1e-5)
    windowed = heldout(small("perspective-tiny"), split, tokenizer, seq_len=7)
    assert windowed.bits_per_byte != pytest.approx(expected.bits_per_byte, rel=1e-4)


def test_the_batch_size_does_not_matter(data):
    tokenizer, split = data
    model = small("perspective-tiny", torch.float64)
    results = [heldout(model, split, tokenizer, seq_len=16, batch_size=b) for b in (1, 3, 64)]
    for result in results[1:]:
        assert_close(result, results[0], 1e-9)
    assert heldout(model, split, tokenizer, seq_len=16, batch_size=3) == results[1]


def test_a_limit_beyond_the_end_is_the_whole(data):
    tokenizer, split = data
    model = small("transformer-tiny")
    whole = heldout(model, split, tokenizer, seq_len=16)
    assert heldout(model, split, tokenizer, seq_len=16, limit_tokens=10**9) == whole
    assert heldout(model, split, tokenizer, seq_len=16, limit_tokens=100).tokens == 99
    with refused(DataError, "limit_tokens", 1):
        heldout(model, split, tokenizer, seq_len=16, limit_tokens=1)


@pytest.mark.parametrize("spread", [False, True])
def test_a_part_has_the_bytes_of_its_text_without_the_ends_of_documents(tmp_path, spread):
    """Also where documents end with a token that is text elsewhere, here a line end, which some of these texts have."""
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    line = Tokenizer.load(tmp_path / "tokenizer.json").encode("a\nb")[-2]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": line}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    lines = (json.dumps({"text": f"the fox {i}" + "\nand on" * (i % 3)}) for i in range(400))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    split = encode(open_corpus(str(tmp_path / "a.jsonl")), tokenizer, tmp_path / "out").split("heldout")
    model = build(presets.solve("ssd", 100_000, vocab_size=tokenizer.vocab_size, seq_len=16)).eval()
    whole = heldout(model, split, tokenizer, seq_len=16)
    most = (split.tokens - 1) // 16 * 16 if spread else split.tokens - 1
    part = heldout(model, split, tokenizer, seq_len=16, limit_tokens=most, spread=spread)
    rest = split.read(part.tokens + 1, split.tokens)[:-1]  # the last ends a document
    assert split.text_bytes > 100 and int(tokenizer.byte_counts()[line]) == 1
    assert part.text_bytes == whole.text_bytes - int(tokenizer.byte_counts()[rest].sum())


@pytest.mark.parametrize("carry", [False, True])
def test_a_uniform_model_needs_log2_of_the_vocabulary_per_token(data, carry):
    tokenizer, split = data
    model = small("perspective-tiny")
    with torch.no_grad():
        model.embedding.weight.zero_()
    found = heldout(model, split, tokenizer, seq_len=16, carry=carry)
    assert found.bits_per_byte == pytest.approx(math.log2(300) * (split.tokens - 1) / split.text_bytes)
    assert found.perplexity == pytest.approx(300, rel=1e-5)


def test_bfloat16_is_close_and_used(data):
    tokenizer, split = data
    model = small("perspective-tiny")
    exact = heldout(model, split, tokenizer, seq_len=16)
    rough = heldout(model, split, tokenizer, seq_len=16, dtype=torch.bfloat16)
    assert rough.bits_per_byte != exact.bits_per_byte
    assert rough.bits_per_byte == pytest.approx(exact.bits_per_byte, rel=0.02)


def test_measuring_changes_nothing(data):
    tokenizer, split = data
    model = small("perspective-tiny")
    before = model.fingerprint()
    heldout(model, split, tokenizer, seq_len=16, carry=True)
    assert model.fingerprint() == before
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_primed_compressors_find_what_is_far_back():
    draw = random.Random(0)
    text = bytes(draw.choices(range(256), k=20_000))
    found = compressors(text, text + bytes(draw.choices(range(256), k=950_000)))
    cold = compressors(text)
    assert {name: found[name] for name in cold} == cold and len(found) == 2 * len(cold)
    for name in cold:
        far = name.startswith(("xz", "zstd"))
        assert found[f"{name}, primed"] < 0.2 if far else found[f"{name}, primed"] > 7.9


def test_the_end_of_a_split_is_read_from_its_pieces(data, monkeypatch):
    tokenizer, split = data
    whole = text_of(split, tokenizer, split.tokens)
    assert end_of(split, tokenizer) == whole
    monkeypatch.setattr(perplexity, "PRIMED", 100)
    assert end_of(split, tokenizer) == whole[-100:]


@pytest.mark.parametrize("text", [b"", b"x", b"the quick brown fox " * 50, Path(__file__).read_bytes()])
def test_compressors_equal_the_sizes_of_their_archives(text):
    found = compressors(text)
    assert {name: found[name] for name in ("gzip -9", "bzip2 -9", "xz -9")} == {
        "gzip -9": 8 * len(gzip.compress(text, compresslevel=9)) / max(1, len(text)),
        "bzip2 -9": 8 * len(bz2.compress(text, 9)) / max(1, len(text)),
        "xz -9": 8 * len(lzma.compress(text, format=lzma.FORMAT_XZ, preset=9)) / max(1, len(text)),
    }
    if len(text) == 1000:
        assert found["gzip -9"] < 0.5


def test_compressors_read_what_is_predicted_and_no_prompts(tmp_path):
    lines = [
        json.dumps({"prompt": f"a long question {i} " * 9, "completion": f"Answer {i}.\n"}) for i in range(60)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    corpus = open_corpus(str(tmp_path / "pairs.jsonl"), heldout=0.3, template=Template.named("plain"))
    tokenizer = Tokenizer.train((document.text for document in corpus.documents("train")), 300)
    split = encode(corpus, tokenizer, tmp_path / "data").split("heldout")
    whole = "".join(document.text for document in corpus.documents("heldout")).encode()
    assert text_of(split, tokenizer, split.tokens) == whole
    model = small("transformer-tiny")
    subject = Subject(Opened(Folder(Path("run"), model.config), model, tokenizer), split, 64)
    for tokens in (0, split.tokens // 2):
        found = measure(subject, Options(tokens))
        text = text_of(split, tokenizer, tokens or split.tokens)
        assert len(text) == found["text_bytes"] and whole.startswith(text)
        assert found["compressors"] == compressors(text)
