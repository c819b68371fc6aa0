"""Handlers that write operations of PyTorch as instructions of a tape.

A handler gets the tape, the operation's result and its arguments. An operation without a handler cannot be recorded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perspectron.native import tape
from perspectron.native.tape import Tape, Unrecordable

Handler = Callable[[Tape, Any, tuple[Any, ...], dict[str, Any]], None]
HANDLERS: dict[str, Handler] = {}
"""Handlers by the name under which a recorder meets an operation in inference mode."""


def records(*names: str) -> Callable[[Handler], Handler]:
    def decorate(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return decorate


def operand(x: Any, like: Tensor) -> Tensor:
    """A tensor as it is, a number as a tensor of the dtype of `like`."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=like.dtype)


def filled(args: tuple[Any, ...], first: int, *rest: Any) -> tuple[Any, ...]:
    """Arguments with defaults filled in: the first `first` are always given, `rest` are the defaults of the others."""
    return args + rest[len(args) - first :]


def single(out: Any) -> Tensor:
    """The first result; that of an operation in place is what it wrote into."""
    return out if isinstance(out, Tensor) else out[0]


def rounds(x: Tensor, out: Tensor) -> bool:
    """True if a copy rounds float32 numbers, whose last bits may differ in a run, to bfloat16."""
    return out.dtype is torch.bfloat16 and x.dtype is torch.float32


# ---------------------------------------------------------------- elementwise


