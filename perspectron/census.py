"""What a model costs: parameters, FLOPs per token and state bytes, counted from the model itself.

The model is built on the meta device, which knows shapes and holds no numbers, so any size answers at once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perspectron.block import Block
from perspectron.config import ModelConfig
from perspectron.experts import RoutedSwiGLU
from perspectron.mixers.drm import DRM
from perspectron.model import LanguageModel

CONTEXTS = (1024, 8192, 65536, 262144)
TRITS = 5  # rows of a matrix in one byte; the last ones are padded (decisions.md §2, packing)


@dataclass(frozen=True)
class Group:
    """Parameters of one kind: how many modules of that kind, and in all of them together."""

    modules: int
    parameters: int


@dataclass(frozen=True)
class Census:
    """parameters: all. active: those that one token touches. groups: by kind; norms and biases apart from the
    matrices. shard_bytes: of an expert of the first layer that has some, five ternary weights packed to a byte;
    scale_bytes: of the scales beside it, one float32 for each row; 0 without experts. flops: of reading one token
    when the context holds so many, multiply and add counted as two; by kind at the shortest context. state_bytes:
    of one conversation that long, summed over its tensors in float32."""

    parameters: int
    active_parameters: int
    groups: dict[str, Group]
    shard_bytes: int
    scale_bytes: int
    flops_per_token: dict[int, int]
    flops_by_kind: dict[str, int]
    state_bytes: dict[int, int]


def census(config: ModelConfig, contexts: Sequence[int] = CONTEXTS) -> Census:
    """Count the model of `config` at these context lengths, those past a table of learned positions left out."""
    if config.positions:
        contexts = [c for c in contexts if c <= config.positions] or [config.positions]
    with torch.device("meta"):
        model = LanguageModel(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    routed = [module for module in model.modules() if isinstance(module, RoutedSwiGLU)]
    expert = [(w.shape[1], w.shape[2]) for m in routed[:1] for w in (m.gate_EFD, m.up_EFD, m.down_EDF)]
    states = {context: model.init_state(1, capacity=context) for context in contexts}
    flops = {context: _step_flops(model, context) for context in contexts}
    return Census(
        parameters,
        parameters - _idle(model),
        _groups(model),
        sum(-(-rows // TRITS) * columns for rows, columns in expert),
        sum(4 * rows for rows, _ in expert),
        {context: by_kind.total() for context, by_kind in flops.items()},
        dict(flops[min(contexts)]),
        {context: state.nbytes for context, state in states.items()},
    )


def active_parameters(config: ModelConfig) -> int:
    """Those that one token touches and that something depends on."""
    with torch.device("meta"):
        model = LanguageModel(config)
    return sum(parameter.numel() for parameter in model.parameters()) - _idle(model)


def _idle(model: LanguageModel) -> int:
    """The experts that a token does not use, and the parts of a mixer that its config leaves without effect."""
    return sum(m.idle_parameters() for m in model.modules() if isinstance(m, RoutedSwiGLU | DRM))


def _groups(model: LanguageModel) -> dict[str, Group]:
    modules, sizes = Counter[str](), Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, Block):
            if module.config.mixer is not None:
                modules[module.config.mixer.kind] += 1
            if module.config.ffn is not None:
                kind = module.config.ffn.kind
                modules[{"routed": "experts"}.get(kind, kind)] += 1
                modules["router"] += kind == "routed"
        elif name in ("embedding", "positions"):
            modules[name] += 1
        elif name == "lm_head":
            modules["head"] += 1
        elif isinstance(module, torch.nn.RMSNorm | torch.nn.LayerNorm):
            modules["norms and biases"] += 1
    blocks = list(model.blocks)
    for name, parameter in model.named_parameters():
        sizes[group_of(name, parameter.ndim, blocks)] += parameter.numel()
    return {kind: Group(max(modules[kind], 1), size) for kind, size in sizes.items()}


def group_of(name: str, ndim: int, blocks: list[Any]) -> str:
    """The group that a parameter of this name and so many dimensions counts to."""
    if ndim < 2:
        return "norms and biases"
    if not name.startswith("blocks."):
        room = name.split(".")[0]
        return {"lm_head": "head"}.get(room, room)
    _, index, room, *rest = name.split(".")
    block = blocks[int(index)]
    if room == "mixer":
        return str(block.config.mixer.kind)
    if block.config.ffn.kind == "routed":
        return "router" if rest[0] in ("route_proj", "offset_EA") else "experts"
    return str(block.config.ffn.kind)


def _step_flops(model: LanguageModel, context: int) -> Counter[str]:
    """By kind, of one token. Each distinct block runs once; alike blocks cost alike."""
    x_11D = torch.zeros(1, 1, model.config.d_model, device="meta")
    state = model.init_state(1, capacity=context)
    flops = Counter(
        {
            "embedding" if model.config.head is None else "head": _count(partial(model.head, x_11D)),
            "norms and biases": _count(partial(model.norm, x_11D)),
        }
    )
    for config, count in Counter(model.config.blocks).items():
        first = model.config.blocks.index(config)
        block, layer = cast(Block, model.blocks[first]), state.layers[first]
        network = model.ffn_of(block)
        x_11D = torch.zeros(1, 1, model.config.d_token if first == 0 else model.config.d_model, device="meta")
        whole = _count(partial(block, x_11D, layer, network, None, None))
        mixer = 0 if config.mixer is None else _count(partial(block.mixer, x_11D, layer))
        ffn = 0 if network is None else _count(partial(network, x_11D, x_11D))
        if config.mixer is not None:
            flops[config.mixer.kind] += count * mixer
        if config.ffn is not None:
            flops[config.ffn.kind] += count * ffn
        flops["norms and biases"] += count * (whole - mixer - ffn)
    return flops


def _count(function: Callable[[], object]) -> int:
    with torch.inference_mode(), FlopCounter() as counter:
        function()
    return counter.total


class FlopCounter(TorchDispatchMode):
    """Counts what runs under it: 2·m·n·k for a matrix product, one per element (two for a fused multiply and
    add) for arithmetic on floating tensors. What only moves data counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:  # a composite operation counts as what it is made of
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _PRODUCTS:
            self.total += _PRODUCTS[name](args)
        elif isinstance(out, torch.Tensor) and out.is_floating_point() and torch.Tag.pointwise in func.tags:
            self.total += out.numel() * (2 if name.startswith("addc") else int(name != "clone"))
        return out


def _attention(args: tuple[Any, ...]) -> int:
    q, k, v = (tuple(x.shape) for x in args[:3])
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


_PRODUCTS: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "mm": lambda a: 2 * prod(a[0].shape) * a[1].shape[-1],
    "bmm": lambda a: 2 * prod(a[0].shape) * a[1].shape[-1],
    "addmm": lambda a: 2 * prod(a[1].shape) * a[2].shape[-1],
    "baddbmm": lambda a: 2 * prod(a[1].shape) * a[2].shape[-1],
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
}
