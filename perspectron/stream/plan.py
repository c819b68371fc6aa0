"""What a model needs where it runs compressed, and how fast it decodes there: from shapes and bandwidths alone.

Matrices are packed (`perspectron.ops.packing`); what is not a matrix stays float32.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

from perspectron.block import Block
from perspectron.census import group_of
from perspectron.config import ModelConfig, one_of
from perspectron.experts import RoutedSwiGLU
from perspectron.ffn import TiedConfig
from perspectron.model import LanguageModel
from perspectron.ops.packing import sizes
from perspectron.stream.format import ExpertLayout

SHARED = ("2bit", "4bit", "int8")
DEVICE_SLOTS = 2  # experts on a GPU: one computes while the other arrives
NEGLIGIBLE = 1e-10  # a share of the uses


def packed_bytes(format: str, shape: tuple[int, int]) -> int:
    """Of a matrix with so many outputs and inputs: codes, and scales."""
    codes, scales, dtype = sizes(format, shape)
    return prod(codes) + prod(scales) * dtype.itemsize


# ---------------------------------------------------------------- what a model needs


@dataclass(frozen=True)
class Part:
    """bytes: held. read, written: of them, for one token."""

    parameters: int
    bytes: int
    read: int
    written: int = 0


@dataclass(frozen=True)
class ExpertLayer:
    """distinct: experts with weights of their own; the others are the same under another name. parameters, codes,
    scales: of each expert, the latter in bytes. shard: bytes of it in a file, and of the slot that holds it."""

    layer: int
    experts: int
    distinct: int
    parameters: int
    codes: int
    scales: int
    shard: int

    @property
    def read(self) -> int:
        """Bytes of one expert that a token reads."""
        return self.codes + self.scales


@dataclass(frozen=True)
class Needs:
    """parts: by group, as in a census, of what every token uses. state: of one conversation, by kind of mixer.
    experts: the routed layers in order."""

    model: str
    context: int
    parts: dict[str, Part]
    state: dict[str, Part]
    experts: tuple[ExpertLayer, ...]

    @property
    def resident(self) -> int:
        """Bytes that stay whatever streams."""
        return sum(part.bytes for part in (*self.parts.values(), *self.state.values()))

    @property
    def read(self) -> int:
        """Bytes that a token reads, experts included."""
        shared = sum(part.read for part in (*self.parts.values(), *self.state.values()))
        return shared + sum(layer.read for layer in self.experts)

    @property
    def written(self) -> int:
        """Bytes of the state that a token writes."""
        return sum(part.written for part in self.state.values())

    @property
    def slot(self) -> int:
        """Bytes of the largest shard; 0 without experts."""
        return max((layer.shard for layer in self.experts), default=0)

    @property
    def shards(self) -> int:
        """Experts of all layers that are stored."""
        return sum(layer.distinct for layer in self.experts)

    @property
    def missed(self) -> int:
        """Bytes of the shards that a token uses, one in each routed layer."""
        return sum(layer.shard for layer in self.experts)


def needs(
    config: ModelConfig, context: int, formats: str | Mapping[str, str] = "2bit", distinct: int = 0
) -> Needs:
    """Of the model of `config`. formats: of each packed module, by its name; or one for all dense layers, with an int8
    embedding. Experts are ternary; `distinct` of them in a layer have weights of their own (0: all). State is as
    `init_state` gives it, with room for `context` tokens."""
    with torch.device("meta"):
        model = LanguageModel(config)
    if isinstance(formats, str):
        formats = _everywhere(model, one_of(formats, SHARED, "shared"))
    parts = dict[str, Part]()
    blocks = list(model.blocks)
    for name, parameter, stored, read in _stored(model, formats):
        kind = group_of(name, parameter.ndim, blocks)
        parts[kind] = _sum(parts.get(kind), Part(parameter.numel(), stored, read))
    for name, buffer in model.named_buffers():
        if name.endswith("bias_E"):
            parts["router"] = _sum(parts["router"], Part(0, buffer.nbytes, buffer.nbytes))
    experts = []
    for index, block in enumerate(cast("list[Block]", blocks)):
        if isinstance(ffn := model.ffn_of(block), RoutedSwiGLU):
            experts.append(_experts(index, ffn, distinct or len(ffn.gate_EFD)))
    return Needs(config.name, context, parts, _state(model, context), tuple(experts))


def _everywhere(model: LanguageModel, format: str) -> dict[str, str]:
    """Every dense layer but a router's in that format."""
    routers = ".ffn.route_proj"
    modules = model.named_modules()
    dense = {name: format for name, m in modules if isinstance(m, nn.Linear) and not name.endswith(routers)}
    return dense | {"embedding": "int8"}


