"""`perspectron perspective adapt`, and `generate` under an adapter."""

import json

import pytest
import torch

from perspectron.cli.main import main
from perspectron.designs.perspective.adapt import AdaptConfig, Adapter
from perspectron.designs.perspective.adapt.positions import search
from perspectron.designs.perspective.commands.adapt import in_bits
from perspectron.opening import Opened, load
from tests.cli.small import SIZES
from tests.refusals import in_a_line

STEPS = "--steps 3 --batch-size 2 --seq-len 32 --eval-every 0 --save-every 0 --eval-tokens 64 --dtype float32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapt")
    text = "".join(f"the cat sat on mat {i}, and the dog on log {i % 7}.\n" for i in range(200))
    (folder / "text.txt").write_text(text)
    (folder / "short.txt").write_text("the cat")
    train = ["train", "--data", str(folder / "text.txt"), *STEPS.split(), "--set", *SIZES]
    for preset, more in (("perspective-tiny", ["ffn=routed", "torus=[2,2]"]), ("perspective-tiny-dense", [])):
        assert main([*train, *more, "--preset", preset, "--out", str(folder / preset)]) == 0
    return folder


@pytest.mark.slow
def test_a_text_is_learned_kept_and_merged(folder, capsys):
    run, text = str(folder / "perspective-tiny-dense"), str(folder / "text.txt")
    merged = str(folder / "merged")
    capsys.readouterr()
    assert (
        main(["perspective", "adapt", run, "--text", text, "--lr", "0.02", "--merge", merged, "--json"]) == 0
    )
    first = json.loads(capsys.readouterr().out)
    assert first["bits_per_byte"]["with"] < first["bits_per_byte"]["without"]
    assert first["updates"] == first["tokens"] // AdaptConfig().every
    assert (
        main(
            [
                "perspective",
                "adapt",
                run,
                "--text",
                text,
                "--adapter",
                first["adapter"],
                "--out",
                f"{run}/two",
                "--json",
            ]
        )
        == 0
    )
    again = json.loads(capsys.readouterr().out)
    assert again["bits_per_byte"]["with"] < first["bits_per_byte"]["with"]
    before, after = (load(path)[0].state_dict() for path in (run, merged))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"blocks.{i}.mixer.p_proj.weight" for i in range(3)}


def test_generate_under_an_adapter_goes_on_from_its_two_files(folder, capsys):
    run = str(folder / "perspective-tiny-dense")
    state, adapter = str(folder / "s.state"), str(folder / "s.adapter")
    words = "the cat sat on mat 5, and the dog on log 6.\n" * 12
    plain = ["generate", run, words, "--temperature", "0", "--max-tokens", "6", "--json"]
    capsys.readouterr()
    assert main([*plain, "--adapt", "--save-state", state, "--save-adapter", adapter]) == 0
    json.loads(capsys.readouterr().out)
    on = ["generate", run, "--load-state", state, "--temperature", "0", "--max-tokens", "3", "--json"]
    assert main([*on, "--adapter", adapter]) == 0
    assert main([*plain[:2], words, words[:40], *plain[3:], "--adapt"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["texts"]) == 2


def test_generate_learns_from_a_short_prompt(folder, capsys):
    run, adapter = str(folder / "perspective-tiny-dense"), folder / "short.adapter"
    asked = [
        "generate",
        run,
        "the cat sat on mat 5",
        "--max-tokens",
        "2",
        "--adapt",
        "--save-adapter",
        str(adapter),
    ]
    assert main(asked) == 0
    model, _ = load(run)
    assert all(up.abs().max() > 0 for up in Adapter.load(adapter, model).up.values())
    capsys.readouterr()


def test_positions_are_moved_into_a_run_of_their_own(folder, monkeypatch, capsys):
    run, text, moved = (str(folder / name) for name in ("perspective-tiny", "text.txt", "moved"))
    capsys.readouterr()
    within = list[bool]()

    def searched(*args, **kwargs):
        within.append(torch.is_autocast_enabled("cpu"))
        return search(*args, **kwargs)

    monkeypatch.setattr("perspectron.designs.perspective.commands.adapt.search", searched)
    monkeypatch.setattr(Opened, "autocast", lambda self: torch.autocast("cpu", torch.bfloat16))
    assert (
        main(
            [
                "perspective",
                "adapt",
                run,
                "--text",
                text,
                "--tokens",
                "600",
                "--positions",
                "--merge",
                moved,
                "--json",
            ]
        )
        == 0
    )
    steps = json.loads(capsys.readouterr().out)["steps"]
    before, after = (load(path)[0].state_dict() for path in (run, moved))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert bool(changed) == any(step["accepted"] for step in steps)
    assert all(name.endswith("offset_EA") for name in changed)
    assert within == [True]  # the run's own precision


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--text", "short.txt"], ["short.txt", "every", 256]),
        (["--text", "none.txt"], ["none.txt"]),
        (["--text", "none.txt", "--tokens", "255"], ["tokens", 255, 256, "every"]),
        (["--text", "text.txt", "--tokens", "-1"], ["tokens", -1]),
        (["--text", "text.txt", "--rank", "0"], ["rank", 0]),
        (["--text", "text.txt", "--layers", "3"], ["layers", 3]),
        (["--text", "text.txt", "--positions"], ["merge"]),
        (["--text", "text.txt", "--positions", "--merge", "m", "--adapter", "a"], ["adapter", "positions"]),
        (["--text", "text.txt", "--positions", "--merge", "m", "--out", "o"], ["out", "positions"]),
        (["--text", "text.txt", "--positions", "--merge", "m", "--rank", "2"], ["rank", 2, "positions"]),
        (["--text", "text.txt", "--positions", "--merge", "m", "--lr", "0.5"], ["lr", "0.5", "positions"]),
        (["--text", "text.txt", "--adapter", "text.txt"], ["text.txt"]),
        (["--text", "text.txt", "--adapter", "text.txt", "--rank", "2"], ["rank", 2, "adapter", "text.txt"]),
        (
            ["--text", "text.txt", "--adapter", "text.txt", "--layers", "0"],
            ["layers", 0, "adapter", "text.txt"],
        ),
    ],
)
def test_mistakes_are_told_in_a_line(folder, monkeypatch, capsys, words, named):
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["perspective", "adapt", "perspective-tiny-dense", *words]) == 2
    in_a_line(capsys.readouterr().err, *named)


def test_too_few_tokens_for_a_step_are_blamed_not_the_text(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    capsys.readouterr()
    few = ["perspective-tiny", "--text", "none.txt", "--positions", "--merge", "few", "--tokens", "511"]
    assert main(["perspective", "adapt", *few]) == 2
    in_a_line(capsys.readouterr().err, "tokens", 511, 512)


def test_bits_are_of_the_tokens_that_have_bytes(tokenizer):
    """Nats of a prefix of several ids come first, and tokens without nats do."""
    text = tokenizer.encode("the cat sat on the mat")
    nats = torch.rand(len(text), dtype=torch.float64)
    before = torch.full((2,), 9.0, dtype=torch.float64)
    assert in_bits(tokenizer, text, torch.cat([before, nats])) == in_bits(tokenizer, text, nats)
    assert in_bits(tokenizer, text, nats[1:]) == in_bits(tokenizer, text[1:], nats[1:])
