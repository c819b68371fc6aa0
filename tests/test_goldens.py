"""Five training steps of each small preset against losses recorded once: a refactor must not move them.

Where the mathematics or the initialisation changes on purpose: `python tests/test_goldens.py` records anew.
"""

import json
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron.train.optim import OptimConfig, optimizer_of

GOLDENS = Path(__file__).parent / "goldens" / "losses.json"
PRESETS = [
    *("perspective-tiny", "perspective-tiny-dense", "adr-tiny", "lens-tiny", "drm-104k", "transformer-tiny"),
    *("gpt2-tiny", "gla-tiny", "ssd-tiny"),
    *("gdn-tiny", "kda-tiny", "gdn2-tiny", "rwkv7-tiny", "mamba3-tiny", "hgrn2-tiny", "mingru-tiny"),
]
PLAIN = ("perspective-tiny", "perspective-tiny-dense", "adr-tiny", "lens-tiny", "gpt2-tiny")
"""Recorded also as the documents have them, with embeddings read as they are."""


def losses(preset: str, **sizes: bool) -> list[float]:
    """In float64, on random ids; a document starts inside the window."""
    model = perspectron.build(perspectron.presets.get(preset, **sizes), seed=0).double()
    optimizer = optimizer_of(model, OptimConfig())
    draw = torch.Generator().manual_seed(1)
    found = []
    for step in range(5):
        ids = torch.randint(model.config.vocab_size, (2, 41), generator=draw)
        reset = torch.zeros(2, 40, dtype=torch.bool)
        reset[0, 17] = True
        model.set_step(step)
        loss = model(ids[:, :-1], targets=ids[:, 1:], reset_BT=reset).objective()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_five_steps_give_the_recorded_losses(preset):
    # Drawing normal numbers rounds differently from processor to processor, in the eighth digit.
    assert losses(preset) == pytest.approx(json.loads(GOLDENS.read_text())[preset], rel=1e-6)


@pytest.mark.parametrize("preset", PLAIN)
def test_embeddings_as_they_are_give_the_losses_recorded_before_they_were_normed(preset):
    recorded = json.loads(GOLDENS.read_text())[f"{preset}, plain"]
    assert losses(preset, embedding_norm=False) == pytest.approx(recorded, rel=1e-6)


if __name__ == "__main__":
    found = {preset: losses(preset) for preset in PRESETS}
    found |= {f"{preset}, plain": losses(preset, embedding_norm=False) for preset in PLAIN}
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")
