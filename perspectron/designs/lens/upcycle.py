"""A GPT-2 as a lens model that computes the same function, to be trained further (`perspectron import --lens`)."""

from dataclasses import replace

import torch
from torch import Tensor

from perspectron.designs.lens.mixer import LensConfig
from perspectron.model.config import BlockConfig, ModelConfig, RouteGatedConfig
from perspectron.model.ffn import ContextMLPConfig

REST = 20.0
"""Logit at which a lens gate is open or shut: within 1e-8 of 1 and 0."""


def config_of_gpt2(config: ModelConfig) -> ModelConfig:
    """A GPT-2 with every part of the lens design beside its own."""
    heads, hidden = config.blocks[0].mixer.heads, config.blocks[0].ffn.hidden  # type: ignore[union-attr]
    block = BlockConfig(
        LensConfig(heads), ContextMLPConfig(hidden, activation="gelu_tanh"), RouteGatedConfig(2.0)
    )
    return replace(config, name="lens", blocks=(block,) * len(config.blocks))


def weights_of_gpt2(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """GPT-2's weights for the model of `config_of_gpt2`, its new parts neutral: attention uses the standard lens alone,
    the network ignores the context and its gate is open, and the route gate is at ½, so the function is the same."""
    D, all_weights = config.d_model, dict(weights)
    for i, block in enumerate(config.blocks):
        at, heads = f"blocks.{i}", block.mixer.heads  # type: ignore[union-attr]
        up_FD = all_weights[f"{at}.ffn.up_proj.weight"]
        zero_FD = torch.zeros_like(up_FD)
        all_weights[f"{at}.ffn.up_proj.weight"] = torch.cat([up_FD, zero_FD], 1)
        all_weights[f"{at}.ffn.gate_proj.weight"] = torch.cat([zero_FD, zero_FD], 1)
        all_weights[f"{at}.ffn.gate_proj.bias"] = torch.full((len(up_FD),), REST)
        all_weights[f"{at}.mixer.u_HK"] = torch.zeros(heads, D // heads)
        all_weights[f"{at}.mixer.gates_HL"] = torch.tensor([REST, 0.0, 0.0]).repeat(heads, 1)
        all_weights[f"{at}.route.raw_1"] = all_weights[f"{at}.route.bias_1"] = torch.zeros(1)
    return all_weights
