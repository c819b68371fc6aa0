"""lm-evaluation-harness as a client: its `local-completions` scores and generates by the server what we do by the
model. There is no network but this machine's own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perspectron.eval.harness import Answers
from perspectron.interop.hf.tokenizer import fast_tokenizer
from tests.eval.test_harness import task
from tests.serve.conftest import served
from tests.serve.test_live import KEY, listening_at

QUESTIONS = [
    {"question": "The cat sat", "choices": ["on the mat", "日本語", "and then the mat sat."], "answer": 0},
    {"question": "Row 3 of 9: größer →", "choices": ["🦊", "the", "x"], "answer": 2},
    {"question": "", "choices": ["Row", "cat"], "answer": 1},
    {"question": "Row 3 of 9: the cat sat on the mat. " * 12, "choices": ["Row 4", "the the"], "answer": 0},
]
WRITE = {"until": ["at", "\n\n"], "max_gen_toks": 11}


def evaluated(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the harness logs of each question, by task."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    choose = task("choose", data, "multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{answer}}")
    write = task("write", data, "generate_until", doc_to_target="x", generation_kwargs=WRITE)
    for made in (choose, write):
        (folder / f"{made['task']}.yaml").write_text(json.dumps(made))
    settings = {"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer": folder / "tokenizer"}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in settings.items()), "--tasks", "choose,write"]
    command += ["--include_path", str(folder), "--batch_size", "3", "--log_samples"]
    command += ["--output_path", str(folder / "out")]
    own = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "OPENAI_API_KEY": KEY,
    }
    subprocess.run(command, check=True, env=os.environ | own, cwd=folder, capture_output=True)
    return {
        path.name.split("_")[1]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "out").rglob("samples_*.jsonl")
    }


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("lm_eval") is None or find_spec("tenacity") is None, reason="needs the extras eval and test"
)
def test_the_harness_scores_and_writes_by_the_server_what_we_do_by_the_model(tmp_path, tokenizer) -> None:
    one = served(tmp_path, tokenizer)
    fast_tokenizer(tokenizer).save_pretrained(tmp_path / "tokenizer")
    asked = Answers(one.engine.model, tokenizer)
    with listening_at(one) as url:
        samples = evaluated(url, tmp_path)
    assert len(samples["choose"]) == len(samples["write"]) == len(QUESTIONS)
    for question, sample in zip(QUESTIONS, samples["choose"], strict=True):
        pairs = [(question["question"], " " + choice) for choice in question["choices"]]
        ours = asked.log_likelihoods(pairs)
        theirs = [(float(logprob), str(greedy)) for ((logprob, greedy),) in sample["resps"]]
        assert [value for value, _ in theirs] == pytest.approx([one.log_likelihood for one in ours], abs=1e-4)
        assert [greedy for _, greedy in theirs] == [str(one.greedy) for one in ours]
        assert sample["acc"] == float(np.argmax([value for value, _ in theirs]) == question["answer"])
    until = [(question["question"], WRITE) for question in QUESTIONS]
    assert [sample["resps"][0][0] for sample in samples["write"]] == asked.continuations(until)
