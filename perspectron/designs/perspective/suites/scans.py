"""The scan that a trained PDR layer runs, beside the plain loop on the same inputs."""

from typing import Any

import torch

from perspectron.designs.perspective.pdr import PDR
from perspectron.model.model import LanguageModel
from perspectron.model.parts import split_inputs
from perspectron.ops import pdr
from perspectron.util.hooks import hooked


@torch.no_grad()
def scan_error(model: LanguageModel, ids: list[int]) -> float | None:
    """The largest difference of an output over the largest output, over layers of `pdr`; None without one."""
    errors = list[float]()

    def compare(mixer: PDR, arguments: tuple[Any, ...]) -> None:
        x_q, x_k, x_v, x_p = split_inputs(arguments[0], len(mixer.inputs))
        gamma_BTD = torch.sigmoid(mixer.p_proj(mixer.p_down(x_p)).float())
        inputs = [mixer.q_proj(x_q), mixer.k_proj(x_k), mixer.v_proj(x_v), gamma_BTD]
        found, _ = pdr.scan(*inputs, scale=mixer.config.scale)
        expected, _ = pdr.scan(*(x.double() for x in inputs), scale=mixer.config.scale, backend="naive")
        errors.append(((found - expected).abs().max() / expected.abs().max()).item())

    hooks = [
        module.register_forward_pre_hook(compare) for module in model.modules() if isinstance(module, PDR)
    ]
    with hooked(hooks):
        model.hidden(torch.tensor([ids], device=model.device))
    return max(errors, default=None)
