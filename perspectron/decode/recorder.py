"""Records what PyTorch does in one step of a model as a tape of native instructions.

Every operation that depends on the token or the state becomes an instruction; what depends on weights alone is computed
once. Views become strides, so that they cost nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from ctypes import Array, c_int64
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from perspectron.decode.operations import HANDLERS, rounds
from perspectron.native import tape
from perspectron.native.tape import Tape, Unrecordable, memory
from perspectron.ops import attention, pdr
from perspectron.ops.packed import packed_linear

ASKED = (
    "_local_scalar_dense", "item", "resolve_conj", "is_nonzero", "nonzero", "equal", "_unique2", "masked_select",
)  # fmt: skip
"""Operations whose results the program reads (`tolist` calls `resolve_conj`), or have shapes that depend on numbers."""
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
SHAPED = (*EMPTY, "new_zeros", "new_ones", "zeros_like", "ones_like")
"""Operations that read only the shapes of what they are given."""
TOLERANCE = {torch.bfloat16: 2**-6}
"""A recording must give the modules' numbers up to this share of the largest; 1e-4 where a type is not listed."""


PIECE = 1 << 14
"""Numbers that are compared at once."""


class Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: telling the compiler to stay away would import it, which takes seconds."""
        return False


class Recorder(Mode):
    """Context in which operations that depend on these tensors, the bases of the tape, are written on it.

    Unrecordable: an operation without an instruction, that draws random numbers, that asks for a number which a run may
    change, or that writes into memory from before, other than the bases.

    rings: keys and values of growing caches, in turn. before_LB3: for each of these caches, its part of a `tape.Table`
    [L,B,3]; one of the bases.
    """

    def __init__(
        self, bases: Sequence[Tensor], rings: Sequence[Tensor] = (), before_LB3: Tensor | None = None
    ) -> None:
        super().__init__()
        self._before = dict[int, Tensor]()
        if before_LB3 is not None:
            self._before = {memory(x): before_LB3[at // 2] for at, x in enumerate(rings)}
        self.tape = Tape(bases, rings)
        self._dynamic = set(self.tape.bases)
        # Memory of constants that were made here; True if they hold nothing yet.
        self._constant = dict[int, bool]()
        self.rehearses = False
        """While True, the functions given to `aside` are not called."""
        self.read = list[Tensor]()
        """Weights and other tensors that are read only while recording, for results that runs take as they are."""

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
        out = packed_linear(*args) if name == "packed_linear" else func(*args, **kwargs)
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.tape.kept += made
        if not live and not any(self.live(x) for x in written):
            self._folded(name, given, made, written)
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
        handler(self.tape, out, args, kwargs)
        return out

    def _folded(self, name: str, given: list[Tensor], made: list[Tensor], written: list[Tensor]) -> None:
        """Note in `read` the tensors from before that an operation reads which runs do not repeat."""
        outside = [x for x in given if memory(x) not in self._constant and not self.live(x)]
        if any(memory(x) not in self._constant for x in written):
            raise Unrecordable("an operation that writes into a weight or a buffer")
        views = made and not written and {memory(x) for x in made} <= {memory(x) for x in given}
        if name not in SHAPED and (name in ASKED or not views):
            self.read += outside

    def live(self, x: Tensor) -> bool:
        """True if a run may change the tensor."""
        return memory(x) in self._dynamic

    def attended(
        self,
        q_BH1K: Tensor,
        ring: tuple[Tensor, Tensor],
        at: attention.Places,
        scale: float | None,
        cap: float | None,
    ) -> Tensor:
        """`ops.attention.stepped`, recorded so that each run attends to the slots filled by then."""
        k, v = ring
        with _disable_current_modes():
            out: Tensor = attention.stepped(q_BH1K, ring, at, scale=scale, cap=cap).contiguous()
            q = tape.contiguous(self.tape, q_BH1K, last=True)
            scale = q_BH1K.shape[-1] ** -0.5 if scale is None else scale
            tape.attend(self.tape, out, q, k, v, at.length_B, scale, cap, self._before.get(memory(k)))
        self._dynamic.add(memory(out))
        return out

    def before(self, k_BHSK: Tensor) -> Tensor | None:
        """Number of tokens [B] in pieces, before those in the slots of a growing cache; None if it has no table."""
        before_B3 = self._before.get(memory(k_BHSK))
        return None if before_B3 is None else before_B3[:, 0]

    def widened(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """x Wᵀ + b for a 16-bit matrix, which the instruction reads without converting it."""
        with _disable_current_modes():
            out = F.linear(x, weight_NK.to(x.dtype), bias_N)
            tape.product(self.tape, out, x, weight_NK.mT, bias_N)
        self._dynamic.add(memory(out))
        return out

    def scanned(
        self, q_B1R: Tensor, k_B1R: Tensor, v_B1D: Tensor, gamma_B1D: Tensor, state_BDR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`ops.pdr.scan` of one token by the kernel, which goes through the state once."""
        self._open(state_BDR)
        with _disable_current_modes():
            out = torch.zeros_like(v_B1D, memory_format=torch.contiguous_format)
            tape.scan(self.tape, out, q_B1R, k_B1R, v_B1D, gamma_B1D, state_BDR)
        self._dynamic.add(memory(out))
        return out, state_BDR

    def aside(self, function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
        """The result of a function of tensors, shaped as `x`, for a part of the model whose operations depend on the
        numbers: a run calls it between two parts of the tape. While `rehearses`, `x` itself takes its place, so that no
        experts are fetched from memory or a disk that no text needs."""

        def result() -> Tensor:
            return x if self.rehearses else function(x, *more)

        @torch.inference_mode()
        def again() -> None:
            out.copy_(result())

        self.tape.call(again, (x, *more))
        with _disable_current_modes():
            out = result().clone(memory_format=torch.contiguous_format)
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
        """Allow writes to a constant: runs begin with what it holds now. Unrecordable: not made here, or read."""
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


class Beside(Mode):
    """Context in which the modules take a step alongside a tape, to compare the two. The modules use their own results,
    except of operations that round (packed products, and results in bfloat16): there they go on with the tape's.
    Leaving it ends the tape's run.

    Unrecordable: at such an operation the tape reads other numbers than the modules, or gives other results than they
    do for the same numbers.
    """

    def __init__(self, written: Tape, places: Array[c_int64]) -> None:
        super().__init__()
        self._tape, self._places, self._at = written, places, 0
        self._rounded = deque(written.rounded)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        packed = name == "packed_linear"
        own = None if packed else func(*args, **kwargs)
        if not packed and not (isinstance(own, Tensor) and self._rounds(name, args[0], own)):
            return own
        at, x, y = self._rounded.popleft() if self._rounded else (0, args[0].new_empty(0), None)
        self._run(at + 1)
        if x.shape != args[0].shape or not near(x, args[0]):
            raise Unrecordable(f"{name} does not read what it reads in the modules")
        wanted = packed_linear(x.contiguous(), *args[1:]) if packed else func(x, *args[1:], **kwargs)
        if y is None:
            return wanted
        if not (torch.equal(y, wanted) if packed else near(y, wanted)):
            raise Unrecordable(f"{name} does not give what it gives in the modules")
        return y

    def _rounds(self, name: str, x: Any, own: Tensor) -> bool:
        """True if an operation's result is the next rounded one on the tape."""
        if name == "linear":
            return own.dtype is torch.bfloat16
        if name != "to" or not self._rounded or not rounds(x, own):
            return False
        return self._rounded[0][1].shape == x.shape  # constants are not on the tape

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[0] is None:
            self._run(len(self._tape) + 1)

    def attended(
        self,
        q_BH1K: Tensor,
        ring: tuple[Tensor, Tensor],
        at: attention.Places,
        scale: float | None,
        cap: float | None,
    ) -> Tensor:
        """`ops.attention.stepped`, as the modules compute it."""
        with _disable_current_modes():
            return attention.stepped(q_BH1K, ring, at, scale=scale, cap=cap)

    def before(self, k_BHSK: Tensor) -> Tensor | None:
        """None: states without a text have no pieces."""
        return None

    def widened(self, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """x Wᵀ + b for a 16-bit matrix, as the modules compute it."""
        with _disable_current_modes():
            return F.linear(x, weight_NK.to(x.dtype), bias_N)

    def scanned(
        self, q_B1R: Tensor, k_B1R: Tensor, v_B1D: Tensor, gamma_B1D: Tensor, state_BDR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`ops.pdr.scan`, as the modules compute it."""
        with _disable_current_modes():
            return pdr.scan(q_B1R, k_B1R, v_B1D, gamma_B1D, state_BDR, scale=1, consume_state=True)

    def aside(self, function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
        """A copy of the first tensor, as in `Recorder.aside` while it rehearses."""
        with _disable_current_modes():
            return x.clone()

    def _run(self, end: int) -> None:
        self._tape.advance(self._places, self._at, end)
        self._at = end


def near(found: Tensor, wanted: Tensor) -> bool:
    """True if the numbers are the same up to TOLERANCE of the largest."""
    if wanted.numel() == 0:
        return True
    share = TOLERANCE.get(wanted.dtype, 1e-4)
    parts = [x.reshape(-1).split(PIECE) for x in (found, wanted)]  # a layer's state is megabytes
    largest = float(torch.stack([x.double().abs().max() for x in parts[1]]).max())
    pairs = ((a.double(), b.double()) for a, b in zip(*parts, strict=True))
    return all(torch.allclose(a, b, rtol=0, atol=share * largest, equal_nan=True) for a, b in pairs)
