"""Models run from an artifact: what streams gives the bits of what is in memory, and a damaged folder one line."""

import dataclasses
import errno
import fcntl
import gc
import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron import native, presets
from perspectron.data import Tokenizer
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.steps import Steps, stepped, steps_of
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.eval.timing import bench
from perspectron.model.census import touched
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.ops import packing
from perspectron.quant.convert import convert
from perspectron.stream import tensors
from perspectron.stream.artifact import (
    MANIFEST,
    SHARED,
    expert_files,
    is_artifact,
    layer_file,
    read_header,
    save_artifact,
    weights_of,
)
from perspectron.stream.device import DeviceExperts
from perspectron.stream.engine import StreamedModel, load_artifact
from perspectron.stream.expert_file import ExpertLayout, dump, parse, planned, write_layer
from perspectron.stream.reader import ShardFile, pread
from perspectron.stream.speed import probe
from perspectron.stream.synthetic import Draw, synthesize
from perspectron.stream.tensors import aligned
from perspectron.util.errors import ArtifactError, ConfigError, ShardError, StateError, StorageError
from tests.native.isa import forced_isa
from tests.refusals import refused

SIZES = {
    "d_model": 64,
    "hidden": 72,
    "rank": 32,  # q and k are packed from 32 rows on
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
    return perspectron.build(presets.get("perspective-tiny", **SIZES | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    model, out = built(), tmp_path_factory.mktemp("artifacts") / "tiny"
    convert(model, "2bit")
    save_artifact(model, tokenizer, out)
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
        first, steps = model(ids_BT[:, :cut]), steps_of(model)
        out, state = [first.logits], first.state
        for t in range(cut, ids_BT.shape[1]):
            _, logits_BV, state = stepped(model, steps, ids_BT[:, t : t + 1], state)
            out.append(logits_BV[:, None])
    return torch.cat(out, 1)


def recorded(model: StreamedModel) -> bool:
    """Whether the last token was read by a recording."""
    steps = steps_of(model)
    return isinstance(steps, Steps) and steps._latest is not None


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
    assert recorded(model) == native.available()
    distinct = model.cache.distinct
    assert distinct == 18
    for count in (1, 2, 3, 7, distinct - 1):
        streamed, _ = load_artifact(folder, cache_bytes=slots(folder, count))
        assert not streamed.cache.resident and streamed.cache.slots == count
        assert torch.equal(logits(streamed, ids(), 25), expected)
        assert recorded(streamed) == native.available()
        assert streamed.cache.counters.bytes_read > 0
        streamed.cache.close()


@pytest.mark.parametrize("count", [2, 18])
def test_by_way_of_device_buffers_bit_by_bit(folder, count):
    model, _ = load_artifact(folder, cache_bytes=slots(folder, count))
    expected = logits(model, ids(), 25)
    copies = DeviceExperts(model.cache, torch.device("cpu"))
    model.attach(copies, predict=True)
    assert torch.equal(logits(model, ids(), 25), expected)
    assert recorded(model) == native.available()
    with copies.get(0, 1) as one, copies.get(0, 2) as other:
        assert not torch.equal(one.gate.codes, other.gate.codes)
        copies.hint(1, 0)
        assert copies.holds(0, 1) and copies.holds(0, 2) and not copies.holds(1, 0)
        with pytest.raises(AssertionError), copies.get(1, 0):
            pass
    with model.cache.get(1, 0):
        pass
    with copies.get(0, 2):
        copies.hint(1, 0)
        assert copies.holds(1, 0) and not copies.holds(0, 1)


def test_a_hint_does_not_displace_what_was_hinted_for_a_layer_before(folder):
    model, _ = load_artifact(folder)
    copies = DeviceExperts(model.cache, torch.device("cpu"))
    first, second, third = [ffn.layer for ffn in model.routed][:3]
    with copies.get(first, 1):
        copies.hint(second, 0)
        copies.hint(third, 2)
        assert copies.holds(second, 0) and not copies.holds(third, 2)
    with copies.get(second, 1):  # the hint was wrong
        copies.hint(third, 2)
        assert copies.holds(third, 2) and not copies.holds(second, 0)
    copies = DeviceExperts(model.cache, torch.device("cpu"), buffers=3)
    with copies.get(second, 0):
        pass
    with copies.get(first, 1):
        copies.hint(second, 0)  # is there
        copies.hint(third, 2)
        copies.hint(third, 1)
        assert copies.holds(second, 0) and copies.holds(third, 2) and not copies.holds(third, 1)


def test_a_model_that_is_moved_to_where_it_is_keeps_its_copies(full, monkeypatch):
    made, closed = [], []

    class Watched(DeviceExperts):
        def __init__(self, cache, device):
            super().__init__(cache, torch.device("cpu"))
            self.device = device
            made.append(device)

        def close(self):
            closed.append(self.device)

    model, _ = load_artifact(full)
    where = torch.device("cuda", 0)
    monkeypatch.setattr("perspectron.stream.engine.DeviceExperts", Watched)
    monkeypatch.setattr(StreamedModel, "device", property(lambda model: where))
    for _ in range(2):
        model.float()
    assert len(made) == 1 and closed == [] and model.routed[0].source is model._copies
    where = torch.device("cpu")
    model.float()
    assert len(made) == 1 and len(closed) == 1 and model.routed[0].source is model.cache


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
        assert_alike(logits(model, batch[row : row + 1], 20), together[row : row + 1])


@pytest.mark.skipif(not native.available(), reason="no native library")
def test_a_recording_gives_what_the_modules_give(full):
    model, _ = load_artifact(full)
    with torch.inference_mode():
        states = [model(ids()[:, :3]).state for _ in range(2)]
        for t in range(3, 40):  # beyond the window
            token = ids()[:, t : t + 1]
            ours, _, states[0] = stepped(model, steps_of(model), token, states[0])
            theirs, states[1], _ = model.hidden(token, states[1])
            assert_alike(ours, theirs[:, 0])
    assert recorded(model)
    for ours, theirs in zip(states[0].layers, states[1].layers, strict=True):
        assert torch.equal(ours.length_B, theirs.length_B) and int(ours.length_B) == 40


def loaded_from(config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> StreamedModel:
    model = perspectron.build(config)
    convert(model, "int8")
    save_artifact(model, tokenizer, folder)
    return load_artifact(folder)[0]


def with_positions(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, positions=64)


def with_two_widths_of_heads(config: ModelConfig) -> ModelConfig:
    last = next(block for block in reversed(config.blocks) if isinstance(block.mixer, WindowGQAConfig))
    other = dataclasses.replace(last, mixer=dataclasses.replace(last.mixer, heads=2, kv_heads=1))
    return dataclasses.replace(config, blocks=(*config.blocks, other))


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("change", [with_positions, with_two_widths_of_heads])
def test_other_kinds_of_models_are_recorded_too(tmp_path, tokenizer, change):
    model = loaded_from(change(presets.get("perspective-tiny", **SIZES)), tokenizer, tmp_path / "a")
    found = logits(model, ids(), 3)
    assert recorded(model)
    with torch.inference_mode():
        state = model(ids()[:, :3]).state
        for t in range(3, 40):
            x, state, _ = model.hidden(ids()[:, t : t + 1], state)
            assert_alike(model.head(x), found[:, t : t + 1])


def test_threads_that_generate_at_once_give_what_each_gives_alone(full):
    model, tokenizer = load_artifact(full, cache_bytes=slots(full, 3))

    def text(seed: int) -> list[int]:
        sampling = SamplingConfig(seed=seed)
        return generate(model, tokenizer, [TEXT[: seed + 3]], max_tokens=40, sampling=sampling).ids[0]

    alone = [text(seed) for seed in range(6)]
    assert recorded(model) == native.available()
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(text, range(6))) == alone


def test_a_packed_model_takes_no_other_dtype_and_stays_as_it_is(full):
    model, _ = load_artifact(full)
    with torch.inference_mode():
        before = model(ids()).logits
        for cast in (model.bfloat16, model.half, model.double):
            with refused(ConfigError, "dtype", "float32"):
                cast()
        assert torch.equal(model.float().to("cpu")(ids()).logits, before)


@pytest.mark.skipif(not native.available(), reason="no native library")
def test_a_recording_does_not_heed_the_default_dtype(full):
    found, before = [], torch.get_default_dtype()
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = load_artifact(full)
        with torch.inference_mode():
            state = model(ids()[:, :3]).state
            try:
                torch.set_default_dtype(dtype)
                for t in range(3):
                    x_D, _, state = stepped(model, steps_of(model), ids()[:, t : t + 1], state)
                assert recorded(model)
            finally:
                torch.set_default_dtype(before)
        found.append(x_D)
    assert found[1].dtype == torch.float32 and torch.equal(*found)


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "scalar"])
def test_a_recording_has_the_same_bits_on_every_instruction_set(full, isa):
    model, _ = load_artifact(full)
    expected = logits(model, ids(), 3)
    try:
        with forced_isa(isa):
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
        {"gate_rank": 40},
        {"fixed_decay": True},
        {"base": True},
        {"offsets": False, "bias_rate": 0.0},
        {"ternary": False},
    ],
    ids=str,
)
def test_experts_of_every_kind_stream_as_they_are_in_memory(tmp_path, tokenizer, changes):
    model = built(**changes)
    convert(model, "int8")
    save_artifact(model, tokenizer, tmp_path / "a")
    loaded, _ = load_artifact(tmp_path / "a", cache_bytes=slots(tmp_path / "a", 3))
    assert_alike(logits(loaded, ids(), 20), logits(loaded, ids(), 40))
    with torch.inference_mode():
        assert_alike(loaded(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("design", ["adr", "lens", "drm", "gpt2", "transformer", "gla", "ssd", "perspective"])
@pytest.mark.parametrize("linear", ["2bit", "int8"])
def test_an_artifact_of_every_design_generates_as_its_model_does(tmp_path, tokenizer, design, linear):
    name = {"drm": "drm-104k", "perspective": "perspective-tiny-dense"}.get(design, f"{design}-tiny")
    model = perspectron.build(presets.get(name, vocab_size=300))
    convert(model, linear, ids(16, 4))
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
    if native.available():  # both drew by a recording
        assert all(
            list(steps_of(m)._made.values()).count(None) == 0 < len(steps_of(m)._made)
            for m in (loaded, model)
        )


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
    with refused(StateError, tmp_path / "state"):
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
    assert counted.state == 2 * (3 * 64 * 32 * 4 + 4 * 8)
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
    assert "2 slots (16.4 kB), read from disk (" in model.line() and "reads" not in model.line()


def test_the_line_has_no_control_characters(full, tmp_path):
    copy = broken(full, tmp_path)
    header = json.loads((copy / "config.json").read_text())
    header["about"] = "one\x1b[2J\ntwo"
    rewrite(copy, header)
    line = load_artifact(copy)[0].line()
    assert line.isprintable() and "one [2J two" in line


def test_a_disk_is_not_probed_where_nothing_streams(full, monkeypatch):
    monkeypatch.setattr("perspectron.stream.engine.probe", lambda path: pytest.fail("for nothing"))
    assert load_artifact(full)[0].cache.resident


def test_a_disk_that_opens_files_for_direct_reads_but_does_not_read_them(full, monkeypatch):
    def read(fd: int, buffer: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pread(fd, buffer, offset)

    monkeypatch.setattr(
        ShardFile.__init__, "__kwdefaults__", ShardFile.__init__.__kwdefaults__ | {"read": read}
    )
    disk = probe(full / layer_file(0))
    assert disk.method == "buffered" and set(disk.bytes_per_second) == {"buffered"}


def test_an_artifact_does_not_train(full):
    model, _ = load_artifact(full)
    model.train()
    with refused(ConfigError, "training"):
        model(ids())


# ---------------------------------------------------------------- what is wrong with a folder


def broken(folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARED, "experts/layer-001.safetensors"])
def test_a_missing_file_is_named(full, tmp_path, name):
    copy = broken(full, tmp_path)
    (copy / name).unlink()
    with refused(ArtifactError, name):
        load_artifact(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SHARED])
def test_a_flipped_bit_is_found(full, tmp_path, name):
    copy = broken(full, tmp_path)
    data = bytearray((copy / name).read_bytes())
    data[-3] ^= 1
    (copy / name).write_bytes(data)
    with refused((ArtifactError, ConfigError), name):
        load_artifact(copy)


def test_a_damaged_expert_is_found_when_it_is_read_or_before(full, tmp_path):
    copy = broken(full, tmp_path)
    path = copy / layer_file(1)
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    with refused(ShardError, path):
        load_artifact(copy)
    with refused(ArtifactError, path):
        load_artifact(copy, verify=True)


def test_a_cut_file_is_named_with_its_size(full, tmp_path):
    copy = broken(full, tmp_path)
    path = copy / layer_file(2)
    path.write_bytes(path.read_bytes()[:-4096])
    with refused(ArtifactError, path, path.stat().st_size):
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
    with refused(ArtifactError, copy / MANIFEST):
        load_artifact(copy)


def test_weights_of_another_model_are_refused(full, folder, tmp_path):
    copy = broken(full, tmp_path)
    header = json.loads((copy / "config.json").read_text())
    header["quant"]["blocks.0.mixer.p_proj"] = "4bit"
    rewrite(copy, header)
    with refused(ArtifactError, "p_proj"):
        load_artifact(copy)
    header["quant"]["blocks.0.nothing"] = "4bit"
    rewrite(copy, header)
    with refused(ArtifactError, "blocks.0.nothing"):
        load_artifact(copy)


def rewrite(folder: Path, header: object) -> None:
    (folder / "config.json").write_text(json.dumps(header))
    register(folder, "config.json")


def register(folder: Path, name: str) -> None:
    """A file that was changed, in the manifest as if it had always been so."""
    data = (folder / name).read_bytes()
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda header: header["quant"].update({"blocks.0.ffn.route_proj": "int8"}), ["route_proj"]),
        (lambda header: header["experts"].update(count=7), ["experts.count", 7]),
        (lambda header: header["experts"].update(shard_bytes=4096), ["experts.shard_bytes", 4096]),
        (lambda header: header["experts"].update(distinct=5), [4, 5]),
        (lambda header: header["experts"].update(distinct=7), ["experts.distinct", 7]),
        (lambda header: header["experts"].update(distinct=0), ["experts.distinct", 0]),
        (lambda header: header["experts"].update(layers=[]), ["experts.layers"]),
        (lambda header: header["experts"].update(layers=[0, 1]), ["experts.layers"]),
        (lambda header: header.update(experts=None), ["experts.layers"]),
        (
            lambda header: header.update(trained={"data": "", "heldout": 0, "seq_len": 2**40}),
            ["trained.seq_len"],
        ),
    ],
)
def test_a_header_that_tells_of_other_files_is_refused(full, tmp_path, change, named):
    copy = broken(full, tmp_path)
    header = json.loads((copy / "config.json").read_text())
    change(header)
    rewrite(copy, header)
    with refused(ArtifactError, *named):
        load_artifact(copy)


