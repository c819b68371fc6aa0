"""The adapter of a model's gates: p = (W_p + B A) x + b_p in PDR layers. A is drawn from a seed and stays, B learns.

Shapes: D model width, r rank of the adapter, R state rank.
"""

import copy
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from perspectron.designs.perspective.pdr import PDR, Adapted, AdaptedState, PDRState
from perspectron.designs.perspective.pdr2 import PDR2, AdaptedPDR2State, PDR2State
from perspectron.model.appended import digest_of
from perspectron.model.block import Block, of_mixer, with_mixer
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.quant.linear import QuantEmbedding, QuantLinear
from perspectron.util.config import at_least, load, require
from perspectron.util.errors import ConfigError, StateError
from perspectron.util.files import atomic, parse_json
from perspectron.util.streams import stream
from perspectron.util.tensors import JSON_ROOM, load_tensors, save_tensors

FORMAT = "perspectron-adapter-1"
ADAPTED: dict[type[Any], type[Any]] = {PDRState: AdaptedState, PDR2State: AdaptedPDR2State}


@dataclass(frozen=True)
class AdapterConfig:
    """A new adapter. rank: r, of its matrices. layers: blocks to adapt; none is every PDR block. seed: of A."""

    rank: int = 4
    layers: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(1, self, "rank")


@dataclass
class Counters:
    """tokens: learned from. updates: made. rollbacks: to the last accepted weights. skipped: updates that were not
    made, because a loss or a gradient was not finite."""

    tokens: int = 0
    updates: int = 0
    rollbacks: int = 0
    skipped: int = 0


def gates(model: LanguageModel) -> dict[int, nn.Linear]:
    """The maps W_p of the PDR blocks, by block. ConfigError for a model that has none to adapt."""
    found = dict[int, nn.Linear]()
    if any(isinstance(module, QuantLinear | QuantEmbedding) for module in model.modules()):
        raise ConfigError(
            "the model is packed in few bits, which have no derivative; adapt the run that it was made from"
        )
    for index, block in enumerate(cast("list[Block]", model.blocks)):
        mixer = getattr(block, "mixer", None)
        if isinstance(mixer, PDR | PDR2) and isinstance(mixer.p_proj, nn.Linear):
            found[index] = mixer.p_proj
    if not found:
        raise ConfigError(
            f"{model.config.name} has no PDR layer whose gates read their input; adapt a Perspective model, such as "
            "perspective-tiny-dense"
        )
    return found


