import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode.row import Piece
from perspectron.decode.rows import Rows
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build, init
from perspectron.model.state import LMState

VOCAB = 300
SIZES = {
    "vocab_size": VOCAB, "d_model": 32, "layers": 4, "hidden": 64, "rank": 8, "heads": 4, "kv_heads": 2, "window": 16,
}  # fmt: skip
DESIGNS = ["perspective-tiny", "transformer-tiny"]


def make(design: str) -> LanguageModel:
    """Random weights, the embedding large enough for logits that prefer some tokens to others."""
    own = {key: size for key, size in SIZES.items() if presets.sizes(design).get(key) is not None}
    model = build(presets.get(design, **own), seed=5)
    with torch.no_grad():
        model.embedding.weight.mul_(12)
    return model


def drain(session: Rows) -> list[Piece]:
    """All pieces of all rows, to the end."""
    pieces = []
    while session.active:
        pieces += session.step()
    return pieces


class Scripted(LanguageModel):
    """A model that reads as it should, but says what it is told: script i in the i-th row that begins.

    The place in the script travels with the state, in `length_B`, and to the head in the first channel.
    """

    def __init__(self, config: ModelConfig, scripts: list[list[int]]) -> None:
        super().__init__(config)
        init(self, 3)
        assert config.positions == 0
        self.scripts, self.begun = scripts, 0

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LMState:
        state = super().init_state(batch_size, capacity=capacity)
        first = (
            self.begun if batch_size == 1 else len(self.scripts)
        )  # more than one at once are rows of no text
        self.begun += batch_size == 1
        return dataclasses.replace(state, length_B=1000 * torch.arange(first, first + batch_size))

    def placed(self, x, length_B, reset_BT=None, pad_BT=None):
        return x, length_B + int(x.shape[1] == 1)

    def hidden(self, *args, **kwargs):
        x_BTD, state, aux = super().hidden(*args, **kwargs)
        x_BTD = x_BTD.clone()
        x_BTD[:, :, 0] = state.length_B[:, None]
        return x_BTD, state, aux

    def head(self, hidden: Tensor) -> Tensor:
        places = hidden[..., 0].long().flatten().tolist()
        logits_NV = torch.zeros(len(places), self.config.vocab_size)
        for row, place in enumerate(places):
            script, at = divmod(place, 1000)
            said = self.scripts[script] if script < len(self.scripts) else []
            logits_NV[row, said[at] if at < len(said) else 0] = 100
        return logits_NV.view(*hidden.shape[:-1], -1)


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
