"""Weights are put back under the names of the family that they came from."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from perspectron.cli.main import main
from perspectron.cli.progress import Work
from perspectron.data import origin
from perspectron.interop import foreign
from perspectron.interop.hf.back import put_back
from perspectron.opening import open_model
from tests.foreign_models import saved, tokenizer
from tests.interop import (
    families,
    test_families,
    test_hybrids,
    test_kimi_linear,
    test_later_hybrids,
    test_mixtures,
)
from tests.refusals import names

CASES = [
    *test_families.CASES, *test_hybrids.CASES, *test_mixtures.CASES, *test_later_hybrids.CASES,
    *test_later_hybrids.MIXTURES, *test_kimi_linear.CASES,
]  # fmt: skip


@pytest.fixture(params=range(len(CASES)), ids=[str(family) for family in CASES])
def case(request, tmp_path):
    """The tensors of a folder, the model that was made of them, and the folder of what a run keeps."""
    folder = families.save(families.made(CASES[request.param]), tmp_path / "hf")
    source = foreign.opened(folder)
    model = foreign.model(source)
    files = origin.files(folder) | {origin.WEIGHTS: json.dumps(source.taken)}
    origin.keep(files, tmp_path / "run")
    return load_file(folder / "model.safetensors"), model, tmp_path / "run" / origin.FOLDER


def test_they_are_those_that_came(case):
    theirs, model, came = case
    back = put_back(model, came)
    assert not isinstance(back, str), back
    assert theirs.keys() - {"lm_head.weight"} <= back.keys() <= theirs.keys()
    for name, tensor in back.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name


def test_those_of_a_model_that_learned_give_the_model_again(case):
    _, model, came = case
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.randn_like(parameter) * 16).round() / 64)
    back = put_back(model, came)
    assert not isinstance(back, str), back


def test_where_it_cannot_be_the_reason_is_said(case):
    _, model, came = case
    (came / origin.WEIGHTS).unlink()
    assert isinstance(put_back(model, came), str)


def test_a_model_of_images_is_exported_with_a_word_that_it_has_text_alone(tmp_path, capsys):
    text = test_families.SMALL | {"vocab_size": 300, "sliding_window": 5, "model_type": "gemma3_text"}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    folder = families.save(AutoModelForImageTextToText.from_config(config), tmp_path / "hf")
    tokenizer().save(str(folder / "tokenizer.json"))
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "out")]) == 0
    assert names(capsys.readouterr().err, "images")
    tensors = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert tensors and not any("vision" in name for name in tensors)


def test_the_reason_is_told_of_a_checkpoint_as_of_its_run(tmp_path, capsys):
    saved(tmp_path / "hf", "llama", tokenizer())
    run = tmp_path / "run"
    assert main(["import", str(tmp_path / "hf"), "--out", str(run), "--cache", "bfloat16"]) == 0
    for number, path in enumerate((run, run / "checkpoints" / "step-00000000")):
        capsys.readouterr()
        assert main(["export", str(path), "--hf", str(tmp_path / f"out-{number}")]) == 0
        assert "another config" in capsys.readouterr().err


def test_a_model_is_loaded_before_its_file_is_said_to_be_written(tmp_path, monkeypatch):
    """Two that tell of themselves at once would write over each other's line."""
    saved(tmp_path / "hf", "llama", tokenizer())
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    told = list[str]()
    monkeypatch.setattr(Work, "__enter__", lambda work: told.append(work.what))
    monkeypatch.setattr(Work, "__exit__", lambda work, *_: told.append(""))
    for option in ("--hf", "--onnx"):
        out = tmp_path / f"out{option}"
        assert main(["export", str(tmp_path / "run"), option, str(out)]) == 0
        assert told == [f"loading {tmp_path / 'run'}", "", f"writing {out}", ""]
        told.clear()


def test_what_was_learned_since_is_not_rounded_to_what_it_came_in(tmp_path, monkeypatch):
    """transformers loads in the dtype that config.json names."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "hf", "llama", tokenizer())
    half = AutoModelForCausalLM.from_pretrained("hf", dtype=torch.bfloat16)
    half.save_pretrained("hf")
    (tmp_path / "text.txt").write_text("The cat sat on the mat, and the dog on the log. " * 300)
    more = ["--steps", "2", "--seq-len", "16", "--batch-size", "2", "--dtype", "float32", "--lr", "1e-4"]
    assert main(["import", "hf", "--out", "came"]) == 0
    assert main(["train", "--init", "came", "--data", "text.txt", "--out", "run", *more]) == 0
    for run, dtype in (("came", torch.bfloat16), ("run", torch.float32)):
        assert main(["export", run, "--hf", f"{run}-out"]) == 0
        theirs = AutoModelForCausalLM.from_pretrained(f"{run}-out", attn_implementation="eager").eval()
        assert theirs.dtype == dtype
    with torch.no_grad():
        ids = families.text(rows=1)
        ours = open_model(tmp_path / "run").model(ids).logits
        assert torch.allclose(theirs(ids).logits, ours, atol=1e-4)


def test_a_model_of_several_dtypes_is_exported_as_it_came(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "hf", "llama", tokenizer())
    AutoModelForCausalLM.from_pretrained("hf", dtype=torch.bfloat16).save_pretrained("hf")
    tensors = load_file("hf/model.safetensors")
    name = next(name for name in tensors if "norm" in name)
    save_file(tensors | {name: tensors[name].float()}, "hf/model.safetensors", {"format": "pt"})
    assert main(["import", "hf", "--out", "came"]) == 0 == main(["export", "came", "--hf", "out"])
    assert {name: tensor.dtype for name, tensor in load_file("out/model.safetensors").items()} == {
        own: torch.float32 if own == name else torch.bfloat16 for own in tensors
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("ours", [False, True], ids=["as it came", "as our class"])
def test_what_a_model_came_with_is_exported_too(ours, tmp_path, monkeypatch):
    """A template for tools, the first token that only the template writes, and the authors' sampling options."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "hf", "llama", tokenizer())
    hf, first = tmp_path / "hf", tokenizer().id_to_token(7)
    own = json.loads(path.read_text()) if (path := hf / "tokenizer_config.json").exists() else {}
    path.write_text(json.dumps(own | {"bos_token": first, "image_token": first, "add_bos_token": False}))
    (hf / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates" / "tool_use.jinja").write_text("{{ bos_token }}{{ tools }}")
    options = {"temperature": 0.6, "top_p": 0.9} | ({} if ours else {"do_sample": True})
    (hf / "generation_config.json").write_text(json.dumps(options))
    assert main(["import", "hf", "--out", "run", *(["--cache", "bfloat16"] if ours else [])]) == 0
    assert main(["export", "run", "--hf", "out"]) == 0
    theirs = PreTrainedTokenizerFast.from_pretrained("out")
    assert theirs.bos_token == theirs.image_token == first
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found.items() >= options.items()
    assert GenerationConfig.from_pretrained("out").temperature == 0.6
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").exists()
    with torch.no_grad():
        assert len(PreTrainedTokenizerFast.from_pretrained("out")) == tokenizer().get_vocab_size()


def test_one_vector_in_float32_makes_no_model_twice_as_large(tmp_path):
    saved(tmp_path / "hf", "llama", tokenizer())
    file = tmp_path / "hf" / "model.safetensors"
    tensors = {
        name: tensor.to(torch.bfloat16 if tensor.ndim > 1 else torch.float32)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    source = foreign.opened(tmp_path / "hf")
    source.open_weights()
    assert source.itemsize == 2
