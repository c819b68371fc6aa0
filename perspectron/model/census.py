"""Census of a model: parameters, FLOPs and bytes for each token, and bytes of state.

A model on the meta device has shapes and no numbers, so that any size is counted at once.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from math import prod
from operator import add
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.mixture import MATRICES, ExpertsConfig, Mixture, MixtureConfig
from perspectron.model.block import Block, ShiftedState, states_of
from perspectron.model.config import ModelConfig
from perspectron.model.ffn import TiedConfig
from perspectron.model.mixer import Mixer
from perspectron.model.model import LanguageModel, shape_of
from perspectron.model.parts import Shared
from perspectron.model.state import LMState
from perspectron.ops.packing import Packed, sizes

CONTEXTS = (1024, 8192, 65536, 262144)
OF_A_MIXTURE = "4bit32"
"""Default format of a mixture's experts; those of routed layers are ternary."""
BASES = ("base_gate_FD", "base_up_FD", "base_down_DF")


@dataclass(frozen=True)
class Group:
    """Parameters of one kind: the number of modules of that kind, and of parameters in all of them."""

    modules: int
    parameters: int


@dataclass(frozen=True)
class Census:
    """parameters: all of them. active: those that one token uses. groups: parameters by kind, with norms and biases
    apart from the matrices. shard_bytes: bytes of the codes of one expert in the first routed layer;
    scale_bytes: of its scales; both 0 without experts. flops: for reading one token at each context length, with
    multiply and add counted as two; by kind at the shortest length. state_bytes: of one conversation of each length,
    summed over its tensors in float32."""

    parameters: int
    active_parameters: int
    groups: dict[str, Group]
    shard_bytes: int
    scale_bytes: int
    flops_per_token: dict[int, int]
    flops_by_kind: dict[str, int]
    state_bytes: dict[int, int]


