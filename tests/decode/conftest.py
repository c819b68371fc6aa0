import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from perspectron import presets
from perspectron.config import ModelConfig
from perspectron.data import Tokenizer
from perspectron.model import LanguageModel, build, init

VOCAB = 300
SIZES = {
    "vocab_size": VOCAB, "d_model": 32, "layers": 4, "hidden": 64, "rank": 8, "heads": 4, "kv_heads": 2, "window": 16,
}  # fmt: skip
DESIGNS = ["perspective-tiny", "transformer-tiny"]


def make(design: str) -> LanguageModel:
    """Random weights, the embedding large enough for logits that prefer some tokens to others."""
    model = build(presets.get(design, **SIZES), seed=3)
    with torch.no_grad():
        model.embedding.weight.mul_(12)
    return model


class Scripted(LanguageModel):
    """A model that reads as it should, but says what it is told: `scripts` are the ids of each row."""

    def __init__(self, config: ModelConfig, scripts: list[list[int]]) -> None:
        super().__init__(config)
        init(self, 3)
        self.scripts: list[Iterator[int]] = [iter(script) for script in scripts]

    def head(self, hidden: Tensor) -> Tensor:
        logits_BV = torch.zeros(hidden.shape[0], self.config.vocab_size)
        for row, script in enumerate(self.scripts):
            logits_BV[row, next(script, 0)] = 100
        return logits_BV.view(*hidden.shape[:-1], -1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    texts = [f"Row {i} of {i * i}: the cat sat on the mat, and then the mat sat.\n" for i in range(80)]
    tokenizer = Tokenizer.train(texts, VOCAB)
    assert tokenizer.vocab_size == VOCAB
    return tokenizer


@pytest.fixture(scope="session", params=DESIGNS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return make(request.param)


@pytest.fixture(scope="session")
def double(model: LanguageModel) -> LanguageModel:
    return copy.deepcopy(model).double()


@pytest.fixture(scope="session")
def perspective() -> LanguageModel:
    return make("perspective-tiny")
