"""Products of packed matrices (`perspectron.ops.packing`) with vectors (docs/designs/perspective.md#packed-weights).

The input of a product is rounded to 8 bits, token by token: step = max |x| / 127, x ≈ q·step; that of tiles, in each
group of 32 columns by itself. Sums of codes times q are exact, and the float arithmetic after them has a fixed order,
so every backend but the reference gives the same bits, whatever other tokens there are. (An exception is "triton" with
more than four tokens in a format with scales for groups; it has no kernels for tiles.)

Shapes: T tokens, N rows, K columns, S columns stored, G groups, R rows of a block, L = 16 lanes of a group.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from perspectron import native
from perspectron.ops import tiles
from perspectron.ops.dispatch import full_precision, known, log_once, refuse, under_tracing
from perspectron.ops.packing import GROUP, LAYOUTS, Packed, columns, dequantise, digits, parameters
from perspectron.ops.triton import packed as on_gpu
from perspectron.util.errors import BackendError

BACKENDS = ("auto", "naive", "torch", "native", "triton")
EXACT = 1024  # columns whose products of two int8 a float32 sums exactly: 127² · 1024 < 2²⁴
LANES = 16
DECODED = 1 << 22  # weights that are decoded at a time
PARTS = 1 << 22  # sums of lanes that are held at a time
NO_GRADIENT = "packed products have no derivatives, in reverse or in forward mode: train the float model"


def linear(x: Tensor, packed: Packed, *, backend: str = "auto") -> Tensor:
    """The product x Wᵀ [..., N] of x [..., K], computed in float32 on x rounded to 8 bits; in x's dtype.

    A token that is not finite gives NaN. backend: "native" is the compiled library, on a CPU; "triton" is kernels for a
    GPU; "torch" runs anywhere; "naive" computes in float64; "auto": native where it can, or, once a selftest has
    passed on the GPU, triton. No derivatives: backward and forward mode raise RuntimeError. BackendError: unknown, or
    it cannot run here.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the matrix {packed.shape[1]}")
    known(backend, BACKENDS)
    x_TK = x.reshape(-1, x.shape[-1])
    if _plain(x):
        y_TN = _linear(x_TK, packed, backend)
    elif _traced():
        y_TN = _linear_op(x_TK, packed.codes, packed.scales, packed.format, packed.shape[0], backend)
    else:
        y_TN = _Linear.apply(x_TK, packed.codes, packed.scales, packed.format, packed.shape[0], backend)
    return y_TN.view(*x.shape[:-1], packed.shape[0])


def swiglu(x: Tensor, gate: Packed, up: Packed, down: Packed, *, backend: str = "auto") -> Tensor:
    """The network W_down(SiLU(W_gate x) ⊙ W_up x) [..., D]; the input of each matrix is rounded to 8 bits. Dtype,
    backends and errors as in `linear`."""
    if not gate.format == up.format == down.format:
        raise ValueError(f"formats are {gate.format}, {up.format} and {down.format}, want one")
    D, hidden = x.shape[-1], gate.shape[0]
    if not (gate.shape[1] == D and up.shape == gate.shape and down.shape[1] == hidden):
        raise ValueError(f"x has {D} columns; gate, up, down are {gate.shape}, {up.shape}, {down.shape}")
    known(backend, BACKENDS)
    x_TD = x.reshape(-1, D)
    if _plain(x):
        y_TD = _swiglu(x_TD, (gate, up, down), backend)
    else:
        parts = [part for matrix in (gate, up, down) for part in (matrix.codes, matrix.scales)]
        apply = _swiglu_op if _traced() else _SwiGLU.apply
        y_TD = apply(x_TD, *parts, gate.format, hidden, down.shape[0], backend)
    return y_TD.view(*x.shape[:-1], down.shape[0])


def by_native(x: Tensor) -> bool:
    """True if `native.SwiGLU` may be called with x directly, as `swiglu` would call it in the end."""
    return x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() and _plain(x) and native.wanted()


def _linear(x_TK: Tensor, packed: Packed, backend: str) -> Tensor:
    x = x_TK.to(torch.float32).contiguous()
    backend = _backend(x, backend, packed)
    if backend == "native":
        y_TN = native.linear(x, *_pair(packed), packed.format, packed.shape[0])
    elif backend == "triton":
        y_TN = on_gpu.linear(x, packed)
    else:
        with full_precision(x):
            y_TN = (_naive if backend == "naive" else _torch)(x, packed)
    return y_TN.to(x_TK.dtype)


