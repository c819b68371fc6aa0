"""Writing down what PyTorch does in one step of a model, as a tape of native instructions.

Every operation that depends on the token or the state becomes an instruction; what depends on weights alone is computed
once. Views become strides, so that they cost nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from perspectron.native import tape
from perspectron.native.tape import Tape, Unrecordable, memory
from perspectron.ops import attention

Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], None]
HANDLERS: dict[str, Handler] = {}
"""Functions that write an operation down, by its name; they get its result and its arguments."""

ASKED = (
    "_local_scalar_dense",
    "item",
    "resolve_conj",
    "is_nonzero",
    "nonzero",
    "equal",
    "_unique2",
    "masked_select",
)
"""Operations whose results steer the program (`tolist` asks for `resolve_conj`), or have shapes that depend on them."""
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class Recorder(TorchDispatchMode):
    """While it is entered, operations on what depends on `dynamic` tensors are written on the tape.

    Unrecordable: an operation that no instruction does, one that asks for a number that a run may change, or that
    writes into something made before, other than those tensors.
    """

    def __init__(self, dynamic: Sequence[Tensor], bases: Sequence[Tensor]) -> None:
        super().__init__()
        self.tape = Tape(bases)
        self._dynamic = {memory(x) for x in (*dynamic, *bases)}
        self._constant = dict[
            int, bool
        ]()  # memory of constants that were made here; True if they hold nothing yet

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: telling the compiler to stay away would import it, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.tape.kept += given
        written = [x for x in self._written(func, args, kwargs) if x.numel() > 0]
        live = any(self.live(x) for x in given)
        if live and torch.Tag.nondeterministic_seeded in func.tags:
            raise Unrecordable(f"{name}, which draws")
        if live and name in ASKED:
            raise Unrecordable(f"{name} of what a step changes")
        if live or any(self.live(x) for x in written):
            for x in written:
                self._open(x)
        out = func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.tape.kept += made
        if not live and not any(self.live(x) for x in written):
            sources = {memory(x) for x in given}
            for x in made:
                if memory(x) not in sources:
                    self._constant[memory(x)] = name in EMPTY
            for x in written:
                self._constant[memory(x)] = False
            return out
        sources = {memory(x) for x in given}
        if not made and not written:
            raise Unrecordable(f"{name} of what a step changes")
        if not written and all(memory(x) in sources for x in made):
            return out  # a view
        if name in EMPTY:
            for x in made:
                self._constant[memory(x)] = True
            return out
        handler = HANDLERS.get(name)
        if handler is None:
            raise Unrecordable(str(func))
        self._dynamic.update(memory(x) for x in (*made, *written))
        handler(self, out, args, kwargs)
        return out

    def live(self, x: Tensor) -> bool:
        """True if a run may change it."""
        return memory(x) in self._dynamic

    def attended(
        self, q_BH1K: Tensor, ring: tuple[Tensor, Tensor], at: attention.Places, scale: float | None
    ) -> Tensor:
        """`ops.attention.stepped`, of as many slots as are filled when it runs."""
        k, v = ring
        with _disable_current_modes():
            out: Tensor = attention.stepped(q_BH1K, ring, at, scale=scale).contiguous()
            q = tape.contiguous(self.tape, q_BH1K, last=True)
            scale = q_BH1K.shape[-1] ** -0.5 if scale is None else scale
            tape.attend(self.tape, out, q, k, v, at.length_B, scale, k.stride(1) // k.stride(2))
        self._dynamic.add(memory(out))
        return out

    @staticmethod
    def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that an operation writes into."""
        schema = func._schema.arguments
        if not any(a.alias_info is not None and a.alias_info.is_write for a in schema):
            return []
        named = {a.name: x for a, x in zip(schema, args, strict=False)} | kwargs
        found = [named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
        return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]

    def _open(self, x: Tensor) -> None:
        """Let a constant be written into: each run begins with what it holds now."""
        if self.live(x):
            return
        if memory(x) not in self._constant:
            raise Unrecordable("an operation that writes into a weight or a buffer")
        if memory(x) in self.tape.used:
            raise Unrecordable("a constant that is read before it is written into")
        if not self._constant[memory(x)]:
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            tape.each(self.tape, "copy", whole, whole.clone())
        self._dynamic.add(memory(x))


