"""The precision of a training, chosen by measurement."""

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.data.loader import Batch
from perspectron.train import estimate as precision


@pytest.mark.parametrize(
    ("load", "half", "chosen"),
    [
        ([1, 1, 1, 1, 1, 1], 0.9, "bfloat16"),
        (
            [9, 1, 1, 3, 3, 1],
            0.9,
            "bfloat16",
        ),  # busy for a while: the slowest of one is above the fastest of the other
        ([9, 1, 2, 1, 2, 1], 0.99, "float32"),
        ([1, 1, 1, 1, 1, 1], 1.2, "float32"),
    ],
)
def test_pairs_of_passes_decide(monkeypatch, load, half, chosen):
    model = perspectron.build(presets.get("gla", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    taken = []

    def timed(_, __, ___, dtype: str) -> float:
        taken.append(dtype)
        return load[(len(taken) - 1) // 2] * (half if dtype == "bfloat16" else 1.0)

    monkeypatch.setattr(precision, "training_pass", timed)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert precision.faster(model, Batch(ids, ids, None, 4), torch.device("cpu")) == chosen
    assert taken == ["float32", "bfloat16"] * 6
