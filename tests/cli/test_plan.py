"""`perspectron plan` and `perspectron perspective trace` as a user types them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.cli.options import rate, size
from perspectron.cli.plan import digits
from perspectron.data import Tokenizer
from perspectron.designs.perspective.suites.routes import trace as follow
from perspectron.stream import trace as traces
from perspectron.stream.plan import needs
from perspectron.stream.synthetic import synthesize
from perspectron.util.errors import ConfigError
from tests.cli.small import SIZES, TRAIN
from tests.refusals import in_a_line, names, refused

TEXT = "The tree stood by the river, and nobody had asked it why it stood there at all.\n\n12, 5, x = [1]\n"
FAST = ["--bandwidth", "40G/s"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(6):
        (folder / f"{i}.txt").write_text(TEXT * 20)
    return folder / "0.txt"


def train(tmp_path_factory, text: Path, *options: str) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    command = ["train", "--data", str(text.parent), "--out", str(out), "--steps", "2", "--dtype", "float32"]
    assert main([*command, "--set", *SIZES, *options, *TRAIN]) == 0
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory, text) -> Path:
    return train(tmp_path_factory, text, "torus=[4,2]", "--preset", "perspective-tiny")


@pytest.fixture(scope="module")
def dense(tmp_path_factory, text) -> Path:
    return train(tmp_path_factory, text, "--preset", "perspective-tiny-dense")


def asked(capsys, *command: str) -> dict:
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------- plan


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (26282.35, "26,300"),
        (1234.0, "1,230"),
        (123.4, "123"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.0456, "0.046"),
    ],
)
def test_predicted_speeds_have_three_digits(value, said):
    assert digits(value) == said


def test_equal_bounds_are_one_number(capsys):
    assert main(["plan", "gpt2-tiny", "--ram", "1G", *FAST]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "all in memory" in line]
    assert " to " not in line


def test_a_plan_of_the_trillion_counts_slots_and_bytes_from_disk(capsys):
    command = ["plan", "perspective-1t", "--ram", "24G", "--disk", "3G/s", *FAST]
    found = asked(capsys, *command)
    assert (
        found["placement"]["slots"] == (24 * 10**9 - found["resident_bytes"]) // found["experts"][0]["slot"]
    )
    missed, uniform = found["cases"]
    assert missed["disk"] == 60 * found["experts"][0]["shard"]
    assert missed["seconds"]["disk"] == missed["disk"] / 3e9
    assert uniform["miss_rate"] == pytest.approx(1 - 793 / 7680, abs=0.01)
    assert main(command) == 0
    out = capsys.readouterr().out
    assert names(out, 27_065_344, 104_448, 27_262_976, 793, 7680, 211_045_721_424)
    assert "…" not in out and max(len(line) for line in out.splitlines() if line[0] in "│┏┡└") <= 80


def test_the_documents_own_gpu(capsys):
    options = ["--ram", "256G", "--vram", "4G", "--pcie", "25G/s", "--bandwidth", "200G/s"]
    found = asked(capsys, "plan", "perspective-1t", *options)
    (only,) = found["cases"]
    assert (only["miss_rate"], only["disk"]) == (0, 0)
    assert only["tokens_per_second"][1] == pytest.approx(25e9 / only["pcie"])
    assert found["placement"]["least_vram"] < 4e9


@pytest.mark.parametrize("options", [["--ram", "2G"], ["--ram", "24G", "--vram", "2.4G"]])
def test_too_little_memory_is_told_with_what_would_do(options, capsys):
    found = asked(capsys, "plan", "perspective-1t", *options, *FAST)
    placement = found["placement"]
    assert not placement["fits"] and found["cases"] == []
    assert main(["plan", "perspective-1t", *options, *FAST]) == 0
    name, given = ("RAM", placement["ram"]) if len(options) == 2 else ("VRAM", placement["vram"])
    least = placement[f"least_{name.lower()}"]
    assert names(capsys.readouterr().out, name, given, least, least - given)


def test_a_model_without_experts_and_its_positions(capsys):
    found = asked(capsys, "plan", "gpt2-tiny", "--ram", "1G", *FAST)
    assert (found["context"], found["experts"], found["cases"][0]["name"]) == (1024, [], "all in memory")
    assert main(["plan", "gpt2-tiny", "--ram", "1G", *FAST]) == 0
    assert "nothing streams from disk" in capsys.readouterr().out


def test_bandwidth_is_measured_where_it_is_not_given(capsys, monkeypatch):
    monkeypatch.setattr("perspectron.stream.speed.BUFFER", 1 << 20)
    found = asked(capsys, "plan", "gpt2-tiny", "--ram", "1G")
    assert found["rates"]["memory"] > 1e6 and found["rates"]["disk"] is None


def test_a_format_of_more_bits_needs_more_memory(capsys):
    sizes = ["--set", *SIZES, "torus=[4,2]"]
    found = [
        asked(capsys, "plan", "perspective-tiny", "--ram", "1G", "--shared", shared, *sizes, *FAST)[
            "resident_bytes"
        ]
        for shared in ("2bit", "4bit", "int8")
    ]
    assert found == sorted(found) and len(set(found)) == 3


def test_an_artifact_by_its_own_formats(tmp_path, capsys, monkeypatch):
    """Its disk is measured by one of its expert files."""
    sizes = {"d_model": 32, "hidden": 32, "rank": 8, "heads": 2, "kv_heads": 1, "vocab_size": 300}
    config, folder = presets.get("perspective-tiny", **sizes, torus=[4, 2]), tmp_path / "a"
    tokenizer = Tokenizer.train([TEXT * 20], 300)
    formats = synthesize(config, folder, lambda: tokenizer, experts=2, linear="int8").quant
    assert (
        asked(capsys, "plan", str(folder), "--ram", "1G", *FAST)["rates"]["disk"] is None
    )  # too small to tell
    monkeypatch.setattr("perspectron.stream.speed.LEAST", 1)
    found = asked(capsys, "plan", str(folder), "--ram", "1G", *FAST)
    assert found["resident_bytes"] == needs(config, 8192, formats).resident
    assert [layer["distinct"] for layer in found["experts"]] == [2, 2, 2]
    assert found["placement"]["shards"] == 6 and found["rates"]["disk"] > 0
    (folder / "experts/layer-000.safetensors").unlink()
    assert main(["plan", str(folder), "--ram", "1G", *FAST]) == 2
    in_a_line(capsys.readouterr().err, "layer-000.safetensors")


# ---------------------------------------------------------------- trace


def test_a_trace_is_the_models_own_routing(run, text, tmp_path, capsys):
    out = tmp_path / "t.json"
    found = asked(
        capsys,
        "perspective",
        "trace",
        str(run),
        "--text",
        str(text),
        "--tokens",
        "50",
        "--out",
        str(out),
        "--disk",
        "1G/s",
    )
    model, tokenizer = perspectron.load(run)
    ids = tokenizer.encode(text.read_text())[:50]
    layers = follow(model, torch.tensor([[*tokenizer.specials.prefix, *ids]]))
    trace = traces.load(out)
    np.testing.assert_array_equal(trace.chosen_TL.T, [layer.expert_BT[0, 1:].tolist() for layer in layers])
    np.testing.assert_array_equal(trace.guessed_TL.T, [layer.guess_BT[0, 1:].tolist() for layer in layers])
    assert (trace.tokens, trace.layers, trace.experts) == (50, (0, 1, 2), (8, 8, 8))
    assert [row["slots"] for row in found["sizes"]] == [1, 2, 4, 8, 16, 24]
    last = found["sizes"][-1]
    assert last["hit_rate"] == 1 - found["distinct"] / 150
    for row in found["sizes"]:
        assert row["tokens_per_second"] == pytest.approx(1e9 / row["bytes_per_token"])


def test_guesses_are_the_next_router_on_what_this_layer_read(run):
    model, _ = perspectron.load(run)
    read, ids = {}, torch.arange(40)[None]
    for index in range(3):
        ffn = model.blocks[index].ffn
        ffn.register_forward_pre_hook(lambda _, inputs, index=index: read.update({index: inputs[0][0]}))
    layers = follow(model, ids)
    for index in (1, 2):
        with torch.inference_mode():
            expected = model.blocks[index].ffn.router.route(read[index - 1]).expert_N
        assert layers[index].guess_BT[0].tolist() == expected.tolist()
    assert layers[0].guess_BT.tolist() == layers[0].expert_BT.tolist()


def test_a_plan_with_what_was_traced(run, text, capsys):
    assert main(["perspective", "trace", str(run), "--text", str(text), "--tokens", "60"]) == 0
    out = capsys.readouterr().out
    assert names(out, 180, "trace.json")
    model = perspectron.load(run)[0].config
    needed = needs(model, 8192)
    ram = needed.resident + 5 * needed.slot
    trace = traces.load(run / "trace.json")
    found = asked(capsys, "plan", str(run), "--ram", str(ram), "--trace", str(run / "trace.json"), *FAST)
    cases = {case["name"]: case for case in found["cases"]}
    assert found["placement"]["slots"] == 5
    assert cases["trace, LRU"]["miss_rate"] == traces.missed(traces.stack_distances(trace.keys_N), 5) / 180


# ---------------------------------------------------------------- mistakes

MISTAKES = [
    (["plan", "perspective-2t", "--ram", "1G"], ["preset", "perspective-2t"]),
    (["plan", "gpt2-tiny"], ["--ram"]),
    (["plan", "gpt2-tiny", "--ram", "lots"], ["ram", "lots"]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--disk", "3G"], ["disk", "3G"]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--pcie", "3G/s"], ["pcie", "3G/s"]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--context", "1025"], ["context", 1025]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--context", "0"], ["context", 0]),
    (["plan", "perspective-tiny", "--ram", "1G", "--context", "-1"], ["context", -1]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--shared", "3bit"], ["shared", "3bit"]),
    (["plan", "{tmp}", "--ram", "1G"], ["{tmp}"]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--gpus", "8"], ["gpus", 8, "--train"]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--seq-len", "64"], ["seq_len", 64, "--train"]),
    (["plan", "gpt2-tiny", "--ram", "1G", "--context-parallel", "2"], ["context_parallel", 2, "--train"]),
    (["plan", "gpt2-tiny", "--memory", "80G"], ["memory", "80G", "--train"]),
    (["plan", "{run}", "--ram", "1G", "--set", "rank=2"], ["set"]),
    (["plan", "perspective-tiny", "--ram", "1G", "--trace", "{tmp}/none"], ["none"]),
    (["plan", "perspective-tiny", "--ram", "1G", "--trace", "{text}"], ["{text}"]),
    (["plan", "{tmp}/artifact", "--ram", "1G"], ["artifact/config.json"]),
    (["perspective", "trace", "{dense}", "--text", "{text}"],
     ["model", "perspective-tiny-dense"]),
    (["perspective", "trace", "{run}", "--text", "{tmp}/none"], ["none"]),
    (["perspective", "trace", "{run}", "--text", "{tmp}/empty"], ["empty", 0, 2]),
    (["perspective", "trace", "{run}", "--text", "{text}", "--tokens", "-1"], ["tokens", -1]),
    (["perspective", "trace", "{run}", "--text", "{tmp}/none", "--tokens", "1"], ["tokens", 1]),
    (["perspective", "trace", "{run}", "--text", "{text}", "--disk", "fast"],
     ["disk", "fast"]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "named"), MISTAKES, ids=lambda value: "")
def test_a_mistake_is_one_line(command, named, run, dense, text, tmp_path, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact/config.json").write_text('{"format": "perspectron-artifact-1", "quant": 3}')
    (tmp_path / "artifact/shared.safetensors").touch()
    filled = [part.format(tmp=tmp_path, run=run, dense=dense, text=text) for part in command]
    assert main([*filled, *(FAST if command[0] == "plan" else [])]) == 2
    in_a_line(
        capsys.readouterr().err,
        *(name.format(text=text, tmp=tmp_path) if isinstance(name, str) else name for name in named),
    )


def test_a_trace_of_another_model_is_refused(run, text, tmp_path, capsys):
    out = tmp_path / "t.json"
    assert (
        main(["perspective", "trace", str(run), "--text", str(text), "--tokens", "9", "--out", str(out)]) == 0
    )
    capsys.readouterr()
    assert main(["plan", "perspective-166m", "--ram", "1G", "--trace", str(out), *FAST]) == 2
    in_a_line(capsys.readouterr().err, "perspective-166m")


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24G", 24 * 10**9), ("512M", 512 * 10**6), ("1.5GiB", 3 << 29), ("4KiB", 4096), ("4096", 4096),
        ("4096B", 4096), ("2TB", 2 * 10**12), (" 3 GB ", 3 * 10**9), (".5G", 5 * 10**8), ("1.G", 10**9), ("1Ki", 1024),
        ("24g", 24 * 10**9), ("512m", 512 * 10**6), ("1.5gib", 3 << 29), ("2kb", 2000),
    ],
)  # fmt: skip
def test_a_size_and_a_rate_are_read_with_their_units(text, value):
    assert size(text, "ram") == value
    assert rate(f"{text}/s", "disk") == value


BAD = [
    "",
    "G",
    "-1G",
    "0",
    "0.2",
    "1e9",
    "nan",
    "inf",
    "1,5G",
    "24\u212a",
    "24X",
    "24GBs",
    "24 G B",
    "1.2.3",
    "²G",
    "9" * 400,
]


@pytest.mark.parametrize("text", [*BAD, "1G/s", "9999999T", "1iB"])
def test_what_is_no_size_is_refused_by_its_option(text):
    with refused(ConfigError, "ram"):
        size(text, "ram")


@pytest.mark.parametrize("text", [*(f"{text}/s" for text in BAD), "3G", "3G/m", "3G/", "/s", "3G/s/s"])
def test_what_is_no_rate_is_refused_by_its_option(text):
    with refused(ConfigError, "disk"):
        rate(text, "disk")


# Training


def planned(capsys, *more: str) -> dict:
    command = [
        "plan",
        "perspective-tiny",
        "--set",
        *SIZES,
        "--train",
        "--memory",
        "80G",
        "--seq-len",
        "64",
        "--json",
    ]
    assert main([*command, *more]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_training_needs_16_bytes_of_each_parameter_shared_by_the_gpus(capsys):
    with torch.device("meta"):
        model = perspectron.model.model.LanguageModel(
            presets.get("perspective-tiny", **dict(map(_size, SIZES)))
        )
    parameters = sum(p.numel() for p in model.parameters())
    held = ("parameters", "gradients", "moments")
    for gpus, layout, share in (("1", "fsdp", 1), ("8", "fsdp", 8), ("8", "ddp", 1), ("16", "hsdp", 8)):
        found = planned(capsys, "--gpus", gpus, "--shard", layout)
        assert sum(found["memory"][part] for part in held) == pytest.approx(16 * parameters / share)
    experts = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("EFD", "EDF")))
    found = planned(capsys, "--gpus", "4", "--shard", "ddp", "--expert-parallel", "4")
    assert sum(found["memory"][part] for part in held) == pytest.approx(16 * (parameters - experts * 3 / 4))


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


def test_kept_activations_are_those_that_autograd_holds(capsys):
    """The prediction on the meta device against the tensors of a real pass."""
    from perspectron.train.footprint import kept

    model = perspectron.build(
        presets.get("transformer-tiny", vocab_size=300, layers=2, d_model=32, hidden=32, heads=2)
    )
    model = model.double()  # for which there are no kernels that keep less
    own, held = {p.data_ptr() for p in model.parameters()}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.hidden(torch.zeros(1, 64, dtype=torch.long))
    with torch.device("meta"):
        shapes = perspectron.model.model.LanguageModel(model.config).double()
    assert kept(shapes, 64) == pytest.approx(sum(held.values()), rel=0.25)
    del out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--gpus", "0"], ["gpus", 0]),
        (["--gpus", "12"], ["local", 8]),
        (["--gpus", "4", "--context-parallel", "3"], ["context_parallel", 3]),
        (["--gpus", "4", "--expert-parallel", "3"], ["expert_parallel", 3]),
        (["--gpus", "8", "--seq-len", "0"], ["seq_len", 0, "≥"]),
        (["--gpus", "8", "--seq-len", "-5"], ["seq_len", -5, "≥"]),
        (["--ram", "4G"], ["ram", "4G"]),
    ],
)
def test_a_training_that_cannot_be_is_refused_by_its_option(capsys, more, named):
    command = ["plan", "perspective-tiny", "--train", "--memory", "80G", *more]
    assert main(command) == 2
    in_a_line(capsys.readouterr().err, *named)


def test_windows_of_a_training_end_with_the_table_of_positions(capsys):
    command = ["plan", "gpt2-tiny", "--train", "--memory", "80G"]
    assert asked(capsys, *command) == asked(capsys, *command, "--seq-len", "1024")
    assert main([*command, "--seq-len", "1025"]) == 2
    in_a_line(capsys.readouterr().err, "seq_len", 1025, "1,024")


def test_a_training_that_does_not_fit_is_said(capsys):
    assert main(["plan", "perspective-1.9b", "--train", "--memory", "1G"]) == 0
    assert "does not fit: " in capsys.readouterr().out


def test_a_plan_without_memory_asks_for_it(capsys):
    assert main(["plan", "perspective-tiny"]) == 2
    in_a_line(capsys.readouterr().err, "--ram")
    assert main(["plan", "perspective-tiny", "--train"]) == 2
    in_a_line(capsys.readouterr().err, "--train", "--memory")
