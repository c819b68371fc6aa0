"""Kernels in C++ for the CPU: packed matrices times quantised tokens, the PDR scan.

`available()` says whether they can be used; `wanted()` is the same and says once in the log why not. What a row of
the result holds depends on its token and its row of the matrix alone: not on the other tokens, the number of threads
or the instruction set. Threads: `threads()` at each call.

A matrix is N rows (outputs) × K columns (inputs). Codes are uint8 [blocks, S]: S is K rounded up to 64, a block is R
rows, and byte [b, k] holds the codes of rows b·R … b·R + R − 1 at column k.

    format   R  byte                                       weight     scales
    ternary  5  84·t4 + t0 + 3·t1 + 9·t2 + 27·t3           s·(t − 1)  float32 [N]
    2bit     4  t0 + t1<<2 + t2<<4 + t3<<6                 s·t − o    float16 [blocks, G, 8]: 4 scales s, 4 offsets o
    4bit     2  t0 + t1<<4                                 s·t − o    float16 [blocks, G, 4]: 2 scales s, 2 offsets o
    int8     1  t                                          s·(t−128)  float32 [N]
    4bit32  16  lines of scales and codes, perspectron/ops/tiles.py    float32 [N]
    8bit32  16  as well                                                float32 [N]

Tokens are quantised on the way in: a = max |x|, step = a / 127, q = x·(127 / a) rounded, ties to even. A token that
holds NaN or infinity gives NaN; one whose 127 / a is not finite (a < 4e-37) counts as zero.

Row formats (ternary, int8): y = step·s·float(Σ t·q − zero·Σ q), the sums exact, the zero 1 or 128. Grouped formats:
lane l of 16 takes columns 4 l … 4 l + 3 of each 64; per group of 128 columns f_l = fma(s_g, float(Σ t·q), f_l); lanes l
and l + 8 are added, then + 4, + 2, + 1; the correction is fma(o_g, float(Σ q), correction) in the order of groups;
y = step·(lanes − correction).

Tiles (4bit32, 8bit32): each 32 columns of a token are quantised by themselves, as a token is. Per group of them
f = fma(step_g, float(whole), f) in their order, whole = a_g·Σ (t − 128)·q at 8 bits and a_g·Σ t·q − 15·b_g·Σ q at 4;
y = f·u.

Shapes: T tokens, K columns, N rows, S = K rounded up to 64, G groups of 128 columns, B batch, D value width, R state
rank, F hidden width.
"""

import logging
from collections.abc import Sequence
from ctypes import c_int64
from functools import cache
from typing import Any

import torch
from torch import Tensor

from perspectron.native.library import load

FORMATS = ("ternary", "2bit", "4bit", "int8", "4bit32", "8bit32")
ROWS = {"ternary": 5, "2bit": 4, "4bit": 2, "int8": 1, "4bit32": 16, "8bit32": 16}
TILES = ("4bit32", "8bit32")
MOST_COLUMNS = 65536
"""K must not exceed it: 255 · 127 · 65536 < 2³¹, with more a sum could leave 32 bits."""
SEGMENT = 256
"""Tokens of a scan between states that are kept for its gradients, a multiple of 16."""
MOST_THREADS = 1024
Pair = tuple[Tensor, Tensor]
_threads: int | None = None


def available() -> bool:
    """True if the library is there and was built from these sources."""
    return load().library is not None


def reason() -> str | None:
    """One line on why it is not available; None if it is."""
    return load().reason


@cache
def wanted() -> bool:
    """`available()`, for code that is about to use it; if it is not, a warning is logged, once."""
    if not available():
        logging.getLogger("perspectron").warning("native kernels: %s; PyTorch is used, slower", reason())
    return available()


def threads() -> int:
    """Number of threads a kernel runs on: that of `set_threads`, else as many as torch has."""
    return _threads or min(torch.get_num_threads(), MOST_THREADS)


def set_threads(count: int | None) -> None:
    """Set the number of threads that kernels run on, whatever torch does; None: as many as torch. Small operations of
    torch are faster on one thread, while kernels want all."""
    global _threads
    if count is not None:
        _some_threads(count)
    _threads = count


