"""Mixtures of experts packed to few bits: from disk within a budget they give the bits of memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import perspectron
from perspectron import native
from perspectron.data import Tokenizer
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.steps import Steps, stepped, steps_of
from perspectron.decode.verify import ways
from perspectron.experts.fetched import PackedMixture
from perspectron.experts.mixture import Mixture, MixtureConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.heads import LinearHeadConfig
from perspectron.model.mixer import config_of
from perspectron.model.model import LanguageModel
from perspectron.quant.convert import convert
from perspectron.stream.artifact import MANIFEST, layer_file, read_header, save_artifact
from perspectron.stream.engine import StreamedModel, load_artifact
from perspectron.stream.synthetic import synthesize
from perspectron.util.errors import ArtifactError, ConfigError, ShardError
from tests.interop.families import redraw
from tests.refusals import refused

FORMATS = ("4bit32", "8bit32", "2bit", "4bit", "int8")
TEXT = "the cat sat on the mat, and the dog sat on the log. "
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"normed": False},
    "shared": {"shared": 40, "shared_gate": True},
    "groups": {"score": "sigmoid", "corrected": True, "groups": 3, "top_groups": 2, "factor": 1.5, "shared": 40,
               "activation": "relu2"},
}  # fmt: skip


def config(**options: Any) -> ModelConfig:
    """Three layers with six experts each, three of them for a token, and one without."""
    mixed, dense = MixtureConfig(72, 6, 3, **options), SwiGLUConfig(40)
    attention = config_of("attention", heads=4, kv_heads=2, qk_norm="all", clip=2.0)
    blocks = tuple(BlockConfig(attention, ffn) for ffn in (mixed, dense, mixed, mixed))
    return ModelConfig("mixture", 300, 64, blocks, LinearHeadConfig())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 40], 300)


def packed(linear: str = "4bit32", **options: Any) -> LanguageModel:
    model = perspectron.build(config(**options)).eval()
    redraw(model, 5)
    convert(model, linear)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    out = tmp_path_factory.mktemp("mixtures") / "plain"
    save_artifact(packed(normed=False), tokenizer, out)
    return out


def budget(folder: Path, count: int) -> int:
    header = read_header(folder)
    assert header.experts is not None
    return count * header.experts.shard_bytes


def logits(model: LanguageModel, cut: int = 25, rows: int = 1) -> Tensor:
    """Read in one go up to `cut`, then token by token."""
    ids_BT = torch.randint(1, 300, (rows, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        first, steps = model(ids_BT[:, :cut]), steps_of(model)
        out, state = [first.logits], first.state
        for t in range(cut, 40):
            _, logits_BV, state = stepped(model, steps, ids_BT[:, t : t + 1], state)
            out.append(logits_BV[:, None])
    return torch.cat(out, 1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("linear", FORMATS)
def test_it_is_what_was_packed_from_memory_and_from_disk(linear, options, tokenizer, tmp_path):
    model = packed(linear, **options)
    expected = logits(model)
    assert torch.isfinite(expected).all()
    save_artifact(model, tokenizer, tmp_path / "out")
    for cache in (None, budget(tmp_path / "out", 3)):
        loaded, _ = load_artifact(tmp_path / "out", cache_bytes=cache, verify=True)
        assert loaded.cache is not None and loaded.cache.resident == (cache is None)
        assert torch.equal(logits(loaded), expected)


def test_it_streams_with_the_bits_of_memory_in_any_budget(folder):
    model, _ = load_artifact(folder)
    expected = {rows: logits(model, rows=rows) for rows in (1, 9)}
    steps = steps_of(model)
    assert not native.available() or (isinstance(steps, Steps) and steps._latest is not None)
    for count in (3, 4, 7, 17):
        streamed, _ = load_artifact(folder, cache_bytes=budget(folder, count))
        assert streamed.cache is not None and streamed.cache.slots == count
        for rows, wanted in expected.items():
            assert torch.equal(logits(streamed, rows=rows), wanted)
        assert streamed.cache.counters.bytes_read > 0


def test_it_speaks_the_same_tokens_from_disk(folder):
    greedy = SamplingConfig(temperature=0)
    told = [
        generate(*load_artifact(folder, cache_bytes=cache), ["the cat", "the dog sat"], max_tokens=20,
                 sampling=greedy).ids
        for cache in (None, budget(folder, 3))
    ]  # fmt: skip
    assert told[0] == told[1] and len(told[0][0]) > 0


def test_a_text_has_the_bits_that_it_has_alone(folder, tokenizer):
    model, _ = load_artifact(folder, cache_bytes=budget(folder, 5))
    found = ways(model, tokenizer, batches=(1, 9), pieces=(5,), threads=(1,))
    for together in (False, True):
        assert len({way.digest for way in found if way.together == together}) == 1


def test_it_is_near_the_float_model(folder):
    """At 8 bits, where all tokens have the same experts but for ties."""
    model = perspectron.build(config(normed=False)).eval()
    redraw(model, 5)
    wanted, found = logits(model), logits(packed("8bit32", normed=False))
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_padding_takes_no_expert(folder):
    layer = load_artifact(folder)[0].routed[0]
    x = torch.randn(2, 3, 64)
    pad = torch.tensor([[True, False, False], [False, False, False]])
    y, whole = layer(x, pad_BT=pad)[0], layer(x)[0]
    assert not y[0, 0].any() and torch.equal(y[~pad], whole[~pad])


def test_a_budget_below_the_experts_of_a_token_is_refused_with_what_it_takes(folder):
    with pytest.raises(ConfigError) as error:
        load_artifact(folder, cache_bytes=budget(folder, 3) - 1)
    assert f"{budget(folder, 3)}" in str(error.value)


def test_a_file_that_ends_early_is_named(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / layer_file(2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4096])
    with refused(ArtifactError, layer_file(2)):
        load_artifact(copy)
    path.write_bytes(whole)
    model, _ = load_artifact(copy, cache_bytes=budget(copy, 3))
    path.write_bytes(whole[: len(whole) // 2])
    with refused(ShardError, layer_file(2)):
        logits(model)


def test_a_file_that_is_missing_is_named(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / layer_file(3)).unlink()
    with refused(ArtifactError, layer_file(3)):
        load_artifact(copy)


@pytest.mark.parametrize(
    "change", [{"format": "8bit32"}, {"format": "3bit"}, {"count": 5}, {"shard_bytes": 4096}]
)
def test_a_header_of_other_experts_is_refused(folder, tmp_path, change):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    values = json.loads((copy / "config.json").read_text())
    values["experts"] |= change
    (copy / "config.json").write_text(json.dumps(values))
    with refused(ArtifactError, "config.json"):
        read_header(copy)


def test_random_weights_are_made_in_packed_form(tokenizer, tmp_path):
    header = synthesize(config(), tmp_path / "out", lambda: tokenizer, experts=4, linear="4bit32")
    assert header.experts is not None and header.experts.format == "4bit32" and header.experts.distinct == 4
    expected = logits(load_artifact(tmp_path / "out")[0])
    assert 0.3 < expected.std() < 30
    model, _ = load_artifact(tmp_path / "out", cache_bytes=budget(tmp_path / "out", 4), verify=True)
    assert isinstance(model, StreamedModel) and all(isinstance(ffn, PackedMixture) for ffn in model.routed)
    assert torch.equal(logits(model), expected)
    assert MANIFEST in {path.name for path in (tmp_path / "out").iterdir()}


def test_experts_of_16_bits_are_packed_as_they_are(tokenizer):
    """They are not widened together, which takes twice their memory."""
    models = []
    for dtype in (torch.float32, torch.bfloat16):
        model = perspectron.build(config()).eval()
        redraw(model, 5)
        for module in model.modules():
            if isinstance(module, Mixture):
                for name, weight in module.matrices().items():
                    setattr(module, name, torch.nn.Parameter(weight.detach().bfloat16().to(dtype)))
        convert(model, "4bit32")
        models.append(logits(model))
    assert torch.equal(*models)
