"""The memory that a training needs on each of several GPUs, by part, from the shapes of the model alone.

Activations are counted on the meta device: every tensor that autograd keeps for the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.mixture import MATRICES
from perspectron.model.block import Block
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.train.config import Layout
from perspectron.train.estimate import PER_LOGIT

FLOAT = 4  # bytes: weights, gradients, both moments; bfloat16 is for products alone
LENGTHS = (64, 128)  # tokens of the passes that are counted


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, by part. whole: the largest unit whose weights are gathered at a time, with its gradient."""

    parameters: float
    gradients: float
    moments: float
    whole: float
    activations: float
    logits: float

    @property
    def bytes(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. parameters: without `experts`. largest: of the largest unit. per_token, per_pass: bytes
    autograd keeps for each token, and besides; recomputed: of block inputs and one block's own."""

    parameters: int
    experts: int
    largest: int
    largest_experts: int
    per_token: float
    per_pass: float
    recomputed: float
    vocabulary: int


def sizes_of(config: ModelConfig) -> Shape:
    """The sizes of a model."""
    with torch.device("meta"):
        model = LanguageModel(config)
    blocks = cast("list[Block]", model.blocks)
    routed = [m for m in model.modules() if isinstance(m, RoutedSwiGLU)]
    experts = {id(m): sum(getattr(m, name).numel() for name in MATRICES) for m in routed}
    inside = [sum(experts[id(m)] for m in block.modules() if id(m) in experts) for block in blocks]
    units = [
        sum(p.numel() for p in block.parameters()) - own for block, own in zip(blocks, inside, strict=True)
    ]
    every = sum(parameter.numel() for parameter in model.parameters())
    units.append(every - sum(experts.values()) - sum(units))
    short, long = (kept(model, T) for T in LENGTHS)
    slope = (long - short) / (LENGTHS[1] - LENGTHS[0])
    rest = max(0.0, short - slope * LENGTHS[0])
    each = slope / len(blocks) + FLOAT * config.d_model * len(blocks)
    return Shape(
        every - sum(experts.values()), sum(experts.values()), max(units),
        max(inside, default=0), slope, rest, each, config.vocab_size,
    )  # fmt: skip


def kept(model: LanguageModel, T: int) -> float:
    """Bytes that autograd keeps of a pass over T tokens, without the parameters and logits."""
    own = {id(parameter) for parameter in model.parameters()}
    found = dict[int, Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in own:
            found[id(base)] = base
        return tensor

    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    ids = torch.zeros(1, T, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        hidden, _, aux = model.hidden(ids)
        held = (hidden, aux)
    del held
    return float(sum(tensor.nbytes for tensor in found.values()))


def memory(shape: Shape, layout: Layout, gpus: int, local: int, tokens: int, recompute: bool) -> Memory:
    """Memory of each of `gpus` GPUs, `local` on a machine, that reads so many tokens at once (with those that share its
    windows). The moments and everything kept of tokens in float32."""
    C, E = layout.context_parallel, layout.expert_parallel
    shards = layout.shards(gpus, local)
    spread = shape.experts / (E if E > 1 else shards)
    own = shape.parameters / shards + spread
    whole = 0 if shards == 1 else shape.largest + (0 if E > 1 else shape.largest_experts)
    each = shape.recomputed if recompute else shape.per_token
    return Memory(
        FLOAT * own, FLOAT * own, 2 * FLOAT * own, 2 * FLOAT * whole,
        each * tokens / C + (shape.per_pass / max(1, E)), PER_LOGIT * tokens / C * shape.vocabulary,
    )  # fmt: skip
