"""Chat models of transformers as runs: what ends a text ends it, and a template that cannot be told is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from fastapi.testclient import TestClient
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import perspectron
from perspectron.cli.main import main
from perspectron.cli.serve import Serve
from perspectron.data.adopt import adopt
from perspectron.data.template import FILE, Template
from perspectron.data.tokenizer import END_OF_TEXT, Tokenizer
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.interop import foreign
from perspectron.interop.hf import PerspectronForCausalLM
from perspectron.opening import Refused, open_model
from perspectron.serve.web.app import create
from perspectron.util.errors import CheckpointError, ConfigError, DataError
from tests.foreign_models import SMALL, TEXT, saved

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
    return tmp_path / "hf"


def imported(folder: Path) -> Path:
    out = folder.with_name("run")
    assert main(["import", str(folder), "--out", str(out)]) == 0
    return out


def test_every_token_that_ends_texts_there_ends_them_here(hf, bpe):
    run = imported(hf)
    model, tokenizer = perspectron.load(run)
    ends = {0, *map(bpe.token_to_id, (END_OF_TEXT, "<|eot|>", "<|eom|>"))}
    assert tokenizer.stops == ends and all(tokenizer.token_bytes(id) == b"" for id in ends)
    for spelling in ("<|eot|>", "<|stop|><|eot|>", "<|stop|>"):
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
    assert perspectron.load(run.with_name("q"))[1].stops == ends


def words(run: Path) -> Path:
    path = run.with_name("words.txt")
    path.write_text(TEXT * 100)
    return path


def test_a_template_whose_tokens_would_be_spelled_out_is_refused_by_name(hf, capsys):
    run = imported(hf)
    opened = open_model(run)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(hf / "tokenizer.json"), bos_token="<|begin|>")
    wanted = theirs.apply_chat_template(
        HELLO, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    spelled = opened.tokenizer.encode(Template(TEMPLATE, "x").prompt(HELLO))
    assert len(spelled) > len(wanted), "that is why"
    for named in (None, str(hf / FILE)):
        template = opened.template(named)
        assert isinstance(template, Refused)
        with pytest.raises(
            ConfigError,
            match=r"chat_template.jinja writes '<\|.*', a token that would be spelled .* /v1/completions",
        ):
            template.prompt(HELLO)
    capsys.readouterr()
    assert main(["chat", str(run)]) == 2
    said = capsys.readouterr().err
    assert "writes '<|" in said and "perspectron generate" in said and said.count("\n") == 1
    assert main(["generate", str(run), "hi", "--max-tokens", "3"]) == 0


def test_a_server_takes_its_prompts_and_says_why_it_takes_no_messages(hf, tmp_path, capsys):
    run = imported(hf)
    served = Serve((run,))._served(run, open_model(run), tmp_path)
    assert "run: no chat; messages: the chat template" in capsys.readouterr().err
    with TestClient(create([served]), base_url="http://localhost") as client:
        answer = client.post(
            "/v1/chat/completions", json={"model": "run", "messages": HELLO, "max_tokens": 2}
        )
        assert answer.status_code == 400
        assert "writes '<|" in answer.json()["error"]["message"]
        answer = client.post("/v1/completions", json={"model": "run", "prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", END_OF_TEXT),
        ("{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}", END_OF_TEXT),
        ("{% for m in messages %}{{ m.content }}<|begin|>{% endfor %}", END_OF_TEXT),
        ("{% for m in messages %}{{ m.content }}<｜tool▁call｜>{% endfor %}", "<｜tool▁call｜>"),
        ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    ],
)
@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_a_template_is_found_where_transformers_keeps_it(hf, text, token, place):
    (hf / FILE).unlink()
    if place == "file":
        (hf / FILE).write_text(text)
    else:
        whole = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": text}]
        kept = {"chat_template": text if place == "config" else whole}
        (hf / "tokenizer_config.json").write_text(json.dumps(kept))
    template = open_model(imported(hf)).template()
    assert template is not None
    if token is None:
        assert not isinstance(template, Refused) and template.prompt(HELLO) == "user: hi\n"
    else:
        assert isinstance(template, Refused) and repr(token) in template.why


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
    assert template is not None and not isinstance(template, Refused)


def test_export_writes_the_ids_of_the_tokenizer_beside_it(hf, bpe, tmp_path, capsys):
    run = imported(hf)
    capsys.readouterr()
    assert main(["export", str(run), "--hf", str(tmp_path / "out")]) == 0
    assert "without a chat template; messages: the chat template" in capsys.readouterr().err
    begin, end, eot, eom = map(bpe.token_to_id, ("<|begin|>", END_OF_TEXT, "<|eot|>", "<|eom|>"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, PerspectronForCausalLM)
    for config in (model.config, model.generation_config):
        assert config.bos_token_id == config.pad_token_id == 0
        assert sorted(config.eos_token_id) == sorted([0, end, eot, eom])
    # Id 0 is what <|begin|> was: their rows have changed places, and only theirs.
    theirs = AutoModelForCausalLM.from_pretrained(hf)
    rows = theirs.get_input_embeddings().weight.clone()
    rows[[0, begin]] = rows[[begin, 0]]
    assert torch.equal(model.get_input_embeddings().weight, rows)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode([0, 70, end, eot, eom, 71], skip_special_tokens=True) == tokenizer.decode(
        [70, 71]
    )
    with torch.no_grad():
        model.model.lm_head.weight.zero_()
        model.model.lm_head.weight[eot] = 1
        model.model.norm.weight.abs_()
        ids = model.generate(torch.tensor([[0, 7]]), max_new_tokens=4, do_sample=False)
    assert ids[0, 2:].tolist() in ([eot], [0]), "which ends the text"
    again = tmp_path / "again"
    assert main(["import", str(tmp_path / "out"), "--out", str(again)]) == 0
    assert Tokenizer.load(again / "tokenizer.json").fingerprint == open_model(run).tokenizer.fingerprint
    assert open_model(again).template() is None


def test_ends_that_are_no_special_tokens_are_refused(hf, bpe):
    whole = json.loads((hf / "config.json").read_text())
    for value, error, words in (
        (70, DataError, r"id 70, which ends texts, is '.*', must be of a special token"),
        ([0], DataError, r"which ends texts, is '.*', must be of a special token"),
        (300, DataError, "no token 300, which ends texts"),
        (-1, DataError, "no token -1, which ends texts"),
        ("x", CheckpointError, "config.json: eos_token_id is 'x', must be a whole number or a list of them"),
        ([True], CheckpointError, r"config.json: eos_token_id is \[True\], must be a whole number"),
        ([[3]], CheckpointError, r"config.json: eos_token_id is \[\[3\]\], must be a whole number"),
    ):
        (hf / "config.json").write_text(json.dumps(whole | {"eos_token_id": value}))
        with pytest.raises(error, match=words):
            foreign.read(hf)
    (hf / "config.json").write_text(json.dumps(whole))
    for value, error, words in (
        ({"eos_token": "<|none|>"}, DataError, r"no token '<\|none\|>', which ends texts"),
        (
            {"eos_token": 3},
            CheckpointError,
            "tokenizer_config.json: eos_token is 3, must be a token's spelling",
        ),
        ([], CheckpointError, "tokenizer_config.json: must be an object"),
    ):
        (hf / "tokenizer_config.json").write_text(json.dumps(value))
        with pytest.raises(error, match=words):
            foreign.read(hf)
    (hf / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|head|>"}}))
    assert bpe.token_to_id("<|head|>") in foreign.read(hf)[1].stops


def test_special_tokens_keep_their_spelling(hf):
    tokenizer = adopt(hf / "tokenizer.json", [294], [293, 297]).tokenizer
    assert sorted(tokenizer.special()) == sorted([END_OF_TEXT, "<|special293|>", *SPECIAL[1:]])
    assert tokenizer.token_bytes(299).decode() == "<｜tool▁call｜>"
