"""`perspectron search`: spaces, rungs, results, and what a user's mistakes say."""

import json
import math

import pytest

from perspectron.cli.main import main
from perspectron.compare import run, search
from perspectron.compare.plan import Settings, models_of_designs, plan
from perspectron.compare.run import Rate
from perspectron.train import checkpoint
from perspectron.util.errors import CheckpointError
from tests.compare.here import in_this_process  # noqa: F401 - a fixture of this module
from tests.refusals import in_a_line, refused

SPACE = "heads = [1, 2, 1000]\nlr = [8e-3]\nembedding_norm = [true]\n"
OPTIONS = [
    "--params", "120k", "--tokens", "512,1024", "--seq-len", "32", "--batch-size", "4", "--dtype", "float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    sentence = "the cat sat on the mat and the dog lay by the log while a bird sang in the old tree"
    words = sentence.split()
    for i in range(40):
        (folder / f"{i}.txt").write_text(" ".join(words[(i * 7 + j * j) % len(words)] for j in range(200)))
    return folder


@pytest.fixture
def space(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(SPACE)
    return path


@pytest.mark.slow
def test_of_all_candidates_the_best_go_on(text, space, tmp_path, capsys):
    out = tmp_path / "out"
    command = [
        "search",
        "--design",
        "gla",
        "--space",
        str(space),
        "--data",
        str(text),
        "--out",
        str(out),
        *OPTIONS,
    ]
    assert main([*command, "--keep", "2"]) == 0
    captured = capsys.readouterr()
    found = json.loads((out / search.RESULTS).read_text())
    (refused,) = found["refused"]
    assert refused == "gla[heads=1000,embedding_norm=true]"
    (line,) = (line for line in captured.err.splitlines() if line.startswith("refused"))
    in_a_line(line, refused, "heads")
    first, last = found["rungs"]
    assert (first["tokens"], last["tokens"]) == (512, 1024)
    assert [len(rung["candidates"]) for rung in (first, last)] == [2, 1]
    for rung in (first, last):
        bits = [line["dev_bits_per_byte"] for line in rung["candidates"]]
        assert bits == sorted(bits) and all(map(math.isfinite, bits))
    named = {(line["variant"], line["lr"]) for line in first["candidates"]}
    variants = ["gla[heads=1,embedding_norm=true]", "gla[heads=2,embedding_norm=true]"]
    assert named == {(variant, 8e-3) for variant in variants}
    kept = {(line["variant"], line["lr"]) for line in first["candidates"][:1]}
    assert {(line["variant"], line["lr"]) for line in last["candidates"]} == kept
    assert found["chosen"] == last["candidates"][0] and found["trained_tokens"] == 2 * 512 + 1024
    chosen = found["chosen"]
    assert captured.out.startswith(f"{chosen['variant']}  lr {chosen['lr']:g}  warmup 0.05")
    place = out / "rungs" / "1024" / chosen["variant"] / f"{chosen['lr']:g}-0.05"
    config = checkpoint.load_config(place)
    assert config.train.measured_on == "dev" and config.train.optim.lr == chosen["lr"]
    assert f"{config.model.blocks[0].mixer.heads}" in chosen["variant"]
    # again: everything is there
    before = (place / run.METRICS).stat().st_mtime_ns
    assert main([*command, "--keep", "2"]) == 0
    assert (place / run.METRICS).stat().st_mtime_ns == before
    assert json.loads((out / search.RESULTS).read_text()) == found
    space.write_text(SPACE.replace("8e-3", "9e-3"))
    assert main([*command, "--keep", "2"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "out")


def test_a_large_space_is_drawn_from_without_return():
    space = {"heads": [1, 2, 4], "gate_rank": [4, 8, 16], "lr": [1e-3, 2e-3]}
    drawn = search.candidates("gla", space, 7, seed=1)
    assert len(drawn) == len(set(drawn)) == 7 and drawn == search.candidates("gla", space, 7, seed=1)
    assert drawn != search.candidates("gla", space, 7, seed=2)
    assert len(search.candidates("gla", space, 18, seed=1)) == 18
    one = search.candidates("perspective[kda]", {"warmup": [0.2], "negative": [True]}, 9, seed=0)
    assert one == [search.Candidate("perspective[kda,negative=true]", Rate(4e-3, 0.2))]


def test_a_value_that_stands_twice_in_a_space_is_one():
    space = {"heads": [1, 1, 2], "lr": [8e-3, 0.008], "embedding_norm": [True]}
    found = search.candidates("gla", space, 9, seed=0)
    assert [one.variant for one in found] == [f"gla[heads={n},embedding_norm=true]" for n in (1, 2)]


def test_a_candidate_whose_training_did_not_end_stops_the_choice(text, tmp_path):
    """One that diverged is left out; one that was killed may be the best."""
    variants = ("gla[heads=1]", "gla[heads=2]")
    settings = Settings(
        variants, 120_000, 512, 1, str(text), seq_len=32, batch_size=4, dtype="float32", suites=()
    )
    what = plan(tmp_path, "search", settings, models_of_designs, 1)
    everyone = [search.Candidate(name, Rate(4e-3, 0.05)) for name in variants]

    def killed(cells: list[run.Cell]) -> None:
        first, _ = cells
        first.folder.mkdir(parents=True)
        (first.folder / run.FAILED).write_text('{"why": "step 1: loss is nan"}')

    def ends(cells: list[run.Cell]) -> None:
        _, last = cells
        checkpoint.path_of(last.folder, last.steps).mkdir(parents=True)
        (last.folder / run.METRICS).write_text(f'{{"step": {last.steps}, "dev_bits_per_byte": 2.0}}\n')

    with refused(CheckpointError, tmp_path / "rungs" / "512" / "gla[heads=2]" / "0.004-0.05"):
        search.halve(tmp_path, what, everyone, [512], 2, killed, lambda *_: None)
    assert not (tmp_path / search.RESULTS).exists()
    found = search.halve(tmp_path, what, everyone, [512], 2, ends, lambda *_: None)
    assert found["chosen"]["variant"] == "gla[heads=2]"


def test_a_search_is_not_resumed_as_a_comparison(text, tmp_path, capsys):
    settings = Settings(
        ("gla",), 120_000, 512, 1, str(text), seq_len=32, batch_size=4, dtype="float32", suites=()
    )
    plan(tmp_path, "search", settings, models_of_designs, 1)
    assert main(["compare", "--resume", str(tmp_path)]) == 2
    in_a_line(capsys.readouterr().err, "resume", tmp_path, "search")
    assert not (tmp_path / "conditions.json").exists()


def test_a_search_that_could_not_be_planned_leaves_its_folder_to_another(text, tmp_path, capsys):
    path = tmp_path / "space.toml"
    command = ["search", "--design", "gla", "--space", str(path), "--data", str(text)]
    for space in ("heads = [1]", "heads = [1, 2]"):
        path.write_text(space)
        assert main([*command, "--out", str(tmp_path / "out"), *OPTIONS, "--params", "10"]) == 2
        in_a_line(capsys.readouterr().err, "params", 10)


def test_a_search_that_began_with_one_number_of_tokens_keeps_what_it_was_given(text, tmp_path, capsys):
    (tmp_path / "space.toml").write_text("heads = [1, 2]")
    (out := tmp_path / "out").mkdir()
    (out / "compare.json").write_text("{}")
    command = [
        "search",
        "--design",
        "gla",
        "--space",
        str(tmp_path / "space.toml"),
        "--data",
        str(text),
        *OPTIONS,
    ]
    assert main([*command, "--out", str(out), "--tokens", "4k", "--keep", "2"]) == 2
    assert "keep" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("space", "options", "named"),
    [
        ("heads = [1, 2]", ["--seed", "3"], ["seed", 3, 2]),
        ("heads = [1, 2]", ["--seed", "3", "--candidates", "2"], ["seed", 3, 2]),
        ("rank = [1]", [], ["gla[rank=1]", "rank", "d_model"]),
        ("heads = []", [], ["heads", "[]"]),
        ("heads = 2", [], ["heads", 2]),
        ('heads = [1, "two"]', [], ["heads", "two"]),
        ('optimizer = ["sgd"]', [], ["optimizer", "sgd"]),
        ("", [], ["space.toml"]),
        ("heads = [", [], ["space.toml"]),
        ("hidden = [8]", [], ["hidden"]),
        ("lr = [2.0]", [], ["lr"]),
        ("lr = [0]", [], ["lr"]),
        ("warmup = [true]", [], ["warmup"]),
        ("heads = [7]", [], ["heads", 7]),
        ("heads = [1]", ["--params", "10"], ["params", 10]),
        ("heads = [1]", ["--tokens", "1M,300k"], ["tokens", "1M,300k"]),
        ("heads = [1]", ["--keep", "1"], ["keep", 1]),
        ("heads = [1, 2]", ["--tokens", "4k", "--keep", "2"], ["keep", 2]),
        ("heads = [1]", ["--dev", "0"], ["dev", 0.0]),
        ("heads = [1]", ["--design", "glb"], ["design", "glb"]),
    ],
)
def test_a_users_mistake_is_one_line(text, tmp_path, capsys, space, options, named):
    path = tmp_path / "space.toml"
    path.write_text(space)
    command = ["search", "--design", "gla", "--space", str(path), "--data", str(text)]
    assert main([*command, "--out", str(tmp_path / "out"), *OPTIONS, *options]) == 2
    in_a_line(capsys.readouterr().err, *named)
