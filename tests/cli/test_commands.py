"""The commands as a user types them, and what a mistake looks like."""

import contextlib
import html
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import perspectron
from perspectron.cli.main import GROUPS, _parse, commands, main
from perspectron.cli.options import assignments
from perspectron.cli.quickstart import Quickstart
from perspectron.data import open_shards
from perspectron.decode.reading import prefill
from perspectron.decode.sampling import SamplingConfig, sample
from perspectron.model.model import build
from perspectron.train import checkpoint
from perspectron.train.metrics import read_metrics
from perspectron.train.page import read_samples
from tests.cli.small import SIZES, TRAIN
from tests.refusals import in_a_line, names, warned

ROOT = Path(__file__).parents[2]
SMALL = ["--set", *SIZES]


@pytest.fixture(scope="module")
def run(tmp_path_factory, text) -> Path:
    out = tmp_path_factory.mktemp("runs") / "cats"
    assert main(["train", "--data", str(text), "--out", str(out), "--steps", "30", *SMALL, *TRAIN]) == 0
    return out


def test_train_leaves_what_the_readme_says(run):
    files = ("config.json", "tokenizer.json", "metrics.jsonl", "samples.jsonl", "index.html")
    for name in (*files, "checkpoints/step-00000030"):
        assert (run / name).exists(), name
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 30


def test_train_speaks_json_lines(tmp_path, text, capsys):
    out = tmp_path / "run"
    assert (
        main(["train", "--data", str(text), "--out", str(out), "--steps", "2", "--json", *SMALL, *TRAIN]) == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert "heldout_bits_per_byte" in lines[-1]


def test_toml_sets_and_flags_override(tmp_path, text):
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[model]\npreset = "transformer-tiny"\nd_model = 32\nlayers = 1\nheads = 2\n'
        f'vocab_size = 300\n[train]\ndata = "{text}"\nsteps = 9\nbatch_size = 2\nseq_len = 16\n'
        "eval_tokens = 64\n[train.optim]\nlr = 0.5\n"
    )
    assert (
        main(["train", "--config", str(toml), "--out", str(tmp_path / "run"), "--steps", "1", "--lr", "0.25"])
        == 0
    )
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["train"]["steps"] == 1
    assert config["train"]["optim"]["lr"] == 0.25
    assert config["train"]["seq_len"] == 16
    assert config["model"]["blocks"][0]["mixer"]["kind"] == "attention"


def test_generate_streams_the_same_text_as_json_gives(run, capsys):
    command = ["generate", str(run), "the cat", "--max-tokens", "12", "--seed", "3"]
    assert main(command) == 0
    streamed = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert streamed == answer["texts"][0] + "\n"
    assert answer["tokens"] == [12] or answer["finished"] == ["end"]


