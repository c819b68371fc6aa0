"""Guards of a run: signals that end it cleanly, and finding where numbers stopped being finite."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from perspectron.util.hooks import hooked


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


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, which a closing terminal sends; a second one acts at once. One that is
    ignored, as SIGHUP under nohup, stays so."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
