"""GPTQ against a plain loop over columns with an explicit inverse, and against rounding to the nearest."""

import pytest
import torch
from torch import Tensor

from perspectron.ops import tiles
from perspectron.ops.packing import GROUP, LAYOUTS, Packed, check, dequantise, parameters, unpack
from perspectron.quant.formats import decode, encode, grid, quantise, tile_grid, units
from perspectron.quant.gptq import FORMATS, Hessian, together
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import refused

every_format = pytest.mark.parametrize("format", FORMATS)


def gptq(weight, hessian, format, **settings) -> Packed:
    """One matrix alone."""
    return together([weight], hessian, format, **settings)[0]


def error(weight, whole, x) -> float:
    """‖(W − Ŵ) X‖ / ‖W X‖."""
    exact = x @ weight.T
    return float((x @ dequantise(whole).T - exact).norm() / exact.norm())


def layer(N, K, T=600, seed=0) -> tuple[Tensor, Tensor]:
    """A weight, and correlated inputs of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=draw) * K**-0.5
    mix = torch.randn(K, K, generator=draw) * torch.logspace(0, -2, K)
    x = torch.randn(T, K, generator=draw) @ mix.T * K**-0.5 + 0.3 * torch.randn(T, K, generator=draw)
    return weight, x * torch.rand(K, generator=draw)


def seen(x) -> Hessian:
    hessian = Hessian(x.shape[-1])
    hessian.add(x)
    return hessian


def oracle(weight_NK, x_TK, format, damping) -> tuple[Tensor, list[Tensor]]:
    """(codes, scales and offsets of the groups): the inverse is shrunk by each column that is done."""
    weight, x = weight_NK.double(), x_TK.double()
    H = x.T @ x
    inverse = (H + torch.eye(len(H)) * damping * H.diagonal().mean()).inverse()
    K, zero = weight.shape[1], LAYOUTS[format].zero

    def done(inverse, k):
        return inverse - torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]

    groups, width, unit = {}, LAYOUTS[format].group or GROUP, None
    if format in tiles.FORMATS:
        unit = units(weight.float(), format)
    elif zero is not None:
        groups = dict.fromkeys(range(-(-K // GROUP)), ((weight.abs().amax(1) / 127).float(), None))
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for k in range(K):
        if k // width not in groups:
            ahead, importance = inverse, []
            for j in range(k, min(k + width, K)):
                importance.append(1 / ahead[j, j])
                ahead = done(ahead, j)
            part, important = weight[:, k : k + width].float(), torch.stack(importance).float()
            groups[k // width] = (
                grid(part, format, important) if unit is None else tile_grid(part, format, unit, important)
            )
        s, o = (None if part is None else part.double() for part in groups[k // width])
        codes[:, k] = encode(weight[:, k], s, o, format)
        off = (weight[:, k] - decode(codes[:, k], s, o, format)) / inverse[k, k]
        weight = weight - torch.outer(off, inverse[k])
        inverse = done(inverse, k)
    return codes, [groups[g] for g in sorted(groups)]


@every_format
@pytest.mark.parametrize("K", [70, 300])
def test_it_is_the_plain_loop(format, K):
    weight, x = layer(24, K)
    whole = gptq(weight, seen(x), format, damping=0.02)
    codes, groups = oracle(weight, x, format, 0.02)
    assert (unpack(whole) == codes).float().mean() > 0.999
    check(whole)
    if format == "int8":
        assert torch.equal(whole.scales, groups[0][0])
    elif format in tiles.FORMATS:
        a_NG = tiles.scales(whole.codes, format, -(-K // 64) * 64)[0][:24, : len(groups)]
        exact = torch.stack([s for s, _ in groups], 1) / whole.scales[:, None]
        assert ((a_NG - exact).abs() < 0.01).float().mean() > 0.98
    else:
        for found, expected in zip(parameters(whole), zip(*groups, strict=True), strict=True):
            torch.testing.assert_close(found[:24].float(), torch.stack(expected, 1), rtol=2e-3, atol=0)


@every_format
def test_it_beats_the_nearest(format):
    weight, x = layer(64, 300)
    nearest, own = quantise(weight, format), gptq(weight, seen(x), format)
    assert error(weight, own, x) < 0.85 * error(weight, nearest, x)


@every_format
def test_inputs_that_have_nothing_in_common_leave_the_nearest(format):
    weight = torch.randn(20, 200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        dequantise(gptq(weight, seen(torch.eye(200)), format)), dequantise(quantise(weight, format))
    )


@every_format
def test_columns_that_read_nothing(format):
    weight, x = layer(16, 200)
    dead = torch.zeros(200, dtype=torch.bool)
    dead[[0, 5, 128, 130, 199]] = True
    x[:, dead] = 0
    whole = gptq(weight, seen(x), format)
    off = (dequantise(whole) - weight).abs()
    assert off[:, dead].amax() < weight.abs().amax() / LAYOUTS[format].highest * 2.5
    assert error(weight, whole, x) < error(weight, quantise(weight, format), x)
    nothing = gptq(weight, Hessian(200), format)
    assert (dequantise(nothing) - weight).norm() < 1.05 * (
        dequantise(quantise(weight, format)) - weight
    ).norm()


@every_format
def test_fewer_tokens_than_columns(format):
    weight, x = layer(16, 300, T=20)
    assert error(weight, gptq(weight, seen(x), format), x) < error(weight, quantise(weight, format), x)


def test_tokens_add_up():
    _, x = layer(1, 40)
    parts = Hessian(40)
    for part in x.view(6, 5, 20, 40):
        parts.add(part)
    torch.testing.assert_close(parts.sum_KK, x.double().T @ x.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["2bit", "4bit"])
def test_degenerate_weights_are_never_far_off(format):
    _, x = layer(1, 200)
    for weight in (torch.zeros(6, 200), torch.full((6, 200), 0.3), torch.full((6, 200), 1e-9)):
        off = dequantise(gptq(weight, seen(x), format)) - weight
        assert off.abs().amax() <= 2e-3 * weight.abs().amax() + 1e-7


def test_what_cannot_be_is_refused():
    weight, x = layer(6, 40)
    with refused(ConfigError, "format", "ternary"):
        gptq(weight, seen(x), "ternary")
    with refused(ConfigError, "damping", 0):
        gptq(weight, seen(x), "2bit", damping=0)
    with refused(DataError):
        gptq(weight, seen(x * torch.nan), "2bit")
    with refused(DataError, "weight"):
        gptq(weight * torch.nan, seen(x), "2bit")
