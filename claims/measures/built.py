"""Measures that count a built model: shapes on the meta device, which any size has at once.

Shapes: T tokens, D model width, R state rank, E model width of GPT-2.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from perspectron import presets
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.model.census import Census, FlopCounter, census
from perspectron.model.config import BlockConfig, RouteGatedConfig, SequentialConfig
from perspectron.model.mixer import build as build_mixer
from perspectron.model.model import LanguageModel
from perspectron.ops import pdr
from perspectron.stream.plan import Needs, needs
from perspectron.util.config import MixerConfig
from perspectron.util.hooks import hooked

FULL = "perspective-1t"
D = presets.get(FULL).d_model
CONTEXT = 8192
META = torch.device("meta")
HALF = 2  # bytes of an FP16 number


@cache
def counted(name: str, *sizes: tuple[str, Any]) -> Census:
    """The census of a preset with some sizes replaced."""
    return census(presets.get(name, **dict(sizes)))


@cache
def needed(name: str = FULL) -> Needs:
    """The needs of a compressed model: shared layers in 2 bits, experts ternary, embedding in 8."""
    return needs(presets.get(name), CONTEXT)


@cache
def model(name: str, *sizes: tuple[str, Any]) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(presets.get(name, **dict(sizes)))


@cache
def mixer(config: MixerConfig, width: int = D) -> Any:
    """A mixer of the document's width, alone."""
    with torch.device("meta"):
        return build_mixer(width, 1e-6, config)


def matrices(module: nn.Module) -> int:
    """Weights that are not biases or norms."""
    return sum(p.numel() for p in module.parameters() if p.ndim >= 2)


def parameters(keep: Callable[[str, Tensor], bool], name: str = FULL) -> int:
    """The count of those parameters for which `keep` (name, parameter) is true."""
    return sum(p.numel() for own, p in model(name).named_parameters() if keep(own, p))


def vectors(kind: str) -> int:
    """Biases and scales in the blocks of one kind of mixer, the document's "biases + norms"."""
    at = {f"blocks.{i}." for i, b in enumerate(blocks(FULL)) if b.mixer is not None and b.mixer.kind == kind}
    return parameters(lambda name, p: p.ndim == 1 and name[: name.find(".", 7) + 1] in at)


def blocks(name: str) -> tuple[BlockConfig, ...]:
    return presets.get(name).blocks


def places(kind: str, name: str = FULL) -> list[int]:
    """Indices of the layers with that mixer."""
    return [i for i, block in enumerate(blocks(name)) if block.mixer is not None and block.mixer.kind == kind]


def experts(name: str = FULL) -> list[int]:
    """Indices of the layers with experts."""
    return [i for i, block in enumerate(blocks(name)) if block.ffn is not None and block.ffn.kind == "routed"]


def plain_residual(name: str) -> bool:
    """Whether every block adds up without a gate or a scale."""
    return all(isinstance(block.residual, SequentialConfig) for block in blocks(name))


def routed_residual(name: str) -> int:
    """Blocks with a route gate."""
    return sum(isinstance(block.residual, RouteGatedConfig) for block in blocks(name))


def expert(part: str) -> int:
    """Weights of one matrix of one expert: "gate", "up" or "down"."""
    weights = [p for name, p in model(FULL).named_parameters() if f".{part}_E" in name]
    return weights[0][0].numel()


def _pdr_layer() -> PDRConfig:
    config = blocks(FULL)[places("pdr")[0]].mixer
    assert isinstance(config, PDRConfig)
    return config


PDR_LAYER = _pdr_layer()
R = PDR_LAYER.rank

# ---------------------------------------------------------------- FLOPs


class Operations(FlopCounter):
    """A record of the operations that ran, in order: (name, FLOPs) of each that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, logged = self.total, len(self.ran)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.total > before and len(self.ran) == logged:  # not told yet by a part of it
            self.ran.append((func.overloadpacket.__name__.rstrip("_"), self.total - before))
        return out

    def products(self) -> list[int]:
        """FLOPs of the matrix products alone."""
        return [flops for name, flops in self.ran if name.endswith("mm") or "attention" in name]


def operations(function: Callable[..., object], *arguments: Any, inference: bool = True) -> Operations:
    with torch.inference_mode(inference), Operations() as ran:
        function(*arguments)
    return ran


def meta(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="meta")


def projection(name: str) -> float:
    """FLOPs of one of a PDR layer's linear maps for a token, its bias apart."""
    linear = getattr(mixer(PDR_LAYER), name)
    return operations(lambda x: x @ linear.weight.T, meta(1, D)).total


