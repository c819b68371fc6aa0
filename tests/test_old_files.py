"""Files that an earlier commit of this version wrote: a run with experts being made ternary, and a conversation with
its model. What a version wrote that is no longer read is refused in one line.

tests/vectors/run was trained at commit 4c6b1e1 by `perspectron train --preset perspective-tiny --set d_model=16
hidden=16 rank=4 heads=2 kv_heads=1 window=8 vocab_size=288 torus=[2,2] ternary=true --data text.txt --out run --steps 6
--seq-len 32 --batch-size 4 --save-every 3 --eval-every 3 --dtype float32`; run.expected.json holds what it made of it.
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
from tests.refusals import in_a_line

VECTORS = Path(__file__).parent / "vectors"
RUN, STATE = VECTORS / "run", VECTORS / "state"
GREEDY = SamplingConfig(temperature=0)


@pytest.fixture(scope="module")
def expected():
    return json.loads((VECTORS / "run.expected.json").read_text())


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
    """From step 3, step 6 is as it was left: weights, the optimizer's moments and the order of the windows. Another
    processor rounds products otherwise, which AdamW makes larger where gradients are nearly zero: by up to 1.3e-6 on
    one with AMX, where the three updates move weights by up to 0.02."""
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
                    found[key], value, rtol=1e-5, atol=5e-6, msg=lambda m, k=key: f"{k}: {m}"
                )
    progress = [json.loads((r / last / "checkpoint.json").read_text())["progress"] for r in (run, RUN)]
    assert progress[0]["loader"].pop("text") > 0  # which was not kept then
    assert progress[0] | {"seconds": 0, "heldout": 0} == progress[1] | {"seconds": 0, "heldout": 0}
    assert progress[0]["heldout"] == pytest.approx(progress[1]["heldout"], rel=1e-6)


@pytest.mark.parametrize("field", ["order", "rule"])
@pytest.mark.parametrize("version", [None, 1, 4])
def test_a_run_of_a_version_that_is_no_longer_read_says_so(field, version, tmp_path, capsys):
    """Version 0.1 named neither its order of the windows nor the rule of its text's splits."""
    run = Path(shutil.copytree(RUN, tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    config[field] = version
    if version is None:
        del config[field]
    (run / "config.json").write_text(json.dumps(config))
    for command in (["generate", str(run), "the"], ["train", "--resume", str(run)]):
        assert main(command) == 2
        in_a_line(capsys.readouterr().err, run / "config.json", field)
