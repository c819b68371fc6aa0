"""Artifacts that somebody else made, with right digests: what their headers say, codes that cannot be, slow reads."""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perspectron import native, presets
from perspectron.cli.main import main
from perspectron.data import Tokenizer
from perspectron.ops import packed, packing
from perspectron.ops.packing import Packed
from perspectron.stream import engine, expert_file, tensors
from perspectron.stream.artifact import CONFIG, MANIFEST, SHARED, TOKENIZER, layer_file
from perspectron.stream.cache import ShardCache
from perspectron.stream.engine import load_artifact
from perspectron.stream.expert_file import ExpertLayout, write_layer
from perspectron.stream.reader import FIRST, PIECE, ShardFile, pread
from perspectron.stream.synthetic import synthesize
from perspectron.stream.tensors import aligned
from perspectron.util.errors import ArtifactError, NonFiniteError, ShardError
from tests.native.isa import forced_isa
from tests.refusals import refused
from tests.waiting import PATIENCE, until

CONFIG_OF = presets.get(
    "perspective-tiny", d_model=64, hidden=72, rank=32, heads=4, kv_heads=2, window=8, torus=[3, 2],
    vocab_size=300, ternary=True, int8_activations=True,
)  # fmt: skip
ISAS = ("avx512", "avx2", "scalar")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "random"
    made = Tokenizer.train(["the cat sat on the mat. " * 40], 300)
    synthesize(CONFIG_OF, out, lambda: made, experts=4)
    return out


