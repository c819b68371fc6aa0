"""The part of a checkpoint that only training needs: the optimizer's moments and the random state, by name."""

import math
from pathlib import Path

import torch
from torch import Tensor

from perspectron.model.model import LanguageModel
from perspectron.train import lora
from perspectron.util.errors import CheckpointError

OF_TRAINING = ("exp_avg.", "exp_avg_sq.", "momentum_buffer.", "step.", "rng.")
"""Prefixes of these tensors' names; no tensor of a model has one."""


def training_state(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The random state, the optimizer's moments and what only adapters' training needs, by name."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors | (lora.kept(model) if lora.is_adapted(model) else {})


def empty(like: dict[str, Tensor], model: LanguageModel) -> dict[str, Tensor]:
    """Zeros in place of the training state of a checkpoint (`like`, which also holds other tensors); for moments, of
    the part that belongs to this rank's part of the weights."""
    parameters, made = dict(model.named_parameters()), dict[str, Tensor]()
    for name, tensor in like.items():
        if name.startswith(OF_TRAINING):
            parameter = parameters.get(name.partition(".")[2])
            here = parameter if parameter is not None and parameter.shape == tensor.shape else None
            made[name] = torch.zeros_like(tensor, device="cpu") if here is None else torch.zeros_like(here)
    return made


def restore(
    path: Path, tensors: dict[str, Tensor], model: LanguageModel, optimizer: torch.optim.Optimizer
) -> None:
    """Give the optimizer its moments, and torch its random state. CheckpointError, naming the file, unless all tensors
    are as in this model's training."""
    moments: dict[Tensor, dict[str, Tensor]] = {}
    orthogonal = {id(p) for group in optimizer.param_groups if "ns_steps" in group for p in group["params"]}
    for name, parameter in model.named_parameters():
        shapes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        if id(parameter) in orthogonal:
            shapes = {"momentum_buffer": parameter.shape}
        state = {key: tensors.pop(f"{key}.{name}") for key in shapes if f"{key}.{name}" in tensors}
        for key, value in state.items():
            if value.shape != shapes[key] or not value.is_floating_point() or len(state) < len(shapes):
                raise CheckpointError(
                    f"{path}: {key}.{name} is {value.dtype} {list(value.shape)}, must be as in training"
                )
        if "step" in state and not 0 <= state["step"].item() < math.inf:
            raise CheckpointError(f"{path}: step.{name} is {state['step'].item()}, must be ≥ 0 and finite")
        moments[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
    random, random_cuda = tensors.pop("rng.cpu", None), tensors.pop("rng.cuda", None)
    if random is None or tensors:
        why = f"has {min(tensors)}" if tensors else "lacks rng.cpu"
        raise CheckpointError(f"{path}: {why}, must hold this model's training state")
    try:
        torch.set_rng_state(random)
        if random_cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_cuda)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path}: no random state ({error})") from None
    optimizer.state.update(moments)