def _sum(one: Part | None, other: Part) -> Part:
    if one is None:
        return other
    return Part(
        one.parameters + other.parameters,
        one.bytes + other.bytes,
        one.read + other.read,
        one.written + other.written,
    )


def _stored(model: LanguageModel, formats: Mapping[str, str]) -> Iterator[tuple[str, nn.Parameter, int, int]]:
    """Every parameter but the experts': its name, the bytes it is stored in, and those that a token reads."""
    users = Counter(block.ffn.block for block in model.config.blocks if isinstance(block.ffn, TiedConfig))
    rows = {"positions"} if model.config.head is None else {"positions", "embedding"}  # a token reads one
    for name, module in model.named_modules():
        times = 1 + (users[int(name.split(".")[1])] if ".ffn" in name else 0)
        for own, parameter in module.named_parameters(name, recurse=False):
            if isinstance(module, RoutedSwiGLU) and not own.endswith("offset_EA"):
                continue
            stored = 4 * parameter.numel()
            if name in formats and parameter.ndim == 2:
                stored = packed_bytes(formats[name], (parameter.shape[0], parameter.shape[1]))
            yield own, parameter, stored, stored // len(parameter) if name in rows else stored * times


def _experts(layer: int, ffn: RoutedSwiGLU, distinct: int) -> ExpertLayer:
    E, hidden, D = ffn.gate_EFD.shape
    layout = ExpertLayout(D, hidden)
    return ExpertLayer(
        layer, E, distinct, 3 * hidden * D, layout.code_bytes, layout.scale_bytes, layout.bytes
    )


def _state(model: LanguageModel, context: int) -> dict[str, Part]:
    """By kind of mixer. A tensor whose size depends on the context is a cache: a token reads all of it and writes one
    place; the others are read and written whole."""
    parts = dict[str, Part]()
    roomy, empty = (model.init_state(1, capacity=capacity) for capacity in (context, 0))
    kinds = ["-" if block.mixer is None else block.mixer.kind for block in model.config.blocks]
    pairs = [
        *zip(kinds, roomy.layers, empty.layers, strict=True),
        ("positions", roomy.length_B, empty.length_B),
    ]
    for kind, large, small in pairs:
        for tensor, other in zip(*(pytree.tree_leaves(state) for state in (large, small)), strict=True):
            if isinstance(tensor, torch.Tensor):
                written = tensor.nbytes if tensor.nbytes == other.nbytes else 0
                parts[kind] = _sum(parts.get(kind), Part(0, tensor.nbytes, tensor.nbytes, written))
    return parts


# ---------------------------------------------------------------- where it goes


@dataclass(frozen=True)
class Placement:
    """ram, vram: bytes given (vram None: no GPU). least_ram, least_vram: what it takes to run at all; ample_ram: with
    which nothing streams. slots: experts that stay in RAM beside the rest."""

    ram: int
    vram: int | None
    least_ram: int
    least_vram: int
    ample_ram: int
    slots: int
    shards: int

    @property
    def fits(self) -> bool:
        return self.ram >= self.least_ram and (self.vram is None or self.vram >= self.least_vram)

    @property
    def streams(self) -> bool:
        """From disk."""
        return self.slots < self.shards


