"""Code that operations share around their arithmetic: choosing a backend and logging the choice, autocast, whether
gradients are on, which states may be overwritten, the matrix of a layer that is not called, and errors in place of
missing derivatives."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode

from perspectron.util.errors import BackendError

P = ParamSpec("P")
R = TypeVar("R")
_captured = ContextVar("captured", default=False)


def known(backend: str, backends: tuple[str, ...]) -> None:
    """Raise BackendError for a backend that is not in `backends`."""
    if backend not in backends:
        raise BackendError(f"backend = {backend!r}, must be one of {', '.join(backends)}")


def log_once(message: str, *args: str) -> None:
    """Log a message, each one once; not while a compiler traces, which would put the call into its graph."""
    if not is_compiling():
        _say(message, *args)


@functools.cache
def _say(message: str, *args: str) -> None:
    logging.getLogger("perspectron").info(message, *args)


def under_tracing(*tensors: Tensor) -> bool:
    """True if anything but PyTorch's own kernels sees these tensors (a compiler, a trace, a dispatch mode, a functional
    transform), so that code that reads their memory cannot be used."""
    if is_compiling() or _get_tracing_state() is not None:
        return True
    if _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active():
        return True
    return any(type(x) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors)


def recorder() -> Any:
    """The recorder of the step in progress (`perspectron.decode.recorder`), or None. It does not know the numbers that
    a step changes; what depends on them goes through `attended` or `aside`."""
    mode = _get_current_dispatch_mode()
    return mode if hasattr(mode, "attended") else None


@contextmanager
def capturing() -> Iterator[None]:
    """Context in which a step is captured, for a device to repeat (`perspectron.decode.graphs`)."""
    token = _captured.set(True)
    try:
        yield
    finally:
        _captured.reset(token)


def captured() -> bool:
    """True while a step is captured: the host may neither ask the device for a number nor copy one to it. Code that
    would look at a number does its work for all cases instead."""
    return _captured.get()


def widest(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 if any tensor is."""
    return functools.reduce(torch.promote_types, {x.dtype for x in tensors}, torch.float32)


def check_gates(gate: Tensor) -> None:
    """Raise ValueError unless all gates are in [0, 1]; under tracing, where there are no values, nothing is checked."""
    if gate.numel() == 0 or gate.is_meta or under_tracing(gate.detach()):
        return
    low, high = (float(end) for end in gate.detach().aminmax())
    if not (low >= 0 and high <= 1):  # NaN fails, too
        raise ValueError(f"gates go from {low:g} to {high:g}, must be in [0, 1]")


# ---------------------------------------------------------------- autocast


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """The context without autocast on x's device. (The meta device has none, and asking it raises.)"""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def in_full_precision(op: Callable[P, R]) -> Callable[P, R]:
    """Decorate an operation: autocast does not reach inside."""

    @functools.wraps(op)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        with nullcontext() if x is None else full_precision(x):
            return op(*args, **kwargs)

    return run


# ---------------------------------------------------------------- states that are overwritten


def gradients_off() -> bool:
    """True if no graph is recorded and no forward-mode derivative is computed (which `no_grad` leaves on). Only then
    may an operation write into its inputs."""
    return not torch.is_grad_enabled() and not forward_mode()


def forward_mode() -> bool:
    """True if forward-mode derivatives are computed (which `no_grad` leaves on)."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def check_consumed(consume_state: bool) -> None:
    """Raise ValueError if a state is to be consumed though a graph may still need it."""
    if consume_state and not gradients_off():
        raise ValueError(
            "consume_state = True needs gradients off, and they are on: a graph may still read the state; call it "
            "under torch.no_grad() or torch.inference_mode() and outside of forward mode, or leave consume_state out"
        )


def owned(state: Tensor, consume_state: bool) -> Tensor:
    """The state to write into: itself if it may be consumed, else a contiguous copy. A state that was expanded, whose
    elements share memory, or made in inference mode but used outside of it, cannot be written and is copied too."""
    shared = any(n > 1 and stride == 0 for n, stride in zip(state.shape, state.stride(), strict=True))
    frozen = state.is_inference() and not torch.is_inference_mode_enabled()
    if consume_state and not shared and not frozen:
        return state
    return state.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- weights of layers that are not called


def affine(layer: nn.Module) -> tuple[Tensor, Any]:
    """The matrix and bias (or None) of a linear layer, packed or not, for code that does not call the layer. For one
    that an adapter wraps, they are those of the linear function that the whole computes."""
    weight: Any = layer.weight
    if getattr(type(layer), "widens", False):
        return weight.float(), layer.bias
    if type(layer).forward is nn.Linear.forward or hasattr(type(layer), "packed"):
        return weight, layer.bias
    K, widens = weight.shape[1], getattr(getattr(layer, "base_layer", layer), "widens", False)
    dtype = torch.float32 if widens else weight.dtype
    with full_precision(weight):
        *rows, bias = layer(torch.eye(K + 1, K, dtype=dtype, device=weight.device)).split([K, 1])
    return (rows[0] - bias).T, bias[0]


# ---------------------------------------------------------------- derivatives that are not there


def refuse(message: str) -> Any:
    """A `backward` or `jvp` of an autograd.Function that raises RuntimeError."""

    def raises(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(message)

    return staticmethod(raises)


def once_differentiable(op: str, backward: Callable[..., tuple[Any, ...]], *inputs: Any) -> tuple[Any, ...]:
    """The gradients `backward(*inputs)` of an operation without a second derivative, computed without autocast. They
    are computed in an autograd.Function of their own, so that differentiating them is an error: torch's
    `once_differentiable` gives a silent 0 where the same input is also reached another way."""
    gradients: tuple[Any, ...] = _Once.apply(op, backward, *inputs)
    return gradients


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(op: str, backward: Callable[..., tuple[Any, ...]], *inputs: Any) -> tuple[Any, ...]:
        with full_precision(next(x for x in inputs if isinstance(x, Tensor))):
            return backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"a gradient was differentiated again, and {ctx.op} is differentiable once: leave out create_graph=True, "
            "or take the operation's naive form, if it has one"
        )

    jvp = backward
