"""Artifacts on the command line: made, generated from, measured, inspected, and refused in one line."""

import json
import re
import shutil
from pathlib import Path

import pytest

import perspectron
from perspectron.cli import quantize
from perspectron.cli.main import main
from perspectron.data.template import FILE as TEMPLATE
from perspectron.data.template import Template
from perspectron.stream.cache import ShardCache
from perspectron.stream.usage import Usage
from tests.cli.small import PLAIN, TRAIN
from tests.refusals import in_a_line, names

SMALL = [
    *("--set", "d_model=32", "layers=4", "hidden=40", "rank=8", "heads=2", "kv_heads=1", "window=16"),
    *("vocab_size=300", "torus=[2,2]", "ternary=true", "int8_activations=true"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory, text) -> Path:
    out = tmp_path_factory.mktemp("runs") / "cats"
    options = ["--preset", "perspective-tiny", "--data", str(text), "--out", str(out), "--steps", "30"]
    assert main(["train", *options, *SMALL, *TRAIN]) == 0
    return out


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, run) -> Path:
    out = tmp_path_factory.mktemp("artifacts") / "cats"
    assert main(["quantize", str(run), "--out", str(out), "--windows", "8"]) == 0
    return out


def said(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_quantize_says_before_and_after(run, tmp_path, capsys):
    found = json.loads(said(capsys, "quantize", run, "--out", tmp_path / "a", "--windows", 8, "--json"))
    assert found["bytes_after"] < 0.4 * found["bytes_before"]
    assert set(found["bytes_by_format"]) >= {"2bit", "int8", "experts"}
    assert abs(found["bits_per_byte_after"] - found["bits_per_byte_before"]) < 1
    table = said(capsys, "quantize", run, "--out", tmp_path / "b", "--linear", "int8", "--calibrate", "none")
    assert "held-out bits per byte" in table and "before" in table


def test_quantize_refuses_a_folder_that_is_there_an_artifact_and_no_windows(run, artifact, tmp_path, capsys):
    in_a_line(refusal(capsys, "quantize", run, "--out", artifact), "out", artifact)
    in_a_line(refusal(capsys, "quantize", artifact, "--out", tmp_path / "a"), artifact)
    in_a_line(refusal(capsys, "quantize", run, "--out", tmp_path / "a", "--windows", 0), "windows", 0)
    in_a_line(refusal(capsys, "quantize", run, "--out", tmp_path / "a", "--tokens", 1), "tokens", 1)
    assert list(tmp_path.iterdir()) == []


def test_quantize_refuses_what_would_change_nothing(run, tmp_path, capsys):
    """Windows that nothing is calibrated on, and tokens to measure of a run without a text."""
    nearest = ("--out", tmp_path / "a", "--calibrate", "none")
    in_a_line(refusal(capsys, "quantize", run, *nearest, "--windows", 3), "windows", 3)
    perspectron.save(*perspectron.load(run), tmp_path / "bare")
    in_a_line(refusal(capsys, "quantize", tmp_path / "bare", *nearest, "--tokens", 50), "tokens", 50)
    assert not (tmp_path / "a").exists()


def test_chats_are_read_by_the_template_of_the_training_and_it_is_told(run, text, tmp_path, capsys):
    with open(tmp_path / "chats.jsonl", "w") as file:
        for i in range(80):
            asked = {"role": "user", "content": f"cat {i}"}
            print(json.dumps({"messages": [asked, {"role": "assistant", "content": "a dog"}]}), file=file)
    bare, chats = tmp_path / "bare", ("--calibrate", tmp_path / "chats.jsonl", "--windows", 2)
    perspectron.save(*perspectron.load(run), bare)
    in_a_line(refusal(capsys, "quantize", bare, "--out", tmp_path / "a", *chats), "messages", "train")
    Template.named("plain").save(bare)
    for command in (("quantize", bare, "--out", tmp_path / "a", *chats), ("eval", bare, "--data", chats[1])):
        assert main([str(argument) for argument in command]) == 0
        told = capsys.readouterr().err.splitlines()
        assert sum(names(line, chats[1], bare / TEMPLATE) for line in told) == 1, told
    assert main(["quantize", f"{bare}", "--out", f"{tmp_path / 'b'}", "--calibrate", f"{text}"]) == 0
    assert TEMPLATE not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["init", "teacher", "resume"])
def test_training_refuses_an_artifact(name, artifact, text, tmp_path, capsys):
    beside = () if name == "resume" else ("--data", text, "--out", tmp_path / "a")
    in_a_line(refusal(capsys, "train", f"--{name}", artifact, *beside), name, artifact)
    assert list(tmp_path.iterdir()) == []


def test_ablations_are_of_runs(artifact, tmp_path, capsys):
    in_a_line(refusal(capsys, "ablate", artifact, "--out", tmp_path / "a"), "run", artifact)
    assert list(tmp_path.iterdir()) == []