def isa() -> str:
    """The instruction set in use: "avx512", "avx2" or "scalar"."""
    return str(_library().pspx_isa().decode())


def set_isa(name: str) -> None:
    """Use another instruction set, in all threads. ValueError: the machine does not have it."""
    if not _library().pspx_set_isa(name.encode()):
        raise ValueError(f"isa = {name!r}, this machine has at most {isa()!r}")


def linear(x_TK: Tensor, codes: Tensor, scales: Tensor, format: str, N: int) -> Tensor:
    """y [T,N] = x Wᵀ in float32; x float32, contiguous."""
    T, K = x_TK.shape
    _check(x_TK, torch.float32)
    check_matrix(codes, scales, format, N, K)
    y_TN = _empty(x_TK, T, N)
    pointers = (codes.data_ptr(), scales.data_ptr(), FORMATS.index(format))
    _library().pspx_linear(x_TK.data_ptr(), T, K, *pointers, N, y_TN.data_ptr(), threads())
    return y_TN


class SwiGLU:
    """W_down (silu(W_gate x) · (W_up x)), the hidden vector quantised again. Matrices are pairs of codes and scales,
    which are checked once and stay where they are."""

    def __init__(self, gate: Pair, up: Pair, down: Pair, format: str, F: int, D: int) -> None:
        self._kept, self._width, pointers = (gate, up, down), D, []
        for (codes, scales), N, K in ((gate, F, D), (up, F, D), (down, D, F)):
            check_matrix(codes, scales, format, N, K)
            pointers += [codes.data_ptr(), scales.data_ptr()]
        self._matrices = D, F, *pointers, FORMATS.index(format)
        self._call = _library().pspx_swiglu

    def __call__(self, x_TD: Tensor, y_TD: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Write the y of x, and return it. rows: the rows to read and write, each once; None: all."""
        T = count = len(x_TD)
        for tensor in (x_TD, y_TD):
            _check(tensor, torch.float32, (T, self._width))
        where = None
        if rows is not None:
            count = len(rows)
            if len({*rows}) < count or not all(0 <= row < T for row in rows):
                raise ValueError(f"rows = {rows}, must be in 0 … {T - 1}, each once")
            if count < T:
                where = (c_int64 * count)(*rows)
        self._call(x_TD.data_ptr(), count, where, *self._matrices, y_TD.data_ptr(), threads())
        return y_TD


def swiglu(x_TD: Tensor, gate: Pair, up: Pair, down: Pair, format: str, F: int) -> Tensor:
    """y [T,D] of x [T,D], see `SwiGLU`."""
    _check(x_TD, torch.float32)
    return SwiGLU(gate, up, down, format, F, x_TD.shape[1])(x_TD, _empty(x_TD, *x_TD.shape))


def route(
    x_TD: Tensor, weight_AD: Tensor, bias_A: Tensor, place_EA: Tensor | None, handicap_E: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(z [T,A] = x Wᵀ + b; the power distances [T,E] from z to places on a torus of circumference 1, or −z for a switch
    router, which has no places, less the handicaps; the expert [T] of the least). All float32, contiguous."""
    (T, D), A = x_TD.shape, len(bias_A)
    E = A if place_EA is None else len(place_EA)
    _check_all((x_TD, (T, D)), (weight_AD, (A, D)), (bias_A, (A,)), (place_EA, (E, A)), (handicap_E, (E,)))
    pointers = [None if x is None else x.data_ptr() for x in (place_EA, handicap_E)]
    z_TA, distance_TE = _empty(x_TD, T, A), _empty(x_TD, T, E)
    expert_T = _empty(x_TD, T, dtype=torch.int64)
    results = (z_TA.data_ptr(), distance_TE.data_ptr(), expert_T.data_ptr())
    _library().pspx_route(
        x_TD.data_ptr(), T, D, weight_AD.data_ptr(), bias_A.data_ptr(), A, *pointers, E, *results
    )
    return z_TA, distance_TE, expert_T


def pdr_scan(
    q_BTR: Tensor,
    k_BTR: Tensor,
    v_BTD: Tensor,
    gamma_BTD: Tensor,
    state_BDR: Tensor,
    o_BTD: Tensor,
    borders_NBDR: Tensor | None = None,
) -> None:
    """S = γ S + v kᵀ, o = S q over T tokens in float32; writes o and, in place, the state. borders: receives the state
    before each segment of SEGMENT tokens."""
    B, T, R = q_BTR.shape
    D = v_BTD.shape[2]
    if R < 1:
        raise ValueError("R = 0, must be ≥ 1")
    _check_all(
        *((x, (B, T, R)) for x in (q_BTR, k_BTR)),
        *((x, (B, T, D)) for x in (v_BTD, gamma_BTD, o_BTD)),
        (state_BDR, (B, D, R)),
        (borders_NBDR, (-(-T // SEGMENT), B, D, R)),
    )
    call("scan", q_BTR, k_BTR, v_BTD, gamma_BTD, state_BDR, o_BTD, borders_NBDR, B, T, D, R, SEGMENT)
    for written in (state_BDR, o_BTD, borders_NBDR):
        if (
            written is not None and not written.is_inference()
        ):  # autograd must notice that what it saved was overwritten
            torch.autograd.graph.increment_version(written)


def read(buffer: Tensor, threads: int) -> int:
    """Load every byte of a uint8 tensor, for measuring how fast that can be; returns a number made of them."""
    _check(buffer, torch.uint8)
    _some_threads(threads)
    return int(_library().pspx_read(buffer.data_ptr(), buffer.numel(), threads))


def peak(threads: int) -> float:
    """int8 multiply-adds a second of the instruction set in use, operands in registers."""
    _some_threads(threads)
    return float(_library().pspx_peak(threads))


def padded(K: int) -> int:
    """S: K rounded up to 64."""
    return -(-K // 64) * 64


def call(name: str, *arguments: Any, types: tuple[type, ...] = ()) -> None:
    """Call a kernel. It gets the addresses of tensors, null for None, and the number of threads last. types: of all
    these, for a kernel of one design. AttributeError: the library was built without the file of that design's
    kernels."""
    function = getattr(_library(), f"pspx_{name}")
    if types and function.argtypes is None:
        function.argtypes, function.restype = types, None
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    function(*given, threads())


def _library():  # type: ignore[no-untyped-def]  # noqa: ANN202
    library = load().library
    assert library is not None, reason()
    return library


def _empty(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised tensor for C to fill, on the CPU as x is, whatever torch's defaults are; `torch.empty` would
    take longer."""
    return x.new_empty(shape, dtype=dtype)


# C trusts what it is given, so the checks are no asserts: python -O would leave those out.


def _some_threads(count: int) -> None:
    if not 1 <= count <= MOST_THREADS:
        raise ValueError(f"threads = {count}, must be from 1 to {MOST_THREADS}")


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
    fits = shape is None or tensor.shape == shape
    if not (fits and tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous()):
        found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}"
        raise ValueError(f"got {found}, must be {dtype} {shape or ''} on cpu, contiguous")


def _check_all(*shapes: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """`_check` each tensor that is there, in float32."""
    for tensor, shape in shapes:
        if tensor is not None:
            _check(tensor, torch.float32, shape)


def line_of(format: str, K: int) -> int:
    """Bytes of a block of rows: its codes, which in tiles come after whole lines of scales."""
    S = padded(K)
    return {"4bit32": S + 8 * S, "8bit32": padded(S // 2) + 16 * S}.get(format, S)


def check_matrix(codes: Tensor, scales: Tensor, format: str, N: int, K: int) -> None:
    """ValueError unless these are the codes and scales of an N × K matrix in the format."""
    if format not in FORMATS:
        raise ValueError(f"format = {format!r}, must be one of {', '.join(FORMATS)}")
    if not 0 < K <= MOST_COLUMNS:
        raise ValueError(f"K = {K}, must be in 1 … {MOST_COLUMNS}")
    R, S = ROWS[format], padded(K)
    blocks = -(-N // R)
    _check(codes, torch.uint8, (blocks, line_of(format, K)))
    if format in ("ternary", "int8", *TILES):
        _check(scales, torch.float32, (N,))
    else:
        _check(scales, torch.float16, (blocks, -(-S // 128), 2 * R))
