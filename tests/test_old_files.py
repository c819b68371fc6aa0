"""Files that 0.1 wrote: a run with experts being made ternary, and a conversation with its model.

tests/vectors/run-0.1 was trained by `perspectron train --preset perspective-tiny --set d_model=16 hidden=16 rank=4
heads=2 kv_heads=1 window=8 vocab_size=288 torus=[2,2] ternary=true --data text.txt --out run --steps 6 --seq-len 32
--batch-size 4 --save-every 3 --eval-every 3 --dtype float32`; run-0.1.expected.json holds what 0.1 made of it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import perspectron
from perspectron.cli.main import main
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig

VECTORS = Path(__file__).parent / "vectors"
RUN, STATE = VECTORS / "run-0.1", VECTORS / "state-0.1"
GREEDY = SamplingConfig(temperature=0)


@pytest.fixture(scope="module")
def expected():
    return json.loads((VECTORS / "run-0.1.expected.json").read_text())


def test_an_old_run_loads_and_generates(expected):
    model, tokenizer = perspectron.load(RUN)
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer.encode(expected["text"])])).logits[0, -1]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=1e-5, atol=1e-6)
    assert (
        generate(model, tokenizer, [expected["prompt"]], max_tokens=8, sampling=GREEDY).ids[0]
        == expected["ids"]
    )


def test_an_old_conversation_goes_on(expected):
    model, tokenizer = perspectron.load(RUN)
    before = Conversation.load(STATE, model)
    after = generate(model, tokenizer, [""], max_tokens=12, sampling=GREEDY, conversation=before)
    assert after.ids[0] == expected["after"]


def test_an_old_run_goes_on(tmp_path):
    """From step 3, step 6 is as 0.1 left it: weights, the optimizer's moments and the order of the windows."""
    run, last = tmp_path / "run", "checkpoints/step-00000006"
    shutil.copytree(RUN, run)
    shutil.rmtree(run / last)
    assert main(["train", "--resume", str(run)]) == 0
    for name in ("model.safetensors", "training.safetensors"):
        found, wanted = load_file(run / last / name), load_file(RUN / last / name)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            if not key.startswith("rng."):
                torch.testing.assert_close(
                    found[key], value, rtol=1e-5, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}"
                )
    progress = [json.loads((r / last / "checkpoint.json").read_text())["progress"] for r in (run, RUN)]
    progress[1]["loader"] |= {"order": 1, "sources": 0}  # not named then
    assert progress[0] | {"seconds": 0, "heldout": 0} == progress[1] | {"seconds": 0, "heldout": 0}
    assert progress[0]["heldout"] == pytest.approx(progress[1]["heldout"], rel=1e-6)
