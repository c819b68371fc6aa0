"""The device of a run of the tests: `--device cpu`, `cuda`, or `away`, which is no device.

A test makes tensors as ever, `torch.randn(3, generator=draw)`: those that a test's file makes without `device=` lie on
the device of the run, drawn on the CPU, so the numbers are the same everywhere. What the library makes is left where
the library puts it: a tensor that it makes on the wrong device meets one of the device, and that is an error.

"away" is memory of the CPU whose tensors say that they lie on `AWAY`. They refuse to meet a tensor of the CPU where
those of a GPU do, and a generator of the CPU. So the tests find what lies on the wrong device where there is no GPU.
It has no kernels of its own and none of the library's: not its speed, its bits or its memory are another device's. It
knows no autocast, and where code of PyTorch itself makes tensors on it, the error says "not compiled with XPU".
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._mode_utils import no_dispatch

TESTS = str(Path(__file__).parent)
AWAY = torch.device("xpu", 0)  # a kind that the library has no branch for
DRAWS = {Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_, Tensor.random_}
MEETS = {torch.ops.aten.copy_, torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
DEVICES = (torch.device, str, int)


class OfTheRun(DeviceContext):
    """What the tests' files make lies on the device; it is torch's default device, so `perspectron.build` builds
    there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if sys._getframe(1).f_code.co_filename.startswith(TESTS):
            if func in _device_constructors() and kwargs.get("device") is None:
                gradient = kwargs.pop("requires_grad", False)
                return self.moved(func(*args, **kwargs)).requires_grad_(gradient)
            if func in DRAWS and not args[0].is_meta:
                drawn = func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs)
                return args[0].copy_(drawn)
        return self.run(func, args, kwargs)

    def moved(self, made: Tensor) -> Tensor:
        return made.to(self.device)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Away(Tensor):
    """A tensor of the CPU that says that it is elsewhere."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type["Away"], inner: Tensor) -> "Away":
        place = (inner.stride(), inner.storage_offset())
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=place[0],
            storage_offset=place[1],
            dtype=inner.dtype,
            layout=inner.layout,
            device=inner.device,
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:
        return self.inner.device if self.inner.is_meta else AWAY

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> "Away":
        return Away(inner["inner"])

    def __repr__(self, **_: Any) -> str:
        return f"Away({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def new_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        return Away(self.inner.new_tensor(*args, **kwargs))

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {AWAY} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = [*args, *kwargs.values()]
        parts += [x for part in parts if isinstance(part, list | tuple) for x in part]
        for x in parts:
            here = isinstance(x, Tensor) and not isinstance(x, Away) and x.ndim > 0
            if here and func.overloadpacket not in MEETS and not _of_the_engine(x):
                raise RuntimeError(f"{func}: Expected all tensors on the same device, found {AWAY} and cpu")
            if isinstance(x, torch.Generator):
                raise RuntimeError(f"{func}: Expected a '{AWAY.type}' device type for generator, found 'cpu'")
        out = func(*_inner(args), **{name: _inner(x) for name, x in kwargs.items()})
        view, writes = _kind(func)
        if torch.Tag.inplace_view in func.tags:  # the shape of the outer one changes too
            with no_dispatch():
                func(*args, **kwargs)
        if writes:
            return kwargs.get("out", args[0])
        normal = view and not args[0].is_inference()  # then its views are, in inference mode too
        with torch.inference_mode(torch.is_inference_mode_enabled() and not normal):
            return _outer(out)


@functools.cache
def _kind(func: Any) -> tuple[bool, bool]:
    """(gives a view, gives what it wrote into)."""
    aliases = [x.alias_info for x in func._schema.arguments if x.alias_info is not None]
    returned = [x.alias_info for x in func._schema.returns if x.alias_info is not None]
    return any(not x.is_write for x in aliases), any(x.is_write for x in returned)


def _of_the_engine(x: Tensor) -> bool:
    """True for the zeros that PyTorch makes in a backward pass as the gradient of an output that nothing reads."""
    return torch._C._current_graph_task_id() != -1 and not x.any()


def _inner(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(map(_inner, x))
    return x.inner if isinstance(x, Away) else x


def _outer(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(map(_outer, x))
    return Away(x.resolve_conj().resolve_neg()) if isinstance(x, Tensor) else x


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, away: bool) -> Tensor:
        ctx.away = isinstance(x, Away)
        return _placed(x, away)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _placed(dx, ctx.away), None


def _placed(x: Tensor, away: bool) -> Tensor:
    if isinstance(x, Away):
        return x if away else x.inner.detach().clone()
    return Away(x.detach().clone()) if away else x


def move(x: Tensor, away: bool) -> Tensor:
    if isinstance(x, Away) == away or x.is_meta:
        return x
    return _Move.apply(x, away) if x.requires_grad and torch.is_grad_enabled() else _placed(x, away)


RUN_BACKWARD = torch.autograd._engine_run_backward


class _Again(TorchFunctionMode):
    def __init__(self, mode: "OfAway") -> None:
        self.mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.mode.run(func, args, dict(kwargs or {}))


class OfAway(OfTheRun):
    """The mode of `--device away`: it answers the requests for that device."""

    def __enter__(self) -> Any:
        torch.__future__.set_swap_module_params_on_conversion(
            True
        )  # a parameter's kind changes with its device
        torch.autograd._engine_run_backward = self.backward
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.autograd._engine_run_backward = RUN_BACKWARD
        return super().__exit__(*error)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's, which is called while no mode is on, with this one."""
        with _Again(self):
            return RUN_BACKWARD(*args, **kwargs)

    def moved(self, made: Tensor) -> Tensor:
        return move(made, True)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func in (Tensor.to, Tensor.cpu):
            return _to(func, args, kwargs)
        target = kwargs.get("device")
        if target is None or torch.device(target).type == "meta":
            return func(*args, **kwargs)
        away = torch.device(target).type == AWAY.type
        if away and kwargs.get("generator") is not None:
            raise RuntimeError(f"Expected a '{AWAY.type}' device type for generator but found 'cpu'")
        gradient = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs | {"device": "cpu"})
        return move(made, away).requires_grad_(gradient)


def _to(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    x, *rest = args
    target: Any = "cpu" if func is Tensor.cpu else kwargs.pop("device", None)
    if rest and isinstance(rest[0], Tensor):
        target, rest = rest[0].device, [rest[0].dtype, *rest[1:]]
    elif rest and (rest[0] is None or isinstance(rest[0], DEVICES)):
        target, *rest = rest
    other = kwargs.pop("other", None)
    if other is not None:
        target, rest = other.device, [other.dtype, *rest]
    rest = [None, *rest] if rest and rest[0] is None else rest
    if target is not None and torch.device(target).type == "meta":
        return func(x, target, *rest, **kwargs)
    made = x.to(*rest, **kwargs) if [one for one in rest if one is not None] or kwargs else x
    return made if target is None else move(made, torch.device(target).type == AWAY.type)
