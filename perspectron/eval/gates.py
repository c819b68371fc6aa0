"""The decays of a trained memory, token by token: the gates of its rows over a text, and their half-lives.

Shapes: B batch, T time, D rows of a layer's state.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.data.specials import OURS, Specials
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.util.hooks import hooked

LONGEST = 1e6  # tokens: beyond, float32 does not tell decays from 1


def gates_of(model: LanguageModel) -> dict[int, nn.Module]:
    """The modules that give the logits of decays for each row, by the number of their block."""
    found = {}
    for number, block in enumerate(model.blocks):
        gate = block.mixer.decay_gate() if isinstance(block, Block) and block.config.mixer else None
        if gate is not None:
            found[number] = gate
    return found


def recorded(
    model: LanguageModel, ids: list[int], special: Specials = OURS
) -> tuple[dict[int, Tensor], Tensor]:
    """Decay logits [T,D] at each token of a text with these ids, by block, and the model's logits [T+1,V] after the
    tokens that start a text and after each of these."""
    found, start = dict[int, Tensor](), [*special.start]

    def keep(number: int, p_BTD: Tensor) -> None:
        found[number] = p_BTD[0, len(start) :].double().cpu()

    gates = gates_of(model).items()
    with hooked(gate.register_forward_hook(lambda _, __, p, n=number: keep(n, p)) for number, gate in gates):
        logits = model(torch.tensor([[*start, *ids]], device=model.device)).logits
    return found, logits[0, max(0, len(start) - 1) :]


@torch.inference_mode()
def halflives(model: LanguageModel, ids: list[int], special: Specials = OURS) -> dict[int, Tensor]:
    """Half-lives [T,D] in tokens, log ½ / log γ, at each token of a text, by the number of the block; empty for models
    without such decays."""
    logits, _ = recorded(model, ids, special)
    return {n: (-math.log(2) / F.logsigmoid(p)).clamp_max(LONGEST) for n, p in logits.items()}
