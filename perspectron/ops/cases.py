"""Cases of `perspectron.ops.selftest`: recurrent operations here, the others in `perspectron.ops.layer_cases`.

Shapes: as the operations have them; B batch, T time, H heads, D and V value widths, R and K columns.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native
from perspectron.ops import conv, delta, gla, layer_cases, pdr
from perspectron.ops.case import LOOSE, Case, Tensors, drawn, gates, rounded, steps
from perspectron.ops.triton import scan as on_gpu
from perspectron.util import registry


def cases(device: torch.device) -> list[Case]:
    """All cases for a device, their inputs on the CPU; small where Triton is interpreted."""
    return [*_memories(device), *_deltas(device), *_others(device)]


# ---------------------------------------------------------------- memories with gates


def _interpreted(device: torch.device) -> bool:
    return device.type == "cpu" and bool(_kernels(device))


def _sizes(device: torch.device) -> list[tuple[int, int, int, int]]:
    """Sizes B, T, D and R of the memories."""
    odd = [(1, T, 96 if device.type == "cuda" else 24, 16) for T in (1, 5, 63, 65, 127, 257)]
    if device.type == "cuda":
        wide = [(4, 1024, 256, 64), (2, 300, 100, 24), (2, 300, 96, 128), (1, 300, 96, 256)]
        return [*odd, *wide, *((2, 300, 40, R) for R in (8, 3, 2, 1))]
    return [(1, 19, 5, 3)] if _interpreted(device) else [(2, 130, 40, 24), *odd]


def _kernels(device: torch.device) -> tuple[str, ...]:
    """The backend of Triton's kernels where they run, else none."""
    return ("triton",) if on_gpu.obstacle(1, torch.zeros(1, device=device)) is None else ()


def _native(device: torch.device) -> tuple[str, ...]:
    return ("native",) if device.type == "cpu" and native.available() else ()


def _memories(device: torch.device) -> Iterator[Case]:
    gpu = _kernels(device)
    for B, T, D, R in _sizes(device):
        q, k, v, state = drawn((B, T, R), (B, T, R), (B, T, D), (B, D, R))
        shape, backends = f"B {B}, T {T}, D {D}, R {R}", ("torch", *_native(device), *gpu)
        first = Case("pdr", shape, _pdr, backends, (q, k, v, gates(B, T, D), state))
        q, k, v, state = drawn((B, 2, T, D), (B, 2, T, D), (B, 2, T, R), (B, 2, D, R))
        shape, others = f"B {B}, T {T}, H 2, K {D}, V {R}", ("torch", "auto", *gpu)
        second = Case("gla", shape, _gla, others, (q, k, v, gates(B, 2, T, D), state))
        third = Case("ssd", shape, _gla, others, (q[:, :1], k[:, :1], v, gates(B, 2, T, 1), state))
        for case in (first, second, third):
            yield case
            if T in (1, 63):  # a step, and a prompt
                yield replace(steps(case), backends=("auto", *(x for x in case.backends if x != "auto")))
            if T == 65:  # the kernels of Triton take float32, to which the operation brings it
                yield rounded(case)


def _deltas(device: torch.device) -> Iterator[Case]:
    B, backends = 2, ("torch", "auto", *_kernels(device))
    sizes = [(T, 16, 24) for T in ((7,) if _interpreted(device) else (130, 1, 5, 31, 33, 65))]
    wide = (
        [(70, 64, 64), (70, 128, 128)] if device.type == "cuda" else []
    )  # sizes of models: RWKV-7, then the others
    for T, K, V in sizes + wide:
        q, k, v, state = drawn((B, 2, T, K), (B, 2, T, K), (B, 2, T, V), (B, 2, K, V))
        k, shape = F.normalize(k, dim=-1), f"B {B}, T {T}, H 2, K {K}, V {V}"
        made = []
        for op, width in (("delta", K), ("gated delta", 1)) if K != 64 else ():
            inputs = (q, k, 1.5 * k, v, gates(B, 2, T, width), state)
            made.append(Case(op, shape, _delta, backends, inputs, *LOOSE))
        rwkv7 = (q, 0.5 * k, v, -k, 0.5 * k, gates(B, 2, T, K), state)
        if K != 128:
            made.append(Case("rwkv7", shape, _rwkv7, backends, rwkv7, *LOOSE))
        for case in made:
            yield case
            if T == 1:
                yield steps(case)
            if T == 33:
                yield rounded(case)


def _pdr(backend: str, *inputs: Tensor) -> Tensors:
    return pdr.scan(*inputs, backend=backend)


def _gla(backend: str, *inputs: Tensor) -> Tensors:
    return gla.scan(*inputs, backend=backend)


def _delta(backend: str, *inputs: Tensor) -> Tensors:
    return delta.scan(*inputs, backend=backend)


def _rwkv7(backend: str, *inputs: Tensor) -> Tensors:
    return delta.scan_rwkv7(*inputs, backend=backend)


# ---------------------------------------------------------------- others that recur


def _others(device: torch.device) -> Iterator[Case]:
    """The other operations that have a reference, those of designs too."""
    yield from _recurrent()
    yield from layer_cases.cases(_kernels(device))
    for _, made in registry.parts("cases"):
        yield from made()


def _recurrent() -> Iterator[Case]:
    B, K = 2, 16
    for T in (1, 65):
        u, window, weight, bias = drawn((B, T, K), (B, 3, K), (K, 1, 4), (K,))
        begins = torch.arange(T).expand(B, T) % 31 == torch.tensor([[5], [9]])
        inputs = (u, window, weight, bias, begins)
        yield (case := Case("conv", f"B {B}, T {T}, C {K}, W 4", _conv, ("auto",), inputs, *LOOSE))
        yield steps(case)


def _conv(backend: str, u: Tensor, window: Tensor, weight: Tensor, bias: Tensor, begins: Tensor) -> Tensors:
    if backend != "naive":
        return conv.convolve(u, window, weight, bias, begins, None)
    T, Z = u.shape[1], window.shape[1]
    all_BSC = torch.cat([window, u], 1)
    document_BS = F.pad(begins.long().cumsum(1), (Z, 0))
    outputs = []
    for t in range(Z, Z + T):
        same = (document_BS[:, t - Z : t + 1] == document_BS[:, t : t + 1])[:, :, None]
        outputs.append(F.silu((all_BSC[:, t - Z : t + 1] * same * weight[:, 0].T).sum(1) + bias))
    same = (document_BS[:, T:] == document_BS[:, -1:])[:, :, None]
    return torch.stack(outputs, 1), all_BSC[:, T:] * same