@pytest.mark.parametrize(
    ("key", "size"),
    [
        ("d_model", 2**40),
        ("vocab_size", 2**63),
        ("torus", [2**62, 2]),
        ("rank", 2**61),
        ("window", 2**62),
        ("positions", 2**62),
        ("hidden", 2**100),
    ],
)
def test_sizes_that_cannot_be_are_one_line(full, tmp_path, key, size):
    def change(value):
        if isinstance(value, dict):
            return {name: size if name == key else change(part) for name, part in value.items()}
        return [change(part) for part in value] if isinstance(value, list) else value

    copy = broken(full, tmp_path)
    header = json.loads((copy / "config.json").read_text())
    rewrite(copy, header | {"model": change(header["model"])})
    with refused(ArtifactError, copy / "config.json") as error:
        load_artifact(copy, cache_bytes=slots(full, 2))
    assert "\n" not in str(error.value)


def test_codes_that_cannot_be_are_found_behind_right_sums(full, tmp_path, monkeypatch):
    copy = broken(full, tmp_path)
    path = copy / layer_file(1)
    with ShardFile(path) as file:
        layout, buffers = file.header.layout, []
        for expert in range(6):
            buffers.append(aligned(layout.bytes))
            file.read_into(expert, buffers[-1])
    layout.shard(buffers[4]).gate.codes.fill_(255)
    path.unlink()
    monkeypatch.setattr("perspectron.stream.expert_file.check", lambda *_: None)
    write_layer(path, 1, layout, range(6), map(layout.shard, buffers))
    register(copy, layer_file(1))
    with refused(ShardError, path, "expert", 4, "gate"):
        load_artifact(copy, verify=True, cache_bytes=slots(full, 2))