def _swiglu(x_TD: Tensor, weights: tuple[Packed, Packed, Packed], backend: str) -> Tensor:
    x, (gate, up, down) = x_TD.to(torch.float32).contiguous(), weights
    backend = _backend(x, backend, *weights)
    if backend == "triton":
        return on_gpu.swiglu(x, gate, up, down).to(x_TD.dtype)
    if backend == "native":
        return native.swiglu(x, _pair(gate), _pair(up), _pair(down), gate.format, gate.shape[0]).to(
            x_TD.dtype
        )
    with full_precision(x):
        run = _naive if backend == "naive" else _torch
        silu = F.silu if backend == "naive" else _silu
        return run(silu(run(x, gate)) * run(x, up), down).to(x_TD.dtype)


def _pair(packed: Packed) -> tuple[Tensor, Tensor]:
    """Codes and scales, contiguous, as the library reads them; its own tensors if they are already."""
    return packed.codes.contiguous(), packed.scales.contiguous()


def quantise(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit form (q [T,K] whole numbers in −127 … 127, step [T]) in x's dtype: q·step ≈ x. A token that is not
    finite has step NaN; one so small that 127 / max |x| is not finite has q = 0."""
    most_T = x_TK.abs().amax(1)
    per_T = torch.full_like(most_T, 127) / most_T  # a number over a tensor would be rounded twice
    fits_T1 = (per_T.isfinite() & most_T.isfinite())[:, None]
    q_TK = (x_TK * per_T[:, None]).round_().where(fits_T1, 0)
    return q_TK, (most_T / 127).where(most_T.isfinite(), torch.nan)


def _naive(x_TK: Tensor, packed: Packed) -> Tensor:
    """The product in float64, but for the rounding of x."""
    weight_NK = dequantise(packed, torch.float64)
    if packed.format in tiles.FORMATS:
        q_TGC, step_TG = _by_group(x_TK)
        read_TK = (q_TGC.double() * step_TG.double()[..., None]).flatten(1)[:, : x_TK.shape[1]]
        return F.linear(read_TK, weight_NK).float()
    q_TK, step_T = quantise(x_TK)
    return (F.linear(q_TK.double(), weight_NK) * step_T.double()[:, None]).float()


def _by_group(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(q [T,G,32], step [T,G]): `quantise` of each group of 32 columns."""
    x_TGC = F.pad(x_TK, (0, -x_TK.shape[1] % tiles.GROUP)).unflatten(1, (-1, tiles.GROUP))
    q, step = quantise(x_TGC.flatten(0, 1))
    return q.view_as(x_TGC), step.view(x_TGC.shape[:2])


def _tiles(x_TK: Tensor, packed: Packed) -> Tensor:
    """y = u · Σ_g step_g · (a·Σ q·t − 15·b·Σ q), in the order of g by fused multiply-adds; what is in parentheses is a
    whole number, rounded once."""
    N, four = packed.shape[0], packed.format == "4bit32"
    q_TGC, step_TG = _by_group(x_TK)
    G, room = q_TGC.shape[1], 16 if x_TK.is_cuda else 1
    q_GTC, sum_GT1, step_GT1 = q_TGC.transpose(0, 1), q_TGC.sum(2).T[..., None], step_TG.T[..., None].double()
    y_TN = x_TK.new_empty(len(x_TK), N)
    each = max(1, room * DECODED // (tiles.ROWS * columns(packed) * max(1, len(x_TK) // tiles.GROUP)))
    for start in range(0, len(packed.codes), each):
        lines = packed.codes[start : start + each]
        codes_NS = tiles.codes(lines, packed.format, columns(packed)).float()
        codes_GCN = (
            codes_NS.sub_(0 if four else 128)[:, : G * tiles.GROUP].unflatten(1, (G, -1)).permute(1, 2, 0)
        )
        a_NG, b_NG = tiles.scales(lines, packed.format, columns(packed))
        total_TN = torch.zeros(len(x_TK), len(codes_NS), dtype=torch.float64, device=x_TK.device)
        for g in range(G):
            sum_TN = (q_GTC[g] @ codes_GCN[g]).double() * a_NG[:, g]
            if b_NG is not None:
                sum_TN -= sum_GT1[g].double() * (tiles.STEPS * b_NG[:, g].double())
            total_TN = torch.addcmul(total_TN, sum_TN.float().double(), step_GT1[g]).float().double()
        rows = slice(start * tiles.ROWS, (start + each) * tiles.ROWS)
        unit_N = packed.scales[rows]
        y_TN[:, rows] = total_TN[:, : len(unit_N)].float() * unit_N
    return y_TN


def _torch(x_TK: Tensor, packed: Packed) -> Tensor:
    """The product, some rows at a time, so that memory stays bounded. A GPU takes more rows, since each of its many
    short operations has a cost."""
    if packed.format in tiles.FORMATS:
        return _tiles(x_TK, packed)
    (N, K), (blocks, S), R = packed.shape, packed.codes.shape, LAYOUTS[packed.format].rows
    q_TK, step_T = quantise(x_TK)
    q_TS = F.pad(q_TK, (0, S - K))
    y_TN = x_TK.new_empty(len(x_TK), blocks * R)
    by_row, room = LAYOUTS[packed.format].group == 0, 16 if x_TK.is_cuda else 1
    count = max(1, room * DECODED // (R * S))
    for start in range(0, blocks, count):
        here, rows = slice(start * R, (start + count) * R), min(count, blocks - start) * R
        for tokens in [slice(None)] if by_row else _parts(len(x_TK), rows, room):
            run = _rows if by_row else _groups
            y_TN[tokens, here] = run(q_TS[tokens], step_T[tokens], packed, slice(start, start + count))
    return y_TN[:, :N].contiguous()


def _parts(T: int, rows: int, room: int) -> Iterator[slice]:
    step = max(1, room * PARTS // (LANES * rows))
    return (slice(start, start + step) for start in range(0, T, step))


def _rows(q_TS: Tensor, step_T: Tensor, packed: Packed, blocks: slice) -> Tensor:
    """y = (step · s) · float(Σ w q), the sum as a whole number."""
    layout, codes = LAYOUTS[packed.format], packed.codes[blocks]
    if _integers(q_TS.device):
        sum_TN = _product(
            q_TS, digits(F.pad(codes, (0, 0, 0, -len(codes) % 8)), packed.format), layout.padding
        )
        sum_TN = sum_TN[:, : len(codes) * layout.rows]
    else:
        w_NS = digits(codes, packed.format).float() - layout.padding
        if packed.format == "ternary":
            sum_TN = q_TS @ w_NS.T  # 127 · K < 2²⁴
        else:
            pieces = zip(q_TS.split(EXACT, 1), w_NS.split(EXACT, 1), strict=True)
            sum_TN = sum((q @ w.T).double() for q, w in pieces).float()
    scale = packed.scales[blocks.start * layout.rows : blocks.stop * layout.rows]
    scale_N = F.pad(scale, (0, sum_TN.shape[1] - len(scale)))
    return sum_TN * (step_T[:, None] * scale_N)


def _product(q_TS: Tensor, code_NS: Tensor, zero: int) -> Tensor:
    """Sums of q times (code − zero), as whole numbers of 32 bits, rounded to float32 once. The integer product needs
    more than 16 tokens, and multiples of 8 in the other sizes."""
    T = len(q_TS)
    q = F.pad(q_TS, (0, 0, 0, max(0, 32 - T))).to(torch.int8)
    w_NS = (code_NS - zero).view(torch.int8)  # modulo 256
    return torch._int_mm(q, w_NS.T)[:T].float()


def _integers(device: torch.device) -> bool:
    """True if `_product` is to be used: on a GPU where it gives what it must."""
    return device.type == "cuda" and _tried(device)


@cache
def _tried(device: torch.device) -> bool:
    """True if `_product` runs on a device and is right, where sums are greatest, too."""
    draw = torch.Generator().manual_seed(0)
    for T, N, K in ((1, 40, 64), (19, 24, 192), (32, 16, 4096)):
        q, code = (torch.randint(*ends, generator=draw) for ends in ((-127, 128, (T, K)), (1, 256, (N, K))))
        q[0], code[0] = 127, 255
        try:
            found = _product(q.float().to(device), code.to(torch.uint8).to(device), 128)
        except RuntimeError:
            return False
        if not torch.equal(found.cpu(), (q @ (code - 128).T).float()):
            return False
    return True


def _groups(q_TS: Tensor, step_T: Tensor, packed: Packed, blocks: slice) -> Tensor:
    """y = step · (Σ_lanes Σ_g s·sum of codes times q − Σ_g o·sum of q), each inner sum by fused multiply-adds in the
    order of g, the lanes by halves. Lane l has columns 4l … 4l + 3 of each 64."""
    part = packed._replace(codes=packed.codes[blocks], scales=packed.scales[blocks])
    G = packed.scales.shape[1]
    room = (0, G * GROUP - q_TS.shape[1])
    codes = F.pad(digits(part.codes, packed.format), room).float().view(-1, G, 2, LANES, 4)
    q = F.pad(q_TS, room).view(-1, G, 2, LANES, 4)
    codes_GL8N = codes.permute(1, 3, 2, 4, 0).flatten(2, 3)
    q_GLT8 = q.permute(1, 3, 0, 2, 4).flatten(3, 4)
    # Fused multiply-adds as in `_fma`; what need not be made for each group is made before, for a GPU's sake.
    scale_NG, offset_NG = (values.double() for values in parameters(part))
    sums_TG = q.sum((2, 3, 4)).double()
    lanes_LTN = scale_NG.new_zeros(LANES, len(q), len(codes))
    offset_TN = torch.zeros_like(lanes_LTN[0])
    for g in range(G):
        sum_LTN = torch.bmm(q_GLT8[g], codes_GL8N[g]).double()
        lanes_LTN = torch.addcmul(lanes_LTN, sum_LTN, scale_NG[:, g]).float().double()
        offset_TN = torch.addcmul(offset_TN, sums_TG[:, g, None], offset_NG[:, g]).float().double()
    lanes_LTN = lanes_LTN.float()
    while len(lanes_LTN) > 1:
        lanes_LTN = torch.add(*lanes_LTN.chunk(2))
    return (lanes_LTN[0] - offset_TN.float()) * step_T[:, None]


def _silu(x: Tensor) -> Tensor:
    """x / (1 + e⁻ˣ), with e⁻ˣ = 2ⁿ eʳ as the native library has it."""
    minus = (-x).clamp(-87, 88)
    n = _fma(minus, _LOG2_E, _MAGIC) - _MAGIC
    r = _fma(n, -_LN2_LOW, _fma(n, -_LN2_HIGH, minus))
    power = torch.full_like(x, 1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        power = _fma(power, r, coefficient)
    return x / (1 + torch.ldexp(power, n.int()).masked_fill(x < -_FAR, math.inf))


_FAR = 88.7228317  # the last float whose eˣ is one
_MAGIC = 12582912.0  # 1.5 · 2²³: adding it rounds to a whole number
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693145752, 1.42860677e-6


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a·b + c in float32, rounded once, computed in float64, where products are exact: the same but for about one sum
    in 2²⁹. Plain numbers are not made tensors: to copy one to a GPU would wait for the GPU."""
    b64, c64 = (part.double() if isinstance(part, Tensor) else _single(part) for part in (b, c))
    return (a.double() * b64 + c64).float()


@cache
def _single(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


# ---------------------------------------------------------------- dispatch


def _backend(x: Tensor, backend: str, *matrices: Packed) -> str:
    """The backend to run. BackendError: it cannot."""
    if on_gpu.wanted(backend, x, *matrices):
        return "triton"
    if backend in ("naive", "torch"):
        return backend
    if backend == "native":
        why = native.reason() if x.device.type == "cpu" else f"x is on {x.device}, not on the cpu"
        if why is not None:
            raise BackendError(f"backend = 'native' cannot run: {why}")
        return backend
    chosen = "native" if x.device.type == "cpu" and native.wanted() else "torch"
    tiled = next((f" for {matrix.format}" for matrix in matrices if matrix.format in tiles.FORMATS), "")
    log_once("packed: auto runs %s on %s%s", chosen, x.device.type, tiled if x.is_cuda else "")
    return chosen


def _plain(x: Tensor) -> bool:
    """True in inference mode without tracing: the dispatcher, slower than a small product, can then be left out."""
    if torch.compiler.is_compiling():
        # The compiler would trace an autograd.Function's forward and leave out its jvp.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(NO_GRADIENT)
        return False
    return torch.is_inference_mode_enabled() and not under_tracing(x) and not x.is_meta


def _traced() -> bool:
    """True under a compiler or a trace, whose graph should contain the op itself."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def packed_linear(
    x_TK: Tensor, codes: Tensor, scales: Tensor, format: str, rows: int, backend: str
) -> Tensor:
    """The op without the dispatcher: the first call of a custom op imports the compiler, which takes seconds."""
    return _linear(x_TK, Packed(codes, scales, format, (rows, x_TK.shape[1])), backend)


_linear_op = torch.library.custom_op("perspectron::packed_linear", packed_linear, mutates_args=())


@_linear_op.register_fake
def _(x_TK: Tensor, codes: Tensor, scales: Tensor, format: str, rows: int, backend: str) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], rows)


@torch.library.custom_op("perspectron::packed_swiglu", mutates_args=())
def _swiglu_op(
    x_TD: Tensor,
    gate_codes: Tensor,
    gate_scales: Tensor,
    up_codes: Tensor,
    up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    format: str,
    hidden: int,
    rows: int,
    backend: str,
) -> Tensor:
    gate = Packed(gate_codes, gate_scales, format, (hidden, x_TD.shape[1]))
    up = Packed(up_codes, up_scales, format, gate.shape)
    return _swiglu(x_TD, (gate, up, Packed(down_codes, down_scales, format, (rows, hidden))), backend)


@_swiglu_op.register_fake
def _(x_TD: Tensor, *rest: Any) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], rest[-2])


class _NoGradient(torch.autograd.Function):
    """Base of products whose derivatives raise: for an op without derivatives, forward mode would give silent zeros."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    backward = jvp = refuse(NO_GRADIENT)


class _Linear(_NoGradient):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _linear_op(*args)


class _SwiGLU(_NoGradient):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _swiglu_op(*args)