@pytest.mark.parametrize("prompt", [[], [""]], ids=["none", "empty"])
def test_without_a_prompt_a_text_begins(prompt, run, capsys):
    """As it does after the token that stands before every document."""
    assert main(["generate", str(run), *prompt, "--max-tokens", "12", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    model, tokenizer = perspectron.load(run)
    after = prefill(model, [[0]])[0][:, : tokenizer.vocab_size]
    assert answer["tokens"] == [12] or answer["finished"] == ["end"]
    first = sample(after, [[]], [0], [SamplingConfig()], [0]).item()
    assert answer["texts"][0].startswith(tokenizer.decode([first]).rstrip("\ufffd"))


def test_a_conversation_goes_on_from_disk(run, tmp_path, capsys):
    """Of a prompt after which no document ends: a conversation that has ended goes on with a new one."""
    state = str(tmp_path / "cat.state")

    def answer(*options: str) -> tuple[str, str]:
        assert main(["generate", str(run), *options, "--temperature", "2", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        return said["texts"][0], said["finished"][0]

    for prompt in ("the cat", "the dog", "a", "on the", "mat"):
        whole, finished = answer(prompt, "--max-tokens", "12")
        if finished == "length":
            break
    assert finished == "length"
    first, _ = answer(prompt, "--max-tokens", "6", "--save-state", state)
    assert first + answer("--max-tokens", "6", "--load-state", state)[0] == whole


def test_generate_reads_standard_input_and_several_prompts(run, monkeypatch, capsys):
    command = ["generate", str(run), "--max-tokens", "4", "--json"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the dog " * 500)))
    assert main([*command, "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == [4]
    assert main([*command, "the", "a longer one"]) == 0
    assert len(json.loads(capsys.readouterr().out)["texts"]) == 2


def test_eval_counts_every_held_out_byte(run, capsys):
    assert main(["eval", str(run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    held = open_shards(run / "data").split("heldout")
    assert answer["text_bytes"] == held.text_bytes
    assert 0 < answer["bits_per_byte"] < 8
    assert {"gzip -9", "bzip2 -9", "xz -9"} <= set(answer["compressors"])


def test_eval_of_another_text(run, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("the dog sat on the cat.\n" * 200)
    assert main(["eval", str(run), "--data", str(tmp_path / "other.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text_bytes"] > 1000


def test_inspect_of_presets_and_runs(run, capsys):
    assert main(["inspect", "perspective-1t", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == 1_045_671_013_044
    assert answer["active_parameters"] == 14_941_776_564
    assert (answer["shard_bytes"], answer["scale_bytes"]) == (27_065_344, 4 * (2 * 11008 + 4096))
    assert answer["groups"]["pdr"] == 60 * 52_428_800
    assert round(answer["flops_by_kind"]["pdr"] / 60 / 1e6) == 110
    assert len(set(answer["state_bytes"].values())) == 1
    assert main(["inspect", str(run)]) == 0
    assert names(capsys.readouterr().out, "perspective2")


@pytest.mark.parametrize("preset", ["perspective-1t", "lens-gpt2-124m"])
def test_inspect_away_from_the_checkout(preset, capsys, tmp_path, monkeypatch):
    """These two once read the results of the checkout, and ended where there were none."""
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", preset]) == 0
    assert capsys.readouterr().out.strip()


def test_the_package_imports_nothing_that_lies_beside_it():
    beside = re.compile(r"^\s*(from|import) (claims|benchmarks|tests)\b", re.MULTILINE)
    sources = Path(perspectron.__file__).parent.rglob("*.py")
    assert [str(path) for path in sources if beside.search(path.read_text(encoding="utf-8"))] == []


def test_inspect_of_the_full_size_fits_a_narrow_terminal_uncut(capsys):
    assert main(["inspect", "perspective-1t"]) == 0
    out = capsys.readouterr().out
    assert "1,038,845,214,720" in out and "52,428,800" in out and "…" not in out


def test_tokenize_then_train_on_it(tmp_path, text, capsys):
    corpus = str(tmp_path / "corpus")
    assert main(["tokenize", str(text), "--out", corpus, "--vocab-size", "280", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 280
    assert (
        main(["train", "--data", corpus, "--out", str(tmp_path / "run"), "--steps", "1", *SMALL, *TRAIN]) == 0
    )
    assert json.loads((tmp_path / "run/config.json").read_text())["model"]["vocab_size"] == 280


@pytest.fixture(scope="module")
def tour(tmp_path_factory, text) -> tuple[list[str], str]:
    """The command of a quickstart in the folder of its text, and what it prints."""
    data = shutil.copytree(text, tmp_path_factory.mktemp("tour") / "text")
    folder = data / "tour"
    command = ["quickstart", "--out", str(folder), "--data", str(data), "--steps", "2"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(command) == 0
    return command, out.getvalue()


@pytest.mark.slow
def test_quickstart_is_whole_and_ends_at_once_the_second_time(tour):
    command, out = tour
    for words in ("perspective2-tiny", "transformer-tiny", "gzip -9", "xz -9", "without the stop: yes"):
        assert words in out, words
    folder = Path(command[2])
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*/*")}
    assert main(command) == 0
    assert written and written == {path: path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*/*")}


def test_the_quickstarts_page_shows_both_models(tour):
    folder = Path(tour[0][2])
    page = (folder / "index.html").read_text()
    for name in ("perspective", "transformer"):
        assert f'href="{name}/index.html"' in page and (folder / name / "index.html").is_file()
        bits = read_metrics(folder / name)[-1]["heldout_bits_per_byte"]
        (samples,) = read_samples(folder / name)
        assert f"<td>{bits:.3f}</td>" in page and f"held-out {bits:.3f} bits per byte" in page
        assert all(html.escape(text["prompt"]) in page for text in samples["texts"])
    assert page.count('class="second') >= 2 and "gzip -9" in page and "<script" not in page


def test_a_second_quickstart_with_other_steps_is_refused(tour, capsys):
    assert main([*tour[0][:-1], "3"]) == 2
    assert names(capsys.readouterr().err, "--steps", 2, "--resume")


MISTAKES = [
    (["nope"], ["command", "nope", "quickstart"]),
    (["train"], ["train", "--data", "--resume"]),
    (["train", "--stepz", "1"], ["--stepz"]),
    (["train", "--steps", "x"], ["steps", "x"]),
    (["train", "--out", "{tmp}/o", "--steps", "0"], ["steps", 0]),
    (["train", "--out", "{tmp}/o", "--lr", "nan"], ["lr", "nan"]),
    (["train", "--out", "{tmp}/o", "--preset", "gpt5"], ["preset", "gpt5"]),
    (["train", "--out", "{tmp}/o", "--set", "rank=0"], ["rank", 0]),
    (["train", "--out", "{tmp}/o", "--set", "window=0"], ["window", 0]),
    (["train", "--out", "{tmp}/o", "--set", "rnak=1"], ["key", "rnak"]),
    (["train", "--out", "{tmp}/o", "--set", "rank"], ["set", "rank"]),
    (["train", "--out", "{tmp}/o", "--data", "{tmp}/missing"], ["missing"]),
    (["train", "--out", "{tmp}/o", "--data", "{tmp}/empty"], ["empty"]),
    (["train", "--out", "{tmp}/o", "--config", "{tmp}/missing.toml"], ["missing.toml"]),
    (["inspekt", "x"], ["inspekt", "inspect"]),
    (["train", "--datta", "x"], ["--datta", "--data"]),
    (["generate", "{tmp}/model.gguf", "y"], ["model.gguf", "import"]),
    (["train", "--resume", "{tmp}/missing"], ["missing"]),
    (["generate", "{tmp}/missing", "hello"], ["missing"]),
    (["generate", "{run}", "-", "a"], ["prompts"]),
    (["generate", "{run}", "a", "--top-p", "2"], ["top_p", 2.0]),
    (["generate", "{run}", "a", "--load-state", "{tmp}/empty.txt"], ["empty.txt"]),
    (["eval", "{tmp}/missing"], ["missing"]),
    (["train", "--resume", "{run}", "--steps", "50"], ["--init", 30]),
    (["train", "--resume", "{run}/checkpoints/step-00000030"], ["{run}"]),
    (["train", "--resume", "{run}", "--lr", "0.1"], ["--lr", "--resume"]),
    (["train", "--resume", "{run}", "--batch-size", "9"], ["--batch-size", "--resume"]),
    (["train", "--resume", "{run}", "--preset", "adr-tiny"], ["--preset", "--resume"]),
    (["train", "--resume={run}", "--out", "{tmp}/o"], ["--out", "--resume"]),
    (["train", "--resume", "{run}", "--recipe", "staged"], ["--recipe", "--resume"]),
    (["train", "--out", "{tmp}/o", "--data", "{tmp}/empty.txt"], ["empty.txt"]),
    (["train", "--out", "{tmp}/o", "--init", "{run}", "--set", "rank=4"], ["set", "rank=4"]),
    (["train", "--out", "{tmp}/o", "--seed", "18446744073709551616"], ["seed", 2**64]),
    (["train", "--out", "{tmp}/o", "--device", "meta"], ["device", "meta"]),
    (["selftest", "--device", "cuda:99"], ["device", "cuda:99"]),
    (["inspect", "{run}", "--set", "rank=5"], ["set"]),
    (["eval", "{run}", "--seq-len", "0"], ["seq_len", 0]),
    (["inspect", "nope"], ["preset", "nope"]),
    (["inspect", "perspective-tiny", "--set", "heads=10"], ["heads", 10]),
    (["tokenize", "{tmp}/empty", "--out", "{tmp}/o"], ["empty"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, named, run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    assert main([part.format(run=run, tmp=tmp_path) for part in arguments]) == 2
    captured = capsys.readouterr()
    in_a_line(captured.err, *(str(run) if name == "{run}" else name for name in named))
    assert captured.out == ""


def test_without_arguments_it_says_what_there_is_and_fails(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and names(captured.err, "perspectron")
    assert all(f"\n  {name} " in captured.err for name in commands())
    assert all(f"\n\n{title}\n" in captured.err for title in GROUPS)


def test_a_design_says_what_its_commands_are(capsys):
    assert main(["perspective", "--help"]) == 0
    assert "\n  perspective routes " in capsys.readouterr().out
    assert main(["perspective"]) == 2
    assert "\n  perspective routes " in capsys.readouterr().err
    assert main(["perspective", "nope"]) == 2
    in_a_line(capsys.readouterr().err, "command", "nope", "routes")


OLD = {name.split()[1]: name for name in commands() if " " in name}


@pytest.mark.parametrize("name", OLD)
def test_where_a_command_of_a_design_stood_a_line_says_where_it_stands(name, capsys):
    assert main([name, "RUN", "--json"]) == 2
    in_a_line(capsys.readouterr().err, "command", name, *OLD[name].split())


SETS = {
    "train": [], "eval": ["a-run"], "inspect": ["a-preset"],
    "plan": ["a-preset", "--ram", "1G"], "synthesize": ["a-preset", "--out", "o"],
}  # fmt: skip


@pytest.mark.parametrize("command", SETS)
def test_sizes_may_be_given_one_by_one(command):
    arguments = [*SETS[command], "--set", "a=1", "b=2", "--set", "c=3", "--set", "a=4"]
    assert assignments(_parse([command, *arguments]).set) == {"a": 4, "b": 2, "c": 3}


def test_flags_replace_single_sizes_of_a_file(tmp_path):
    (tmp_path / "sizes.toml").write_text('[model]\npreset = "perspective-tiny"\nrank = 16\nwindow = 32\n')
    parsed = _parse(["train", "--config", str(tmp_path / "sizes.toml"), "--set", "rank=8"])
    assert {**parsed.sizes, **assignments(parsed.set)} == {"rank": 8, "window": 32}


def test_a_run_is_not_overwritten(run, capsys):
    assert main(["train", "--out", str(run)]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], run, "--resume", "--out")


def test_a_flipped_byte_is_named_and_the_last_good_checkpoint_generates(run, text, tmp_path, capsys):
    out = tmp_path / "run"
    train = [*TRAIN, "--save-every", "1", "--keep", "3"]
    assert main(["train", "--data", str(text), "--out", str(out), "--steps", "3", *SMALL, *train]) == 0
    newest = out / "checkpoints/step-00000003/model.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    with warned(newest, "step-00000002"):
        assert main(["generate", str(out), "the", "--max-tokens", "2"]) == 0
    assert main(["generate", str(newest.parent), "the"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], newest)


def test_a_failed_start_leaves_nothing_that_a_second_one_trains_on(text, tmp_path, capsys):
    out, other = tmp_path / "run", tmp_path / "other.txt"
    other.write_text("completely different words here\n" * 400)
    assert (
        main(
            ["train", "--data", str(other), "--out", str(out), "--steps", "1", "--seq-len", "100000", *SMALL]
        )
        == 2
    )
    assert not out.exists()
    assert main(["train", "--data", str(text), "--out", str(out), "--steps", "1", *SMALL, *TRAIN]) == 0
    shards, tokenizer = open_shards(out / "data"), perspectron.load(out)[1]
    assert "the cat sat" in tokenizer.decode(shards.split("train").read(0, 60).tolist())


@pytest.mark.parametrize("recipe", [[], ["--recipe", "staged"]], ids=["plain", "staged"])
def test_too_little_text_leaves_nothing_behind(tmp_path, recipe, capsys):
    (tmp_path / "short.txt").write_text("a few words\nand no more\n")
    command = [
        "train",
        "--data",
        str(tmp_path / "short.txt"),
        "--steps",
        "9",
        *SMALL,
        *TRAIN,
        *recipe,
        "--out",
    ]
    assert main([*command, str(tmp_path / "run")]) == 2
    assert names(capsys.readouterr().err, 33, "seq_len")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("what was here stays")
    assert main([*command, str(tmp_path / "mine")]) == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_finished_run_says_so_and_how_to_go_on(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*.safetensors")}
    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert names(said, 30) and f"perspectron train --init {run} --out NEW" in said
    assert {path: path.read_bytes() for path in run.rglob("*.safetensors")} == before


@pytest.mark.parametrize("left", [None, "{", '{"step": 1}'])
def test_a_run_that_was_killed_before_its_result_was_kept_is_measured_when_it_is_resumed(
    left, run, tmp_path, capsys
):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    before = json.loads((out / "heldout.json").read_text())
    (out / "metrics.jsonl").unlink()  # of a run that was copied without
    (out / "heldout.json").unlink() if left is None else (out / "heldout.json").write_text(left)
    assert main(["train", "--resume", str(out)]) == 0
    assert "bits per byte" in capsys.readouterr().err
    assert json.loads((out / "heldout.json").read_text()) == before
    assert main(["train", "--resume", str(out)]) == 0
    assert "bits per byte" not in capsys.readouterr().err


def test_a_run_with_a_constant_rate_is_given_more_steps(text, tmp_path, capsys):
    out = tmp_path / "run"
    train = ["train", "--data", str(text), "--out", str(out), "--steps", "5"]
    train += ["--schedule", "constant", "--cooldown", "0.4"]
    assert main([*train, *SMALL, *TRAIN]) == 0
    assert main(["train", "--resume", str(out)]) == 0
    assert f"perspectron train --resume {out} --steps N" in capsys.readouterr().err
    assert main(["train", "--resume", str(out), "--steps", "4"]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "steps", 4, 5)
    assert main(["train", "--resume", str(out), "--steps", "8"]) == 0
    assert (out / "checkpoints/step-00000008").is_dir()
    assert json.loads((out / "config.json").read_text())["train"]["steps"] == 8
    perspectron.load(out / "checkpoints/ended-step-00000005")  # how it ended the first time


def test_a_run_that_cannot_be_given_more_steps_stays_as_it_was(text, tmp_path, capsys):
    out, own = tmp_path / "run", tmp_path / "own"
    shutil.copytree(text, own)
    train = ["train", "--data", str(own), "--out", str(out), "--steps", "5", "--schedule", "constant"]
    assert main([*train, "--cooldown", "0.4", *SMALL, *TRAIN]) == 0
    shutil.rmtree(out / "data")
    own.rename(tmp_path / "moved")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(out), "--steps", "8"]) == 2
    assert names(capsys.readouterr().err, own)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_from_anothers_weights_has_its_model(run, text, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["train", "--data", str(text), "--init", str(run), "--steps", "1", *TRAIN, "--out", str(out)]
    assert main(command) == 0
    assert perspectron.load(out)[0].config == perspectron.load(run)[0].config
    capsys.readouterr()
    command[-1] = str(tmp_path / "other")
    assert main([*command, "--preset", "perspective-tiny", "--set", "d_model=16", "hidden=16", "rank=4"]) == 2
    in_a_line(capsys.readouterr().err, run)


def test_a_model_of_more_ids_than_its_tokenizer_keeps_them(run, text, tmp_path):
    """As imported ones have, whose vocabularies are padded."""
    _, tokenizer = perspectron.load(run)
    config = checkpoint.load_config(run)
    config = replace(config, model=replace(config.model, vocab_size=config.model.vocab_size + 8))
    checkpoint.export(tmp_path / "padded", config, tokenizer, build(config.model), checkpoint.Progress())
    out = tmp_path / "run"
    given = ["--data", str(text), "--init", str(tmp_path / "padded"), "--steps", "1"]
    assert main(["train", *given, *TRAIN, "--out", str(out)]) == 0
    assert perspectron.load(out)[0].config == config.model


def test_shards_and_tokenizer_must_belong_together(text, run, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    assert main(["tokenize", str(text), "--out", str(corpus), "--vocab-size", "280"]) == 0
    (corpus / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    capsys.readouterr()
    assert main(["train", "--data", str(corpus), "--out", str(tmp_path / "run"), *SMALL, *TRAIN]) == 2
    assert names(capsys.readouterr().err, "tokenizer")


def test_eval_never_writes_into_the_run(text, tmp_path, capsys):
    corpus, out = tmp_path / "corpus", tmp_path / "run"
    assert main(["tokenize", str(text), "--out", str(corpus), "--vocab-size", "280"]) == 0
    assert main(["train", "--data", str(corpus), "--out", str(out), "--steps", "1", *SMALL, *TRAIN]) == 0
    kept = (out / "tokenizer.json").read_bytes()
    assert main(["tokenize", str(text), "--out", str(corpus), "--vocab-size", "270"]) == 0
    assert main(["eval", str(out)]) == 2
    assert (out / "tokenizer.json").read_bytes() == kept


def test_rows_of_a_loaded_conversation_do_not_mix(run, tmp_path, capsys):
    state = str(tmp_path / "two.state")
    main(["generate", str(run), "the cat", "the dog", "--max-tokens", "4", "--save-state", state])
    capsys.readouterr()
    assert main(["generate", str(run), "--load-state", state, "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.count("── ") == 2


def test_the_readme_runs(tmp_path, tour, monkeypatch, capsys):
    readme = (ROOT / "README.md").read_text()
    assert ".venv/bin/perspectron quickstart\n" in readme
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tour[0][2], Quickstart().out)
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert "bytes, however long the text:" in capsys.readouterr().out


def test_options_of_a_recipe_need_the_recipe(tmp_path, text, capsys):
    out = str(tmp_path / "run")
    assert main(["train", "--data", str(text), "--out", out, "--steps", "2", "--distill", "1", *TRAIN]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "--distill", "--recipe", "staged")


def test_training_what_gets_no_gradient_is_one_line(tmp_path, text, capsys):
    out = str(tmp_path / "run")
    command = ["train", "--data", str(text), "--out", out, "--steps", "2", "--dtype", "float32", *TRAIN]
    sizes = [
        "--set",
        "d_model=32",
        "heads=2",
        "kv_heads=1",
        "hidden=32",
        "rank=8",
        "vocab_size=300",
        "gate=none",
    ]
    command += ["--preset", "perspective-tiny"]
    at = command.index("--steps")
    for each in (command, [*command[:at], "--minutes", "0.5", *command[at + 2 :], "--out", f"{out}-timed"]):
        assert main([*each, *sizes, "--only", "*.route_proj.*"]) == 2
        in_a_line(capsys.readouterr().err.splitlines()[-1], "only")
