"""Memories whose rows decay, on a GPU: what `pdr.scan` and `gla.scan` run by the kernels of
`perspectron.ops.triton.kernels`, whose docstring says how.

Shapes: N memories, T time, D rows of a memory, R columns, A gate width (D or 1), n chunks, p parts of a sum over rows.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from perspectron.errors import BackendError
from perspectron.ops import dispatch
from perspectron.ops.triton import record

INSTALL = "pip install 'perspectron[triton]'"


def obstacle(columns: int, *tensors: Tensor) -> str | None:
    """The reason why the kernels cannot run on these, with so many columns, and what would work; None if they can."""
    if dispatch.watched(*(x.detach() for x in tensors)):
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
    from perspectron.ops.triton import kernels

    device = tensors[0].device
    if device.type != "cuda" and not (device.type == "cpu" and kernels.INTERPRETED):
        return f"got tensors on {device}, must be on cuda (or set TRITON_INTERPRET=1, before Python starts)"
    if columns > kernels.WIDEST:
        return f"{columns} columns of the state, must be ≤ {kernels.WIDEST}; use backend='torch'"
    return None


def wanted(backend: str, columns: int, *tensors: Tensor) -> bool:
    """True if the kernels are to run: they are asked for, or `auto` takes them, which it does on CUDA once a selftest
    has passed there (`record.passed`). The log says once which it takes and, where only that is missing, how to make
    one. BackendError: they are asked for and cannot run."""
    if backend == "triton":
        if (why := obstacle(columns, *tensors)) is not None:
            raise BackendError(f"backend = 'triton': {why}")
        return True
    device = tensors[0].device
    if backend != "auto" or device.type != "cuda" or obstacle(columns, *tensors) is not None:
        return False
    if record.passed(device):
        dispatch.say("auto runs Triton's kernels for PDR, GLA and SSD on %s", str(device))
        return True
    dispatch.say(
        "auto runs PyTorch's operations on %s; to have Triton's kernels, test them once on this machine: "
        "perspectron selftest --device cuda",
        str(device),
    )
    return False


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
    """The state, which holds the result."""
    return state if result.data_ptr() == state.data_ptr() else state.copy_(result)


def _run(
    columns: bool, x_NTD: Tensor, w_NTR: Tensor, gate_NTA: Tensor, reader: Tensor, state_NDR: Tensor
) -> tuple[Tensor, Tensor]:
    x, w, gate, reader, state = (y.contiguous() for y in (x_NTD, w_NTR, gate_NTA, reader, state_NDR))
    if not dispatch.gradients_off():
        o, last = _Scan.apply(columns, x, w, gate, reader, state)
        return o, last
    o = _forward(columns, x, w, gate, reader, state, state, None)
    if not state.is_inference():  # autograd must see that what it saved is no more
        torch.autograd.graph.increment_version(state)
    return o, _written(state, state_NDR)


class _Scan(torch.autograd.Function):
    """The kernels with their gradients; keeps the inputs and the states at the borders of chunks."""

    @staticmethod
    def forward(
        ctx: Any, columns: bool, x: Tensor, w: Tensor, gate: Tensor, reader: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        from perspectron.ops.triton.kernels import tile

        N, D, R = state.shape
        last = torch.empty_like(state)
        borders = state.new_empty(N, -(-x.shape[1] // tile(R).chunk), D, R)
        o = _forward(columns, x, w, gate, reader, state, last, borders)
        ctx.save_for_backward(x, w, gate, reader, borders)
        ctx.columns = columns
        return o, last

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, do.contiguous(), dlast.contiguous())
        return None, *dispatch.once("the scan on Triton", _backward, ctx.columns, *given)

    jvp = dispatch.refuse("the scan on Triton has no forward-mode derivative; use backend='torch'")


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """The context in which x's device is the current one, to which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _forward(
    columns: bool, x: Tensor, w: Tensor, gate: Tensor, reader: Tensor, first: Tensor, last: Tensor,
    borders: Tensor | None,
) -> Tensor:  # fmt: skip
    """The outputs; writes the last state and, if given, those at the borders."""
    from perspectron.ops.triton import kernels

    (N, T, D), R = x.shape, w.shape[2]
    tile = kernels.tile(R)
    blocks = -(-D // tile.rows)
    o = x.new_empty(N, T, D) if columns else x.new_empty(blocks, N, T, R)
    with _on(x):
        kernels.forward[(N, blocks)](
            x, w, gate, reader, first, o, last, last if borders is None else borders, T, D, R,
            gate.shape[2] > 1, columns, borders is not None, tile.chunk, tile.rows, tile.columns,
            num_warps=tile.warps,
        )  # fmt: skip
    return o if columns else o.sum(0)


def _backward(
    columns: bool, x: Tensor, w: Tensor, gate: Tensor, reader: Tensor, borders: Tensor, do: Tensor, dlast: Tensor
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, w, the gate, the reader and the first state."""
    from perspectron.ops.triton import kernels

    (N, T, D), R = x.shape, w.shape[2]
    tile = kernels.tile(R)
    blocks = -(-D // tile.rows)
    dx, dgate, dfirst = torch.empty_like(x), torch.empty_like(x), torch.empty_like(dlast)
    dw = w.new_empty(blocks, N, T, R)
    dreader = torch.empty_like(dw) if columns else torch.empty_like(x)
    rows_columns = (do, reader) if columns else (reader, do)
    with _on(x):
        kernels.backward[(N, blocks)](
            x, w, gate, *rows_columns, borders, dlast, dx, dw, dgate, dreader, dfirst, T, D, R,
            gate.shape[2] > 1, columns, tile.chunk, tile.rows, tile.columns,
            num_warps=tile.warps,
        )  # fmt: skip
    dgate = dgate if gate.shape[2] > 1 else dgate.sum(2, keepdim=True)
    return dx, dw.sum(0), dgate, dreader.sum(0) if columns else dreader, dfirst