def test_quantize_refuses_before_it_reads_weights(run, artifact, tmp_path, capsys, monkeypatch):
    """An artifact, and a run of more experts than a file of them can hold."""
    monkeypatch.setattr(quantize, "open_model", lambda path: pytest.fail("too late"))
    in_a_line(refusal(capsys, "quantize", artifact, "--out", tmp_path / "a"), artifact)
    shutil.copytree(run, tmp_path / "many")
    config = tmp_path / "many" / "config.json"
    config.write_text(re.sub(r'"torus": \[\s*2,\s*2\s*\]', '"torus": [64, 64]', config.read_text()))
    in_a_line(refusal(capsys, "quantize", tmp_path / "many", "--out", tmp_path / "a"), "ffn")
    assert not (tmp_path / "a").exists()


def test_generate_streams_and_goes_on(artifact, tmp_path, capsys):
    common = ("--max-tokens", 12, "--seed", 4)
    whole = said(capsys, "generate", artifact, "the cat", *common)
    assert said(capsys, "generate", artifact, "the cat", *common, "--cache", "20K", "--verify") == whole
    state, greedy = tmp_path / "cat.state", ("--temperature", 0)
    ten = said(capsys, "generate", artifact, "the cat", "--max-tokens", 10, *greedy)
    five = said(capsys, "generate", artifact, "the cat", "--max-tokens", 5, "--save-state", state, *greedy)
    rest = ("--max-tokens", 5, "--load-state", state, "--cache", "20K", *greedy)
    assert five.removesuffix("\n") + said(capsys, "generate", artifact, *rest) == ten


def test_generate_says_first_what_streams(artifact, capsys):
    capsys.readouterr()
    assert main(["generate", str(artifact), "the cat", "--max-tokens", "2", "--cache", "20K"]) == 0
    assert names(capsys.readouterr().err, "experts")


def test_a_benchmark_of_generation_says_tokens_and_bytes(artifact, capsys):
    table = said(capsys, "generate", artifact, "--max-tokens", 4, "--bench")
    for words in (
        "tokens a second",
        "bytes of experts",
        "read from memory",
        "share of that",
        "read and written",
    ):
        assert words in table
    assert table.count("bytes of state") == 1 and " 1 threads" not in table
    found = json.loads(said(capsys, "generate", artifact, "--max-tokens", 4, "--bench", "--json"))
    assert len(found["seconds"]) == 4 and found["bytes"] == sum(found["touched"].values())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-tokens", "0"], ["max_tokens", 0]),
        (["--device", "cuda"], ["device", "cuda"]),
        (["--load-state", "none"], ["load_state"]),
        (["--save-state", "none"], ["save_state"]),
        (["--stop", "."], ["stop"]),
        (["--temperature", "0.5"], ["temperature", 0.5]),
        (["--seed", "1"], ["seed", 1]),
        (["--draft-tokens", "4"], ["draft_tokens", 4]),
        (["--calibration", "none"], ["calibration", "none"]),
        (["--action", "flag"], ["action", "flag"]),
        (["--state-dtype", "int8"], ["state_dtype", "int8"]),
        (["a", "b"], ["prompts", 2]),
    ],
    ids=lambda value: "",
)
def test_generate_bench_refuses_what_it_does_not_heed(artifact, capsys, options, named):
    in_a_line(refusal(capsys, "generate", artifact, "--bench", *options), *named)


def test_eval_reads_what_training_held_out(run, artifact, text, capsys):
    before = json.loads(said(capsys, "eval", run, "--json"))
    after = json.loads(said(capsys, "eval", artifact, "--json", "--cache", "20K"))
    assert after["tokens"] == before["tokens"]
    assert abs(after["bits_per_byte"] - before["bits_per_byte"]) < 1
    assert json.loads(said(capsys, "eval", artifact, "--data", text, "--json"))["tokens"] > 0


def test_routes_of_an_artifact(artifact, text, tmp_path, capsys):
    found = json.loads(
        said(capsys, "perspective", "routes", artifact, "--text", text / "0.txt", "--tokens", 50, "--json")
    )
    assert found["tokens"] == 50 and all(sum(layer["load"]) == 50 for layer in found["layers"])
    assert (artifact / "routes/routes.svg").exists()
    long = tmp_path / "long.txt"
    long.write_text((text / "0.txt").read_text() * 2)
    traced = json.loads(
        said(capsys, "perspective", "trace", artifact, "--text", long, "--tokens", 1024, "--json")
    )
    assert traced["tokens"] == 1024


def test_inspect_counts_the_model(run, artifact, capsys):
    assert said(capsys, "inspect", artifact, "--json") == said(capsys, "inspect", run, "--json")