@cache
def step() -> tuple[int, ...]:
    """FLOPs of the four operations on a PDR layer's state for a token, as equation 2.1 has them: v kᵀ, diag(γ) S, the
    sum, S q."""
    inputs = (meta(1, 1, R), meta(1, 1, R), meta(1, 1, D), meta(1, 1, D), meta(1, D, R))
    return tuple(flops for _, flops in operations(pdr.naive, *inputs).ran)


def mixer_flops(config: MixerConfig, context: int, width: int = D) -> int:
    """FLOPs of the mixer for one token at a context."""
    module = mixer(config, width)
    state = module.init_state(1, META, torch.float32, context)
    return operations(module, meta(1, 1, width), state).total


def mixer_values(config: MixerConfig, context: int, width: int = D) -> int:
    """Floating numbers in the state at a context."""
    state = mixer(config, width).init_state(1, META, torch.float32, context)
    leaves = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    return sum(leaf.numel() for leaf in leaves if leaf.is_floating_point())


def reading(config: MixerConfig, tokens: int, width: int = 256) -> int:
    """FLOPs of reading so many tokens at once."""
    module = mixer(config, width)
    state = module.init_state(1, META, torch.float32, tokens)
    return operations(module, meta(1, tokens, width), state).total


def exponent(flops: Callable[[int], float], tokens: int = 1 << 15) -> float:
    """The exponent of growth: n when twice the tokens take 2ⁿ times as much."""
    return torch.tensor(flops(2 * tokens) / flops(tokens)).log2().item()


def scan_flops(tokens: int, chunk: int = pdr.CHUNK) -> int:
    """FLOPs of the scan over so many tokens in chunks of `chunk`, as it trains, in full width."""
    inputs = (meta(1, tokens, R), meta(1, tokens, R), meta(1, tokens, D), meta(1, tokens, D))
    with chunks(chunk):
        return operations(lambda *x: pdr.scan(*x, backend="torch"), *inputs).total


def chunks(tokens: int) -> AbstractContextManager[Any]:
    """The scan's chunks are so long meanwhile."""
    return patch.object(pdr, "TREE", replace(pdr.TREE, size=tokens))


def scan_work(tokens: int, chunk: int) -> float:
    """The scan's work in units of L·d·r."""
    return scan_flops(tokens, chunk) / (tokens * D * R)


def width_exponent(config: MixerConfig, tokens: int, width: int, wider: MixerConfig | None = None) -> float:
    """The exponent with which the cost of reading grows with the model's width."""
    return round(math.log2(reading(wider or config, tokens, 2 * width) / reading(config, tokens, width)), 2)


def scan_levels(tokens: int) -> int:
    """Levels of the tree over one chunk of so many tokens: products of a block's gates, one after the other."""
    ran = operations(pdr._tree, meta(1, tokens, tokens), meta(1, tokens, 8), meta(1, tokens, 8))
    return len(ran.products())


def activations() -> int:
    """Numbers that a PDR layer's maps give for a token, and what the last one reads."""
    layer, seen = mixer(PDR_LAYER), list[int]()
    hooks = [
        m.register_forward_hook(lambda _, __, out: seen.append(out.numel()))
        for m in layer.modules()
        if isinstance(m, nn.Linear)
    ]
    hooks.append(layer.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel())))
    with hooked(hooks):
        layer(meta(1, 1, D), layer.init_state(1, META, torch.float32))
    return sum(seen)


def attention_calls(name: str) -> int:
    """Attention kernels of one pass over 16 tokens."""
    ids = torch.zeros(1, 16, dtype=torch.int64, device="meta")
    return sum("attention" in kernel for kernel, _ in operations(model(name), ids).ran)