class Adapter:
    """Weights, moments, counters and saved traces of one conversation's adapter.

    up, first, second: B and Adam's moments [D,r], by block. trace: [r,D,R], by block; empty where there is none.
    ConfigError: the model has no gates to adapt, or not in `layers`.
    """

    def __init__(self, model: LanguageModel, config: AdapterConfig = AdapterConfig()) -> None:
        maps = gates(model)
        for layer in config.layers:
            require(layer in maps, "layers", layer, f"among {', '.join(map(str, maps))}, the PDR layers")
        chosen = sorted(set(config.layers)) or list(maps)
        self.config, self.base = replace(config, layers=tuple(chosen)), model.fingerprint()
        self.up = {i: torch.zeros(maps[i].out_features, config.rank, dtype=model.dtype) for i in chosen}
        self.down = {i: _down(config.seed, i, config.rank, maps[i]) for i in chosen}
        self.first = {i: torch.zeros_like(up) for i, up in self.up.items()}
        self.second = copy.deepcopy(self.first)
        self.trace = dict[int, Tensor]()
        self.counters = Counters()

    @property
    def size(self) -> int:
        """The number of weights that learn."""
        return sum(up.numel() for up in self.up.values())

    def to(self, device: torch.device) -> None:
        """Move the adapter to a device."""
        for parts in (self.up, self.down, self.first, self.second, self.trace):
            parts.update({i: part.to(device) for i, part in parts.items()})

    def attach(self, state: LMState, *, traces: bool = False) -> LMState:
        """The state with this adapter in every row. traces: keep traces, starting from the saved ones, or from 0."""
        layers = list(state.layers)
        for i, up in self.up.items():
            own = _bare(of_mixer(layers[i]))
            memory = own.memory_BDR
            B, D, R = memory.shape
            down_BrD, up_BDr = (x.to(memory.device).expand(B, *x.shape).clone() for x in (self.down[i], up))
            trace = memory.new_zeros(B, self.config.rank if traces else 0, D, R)
            if traces and i in self.trace:
                trace = self.trace[i].to(memory).expand(B, *self.trace[i].shape).clone()
            adapted = ADAPTED[type(own)](**vars(own), down_BrD=down_BrD, up_BDr=up_BDr, trace_BrDR=trace)
            layers[i] = with_mixer(layers[i], adapted)
        return replace(state, layers=tuple(layers))

    def detach(self, state: LMState) -> LMState:
        """The state without the adapter, which keeps the traces of the first row."""
        layers = list(state.layers)
        for i, layer in enumerate(layers):
            if isinstance(own := of_mixer(layer), Adapted):
                if own.traced:
                    self.trace[i] = own.trace_BrDR[0].detach().clone()
                layers[i] = with_mixer(layer, _bare(own))
        return replace(state, layers=tuple(layers))

    def save(self, path: Path | str) -> None:
        """Write to one file, atomically. StorageError if it cannot be written."""
        tensors = {
            f"{name}.{i}": part.detach().cpu()
            for name in ("up", "first", "second", "trace")
            for i, part in getattr(self, name).items()
        }
        header = {
            "format": FORMAT,
            "model": self.base,
            "config": json.dumps(asdict(self.config)),
            "counters": json.dumps(asdict(self.counters)),
        }
        header["digest"] = digest_of(header, tensors)
        with atomic(Path(path)) as temporary:
            save_tensors(temporary, tensors, header)

    @classmethod
    def load(cls, path: Path | str, model: LanguageModel) -> "Adapter":
        """Read a saved adapter. StateError if the file is missing or damaged, or of another model."""
        path = Path(path)
        header, tensors = load_tensors(path, StateError, "a saved adapter")
        digest = header.pop("digest", None)
        if header.get("format") != FORMAT or not {"model", "config", "counters"} <= header.keys():
            raise StateError(f"{path}: format {str(header.get('format'))[:40]!r}, must be {FORMAT!r}")
        if digest != digest_of(header, tensors):
            raise StateError(f"{path}: damaged, it does not match its digest")
        if header["model"] != model.fingerprint():
            raise StateError(
                f"{path}: adapter of model {header['model'][:12]}, this model is {model.fingerprint()[:12]}; "
                "use it with the weights that it was learned on"
            )
        try:
            config = load(AdapterConfig, parse_json(header["config"], room=JSON_ROOM), str(path))
            at_most = max((tensor.numel() for tensor in tensors.values()), default=0)
            require(config.rank <= at_most, "rank", config.rank, f"≤ {at_most}, what the file has")
            adapter = cls(model, config)
            adapter.counters = load(Counters, parse_json(header["counters"], room=JSON_ROOM), str(path))
        except (ValueError, ConfigError) as error:
            raise StateError(f"{path}: not an adapter ({error})") from None
        empty = adapter.attach(model.init_state(1), traces=True)
        for name, tensor in tensors.items():
            kind, _, number = name.partition(".")
            index = int(number) if number.isdecimal() else -1
            if kind not in ("up", "first", "second", "trace") or index not in adapter.up:
                raise StateError(f"{path}: has {name[:80]!r}, must hold what an adapter has")
            wanted = of_mixer(empty.layers[index]).trace_BrDR[0] if kind == "trace" else adapter.up[index]
            if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype or not tensor.isfinite().all():
                raise StateError(
                    f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, must be finite {wanted.dtype} "
                    f"{list(wanted.shape)}"
                )
            getattr(adapter, kind)[index] = tensor
        for kind in ("up", "first", "second"):
            if missing := adapter.up.keys() - {i for i in adapter.up if f"{kind}.{i}" in tensors}:
                raise StateError(f"{path}: lacks {kind}.{min(missing)}")
        return adapter


def merge(model: LanguageModel, adapter: Adapter) -> LanguageModel:
    """A copy of the model with W_p + B A in place of W_p. StateError: the adapter is of another model."""
    if adapter.base != model.fingerprint():
        raise StateError(f"merge: the adapter is of model {adapter.base[:12]}; use the one it was learned on")
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for i, weight in gates(merged).items():
            if i in adapter.up:
                change = adapter.up[i] @ adapter.down[i].to(adapter.up[i].dtype)
                weight.weight += change.to(weight.weight)
    return merged


def _bare(own: Any) -> Any:
    """A mixer's state without an adapter."""
    for bare, adapted in ADAPTED.items():
        if isinstance(own, adapted):
            return bare(*(getattr(own, field.name) for field in fields(bare)))
    return own


def _down(seed: int, layer: int, rank: int, gate: nn.Linear) -> Tensor:
    """The matrix A [r,D] of a layer, drawn from N(0, 1/D)."""
    width = gate.in_features
    down = torch.empty(rank, width, dtype=torch.float64)
    return down.normal_(0, width**-0.5, generator=stream(seed, "adapter", layer)).to(gate.weight.dtype)
