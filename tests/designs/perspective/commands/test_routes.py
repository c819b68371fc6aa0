"""`perspectron perspective routes` as a user types it."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron.cli.main import main
from perspectron.designs.perspective.suites.routes import measure, trace
from tests.refusals import in_a_line

PROSE = "The tree stood by the river, and nobody had asked it why it stood there at all.\n\n"
CODE = "def f(x):\n    return [y + 1 for y in x]\n\n"
NUMBERS = "12.5, 3.25, 1999\n7, 18, 4\n\n"
TRAIN = [
    *("--set", "d_model=32", "layers=4", "hidden=32", "rank=8", "heads=2", "kv_heads=1", "window=16"),
    *("vocab_size=300", "torus=[4,2]", "--batch-size", "2", "--seq-len", "32", "--steps", "2"),
    *("--eval-every", "0", "--save-every", "0", "--eval-tokens", "64", "--dtype", "float32"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(6):
        (folder / f"{i}.txt").write_text((PROSE + CODE + NUMBERS) * 20)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, texts) -> Path:
    out = tmp_path_factory.mktemp("runs") / "routed"
    command = ["train", "--preset", "perspective-tiny", "--data", str(texts), "--out", str(out)]
    assert main([*command, *TRAIN]) == 0
    return out


@pytest.fixture(scope="module")
def dense(tmp_path_factory, texts) -> Path:
    out = tmp_path_factory.mktemp("runs") / "dense"
    command = ["train", "--preset", "perspective-tiny-dense", "--data", str(texts), "--out", str(out)]
    assert main([*command, *TRAIN]) == 0
    return out


def test_a_table_a_drawing_and_all_the_numbers(run, texts, capsys):
    assert main(["perspective", "routes", str(run), "--text", str(texts / "0.txt")]) == 0
    out = capsys.readouterr().out
    found = json.loads((run / "routes/routes.json").read_text())
    ET.parse(run / "routes/routes.svg")
    assert [layer["layer"] for layer in found["layers"]] == [0, 1, 2]
    assert {name: kind["tokens"] for name, kind in found["kinds"].items()} == {"0": found["tokens"]}
    for layer in found["layers"]:
        assert sum(layer["load"]) == found["tokens"] == layer["pairs"] + 1
        assert sum(layer["rates"].values()) == pytest.approx(1)
        row = next(line for line in out.splitlines() if line.startswith(f"│ {layer['layer']} "))
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        rates = [f"{rate:.1%}" for rate in layer["rates"].values()]
        assert cells[1:] == [f"{layer['gini']:.3f}", f"{layer['reached']:.0%}", *rates]
    overall = found["overall"]
    assert overall["gini"] == pytest.approx(sum(layer["gini"] for layer in found["layers"]) / 3)
    for words in ("Gini", "reached", "same", "1-hop", "2-hop", "distant", "by chance", "by kind of text"):
        assert words in out


def test_the_numbers_are_those_of_the_text_read_after_a_separator(run, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(PROSE * 3)
    (tmp_path / "b.txt").write_text(CODE * 3)
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert main(["perspective", "routes", str(run), "--text", *files, "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "routes.json").read_text())
    model, tokenizer = perspectron.load(run)
    load, pairs = torch.zeros(8, dtype=torch.int64), 0
    for file in files:
        ids = torch.tensor([[0, *tokenizer.encode(Path(file).read_text())]])
        own = measure(trace(model, ids)[1], counted_BT=ids > 0)
        load, pairs = load + torch.tensor(own.load), pairs + own.pairs
    assert found["layers"][1]["load"] == load.tolist()
    assert found["layers"][1]["pairs"] == pairs
    assert [text["file"] for text in found["texts"]] == files
    assert found["tokens"] == sum(text["tokens"] for text in found["texts"])
    assert list(found["kinds"]) == ["a", "b"]
    for layer in found["layers"]:
        loads = zip(*(kind["load"] for kind in layer["kinds"].values()), strict=True)
        assert [sum(load) for load in loads] == layer["load"]
        assert [kind["pairs"] + 1 for kind in layer["kinds"].values()] == [
            text["tokens"] for text in found["texts"]
        ]


def test_kinds_that_the_user_names_and_a_limit(run, texts, tmp_path, capsys):
    text = str(texts / "0.txt")
    command = [
        "perspective",
        "routes",
        str(run),
        "--text",
        f"verse={text}",
        text,
        "--tokens",
        "40",
        "--path",
        "5",
    ]
    assert main([*command, "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["texts"] == [{"file": text, "tokens": 40}] * 2
    assert {name: kind["tokens"] for name, kind in found["kinds"].items()} == {"verse": 40, "0": 40}


def test_a_switch_has_routes_too(texts, tmp_path, capsys):
    out = tmp_path / "switch"
    train = [*TRAIN[:8], "router=switch", *TRAIN[8:]]
    command = ["train", "--preset", "perspective-tiny", "--data", str(texts), "--out", str(out)]
    assert main([*command, *train]) == 0
    assert main(["perspective", "routes", str(out), "--text", str(texts / "0.txt")]) == 0
    assert "a switch has no torus" in capsys.readouterr().out


MISTAKES = [
    (["perspective", "routes", "{dense}", "--text", "{texts}/0.txt"],
     ["model", "perspective-tiny-dense"]),
    (["perspective", "routes", "{run}", "--text", "{tmp}/none"], ["none"]),
    (["perspective", "routes", "{run}", "--text", "{tmp}"], []),
    (["perspective", "routes", "{run}", "--text", "{tmp}/empty"], ["empty", 0, 2]),
    (["perspective", "routes", "{run}", "--text", "{tmp}/binary"], ["binary"]),
    (["perspective", "routes", "{run}", "--text", "={texts}/0.txt"], ["text"]),
    (["perspective", "routes", "{run}", "--text", "code={tmp}/none"], ["none"]),
    (["perspective", "routes", "{run}", "--text", "{texts}/0.txt", "--path", "1"], ["path", 1]),
    (["perspective", "routes", "{run}", "--text", "{texts}/0.txt", "--tokens", "-1"],
     ["tokens", -1]),
    (["perspective", "routes", "{run}", "--text", "{tmp}/none", "--tokens", "1"], ["tokens", 1]),
    (["perspective", "routes", "{tmp}/missing", "--text", "{texts}/0.txt"],
     ["missing"]),
    (["perspective", "routes", "{run}"], ["--text"]),
    (["perspective", "routes", "{run}", "--text"], ["text"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, named, run, dense, texts, tmp_path, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 50)
    places = {"run": run, "dense": dense, "texts": texts, "tmp": tmp_path}
    capsys.readouterr()
    assert main([part.format(**places) for part in arguments]) == 2
    captured = capsys.readouterr()
    in_a_line(captured.err, *named)
    assert captured.out == ""


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["perspective", "routes", "--help"])
    assert stop.value.code == 0
    assert "Example: perspectron perspective routes" in capsys.readouterr().out
