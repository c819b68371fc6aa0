"""Rounded forwards, straight through backwards."""

import itertools
import math

import pytest
import torch
from torch import nn

from perspectron.experts.ternary import converted, int8, set_share, share_at, stats, ternary, trits

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def matrices(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def plain(matrix):
    """One matrix, number by number: (trits, scale)."""
    scale = sum(abs(w) for row in matrix for w in row) / (len(matrix) * len(matrix[0]))
    return [[max(-1, min(1, round(w / scale))) for w in row] for row in matrix], scale


def test_values_are_those_of_the_plain_loop():
    weight = matrices(3, 2, 5, 7)
    got, scale = trits(weight)
    for i in range(3):
        for j in range(2):
            expected, s = plain(weight[i, j].tolist())
            assert got[i, j].tolist() == expected
            assert scale[i, j].item() == pytest.approx(s, rel=1e-14)
    assert set(got.unique().tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_share_0_is_the_float_weight_and_share_1_is_exactly_ternary(dtype):
    weight = matrices(4, 33, 20, dtype=dtype)
    assert torch.equal(ternary(weight, torch.zeros(1)), weight)
    whole = ternary(weight, torch.ones(1))
    assert whole.dtype == dtype
    assert torch.equal(whole, ternary(weight))
    for one, scale in zip(whole, trits(weight)[1], strict=True):
        assert set(one.unique().tolist()) == {-scale.item(), 0.0, scale.item()}
    half = ternary(weight, 0.5)
    torch.testing.assert_close(half, (weight + whole) / 2)


def test_the_share_moves_each_weight_in_a_straight_line():
    weight = matrices(6, 5)
    path = torch.stack([ternary(weight, share / 8) for share in range(9)])
    torch.testing.assert_close(
        path.diff(dim=0), ((path[-1] - weight) / 8).expand(8, 6, 5), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("share", [0.0, 0.3, torch.ones(1)])
def test_the_gradient_passes_straight_through(share):
    weight, down = matrices(2, 4, 5).requires_grad_(), matrices(2, 4, 5, seed=1)
    (ternary(weight, share) * down).sum().backward()
    assert torch.equal(weight.grad, down)
    _, tangent = torch.func.jvp(lambda w: ternary(w, share), (weight.detach(),), (down,))
    assert torch.equal(tangent, down)


def test_no_copy_of_the_weights_waits_for_the_backward_pass():
    """Only the product's own operands are kept: x and the rounded matrix."""
    weight, kept = matrices(3, 4).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        rounded = ternary(weight, torch.full((1,), 0.5))
        assert kept == []
        rounded.sum().backward()


def test_zeros_of_gaussian_weights():
    """|w| < s/2 with s = σ√(2/π): 31.0%. Of a mixture of scales, more (docs/designs/perspective.md#ternary-weights)."""
    zeros, scale = stats(matrices(3, 400, 300) * torch.tensor([0.01, 1, 7]).view(3, 1, 1))
    assert zeros.shape == scale.shape == (3,)
    expected = math.erf(math.sqrt(2 / math.pi) / 2 / math.sqrt(2))
    assert 0.30 < expected < 0.32
    torch.testing.assert_close(zeros, torch.full((3,), expected), rtol=0, atol=0.01)
    torch.testing.assert_close(scale / scale[1], torch.tensor([0.01, 1, 7]).double(), rtol=0.01, atol=0)


def test_each_matrix_has_its_own_scale():
    weight = matrices(2, 3, 4)
    larger = weight * torch.tensor([1.0, 100.0]).view(2, 1, 1)
    assert torch.equal(trits(larger)[0], trits(weight)[0])
    torch.testing.assert_close(ternary(larger)[1], 100 * ternary(weight)[1])
    assert torch.equal(ternary(larger)[0], ternary(weight)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype):
    nothing = torch.zeros(2, 3, 4, dtype=dtype)
    assert torch.equal(ternary(nothing), nothing)
    assert torch.equal(int8(nothing), nothing)
    zeros, scale = stats(nothing)
    assert zeros.tolist() == [1, 1] and scale.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_comes_back_within_half_a_step(dtype):
    x = matrices(6, 50, dtype=dtype) * torch.tensor([1e-3, 0.1, 1, 3, 10, 100], dtype=dtype).view(6, 1)
    got, step = int8(x), x.double().abs().amax(-1, keepdim=True) / 127
    assert got.dtype == dtype
    assert (
        (got.double() - x.double()).abs() <= step * 0.501 + x.double().abs() * torch.finfo(dtype).eps
    ).all()
    levels = (got.double() / step).round()
    assert levels.abs().max() == 127
    if dtype in (torch.float64, torch.float32):
        torch.testing.assert_close(got.double(), levels * step, rtol=1e-6, atol=0)
        torch.testing.assert_close(int8(got), got, rtol=1e-6, atol=0)
    leaf = x.clone().requires_grad_()
    int8(leaf).backward(x)
    assert torch.equal(leaf.grad, x)


def test_rows_of_int8_are_independent():
    x = matrices(5, 8)
    assert torch.equal(int8(x)[2], int8(x[2]))


def test_the_schedule_rises_from_0_to_1():
    for start, end in ((0, 10), (3, 3), (2.5, 7), (0, 0), (0, 0.5), (5, 1e9)):
        course = [share_at(step, start, end) for step in range(12)]
        assert all(a <= b for a, b in itertools.pairwise(course))
        assert all(0 <= share <= 1 for share in course)
        assert all(share == 0 for step, share in enumerate(course) if step + 1 <= start and step + 1 < end)
        assert all(share == 1 for step, share in enumerate(course) if step + 1 >= end)
    assert share_at(4, 0, 10) == 0.5
    assert share_at(9, 0, 10) == 1.0  # the last update of ten has it whole


def test_the_share_of_every_module_is_set():
    model = nn.ModuleList([nn.Module() for _ in range(3)])
    assert converted(model)
    for module in model[:2]:
        module.register_buffer("ternary_share_1", torch.zeros(1))
    assert not converted(model)
    set_share(model, 0.25)
    assert [module.ternary_share_1.item() for module in model[:2]] == [0.25, 0.25]
    assert not converted(model)
    set_share(model, 1.0)
    assert converted(model)


def test_the_documents_threshold_keeps_less():
    """Below 0.7 of the mean of a Gaussian lie 42.4%, of a Laplace distribution 50.3%."""
    draw = torch.Generator().manual_seed(0)
    gaussian = torch.randn(1000, 1000, generator=draw, dtype=torch.float64)
    laplace = gaussian.sign() * torch.empty_like(gaussian).exponential_(generator=draw)
    for weight, zeros in ((gaussian, 0.424), (laplace, 0.503)):
        assert stats(weight, "twn")[0].item() == pytest.approx(zeros, abs=2e-3)
    kept, scale = trits(gaussian, "twn")
    assert scale.item() == pytest.approx(gaussian[kept != 0].abs().mean().item())
    assert torch.equal(ternary(gaussian, 1.0, "twn"), kept * scale)
    nothing = torch.zeros(2, 3, 4)
    assert torch.equal(ternary(nothing, 1.0, "twn"), nothing)


def test_quarters_round_the_largest_weights_first():
    weight = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    whole = ternary(weight)
    for share, quarters in ((0.0, 0), (0.01, 1), (0.25, 1), (0.3, 2), (0.75, 3), (0.76, 4), (1.0, 4)):
        found = ternary(weight, torch.tensor([share]), schedule="quarters")
        rounded = (found == whole) & (whole != weight)
        for kept, size, all_ in zip(rounded, weight.detach().abs(), found == whole, strict=True):
            assert kept.sum() == 16 * quarters
            if 0 < quarters < 4:
                assert size[kept].min() >= size[~all_].max()
        assert torch.equal(found[~rounded], weight[~rounded])
    assert torch.equal(torch.autograd.grad(found.sum(), weight)[0], torch.ones_like(weight))
