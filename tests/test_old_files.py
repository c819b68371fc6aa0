"""Files that 0.1 wrote: a run with experts being made ternary, and a conversation with its model.

tests/vectors/run-0.1 was trained by `perspectron train --preset perspective-tiny --set d_model=16 hidden=16 rank=4
heads=2 kv_heads=1 window=8 vocab_size=288 torus=[2,2] ternary=true --data text.txt --out run --steps 6 --seq-len 32
--batch-size 4 --save-every 3 --eval-every 3 --dtype float32`; run-0.1.expected.json holds what 0.1 made of it.
"""

import json
from pathlib import Path

import pytest
import torch

import perspectron
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
