"""Models run from an artifact: what streams gives the bits of what is in memory, and a damaged folder one line."""

import gc
import hashlib
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron import native, presets
from perspectron.data import Tokenizer
from perspectron.decode.generate import Conversation, generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.errors import ArtifactError, ConfigError, ShardError, StateError, StorageError
from perspectron.eval.cost import bench, touched
from perspectron.model import LanguageModel
from perspectron.ops import packing
from perspectron.quant.convert import QuantConfig, convert
from perspectron.stream.artifact import MANIFEST, SHARED, is_artifact, layer_file, read_header, save_artifact
from perspectron.stream.device import DeviceExperts
from perspectron.stream.engine import StreamedModel, load_artifact
from perspectron.stream.synthetic import Draw, synthesize

SIZES = {
    "d_model": 64,
    "hidden": 72,
    "rank": 8,
    "heads": 4,
    "kv_heads": 2,
    "window": 8,
    "torus": [3, 2],
    "vocab_size": 300,
    "ternary": True,
    "int8_activations": True,
}
TEXT = "the cat sat on the mat, and the dog sat on the log. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 40], 300)


def built(**changes) -> LanguageModel:
    model = perspectron.build(presets.get("perspective-tiny", **SIZES | changes))
    with torch.no_grad():  # neighbours that are alike, so that deltas are worth it
        for name, weight in model.named_parameters():
            if name.endswith(("_EFD", "_EDF")):
                weight[1:] = weight[:1] + 0.02 * weight[1:]
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["full", "deltas"])
def folder(request, tmp_path_factory, tokenizer) -> Path:
    model, out = built(), tmp_path_factory.mktemp("artifacts") / "tiny"
    convert(model, QuantConfig(linear="2bit"))
    save_artifact(model, tokenizer, out, deltas=request.param)
    return out


@pytest.fixture(scope="module")
def full(tmp_path_factory, tokenizer) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "random"
    config = presets.get("perspective-tiny", **SIZES)
    synthesize(config, out, lambda: tokenizer, experts=4)
    return out


def slots(folder: Path, count: int) -> int:
    header = read_header(folder)
    assert header.experts is not None
    return count * header.experts.shard_bytes


def ids(count: int = 40, rows: int = 1) -> torch.Tensor:
    return torch.randint(1, 300, (rows, count), generator=torch.Generator().manual_seed(3))


def logits(model: LanguageModel, ids_BT: torch.Tensor, cut: int) -> torch.Tensor:
    """Read in one go up to `cut`, then token by token."""
    with torch.inference_mode():
        out = [model(ids_BT[:, :cut])]
        for t in range(cut, ids_BT.shape[1]):
            out.append(model(ids_BT[:, t : t + 1], out[-1].state))
    return torch.cat([one.logits for one in out], 1)


