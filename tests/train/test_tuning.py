"""Fine-tuning: adapters by PEFT, and completions of prompts with a chat template."""

import io
import json
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from perspectron import presets
from perspectron.cli.main import main
from perspectron.cli.serve import Serve
from perspectron.data import Tokenizer, encode, open_corpus, open_shards
from perspectron.data.loader import IGNORE, Batch, Loader, windows
from perspectron.data.origin import template_of_prompts
from perspectron.data.shards import Split
from perspectron.data.template import CONFIG, FILE, Template
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.model.ffn import SwiGLU
from perspectron.model.model import build
from perspectron.opening import open_model
from perspectron.train import checkpoint, lora
from perspectron.train.config import TrainConfig
from perspectron.train.lora import LoraConfig
from perspectron.train.metrics import read_metrics
from perspectron.train.prepare import asked_template
from perspectron.util.config import load
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import in_a_line, refused

PAIRS = [(f"What is {a} and {b}?", f"It is {a + b}.") for a in range(9) for b in range(9)]
SMALL = [
    "--preset", "transformer-tiny", "--set", "d_model=32", "layers=2", "heads=2", "hidden=32", "vocab_size=300",
]  # fmt: skip
QUICK = [
    "--seq-len", "32", "--batch-size", "2", "--dtype", "float32", "--eval-tokens", "256", "--schedule", "constant",
]  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in PAIRS))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("What is this and that? It is what it is, and 12 and 7.\n" * 80)
    base = ["train", "--data", str(folder / "text.txt"), "--out", str(folder / "run"), *SMALL, *QUICK]
    assert main([*base, "--steps", "4"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def tuned(run: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, with adapters that were trained to answer."""
    pytest.importorskip("peft")
    out = tmp_path_factory.mktemp("tuned") / "answers"
    said = ["--lora", "rank=4,targets=qkv_proj+o_proj", "--template", "plain", "--data", str(pairs)]
    assert main(["train", "--init", str(run), *said, *QUICK, "--steps", "6", "--out", str(out)]) == 0
    return out


# Completions


@pytest.fixture(scope="module")
def shards(pairs: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory):
    corpus = open_corpus(str(pairs), 0.2, template=Template.named("plain"))
    return encode(corpus, tokenizer, tmp_path_factory.mktemp("encoded") / "shards", shard_tokens=500)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([f"{p}\n{c}\n" for p, c in PAIRS], 280)


def test_only_completions_and_what_ends_them_are_targets(shards, tokenizer: Tokenizer) -> None:
    plain = Template.named("plain")
    asked = dict(PAIRS)
    for name in ("train", "heldout"):
        split, learned = shards.split(name), list[str]()
        for batch in windows(split, seq_len=24, batch_size=4):
            chosen = batch.targets_BT[batch.targets_BT != IGNORE]
            learned += ["|" if id == 0 else tokenizer.decode([id]) for id in chosen.tolist()]
            assert batch.targets == len(chosen)
        whole = [tokenizer.decode(split.document(i)) for i in range(split.documents)]
        for text in whole:
            prompt = text[len("### user\n") : text.index("\n\n### assistant")]
            assert text == plain.question(prompt) + asked[prompt]
        # The last document has no separator after it.
        assert "".join(learned) == "|".join(text.rpartition("\n")[2] for text in whole)


def test_a_shuffled_batch_has_the_same_targets_as_the_text_in_order(shards) -> None:
    split = shards.split("train")
    loader = Loader(split, batch_size=loader_rows(split), seq_len=24, seed=1)
    shuffled = loader.next_batch()
    ordered = next(windows(split, seq_len=24, batch_size=loader_rows(split)))
    rows = {
        tuple(ids): targets
        for ids, targets in zip(ordered.ids_BT.tolist(), ordered.targets_BT.tolist(), strict=True)
    }
    for ids, targets in zip(shuffled.ids_BT.tolist(), shuffled.targets_BT.tolist(), strict=True):
        assert rows[tuple(ids)] == targets


def loader_rows(split) -> int:
    return (split.tokens - 1) // 24


@pytest.mark.parametrize("seq_len", [3, 8, 24])
def test_windows_of_prompts_alone_are_left_out_of_each_text(shards, seq_len: int) -> None:
    """Each pass has all others once, of each of several texts, which begin anywhere in the split."""
    parts = [
        (name, Fraction(1, 2), shards.split(split)) for name, split in (("a", "heldout"), ("b", "train"))
    ]
    whole, start, kept = Split.joined(parts), 0, list[list[int]]()
    for _, _, split in parts:
        starts = range(start, start + (split.tokens - 1) // seq_len * seq_len, seq_len)
        kept.append([at for at in starts if whole.is_learned(at + 1, at + seq_len + 1).any()])
        assert len(kept[-1]) < len(starts)
        start += split.tokens
    loader, first = Loader(whole, batch_size=2, seq_len=seq_len, seed=1), parts[0][2].tokens
    assert loader.windows == sum(map(len, kept))
    read = loader._starts(np.arange(2 * start)).tolist()
    for its, own in zip(
        kept, ([at for at in read if (at < first) == one] for one in (True, False)), strict=True
    ):
        assert sorted(own[: len(its)]) == its and sorted(own[len(its) : 2 * len(its)]) == its
    for _ in range(40):
        assert (loader.next_batch().targets_BT != IGNORE).any(1).all()


def test_a_text_of_prompts_alone_is_refused(shards) -> None:
    split = shards.split("train")
    first = int(split.learned[0])
    alone = Split("train", [split.read(0, first)], split.starts[:1], 1)
    alone.learned = split.learned[:1]
    with refused(DataError, "train", "seq_len", 4):
        Loader(alone, batch_size=1, seq_len=4, seed=0)


def test_records_without_prompt_and_completion_are_refused(tmp_path: Path, pairs: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "no pair"}\n' * 3)
    (tmp_path / "text.txt").write_text("no records\n")
    plain = Template.named("plain")
    with refused(DataError, "'prompt'", "'completion'"):
        open_corpus(str(tmp_path / "text.jsonl"), template=plain)
    for source in (str(tmp_path / "text.txt"), "stdlib"):
        with refused(DataError, ".jsonl"):
            open_corpus(source, template=plain)
    other = Template("{{ messages[0].content }}", "other")
    one, two = (open_corpus(str(pairs), template=template).fingerprint for template in (plain, other))
    assert one != two


def test_a_damaged_file_of_completions_is_refused(shards, tmp_path: Path) -> None:
    shutil.copytree(shards.path, tmp_path / "copy")
    path = tmp_path / "copy" / "train-00000.learned"
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with refused(DataError, "train-00000.learned"):
        open_shards(tmp_path / "copy")


# Adapters


def adapted(design: str, text: str, seed: int = 0):
    model = build(presets.small(design, vocab_size=64, seq_len=32), seed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(seed)
    lora.adapt(model, LoraConfig.parse(text), sample())
    return model, before


def sample():
    ids = torch.arange(1, 33)[None]
    return Batch(ids, ids, None, 32)


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_adapters_change_nothing_at_first_and_merge_into_what_they_compute(design: str) -> None:
    model, before = adapted(design, "rank=2")
    ids = torch.arange(1, 20)[None]
    plain = build(model.config, 0)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    merged = lora.merged(model)
    assert merged.keys() == before.keys()
    plain.load_state_dict(merged)
    changed = (plain(ids).logits - build(model.config, 0)(ids).logits).abs().max()
    assert changed > 1e-3
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_only_adapters_of_the_targets_learn() -> None:
    model, _ = adapted("transformer", "rank=3,alpha=6,targets=qkv_proj+blocks.0.mixer.o_proj")
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = {name.split(".lora_")[0] for name in learned}
    assert all("lora_" in name for name in learned)
    assert "blocks.0.mixer.o_proj" in layers and "blocks.1.mixer.o_proj" not in layers
    assert {name for name in layers if name.endswith("qkv_proj")} == {
        f"blocks.{i}.mixer.qkv_proj" for i in range(len(model.blocks))
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank=0", ["rank", 0]),
        ("rank=10000", ["rank", 10000]),
        ("rank=x", ["lora.rank", "x"]),
        ("size=3", ["size", "rank", "alpha", "targets"]),
        ("rank", ["lora", "rank", "KEY=VALUE"]),
        ("targets=nope", ["targets", "nope"]),
    ],
)
def test_adapters_that_make_no_sense(text: str, named: list[object]) -> None:
    with refused(ConfigError, *named):
        adapted("transformer", text)


class Past(SwiGLU):
    """A network of a user's that reads the weights of its layers."""

    def forward(self, x, context=None, **_):
        y = F.silu(F.linear(x, self.gate_proj.weight)) * F.linear(x, self.up_proj.weight)
        return self.down_proj(y), {}


def test_layers_whose_weights_are_read_past_them_are_refused_by_name() -> None:
    for text, name in (
        ("rank=2,targets=up_proj", "blocks.0.ffn.up_proj"),
        ("rank=2", "blocks.0.ffn.gate_proj"),
    ):
        model = build(presets.small("gla", vocab_size=64, seq_len=32), 0)
        model.blocks[0].ffn.__class__ = Past
        with refused(ConfigError, name):
            lora.adapt(model, LoraConfig.parse(text), sample())


def test_routers_have_adapters_where_they_are_named() -> None:
    layers = [
        module
        for module in adapted("perspective-experts", "rank=1")[0].modules()
        if hasattr(module, "lora_A")
    ]
    assert layers and min(min(layer.base_layer.weight.shape) for layer in layers) > 2
    model, _ = adapted("perspective-experts", "rank=1,targets=route_proj")
    model(sample().ids_BT, targets=sample().targets_BT).objective().backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or "route_proj" in name
        assert "lora_B" not in name or parameter.grad.abs().sum() > 0, name


def test_peft_on_the_model_of_transformers_computes_the_same(run: Path) -> None:
    pytest.importorskip("transformers")
    import peft

    from perspectron.interop.hf import PerspectronConfig, PerspectronForCausalLM

    opened = open_model(run)
    theirs = PerspectronForCausalLM(PerspectronConfig.of(opened.model.config))
    theirs.model.load_state_dict(opened.model.state_dict())
    made = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["qkv_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(theirs, made)
    lora.adapt(opened.model, LoraConfig.parse("rank=4,alpha=8,targets=qkv_proj"), sample())
    own = dict(opened.model.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
            own[name.removeprefix("base_model.model.model.")].data.copy_(parameter.data)
    ids = torch.arange(1, 30)[None]
    torch.testing.assert_close(theirs(input_ids=ids).logits, opened.model(ids).logits)
    whole = theirs.merge_and_unload()
    torch.testing.assert_close(whole.model.state_dict()["blocks.0.mixer.qkv_proj.weight"],
                               lora.merged(opened.model)["blocks.0.mixer.qkv_proj.weight"])  # fmt: skip


# Runs


def test_a_run_of_adapters_is_a_run_as_any_other(tuned: Path, run: Path) -> None:
    base, after = open_model(run), open_model(tuned)
    changed = {
        name
        for name, tensor in after.model.state_dict().items()
        if not tensor.equal(base.model.state_dict()[name])
    }
    assert changed == {f"blocks.{i}.mixer.{name}.weight" for i in range(2) for name in ("qkv_proj", "o_proj")}
    change = (
        after.model.state_dict()["blocks.0.mixer.o_proj.weight"]
        - base.model.state_dict()["blocks.0.mixer.o_proj.weight"]
    )
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 4
    assert Template.of(tuned).text == Template.named("plain").text
    assert Tokenizer.load(tuned / "tokenizer.json").fingerprint == base.tokenizer.fingerprint


def test_adapters_that_were_stopped_go_on_bit_for_bit(
    tuned: Path, run: Path, pairs: Path, tmp_path: Path
) -> None:
    said = ["--lora", "rank=4,targets=qkv_proj+o_proj", "--template", "plain", "--data", str(pairs)]
    said += [*QUICK, "--cooldown", "0"]
    half, base, whole = tmp_path / "half", tmp_path / "base", tmp_path / "whole"
    shutil.copytree(run, base)
    assert main(["train", "--init", str(base), *said, "--steps", "3", "--out", str(half)]) == 0
    shutil.rmtree(base)  # it goes on without the run that it began with
    assert main(["train", "--resume", str(half), "--steps", "6"]) == 0
    assert main(["train", "--init", str(run), *said, "--steps", "6", "--out", str(whole)]) == 0
    for name in ("model.safetensors", "training.safetensors"):
        one, other = (checkpoint.path_of(folder, 6) / name for folder in (half, whole))
        assert one.read_bytes() == other.read_bytes(), name


def test_a_template_of_its_own_is_that_of_the_run_it_begins_with(
    run: Path, pairs: Path, tmp_path: Path
) -> None:
    """As an imported model has it, with its tokens and the one for tools; also where it goes on."""
    text = "{{ bos_token }}{% for m in messages %}{{ m.content }}|{% endfor %}"
    came, more = tmp_path / "came", tmp_path / "more"
    shutil.copytree(run, came)
    (came / "source").mkdir()
    named = [{"name": "default", "template": text}, {"name": "tool_use", "template": f"{text}tools"}]
    (came / "source" / CONFIG).write_text(json.dumps({"chat_template": named, "bos_token": "<s>"}))
    said = ["--template", "own", "--data", str(pairs), *QUICK, "--steps", "2", "--cooldown", "0"]
    assert main(["train", "--init", str(came), *said, "--out", str(more)]) == 0
    shutil.rmtree(came)
    assert main(["train", "--resume", str(more), "--steps", "3"]) == 0
    for found in (open_model(more).template(), template_of_prompts(more)):
        assert found.text == text and found.tokens["bos_token"] == "<s>"
        assert found.tool_use.text == f"{text}tools"
    for init in (str(run), ""):
        with refused(ConfigError, "template", "own", init or "init"):
            asked_template(TrainConfig(init=init, template="own"))


def test_what_was_tuned_answers_in_chat(tuned: Path, capsys, monkeypatch) -> None:
    opened, template = open_model(tuned), Template.of(tuned)
    model, tokenizer = opened.model, opened.tokenizer
    lines = b"What is 1 and 2?\nWhat is 3 and 4?\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    capsys.readouterr()
    assert main(["chat", str(tuned), "--max-tokens", "5", "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    greedy = SamplingConfig(temperature=0)
    asked = template.question("What is 1 and 2?")
    first = generate(model, tokenizer, [asked], max_tokens=5, sampling=greedy)
    messages = [
        {"role": "user", "content": "What is 1 and 2?"},
        {"role": "assistant", "content": first.texts[0]},
        {"role": "user", "content": "What is 3 and 4?"},
    ]
    rest = template.prompt(messages)[len(asked) + len(first.texts[0]) :]
    assert rest == "\n\n### user\nWhat is 3 and 4?\n\n### assistant\n"
    assert first.finished == ["length"]
    second = generate(
        model, tokenizer, [rest], max_tokens=5, sampling=greedy, conversation=first.conversation
    )
    assert said == f"{first.texts[0]}\n{second.texts[0]}\n"


def test_the_server_answers_by_the_template_of_the_run(tuned: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    plain = Template.named("plain").text
    newest = checkpoint.paths(tuned)[-1]
    for folder, options, text in (
        (tuned, {}, plain),
        (newest, {}, plain),
        (tuned, {"template": str(tmp_path / "own.jinja")}, "{{ messages[0].content }}"),
        (run, {"template": "plain"}, plain),
    ):
        served = Serve((folder,), **options)._served(folder, open_model(folder), tmp_path)
        served.engine.close()
        assert served.template.text == text
    served = Serve((run,))._served(run, open_model(run), tmp_path)
    served.engine.close()
    assert served.template is None


def test_the_template_goes_where_the_model_goes(tuned: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(["export", str(tuned), "--hf", str(tmp_path / "hf")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "What is 1 and 2?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == Template.of(tuned).question("What is 1 and 2?")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "again")]) == 0
    assert open_model(tmp_path / "again").template().text == (tuned / FILE).read_text()


def test_windows_of_prompts_alone_are_left_out(run: Path, tmp_path: Path) -> None:
    long = [{"prompt": "and so on " * 12, "completion": "."}] * 9
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(pair | {"prompt": f"{i} {pair['prompt']}"}) + "\n"
                                                 for i, pair in enumerate(long)))  # fmt: skip
    said = ["--init", str(run), "--template", "plain", "--data", str(tmp_path / "long.jsonl"), *QUICK]
    said[said.index("--eval-tokens") + 1] = "0"
    assert main(["train", *said, "--steps", "12", "--out", str(tmp_path / "run")]) == 0
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(losses) == 12 and min(losses) > 0


@pytest.mark.parametrize("option", ["init", "teacher"])
def test_what_a_run_was_trained_on_is_not_held_out(tmp_path: Path, capsys, option: str) -> None:
    """Of one text, of which records were split by what their prompts and completions say, or by their texts."""
    lines = [{"prompt": p, "completion": c, "text": f"{p} {c}"} for p, c in PAIRS]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train = ["train", *QUICK, "--steps", "2", "--data", str(tmp_path / "both.jsonl")]
    for name, template in (("texts", []), ("pairs", ["--template", "plain"])):
        assert main([*train, *SMALL, *template, "--out", str(tmp_path / name)]) == 0
    again = [*train, *(SMALL if option == "teacher" else []), "--out", str(tmp_path / "out"), f"--{option}"]

    def is_refused(origin: str, *template: str) -> None:
        capsys.readouterr()
        assert main([*again, str(tmp_path / origin), *template]) == 2
        in_a_line(
            capsys.readouterr().err.splitlines()[-1], option, tmp_path / origin, tmp_path / "both.jsonl"
        )
        assert not (tmp_path / "out").exists()

    is_refused("texts", "--template", "plain")
    is_refused("pairs")
    assert main([*again, str(tmp_path / "pairs"), "--template", "plain"]) == 0
    shutil.rmtree(tmp_path / "out")
    config = tmp_path / "pairs" / "config.json"  # as an earlier checkout wrote it
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rule": 2}))
    is_refused("pairs", "--template", "plain")


@pytest.mark.parametrize("seq_len", [8, 24])
@pytest.mark.parametrize("name", ["train", "heldout"])
def test_a_sample_of_completions_is_of_windows_with_targets(shards, seq_len: int, name) -> None:
    split = shards.split(name)
    for count in (2, 5, 10**6):
        limit = min(count * seq_len, split.tokens - 1)
        sample = [*windows(split, seq_len=seq_len, batch_size=1, limit_tokens=limit, spread=True)]
        whole = [*windows(split, seq_len=seq_len, batch_size=1)][: (split.tokens - 1) // seq_len]
        there = [batch.ids_BT.tolist() for batch in whole if batch.targets]
        assert len(sample) == min(limit // seq_len, len(there)) and all(batch.targets for batch in sample)
        rest = iter(there)
        assert all(batch.ids_BT.tolist() in rest for batch in sample), "in their order"


def test_what_cannot_be_measured_is_said_before_the_training(run: Path, tmp_path: Path, capsys) -> None:
    pairs = [{"prompt": f"{i} " + "and so on " * 99, "completion": "."} for i in range(60)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    said = ["--init", str(run), "--template", "plain", "--data", str(tmp_path / "long.jsonl"), *QUICK]
    train = ["train", *said, "--steps", "2", "--out", str(tmp_path / "run"), "--eval-tokens"]
    assert main([*train, "16"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "heldout", "eval_tokens")
    assert not (tmp_path / "run").exists()
    assert main([*train, "64"]) == 0  # prompts have thousands
    assert "prompts alone" in capsys.readouterr().err


def test_a_pass_is_over_the_windows_that_are_not_left_out(run: Path, tmp_path: Path, capsys) -> None:
    pairs = [{"prompt": f"{i} " + "and so on " * 9, "completion": "."} for i in range(60)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    said = ["--init", str(run), "--template", "plain", "--data", str(tmp_path / "long.jsonl"), *QUICK]
    assert main(["train", *said, "--epochs", "2", "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert "prompts alone" in told and " 2 passes over the text" in told


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lora", "rank=4"], ["lora", "rank=4", "init"]),
        (["--lora", "rank=4", "--init", "{run}", "--only", "*"], ["only", "lora"]),
        (["--init", "{run}", "--template", "nowhere.jinja"], ["nowhere.jinja"]),
        (["--init", "{run}", "--template", "plain"], [".jsonl"]),
        (["--init", "{run}", "--tokenizer", "bytes"], ["tokenizer", "bytes"]),
        (["--init", "{run}", "--lora", "targets=nope"], ["targets", "nope"]),
    ],
)
def test_tuning_that_makes_no_sense_leaves_nothing_behind(
    run: Path, tmp_path: Path, arguments: list[str], named: list[object], capsys
) -> None:
    filled = [word.format(run=run) for word in arguments]
    assert main(["train", *filled, *QUICK, "--steps", "2", "--out", str(tmp_path / "out")]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert not (tmp_path / "out").exists()


def test_encoded_pairs_go_with_the_template_that_made_them(
    tuned: Path, run: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }}: ")
    shutil.copy(tuned / FILE, tmp_path / "same.jinja")
    encoded = shutil.copytree(tuned / "data", tmp_path / "encoded")
    shutil.copy(tuned / "tokenizer.json", encoded)
    train = ["train", "--init", str(run), *QUICK, "--steps", "2", "--out", str(tmp_path / "out"), "--data"]
    for data, template, named in (
        (encoded, [str(tmp_path / "other.jinja")], [encoded / FILE]),
        (encoded, [], ["template", encoded / FILE]),
        (run / "data", ["plain"], [run / "data"]),
    ):
        assert main([*train, str(data), *(["--template", *template] if template else [])]) == 2
        in_a_line(capsys.readouterr().err, *named)
        assert not (tmp_path / "out").exists()
    assert main([*train, str(encoded), "--template", str(tmp_path / "same.jinja")]) == 0
    assert Template.of(tmp_path / "out").text == Template.of(tuned).text


def test_a_config_names_what_is_wrong_with_its_adapters() -> None:
    with refused(ConfigError, "rank", -1):
        load(TrainConfig, {"lora": "rank=-1", "init": "run"})
    assert replace(TrainConfig(init="run"), lora="rank=2").lora == "rank=2"
