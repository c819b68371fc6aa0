"""An artifact written by version 0.1: refused in one line that names the command, and converted bit for bit."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from perspectron.cli.main import main
from perspectron.errors import ArtifactError
from perspectron.stream.engine import load_artifact
from perspectron.stream.expert_file import ExpertLayout
from perspectron.stream.upgrade import upgrade

OLD = Path("tests/vectors/artifact-0.1")
EXPECTED = OLD.with_name("artifact-0.1.expected.txt")
MATRICES = ("gate", "up", "down")


def header(whole: bytes) -> dict[str, Any]:
    return json.loads(whole[24 : 24 + int.from_bytes(whole[12:16], "little")])


def old_parts(whole: bytes) -> dict[str, bytes]:
    """Every matrix of an expert file of 0.1 by the name it has today, taken out as its own header says."""
    parts = {}
    for shard in header(whole)["shards"]:
        for name in MATRICES:
            codes, scales = shard[name]["offset"], shard[name]["scale_offset"]
            rows = 16  # all three matrices of this model are 16 × 16
            parts[f"{shard['expert']}.{name}.codes"] = whole[codes : codes + shard[name]["bytes"]]
            parts[f"{shard['expert']}.{name}.scales"] = whole[scales : scales + 4 * rows]
    return parts


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None], layer: int = 1) -> Path:
    """A copy of which a layer has another header, with a right SHA-256."""
    folder, name = tmp_path / "old", f"experts/layer-{layer:03d}.experts"
    shutil.copytree(OLD, folder)
    whole = (folder / name).read_bytes()
    value, length = header(whole), int.from_bytes(whole[12:16], "little")
    change(value)
    text = json.dumps(value, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    whole = whole[:24] + text + whole[24 + length :]
    (folder / name).write_bytes(whole)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name]["sha256"] = hashlib.sha256(whole).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_it_is_refused_in_a_line_that_names_the_command(capsys):
    command = f"perspectron quantize {OLD} --out NEW"
    with pytest.raises(ArtifactError, match=f"version 0.1; convert it: {command}"):
        load_artifact(OLD)
    for ask in (["generate", "the quick"], ["inspect"], ["plan", "--ram", "1G", "--bandwidth", "1G/s"]):
        assert main([ask[0], str(OLD), *ask[1:]]) == 2
        error = capsys.readouterr().err
        assert error.startswith("perspectron: error: ") and error.count("\n") == 1 and command in error


def within(old: Any, new: Any) -> bool:
    """True where the new value is the old one, with fields of configs beside it that 0.1 did not know."""
    if isinstance(old, dict):
        return old.keys() <= new.keys() and all(within(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(within, old, new))
    return old == new


def test_its_weights_are_converted_bit_for_bit(tmp_path, capfdbinary):
    assert main(["quantize", str(OLD), "--out", str(tmp_path / "new")]) == 0
    assert not list((tmp_path / "new").glob("experts/*.experts"))
    for layer in range(3):
        parts = old_parts((OLD / f"experts/layer-{layer:03d}.experts").read_bytes())
        assert len(parts) == 4 * 6
        with safe_open(tmp_path / f"new/experts/layer-{layer:03d}.safetensors", "pt") as file:
            for name, part in parts.items():
                assert file.get_tensor(name).flatten().view(torch.uint8).numpy().tobytes() == part
    old, new = (load_file(folder / "shared.safetensors") for folder in (OLD, tmp_path / "new"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    kept = [[json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json")]
            for folder in (OLD, tmp_path / "new")]  # fmt: skip
    assert kept[1][0]["model"].pop("embedding_norm") is False  # of which 0.1 knew nothing
    assert within(kept[0], kept[1])
    load_artifact(tmp_path / "new", verify=True)
    capfdbinary.readouterr()
    ask = ["generate", str(tmp_path / "new"), "the quick", "--max-tokens", "12", "--temperature", "0"]
    assert main(ask) == 0
    assert capfdbinary.readouterr().out == EXPECTED.read_bytes()


def test_an_alias_of_a_later_expert(tmp_path):
    """Today the first of those that are the same is stored."""

    def change(value: dict[str, Any]) -> None:
        value["shards"][0] = {"expert": 0, "kind": "alias", "of": 2}

    upgrade(changed(tmp_path, change), tmp_path / "new")
    parts = old_parts((OLD / "experts/layer-001.experts").read_bytes())
    with safe_open(tmp_path / "new/experts/layer-001.safetensors", "pt") as file:
        assert file.metadata()["weights_of"] == "0 1 0 3"
        assert file.get_tensor("0.up.codes").numpy().tobytes() == parts["2.up.codes"]
        assert file.get_tensor("3.up.codes").numpy().tobytes() == parts["3.up.codes"]
    load_artifact(tmp_path / "new", verify=True)


WRONG = [
    (lambda h: h["shards"][1].update(kind="delta"), "stored as changes .* quantize the run again"),
    (
        lambda h: h["shards"][1].pop("offset"),
        r"not an expert file of 0.1 .shards.1..offset = None, must be in 0",
    ),
    (lambda h: h.update(shards=3), "not an expert file of 0.1 .shards: no list"),
    (lambda h: h["shards"].pop(), "experts are missing"),
    (lambda h: h["shards"][1].update(offset=20480), "ends within expert 1"),
    (lambda h: h["shards"][1].update(offset=-1), "offset = -1, must be in 0"),
    (lambda h: h["shards"][1].update(offset=9000), "offset of expert 1 is 9000, must be a page from"),
    (lambda h: h["shards"][1].update(offset=2**70), "is beyond 64 bits"),
    (lambda h: h["shards"][1].update(offset=8192.0), "offset = 8192.0, must be in"),
    (lambda h: h["shards"][1].update(offset=12288), "offset of expert 2 is 12288, must be a page from 16384"),
    (lambda h: h.update(layer=2), "layer = 2, must be 1"),
    (lambda h: h.update(experts=5), "experts = 5, must be 4"),
    (lambda h: h.update(hidden=8), "hidden = 8, must be 16"),
    (lambda h: h.update(d_model="16"), "d_model = '16', must be 16"),
    (lambda h: h.update(d_model=0), "d_model = 0, must be 16"),
    (lambda h: h.update(d_model=2**40), "must be 16"),
    (
        lambda h: h["shards"][1].update(offset=2**62),
        "offset = 4611686018427387904, must be in 0 … 281474976710656",
    ),
    (lambda h: h["shards"][1].update(offset=0), "offset of expert 1 is 0, must be a page from 4096"),
    (lambda h: h["shards"][1].update(expert=0), "of 3 experts, must be 4; experts are missing"),
    (lambda h: h["shards"][1].update(expert=-1), "expert = -1, must be in 0 … 3"),
    (lambda h: h["shards"][1].update(kind="x"), "kind = .x., must be full or alias"),
    (lambda h: h["shards"][1].update(kind="alias", of=9), "of = 9, must be in 0 … 3"),
    (lambda h: h["shards"][1].update(kind="alias", of=1), "expert 1 has the weights of 1, must be of one"),
    (lambda h: h["shards"].append(3), "shards: 5, must be 4"),
    (lambda h: h["shards"].__setitem__(0, 3), "kind = None, must be"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_converted_is_one_line_and_nothing_is_written(tmp_path, change, message):
    folder = changed(tmp_path, change)
    with pytest.raises(Exception, match=message) as error:
        upgrade(folder, tmp_path / "new")
    assert type(error.value).__module__ == "perspectron.errors" and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_a_damaged_one_is_refused(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    path = tmp_path / "old/experts/layer-002.experts"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(ArtifactError, match=r"layer-002\.experts: damaged"):
        upgrade(tmp_path / "old", tmp_path / "new")


def test_options_that_would_change_the_weights_are_refused(tmp_path, capsys):
    for flag, value in (("--linear", "4bit"), ("--windows", "4")):
        assert main(["quantize", str(OLD), "--out", str(tmp_path / "new"), flag, value]) == 2
        assert f"{flag}: leave it out for an artifact of 0.1" in capsys.readouterr().err
    assert main(["quantize", str(OLD), "--out", str(tmp_path / "new")]) == 0
    assert main(["quantize", str(tmp_path / "new"), "--out", str(tmp_path / "newer")]) == 2
    assert "artifact in few bits" in capsys.readouterr().err


def test_the_layout_is_that_of_the_old_file():
    layout = ExpertLayout(16, 16)
    shard = header((OLD / "experts/layer-000.experts").read_bytes())["shards"][1]
    for i, name in enumerate(MATRICES):
        assert shard[name]["offset"] - shard["offset"] == layout.parts[i].start
        assert shard[name]["scale_offset"] - shard["offset"] == layout.parts[i + 3].start
    assert shard["bytes"] == layout.bytes
