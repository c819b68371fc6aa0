"""A model with experts of transformers, from its folder to a text that is read from disk within a budget."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from perspectron.cli.main import main
from perspectron.stream.artifact import read_header
from tests.foreign_models import HEADS, SMALL, tokenizer
from tests.interop.families import redraw

OLMOE = SMALL | HEADS | {
    "hidden_size": 64, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64, "pad_token_id": None,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """The artifact of an imported run."""
    root = tmp_path_factory.mktemp("mixtures")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("olmoe", **OLMOE))
    redraw(model, 3)
    model.bfloat16().save_pretrained(root / "hf")
    tokenizer().save(str(root / "hf" / "tokenizer.json"))
    assert main(["import", str(root / "hf"), "--out", str(root / "run")]) == 0
    assert (
        main(
            [
                "quantize",
                str(root / "run"),
                "--out",
                str(root / "out"),
                "--linear",
                "4bit32",
                "--windows",
                "2",
            ]
        )
        == 0
    )
    return root / "out"


def spoken(capsys: Any, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", *arguments, "--max-tokens", "12", "--temperature", "0", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.slow
def test_it_speaks_within_a_budget_as_from_memory(packed, capsys):
    header = read_header(packed)
    assert header.experts is not None and header.experts.format == "4bit32"
    least = 2 * header.experts.shard_bytes
    resident, streamed = (
        spoken(capsys, str(packed), "The quick", *more) for more in ((), ("--cache", str(least)))
    )
    assert resident["texts"] == streamed["texts"] and resident["tokens"] == [12]


def test_a_budget_below_the_experts_of_a_token_is_refused_with_what_it_takes(packed, capsys):
    header = read_header(packed)
    assert header.experts is not None
    least = 2 * header.experts.shard_bytes
    capsys.readouterr()
    assert main(["generate", str(packed), "The quick", "--cache", str(least - 1)]) == 2
    assert str(least) in capsys.readouterr().err


def test_it_is_planned_and_inspected(packed, capsys):
    capsys.readouterr()
    assert main(["plan", str(packed), "--ram", "1G", "--bandwidth", "10G/s", "--disk", "1G/s", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(packed), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert planned["model"] == "olmoe" and 0 < seen["active_parameters"] < seen["parameters"]