def test_scales_that_cannot_be_are_found(full, tmp_path):
    copy = broken(full, tmp_path)
    model, _ = load_artifact(full)
    state = model.state_dict()
    state["embedding.scales"] = state["embedding.scales"] * torch.nan
    (copy / SHARED).unlink()
    tensors.write(copy / SHARED, {name: tensors.spec(tensor) for name, tensor in state.items()})
    register(copy, SHARED)
    with refused(ArtifactError, "embedding"):
        load_artifact(copy, verify=True)


def test_loads_that_fail_leave_no_descriptors(full, tmp_path):
    copy = broken(full, tmp_path)
    shutil.copy(copy / layer_file(0), copy / layer_file(2))
    register(copy, layer_file(2))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    kept = []
    for _ in range(10):
        with refused(ConfigError, "cache", 100) as error:
            load_artifact(full, cache_bytes=100)
        kept.append(error)
        with refused(ArtifactError, layer_file(2)) as error:
            load_artifact(copy)
        kept.append(error)
        kept.append(load_artifact(full))  # nothing is read any more
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cache_too_small_is_an_error(full):
    with refused(ConfigError, "cache", 100):
        load_artifact(full, cache_bytes=100)


def test_is_artifact(full, tmp_path):
    assert is_artifact(full) and not is_artifact(tmp_path)


