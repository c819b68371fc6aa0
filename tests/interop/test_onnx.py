"""One step in ONNX: the same tokens as in PyTorch, and what is not exported is named."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perspectron import presets
from perspectron.cli.main import main
from perspectron.data import Tokenizer
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.interop import onnx
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.model import LanguageModel, build
from perspectron.opening import open_model
from perspectron.ops.rope import RopeScaling
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.util.errors import ArtifactError, ConfigError
from tests.refusals import in_a_line, refused

SIZES = {
    "perspective-tiny-dense": {
        "layers": 2,
        "d_model": 16,
        "hidden": 16,
        "rank": 4,
        "heads": 2,
        "kv_heads": 1,
        "window": 8,
    },
    "gla-tiny": {"layers": 1, "d_model": 16, "heads": 2, "hidden": 16},
    "ssd-tiny": {"layers": 1, "d_model": 32},
    "transformer-tiny": {"layers": 1, "d_model": 16, "heads": 2, "hidden": 16},
    "gpt2-tiny": {"layers": 1, "d_model": 16, "heads": 2},
    "gdn-tiny": {"layers": 1, "d_model": 16, "heads": 2, "hidden": 16},
}


ATTENTION = {
    "attention with groups": AttentionConfig(
        4, 1e4, True, 0.5, 2, 10, None, RopeScaling("yarn", 4.0, 16), False, "head", gate="sigmoid"
    ),
    "attention with a window": AttentionConfig(4, kv_heads=1, window=5, qk_norm="all", cap=2.0),
}


PARTS = {
    "single inputs that read the token before": {"shift": ("k", "v", "network")},
    "convolved inputs": {"input_conv": ("k", "network"), "input_swish": True},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the quick brown fox jumps over the lazy dog. " * 9], 280)


def small(name: str) -> ModelConfig:
    if name in ATTENTION:
        return ModelConfig(name, 280, 16, (BlockConfig(ATTENTION[name], SwiGLUConfig(16)),) * 2)
    if name in PARTS:
        return presets.get("transformer-tiny", vocab_size=280, **SIZES["transformer-tiny"], **PARTS[name])
    return presets.get(name, vocab_size=280, **SIZES[name])


def lively(name: str) -> LanguageModel:
    """A model whose greedy text does not repeat one token."""
    model = build(small(name), 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model


Exported = Callable[[str, int], tuple[LanguageModel, Path, onnx.Report]]


@pytest.fixture(scope="module")
def exported(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """exported(name, context): a model, its file in a folder of its own, and what the export says; made once."""

    @functools.cache
    def of(name: str, context: int) -> tuple[LanguageModel, Path, onnx.Report]:
        model, path = lively(name), tmp_path_factory.mktemp("exported") / "play.onnx"
        return model, path, onnx.export(model, tokenizer, path, context=context)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SIZES, *ATTENTION, *PARTS])
def test_greedy_tokens_and_logits_are_those_of_torch(
    name: str, tokenizer: Tokenizer, exported: Exported
) -> None:
    import onnxruntime

    context = 16 if name == "transformer-tiny" else 256
    model, path, report = exported(name, context)
    assert report.tokens == min(200, context - 1) and report.ms > 0 and report.torch_ms > 0
    assert report.bytes == path.stat().st_size and [p.name for p in path.parent.iterdir()] == ["play.onnx"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    known = session.get_modelmeta().custom_metadata_map
    assert Tokenizer.parse(known["tokenizer"], path).fingerprint == tokenizer.fingerprint
    # On a text of its own choosing, over documents of different lengths.
    generator = torch.Generator().manual_seed(0)
    names = [(i.name, i.shape, np.int64 if "int64" in i.type else np.float32) for i in session.get_inputs()]
    for length in (1, 12):
        ids = torch.randint(1, 280, (1, length), generator=generator)
        ids[0, 0] = 0
        state = {name: np.zeros(shape, dtype) for name, shape, dtype in names if name != "ids"}
        found = []
        for id in ids[0].tolist():
            logits, *after = session.run(None, {"ids": np.array([[id]])} | state)
            state = dict(zip(state, after, strict=True))
            found.append(logits[0])
        with torch.no_grad():
            wanted = model(ids).logits[0].numpy()
        np.testing.assert_allclose(np.stack(found), wanted, atol=2e-5, rtol=1e-4)
    tokens, *_ = onnx._greedy_torch(onnx.Step(model, context), report.tokens, 0)
    assert len(set(tokens)) > 1


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "onnx.md"


def guide(folder: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the guide's code leaves, with another first line of ids."""
    code = GUIDE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    told = 'ids = [0, *tokenizer.encode("KING").ids]'
    assert code.count(told) == 1
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code.replace(told, f"ids = {prompt}"), names)
    return names