def test_a_cache_that_cannot_be_and_options_for_artifacts_are_refused_by_name(
    run, artifact, tmp_path, capsys
):
    in_a_line(refusal(capsys, "generate", artifact, "x", "--cache", "lots"), "cache", "lots")
    in_a_line(refusal(capsys, "generate", artifact, "x", "--cache", "1K"), "cache", "1K", 4096)
    in_a_line(refusal(capsys, "generate", run, "x", "--cache", "1G"), "cache", "1G")
    in_a_line(refusal(capsys, "generate", run, "x", "--verify"), "verify", True)
    (artifact / "manifest.json").rename(tmp_path / "manifest.json")
    try:
        in_a_line(refusal(capsys, "generate", artifact, "x"), "manifest.json")
    finally:
        (tmp_path / "manifest.json").rename(artifact / "manifest.json")


def test_a_cache_without_experts_is_refused_and_before_anything_is_verified(
    run, artifact, tmp_path, text, capsys, monkeypatch
):
    plain, dense = tmp_path / "plain", tmp_path / "dense"
    options = ("--data", text, "--out", plain, "--steps", 2, *PLAIN, *TRAIN)
    said(capsys, "train", *options)
    said(capsys, "quantize", plain, "--out", dense, "--calibrate", "none")
    in_a_line(refusal(capsys, "generate", dense, "x", "--cache", "20K"), "cache", "20K")
    monkeypatch.setattr("perspectron.decode.verify.ways", None)
    for one in (run, dense):
        in_a_line(refusal(capsys, "verify", one, "--cache", "20K"), "cache", "20K")
    in_a_line(refusal(capsys, "serve", run, dense, "--cache", "20K", "--port", 0), "cache", "20K")
    opened = list[tuple[Path, str | None]]()
    monkeypatch.setattr("perspectron.cli.serve.open_model", lambda *given: opened.append(given))
    monkeypatch.setattr("perspectron.cli.serve.Serve._served", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["serve", str(dense), str(artifact), "--cache", "20K", "--port", "0"])
    assert opened == [(dense, None), (artifact, "20K")]


def test_an_artifact_is_not_exported_and_not_loaded_for_it(artifact, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("perspectron.cli.export.open_model", None)
    for kind in ("--hf", "--onnx"):
        in_a_line(refusal(capsys, "export", artifact, kind, tmp_path / "out"), "run", artifact)


def test_synthesize_writes_an_artifact_that_generates(tmp_path, text, capsys):
    options = ("--data", text, "--set", "vocab_size=300", "hidden=40")
    out = tmp_path / "random"
    found = json.loads(
        said(capsys, "synthesize", "perspective-tiny", "--experts", 2, "--out", out, *options, "--json")
    )
    assert found["experts"]["distinct"] == 2 and "aliases" in found["about"]
    assert said(capsys, "generate", out, "the cat", "--max-tokens", 3) != ""
    in_a_line(refusal(capsys, "synthesize", "perspective-tiny", "--out", out), "out", out)
    in_a_line(refusal(capsys, "synthesize", "gpt2-tiny", "--out", tmp_path / "b"), "preset")
    big = refusal(capsys, "synthesize", "perspective-1t", "--experts", 128, "--out", tmp_path / "b")
    in_a_line(big.splitlines()[-1], tmp_path / "b", "GB")


@pytest.mark.parametrize(
    "name", ["config.json", "manifest.json", "shared.safetensors", "experts", "tokenizer.json"]
)
def test_links_do_not_lead_out_of_an_artifact(artifact, tmp_path, capsys, name):
    folder = tmp_path / "linked"
    shutil.copytree(artifact, folder)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    in_a_line(refusal(capsys, "generate", folder, "x"), folder, name)
    (tmp_path / name).rename(folder / "inside")
    (folder / name).unlink()
    (folder / name).symlink_to("inside")
    said(capsys, "generate", folder, "x", "--max-tokens", 1)


def test_the_use_of_experts_goes_with_an_artifact_to_another_machine(artifact, tmp_path, capsys, monkeypatch):
    here = shutil.copytree(artifact, tmp_path / "here")
    said(capsys, "generate", here, "the cat", "--max-tokens", 8, "--warm")
    there = shutil.copytree(here, tmp_path / "there")
    monkeypatch.setattr("platform.node", lambda: "another machine")
    begun, warm = [], ShardCache.warm
    monkeypatch.setattr(
        ShardCache, "warm", lambda cache, usage: begun.append(usage.most()) or warm(cache, usage)
    )
    assert main(["generate", str(there), "the cat", "--max-tokens", "4", "--warm"]) == 0
    assert names(capsys.readouterr().err, "experts", 100)
    assert begun == [Usage(here / "usage.json", {0: 4, 1: 4, 2: 4, 3: 4}).most()]
    assert begun[0] and json.loads((there / "usage.json").read_text())["machines"].keys() > {
        "another machine"
    }