def _unary(code: str, *names: str) -> None:
    @records(*names)
    def write(to: Tape, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if code == "not" and args[0].dtype is not torch.bool:
            raise Unrecordable("operations on bits")
        if code == "copy" and rounds(args[0], out):
            to.rounded.append((len(to), args[0], out))
        tape.each(to, code, single(out), args[0])


for _code, _names in {
    "copy": ("clone", "to", "contiguous"),
    "exp": ("exp", "exp_"), "log": ("log",), "log1p": ("log1p",), "sine": ("sin",), "cosine": ("cos",),
    "tanh": ("tanh", "tanh_"), "sigmoid": ("sigmoid", "sigmoid_"), "silu": ("silu", "silu_"),
    "log_sigmoid": ("log_sigmoid",), "root": ("sqrt", "sqrt_"),
    "inverse_root": ("rsqrt", "rsqrt_"), "inverse": ("reciprocal", "reciprocal_"), "magnitude": ("abs",),
    "not": ("bitwise_not", "logical_not"),
}.items():  # fmt: skip
    _unary(_code, *_names)


def _binary(code: str, *names: str, swapped: bool = False) -> None:
    @records(*names)
    def write(to: Tape, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise Unrecordable(f"{code} with {', '.join(kwargs)}")
        out, given = single(out), args[:2]
        kinds = out if out.dtype is not torch.bool else next(x for x in given if isinstance(x, Tensor))
        if code in ("both", "either") and any(operand(x, kinds).dtype is not torch.bool for x in given):
            raise Unrecordable("operations on bits")
        a, b = (operand(x, kinds) for x in (reversed(given) if swapped else given))
        tape.each(to, code, out, a, b)


for _code, _names in {
    "mul": ("mul", "mul_"), "div": ("div", "div_"), "remainder": ("remainder",),
    "floor_divide": ("floor_divide",), "least": ("minimum", "clamp_max"),
    "greatest": ("maximum", "clamp_min", "clamp_min_"), "equal": ("eq",), "different": ("ne",), "less": ("lt",),
    "at_most": ("le",), "both": ("logical_and", "__and__"), "either": ("logical_or", "__or__"),
}.items():  # fmt: skip
    _binary(_code, *_names)
_binary("less", "gt", swapped=True)
_binary("at_most", "ge", swapped=True)


def _sum(to: Tape, out: Tensor, a: Any, b: Any, share: float) -> None:
    if not isinstance(b, Tensor):
        tape.each(to, "add_scalar", out, a, numbers=(share * b, 1))
    else:
        tape.each(to, "add", out, operand(a, out), b, numbers=(share,))


@records("rsub")
def _rsub(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("alpha", 1) != 1 or len(args) > 2:
        raise Unrecordable("rsub with a share")
    tape.each(to, "add", out, operand(args[1], out), args[0], numbers=(-1,))


@records("pow")
def _pow(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, power = args
    if isinstance(power, Tensor) or power not in (2, 0.5, -0.5):
        tape.each(to, "power", out, operand(x, out), operand(power, out))
    elif power == 2:
        tape.each(to, "mul", out, x, x)
    else:
        tape.each(to, "root" if power > 0 else "inverse_root", out, x)


@records("clamp", "clamp_")
def _clamp(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bounds = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
    given = args[0]
    for name, code in (("min", "greatest"), ("max", "least")):
        if bounds.get(name) is not None:
            tape.each(to, code, out, given, operand(bounds[name], out))
            given = out


@records("gelu")
def _gelu(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    code = "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu"
    tape.each(to, code, out, args[0])


@records("softplus")
def _softplus(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, beta, threshold = filled(args, 1, 1, 20)
    tape.each(to, "softplus", out, x, numbers=(beta, threshold))


@records("fill_", "zero_")
def _fill(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 1 and isinstance(args[1], Tensor):
        tape.each(to, "copy", out, args[1])
    else:
        tape.each(to, "fill", out, numbers=(*args[1:], 0)[:1])


# ---------------------------------------------------------------- concatenation and indexing


@records("cat")
def _cat(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dim, at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim, 0
    for part in args[0]:
        if part.numel() > 0:
            tape.each(to, "copy", out.narrow(dim, at, part.shape[dim]), part)
            at += part.shape[dim]


@records("stack")
def _stack(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for i, part in enumerate(args[0]):
        tape.each(to, "copy", out.select(dim, i), part)


@records("repeat_interleave")
def _repeated(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, times, dim = args
    parts = out.unflatten(dim, (-1, times))
    tape.each(to, "copy", parts, x.unsqueeze(dim % x.ndim + 1).expand(parts.shape))


@records("pad")
def _pad(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, pads = args[0], args[1]
    modes = {x for x in (*args, *kwargs.values()) if isinstance(x, str)}
    if modes - {"constant"} or min(pads, default=0) < 0:
        raise Unrecordable("pad")
    value = next((a for a in args[2:] if isinstance(a, (int, float))), kwargs.get("value", 0)) or 0
    tape.each(to, "fill", out, numbers=(value,))
    inner = out
    for i in range(len(pads) // 2):
        inner = inner.narrow(-1 - i, pads[2 * i], x.shape[-1 - i])
    tape.each(to, "copy", inner, x)


@records("embedding")
def _embedding(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    weight, index = args[:2]
    _picked(to, out.view(-1, weight.shape[1]), weight, index.reshape(-1), 0)


def _picked(to: Tape, out: Tensor, x: Tensor, index_N: Tensor, dim: int) -> None:
    places = [-1 if d == dim % out.ndim else 1 for d in range(out.ndim)]
    tape.moved(to, "gather", out, x, index_N.view(places).expand(out.shape), dim % out.ndim)


@records("scatter_")
def _scatter(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise Unrecordable("scatter with a reduction")
    _, dim, index, source = args
    source = operand(source, out).expand(index.shape) if not isinstance(source, Tensor) else source
    tape.moved(to, "scatter", out, source, index, dim % out.ndim)


@records("cumsum")
def _cumsum(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, dim = args[:2]
    for i in range(x.shape[dim]):
        before = [out.select(dim, i - 1)] if i else []
        tape.each(to, "add" if i else "copy", out.select(dim, i), x.select(dim, i), *before, numbers=(1,))


# ---------------------------------------------------------------- reductions and norms


def _dims(x: Tensor, dims: Any) -> list[int]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(x.ndim))
    return [dims] if isinstance(dims, int) else list(dims)


def _reduction(code: str, *names: str) -> None:
    @records(*names)
    def write(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0]
        dims = _dims(x, args[1] if len(args) > 1 else kwargs.get("dim"))
        tape.reduced(to, code, out, x, dims)


for _code, _name in (("sum", "sum"), ("most", "amax"), ("fewest", "amin"), ("any", "any")):
    _reduction(_code, _name)


@records("mean")
def _mean(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0]
    dims = _dims(x, args[1] if len(args) > 1 else kwargs.get("dim"))
    tape.reduced(to, "sum", out, x, dims, out.numel() / max(1, x.numel()))


@records("linalg_vector_norm")
def _norm(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, power, dims = filled(args, 1, 2, None)[:3]
    if power != 2:
        raise Unrecordable(f"a norm of order {power}")
    tape.reduced(to, "norm", out, x, _dims(x, kwargs.get("dim", dims)))


@records("softmax")
def _softmax(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args[1] % out.ndim != out.ndim - 1 or out.dtype is not args[0].dtype:
        raise Unrecordable("softmax over another dimension than the last")
    tape.by_rows(to, "softmax", out, args[0])


@records("rms_norm")
def _rms_norm(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, shape, weight, eps = filled(args, 2, None, None)
    if len(shape) != 1:
        raise Unrecordable("a norm over several dimensions")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    tape.by_rows(to, "rms_norm", out, x, weight, eps=eps)


@records("layer_norm")
def _layer_norm(to: Tape, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, shape, weight, bias, eps = filled(args, 2, None, None, 1e-5)[:5]
    if len(shape) != 1:
        raise Unrecordable("a norm over several dimensions")
    tape.by_rows(to, "layer_norm", single(out), x, weight, bias, eps=eps)


# ---------------------------------------------------------------- products


@records("mm", "bmm", "matmul")
def _matmul(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    a, b = args[:2]
    if b.ndim == 1:
        b, out = b[:, None], out[..., None]
    if a.ndim == 1:
        a, out = a[None], out[..., None, :]
    tape.product(to, out, a, b)


@records("linear")
def _linear(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, weight, bias = filled(args, 2, None)
    if x.dtype is torch.bfloat16:
        to.rounded.append((len(to), x, out))
    if x.ndim == 1:
        x, out = x[None], out[None]
    tape.product(to, out, x, weight.mT, bias)


@records("packed_linear")
def _packed(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, codes, scales, format, _, backend = args
    if backend not in ("auto", "native"):
        raise Unrecordable(f"packed products by backend {backend!r}")
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise Unrecordable("packed matrices whose numbers do not lie together")
    tape.packed(to, out, x, codes, scales, format)


@records("linalg_cholesky_ex")
def _cholesky(to: Tape, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("upper"):
        raise Unrecordable("an upper factor")
    tape.cholesky(to, out[0], args[0])  # no step asks whether it succeeded


@records("linalg_solve_triangular")
def _solve(to: Tape, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not kwargs.get("left", True):
        raise Unrecordable("a system from the right")
    upper, ones = kwargs["upper"], kwargs.get("unitriangular", False)
    tape.solve(to, out, args[0], args[1], upper=upper, ones=ones)


_PLAIN: dict[str, Handler] = {
    "add add_": lambda to, out, args, more: _sum(to, out, args[0], args[1], more.get("alpha", 1)),
    "sub sub_": lambda to, out, args, more: _sum(to, out, args[0], args[1], -more.get("alpha", 1)),
    "neg": lambda to, out, args, more: tape.each(to, "add_scalar", out, args[0], numbers=(0, -1)),
    "square": lambda to, out, args, more: tape.each(to, "mul", out, args[0], args[0]),
    "relu relu_": lambda to, out, args, more: tape.each(to, "greatest", out, args[0], operand(0, out)),
    "lerp lerp_": lambda to, out, args, more: tape.each(to, "lerp", out, *args[:2], operand(args[2], out)),
    "addcmul addcmul_":
        lambda to, out, args, more: tape.each(to, "add_product", out, *args[:3], numbers=(more.get("value", 1),)),
    "where": lambda to, out, args, more: tape.each(to, "where", out, args[0], *(operand(x, out) for x in args[1:3])),
    "masked_fill": lambda to, out, args, more: tape.each(to, "where", out, args[1], operand(args[2], out), args[0]),
    "reshape flatten":  # where it is no view, it is a contiguous copy
        lambda to, out, args, more: tape.each(to, "copy", out.view(args[0].shape), args[0]),
    "copy_": lambda to, out, args, more: tape.each(to, "copy", out, args[1]),
    "zeros_like ones_like full_like new_zeros new_ones new_full":
        lambda to, out, args, more: tape.each(to, "copy", out, out.clone()),
    "index_select": lambda to, out, args, more: _picked(to, out, args[0], args[2], args[1]),
    "gather": lambda to, out, args, more: tape.moved(to, "gather", out, args[0], args[2], args[1] % out.ndim),
    "addmm baddbmm baddbmm_": lambda to, out, args, more: tape.product(
        to, out, args[1], args[2], args[0], more.get("alpha", 1), more.get("beta", 1)),
}  # fmt: skip
for _plain, _handler in _PLAIN.items():
    records(*_plain.split())(_handler)
