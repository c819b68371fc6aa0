"""The memory and speed of a quantised model, computed from shapes and bandwidths alone.

Matrices are packed (`perspectron.ops.packing`); what is not a matrix stays float32.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perspectron.experts.mixture import ExpertsConfig, MixtureConfig
from perspectron.model.census import OF_A_MIXTURE, Part, footprint, packed_expert
from perspectron.model.config import ModelConfig
from perspectron.model.model import shape_of
from perspectron.quant import convert as quant
from perspectron.quant.gptq import FORMATS
from perspectron.stream.device import BUFFERS
from perspectron.stream.expert_file import CODES, ExpertLayout
from perspectron.util.config import one_of

USES = 1 << 17  # simulated uses of random experts


# ---------------------------------------------------------------- what a model needs


@dataclass(frozen=True)
class ExpertLayer:
    """distinct: experts with weights of their own; the others are aliases of these. parameters, codes, scales: those of
    each expert, the last two in bytes. shard: bytes of an expert in a file; slot: in memory. chosen: experts of a
    token."""

    layer: int
    experts: int
    distinct: int
    parameters: int
    codes: int
    scales: int
    shard: int
    slot: int
    chosen: int = 1

    @property
    def read(self) -> int:
        """Bytes of experts that a token reads."""
        return self.chosen * (self.codes + self.scales)


@dataclass(frozen=True)
class Needs:
    """parts: what every token uses, by group as in a census. state: that of one conversation, by kind of mixer.
    experts: the routed layers in order."""

    model: str
    context: int
    parts: dict[str, Part]
    state: dict[str, Part]
    experts: tuple[ExpertLayer, ...]

    @property
    def resident(self) -> int:
        """Bytes that always stay in memory."""
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
        """Bytes of the largest expert in memory; 0 without experts."""
        return max((layer.slot for layer in self.experts), default=0)

    @property
    def shards(self) -> int:
        """Experts of all layers that are stored."""
        return sum(layer.distinct for layer in self.experts)

    @property
    def missed(self) -> int:
        """Bytes of the shards that a token uses in all routed layers."""
        return sum(layer.chosen * layer.shard for layer in self.experts)


def needs(
    config: ModelConfig,
    context: int,
    formats: str | Mapping[str, str] = "2bit",
    distinct: int = 0,
    experts: str = "",
) -> Needs:
    """Bytes that a model needs for one conversation of `context` tokens.

    formats: of the packed modules by name, as in an artifact's config.json; a single one is what `quantize` is asked
    for. distinct: experts of a layer with weights of their own; 0: all.
    experts: format of a mixture's experts; "": that of dense layers.
    ConfigError for a format that a dense layer cannot have.
    """
    model = shape_of(config)
    state = model.init_state(1, capacity=context)
    if isinstance(formats, str):
        experts = experts or one_of(formats, FORMATS, "shared")
        formats = quant.formats(model, one_of(formats, FORMATS, "shared"))
    experts = experts or OF_A_MIXTURE
    counted = footprint(model, state, formats, experts)
    layers = []
    for layer, one in counted.experts.items():
        routed = config.blocks[layer].ffn
        assert isinstance(routed, ExpertsConfig)
        format = experts if isinstance(routed, MixtureConfig) else CODES
        codes, scales = packed_expert(config.d_model, routed, format)
        layout, E = ExpertLayout.of(config.d_model, routed, format), routed.count
        sizes = codes, scales, layout.bytes, layout.slot
        layers.append(ExpertLayer(layer, E, distinct or E, one.parameters, *sizes, routed.chosen))
    return Needs(config.name, context, counted.parts, counted.state, tuple(layers))


# ---------------------------------------------------------------- where it goes


@dataclass(frozen=True)
class Placement:
    """ram, vram: bytes given (vram None: no GPU). least_ram, least_vram: what it takes to run at all; ample_ram: RAM
    from which on nothing streams. slots: how many experts stay in RAM beside the rest."""

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
        """True if experts are read from disk."""
        return self.slots < self.shards


def place(needs: Needs, ram: int, vram: int | None = None) -> Placement:
    """The placement in so much memory. With a GPU, what every token uses stays on it with two experts, and RAM holds
    experts alone."""
    resident = needs.resident if vram is None else 0
    least = max((layer.chosen for layer in needs.experts), default=0)
    one = min(needs.shards, least) * needs.slot
    slots = (ram - resident) // needs.slot if needs.slot else 0
    return Placement(
        ram,
        vram,
        resident + one,
        0
        if vram is None
        else needs.resident + BUFFERS * max((layer.shard for layer in needs.experts), default=0),
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
    """miss_rate: share of used experts that is read from disk. memory, disk, pcie: bytes for a token."""

    name: str
    miss_rate: float
    memory: int
    disk: float
    pcie: int

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Seconds for a token, by resource."""
        pairs = {"memory": self.memory, "disk": self.disk, "pcie": self.pcie}
        known = {name: getattr(rates, name) for name in pairs}
        return {name: amount / known[name] for name, amount in pairs.items() if amount and known[name]}

    def tokens_per_second(self, rates: Rates) -> tuple[float, float] | None:
        """The lowest speed, where nothing overlaps, and the highest, where everything does; None if no rate is
        known."""
        seconds = self.seconds(rates).values()
        return (1 / sum(seconds), 1 / max(seconds)) if seconds else None


