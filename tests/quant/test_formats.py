"""Rounding to the nearest of what a format holds, degenerate weights too."""

import itertools

import pytest
import torch
from torch import Tensor

from perspectron.experts.ternary import ternary
from perspectron.ops.packing import GROUP, LAYOUTS, check, dequantise, parameters, unpack
from perspectron.quant import formats
from perspectron.quant.formats import quantise
from perspectron.util.errors import DataError
from tests.refusals import refused

FORMATS = list(LAYOUTS)
every_format = pytest.mark.parametrize("format", FORMATS)
grouped = pytest.mark.parametrize("format", ["2bit", "4bit"])


def weights(N, K, seed=0) -> Tensor:
    return 0.02 * torch.randn(N, K, generator=torch.Generator().manual_seed(seed))


def error(weight, format) -> float:
    return float((dequantise(quantise(weight, format)) - weight).norm() / weight.norm())


def test_ternary_is_better_than_absmean():
    """Rows of other sizes have scales of their own, each the best for its codes, as the codes are for it."""
    weight = weights(37, 100) * torch.logspace(-2, 2, 37)[:, None]
    whole = quantise(weight, "ternary")
    codes, scale = unpack(whole).float() - 1, whole.scales[:, None]
    assert ((weight / scale).round().clamp(-1, 1) == codes).float().mean() > 0.99
    best = (weight * codes).sum(1) / codes.abs().sum(1)
    torch.testing.assert_close(whole.scales, best)
    rows = torch.cat([ternary(row[None]) for row in weight])
    assert ((dequantise(whole) - weight).norm(dim=1) < (rows - weight).norm(dim=1)).all()


@pytest.mark.parametrize("rows", [1, 37])
def test_what_is_ternary_comes_back_exactly(rows):
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(-1, 2, (rows, 90), generator=draw).float()
    codes[rows // 2] = 0
    for scale in (torch.tensor(0.0123), torch.rand(rows, 1, generator=draw) + 0.1):
        weight = codes * scale
        assert torch.equal(dequantise(quantise(weight, "ternary")), weight)
    trained = ternary(weights(rows, 90))
    assert torch.equal(dequantise(quantise(trained, "ternary")), trained)


def test_int8_is_absmax_of_each_row():
    weight = weights(9, 70) * torch.logspace(-3, 3, 9)[:, None]
    whole = quantise(weight, "int8")
    steps = weight.abs().amax(1) / 127
    assert torch.equal(whole.scales, steps)
    assert ((dequantise(whole) - weight).abs() <= 0.5001 * steps[:, None]).all()
    assert torch.equal(unpack(whole).long().sub(128).abs().amax(1), torch.full((9,), 127))


@grouped
@pytest.mark.parametrize("K", [1, 100, 128, 300])
def test_codes_are_the_nearest_by_the_stored_scales(format, K):
    weight = weights(11, K) + 0.01
    whole = quantise(weight, format)
    scale, offset = (part.float().repeat_interleave(GROUP, 1)[:11, :K] for part in parameters(whole))
    levels = torch.arange(LAYOUTS[format].highest + 1)
    values = levels * scale[..., None] - offset[..., None]
    distance = (values - weight[..., None]).abs()
    assert torch.equal(distance.gather(2, unpack(whole).long()[..., None])[..., 0], distance.amin(2))


@grouped
def test_the_grid_is_better_than_the_range_and_follows_importance(format, monkeypatch):
    weight, important = weights(64, 128), torch.ones(128)
    important[:16] = 100
    even, own = (formats.grid(weight, format, which) for which in (None, important))
    parts = [
        formats.decode(formats.encode(weight, s[:, None], o[:, None], format), s[:, None], o[:, None], format)
        for s, o in (even, own)
    ]
    errors = [((part - weight).square() @ important).sum() for part in parts]
    assert errors[1] < errors[0]
    searched = error(weight, format)
    monkeypatch.setattr(formats, "SHRINK", (1.0,))
    monkeypatch.setattr(formats, "REFITS", 0)
    assert searched < error(weight, format)


def test_more_bits_are_nearer():
    found = [error(weights(64, 300), format) for format in ("ternary", "2bit", "4bit", "int8")]
    assert all(a > 1.2 * b for a, b in itertools.pairwise(found))
    assert found[0] < 0.45 and found[1] < 0.36 and found[2] < 0.1 and found[3] < 0.01


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_are_packed_as_float32_is(format, dtype):
    weight = weights(9, 70).to(dtype)
    assert torch.equal(dequantise(quantise(weight, format)), dequantise(quantise(weight.float(), format)))


DEGENERATE = {
    "zeros": torch.zeros(6, 200),
    "equal": torch.full((6, 200), 0.3),
    "negative": torch.full((6, 200), -0.3),
    "one weight": weights(1, 1),
    "one large": torch.zeros(6, 200).index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(5e4)),
    "large": 5e5 * weights(6, 200),
    "offset": 1000 + weights(6, 200),
    "tiny": 1e-6 * weights(6, 200),
    "underflow": 1e-9 * weights(6, 200),
    "subnormal": 1e-41 * weights(6, 200),
    "smallest": torch.full((6, 200), 1.4e-45),
}


@every_format
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_weights_are_never_nan_and_never_far_off(format, name):
    """Never NaN, never far off."""
    weight = DEGENERATE[name]
    whole = quantise(weight, format)
    check(whole)
    off = (dequantise(whole) - weight).abs().amax()
    span = weight.amax() - weight.amin()
    if format in ("2bit", "4bit"):
        half = torch.finfo(torch.float16)
        assert off <= 0.4 * span + weight.abs().amax() * half.eps + half.tiny
    else:
        assert off <= weight.abs().amax()
        if name in ("zeros", "equal", "negative", "one weight"):
            assert off <= 1e-7 * weight.abs().amax()


def test_what_cannot_be_held_is_refused():
    for format, value in itertools.product(FORMATS, (torch.nan, torch.inf, -torch.inf)):
        weight = weights(4, 4)
        weight[1, 1] = value
        with refused(DataError, "weight"):
            quantise(weight, format)
    for format in ("2bit", "4bit"):
        with refused(DataError, "weight", format):
            quantise(torch.full((4, 4), 1e6), format)
    for format in ("ternary", "int8"):
        assert dequantise(quantise(3e38 * torch.randn(40, 40).tanh(), format)).isfinite().all()
    with refused(ValueError, "format", "3bit"):
        quantise(weights(4, 4), "3bit")
