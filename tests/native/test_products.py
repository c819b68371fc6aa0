"""Packed matrices times tokens: against numpy in 64 bits, and the same bits whatever runs them."""

import numpy as np
import pytest
import torch

from perspectron import native
from tests.native.isa import forced_isa
from tests.native.packing import (
    GROUP_FORMATS,
    MOST,
    ROW_FORMATS,
    codes_of,
    in_order,
    matrix,
    pack,
    quantised,
    read,
    scales_of,
    weights,
)
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
ISAS = ("avx512", "avx2", "scalar")
# N, K, T: no whole blocks, no whole lines, few tokens and many, more columns and tokens than are taken at once
SHAPES = [
    *((1, 1, 1), (7, 65, 1), (11, 128, 2), (23, 300, 3), (37, 513, 4), (41, 200, 5), (64, 64, 9)),
    *((33, 4400, 7), (103, 704, 13), (6, 130, 161)),
]


def tokens(T, K, rng):
    return rng.standard_normal((T, K)).astype(np.float32)


def product(x, codes, scales, format, N):
    return native.linear(torch.from_numpy(np.ascontiguousarray(x)), codes, scales, format, N).numpy()


@pytest.mark.parametrize("format", native.FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_bit_is_that_of_the_order_laid_down(isa, format, use_isa):
    use_isa(isa)
    rng = np.random.default_rng(0)
    for N, K, T in SHAPES:
        codes, packed, scales = matrix(format, N, K, rng)
        x = tokens(T, K, rng)
        assert np.array_equal(product(x, packed, scales, format, N), in_order(format, codes, scales, x)), (
            N,
            K,
            T,
        )


@pytest.mark.parametrize("format", native.FORMATS)
def test_close_to_the_product_of_the_weights_in_float64(format):
    rng = np.random.default_rng(1)
    codes, packed, scales = matrix(format, 30, 1000, rng)
    x = tokens(3, 1000, rng)
    exact = read(format, x) @ weights(format, codes, scales).T
    np.testing.assert_allclose(product(x, packed, scales, format, 30), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("format", native.FORMATS)
def test_neither_threads_nor_the_other_tokens_change_a_bit(format):
    rng = np.random.default_rng(2)
    N, K, T = 1500, 1100, 40
    _, packed, scales = matrix(format, N, K, rng)
    x = tokens(T, K, rng)
    whole = product(x, packed, scales, format, N)
    for part in (slice(0, 1), slice(3, 5), slice(7, 10), slice(10, 14), slice(14, 19), slice(1, 40)):
        assert np.array_equal(product(x[part], packed, scales, format, N), whole[part])
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert np.array_equal(product(x, packed, scales, format, N), whole)
            assert np.array_equal(product(x[:1], packed, scales, format, N), whole[:1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("T", [1, 6])
def test_the_largest_sums_fit(isa, T, use_isa):
    use_isa(isa)
    K = native.MOST_COLUMNS
    for format in native.FORMATS:
        most = MOST[format] - 1
        N = native.ROWS[format] + 1
        codes = np.full((N, K), most)
        x = np.tile(np.float32([[127], [-127], [1], [-1], [127], [3]])[:T], (1, K))
        scales = scales_of(format, N, K, np.random.default_rng(3))
        if format in ROW_FORMATS:
            scales = torch.ones(N)  # the sums themselves: multiples of 2¹⁶, which float32 holds
        found = product(x, pack(format, codes), scales, format, N)
        assert np.array_equal(found, in_order(format, codes, scales, x))
        if format in ROW_FORMATS:
            whole = 127 * K * (most - (1 if format == "ternary" else 128))
            assert (found[0] == whole).all()


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_long_rows_are_summed_in_order(format):
    rng = np.random.default_rng(4)
    codes, packed, scales = matrix(format, 12, 11008, rng)
    for T in (1, 6):
        x = tokens(T, 11008, rng)
        assert np.array_equal(product(x, packed, scales, format, 12), in_order(format, codes, scales, x))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_gives_nan_and_others_are_not_touched(isa, bad, use_isa):
    use_isa(isa)
    rng = np.random.default_rng(5)
    for format in native.FORMATS:
        _, packed, scales = matrix(format, 9, 200, rng)
        x = tokens(6, 200, rng)
        good = product(x, packed, scales, format, 9)
        x[2, 199], x[4, 0] = bad, bad
        found = product(x, packed, scales, format, 9)
        assert np.isnan(found[[2, 4]]).all()
        assert np.array_equal(found[[0, 1, 3, 5]], good[[0, 1, 3, 5]])
        assert np.isnan(product(x[2:3], packed, scales, format, 9)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_and_the_smallest_numbers_give_zeros(isa, use_isa):
    use_isa(isa)
    rng = np.random.default_rng(6)
    for format in native.FORMATS:
        _, packed, scales = matrix(format, 9, 100, rng)
        x = np.zeros((2, 100), np.float32)
        x[1, 5] = 1e-40
        assert (product(x, packed, scales, format, 9) == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("K", [1, 15, 64, 100, 128, 129, 1000])
def test_how_tokens_are_quantised(isa, K, use_isa):
    """The identity in int8 shows each number of a token; the grouped formats count what is left past its end too."""
    use_isa(isa)
    rng = np.random.default_rng(7)
    x = tokens(3, K, rng)
    x[1] = np.arange(K) % 5 + 0.5  # many ties
    x[1, 0] = 127
    q, step = quantised(x)
    identity = pack("int8", 128 + np.eye(K, dtype=np.int64))
    found = product(x, identity, torch.ones(K), "int8", K)
    assert np.array_equal(found, step[:, None] * q.astype(np.float32))
    for format in native.FORMATS:
        codes, packed, scales = matrix(format, 7, K, rng)
        assert np.array_equal(product(x, packed, scales, format, 7), in_order(format, codes, scales, x))


@pytest.mark.parametrize("format", native.FORMATS)
def test_a_swiglu_is_three_products_and_the_same_bits_everywhere(format):
    """Against three products and float64's silu; the same bits on every instruction set, for any threads and T."""
    rng = np.random.default_rng(8)
    T, D, F = 7, 700, 900
    gate, up, down = (matrix(format, N, K, rng)[1:] for N, K in ((F, D), (F, D), (D, F)))
    x = tokens(T, D, rng) * 0.05
    found = []
    for isa in ISAS:
        try:
            with forced_isa(isa):
                found.append(native.swiglu(torch.from_numpy(x), gate, up, down, format, F).numpy())
        except ValueError:
            continue
    for other in found[1:]:
        assert np.array_equal(other, found[0])
    g, u = (product(x, *pair, format, F).astype(np.float64) for pair in (gate, up))
    hidden = g * (1 + np.tanh(g / 2)) / 2 * u
    assert np.abs(g).max() > 5
    exact = product(hidden.astype(np.float32), *down, format, D)
    # The hidden vector may round another way in a place or two.
    assert np.abs(found[0] - exact).max() <= 1e-3 * np.abs(exact).max()
    try:
        torch.set_num_threads(3)
        again = native.swiglu(torch.from_numpy(x), gate, up, down, format, F).numpy()
        one = native.swiglu(torch.from_numpy(x[2:3]), gate, up, down, format, F).numpy()
    finally:
        torch.set_num_threads(1)
    assert np.array_equal(again, found[0])
    assert np.array_equal(one, found[0][2:3])


def test_silu_over_its_range():
    """A matrix of one weight 1 shows the hidden value: gate and up take x, down gives silu(x)·x.

    x itself comes out of its quantisation with one rounding, and e^x multiplies that by |x|."""
    one = (torch.full((1, 64), 129, dtype=torch.uint8), torch.ones(1))
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([1e-30, 0.0, 3e37, -3e37])])[:, None]
    found = native.swiglu(x, one, one, one, "int8", 1)[:, 0].double()
    wide = x[:, 0].double()
    exact = wide * torch.sigmoid(wide) * wide
    finite = exact < 3e38
    torch.testing.assert_close(found[finite], exact[finite], rtol=2e-5, atol=1e-30)
    assert found[~finite].isnan().all()


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(9)
    _, packed, scales = matrix("ternary", 10, 100, rng)
    x = torch.zeros(2, 100)
    native.linear(x, packed, scales, "ternary", 10)
    for call in (
        lambda: native.linear(torch.zeros(100, 2).mT, packed, scales, "ternary", 10),
        lambda: native.linear(x.double(), packed, scales, "ternary", 10),
        lambda: native.linear(x.to("meta"), packed, scales, "ternary", 10),
        lambda: native.linear(torch.zeros(2, 129), packed, scales, "ternary", 10),
        lambda: native.linear(x, packed, scales, "ternary", 11),
        lambda: native.linear(x, packed, scales.double(), "ternary", 10),
        lambda: native.linear(x, packed.to(torch.int8), scales, "ternary", 10),
        lambda: native.linear(x, packed, scales, "2bit", 10),
        lambda: native.linear(torch.zeros(1, 65537), packed, scales, "ternary", 10),
        lambda: native.linear(x, packed, scales, "1bit", 10),
    ):
        with refused(ValueError):
            call()


def test_a_product_of_no_tokens_is_empty():
    rng = np.random.default_rng(10)
    _, packed, scales = matrix("2bit", 10, 100, rng)
    assert native.linear(torch.zeros(0, 100), packed, scales, "2bit", 10).shape == (0, 10)
    assert codes_of("2bit", 1, 1, rng) in range(4)
    assert set(ROW_FORMATS + GROUP_FORMATS + native.TILES) == set(native.FORMATS)
