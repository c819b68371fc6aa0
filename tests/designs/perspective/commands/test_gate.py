"""`perspectron perspective gate`: each condition can hold and fail, and what cannot be compared is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.designs.perspective.commands.gate import (
    Condition,
    Run,
    conversion,
    perplexity,
    read,
    scan_error,
    verdict,
)
from perspectron.opening import open_model
from perspectron.train import checkpoint
from perspectron.util.errors import CheckpointError, ConfigError
from tests.cli.small import SIZES
from tests.refusals import in_a_line, refused

ONE = Run(Path("one"), "perspective", 1000, 500, 2.0, "abc", "heldout", 90, 16)
ENDED = {
    "steps": 1,
    "heldout_bits_per_byte": 2.0,
    "gini": None,
    "reach": None,
    "delta": None,
    "layers": {},
}
GLA = replace(ONE, path=Path("two"), design="gla", bits_per_byte=1.9)


def test_the_loss_is_compared_at_equal_size_and_tokens():
    assert perplexity([ONE, GLA]).holds is False and perplexity([ONE, GLA]).name.startswith("PDR's loss")
    assert perplexity([replace(ONE, bits_per_byte=1.8), ONE, GLA]).holds is True
    assert perplexity([ONE]).holds is None and perplexity([GLA]).holds is None
    for change, named in (
        ({"parameters": 900}, ["parameters", "two", 900, 1000]),
        ({"tokens": 400}, ["tokens", "two", 400, 500]),
        ({"text": "xyz"}, ["text", "two", "xyz", "abc"]),
        ({"measured_on": "dev"}, ["measured_on", "two", "dev", "heldout"]),
        ({"measured": 80}, ["measured", "two", 80, 90]),
        ({"seq_len": 8}, ["seq_len", "two", 8, 16]),
    ):
        with refused(ConfigError, *named):
            perplexity([ONE, replace(GLA, **change)])
    with refused(ConfigError, "design", "three", "perspective2", "one"):
        perplexity([ONE, replace(ONE, path=Path("three"), design="perspective2"), GLA])


def test_one_failure_is_enough_and_what_is_missing_is_not_decided():
    good, bad, open_ = (
        Condition(name, "", "", holds) for name, holds in (("a", True), ("b", False), ("c", None))
    )
    assert verdict([good, open_, bad]) == "do not proceed: b"
    assert verdict([good, open_]) == "not decided: c"
    assert verdict([good, good]) == "proceed: all four conditions hold"


@pytest.mark.parametrize(("after", "holds"), [(10.9, True), (11.1, False)])
def test_the_cost_of_ternary_experts(tmp_path, after, holds):
    rows = [
        ENDED | {"stage": "differentiate", "heldout_perplexity": 10.0},
        ENDED | {"stage": "ternary", "heldout_perplexity": after},
    ]
    (tmp_path / "stages.json").write_text(json.dumps(rows))
    assert conversion([tmp_path]).holds is holds
    assert conversion([tmp_path / "none"]).holds is None


@pytest.mark.parametrize("rows", ["{}", "[1]", '[{"stage": "ternary"}]', '[{"heldout_perplexity": 10.0}]'])
def test_a_file_of_stages_that_is_damaged_is_refused(tmp_path, rows):
    (tmp_path / "stages.json").write_text(rows)
    with refused(CheckpointError, tmp_path / "stages.json"):
        conversion([tmp_path])


def test_a_scan_that_is_another_is_seen(monkeypatch):
    sizes = {"vocab_size": 40, "d_model": 16, "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "rank": 4}
    model, ids = perspectron.build(presets.get("perspective", **sizes)), list(range(40))
    assert scan_error(model, ids) < 1e-5
    assert scan_error(perspectron.build(presets.get("perspective", **sizes, shift=["k", "v"])), ids) < 1e-5
    from perspectron.ops import pdr

    scan = pdr.scan
    monkeypatch.setattr(
        pdr, "scan", lambda *x, **options: scan(*x, **options) if "backend" in options else
        (1.001 * scan(*x, **options)[0], None) if "checked" not in options else scan(*x, **options),
    )  # fmt: skip
    assert scan_error(model, ids) > 1e-4
    plain = perspectron.build(presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    assert scan_error(plain, ids) is None


def test_the_loss_is_of_the_best_checkpoint_and_the_text_is_told_by_its_tokens(tmp_path):
    found = []
    for name, text in (("cats", "The cat sat on the mat.\n"), ("dogs", "The dog sat on the log.\n")):
        (tmp_path / f"{name}.txt").write_text(text * 200)
        command = ["train", "--data", str(tmp_path / f"{name}.txt"), "--out", str(tmp_path / name)]
        command += ["--tokenizer", "bytes", "--preset", "gla", "--set", "d_model=16", "layers=1", "heads=2"]
        command += ["--steps", "2", "--batch-size", "2", "--seq-len", "16", "--dtype", "float32"]
        assert main([*command, "--eval-tokens", "64"]) == 0
        best = checkpoint.open_run(tmp_path / name).checkpoint.progress.heldout
        with (tmp_path / name / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 2, "heldout_bits_per_byte": 99.0}\n')
        found.append(read(open_model(tmp_path / name)))
        assert found[-1].bits_per_byte == best and (found[-1].measured_on, found[-1].measured) == (
            "heldout",
            64,
        )
    with refused(ConfigError, "text"):
        perplexity([replace(found[0], design="perspective"), found[1]])
    config = tmp_path / "dogs" / "config.json"
    config.write_text(config.read_text().replace('"steps": 2', '"steps": 3'))
    with refused(ConfigError, tmp_path / "dogs", "--resume"):
        read(open_model(tmp_path / "dogs"))


def test_a_run_with_experts_has_conditions_that_hold_or_not(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Dear Sir, the cat sat on the mat.\n" * 200)
    torch.manual_seed(0)
    command = ["train", "--preset", "perspective-tiny", "--data", str(tmp_path / "text.txt"), "--steps", "2"]
    command += ["--batch-size", "2", "--seq-len", "32", "--eval-tokens", "64", "--dtype", "float32"]
    assert main([*command, "--set", *SIZES, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["perspective", "gate", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [condition["holds"] is None for condition in found["conditions"]] == [True, False, False, True]
    assert found["conditions"][1]["holds"] is True
    assert main(["perspective", "gate"]) == 2
    in_a_line(capsys.readouterr().err, "runs")