def test_experts_of_which_no_file_can_tell_are_refused_before_anything_is_written(tmp_path, tokenizer):
    """As many as are taken, the reader of the file takes; under names of others there may be more."""
    config = presets.get("perspective-tiny", torus=(64, 64), hidden=8)
    with refused(ConfigError, "ffn"):
        synthesize(config, tmp_path / "many", lambda: pytest.fail("too late"), experts=4096)
    with refused(ConfigError, "ffn"):
        expert_files(config)
    found = expert_files(config, 2500)
    assert found is not None and (found.count, found.distinct) == (4096, 2500)
    head = dump(planned(0, ExpertLayout(config.d_model, 8), weights_of(4096, 2500)))
    stored = 2500 * found.shard_bytes
    read = parse(lambda at, count: head[at : at + count], len(head) + stored, "head")
    assert read.end == len(head) + stored


def test_random_artifacts_need_room(tmp_path, tokenizer):
    config = presets.get("perspective-1t")
    with refused(StorageError, tmp_path / "big"):
        synthesize(config, tmp_path / "big", lambda: pytest.fail("too late"), experts=128)
    with refused(ConfigError, "experts", 129):
        synthesize(config, tmp_path / "big", lambda: pytest.fail("too late"), experts=129)
    with refused(ConfigError, "model", "gpt2-tiny"):
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
