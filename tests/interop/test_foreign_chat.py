"""Chat models of transformers as runs: what ends a text ends it, and their templates ask them."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from fastapi.testclient import TestClient
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

import perspectron
from perspectron.cli import chat
from perspectron.cli.main import main
from perspectron.cli.serve import Serve
from perspectron.data import encode, open_corpus
from perspectron.data.template import FILE, Template
from perspectron.data.tokenizer import END_OF_TEXT
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.interop import foreign
from perspectron.opening import open_model
from perspectron.serve.web.app import create
from perspectron.util.errors import DataError
from tests.foreign_models import SMALL, TEXT, saved
from tests.refusals import in_a_line, refused

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|head|>{{ message['role'] }}<|/head|>\n\n{{ message['content'] }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
SPECIAL = ["<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "<|eom|>", "<｜tool▁call｜>"]
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def bpe() -> ByteLevelBPETokenizer:
    """Ids 0 to 292 are text, the others special; 293 is the end of a document."""
    inner = ByteLevelBPETokenizer()
    inner.train_from_iterator([TEXT * 20], vocab_size=293, min_frequency=2, show_progress=False)
    inner.add_special_tokens([END_OF_TEXT, *SPECIAL])
    assert inner.get_vocab_size() == 300
    return inner


@pytest.fixture
def hf(bpe, tmp_path, monkeypatch) -> Path:
    """A Llama of instructions: texts begin with <|begin|> and end with the end of text, <|eot|> or <|eom|>."""
    begin, end, eot, eom = map(bpe.token_to_id, ("<|begin|>", END_OF_TEXT, "<|eot|>", "<|eom|>"))
    monkeypatch.setitem(SMALL, "bos_token_id", begin)
    monkeypatch.setitem(SMALL, "eos_token_id", [end, eot])
    saved(tmp_path / "hf", "llama", bpe)
    values = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(values | {"eos_token_id": [end, eom]}))
    (tmp_path / "hf" / FILE).write_text(TEMPLATE)
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>"}))
    return tmp_path / "hf"


def imported(folder: Path) -> Path:
    out = folder.with_name("run")
    assert main(["import", str(folder), "--out", str(out)]) == 0
    return out


def test_every_token_that_ends_texts_there_ends_them_here(hf, bpe):
    run = imported(hf)
    model, tokenizer = perspectron.load(run)
    ends = {*map(bpe.token_to_id, (END_OF_TEXT, "<|eot|>", "<|eom|>"))}
    assert tokenizer.specials.stops == ends and all(tokenizer.token_bytes(id) == b"" for id in ends)
    for spelling in ("<|eot|>", "<|eom|>"):
        assert not ends & {*tokenizer.encode(f"a{spelling}b")}
        assert tokenizer.decode(tokenizer.encode(f"a{spelling}b")) == f"a{spelling}b"
    with torch.no_grad():
        for end in sorted(ends):
            bias = torch.zeros(300)
            bias[end] = 1e4
            hook = model.lm_head.register_forward_hook(lambda _, __, out, bias=bias: out + bias)
            done = generate(model, tokenizer, [[0, 7]], max_tokens=5, sampling=SamplingConfig(temperature=0))
            hook.remove()
            assert (done.ids, done.texts, done.finished) == ([[end]], [""], ["end"])
    assert (
        main(
            [
                "quantize",
                str(run),
                "--out",
                str(run.with_name("q")),
                "--calibrate",
                str(words(run)),
                "--windows",
                "1",
            ]
        )
        == 0
    )
    assert perspectron.load(run.with_name("q"))[1].specials.stops == ends


def words(run: Path) -> Path:
    path = run.with_name("words.txt")
    path.write_text(TEXT * 100)
    return path


def test_a_template_is_the_models_without_being_told_and_its_tokens_are_ids(hf, capsys):
    run = imported(hf)
    opened = open_model(run)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(hf / "tokenizer.json"), bos_token="<|begin|>")
    wanted = theirs.apply_chat_template(
        HELLO, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    for named in (None, str(hf / FILE)):
        template = opened.template(named)
        assert template is not None
        assert template.tokens["bos_token"] == "<|begin|>"
        assert template.ids(HELLO, opened.tokenizer) == wanted
    assert main(["quantize", str(run), "--out", str(run.with_name("q")), "--calibrate", "none"]) == 0
    small = open_model(run.with_name("q"))
    template = small.template()
    assert template is not None
    assert template.ids(HELLO, small.tokenizer) == wanted


@pytest.mark.parametrize("begins", ["{{ bos_token }}", ""])
def test_a_chat_reads_all_that_its_template_writes_and_nothing_else(hf, begins):
    first = {"add_bos_token": True, "bos_token": "<|begin|>"}
    (hf / "tokenizer_config.json").write_text(json.dumps(first))
    run = imported(hf)
    opened = open_model(run)
    template = Template(TEMPLATE.replace("{{ bos_token }}", begins), "of a test", {"bos_token": "<|begin|>"})
    talk = chat.Talk(opened.model, opened.tokenizer, chat.Chat(run, max_tokens=3), template)
    for message in ("hi", "so"):
        talk.answer(message)
        asked = template.ids(talk.now.said.messages[:-1], opened.tokenizer)
        assert talk.now.session._ids[: len(asked)] == asked
        assert (asked[:1] == [*opened.tokenizer.specials.prefix]) == bool(begins)


def test_a_server_takes_messages_and_prompts(hf, tmp_path):
    run = imported(hf)
    served = Serve((run,))._served(run, open_model(run), tmp_path)
    with TestClient(create([served]), base_url="http://localhost") as client:
        for route, asked in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hi"})):
            answer = client.post(f"/v1/{route}", json={"model": "run", "max_tokens": 2, **asked})
            assert answer.status_code == 200


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_a_template_is_found_where_transformers_keeps_it(hf, place):
    text = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    names = {"bos_token": "<|begin|>", "eos_token": {"content": "<|eot|>"}}
    (hf / FILE).write_text(text)
    (hf / "tokenizer_config.json").write_text(json.dumps(names))
    if place != "file":
        (hf / FILE).unlink()
        whole = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": text}]
        kept = {"chat_template": text if place == "config" else whole}
        (hf / "tokenizer_config.json").write_text(json.dumps(kept | names))
    template = open_model(imported(hf)).template()
    assert template is not None
    assert template.prompt(HELLO) == "<|begin|>hi<|eot|>"


@pytest.mark.parametrize("asked", ["hi", "<|eot|> hi<|end", "a <|begin|><|/head|> b", "<"])
def test_a_training_reads_records_as_a_chat_does(asked, hf, tmp_path):
    run = imported(hf)
    records = [{"prompt": asked + " " * (i % 2), "completion": "yes<|eot|>"} for i in range(4)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    opened = open_model(run)
    template = opened.template()
    assert template is not None
    corpus = open_corpus(str(tmp_path / "asked.jsonl"), heldout=0.3, template=template)
    split = encode(corpus, opened.tokenizer, tmp_path / "shards").split("train")
    ids, special = split.document(0).tolist(), {*opened.tokenizer.special.values()}
    for text in (asked, asked + " "):
        wanted = template.ids([{"role": "user", "content": text}], opened.tokenizer)
        if ids[: len(wanted)] == wanted:
            break
    else:
        pytest.fail(f"{ids} does not begin as a chat's")
    assert [id for id in ids if id in special] == [*(id for id in wanted if id in special), ids[-1]]
    assert len([id for id in wanted if id in special]) == 6, "of the template alone"


def test_a_model_that_learned_with_a_template_goes_on_with_it(hf):
    run = imported(hf)
    pairs = run.with_name("pairs.jsonl")
    pairs.write_text(
        "".join(json.dumps({"prompt": f"hi {i}", "completion": f"hello {i}"}) + "\n" for i in range(99))
    )
    tuned = run.with_name("tuned")
    line = [
        "train",
        "--init",
        str(run),
        "--data",
        str(pairs),
        "--template",
        str(hf / FILE),
        "--seq-len",
        "64",
    ]
    line += ["--steps", "1", "--batch-size", "1", "--dtype", "float32", "--out", str(tuned)]
    assert main(line) == 0
    template = open_model(tuned).template()
    assert template is not None
    assert template.text == TEMPLATE
    assert template.tokens["bos_token"] == "<|begin|>"


def test_ends_that_are_no_tokens_are_refused(hf, bpe):
    whole = json.loads((hf / "config.json").read_text())
    for value in (300, -1, "x", [True], [[3]]):
        (hf / "config.json").write_text(json.dumps(whole | {"eos_token_id": value}))
        with refused(DataError, hf / "config.json", "eos_token_id", value):
            foreign.read(hf)
    (hf / "config.json").write_text(json.dumps(whole))
    for value, error, *named in (
        ({"eos_token": "<|none|>"}, DataError, "eos_token", "<|none|>"),
        ({"eos_token": 3}, DataError, "eos_token"),
        ([], DataError),
    ):
        (hf / "tokenizer_config.json").write_text(json.dumps(value))
        with refused(error, hf / "tokenizer_config.json", *named):
            foreign.read(hf)
    (hf / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|head|>"}}))
    assert bpe.token_to_id("<|head|>") in foreign.read(hf)[1].specials.stops


def test_texts_are_drawn_as_the_model_suggests_unless_told_otherwise(hf, tmp_path, capsys):
    values = json.loads((hf / "generation_config.json").read_text())
    suggested = {"do_sample": True, "temperature": 4.0, "top_k": 3, "no_repeat_ngram_size": 2}
    (hf / "generation_config.json").write_text(json.dumps(values | suggested))
    run = imported(hf)
    capsys.readouterr()

    def drawn(*options: str) -> tuple[str, str]:
        assert main(["generate", str(run), "the cat", "--max-tokens", "12", "--seed", "7", *options]) == 0
        return capsys.readouterr()

    text, said = drawn()
    assert text == drawn("--temperature", "4", "--top-k", "3")[0]
    assert len({text, drawn("--temperature", "0")[0], drawn("--top-k", "0")[0]}) == 3
    in_a_line(said, "generation_config.json", "temperature", 4, "top_k", 3, "no_repeat_ngram_size")
    served = Serve((run,))._served(run, open_model(run), tmp_path)
    in_a_line(capsys.readouterr().err, "run", "generation_config.json", "top_k", "no_repeat_ngram_size")
    with TestClient(create([served]), base_url="http://localhost") as client:

        def answered(**asked: float) -> str:
            body = {"prompt": "the cat", "max_tokens": 12, "seed": 7, **asked}
            return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        assert client.get("/v1/models").json()["data"][0]["sampling"]["top_k"] == 3
        assert answered() == answered(temperature=4, top_k=3) == text.removesuffix("\n")
        assert len({answered(), answered(temperature=0), answered(top_k=0), answered(top_k=-1)}) == 3