def records(*names: str) -> Callable[[Handler], Handler]:
    def decorate(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return decorate


def operand(x: Any, like: Tensor) -> Tensor:
    """A number as a tensor of the result's kind."""
    if isinstance(x, Tensor):
        return x
    return torch.tensor(x, dtype=like.dtype if like.dtype is not torch.bool else torch.float64)


def filled(args: tuple[Any, ...], first: int, *rest: Any) -> tuple[Any, ...]:
    """The arguments, of which `first` are always given, with `rest` where the others are not."""
    return args + rest[len(args) - first :]


def single(out: Any) -> Tensor:
    """The first result; that of an operation in place is what it wrote into."""
    return out if isinstance(out, Tensor) else out[0]


# ---------------------------------------------------------------- place by place


def _unary(code: str, *names: str) -> None:
    @records(*names)
    def write(r: Recorder, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape.each(r.tape, code, single(out), args[0])


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
    def write(r: Recorder, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise Unrecordable(f"{code} with {', '.join(kwargs)}")
        a, b = (operand(x, single(out)) for x in (reversed(args[:2]) if swapped else args[:2]))
        tape.each(r.tape, code, single(out), a, b)


for _code, _names in {
    "mul": ("mul", "mul_"), "div": ("div", "div_"), "remainder": ("remainder",),
    "floor_divide": ("floor_divide",), "least": ("minimum", "clamp_max"),
    "greatest": ("maximum", "clamp_min", "clamp_min_"), "equal": ("eq",), "different": ("ne",), "less": ("lt",),
    "at_most": ("le",), "both": ("logical_and", "__and__"), "either": ("logical_or", "__or__"),
}.items():  # fmt: skip
    _binary(_code, *_names)
_binary("less", "gt", swapped=True)
_binary("at_most", "ge", swapped=True)


def _sum(r: Recorder, out: Tensor, a: Any, b: Any, share: float) -> None:
    if not isinstance(b, Tensor):
        tape.each(r.tape, "add_scalar", out, a, numbers=(share * b, 1))
    else:
        tape.each(r.tape, "add", out, operand(a, out), b, numbers=(share,))


@records("add", "add_")
def _add(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _sum(r, out, args[0], args[1], kwargs.get("alpha", 1))


@records("sub", "sub_")
def _sub(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _sum(r, out, args[0], args[1], -kwargs.get("alpha", 1))


@records("rsub")
def _rsub(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("alpha", 1) != 1 or len(args) > 2:
        raise Unrecordable("rsub with a share")
    tape.each(r.tape, "add", out, operand(args[1], out), args[0], numbers=(-1,))


@records("neg")
def _neg(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "add_scalar", out, args[0], numbers=(0, -1))


@records("square")
def _square(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "mul", out, args[0], args[0])


@records("pow")
def _pow(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, power = args
    if isinstance(power, Tensor) or power not in (2, 0.5, -0.5):
        tape.each(r.tape, "power", out, operand(x, out), operand(power, out))
    elif power == 2:
        tape.each(r.tape, "mul", out, x, x)
    else:
        tape.each(r.tape, "root" if power > 0 else "inverse_root", out, x)


@records("relu", "relu_")
def _relu(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "greatest", out, args[0], operand(0, out))


@records("clamp", "clamp_")
def _clamp(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bounds = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
    given = args[0]
    for name, code in (("min", "greatest"), ("max", "least")):
        if bounds.get(name) is not None:
            tape.each(r.tape, code, out, given, operand(bounds[name], out))
            given = out


@records("gelu")
def _gelu(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    code = "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu"
    tape.each(r.tape, code, out, args[0])


@records("softplus")
def _softplus(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, beta, threshold = filled(args, 1, 1, 20)
    tape.each(r.tape, "softplus", out, x, numbers=(beta, threshold))


@records("lerp", "lerp_")
def _lerp(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "lerp", out, args[0], args[1], operand(args[2], out))


@records("addcmul", "addcmul_")
def _addcmul(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "add_product", out, *args[:3], numbers=(kwargs.get("value", 1),))


@records("where")
def _where(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "where", out, args[0], *(operand(x, out) for x in args[1:3]))


@records("masked_fill")
def _masked_fill(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "where", out, args[1], operand(args[2], out), args[0])


@records("reshape", "flatten")
def _reshape(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(
        r.tape, "copy", out.view(args[0].shape), args[0]
    )  # where it is no view, it is a contiguous copy


@records("copy_")
def _copy(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "copy", out, args[1])


@records("fill_", "zero_")
def _fill(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 1 and isinstance(args[1], Tensor):
        tape.each(r.tape, "copy", out, args[1])
    else:
        tape.each(r.tape, "fill", out, numbers=(*args[1:], 0)[:1])


@records("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
def _made(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.each(r.tape, "copy", out, out.clone())


# ---------------------------------------------------------------- put together


@records("cat")
def _cat(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dim, at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim, 0
    for part in args[0]:
        if part.numel() > 0:
            tape.each(r.tape, "copy", out.narrow(dim, at, part.shape[dim]), part)
            at += part.shape[dim]


@records("stack")
def _stack(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for i, part in enumerate(args[0]):
        tape.each(r.tape, "copy", out.select(dim, i), part)


@records("pad")
def _pad(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, pads = args[0], args[1]
    if kwargs.get("mode", "constant") != "constant" or min(pads, default=0) < 0:
        raise Unrecordable("pad")
    value = next((a for a in args[2:] if isinstance(a, (int, float))), kwargs.get("value", 0)) or 0
    tape.each(r.tape, "fill", out, numbers=(value,))
    inner = out
    for i in range(len(pads) // 2):
        inner = inner.narrow(-1 - i, pads[2 * i], x.shape[-1 - i])
    tape.each(r.tape, "copy", inner, x)


@records("embedding")
def _embedding(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    weight, index = args[:2]
    _picked(r, out.view(-1, weight.shape[1]), weight, index.reshape(-1), 0)


@records("index_select")
def _index_select(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _picked(r, out, args[0], args[2], args[1])


def _picked(r: Recorder, out: Tensor, x: Tensor, index_N: Tensor, dim: int) -> None:
    places = [-1 if d == dim % out.ndim else 1 for d in range(out.ndim)]
    tape.moved(r.tape, "gather", out, x, index_N.view(places).expand(out.shape), dim % out.ndim)


@records("gather")
def _gather(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tape.moved(r.tape, "gather", out, args[0], args[2], args[1] % out.ndim)


@records("scatter_")
def _scatter(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise Unrecordable("scatter with a reduction")
    _, dim, index, source = args
    source = operand(source, out).expand(index.shape) if not isinstance(source, Tensor) else source
    tape.moved(r.tape, "scatter", out, source, index, dim % out.ndim)


@records("cumsum")
def _cumsum(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, dim = args[:2]
    for i in range(x.shape[dim]):
        before = [out.select(dim, i - 1)] if i else []
        tape.each(r.tape, "add" if i else "copy", out.select(dim, i), x.select(dim, i), *before, numbers=(1,))


# ---------------------------------------------------------------- taken together


def _dims(x: Tensor, dims: Any) -> list[int]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(x.ndim))
    return [dims] if isinstance(dims, int) else list(dims)


def _reduction(code: str, *names: str) -> None:
    @records(*names)
    def write(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0]
        dims = _dims(x, args[1] if len(args) > 1 else kwargs.get("dim"))
        tape.reduced(r.tape, code, out, x, dims)


_reduction("sum", "sum")
_reduction("most", "amax")
_reduction("fewest", "amin")
_reduction("any", "any")


@records("mean")
def _mean(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0]
    dims = _dims(x, args[1] if len(args) > 1 else kwargs.get("dim"))
    tape.reduced(r.tape, "sum", out, x, dims, out.numel() / x.numel())


@records("linalg_vector_norm")
def _norm(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, power, dims = filled(args, 1, 2, None)[:3]
    if power != 2:
        raise Unrecordable(f"a norm of order {power}")
    tape.reduced(r.tape, "norm", out, x, _dims(x, kwargs.get("dim", dims)))


@records("softmax")
def _softmax(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args[1] % out.ndim != out.ndim - 1 or out.dtype is not args[0].dtype:
        raise Unrecordable("softmax over another dimension than the last")
    tape.by_rows(r.tape, "softmax", out, args[0])


@records("rms_norm")
def _rms_norm(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, shape, weight, eps = filled(args, 2, None, None)
    if len(shape) != 1:
        raise Unrecordable("a norm over several dimensions")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    tape.by_rows(r.tape, "rms_norm", out, x, weight, eps=eps)


@records("layer_norm")
def _layer_norm(r: Recorder, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, shape, weight, bias, eps = filled(args, 2, None, None, 1e-5)[:5]
    if len(shape) != 1:
        raise Unrecordable("a norm over several dimensions")
    tape.by_rows(r.tape, "layer_norm", single(out), x, weight, bias, eps=eps)


# ---------------------------------------------------------------- products


@records("mm", "bmm", "matmul")
def _matmul(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    a, b = args[:2]
    if b.ndim == 1:
        b, out = b[:, None], out[..., None]
    if a.ndim == 1:
        a, out = a[None], out[..., None, :]
    tape.product(r.tape, out, a, b)


@records("linear")
def _linear(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, weight, bias = filled(args, 2, None)
    if x.ndim == 1:
        x, out = x[None], out[None]
    tape.product(r.tape, out, x, weight.mT, bias)


@records("addmm", "baddbmm", "baddbmm_")
def _added(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bias, a, b = args[:3]
    tape.product(r.tape, out, a, b, bias, kwargs.get("alpha", 1), kwargs.get("beta", 1))


@records("linalg_cholesky_ex")
def _cholesky(r: Recorder, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("upper"):
        raise Unrecordable("an upper factor")
    tape.cholesky(r.tape, out[0], args[0])  # whether there is one, nobody asks in a step


@records("linalg_solve_triangular")
def _solve(r: Recorder, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not kwargs.get("left", True):
        raise Unrecordable("a system from the right")
    upper, ones = kwargs["upper"], kwargs.get("unitriangular", False)
    tape.solve(r.tape, out, args[0], args[1], upper=upper, ones=ones)