def place(needs: Needs, ram: int, vram: int | None = None) -> Placement:
    """With a GPU, what every token uses stays on it with two experts, and RAM holds experts alone."""
    resident = needs.resident if vram is None else 0
    one = min(needs.shards, 1) * needs.slot
    slots = (ram - resident) // needs.slot if needs.slot else 0
    return Placement(
        ram,
        vram,
        resident + one,
        0 if vram is None else needs.resident + DEVICE_SLOTS * one,
        resident + needs.shards * needs.slot,
        max(0, min(slots, needs.shards)),
        needs.shards,
    )


# ---------------------------------------------------------------- how fast


@dataclass(frozen=True)
class Rates:
    """Bytes per second; None: not known, and left out. memory: of what holds the weights of every token, RAM or, with
    a GPU, its own."""

    memory: float | None
    disk: float | None
    pcie: float | None


@dataclass(frozen=True)
class Case:
    """miss_rate: experts read from disk for each that a token uses. memory, disk, pcie: bytes for a token."""

    name: str
    miss_rate: float
    memory: int
    disk: float
    pcie: int

    def seconds(self, rates: Rates) -> dict[str, float]:
        """For a token, by resource."""
        pairs = {"memory": self.memory, "disk": self.disk, "pcie": self.pcie}
        given = {name: getattr(rates, name) for name in pairs}
        return {name: amount / given[name] for name, amount in pairs.items() if amount and given[name]}

    def tokens_per_second(self, rates: Rates) -> tuple[float, float] | None:
        """At least, where nothing overlaps, and at most, where everything does; None where no rate is known."""
        seconds = self.seconds(rates).values()
        return (1 / sum(seconds), 1 / max(seconds)) if seconds else None


def case(needs: Needs, placement: Placement, name: str, miss_rate: float) -> Case:
    pcie = 0 if placement.vram is None else needs.missed
    return Case(name, miss_rate, needs.read + needs.written, miss_rate * needs.missed, pcie)


def bounds(needs: Needs, placement: Placement) -> list[Case]:
    """Without knowing what the text asks for: every expert missed, and uniform random ones."""
    if not placement.streams:
        return [case(needs, placement, "all in memory", 0.0)]
    hits = uniform_hit_rate([layer.distinct for layer in needs.experts], placement.slots)
    return [
        case(needs, placement, "all missed", 1.0),
        case(needs, placement, "random, LRU", 1 - hits),
    ]


def uniform_hit_rate(experts: Sequence[int], slots: int) -> float:
    """Of a least recently used cache of `slots` shards, once it is full, when layers in turn ask for one of their
    experts, each as likely as the others. Exact.

    An expert comes back after g tokens with probability (1 − 1/E)^(g−1) / E. Since then each other layer drew g times,
    its own g − 1 times from the rest; it is still there if fewer than `slots` distinct ones were drawn.
    """
    shards, layers = sum(experts), Counter(experts)
    if slots >= shards:
        return 1.0
    drawn = {E: np.eye(1, E + 1)[0] for E in layers}  # P(so many distinct of E) after g draws
    others = {E: np.eye(1, E)[0] for E in layers}  # of the E − 1 others, after g − 1
    total, left, g = 0.0, 1.0, 0
    while left > NEGLIGIBLE:
        g, left = g + 1, 0.0
        drawn = {E: _draw(chance) for E, chance in drawn.items()}
        others = {E: _draw(chance) for E, chance in others.items()} if g > 1 else others
        waves = {E: np.fft.rfft(chance, shards) for E, chance in drawn.items()}
        for E, count in layers.items():
            wave = np.fft.rfft(others[E], shards)
            for other, many in layers.items():
                wave = wave * waves[other] ** (many - (other == E))
            kept = np.fft.irfft(wave, shards)[:slots].sum().clip(0, 1)
            back = (1 - 1 / E) ** (g - 1) * count / len(experts)
            total += kept * back / E
            left += kept * back
    return float(total)


def _draw(chance: np.ndarray) -> np.ndarray:
    """How many distinct ones after one more draw."""
    E = len(chance) - 1
    if E == 0:
        return chance
    seen = np.arange(E + 1) / E
    return chance * seen + np.append(0, (chance * (1 - seen))[:-1])
