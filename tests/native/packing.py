"""Matrices in the formats of the kernels and their products, in plain numpy and 64 bits."""

import numpy as np
import torch

from perspectron import native
from perspectron.ops.packing import Packed, dequantise, pack_tiles, whole

MOST = {"ternary": 3, "2bit": 4, "4bit": 16, "int8": 256, "4bit32": 16, "8bit32": 256}
PLACES = {"ternary": (1, 3, 9, 27, 84), "2bit": (1, 4, 16, 64), "4bit": (1, 16), "int8": (1,)}
ROW_FORMATS, GROUP_FORMATS = ("ternary", "int8"), ("2bit", "4bit")


def codes_of(format, N, K, rng, fill=None):
    """[N,K] legal codes."""
    least = 1 if format in ("int8", "8bit32") else 0
    return (
        rng.integers(least, MOST[format], (N, K)) if fill is None else np.full((N, K), fill, dtype=np.int64)
    )


def pack(format, codes_NK):
    """uint8 [blocks, S]; of tiles with scales that depend on their places."""
    N, K = codes_NK.shape
    if format in native.TILES:
        G = -(-K // 32)
        a, b = (torch.arange(N * G).view(N, G) * by % 256 for by in (37, 101))
        b = b if format == "4bit32" else None
        return pack_tiles(torch.from_numpy(codes_NK), torch.ones(N), a, b, format).codes
    R, S = native.ROWS[format], native.padded(K)
    pad = {"ternary": 1, "int8": 128}.get(format, 0)
    whole = np.full((-(-N // R) * R, S), pad, dtype=np.int64)
    whole[:N, :K] = codes_NK
    places = np.array(PLACES[format])[None, :, None]
    return torch.from_numpy((whole.reshape(-1, R, S) * places).sum(1).astype(np.uint8))


def scales_of(format, N, K, rng):
    """As the format has them, ones for the padding rows too: nothing may leak from there."""
    if format in (*ROW_FORMATS, *native.TILES):
        return torch.from_numpy(rng.uniform(0.1, 2, N).astype(np.float32))
    R, G = native.ROWS[format], -(-native.padded(K) // 128)
    return torch.from_numpy(rng.uniform(0.1, 2, (-(-N // R), G, 2 * R)).astype(np.float16))


def matrix(format, N, K, rng, fill=None):
    """(codes [N,K], packed codes, scales)."""
    codes = codes_of(format, N, K, rng, fill)
    return codes, pack(format, codes), scales_of(format, N, K, rng)


def read(format, x):
    """What the kernels make of x, in float64."""
    if format not in native.TILES:
        q, step = quantised(x)
        return q * step[:, None].astype(np.float64)
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(-1, 32)
    return read("int8", groups).reshape(len(x), -1)[:, : x.shape[1]]


def by_tiles(format, codes, scales, x):
    f32, (T, K), (N, _) = np.float32, x.shape, codes.shape
    numbers = whole(Packed(pack(format, codes), scales, format, (N, K))).numpy().astype(np.int64)
    sums = np.zeros((T, N), f32)
    for start in range(0, K, 32):
        q, step = quantised(x[:, start : start + 32])
        exact = (q @ numbers[:, start : start + 32].T).astype(f32).astype(np.float64)
        sums = (exact * step[:, None].astype(np.float64) + sums.astype(np.float64)).astype(f32)
    return sums * scales.numpy()[None]


def quantised(x):
    """(q int64, step float32) of each row."""
    a = np.abs(x).max(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(a > 0, np.rint(x * (np.float32(127) / a)), 0).astype(np.int64)
    return q, (a / np.float32(127))[:, 0]


def weights(format, codes, scales):
    """float64 [N,K]."""
    N, K = codes.shape
    if format in native.TILES:
        return dequantise(Packed(pack(format, codes), scales, format, (N, K)), torch.float64).numpy()
    if format in ROW_FORMATS:
        zero = 1 if format == "ternary" else 128
        return (codes - zero) * scales.double().numpy()[:, None]
    R = native.ROWS[format]
    of_row = scales.double().numpy().reshape(scales.shape[0], -1, 2, R).transpose(0, 3, 2, 1)
    of_row = np.repeat(of_row.reshape(-1, 2, scales.shape[1]), 128, axis=2)[:N, :, :K]
    return codes * of_row[:, 0] - of_row[:, 1]


def in_order(format, codes, scales, x):
    """y [T,N], every float32 operation in the order the format lays down (a fused one is done in float64 and
    rounded, which is exact for the small numbers of the tests)."""
    if format in native.TILES:
        return by_tiles(format, codes, scales, x)
    f32, (q, step) = np.float32, quantised(x)
    T, N, S = len(x), len(codes), native.padded(x.shape[1])
    if format in ROW_FORMATS:
        zero = 1 if format == "ternary" else 128
        sums = (q @ (codes - zero).T).astype(f32)
        return (step[:, None] * scales.numpy()[None]) * sums
    R, G = native.ROWS[format], scales.shape[1]
    of_row = scales.float().numpy().reshape(scales.shape[0], G, 2, R).transpose(2, 1, 0, 3).reshape(2, G, -1)
    q_pad, c_pad = np.zeros((T, G * 128), np.int64), np.zeros((N, G * 128), np.int64)
    q_pad[:, : x.shape[1]], c_pad[:, : x.shape[1]] = q, codes
    products = (q_pad[:, None] * c_pad[None]).reshape(T, N, G, 2, 16, 4).sum((3, 5))  # [T,N,G,16]
    lanes, correction = np.zeros((T, N, 16), f32), np.zeros((T, N), f32)
    for g in range(G):
        s, o = of_row[:, g, :N].astype(np.float64)
        lanes = (s[None, :, None] * products[:, :, g] + lanes.astype(np.float64)).astype(f32)
        of_q = q_pad[:, g * 128 : (g + 1) * 128].sum(1)[:, None]
        correction = (o[None] * of_q + correction.astype(np.float64)).astype(f32)
    for n in (8, 4, 2, 1):
        lanes = lanes[..., :n] + lanes[..., n : 2 * n]
    assert S <= G * 128
    return step[:, None] * (lanes[..., 0] - correction)
