"""Weights of 16 bits: they stay so on disk and in memory, and the model computes with them in float32."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.interop import foreign, onnx
from perspectron.model import half
from perspectron.model.model import LanguageModel
from perspectron.util.errors import ConfigError
from perspectron.util.machine import Peak
from tests.foreign_models import TEXT, V, tokenizer
from tests.interop import families
from tests.interop.families import HEADS, OUTER, Family
from tests.interop.test_families import GEMMA, SMALL, YARN
from tests.refusals import refused

CASES = [
    Family("llama", SMALL | {"rope_parameters": YARN, "attention_bias": True}),
    Family("qwen3", SMALL | {"tie_word_embeddings": True}),
    Family("gemma3_text", GEMMA),
    Family("olmo2", SMALL),
]


@cache
def sharded(index: int, root: Path) -> tuple[Any, LanguageModel, Path]:
    """transformers' model in float32 of a folder of bfloat16 in two shards, ours of it, and the folder."""
    folder = families.save(families.made(CASES[index]).bfloat16(), root / str(index), shards=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return theirs, families.read(folder), folder


@pytest.fixture(params=range(len(CASES)), ids=[str(family) for family in CASES], scope="module")
def index(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("halves")


def test_shards_of_bfloat16_are_the_same_function_in_float32(index, root, tmp_path):
    theirs, ours, _ = sharded(index, root)
    matrices = [x for x in ours.parameters() if x.ndim == 2]
    assert {x.dtype for x in matrices} == {torch.bfloat16} and ours.dtype is torch.float32
    families.logits_are_the_same(theirs, ours)
    families.greedy_tokens_are_the_same(theirs, ours)


def test_bits_are_those_of_one_reading_and_of_the_widened_model(index, root, tmp_path):
    _, ours, folder = sharded(index, root)
    families.bits_are_those_of_one_reading(ours, tmp_path)
    wide = families.read(folder)
    half.widen(wide)
    assert all(x.dtype is torch.float32 for x in wide.parameters())
    assert wide.fingerprint() == ours.fingerprint()
    with torch.no_grad():
        assert torch.equal(wide(families.text()).logits, ours(families.text()).logits)


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    """An imported run of bfloat16, with a tokenizer."""
    sizes = SMALL | {"vocab_size": V, "bos_token_id": None, "eos_token_id": 299, "tie_word_embeddings": True}
    folder = families.save(families.made(Family("qwen3", sizes)).bfloat16(), root / "hf", shards=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    assert main(["import", str(folder), "--out", str(root / "run")]) == 0
    return root / "run"


def test_a_run_keeps_them_on_disk(run):
    (path,) = run.glob("checkpoints/*/model.safetensors")
    size = sum(x.numel() for x in perspectron.load(run)[0].parameters())
    assert path.stat().st_size < 2.6 * size


def test_adapters_are_trained_on_it_and_another_run_starts_from_it(run, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 40)
    line = f"train --init {run} --data {tmp_path / 'text.txt'} --steps 2 --seq-len 16 --batch-size 2 --device cpu"
    for name, flags in (("lora", ["--lora", "rank=2"]), ("whole", [])):
        assert main([*line.split(), "--out", str(tmp_path / name), *flags]) == 0
    before = perspectron.load(run)[0].state_dict()
    for name in ("lora", "whole"):
        after = perspectron.load(tmp_path / name)[0].state_dict()
        changed = {n for n, x in after.items() if not torch.equal(x.float(), before[n].float())}
        assert any("qkv_proj" in n for n in changed) and ("norm.weight" in changed) == (name == "whole")


@pytest.mark.slow
def test_it_is_packed_and_exported_to_onnx(run, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 40)
    words = ["--calibrate", str(tmp_path / "text.txt"), "--windows", "1"]
    assert main(["quantize", str(run), "--out", str(tmp_path / "q"), *words]) == 0
    model, known = perspectron.load(run)
    assert onnx.export(model, known, tmp_path / "model.onnx", context=32).tokens == 31


@pytest.mark.parametrize("preset", ["drm-104k", "perspective-tiny"])
def test_designs_that_read_layers_without_calling_them_are_kept_in_16_bits(preset, tmp_path):
    model, own = perspectron.build(presets.get(preset, vocab_size=V)), perspectron.Tokenizer.train([TEXT], V)
    perspectron.save(model.bfloat16(), own, tmp_path)
    ours, wide = (perspectron.load(tmp_path)[0] for _ in range(2))
    half.widen(wide)
    assert torch.bfloat16 in {x.dtype for x in ours.parameters()} - {x.dtype for x in wide.parameters()}
    torch.testing.assert_close(ours(families.text()).logits, wide(families.text()).logits)


def test_a_text_past_the_positions_is_refused(run):
    opened, known = perspectron.load(run)
    assert opened.config.longest == 512
    with refused(ConfigError, "max_tokens", 600):
        perspectron.generate(opened, known, ["the fox"], max_tokens=600)
    assert main(["generate", str(run), "the fox", "--max-tokens", "600"]) == 2


def test_importing_takes_the_memory_of_the_weights_once(tmp_path):
    sizes = OUTER | HEADS | {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8}
    folder = families.save(families.made(Family("llama", sizes)).bfloat16(), tmp_path, shards=True)
    families.read(folder)
    with Peak() as peak:
        model = families.read(folder)
    size = sum(x.nbytes for x in model.parameters())
    assert size > 2e7
    assert peak.bytes is None or peak.bytes < 1.35 * size


def test_what_does_not_fit_is_refused_with_its_bytes(tmp_path, monkeypatch):
    folder = families.save(families.made(CASES[1]), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    families.change(folder, vocab_size=2**24, hidden_size=values["hidden_size"])
    monkeypatch.setattr("perspectron.model.model.memory", lambda: 10**9)
    with refused(ConfigError, "transformer", "1.1"):
        foreign.read(folder)
