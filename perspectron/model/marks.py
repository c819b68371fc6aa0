"""Marks for numbers that no initialisation has written yet, and an error for those that remain."""

import torch
from torch import Tensor, nn

from perspectron.util.errors import ConfigError


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in tensors(module))


MARK = 0xA5  # every byte of a tensor without floating-point numbers


def mark(module: nn.Module) -> None:
    """Fill a module's own tensors with what no initialisation writes: NaN, or bytes of MARK."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        else:
            tensor.reshape(-1).view(torch.uint8).fill_(MARK)


def refuse_marked(prefix: str, module: nn.Module) -> None:
    """Raise ConfigError for a tensor that still holds what `mark` wrote, and say how to fill it."""
    for name, tensor in [*module.named_parameters(prefix, False), *module.named_buffers(prefix, False)]:
        if tensor.is_floating_point():
            # The sum is NaN if any number is; it needs no memory, unlike the search, which is rarely made.
            marked = bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
        else:
            marked = tensor.numel() > 0 and bool((tensor.reshape(-1).view(torch.uint8) == MARK).all())
        if marked:
            raise ConfigError(
                f"{name} was not initialised: give {type(module).__name__} an init_weights(generator) "
                "that fills all of it"
            )
