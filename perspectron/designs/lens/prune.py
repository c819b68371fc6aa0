"""Removing attention, and with it the cache, from the blocks whose route gate weighs it least
(docs/designs/lens.md#smaller-cache)."""

from collections.abc import Collection
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from perspectron.model import half
from perspectron.model.block import Block
from perspectron.model.config import BlockConfig, RouteGatedConfig
from perspectron.model.ffn import ContextMLPConfig, TiedConfig
from perspectron.model.model import LanguageModel, shape_of
from perspectron.util.config import require


def route_gates(model: LanguageModel) -> list[tuple[float, int]]:
    """(g, index of the block) of every block with a route gate and a mixer, lowest g first.

    ConfigError when there is none.
    """
    gates = []
    for index, block in enumerate(cast("list[Block]", model.blocks)):
        if isinstance(block.config.residual, RouteGatedConfig) and block.config.mixer is not None:
            gates.append((block.route().item(), index))
    require(len(gates) > 0, "model", model.config.name, "one whose blocks have route gates and mixers")
    return sorted(gates)


@torch.no_grad()
def prune(model: LanguageModel, blocks: Collection[int]) -> LanguageModel:
    """A new model that computes what `model` does when the mixers of `blocks` add nothing; it shares no tensor with it.

    ConfigError when another block is tied to a network that would change.
    """
    for index, block in enumerate(model.config.blocks):
        tied = isinstance(block.ffn, TiedConfig) and block.ffn.block in blocks
        require(not tied, f"blocks[{index}].ffn", "tied", "a network of its own where attention is removed")
    leans = model.config.first_values and any(getattr(model.blocks[i], "first_values", None) for i in blocks)
    require(not leans, "first_values", True, "False where attention is removed: values lean on each other")
    config = replace(
        model.config,
        blocks=tuple(
            _without(block) if i in blocks else block for i, block in enumerate(model.config.blocks)
        ),
    )
    pruned = shape_of(config)
    whole, kept = model.state_dict(), dict[str, Tensor]()
    for name, slot in pruned.state_dict().items():
        # A network that no longer reads the context keeps the columns of its other input.
        kept[name] = (whole[name] if slot.ndim < 2 else whole[name][:, : slot.shape[1]]).clone()
    if model.dtype not in half.DTYPES:
        half.keep(pruned, kept)
    pruned.load_state_dict(kept, assign=True)
    return pruned


def _without(block: BlockConfig) -> BlockConfig:
    ffn = block.ffn
    if isinstance(ffn, ContextMLPConfig):
        ffn = replace(ffn, context=False, context_rank=0, stop_gradient=False)
    return replace(block, mixer=None, ffn=ffn)
