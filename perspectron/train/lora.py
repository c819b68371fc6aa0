"""Low-rank adapters by PEFT: a run's weights stay, and the product of two thin matrices is learned beside each of some
linear layers. A checkpoint has the merged weights, as any other, and in its training state what `kept` returns.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from perspectron.data.loader import Batch
from perspectron.model.model import LanguageModel
from perspectron.util.config import assignment, at_least, load, require
from perspectron.util.errors import CheckpointError, ConfigError
from perspectron.util.hooks import hooked

KEPT = "lora."
"""Prefix, in a training state, of the names of tensors from `kept`."""
PROBE = 8  # tokens
ROUTER = "route_proj"


@dataclass(frozen=True)
class LoraConfig:
    """`rank=8,targets=q_proj+v_proj`. rank: of the change. alpha: the change is multiplied by alpha / rank; 0 is twice
    the rank. targets: names of linear layers in the blocks, or their ends, with + between; "" is all of them but those
    of routers, which are narrow."""

    rank: int = 8
    alpha: float = 0.0
    targets: str = ""

    def __post_init__(self) -> None:
        at_least(1, self, "rank")
        at_least(0, self, "alpha")

    @classmethod
    def parse(cls, text: str) -> "LoraConfig":
        """Parse such a text. ConfigError, naming the field: it is malformed."""
        pairs = [assignment(part.strip(), "lora") for part in filter(None, text.split(","))]
        require(len(dict(pairs)) == len(pairs), "lora", text, "one in which each field is given once")
        return load(cls, dict(pairs), "lora")


def adapt(model: LanguageModel, config: LoraConfig, sample: Batch) -> None:
    """Put an adapter beside each of the layers and let nothing else learn. ConfigError: PEFT is not installed, a target
    fits no layer, or the model bypasses the adapter of one, as a pass over `sample` shows."""
    if find_spec("peft") is None:
        raise ConfigError("peft is not installed: pip install 'perspectron[lora]'")
    import peft

    chosen = _chosen(model, config)
    made = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha or 2 * config.rank, target_modules=chosen, bias="none"
    )
    peft.inject_adapter_in_model(made, model)
    past = sorted(set(chosen) - _called(model, sample))
    bound = f"left out: {model.config.name} reads the weights of these layers past an adapter"
    require(not past, "lora: targets", "+".join(past), bound)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))


def sizes(model: LanguageModel, config: LoraConfig) -> tuple[int, int]:
    """The numbers that the adapters of a model would have, and those of the weights beside them, which a checkpoint
    holds merged. ConfigError as in `adapt`."""
    shapes = [model.get_parameter(f"{name}.weight").shape for name in _chosen(model, config)]
    return sum(config.rank * sum(shape) for shape in shapes), sum(shape.numel() for shape in shapes)


def _chosen(model: LanguageModel, config: LoraConfig) -> list[str]:
    """Names of the layers that get an adapter."""
    modules = model.blocks.named_modules(prefix="blocks")
    layers = [name for name, module in modules if isinstance(module, nn.Linear)]
    ends = ", ".join(sorted({name.split(".", 2)[-1] for name in layers}))
    wanted = [target for target in config.targets.split("+") if target]
    for target in wanted:
        require(any(_fits(name, target) for name in layers), "lora: targets", target, f"of {ends}")
    wanted = wanted or [end for end in ends.split(", ") if not _fits(end, ROUTER)]
    chosen = [name for name in layers if any(_fits(name, target) for target in wanted)]
    require(len(chosen) > 0, "lora", config.rank, f"left out: {model.config.name} has no linear layer")
    widths = {name: min(model.get_parameter(f"{name}.weight").shape) for name in chosen}
    narrowest = min(widths, key=widths.__getitem__)
    bound = f"≤ {widths[narrowest]}, the width of {narrowest}"
    require(config.rank <= widths[narrowest], "lora: rank", config.rank, bound)
    return chosen


def _fits(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


@torch.no_grad()
def _called(model: LanguageModel, sample: Batch) -> set[str]:
    """Names of the layers with adapters that a model calls."""
    found = set[str]()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: found.add(name))
        for name, module in _layers(model).items()
    ]
    with hooked(hooks):
        model(sample.ids_BT[:1, :PROBE].to(model.device))
    return found


def is_adapted(model: nn.Module) -> bool:
    """True if a model has adapters."""
    return any(_is_adapter(name) for name, _ in model.named_parameters())


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def plain(name: str) -> str:
    """The name of a tensor in the model without adapters."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def merged(model: LanguageModel) -> dict[str, Tensor]:
    """The weights of the equivalent model without adapters."""
    tensors = {plain(name): tensor for name, tensor in model.state_dict().items() if not _is_adapter(name)}
    for name, module in _layers(model).items():
        weight = module.base_layer.weight
        change = module.get_delta_weight("default").to(weight.dtype)
        tensors[f"{name}.weight"] = weight + change
    return tensors


def kept(model: LanguageModel) -> dict[str, Tensor]:
    """Tensors that merged weights do not hold: the adapters, and the frozen weights beside them."""
    names = [f"{name}.base_layer.weight" for name in _layers(model)]
    state = model.state_dict()
    return {KEPT + name: state[name] for name in state if _is_adapter(name) or name in names}


def unmerged(
    model: LanguageModel, tensors: dict[str, Tensor], training: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a model with adapters, from a checkpoint's weights and its training state, from which they are
    removed. CheckpointError: those of some layer are missing."""
    missing = [name for name in kept(model) if name not in training]
    if missing:
        raise CheckpointError(f"training state: {missing[0]} is missing, must hold the adapters of this run")
    return {
        name: training.pop(KEPT + name) if KEPT + name in training else tensors[plain(name)]
        for name in model.state_dict()
        if KEPT + name in training or plain(name) in tensors
    }


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