def case(needs: Needs, placement: Placement, name: str, miss_rate: float) -> Case:
    pcie = 0 if placement.vram is None else needs.missed
    return Case(name, miss_rate, needs.read + needs.written, miss_rate * needs.missed, pcie)


def bounds(needs: Needs, placement: Placement) -> list[Case]:
    """The cases that hold for any text: every expert missed, and uniform random ones."""
    if not placement.streams:
        return [case(needs, placement, "all in memory", 0.0)]
    hits = uniform_hit_rate(
        [layer.distinct for layer in needs.experts],
        placement.slots,
        [layer.chosen for layer in needs.experts],
    )
    return [
        case(needs, placement, "all missed", 1.0),
        case(needs, placement, "random, LRU", 1 - hits),
    ]


def uniform_hit_rate(experts: Sequence[int], slots: int, chosen: Sequence[int] = ()) -> float:
    """The hit rate of a full, least recently used cache of `slots` experts, when layers in turn ask for one of theirs,
    or for `chosen` of them, all equally likely: simulated with as many random uses as give it to within 0.005."""
    if slots >= sum(experts):
        return 1.0
    counts = chosen or (1,) * len(experts)
    tokens, random = max(USES // sum(counts), 20 * max(experts)), np.random.default_rng(0)
    if max(counts) == 1:
        draws_TL = random.integers(0, experts, (2 * tokens, len(experts)))
    else:
        draws = [_least(random.random((2 * tokens, E)), K) for E, K in zip(experts, counts, strict=True)]
        draws_TL = np.concatenate(draws, 1)
    draws_TL += np.repeat(np.cumsum((0, *experts[:-1])), counts)
    cache = OrderedDict[int, None]()
    _run(cache, draws_TL[:tokens], slots)
    return 1 - _run(cache, draws_TL[tokens:], slots) / draws_TL[tokens:].size


def _least(x_TE: np.ndarray, count: int) -> np.ndarray:
    """The places of the least numbers of each row, the least first."""
    places_TK = np.argpartition(x_TE, count - 1, 1)[:, :count]
    order_TK = np.take_along_axis(x_TE, places_TK, 1).argsort(1)
    return np.take_along_axis(places_TK, order_TK, 1)


def _run(cache: OrderedDict[int, None], keys_TL: np.ndarray, slots: int) -> int:
    """Use these keys in a cache of `slots` entries, the least recently used first; how many were not in it."""
    lacked = 0
    for keys in keys_TL:
        for key in keys.tolist():
            if key in cache:
                cache.move_to_end(key)
            else:
                lacked += 1
                cache[key] = None
                if len(cache) > slots:
                    cache.popitem(last=False)
    return lacked
