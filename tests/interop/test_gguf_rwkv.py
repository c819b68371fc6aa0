"""RWKV-7 in a GGUF: its model is that of the author's file, its tokens and logits those of llama.cpp."""

import contextlib

import pytest
import torch

pytest.importorskip("gguf", reason="pip install 'perspectron[gguf]'")

from perspectron.data import world
from perspectron.interop import foreign
from perspectron.util.errors import CheckpointError, DataError
from tests.gguf_models import KINDS
from tests.interop import families
from tests.rwkv_models import gguf_file, logits, vocabulary, vocabulary_file, weights

TEXT = 'the  quick brown fox\'s \\n "naïve" 汉字 ✓\n\n\n\t{} é ½'


@torch.no_grad()
def test_its_logits_are_those_of_the_formulas(tmp_path):
    ids = families.text()
    expected = logits(ids, weights())
    imported = foreign.read(gguf_file(tmp_path / "model.gguf", weights()))
    families.near(imported.model(ids).logits.double(), expected)
    families.near(imported.model.double()(ids).logits, expected, families.DOUBLE)
    half = foreign.read(gguf_file(tmp_path / "half.gguf", weights(), KINDS.BF16)).model
    families.near(half(ids).logits.double(), expected)


def test_its_tokens_are_those_of_the_vocabulary(tmp_path):
    imported = foreign.read(gguf_file(tmp_path / "model.gguf", weights())).tokenizer
    vocabulary_file(tmp_path)
    own = type(imported).of_transformers(tmp_path)
    assert imported.encode(TEXT) == own.encode(TEXT) and imported.decode(imported.encode(TEXT)) == TEXT
    assert imported.specials.stops == {0, vocabulary()[b"\n\n"]} and imported.specials.prefix == ()


def test_the_chat_that_llama_cpp_knows_by_a_name_is_written_out(tmp_path):
    template = foreign.read(gguf_file(tmp_path / "model.gguf", weights())).template
    assert template is not None
    messages = [
        {"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"}, {"role": "user", "content": " So? "},
    ]  # fmt: skip
    expected = "Be brief.\n\nUser: Hi\n\nAssistant:Hello\n\nUser: So?\n\nAssistant:"
    assert template.prompt(messages) == expected


@pytest.mark.parametrize(
    ("more", "error", "field"),
    [
        ({"token_shift_count": 1}, CheckpointError, "rwkv7.token_shift_count"),
        ({"rescale_every_n_layers": 6}, CheckpointError, "rwkv7.rescale_every_n_layers"),
        ({"wkv__head_size": 0}, CheckpointError, "rwkv7.wkv.head_size"),
        ({"tokenizer__ggml__tokens": ["<s>", "a", "é" + "汉"], "tokenizer__ggml__token_type": [3, 1, 1],
          "tokenizer__ggml__eot_token_id": None}, DataError,
         "tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": ["<s>", "a"], "tokenizer__ggml__token_type": [3, 1],
          "tokenizer__ggml__eot_token_id": None}, DataError,
         "tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": ["<s>", "a"], "tokenizer__ggml__token_type": [1, 1],
          "tokenizer__ggml__eot_token_id": None}, DataError,
         "tokenizer.ggml.token_type"),
    ],
)  # fmt: skip
def test_what_has_no_place_is_named(more, error, field, tmp_path):
    path = gguf_file(tmp_path / "model.gguf", weights(), **more)
    with pytest.raises(error) as caught:
        foreign.read(path)
    assert str(path) in str(caught.value) and field in str(caught.value)


def test_its_tokens_and_logits_are_those_of_llama_cpp(tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    path = gguf_file(tmp_path / "model.gguf", weights(D=128, K=64))  # it has no heads of other widths
    imported = foreign.read(path)
    ids = imported.tokenizer.encode(TEXT)
    options = {
        "n_ctx": 128,
        "n_threads": 1,
        "verbose": False,
        "logits_all": True,
        "n_batch": 1,
        "n_ubatch": 1,
    }
    model = llama_cpp.Llama(str(path), **options)
    with contextlib.closing(model):
        assert model.tokenize(TEXT.encode(), add_bos=False, special=False) == ids
        model.eval(ids)
        theirs = torch.from_numpy(model.scores[: len(ids)].copy())
    with torch.no_grad():
        families.near(imported.model(torch.tensor([ids])).logits[0], theirs)
    assert world.FILE not in imported.files