@pytest.fixture
def folder(whole, tmp_path, monkeypatch) -> Path:
    """A copy, and a user who has never opened it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def register(folder: Path, name: str) -> None:
    """A file that was changed, in the manifest as if it had always been so."""
    data = (folder / name).read_bytes()
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def unread(folder: Path, *named: object) -> str:
    with refused(ArtifactError, folder, *named) as error:
        load_artifact(folder)
    said = str(error.value)
    assert len(said) < 600
    return said


# What the header of the shared weights says


def reheaded(folder: Path, change: Callable[[dict[str, Any]], object] | bytes) -> None:
    whole = (folder / SHARED).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    if isinstance(change, bytes):
        text = change
    else:
        value = json.loads(whole[8 : 8 + length])
        change(value)
        text = json.dumps(value).encode()
    (folder / SHARED).write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    register(folder, SHARED)


E = "embedding.codes"
ONE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
ENTRY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HEADERS: list[tuple[Callable[[dict[str, Any]], object] | bytes, list[object]]] = [
    (lambda h: h[E].update(data_offsets=[0, 0]), [E, 0]),
    (lambda h: h[E].update(data_offsets=h["embedding.scales"]["data_offsets"]), ["blocks.0.ffn.bias_E"]),
    (lambda h: h[E].update(data_offsets=[h[E]["data_offsets"][0], 2**47]), [E, 2**47]),
    (lambda h: h[E].update(data_offsets=[-1, 5]), ["data_offsets"]),
    (lambda h: h[E].update(data_offsets=[5]), ["data_offsets"]),
    (lambda h: h[E].update(data_offsets=[0.0, 5]), ["data_offsets"]),
    (lambda h: h[E].update(data_offsets=None), ["data_offsets"]),
    (lambda h: h[E].update(data_offsets=[True, 5]), ["data_offsets"]),
    (lambda h: h[E].update(shape=[300, 0]), [E]),
    (lambda h: h[E].update(shape=[-300, -64]), ["shape"]),
    (lambda h: h[E].update(shape=[2**62, 4]), ["shape"]),
    (lambda h: h[E].update(shape=[1] * 9), ["shape"]),
    (lambda h: h[E].update(shape=[300.5, 64]), ["shape"]),
    (lambda h: h[E].update(shape=["300", 64]), ["shape"]),
    (lambda h: h[E].update(shape=[64, 300]), [E]),
    (lambda h: h[E].update(dtype="I8"), [E]),
    (lambda h: h[E].update(dtype="F64"), [E, 153600]),
    (lambda h: h[E].update(dtype="U64"), ["dtype", "'U64'"]),
    (lambda h: h[E].update(dtype=["U8"]), ["dtype"]),
    (lambda h: h[E].update(more=1), ["more"]),
    (lambda h: h.update({E: 3}), []),
    (lambda h: h.update(extra=ONE), ["blocks.0.ffn.route_proj.weight"]),
    (lambda h: h.update({"x\n" * 100: h.pop(E)}), []),
    (lambda h: h.update({"x" * 2000: h.pop(E)}), []),
    (lambda h: h.update(other=h.pop(E)), [E]),
    (b"[]", []),
    (b'{"a":%s,"a":%s}' % (ENTRY, ENTRY), ["'a'"]),
    (b'{"a":1}', [1]),
    (b'{"a":{"dtype":NaN}}', []),
    (b"{" * 100_000, []),
    (b'{"a":{"dtype":' + b"[" * 900 + b"}}", []),
    (b'{"a":{"dtype":' + b"9" * 500 + b"}}", []),
    (b'{"a":%s,}' % ENTRY, []),
    (b'{"a":%s}{}' % ENTRY, []),
    (b'{%s}' % b",".join(b'"%d":%s' % (i, ENTRY) for i in range(32_769)), [32_768]),
    (b"\xff{}", []),
    (b'{"a":{"dtype":"U8","shape":[' + b"281474976710656," * 100_000 + b'1],"data_offsets":[0,1]}}', [1000]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_lies_is_refused_with_its_file(folder, change, named, monkeypatch):
    """Before any memory is taken for what they promise."""
    reheaded(folder, change)
    monkeypatch.setattr(tensors, "aligned", lambda size: pytest.fail(f"{size} bytes were taken"))
    unread(folder, folder / SHARED, *named)


def test_more_than_the_machine_has_is_refused_before_it_is_taken(folder, monkeypatch):
    monkeypatch.setattr(tensors, "memory", lambda: 1000)
    monkeypatch.setattr(tensors, "aligned", lambda size: pytest.fail(f"{size} bytes were taken"))
    unread(folder, folder / SHARED)


MANIFESTS: list[tuple[Callable[[dict[str, Any]], object], list[object]]] = [
    (lambda m: m["files"][SHARED].update(bytes=-1), ["files[...].bytes"]),
    (lambda m: m["files"][SHARED].update(bytes="7"), ["files[...].bytes"]),
    (lambda m: m["files"][SHARED].update(bytes=1e300), ["files[...].bytes"]),
    (lambda m: m["files"][SHARED].update(bytes=True), ["files[...].bytes"]),
    (lambda m: m["files"][SHARED].update(bytes=2**62), [2**62]),
    (lambda m: m["files"][SHARED].update(sha256=7), ["files[...].sha256"]),
    (lambda m: m["files"][SHARED].update(more=7), ["more"]),
    (lambda m: m.update(files=[]), ["files"]),
    (lambda m: m.update(format=[1]), ["format", "perspectron-artifact-1"]),
    (lambda m: m["files"].update({"/etc/passwd": m["files"][SHARED]}), ["/etc/passwd"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_that_lies_is_refused_by_its_field(folder, change, named):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    unread(folder, *named)


@pytest.mark.parametrize("name", [CONFIG, TOKENIZER, SHARED, MANIFEST, layer_file(1)])
def test_what_is_no_file_is_refused_at_once(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    unread(folder, folder / name)


# Codes


def spoilt(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    model, _ = load_artifact(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(state)
    tensors.write(folder / SHARED, {name: tensors.spec(tensor) for name, tensor in state.items()})
    register(folder, SHARED)


def norm(state: dict[str, torch.Tensor]) -> None:
    name = next(name for name in state if name.endswith("norm.weight"))
    state[name][3] = torch.nan


SPOILT = [
    (lambda state: state[E][7].fill_(0), ["embedding", 64, "int8"]),
    (lambda state: state["embedding.scales"][7].fill_(torch.inf), ["embedding"]),
    (norm, ["blocks.0.mixer_norm.weight"]),
]


@pytest.mark.parametrize(("change", "named"), SPOILT, ids=range(len(SPOILT)))
def test_weights_that_cannot_be_are_found_when_an_artifact_is_first_opened(folder, change, named):
    spoilt(folder, change)
    for _ in range(2):  # it is not remembered as good
        unread(folder, *named)


def test_weights_are_checked_once_for_a_manifest(folder, tmp_path, monkeypatch):
    seen = []
    real = engine._legal
    monkeypatch.setattr(engine, "_legal", lambda *rest: (seen.append(1), real(*rest)))
    for _ in range(3):
        model, _ = load_artifact(folder)
    kept = tmp_path / "cache" / "perspectron" / f"legal-1-{model.digest}"
    assert len(seen) == 1 and kept.is_file() and kept.stat().st_size == 0
    load_artifact(folder, verify=True)
    assert len(seen) == 2
    spoilt(folder, lambda state: state["embedding.scales"].mul_(2))
    load_artifact(folder)
    assert len(seen) == 3


def test_weights_are_checked_where_nobody_can_say_whether_they_were(folder, tmp_path, monkeypatch):
    """A cache folder whose files cannot be looked up, as where the user may not enter it."""
    spoilt(folder, norm)
    monkeypatch.setattr(engine, "_known", lambda digest: tmp_path / ("x" * 300))
    unread(folder, "blocks.0.mixer_norm.weight")


@pytest.mark.parametrize("place", ["a file", "read-only", "no home", "a link"])
def test_nowhere_to_remember_it_is_fine(folder, tmp_path, monkeypatch, place):
    cache = tmp_path / "cache"
    if place == "a file":
        cache.touch()
    elif place == "read-only":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    elif place == "no home":
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        digest = load_artifact(folder)[0].digest
        path = cache / "perspectron" / f"legal-1-{digest}"
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
    load_artifact(folder)
    assert not (tmp_path / "elsewhere").exists()


def matrix(codes: np.ndarray, scales: torch.Tensor, K: int) -> Packed:
    return Packed(torch.from_numpy(codes), scales, "ternary", (5 * len(codes), K))


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("T", [1, 2, 9])
def test_a_ternary_byte_that_cannot_be_is_but_another_number(isa, T):
    """Why experts need no check beyond digests. Each of the 256 bytes decodes, in registers and by itself, to five
    codes of 8 bits (2 at most if it is legal; an illegal one may give others on another instruction set): a product
    with illegal bytes anywhere is that of these codes, to the last bit, and no sum leaves 32 bits."""
    try:
        with forced_isa(isa):
            codes_B5 = np.zeros((256, 5), np.int64)
            probe = np.zeros((1, 64), np.float32)
            probe[0, 0] = 1.0
            for byte in range(256):
                one = matrix(np.full((1, 64), byte, np.uint8), torch.ones(5), 64)
                y = packed.linear(torch.from_numpy(np.repeat(probe, T, 0)), one, backend="native")
                assert (y == y[0]).all()
                codes_B5[byte] = np.rint(y[0].numpy()).astype(np.int64) + 1
                assert np.array_equal(codes_B5[byte] - 1, y[0].numpy())
            assert codes_B5.min() >= 0 and codes_B5.max() <= 255
            legal = ~packing.illegal(torch.arange(256, dtype=torch.uint8), "ternary").numpy()
            assert legal.sum() == 243 and codes_B5[legal].max() == 2
            rng, blocks, K = np.random.default_rng(1), 13, 704
            bad = np.flatnonzero(~legal).astype(np.uint8)
            for bytes_ in (rng.choice(bad, (blocks, K)), rng.integers(0, 256, (blocks, K), np.uint8)):
                scales = torch.rand(5 * blocks) + 0.5
                x = rng.integers(-127, 128, (T, K)).astype(np.float32)
                x[:, 0] = 127  # the step is 1
                found = packed.linear(torch.from_numpy(x), matrix(bytes_, scales, K), backend="native")
                codes_NK = codes_B5[bytes_].transpose(0, 2, 1).reshape(5 * blocks, K)
                sums = (x.astype(np.int64) @ (codes_NK - 1).T).astype(np.float32)
                assert np.array_equal(found.numpy(), scales.numpy()[None] * sums)
            most = codes_B5.max(1).argmax()
            K = native.MOST_COLUMNS
            longest = matrix(np.full((1, K), most, np.uint8), torch.ones(5), K)
            found = packed.linear(torch.full((T, K), 127.0), longest, backend="native")
            assert 127 * K * 256 < 2**31
            assert np.array_equal(found[0].numpy(), (127 * K * (codes_B5[most] - 1)).astype(np.float32))
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_scale_that_cannot_be_spoils_its_row_alone(isa, bad):
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (6, 128), np.uint8)
    good = torch.rand(30) + 0.5
    scales = good.clone()
    scales[7] = bad
    try:
        with forced_isa(isa):
            for T in (1, 9):
                x = torch.from_numpy(rng.standard_normal((T, 100)).astype(np.float32))
                found, clean = (
                    packed.linear(x, matrix(codes, s, 100), backend="native") for s in (scales, good)
                )
                others = torch.arange(30) != 7
                assert torch.equal(found[:, others], clean[:, others])
    except ValueError as error:
        pytest.skip(str(error))


def test_experts_of_illegal_codes_give_numbers_or_a_line(folder, monkeypatch, capsys):
    """A whole layer of bytes that are no codes, and of scales that are not finite, behind right digests."""
    for layer, scale in ((0, None), (1, np.inf)):
        path = folder / layer_file(layer)
        with ShardFile(path) as file:
            layout, weights_of, stored = file.header.layout, file.header.weights_of, list(file.header.stored)
        buffers = []
        for expert in stored:
            buffer = aligned(layout.bytes)
            buffer[:] = 0
            codes, scales = layout.parts[2].stop, layout.parts[5].stop
            buffer[:codes] = np.random.default_rng(expert).integers(252, 256, codes)
            buffer[codes:scales].view(np.float32)[:] = 0.01 if scale is None else scale
            buffers.append(layout.shard(buffer))
        path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(expert_file, "check", lambda *_: None)
            write_layer(path, layer, layout, weights_of, buffers)
        register(folder, layer_file(layer))
        for isa in ISAS if native.available() else ():
            model, _ = load_artifact(folder)
            try:
                with forced_isa(isa), torch.inference_mode():
                    logits = model(torch.arange(1, 40)[None]).logits
            except ValueError:
                continue
            assert logits.isfinite().all() == (scale is None)
        code = main(["generate", str(folder), "the cat", "--max-tokens", "5"])
        said = capsys.readouterr().err
        assert code == (0 if scale is None else NonFiniteError.exit_code)
        assert "Traceback" not in said
        with refused(ShardError):
            load_artifact(folder, verify=True)


# Slow reads


def test_a_deadline_is_kept_inside_a_piece(tmp_path, lab, monkeypatch):
    """2 MB/s, and half a second for an expert of 4 MiB: one read of a whole piece takes two."""
    lab = type(lab)(1024, 6000)
    path = tmp_path / "layer"
    lab.plain(path, 0, 1)
    assert lab.layout.bytes > 0.8 * PIECE
    sizes, now = [], [0.0]
    monkeypatch.setattr("perspectron.stream.reader.time.monotonic", lambda: now[0])

    def slow(fd: int, view: memoryview, offset: int) -> int:
        sizes.append(len(view))
        now[0] += len(view) / 2e6
        return pread(fd, view, offset)

    with lab.open(path, read=slow, deadline=0.5) as file:
        with refused(ShardError, path, 0):
            file.read_into(0, lab.buffer())
        assert 0.45 < now[0] < 0.8
    assert sizes[0] == FIRST and max(sizes) < 200_000


def test_a_quick_disk_is_read_in_whole_pieces(tmp_path, lab):
    lab = type(lab)(1024, 12000)
    path, sizes = tmp_path / "layer", []
    experts = lab.plain(path, 0, 3)

    def read(fd: int, view: memoryview, offset: int) -> int:
        sizes.append(len(view))
        return pread(fd, view, offset)

    buffer = lab.buffer()
    with lab.open(path, read=read) as file:
        for expert in range(3):
            file.read_into(expert, buffer)
            assert np.array_equal(buffer, experts[expert])
    assert sizes[0] == FIRST and sizes[1] == PIECE and sizes.count(PIECE) == 3 and len(sizes) == 7


def test_a_read_that_hangs_is_given_up_while_others_go_on(tmp_path, lab):
    """Whoever waits for it is told in time, though other experts keep coming; its memory is not used for another."""
    lab.plain(tmp_path / "layer", 0, 6)
    release = threading.Event()
    with ShardFile(tmp_path / "layer") as plain:
        hung = plain.header.offset(0)

    def read(fd: int, view: memoryview, offset: int) -> int:
        if offset == hung:
            release.wait(PATIENCE)
        return pread(fd, view, offset)

    with ShardCache([lab.open(tmp_path / "layer", read=read)], 3 * lab.layout.bytes, deadline=0.5) as cache:
        ended = threading.Event()

        def others() -> None:
            while not ended.is_set():
                for expert in range(1, 6):
                    with (
                        contextlib.suppress(ShardError),
                        cache.get(0, expert),
                    ):  # on a machine that stands still
                        time.sleep(0.01)

        thread = threading.Thread(target=others, daemon=True)
        thread.start()
        try:
            with refused(ShardError, "expert", 0, 0.5), cache.get(0, 0):
                pass
        finally:
            ended.set()
            thread.join()
            release.set()  # now that nobody asks for others, which it would be evicted for
        until(lambda: cache.holds(0, 0))  # it came in the end
        with cache.get(0, 0) as shard:
            assert torch.equal(shard.gate.codes, lab.layout.shard(lab.expert(0, 0)).gate.codes)


def test_widths_that_cannot_be_are_refused_with_their_file(folder):
    header = json.loads((folder / CONFIG).read_text())
    for key, value in (("hidden", 2**20), ("d_model", 2**20)):
        text = json.dumps(header).replace(
            f'"{key}": {getattr(ExpertLayout(64, 72), key)}', f'"{key}": {value}'
        )
        (folder / CONFIG).write_text(text)
        register(folder, CONFIG)
        unread(folder, folder / CONFIG)
