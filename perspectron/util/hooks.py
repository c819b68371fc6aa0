"""Hooks on modules."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks at the end of the block, also after an error."""
    kept = list(hooks)
    try:
        yield
    finally:
        for hook in kept:
            hook.remove()


def first_non_finite(model: nn.Module, forward: Callable[[], object]) -> str:
    """The name of the innermost module that first gives a non-finite output, or "the loss itself"."""
    names: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not names and isinstance(first, Tensor) and not first.isfinite().all():
                names.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    with hooked(hooks), torch.no_grad():
        forward()
    return names[0] if names else "the loss itself"
