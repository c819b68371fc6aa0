"""Triton's products of packed matrices in its interpreter, against the plain ones.

Shapes: T tokens, N rows, K columns.
"""

from importlib.util import find_spec

import pytest
import torch

from perspectron.ops import packed, packing
from perspectron.ops.packing import LAYOUTS, Packed, pack
from perspectron.util.errors import BackendError
from tests.refusals import refused

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'perspectron[triton]'", allow_module_level=True)

SUMS = 3e-6  # of the largest: sums of float32 in another order
every_format = pytest.mark.parametrize("format", LAYOUTS)


@pytest.fixture(autouse=True)
def without_the_dispatcher():
    with torch.inference_mode():
        yield


def matrix(format: str, N: int, K: int, seed: int = 0) -> Packed:
    draw, layout = torch.Generator().manual_seed(seed), LAYOUTS[format]
    codes = torch.randint(layout.lowest, layout.highest + 1, (N, K), generator=draw)
    shape = packing.sizes(format, (N, K))[1]
    scale = torch.rand(N, shape[1] if layout.zero is None else 1, generator=draw) + 0.1
    if layout.zero is not None:
        return pack(codes, scale[:, 0], None, format)
    return pack(codes, scale, torch.randn(scale.shape, generator=draw) * layout.highest / 2, format)


def tokens(T: int, K: int) -> torch.Tensor:
    return torch.randn(T, K, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, T)[:, None]


@every_format
@pytest.mark.parametrize("shape", [(1, 37, 200), (3, 1, 1), (1, 9, 130), (2, 7, 2100)])
def test_a_few_tokens_have_the_bits_of_the_plain_products(format, shape):
    T, N, K = shape
    x, W = tokens(T, K), matrix(format, N, K)
    assert torch.equal(packed.linear(x, W, backend="triton"), packed.linear(x, W, backend="torch"))


@every_format
@pytest.mark.parametrize("shape", [(5, 37, 200), (16, 1, 1), (17, 170, 130), (70, 23, 333)])
def test_many_tokens_have_their_sums(format, shape):
    T, N, K = shape
    x, W = tokens(T, K), matrix(format, N, K)
    found, expected = (packed.linear(x, W, backend=backend) for backend in ("triton", "torch"))
    if LAYOUTS[format].zero is not None:
        assert torch.equal(found, expected)
    assert (found - expected).abs().div(expected.abs().amax(1, keepdim=True)).max() <= SUMS


@pytest.mark.parametrize("T", [1, 6])
@every_format
def test_the_greatest_sums_are_exact_and_odd_tokens_are_as_defined(format, T):
    K = 700
    W = matrix(format, 11, K)
    W = W._replace(codes=torch.full_like(W.codes, {"ternary": 248, "int8": 255}.get(format, 255)))
    x = torch.ones(T, K)
    x[T - 1] = 0
    for value in (1.0, 0.0, 1e-42, float("nan"), float("inf"), 0.5):
        x[0, 3] = value
        found, expected = (packed.linear(x, W, backend=backend) for backend in ("triton", "torch"))
        torch.testing.assert_close(found, expected, rtol=SUMS, atol=1e-3 * SUMS, equal_nan=True)
    x = torch.arange(-127, 128).float()[None] / 2  # halves are rounded to even
    W = matrix(format, 11, x.shape[1])
    assert torch.equal(packed.linear(x, W, backend="triton"), packed.linear(x, W, backend="torch"))


@every_format
@pytest.mark.parametrize("T", [1, 2])
def test_a_swiglu_of_a_few_tokens_has_the_bits_of_the_plain_one(format, T):
    gate, up, down = (matrix(format, *shape) for shape in ((23, 70), (23, 70), (70, 23)))
    x = tokens(T, 70)
    found, expected = (packed.swiglu(x, gate, up, down, backend=b) for b in ("triton", "torch"))
    assert torch.equal(found, expected)


def test_a_swiglu_of_many_tokens_of_ternary_matrices_too():
    gate, up, down = (
        matrix("ternary", *shape, seed) for seed, shape in enumerate(((83, 200), (83, 200), (200, 83)))
    )
    x = tokens(9, 200)
    found, expected = (packed.swiglu(x, gate, up, down, backend=b) for b in ("triton", "torch"))
    assert torch.equal(found, expected)


def test_no_tokens_strides_and_dtypes():
    W = matrix("2bit", 37, 200)
    assert packed.linear(torch.empty(0, 200), W, backend="triton").shape == (0, 37)
    x = tokens(200, 6).T
    assert torch.equal(
        packed.linear(x, W, backend="triton")[:3], packed.linear(x[:3].clone(), W, backend="triton")
    )
    half = packed.linear(tokens(2, 200).bfloat16(), W, backend="triton")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, packed.linear(tokens(2, 200).bfloat16(), W, backend="torch"))


def test_what_cannot_run_is_refused():
    x, W = tokens(2, 200), matrix("2bit", 37, 200)
    elsewhere = W._replace(codes=W.codes.to("meta"))
    with refused(BackendError, "cpu"):
        packed.linear(x, elsewhere, backend="triton")
    with torch.inference_mode(False), pytest.raises(RuntimeError, match=packed.NO_GRADIENT):
        packed.linear(x.clone().requires_grad_(), matrix("2bit", 37, 200), backend="triton").sum().backward()
