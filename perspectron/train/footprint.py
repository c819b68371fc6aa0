"""The needs of a training on several GPUs, from the shapes of the model alone: memory of each GPU by part, traffic of
an update, and the time of both on given rates.

Activations are counted on the meta device: every tensor that autograd keeps for the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from perspectron.experts.layer import RoutedSwiGLU
from perspectron.model.block import Block
from perspectron.model.census import active_parameters
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.train.config import Layout
from perspectron.train.estimate import PER_LOGIT

FLOAT = 4  # bytes: weights, gradients, both moments; bfloat16 is for products alone
LENGTHS = (64, 128)  # tokens of the passes that are counted
EXPERTS = ("gate_EFD", "up_EFD", "down_EDF")
FLOPS = 6  # of an update for each parameter that a token uses; 8 where activations are computed again


@dataclass(frozen=True)
class Batch:
    """Tokens of a window, and windows that a GPU reads at once."""

    seq_len: int
    rows: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU, by part. whole: the largest unit whose weights are together at a time, with its gradient."""

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
class Traffic:
    """Bytes that one GPU sends in an update. weights: gathered forwards and backwards. gradients: reduced. tokens: to
    their experts and back, twice. states: from the windows' parts to the next ones."""

    weights: float
    gradients: float
    tokens: float
    states: float

    @property
    def bytes(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Shape:
    """Numbers of a model. parameters: all but `experts`. largest: of the largest unit. per_token, per_pass: bytes that
    autograd keeps for each token and beside them; with `recompute`, the inputs of blocks and one block's own."""

    parameters: int
    experts: int
    active: int
    largest: int
    largest_experts: int
    per_token: float
    per_pass: float
    recomputed: float
    width: int
    routed: int
    state: int
    vocabulary: int


def shape_of(config: ModelConfig, per_state: int) -> Shape:
    """A model's numbers. per_state: bytes of the state that a conversation has."""
    with torch.device("meta"):
        model = LanguageModel(config)
    blocks = cast("list[Block]", model.blocks)
    routed = [m for m in model.modules() if isinstance(m, RoutedSwiGLU)]
    experts = {id(m): sum(getattr(m, name).numel() for name in EXPERTS) for m in routed}
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
        every - sum(experts.values()), sum(experts.values()), active_parameters(config), max(units),
        max(inside, default=0), slope, rest, each, config.d_model, len(routed), per_state, config.vocab_size,
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


def memory(shape: Shape, layout: Layout, gpus: int, local: int, batch: Batch, recompute: bool) -> Memory:
    """Memory of each of so many GPUs, `local` on a machine. The moments and everything kept of tokens in float32."""
    C, E = layout.context_parallel, layout.expert_parallel
    shards = layout.shards(gpus, local)
    spread = shape.experts / (E if E > 1 else shards)
    own = shape.parameters / shards + spread
    whole = 0 if shards == 1 else shape.largest + (0 if E > 1 else shape.largest_experts)
    tokens = batch.rows * batch.seq_len / C
    each = shape.recomputed if recompute else shape.per_token
    return Memory(
        FLOAT * own, FLOAT * own, 2 * FLOAT * own, 2 * FLOAT * whole,
        each * tokens + (shape.per_pass / max(1, E)), PER_LOGIT * tokens * shape.vocabulary,
    )  # fmt: skip


def traffic(shape: Shape, layout: Layout, gpus: int, local: int, batch: Batch) -> Traffic:
    """The bytes that each GPU sends in an update: a gather and a reduction of S bytes over n ranks take (n − 1)/n · S
    each."""
    C, E = layout.context_parallel, layout.expert_parallel
    shards = layout.shards(gpus, local)
    copies = gpus // C // shards
    gathered = shape.parameters + (0 if E > 1 else shape.experts)
    weights = 2 * FLOAT * gathered * (shards - 1) / shards
    reduced = FLOAT * gathered * (shards - 1) / shards + 2 * FLOAT * gathered / shards * (copies - 1) / copies
    if E > 1:
        reduced += 2 * FLOAT * shape.experts / E * (gpus // E - 1) / (gpus // E)
    reduced += 2 * FLOAT * gathered / shards * (C - 1) / C
    tokens = batch.rows * batch.seq_len / C
    travelled = 4 * FLOAT * tokens * shape.width * shape.routed * (E - 1) / E
    return Traffic(weights, reduced, travelled, 2.0 * shape.state * batch.rows * (C > 1))


@dataclass(frozen=True)
class Rates:
    """FLOPs per second of a GPU that training reaches, and bytes per second between GPUs of a machine and between
    machines, of each GPU."""

    flops: float
    inside: float
    outside: float


def seconds(
    shape: Shape, layout: Layout, gpus: int, local: int, batch: Batch, rates: Rates, recompute: bool
) -> tuple[float, float]:
    """Seconds of an update: of the computation, and of the communication where nothing overlaps."""
    tokens = batch.rows * batch.seq_len / layout.context_parallel
    computed = (FLOPS + 2 * recompute) * shape.active * tokens / rates.flops
    rate = rates.inside if gpus <= local else rates.outside
    return computed, traffic(shape, layout, gpus, local, batch).bytes / rate
