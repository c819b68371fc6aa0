"""Memories whose rows decay, on a GPU: what `pdr.scan` and `gla.scan` run by the kernels of
`perspectron.ops.triton.kernels.blocks` or, few tokens, of `perspectron.ops.triton.kernels.token`, whose docstrings say
how.

Shapes: N memories, T time, D rows of a memory, R columns, A gate width (D or 1), n chunks, p parts of a sum over rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from perspectron.ops import dispatch
from perspectron.ops.triton import record
from perspectron.util.errors import BackendError

INSTALL = "pip install 'perspectron[triton]'"
SHORTEST = 16  # tokens that go by chunks; fewer go one by one
SEGMENT = 4096  # tokens whose states are held at once where no gradients are wanted


def obstacle(columns: int, *tensors: Tensor) -> str | None:
    """Why the kernels cannot run on these, with a state of `columns` columns, and what would work; None if they can."""
    if dispatch.under_tracing(*(x.detach() for x in tensors)):
        return "not under a compiler, a trace or a functional transform; use backend='torch'"
    if forward_ad._current_level >= 0:
        return "it has no forward-mode derivative; use backend='torch'"
    if record.version() is None:
        return f"triton is not installed: {INSTALL}"
    for x in tensors:
        if x.dtype != torch.float32:
            return f"got {x.dtype}, must be torch.float32; use backend='torch'"
        if x.device != tensors[0].device:
            return f"got tensors on {tensors[0].device} and {x.device}, must be on one device"
    from perspectron.ops.triton.kernels import token

    device = tensors[0].device
    if device.type != "cuda" and not (device.type == "cpu" and token.INTERPRETED):
        return f"got tensors on {device}, must be on cuda (or set TRITON_INTERPRET=1, before Python starts)"
    if columns > token.WIDEST:
        return f"{columns} columns of the state, must be ≤ {token.WIDEST}; use backend='torch'"
    return None


def wanted(backend: str, columns: int, *tensors: Tensor) -> bool:
    """True if the kernels are to run on these, with a state of `columns` columns. BackendError as `chosen`."""
    return chosen(backend, "PDR, GLA and SSD", tensors[0].device, lambda: obstacle(columns, *tensors))


def chosen(backend: str, what: str, device: torch.device, obstacle: Callable[[], str | None]) -> bool:
    """True if the kernels of `what` are to run: they are asked for, or `auto` takes them, which it does on CUDA once a
    selftest has passed there (`record.passed`). The log says once which it takes and, where only that is missing, how
    to make one. BackendError: they are asked for and cannot run."""
    if backend == "triton":
        if (why := obstacle()) is not None:
            raise BackendError(f"backend = 'triton': {why}")
        return True
    if backend != "auto" or device.type != "cuda" or obstacle() is not None:
        return False
    taken = record.passed(device)
    told = "auto runs Triton's kernels for %s on %s"
    if not taken:
        told = (
            "auto runs PyTorch's operations for %s on %s; to have Triton's kernels, test them once on this machine: "
            "perspectron selftest --device cuda"
        )
    dispatch.log_once(told, what, str(device))
    return taken


def pdr(
    q_BTR: Tensor, k_BTR: Tensor, v_BTD: Tensor, gamma_BTD: Tensor, state_BDR: Tensor
) -> tuple[Tensor, Tensor]:
    """(outputs [B,T,D], the last state); writes into the state where gradients are off."""
    return _run(True, v_BTD, k_BTR, gamma_BTD, q_BTR, state_BDR)


def gla(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor, gate_BHTA: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """(outputs [B,H,T,V], the last state); writes into the state where gradients are off."""
    B, H = v_BHTV.shape[:2]
    x, w, gate, reader, state = (
        y.reshape(B * H, *y.shape[2:]) for y in (k_BHTK, v_BHTV, gate_BHTA, q_BHTK, state_BHKV)
    )
    o, last = _run(False, x, w, gate, reader, state)
    if dispatch.gradients_off():
        return o.view(v_BHTV.shape), _written(last.view(state_BHKV.shape), state_BHKV)
    return o.view(v_BHTV.shape), last.view(state_BHKV.shape)


def _written(result: Tensor, state: Tensor) -> Tensor:
    """The state, into which the result is copied unless it is there already."""
    return state if result.data_ptr() == state.data_ptr() else state.copy_(result)


def _run(
    columns: bool, x_NTD: Tensor, w_NTR: Tensor, gate_NTA: Tensor, reader: Tensor, state_NDR: Tensor
) -> tuple[Tensor, Tensor]:
    x, w, gate, reader, state = (y.contiguous() for y in (x_NTD, w_NTR, gate_NTA, reader, state_NDR))
    if not dispatch.gradients_off():
        o, last = _Scan.apply(columns, x, w, gate, reader, state)
        return o, last
    o, _ = _forward(columns, x, w, gate, reader, state, state, keep=False)
    if not state.is_inference():  # autograd must see that a tensor it may have saved was overwritten
        torch.autograd.graph.increment_version(state)
    return o, _written(state, state_NDR)


class _Scan(torch.autograd.Function):
    """The kernels with their gradients; keeps the inputs and the states at the borders of chunks."""

    @staticmethod
    def forward(
        ctx: Any, columns: bool, x: Tensor, w: Tensor, gate: Tensor, reader: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        last = torch.empty_like(state)
        o, borders = _forward(columns, x, w, gate, reader, state, last, keep=True)
        ctx.save_for_backward(x, w, gate, reader, borders)
        ctx.columns = columns
        return o, last

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, do.contiguous(), dlast.contiguous())
        return None, *dispatch.once_differentiable("the scan on Triton", _backward, ctx.columns, *given)

    jvp = dispatch.refuse("the scan on Triton has no forward-mode derivative; use backend='torch'")


def precision() -> str:
    """The precision of the kernels' matrix products, as Triton names it: float32, which NVIDIA's matrix units make of
    three products, or TensorFloat-32 where PyTorch's own may take it (`torch.set_float32_matmul_precision`)."""
    if torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """The context in which x's device is the current one, to which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _forward(
    columns: bool, x: Tensor, w: Tensor, gate: Tensor, reader: Tensor, first: Tensor, last: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The outputs and, if kept, the states before each chunk; writes the last state."""
    from perspectron.ops.triton.kernels import blocks, token

    (N, T, D), R, wide = x.shape, w.shape[2], gate.shape[2] > 1
    if T >= SHORTEST:
        chunk = blocks.tile("states", R).chunk
        o, count = torch.empty_like(x if columns else w), -(-T // chunk)
        most = count if keep else min(count, SEGMENT // chunk)
        before = first.new_empty(N, most, D, R)
        pairs = x.new_empty(N, T, 16) if columns else o
        given, r = (x, gate), reader
        if wide:
            x, gate, r, A = _prepared(x, gate, None if columns else reader)
            pairs = pairs if columns else A
        for start in range(0, count, most):
            chunks = min(most, count - start)
            _states(False, wide, x, w, gate, first if start == 0 else last, last, before, start, chunks)
            kind, outputs = ("rows", (o, o, o, pairs)) if columns else ("columns", (pairs, o, o))
            span = (start, chunks)
            _chunks(kind, False, True, wide, x, w, gate, r, reader, before, before, outputs, span)
        if columns and wide:
            _inner(False, True, *given, o, o, o, o, pairs, o, o, o)
        return o, before if keep else None
    tile = token.tile(R)
    parts = -(-D // tile.rows)
    o = x.new_empty(N, T, D) if columns else x.new_empty(parts, N, T, R)
    borders = first.new_empty(N, -(-T // tile.chunk), D, R) if keep else None
    with _on(x):
        token.forward[(N, parts)](
            x, w, gate, reader, first, o, last, last if borders is None else borders, T, D, R,
            wide, columns, keep, tile.chunk, tile.rows, tile.columns, num_warps=tile.warps,
        )  # fmt: skip
    return o if columns else o.sum(0), borders


def _states(
    back: bool, wide: bool, x: Tensor, w: Tensor, gate: Tensor, first: Tensor, last: Tensor, borders: Tensor,
    start: int, chunks: int,
) -> None:  # fmt: skip
    """Write the states before `chunks` chunks from `start` on or, back, the adjoints after them, and the last one."""
    from perspectron.ops.triton.kernels import blocks

    (N, T, D), R = x.shape, w.shape[2]
    tile = blocks.tile("states", R)
    with _on(x):
        blocks.states[(N, -(-D // tile.rows), -(-R // tile.columns))](
            x, w, gate, first, last, borders, T, start, chunks, D, R,
            wide, back, tile.chunk, tile.rows, tile.columns, precision(), num_warps=tile.warps, num_stages=2,
        )  # fmt: skip


def _chunks(
    kind: str, grad: bool, read: bool, wide: bool, x: Tensor, w: Tensor, gate: Tensor, r: Tensor, c: Tensor,
    borders: Tensor, after: Tensor, outputs: tuple[Tensor, ...], span: tuple[int, int],
) -> None:  # fmt: skip
    """Run the kernel `kind`, which writes the outputs, on the chunks of a span: the first, and their number."""
    from perspectron.ops.triton.kernels import blocks

    (N, T, D), R = x.shape, w.shape[2]
    tile = blocks.tile(kind, R, grad and read)
    parts = -(-D // tile.rows) if kind == "rows" else -(-R // tile.columns)
    more = () if kind == "rows" else (N, len(outputs[0]))
    with _on(x):
        getattr(blocks, kind)[(N * span[1] * parts,)](
            x, w, gate, r, c, borders, after, *outputs, T, *span, D, R, *more,
            wide, grad, read, tile.chunk, tile.rows, tile.columns, precision(), num_warps=tile.warps, num_stages=2,
        )  # fmt: skip


def _prepared(x: Tensor, gate: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x times the gates to the end of its block of 16 tokens, the product of each block's gates, r times the gates from
    the start, and the products of tokens and readers [p,N,T,16]; the last two only if r is given."""
    from perspectron.ops.triton.kernels import rows

    N, T, D = x.shape
    parts, X, P = -(-D // rows.WIDTH), torch.empty_like(x), x.new_empty(N, -(-T // 16), D)
    R, A = (X, X) if r is None else (torch.empty_like(x), x.new_empty(parts, N, T, 16))
    with _on(x):
        rows.prepare[(N * -(-T // 16) * parts,)](
            x, gate, x if r is None else r, X, P, R, A, T, D, 1, N, r is not None, rows.WIDTH, num_warps=1
        )
    return X, P, R, A


def _inner(grad: bool, read: bool, x: Tensor, *given: Tensor) -> None:
    """Run `rows.inner` on the blocks of 16 tokens."""
    from perspectron.ops.triton.kernels import rows

    N, T, D = x.shape
    with _on(x):
        rows.inner[(N * -(-T // 16) * -(-D // 32),)](x, *given, T, D, 1, grad, read, 32, num_warps=1)


def _backward(
    columns: bool, x: Tensor, w: Tensor, gate: Tensor, reader: Tensor, borders: Tensor, do: Tensor, dlast: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, w, the gate, the reader and the first state."""
    from perspectron.ops.triton.kernels import blocks, token

    (N, T, D), R, wide = x.shape, w.shape[2], gate.shape[2] > 1
    dx, dfirst = torch.empty_like(x), torch.empty_like(dlast)
    r, c = (do, reader) if columns else (reader, do)
    if T >= SHORTEST:
        after, chunks = torch.empty_like(borders), borders.shape[1]
        X, P, faded, A = _prepared(x, gate, r) if wide else (x, gate, r, x)
        _states(True, wide, faded, c, P, dlast, dfirst, after, 0, chunks)
        dw, dreader, dgate = torch.empty_like(w), torch.empty_like(reader), torch.empty_like(gate)
        given, dr = (wide, X, w, P, faded, c, borders, after), torch.empty_like(x) if columns else dreader
        if wide:  # the results of the first kernel stand where the gradients will
            pairs = x.new_empty(N, T, 16)
            _chunks("rows", True, True, *given, (dx, dgate, dr, pairs), (0, chunks))
            _inner(True, not columns, x, gate, r, dr, dx, dgate, pairs, dx, dgate, dr)
        else:
            tile = blocks.tile("gates", R)
            products = gate.new_empty(-(-D // tile.rows), 2, N, T)
            _chunks("rows", True, True, *given, (dx, products, dr, dr), (0, chunks))
            with _on(x):
                blocks.gates[(N * chunks,)](
                    x, w, gate, r, c, products, dgate, T, chunks, D, R, N, len(products), tile.chunk, tile.rows,
                    precision(), num_warps=tile.warps, num_stages=2,
                )  # fmt: skip
        _chunks("columns", True, columns, *given, (A, dw, dreader if columns else dw), (0, chunks))
        return dx, dw, dgate, dreader, dfirst
    few = token.tile(R)
    parts = -(-D // few.rows)
    dgate, dw = torch.empty_like(x), w.new_empty(parts, N, T, R)
    dreader = torch.empty_like(dw) if columns else torch.empty_like(x)
    with _on(x):
        token.backward[(N, parts)](
            x, w, gate, r, c, borders, dlast, dx, dw, dgate, dreader, dfirst, T, D, R,
            wide, columns, few.chunk, few.rows, few.columns, num_warps=few.warps,
        )  # fmt: skip
    dgate = dgate if wide else dgate.sum(2, keepdim=True)
    return dx, dw.sum(0), dgate, dreader.sum(0) if columns else dreader, dfirst
