"""Texts of a model whose tokenizer is not ours: its prefix, its ends, and no separator."""

import json
import math
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.data import Tokenizer, encode, open_corpus
from perspectron.decode.constrain import json_schema
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.past import ids_for, text_of
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.model.model import LanguageModel
from perspectron.train.heldout import heldout
from perspectron.util.errors import StateError
from tests.foreign_tokenizers import KINDS, TEXT
from tests.refusals import refused

GREEDY = SamplingConfig(temperature=0.0)
SIZES = {"vocab_size": 400, "d_model": 32, "layers": 2}


@pytest.fixture(params=["llama2", "gpt2"])
def tokenizer(request, tmp_path) -> Tokenizer:
    """With a prefix, and without; id 0 is a token like any other that no text has."""
    KINDS[request.param]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 70]}))
    return Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    model = perspectron.build(presets.get("gdn-tiny", **SIZES)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def test_the_prefix_is_read_once_and_nothing_is_forgotten(model, tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    prefix = [*tokenizer.specials.prefix]
    whole = model(torch.tensor([[*prefix, *ids, 0, *ids]])).logits[0, -1]
    for given in ([*ids, 0, *ids], [*prefix, *ids, 0, *ids]):
        session = Session(model, tokenizer).read(given)
        assert session.tokens == [*ids, 0, *ids] and session.text == tokenizer.decode(session.tokens)
        drawn = generate(model, tokenizer, [given], max_tokens=1, sampling=GREEDY)
        assert drawn.ids[0][0] == int(whole[: tokenizer.vocab_size].argmax())
        session.say(1, sampling=GREEDY)
        assert session.tokens[-1] == drawn.ids[0][0]


@pytest.mark.parametrize("end", [2, 70])
def test_every_stop_ends_a_text(model, tokenizer, end, monkeypatch) -> None:
    bias_V, head = torch.zeros(400), LanguageModel.head
    bias_V[end] = 1e6
    monkeypatch.setattr(LanguageModel, "head", lambda self, x: head(self, x) + bias_V)
    done = generate(model, tokenizer, ["The fox"], max_tokens=5, sampling=GREEDY)
    assert (done.ids, done.texts, done.finished) == ([[end]], [""], ["end"])


def test_rows_beyond_the_tokenizer_are_never_drawn(model, tokenizer) -> None:
    done = generate(model, tokenizer, ["The"], max_tokens=200, sampling=SamplingConfig(temperature=50.0))
    assert max(done.ids[0]) < tokenizer.vocab_size < model.config.vocab_size


def test_a_session_is_kept_and_goes_on(model, tokenizer, tmp_path) -> None:
    session = Session(model, tokenizer, chunk=16)
    session.save(tmp_path / "empty")
    assert Session.load(tmp_path / "empty", model, tokenizer).tokens == []
    session.read(TEXT)
    said = session.fork().say(20, sampling=GREEDY)
    session.save(tmp_path / "kept")
    loaded = Session.load(tmp_path / "kept", model, tokenizer, chunk=16)
    assert loaded.tokens == session.tokens and loaded.fork().say(20, sampling=GREEDY) == said
    early = loaded.at(5).read(session.tokens[5:])
    assert early.say(20, sampling=GREEDY) == said
    talk = Conversation.load(tmp_path / "kept", model)
    assert generate(model, tokenizer, [""], max_tokens=20, sampling=GREEDY, conversation=talk).texts == [said]


def test_a_state_alone_is_of_a_text_whose_beginning_is_unknown(model, tokenizer, tmp_path) -> None:
    generate(model, tokenizer, [TEXT], max_tokens=3, sampling=GREEDY).conversation.save(
        tmp_path / "talk", model
    )
    session = Session.load(tmp_path / "talk", model, tokenizer)
    assert len(session.tokens) == 1
    session.read(TEXT).save(tmp_path / "again")
    again = Session.load(tmp_path / "again", model, tokenizer)
    assert again.say(5, sampling=GREEDY) == session.say(5, sampling=GREEDY)


def test_a_grammar_is_kept(model, tokenizer) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"fox": {"enum": ["quick", "brown"]}}, "required": ["fox"]}
    grammar = json_schema(schema | {"additionalProperties": False}, tokenizer)
    done = generate(model, tokenizer, ["The"], max_tokens=300, sampling=GREEDY, hooks=[grammar])
    assert done.finished == ["stop"] and json.loads(done.texts[0])["fox"] in ("quick", "brown")


