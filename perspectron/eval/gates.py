"""The lifetime of a trained memory, token by token: the half-lives of the rows of PDR's state over a text.

Shapes: B batch, T time, D rows of a layer's state.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from perspectron.decode.reading import END_OF_TEXT_ID
from perspectron.model import LanguageModel

LONGEST = 1e6  # tokens: beyond, float32 does not tell decays from 1


@torch.inference_mode()
def halflives(model: LanguageModel, ids: list[int]) -> dict[int, Tensor]:
    """Half-lives [T,D] in tokens, log ½ / log γ, at each token of a text that begins with its first id, by the number
    of the block: of every layer with a decay for each row, `pdr` and `pdr2`. Empty for models without one."""
    found, hooks = dict[int, Tensor](), list[RemovableHandle]()
    for number, block in enumerate(model.blocks):
        gate = getattr(block.mixer, "p_proj", None)
        if isinstance(gate, nn.Module):
            hooks.append(gate.register_forward_hook(partial(_keep, found, number)))
    try:
        model(torch.tensor([[END_OF_TEXT_ID, *ids]], device=model.device))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _keep(found: dict[int, Tensor], number: int, _: nn.Module, __: object, p_BTD: Tensor) -> None:
    log_gamma_TD = nn.functional.logsigmoid(p_BTD[0, 1:].double())
    found[number] = (-math.log(2) / log_gamma_TD).clamp_max(LONGEST).cpu()
