"""Labels of Python's tokens, and what gates know of them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.data.specials import OURS
from perspectron.designs.perspective.suites import depth
from perspectron.designs.perspective.suites.depth import contrast, correlation, information, layers_of, probe
from perspectron.designs.perspective.suites.labels import labels, of_tokens
from perspectron.util.errors import ConfigError
from tests.refusals import refused

SOURCE = """\
import os  # é
def f(a, b=(1, [2])):
    x = g(a, h(b))
    return f"{x}" + os.name + y
"""
SIZES = {
    "vocab_size": 60,
    "d_model": 16,
    "layers": 3,
    "hidden": 16,
    "heads": 2,
    "kv_heads": 1,
    "rank": 4,
    "period": 3,
}


def at(text: str, skip: int = 0) -> int:
    """The byte at which a piece of the source begins, after so many earlier ones."""
    place = -1
    for _ in range(skip + 1):
        place = SOURCE.index(text, place + 1)
    return len(SOURCE[:place].encode())


def test_labels_are_those_of_the_grammar():
    found = labels(SOURCE)
    assert {len(value) for value in found.values()} == {len(SOURCE.encode())}
    for name, piece, skip, value in (
        ("text", "# é", 0, 2), ("text", "import", 0, 0), ("text", 'f"', 0, 1), ("text", "def", 0, 0),
        ("brackets", "def", 0, 0), ("brackets", "a, b", 0, 1), ("brackets", "1, [", 0, 2), ("brackets", "2]", 0, 3),
        ("brackets", "return", 0, 0), ("block", "def", 0, 0), ("block", "x = ", 0, 1), ("block", "return", 0, 1),
        ("column", "import", 0, 0), ("column", "os", 0, 1), ("column", "x = ", 0, 0), ("column", "+ y", 0, 2),
        ("name", "import", 0, 0), ("name", "g(", 0, 1), ("name", "a, h", 0, 2), ("name", "os.name", 0, 2),
        ("name", "y\n", 0, 1), ("call", "x = ", 0, 0), ("call", "a, h", 0, 1), ("call", "b))", 0, 2),
        ("call", "h(b", 0, 1),
    ):  # fmt: skip
        assert found[name][at(piece, skip)] == value, (name, piece)
    assert labels("def (") is None and labels("\0") is None
    assert all(len(value) == 0 for value in labels("").values())


def test_a_token_has_the_label_of_what_follows_its_space():
    pieces = [b"import", b" os", b"  # \xc3", b"\xa9\n"]
    each = of_tokens(pieces, {name: value[:16] for name, value in labels(SOURCE).items()})
    assert each["text"].tolist() == [0, 0, 2, 2]


def test_a_name_bound_long_ago():
    found = labels("x = 1\n" + "\n" * 20 + "x\n")
    assert found["name"][26] == 3


def test_information_is_that_of_the_table():
    draw = np.random.default_rng(0)
    label = draw.integers(0, 4, 8000)
    known, noise = label + 0.01 * draw.random(8000), draw.random(8000)
    bits = information(np.stack([known, noise], 1), label)
    assert bits[0] == pytest.approx(2, abs=0.05) and bits[1] < 0.01


def test_a_probe_finds_what_is_linear():
    draw = np.random.default_rng(0)
    gamma = 1 / (1 + np.exp(-draw.normal(size=(4000, 5))))
    label = (np.log(gamma / (1 - gamma)) @ np.array([1.0, -2, 0, 0, 1]) > 0).astype(np.int64)
    right, common = probe(gamma, label, 2000)
    assert right > 0.97 and common < 0.6
    right, common = probe(gamma, draw.integers(0, 2, 4000), 2000)
    assert right < 0.57


def test_a_rank_correlation_of_numbers_in_order_is_1():
    assert correlation(np.arange(4), np.array([1, 2, 3, 9.0])) == 1
    assert correlation(np.arange(2), np.arange(2)) == 0


def test_gates_that_do_not_move_are_as_if_frozen():
    model = perspectron.build(presets.get("perspective", **SIZES)).requires_grad_(False)
    ids = [int(x) for x in torch.randint(1, 60, (40,), generator=torch.Generator().manual_seed(0))]
    source = depth.Source(ids, {})
    subject = SimpleNamespace(model=model, tokenizer=SimpleNamespace(specials=OURS))
    gates, nats = depth._gates(subject, ids)
    assert {gamma.shape for gamma in gates.values()} == {(40, 16)}
    assert np.abs(depth._frozen(subject, 0, [source], gates[0]) - nats).max() > 1e-6
    layers_of(model)[0].weight.zero_()
    gates, nats = depth._gates(subject, ids)
    np.testing.assert_allclose(depth._frozen(subject, 0, [source], gates[0]), nats, atol=1e-5)
    assert contrast(model, [ids] * 2, 0)[0] == 0
    assert contrast(model, [ids] * 2, 0)[1] > 0


def test_a_model_without_decays_is_refused():
    with refused(ConfigError):
        layers_of(
            perspectron.build(presets.get("gpt2", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
        )


def test_the_suite_measures_every_layer_of_a_run(tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(30):
        (texts / f"{i}.py").write_text(SOURCE.replace("x", f"x{i}") * 4)
    command = ["train", "--preset", "perspective", "--data", str(texts), "--steps", "1", "--seq-len", "32"]
    command += ["--batch-size", "2", "--eval-tokens", "64", "--dtype", "float32", "--heldout", "0.5"]
    sizes = [f"{key}={value}" for key, value in SIZES.items() if key != "vocab_size"] + ["vocab_size=300"]
    assert main([*command, "--set", *sizes, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--suite", "depth", "--tokens", "600", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert found["tokens"] == 600 and set(found["rank"]) == set(depth.LABELS)
    shown = depth.lines(found)
    assert len(shown) == 4 and "layer 1" in shown[2]


def test_a_text_without_python():
    tokenizer = SimpleNamespace(token_bytes=lambda id: b"def (", specials=OURS)
    split = SimpleNamespace(tokens=80, starts=np.array([0]), read=lambda start, stop: np.arange(1, 81))
    subject = SimpleNamespace(text=split, tokenizer=tokenizer)
    assert list(depth.read(subject, depth.Options())) == []


def test_no_file_is_parsed_after_the_last_that_is_used(monkeypatch):
    parsed = list[str]()
    monkeypatch.setattr(depth, "labels", lambda source: parsed.append(source) or labels(source))
    tokenizer = SimpleNamespace(token_bytes=lambda id: b"x\n", specials=OURS)
    split = SimpleNamespace(
        tokens=400, starts=np.arange(0, 400, 40), read=lambda start, stop: np.arange(1, 41)
    )
    subject = SimpleNamespace(text=split, tokenizer=tokenizer)
    found = list(depth.read(subject, depth.Options(tokens=64)))
    assert [len(source.ids) for source in found] == [40, 24] and len(parsed) == 2


def test_lines_end_where_both_readers_of_python_end_them():
    """A form feed ends none; a carriage return alone ends one for `ast` and none for `tokenize`."""
    call = labels("x = 1\n\x0cdef f(a):\n    return g(a)\n")
    place = "x = 1\n\x0cdef f(a):\n    return g(a".index("g(a") + 2
    assert call is not None and call["call"][place] == 1
    assert labels("# a\rb\nx = f(1)\n") is None and labels("s = 'a'\ry = f(1)\rz = g(2)\n") is None
    assert labels("x = f(1)\r\ny = f(2)\r\n") is not None