@torch.no_grad()
def test_bits_per_byte_are_those_of_the_text(model, tokenizer, tmp_path) -> None:
    """Also where the tokenizer writes more bytes than the text has, as a space before each."""
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"{TEXT} {i}"}) + "\n" for i in range(40))
    )
    split = encode(open_corpus(str(tmp_path / "lines.jsonl")), tokenizer, tmp_path / "out").split("heldout")
    found = heldout(model, split, tokenizer, seq_len=20)
    first = len(tokenizer.token_bytes(int(split.read(0, 1)[0])))
    assert found.text_bytes == split.text_bytes - first
    nats, ids = 0.0, torch.from_numpy(split.read(0, split.tokens))
    for start in range(0, split.tokens - 1, 20):
        window = ids[start : start + 21]
        reset = torch.from_numpy(split.begins(start, start + len(window) - 1))[None]
        logits = model(window[None, :-1], reset_BT=reset).logits[0].double()
        nats += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.text_bytes, rel=1e-5)
    carried = heldout(model, split, tokenizer, seq_len=20, carry=True)
    assert carried.text_bytes == found.text_bytes and carried.bits_per_byte != found.bits_per_byte


def test_a_text_without_a_token_is_drawn_after_the_end_of_the_one_before(model, tokenizer) -> None:
    start = [*tokenizer.specials.start]
    assert start in ([1], [2])
    first = generate(model, tokenizer, [""], max_tokens=1, sampling=GREEDY).ids[0][0]
    assert first == int(model(torch.tensor([start])).logits[0, -1, : tokenizer.vocab_size].argmax())


def of(kind: str, folder: Path, *more: str, stop: int = 2) -> Tokenizer:
    """A tokenizer of this kind with further special tokens."""
    made = KINDS[kind]()
    made.add_special_tokens([*more])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": stop}))
    return Tokenizer.load(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["llama2", "gpt2", "t5"])
def test_a_part_of_a_text_is_replayed_with_the_space_before_it(model, tmp_path, kind) -> None:
    """Also where the other tokenizer puts a space before all that it encodes."""
    one, other = of("llama2", tmp_path / "one"), of(kind, tmp_path / "other", "<x>")
    session, words = Session(model, one), one.encode("The fox jumps")
    session.append([*words, *one.encode("The fox")])
    text, after = session.text, len(words)
    assert text == "The fox jumps The fox" == text_of(one, session.tokens, 0, 99)
    assert text_of(one, session.tokens, after, 99) == " The fox"
    ids = [ids_for(session, other, after=n).ids for n in (0, after)]
    assert other.decode(ids[0]) == text and other.decode([*other.encode("fox"), *ids[1]]) == "fox The fox"


def test_a_replayed_text_keeps_its_special_tokens(model, tmp_path) -> None:
    one, other = of("llama2", tmp_path / "one", "<turn>"), of("gpt2", tmp_path / "other", "<a>", "<turn>")
    session, fox = Session(model, one), one.encode("fox")
    session.append([one.special["<turn>"], *fox, 2, *fox])
    ids = [other.special["<turn>"], *other.encode(" fox"), 2, *other.encode(" fox")]
    assert ids_for(session, other).ids == ids
    with refused(StateError, one.special["<turn>"], "<turn>"):
        ids_for(session, of("gpt2", tmp_path / "without"))
    again = of("llama2", tmp_path / "again", "<turn>", stop=1)
    assert not ids_for(session, again).encoded


def test_a_text_that_is_drawn_from_nothing_begins_as_decoding_it_does(model, tokenizer, monkeypatch) -> None:
    id = next(id for id in range(400) if tokenizer.token_bytes(id)[:3] == b" ju")
    bias_V, head = torch.zeros(400), LanguageModel.head
    bias_V[id] = 1e6
    monkeypatch.setattr(LanguageModel, "head", lambda self, x: head(self, x) + bias_V)
    for stop in ((), ("j",)):
        for prompt in ("", "The"):
            made = generate(model, tokenizer, [prompt], max_tokens=2, sampling=GREEDY, stop=stop)
            text = tokenizer.decode([*tokenizer.encode(prompt), id, id]).removeprefix(prompt)
            assert made.texts == [text[: text.index("j")] if stop else text]
    session = Session(model, tokenizer)
    session.append([*tokenizer.specials.start], whole=True)
    assert session.say(1) + session.say(1) == session.text == tokenizer.decode([id, id])