@pytest.mark.parametrize("name", SIZES)
def test_the_guide_keeps_texts_apart_and_takes_no_text_for_the_separator(
    name: str, tokenizer: Tokenizer, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path, _ = exported(name, 256)
    text = "a<|endoftext|>b"
    names = guide(path.parent, f"[0, *tokenizer.encode({text!r}).ids]", monkeypatch)
    told = tokenizer.encode(text)
    assert names["ids"][: len(told) + 1] == [0, *told] and 0 not in told
    assert names["tokenizer"].decode(told) == text
    ids = [0, *range(60, 116), 0, 200, 201]  # 60 tokens: two texts, and nothing to draw
    names = guide(path.parent, str(ids), monkeypatch)
    with torch.no_grad():
        reset_BT = torch.tensor([ids]) == 0
        wanted = model(torch.tensor([ids[:60]]), reset_BT=reset_BT[:, :60]).logits[0, 59].numpy()
        other = model(torch.tensor([ids[:60]])).logits[0, 59].numpy()
    np.testing.assert_allclose(names["logits"][0], wanted, atol=2e-5, rtol=1e-4)
    assert np.abs(other - wanted).max() > 1e-3, "what was before matters otherwise"


def test_attention_looks_back_on_its_context(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Beyond it the oldest tokens are forgotten, as in a window."""
    model = lively("transformer-tiny")
    step = onnx.Step(model, 8)
    state, ids = list(step.start), torch.randint(1, 280, (30,))
    with torch.inference_mode():
        for id in ids:
            logits, *state = step(id.view(1, 1), *state)
    assert state[0].shape[2] == 8 and logits.isfinite().all()
    with refused(ConfigError, "context", 1):
        onnx.export(model, tokenizer, tmp_path / "x.onnx", context=1)
    with refused(ConfigError, "context", 4097):
        onnx.require_exportable(build(presets.get("gpt2-tiny", vocab_size=280), 0), 4097)


@pytest.mark.parametrize(
    ("name", "sizes", "named"),
    [
        ("drm-104k", {}, ["drm"]),
        ("perspective-tiny", {}, ["routed"]),
        ("perspective-tiny-dense", {"renorm_every": 4}, ["renorm_every", 4]),
    ],
)
def test_what_is_not_exported_is_named(
    name: str, sizes: dict[str, int], named: list[object], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = build(presets.get(name, vocab_size=280, **sizes), 0)
    with refused(ConfigError, *named):
        onnx.export(model, tokenizer, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_keys_and_values_in_bfloat16_are_refused_before_anything_is_written(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    block = BlockConfig(AttentionConfig(4, 1e4, cache="bfloat16"), SwiGLUConfig(16))
    model = build(ModelConfig("half", 280, 16, (block,)), 0)
    with refused(ConfigError, "blocks[0].mixer.cache", "bfloat16"):
        onnx.export(model, tokenizer, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_whose_tokens_differ_is_not_written(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx, "_write", lambda step, tokenizer, path: path.write_bytes(b"a program"))
    monkeypatch.setattr(onnx, "_greedy", lambda path, step, count, first: ([1] * count, 1.0))
    ours = [1] * 7 + [2] * 193
    monkeypatch.setattr(onnx, "_greedy_torch", lambda step, count, first: (ours, [0.01] * count, 1.0))
    with refused(ArtifactError, 7):
        onnx.export(build(small("gla-tiny"), 0), tokenizer, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(
        onnx, "_greedy_torch", lambda step, count, first: (ours, [1.0] * 7 + [1e-6] * 193, 1.0)
    )
    report = onnx.export(build(small("gla-tiny"), 0), tokenizer, tmp_path / "model.onnx")
    assert report.tokens == 7, "after a tie two texts go on"


def test_the_command_says_what_was_checked(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "model.onnx"
    model = build(small("gla-tiny"), 0)
    config = RunConfig(model.config, TrainConfig(data="", dtype="float32", device="cpu"))
    checkpoint.export(run, config, tokenizer, model, checkpoint.Progress())
    assert open_model(run).model.config == model.config
    assert main(["export", str(run), "--onnx", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checked_tokens"] == 200 and said["bytes"] == out.stat().st_size and said["ms_per_step"] > 0
    for arguments, named in (
        (["--onnx", str(out)], [out]),
        ([], ["hf", "onnx"]),
        (["--onnx", "a", "--hf", "b"], ["hf", "onnx", "both"]),
    ):
        assert main(["export", str(run), *arguments]) == 2
        in_a_line(capsys.readouterr().err, *named)
    monkeypatch.setattr("perspectron.cli.options.find_spec", lambda name: None)
    assert main(["export", str(run), "--onnx", str(tmp_path / "b.onnx")]) == 2
    in_a_line(capsys.readouterr().err, "onnx", "perspectron[onnx]")
