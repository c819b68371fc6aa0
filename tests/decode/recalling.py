"""A model made by hand that says what came after a letter before, and its tokenizer of letters."""

import string
from collections.abc import Iterable

import torch

from perspectron.data.specials import OURS
from perspectron.designs.gla.mixer import GLAConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.model import LanguageModel, build
from perspectron.util.errors import DataError

LETTERS = string.ascii_lowercase + "KL "
V = len(LETTERS) + 1


class Letters:
    """An id for each letter."""

    vocab_size, specials, fingerprint = V, OURS, "letters"

    def encode(self, text: str) -> list[int]:
        if other := set(text) - set(LETTERS):
            raise DataError(f"text: {min(other)!r} is no letter here")
        return [1 + LETTERS.index(letter) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, id: int) -> bytes:
        return LETTERS[id - 1].encode() if id else b""

    def spelling(self, id: int) -> str:
        return f"<{id}>"


def recalling() -> LanguageModel:
    """One layer of gated linear attention without decay: keys are the letter before, values the letter, and a query is
    answered by the letters that came after the same one, each as often as it did."""
    D = 2 * V + 2
    block = BlockConfig(GLAConfig(heads=1, gate_rank=1), None)
    model = build(ModelConfig("recalling", V, D, (block,), shift=True), seed=0)
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        model.embedding.weight.zero_().fill_diagonal_(1)
        for part in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj):
            part.weight.zero_().fill_diagonal_(1)
        mixer.o_proj.weight.mul_(10)
        mixer.g_proj.weight.fill_(1)
        mixer.gk_proj[0].weight.zero_(), mixer.gk_proj[1].weight.zero_()
        mixer.gk_proj[1].bias.fill_(99)
        model.blocks[0].mixer_shift.mix_ND.copy_(torch.tensor([0.0, 1, 0, 0])[:, None].expand(4, D))
    return model