def census(config: ModelConfig, contexts: Sequence[int] = CONTEXTS) -> Census:
    """Count the model of `config` at these context lengths. Lengths past a table of learned positions are left out."""
    if config.positions:
        contexts = [c for c in contexts if c <= config.positions] or [config.positions]
    model = shape_of(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    routed = [block.ffn for block in config.blocks if isinstance(block.ffn, ExpertsConfig)]
    codes, scales = packed_expert(config.d_model, routed[0]) if routed else (0, 0)
    states = {context: model.init_state(1, capacity=context) for context in contexts}
    flops = {context: _step_flops(model, context) for context in contexts}
    return Census(
        parameters,
        parameters - _idle(model),
        _groups(model),
        codes,
        scales,
        {context: by_kind.total() for context, by_kind in flops.items()},
        dict(flops[min(contexts)]),
        {context: state.nbytes for context, state in states.items()},
    )


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token uses and that affect the output."""
    model = shape_of(config)
    return sum(parameter.numel() for parameter in model.parameters()) - _idle(model)


def state_bytes(config: ModelConfig, context: int) -> int | None:
    """Bytes of the state of one conversation, if it is no larger for conversations longer than `context` tokens; None
    if it keeps growing."""
    model = shape_of(config)
    here, later = (model.init_state(1, capacity=length).nbytes for length in (context, 2 * context))
    return here if here == later else None


def _idle(model: LanguageModel) -> int:
    """The experts that a token does not use, and the parts of a mixer that its config leaves without effect."""
    return sum(m.idle_parameters() for m in model.modules() if isinstance(m, RoutedSwiGLU | Mixture | Mixer))


def _groups(model: LanguageModel) -> dict[str, Group]:
    owners, numbers, blocks = defaultdict[str, set[str]](set), Counter[str](), list(model.blocks)
    for name, parameter in model.named_parameters():
        kind, (room, *rest) = group_of(name, parameter.ndim, blocks), name.split(".")
        owners[kind].add(rest[0] if room == "blocks" else room)
        numbers[kind] += parameter.numel()
    count = {kind: len(rooms) for kind, rooms in owners.items()}
    norms = (torch.nn.RMSNorm, torch.nn.LayerNorm)
    count["norms and biases"] = sum(isinstance(module, norms) for module in model.modules())
    return {kind: Group(count[kind], size) for kind, size in numbers.items()}


def group_of(name: str, ndim: int, blocks: list[Any]) -> str:
    """The group of a parameter of this name and number of dimensions."""
    if ndim < 2:
        return "norms and biases"
    if not name.startswith("blocks."):
        room = name.split(".")[0]
        return {"lm_head": "head"}.get(room, room)
    _, index, room, *rest = name.split(".")
    block = blocks[int(index)]
    if room in ("mixer", "beside", "first_values"):
        return str((block.config.beside if room == "beside" else block.config.mixer).kind)
    if room.endswith("_shift"):
        return "norms and biases"
    if block.config.ffn.kind == "routed":
        return "router" if rest[0] in ("route_proj", "offset_EA") else "experts"
    if block.config.ffn.kind == "mixture":
        return (
            "router"
            if rest[0] in ("route_proj", "share_proj")
            else "experts"
            if rest[0] in MATRICES
            else "shared"
        )
    return str(block.config.ffn.kind)


# Bytes


@dataclass(frozen=True)
class Part:
    """Weights or state of one kind. bytes: in all. read, written: bytes that one token reads and writes."""

    parameters: int
    bytes: int
    read: int
    written: int = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(*map(add, astuple(self), astuple(other)))


NOTHING = Part(0, 0, 0)


@dataclass(frozen=True)
class Footprint:
    """parts: weights by group as in a census, without experts. experts: one expert of each routed layer. state: by
    kind of mixer. cached: the part of the state read that is keys and values of tokens attended to."""

    parts: dict[str, Part]
    experts: dict[int, Part]
    state: dict[str, Part]
    cached: int


def footprint(
    model: LanguageModel, state: LMState, formats: Mapping[str, str] | None = None, experts: str = ""
) -> Footprint:
    """Bytes of a model and of the state after its last token; a state on the meta device counts as full.

    formats: storage format of each module's matrix; experts are then ternary, or as `experts` says. None: everything as
    it is.
    """
    parts = dict[str, Part]()
    for kind, part in _weights(model, formats or {}):
        parts[kind] = parts.get(kind, NOTHING) + part
    each = {
        layer: _expert(model, layer, block.ffn, experts, as_it_is=formats is None)
        for layer, block in enumerate(model.config.blocks)
        if isinstance(block.ffn, ExpertsConfig)
    }
    owners = list[tuple[str, Any]]()
    for block, layer_state in zip(model.config.blocks, state.layers, strict=True):
        kinds = [mixer.kind for mixer in block.mixers] or ["-"]
        owners += zip(kinds, states_of(layer_state), strict=True)
    states, cached = dict[str, Part](), 0
    for kind, layer_state in (*owners, ("positions", state.length_B)):
        part, keys_and_values = _state(layer_state)
        if part.bytes:
            states[kind] = states.get(kind, NOTHING) + part
        cached += keys_and_values
    return Footprint(parts, each, states, cached)


@dataclass(frozen=True)
class Touched:
    """Bytes that one token reads, and for the state also writes. experts: codes and scales, or weights, of the chosen
    experts in each routed layer. shared: all other weights except the head's. head: the matrix that gives the logits.
    state: memories that each token rewrites, counted twice (read and written). caches: keys and values of tokens
    attended to."""

    experts: int
    shared: int
    head: int
    state: int
    caches: int

    @property
    def total(self) -> int:
        return self.experts + self.shared + self.head + self.state + self.caches


def touched(model: LanguageModel, state: LMState) -> Touched:
    """Bytes that the last token touched, counted from the tensors of a model and of the state after it."""
    whole = footprint(model, state)
    head = whole.parts["embedding" if model.config.head is None else "head"].read
    return Touched(
        sum(part.read * _chosen(model.config, layer) for layer, part in whole.experts.items()),
        sum(part.read for part in whole.parts.values()) - head,
        head,
        sum(part.read + part.written for part in whole.state.values()) - whole.cached,
        whole.cached,
    )


def packed_bytes(format: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a matrix of this shape, (outputs, inputs)."""
    codes, scales, dtype = sizes(format, shape)
    return prod(codes), prod(scales) * dtype.itemsize


def _chosen(config: ModelConfig, layer: int) -> int:
    """Experts that a token uses in a layer with experts."""
    ffn = config.blocks[layer].ffn
    assert isinstance(ffn, ExpertsConfig)
    return ffn.chosen


def packed_expert(d_model: int, ffn: ExpertsConfig, format: str = "") -> tuple[int, int]:
    """Bytes of the codes and of the scales of an expert. format: of a mixture's expert; "" is OF_A_MIXTURE."""
    format = (format or OF_A_MIXTURE) if isinstance(ffn, MixtureConfig) else "ternary"
    shapes = (1 + ffn.gated) * [(ffn.hidden, d_model)] + [(d_model, ffn.hidden)]
    matrices = [packed_bytes(format, shape) for shape in shapes]
    return sum(codes for codes, _ in matrices), sum(scales for _, scales in matrices)


def _weights(model: LanguageModel, formats: Mapping[str, str]) -> Iterator[tuple[str, Part]]:
    """The kind and the bytes of every weight but the experts'."""
    blocks = list(model.blocks)
    users = Counter(block.ffn.block for block in model.config.blocks if isinstance(block.ffn, TiedConfig))
    looked_up = (
        {"positions"} if model.config.head is None else {"positions", "embedding"}
    )  # a token reads a row
    for name, module in model.named_modules():
        places = name.split(".")
        times = 1 + (
            users[int(places[1])] if places[2:3] == ["ffn"] else 0
        )  # norm and shift are each block's own
        weights = [(own, p.shape, p.nbytes) for own, p in module.named_parameters(recurse=False)]
        if isinstance(packed := getattr(module, "packed", None), Packed):
            weights.append(("weight", torch.Size(cast(Any, module).shape), packed.nbytes))
        for own, shape, stored in weights:
            if own in (*MATRICES, *BASES):
                continue
            if name in formats and len(shape) == 2:
                stored = sum(packed_bytes(formats[name], (shape[0], shape[1])))
            read = stored // shape[0] if name in looked_up else stored * times
            yield group_of(f"{name}.{own}", len(shape), blocks), Part(prod(shape), stored, read)
        for own, buffer in module.named_buffers(recurse=False):
            if own == "bias_E":
                yield "router", Part(0, buffer.nbytes, buffer.nbytes)


def _expert(model: LanguageModel, layer: int, config: ExpertsConfig, format: str, *, as_it_is: bool) -> Part:
    """One expert of a layer: its own weights where the model has them, else packed."""
    ffn = cast(Block, model.blocks[layer]).ffn
    weights = dict(ffn.named_parameters(recurse=False))
    own = [weight for name, weight in weights.items() if name in MATRICES]
    parameters = (2 + config.gated) * config.hidden * model.config.d_model
    if as_it_is and own:
        base = sum(weight.nbytes for name, weight in weights.items() if name in BASES)
        size = base + sum(weight.nbytes // len(weight) for weight in own)
    else:
        size = sum(packed_expert(model.config.d_model, config, format or getattr(ffn, "format", "")))
    return Part(parameters, size, size)


def is_cache(where: pytree.KeyPath) -> bool:
    """True if a leaf of a state holds keys or values, with a slot for each token."""
    return pytree.keystr(where).rpartition(".")[2].startswith(("k_", "v_"))


def _state(state: Any) -> tuple[Part, int]:
    """A block's state, and the bytes of keys and values that are read of it.

    A token reads a cache's filled slots and writes one, which does not count; it rewrites all other tensors.
    """
    part, cached = NOTHING, 0
    leaves = {pytree.keystr(where): (where, leaf) for where, leaf in pytree.tree_leaves_with_path(state)}
    lent = {name.partition(".shared[")[0] for name in leaves if ".shared[" in name}
    for name, (where, leaf) in leaves.items():
        if not isinstance(leaf, torch.Tensor):
            continue
        if not is_cache(where):
            part += Part(0, leaf.nbytes, leaf.nbytes, leaf.nbytes)
            continue
        read, cache = leaf.nbytes, name.rpartition(".")[0]
        if ".shared[" in name:
            read = 0  # a cache's tokens are all counted at its slots
        elif leaf.device.type != "meta":
            _, length_B = leaves[f"{cache}.length_B"]
            length_B = length_B if cache in lent else length_B.clamp(max=leaf.shape[2])
            read = int(length_B.sum()) * prod(leaf.shape[1::2]) * leaf.itemsize
        part, cached = part + Part(0, leaf.nbytes, read), cached + read
    return part, cached


# FLOPs


def _step_flops(model: LanguageModel, context: int) -> Counter[str]:
    """FLOPs of one token by kind. Each distinct block runs once; alike blocks cost alike."""
    x_11D = torch.zeros(1, 1, model.config.d_model, device="meta")
    state = model.init_state(1, capacity=context)
    flops = Counter(
        {
            "embedding" if model.config.head is None else "head": _count(partial(model.head, x_11D)),
            "norms and biases": _count(partial(model.norm, x_11D)),
        }
    )
    shared = Shared()
    for (config, *_), places in _alike(model).items():
        count, first = len(places), places[0]
        block, layer = cast(Block, model.blocks[first]), state.layers[first]
        network = model.ffn_of(block)
        x_11D = torch.zeros(1, 1, model.config.d_token if first == 0 else model.config.d_model, device="meta")
        whole = _count(partial(block, x_11D, layer, network, None, None, False, shared))
        mixed, own = 0, states_of(layer.mixer if isinstance(layer, ShiftedState) else layer)
        for mixer, part, known in zip(block.mixers, own, config.mixers, strict=False):
            each = _count(partial(mixer, x_11D, part, **block.handed(shared, mixer)))
            flops[known.kind] += count * each
            mixed += each
        ffn = 0 if network is None else _count(partial(network, x_11D, x_11D))
        if config.ffn is not None:
            flops[config.ffn.kind] += count * ffn
        flops["norms and biases"] += count * (whole - mixed - ffn)
    return flops


def _alike(model: LanguageModel) -> dict[tuple[Any, ...], list[int]]:
    """Places of the blocks that compute the same: of equal config, and alike in value residual and its gate."""
    alike = defaultdict[tuple[Any, ...], list[int]](list)
    for place, block in enumerate(cast("list[Block]", model.blocks)):
        value_residual = block.first_values
        alike[
            block.config,
            value_residual is None,
            value_residual is not None and value_residual.gate is not None,
        ].append(place)
    return alike


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
        if name.startswith("_scaled_dot_product"):
            q, k, v = (x.shape for x in args[:3])
            self.total += 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
        elif product := flop_registry.get(getattr(torch.ops.aten, name, None)):
            self.total += product(*args, out_val=out)
        elif isinstance(out, torch.Tensor) and out.is_floating_point() and torch.Tag.pointwise in func.tags:
            self.total += out.numel() * (2 if name.startswith("addc") else int(name != "clone"))
        return out