def assert_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal but for rounding. A last bit before an activation is rounded to 8 bits may be a whole step after it, so
    that single numbers can differ visibly, but few do."""
    assert (one - other).norm() < 0.01 * other.norm()
    assert (one - other).abs().median() < 1e-5


# ---------------------------------------------------------------- the same numbers


def test_streamed_is_resident_bit_by_bit(folder):
    model, _ = load_artifact(folder)
    assert isinstance(model, StreamedModel) and model.cache is not None and model.cache.resident
    expected = logits(model, ids(), 25)
    distinct = model.cache.distinct
    assert distinct == 18
    for count in (1, 2, 3, 7, distinct - 1):
        streamed, _ = load_artifact(folder, cache_bytes=slots(folder, count))
        assert not streamed.cache.resident and streamed.cache.slots == count
        assert torch.equal(logits(streamed, ids(), 25), expected)
        assert streamed.cache.counters.bytes_read > 0
        streamed.cache.close()


@pytest.mark.parametrize("count", [2, 18])
def test_by_way_of_device_buffers_bit_by_bit(folder, count):
    model, _ = load_artifact(folder, cache_bytes=slots(folder, count))
    expected = logits(model, ids(), 25)
    copies = DeviceExperts(model.cache, torch.device("cpu"))
    model.attach(copies, predict=True)
    assert torch.equal(logits(model, ids(), 25), expected)
    with copies.get(0, 1) as one, copies.get(0, 2) as other:
        assert not torch.equal(one.gate.codes, other.gate.codes)
        copies.hint(1, 0)
        assert copies.holds(0, 1) and copies.holds(0, 2) and not copies.holds(1, 0)
        with pytest.raises(AssertionError), copies.get(1, 0):
            pass
    with copies.get(0, 2):
        if model.cache.holds(1, 0):
            copies.hint(1, 0)
            assert copies.holds(1, 0) and not copies.holds(0, 1)


def test_deltas_change_nothing(tmp_path, tokenizer):
    found = []
    for deltas in (False, True):
        model = built()
        convert(model)
        save_artifact(model, tokenizer, tmp_path / str(deltas), deltas=deltas)
        loaded, _ = load_artifact(tmp_path / str(deltas))
        found.append((logits(loaded, ids(), 10), (tmp_path / str(deltas) / layer_file(0)).stat().st_size))
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] < found[0][1]


def test_close_to_the_packed_model_in_memory(tmp_path, tokenizer):
    model = built()
    convert(model)
    save_artifact(model, tokenizer, tmp_path / "a")
    loaded, _ = load_artifact(tmp_path / "a")
    with torch.inference_mode():
        assert_alike(loaded(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_steps_are_the_prefill(full, cut):
    model, _ = load_artifact(full)
    assert_alike(logits(model, ids(), cut), logits(model, ids(), 40))


def test_a_row_of_a_batch_is_the_row_alone(full):
    model, _ = load_artifact(full)
    batch = ids(rows=3)
    together = logits(model, batch, 20)
    for row in range(3):
        torch.testing.assert_close(
            logits(model, batch[row : row + 1], 20), together[row : row + 1], atol=1e-4, rtol=1e-4
        )


@pytest.mark.skipif(not native.available(), reason="no native library")
def test_the_short_way_of_a_token_is_that_of_the_modules(full):
    model, _ = load_artifact(full)
    with torch.inference_mode():
        states = [model(ids()[:, :3]).state for _ in range(2)]
        for t in range(3, 40):  # beyond the window
            token = ids()[:, t : t + 1]
            short, states[0], _ = model.hidden(token, states[0])
            long, states[1], _ = LanguageModel.hidden(model, token, states[1])
            assert_alike(short, long)
    assert model._step is not None
    for ours, theirs in zip(states[0].layers, states[1].layers, strict=True):
        assert torch.equal(ours.length_B, theirs.length_B) and int(ours.length_B) == 40


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "scalar"])
def test_the_short_way_has_the_same_bits_on_every_instruction_set(full, isa):
    model, _ = load_artifact(full)
    expected = logits(model, ids(), 3)
    try:
        with native.forced_isa(isa):
            found = logits(model, ids(), 3)
    except ValueError:
        pytest.skip(f"no {isa} here")
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"router": "switch", "smooth": 0.0},
        {"gate": "soft"},
        {"out_norm": True},
        {"renorm_every": 7},
        {"base": True},
        {"offsets": False, "bias_rate": 0.0},
        {"ternary": False},
    ],
    ids=str,
)
def test_kinds_of_experts(tmp_path, tokenizer, changes):
    model = built(**changes)
    convert(model, QuantConfig(linear="int8"))
    save_artifact(model, tokenizer, tmp_path / "a")
    loaded, _ = load_artifact(tmp_path / "a", cache_bytes=slots(tmp_path / "a", 3))
    assert_alike(logits(loaded, ids(), 20), logits(loaded, ids(), 40))
    with torch.inference_mode():
        assert_alike(loaded(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("design", ["adr", "lens", "drm", "gpt2", "transformer", "gla", "ssd", "perspective"])
@pytest.mark.parametrize("linear", ["2bit", "int8"])
def test_every_design(tmp_path, tokenizer, design, linear):
    name = {"drm": "drm-104k", "perspective": "perspective-tiny-dense"}.get(design, f"{design}-tiny")
    model = perspectron.build(presets.get(name, vocab_size=300))
    convert(model, QuantConfig(linear=linear), ids(16, 4))
    save_artifact(model, tokenizer, tmp_path / "a")
    loaded, again = perspectron.load(tmp_path / "a", verify=True)
    assert again.fingerprint == tokenizer.fingerprint
    with torch.inference_mode():
        assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    sampling = SamplingConfig(seed=1)
    texts = [
        generate(m, tokenizer, ["the cat"], max_tokens=12, sampling=sampling).ids for m in (loaded, model)
    ]
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- conversations and costs


def test_a_conversation_goes_on_from_disk(full, tmp_path):
    model, tokenizer = load_artifact(full)
    sampling = SamplingConfig(seed=2)
    whole = generate(model, tokenizer, ["the cat"], max_tokens=20, sampling=sampling)
    half = generate(model, tokenizer, ["the cat"], max_tokens=9, sampling=sampling)
    half.conversation.save(tmp_path / "state", model)
    other, _ = load_artifact(full, cache_bytes=slots(full, 2))
    back = Conversation.load(tmp_path / "state", other)
    rest = generate(other, tokenizer, [""], max_tokens=11, sampling=sampling, conversation=back)
    assert half.ids[0] + rest.ids[0] == whole.ids[0]


def test_a_state_is_bound_to_its_artifact(full, folder, tmp_path):
    model, tokenizer = load_artifact(full)
    generate(model, tokenizer, ["the cat"], max_tokens=2).conversation.save(tmp_path / "state", model)
    other, _ = load_artifact(folder)
    with pytest.raises(StateError, match="state of model"):
        Conversation.load(tmp_path / "state", other)


def test_what_a_token_touches(full):
    model, tokenizer = load_artifact(full)
    found = bench(model, tokenizer.vocab_size, tokenizer.encode("the cat"), 5)
    assert len(found.seconds) == 5 and found.bandwidth > 0 and found.missed == 0
    with torch.inference_mode():
        state = model(ids()).state
    counted = touched(model, state)
    codes, scales = (
        15 * 64 + 15 * 64 + 13 * 128,
        4 * (72 + 72 + 64),
    )  # 72 = 15 · 5 − 3 rows, in pages of neither
    assert counted.experts == 3 * (codes + scales) < 3 * read_header(full).experts.shard_bytes
    assert counted.caches == 2 * 2 * 8 * 16 * 4
    assert counted.state == 2 * (3 * 64 * 8 * 4 + 4 * 8)
    assert counted.total == sum(
        [counted.experts, counted.shared, counted.head, counted.state, counted.caches]
    )


def test_a_model_that_is_gone_leaves_no_readers(full):
    before = threading.active_count()
    model, _ = load_artifact(full, cache_bytes=slots(full, 2))
    logits(model, ids(5), 2)
    assert threading.active_count() > before
    del model
    gc.collect()
    assert threading.active_count() == before


def test_the_line_says_what_streams(full):
    model, _ = load_artifact(full)
    assert "nothing streams" in model.line() and "aliases" in model.line()
    model, _ = load_artifact(full, cache_bytes=slots(full, 2))
    assert "2 slots" in model.line() and "read from disk" in model.line()


def test_does_not_train(full):
    model, _ = load_artifact(full)
    model.train()
    with pytest.raises(ConfigError, match="training"):
        model(ids())


# ---------------------------------------------------------------- what is wrong with a folder


def broken(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARED, "experts/layer-001.experts"])
def test_a_missing_file_is_named(full, tmp_path, name):
    copy = broken(full, tmp_path)
    (copy / name).unlink()
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        load_artifact(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARED])
def test_a_flipped_bit_is_found(full, tmp_path, name):
    copy = broken(full, tmp_path)
    data = bytearray((copy / name).read_bytes())
    data[-3] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises((ArtifactError, ConfigError), match=name.replace(".", r"\.")):
        load_artifact(copy)


def test_a_damaged_expert_is_found_when_it_is_read_or_before(full, tmp_path):
    copy = broken(full, tmp_path)
    path = copy / layer_file(1)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    with pytest.raises(ShardError, match="layer-001"):
        load_artifact(copy)
    with pytest.raises(ArtifactError, match="layer-001"):
        load_artifact(copy, verify=True)


def test_a_cut_file_is_named_with_its_size(full, tmp_path):
    copy = broken(full, tmp_path)
    path = copy / layer_file(2)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ArtifactError, match="bytes, must be"):
        load_artifact(copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.pop(SHARED),
        lambda files: files.update({"../other": files[SHARED]}),
        lambda files: files.update({SHARED: 3}),
        lambda files: files[SHARED].pop("bytes"),
    ],
)
def test_a_manifest_tells_of_all_files_and_no_others(full, tmp_path, change):
    copy = broken(full, tmp_path)
    manifest = json.loads((copy / MANIFEST).read_text())
    change(manifest["files"])
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=MANIFEST.replace(".", r"\.")):
        load_artifact(copy)


def test_weights_of_another_model_are_refused(full, folder, tmp_path):
    copy = broken(full, tmp_path)
    header = json.loads((copy / "config.json").read_text())
    header["quant"]["blocks.0.mixer.p_proj"] = "4bit"
    rewrite(copy, header)
    with pytest.raises(ArtifactError, match="p_proj"):
        load_artifact(copy)
    header["quant"]["blocks.0.nothing"] = "4bit"
    rewrite(copy, header)
    with pytest.raises(ArtifactError, match="nothing"):
        load_artifact(copy)


def rewrite(folder: Path, header: object) -> None:
    text = json.dumps(header)
    (folder / "config.json").write_text(text)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["config.json"] = {
        "bytes": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_cache_too_small_is_an_error(full):
    with pytest.raises(ConfigError, match="one expert"):
        load_artifact(full, cache_bytes=100)


def test_is_artifact(full, tmp_path):
    assert is_artifact(full) and not is_artifact(tmp_path)


def test_random_artifacts_need_room(tmp_path, tokenizer):
    config = presets.get("perspective-1t")
    with pytest.raises(StorageError, match=r"needs 2\d\d\.\d\d GB"):
        synthesize(config, tmp_path / "big", lambda: pytest.fail("too late"), experts=128)
    with pytest.raises(ConfigError, match="experts = 129"):
        synthesize(config, tmp_path / "big", lambda: pytest.fail("too late"), experts=129)
    with pytest.raises(ConfigError, match="routed"):
        synthesize(presets.get("gpt2-tiny"), tmp_path / "big", lambda: tokenizer, experts=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["ternary", "2bit", "4bit", "int8"])
@pytest.mark.parametrize("shape", [(472, 128), (7, 65), (64, 64)])
def test_random_matrices_are_legal_and_of_order_one(format, shape):
    matrix = Draw(format, shape).packed(1)
    packing.check(matrix)
    assert torch.equal(packing.pack_codes(packing.unpack(matrix), format), matrix.codes)
    weight = packing.dequantise(matrix)
    assert 0.7 < weight.std() * shape[1] ** 0.5 < 1.4
