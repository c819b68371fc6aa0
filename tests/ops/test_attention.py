"""`attend` where queries and keys are wider than values, with a scale of its own, and for one token.

Shapes: B batch, H heads, T queries, S keys, K key width, V value width.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perspectron import native
from perspectron.native import training
from perspectron.ops import attention, rope
from tests.refusals import refused

KINDS = ["none", "causal", "mask"]


def inputs(T: int, S: int, K: int, V: int, *, B: int = 2, H: int = 3, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, K), (B, H, S, K), (B, H, S, V))
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = scale * torch.einsum("bhtk,bhsk->bhts", q, k)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("bhts,bhsv->bhtv", scores.softmax(-1), v)


def some(B: int, T: int, S: int) -> Tensor:
    """A mask that lets every query see something."""
    mask = torch.rand(B, T, S, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[:, :, 0] = True
    return mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "V"), [(8, 8), (8, 4), (8, 1), (6, 5)])
@pytest.mark.parametrize("scale", [None, 1.0, 0.2])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 40), (7, 40), (40, 40)])
def test_it_equals_the_softmax_written_out(kind, K, V, scale, T, S):
    if kind == "causal" and T != S:
        T = S  # causal is of a chunk over itself
    q, k, v = (x.requires_grad_() for x in inputs(T, S, K, V))
    mask = some(2, T, S) if kind == "mask" else None
    o = attention.attend(q, k, v, mask, causal=kind == "causal", scale=scale)
    expected = explicit(q, k, v, mask, kind == "causal", K**-0.5 if scale is None else scale)
    assert o.shape == (2, 3, T, V)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    weighting = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((x * weighting).sum(), (q, k, v)) for x in (o, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("V", [8, 4])
@pytest.mark.parametrize("T", [1, 20])
def test_query_heads_may_share_a_key_head(kind, V, T):
    q, k, v = inputs(T, 20 if kind != "causal" else T, 8, V, H=6)
    k, v = k[:, :2].clone(), v[:, :2].clone()
    mask = some(2, T, 20) if kind == "mask" else None
    each = (x.repeat_interleave(3, 1) for x in (k, v))
    expected = explicit(q, *each, mask, kind == "causal", 8**-0.5)
    o = attention.attend(q, k, v, mask, causal=kind == "causal")
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


def test_on_a_gpu_a_mask_meets_as_many_key_heads_as_query_heads(monkeypatch):
    """Where there are groups and a mask, no fused kernel is left there."""
    fused, grouped = F.scaled_dot_product_attention, []

    def watch(q, k, v, mask, *, enable_gqa, **more):
        grouped.append(enable_gqa)
        return fused(q, k, v, mask, enable_gqa=enable_gqa, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    q, k, v = inputs(20, 20, 8, 8, H=6)
    k, v, mask = k[:, :2].clone().requires_grad_(), v[:, :2].clone().requires_grad_(), some(2, 20, 20)
    found = []
    for there in (False, True):
        monkeypatch.setattr(attention, "_takes_no_groups", lambda _, there=there: there)
        o = attention.attend(q, k, v, mask)
        found.append([o, *torch.autograd.grad(o.square().sum(), (k, v))])
        attention.attend(q, k, v, causal=True)
    assert grouped == [True, True, False, True]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The kernels that were called, in their order."""
    names: list[str] = []
    for name in ("attention", "attention_backward", "turned"):
        kernel = getattr(training, name)
        monkeypatch.setattr(
            training, name, lambda *x, kernel=kernel, name=name: names.append(name) or kernel(*x)
        )
    return names


def at_places(T: int, B: int, resets: bool, pads: bool) -> attention.Places:
    draw = torch.Generator().manual_seed(5)
    reset, pad = (torch.rand(B, T, generator=draw) < 0.1 for _ in range(2))
    return attention.places(
        torch.zeros(B, dtype=torch.int64), T, reset if resets else None, pad if pads else None
    )


@pytest.mark.parametrize(("resets", "pads"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("T", "W", "V"), [(1, 4, 8), (9, 4, 8), (100, 32, 8), (100, 200, 8), (100, None, 5)])
def test_training_in_float32_takes_our_kernel_and_agrees_with_float64(resets, pads, T, W, V, asked):
    """First chunks, windowed and whole, where documents begin and where there is padding."""
    at, B, H = at_places(T, 2, resets, pads), 2, 3
    exact = [x.requires_grad_() for x in inputs(T, T, 8, V)]
    brief = [x.detach().float().requires_grad_() for x in exact]
    found = []
    for x in (exact, brief):
        start = torch.zeros(B, dtype=torch.int64)
        size = W or 0
        ring = tuple(part.new_zeros(B, H, size, part.shape[3]) for part in x[1:])
        if W:
            o = attention.windowed(*x, ring, start, at, fresh=True)
        else:
            o = attention.cached(*x, tuple([part] for part in ring), start, at, fresh=True)
        weighting = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weighting = weighting * at.valid_BT[:, None, :, None]
        found.append([o.detach(), *torch.autograd.grad((o * weighting).sum(), x)])
    ours = native.available() and torch.get_default_device().type == "cpu" and (W is not None or not pads)
    assert asked == (["attention", "attention_backward"] if ours else [])
    there = at.valid_BT[:, None, :, None]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float() * there, b * there, rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize(("resets", "pads"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("window", [False, True])
def test_a_chunk_after_a_cache_has_the_bits_of_each_row_alone_and_agrees_with_float64(resets, pads, window):
    """Rows of different lengths, with documents that begin and padding in between; a cache of all, and of a window."""
    B, H, G, T, S, K = 4, 4, 2, 40, 30, 8
    draw = torch.Generator().manual_seed(5)
    reset, pad = (torch.rand(B, T, generator=draw) < 0.1 for _ in range(2))
    before = torch.tensor([S, 0, 17, 100 if window else 3])
    attend = attention.windowed if window else attention.cached
    masks = (reset if resets else None, pad if pads else None)
    shapes = ((B, H, T, K), (B, G, T, K), (B, G, T, K), (B, G, S, K), (B, G, S, K))
    numbers = [torch.randn(shape, generator=draw) for shape in shapes]

    def read(rows: slice, dtype: torch.dtype) -> Tensor:
        at = attention.places(before[rows], T, *(None if mask is None else mask[rows] for mask in masks))
        q, k, v, *ring = (x[rows].to(dtype) for x in numbers)
        kept = (ring[0], ring[1]) if window else ([ring[0]], [ring[1]])
        return attend(q, k, v, kept, before[rows], at) * ~pad[rows, None, :, None]

    whole, exact = read(slice(None), torch.float32), read(slice(None), torch.float64)
    torch.testing.assert_close(whole, exact.float(), rtol=1e-5, atol=1e-6)
    for b in range(B):
        assert torch.equal(read(slice(b, b + 1), torch.float32), whole[b : b + 1])


@pytest.mark.cpu_only("the meta device as the default beside tensors of the CPU")
def test_a_device_that_is_the_default_by_chance_changes_nothing():
    q, k, v = (x.float().requires_grad_() for x in inputs(9, 9, 8, 8))
    at = at_places(9, 2, True, False)
    with torch.device("meta"):
        attention.attend(q, k, v, causal=True).sum().backward()
        ring = ([k[:, :, :0]], [v[:, :, :0]])
        (y,) = torch.autograd.grad(
            attention.cached(q, k, v, ring, at.length_B * 0, at, fresh=True).square().sum(),
            q,
            create_graph=True,
        )
        y.sum().backward()
    assert q.grad.device.type == "cpu"


def test_what_a_chunk_does_not_hold_is_not_read():
    """A state made by hand: positions that are beyond an empty ring."""
    q, k, v = (x.float().requires_grad_() for x in inputs(9, 9, 8, 8))
    at = attention.places(torch.full((2,), 50), 9, None, None)
    for window in (4, 64):
        ring = tuple(x.new_zeros(2, 3, window, 8) for x in (k, v))
        o = attention.windowed(q, k, v, ring, torch.full((2,), 50), at, fresh=True)
        assert o.isfinite().all()


def test_a_transform_around_it_takes_pytorch():
    q, k, v = (x.float().requires_grad_() for x in inputs(5, 5, 8, 8))
    scales = torch.func.vmap(lambda s: s * attention.attend(q, k, v, causal=True).sum())(torch.ones(3))
    assert scales.shape == (3,)


@pytest.mark.cpu_only("native kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_kernel_is_the_one_that_trains(dtype, asked):
    q, k, v = (x.to(dtype).requires_grad_() for x in inputs(9, 9, 8, 8))
    attention.attend(q, k, v, causal=True).sum().backward()
    assert asked == (["attention", "attention_backward"] if native.available() else [])


@pytest.mark.cpu_only("native kernels")
def test_a_far_position_costs_no_precision(asked):
    """Training turns heads by a kernel; float64 does not."""
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turn = rope.angles(10**7 + torch.arange(5).expand(2, 5), 8, 10000.0)
    found = []
    for dtype in (torch.float64, torch.float32):
        # as mixers have it: [B,T,H,K] in memory
        part = x.transpose(1, 2).to(dtype).contiguous().requires_grad_()
        y = rope.turned(part.transpose(1, 2), turn)
        (gradient,) = torch.autograd.grad((y * x).sum(), part)
        found.append((y.detach(), gradient))
    assert asked == (["turned", "turned"] if native.available() else [])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-5, atol=1e-5)


def test_sharp_and_huge_scores_stay_finite():
    """Scores of 10⁴, whose exponential is beyond any float."""
    q, k, v = inputs(150, 150, 8, 4)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 0.05)):
        x = [(part * size).to(dtype).requires_grad_() for part, size in ((q, 100), (k, 100), (v, 1))]
        o = attention.attend(*x, causal=True)
        expected = explicit(*(part.double() for part in x), None, True, 8**-0.5)
        torch.testing.assert_close(o.double(), expected, rtol=tolerance, atol=tolerance)
        assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), x))


@pytest.mark.cpu_only("native kernels have them, a device has not")
def test_second_derivatives_are_exact_or_an_error():
    """Of our kernel's gradient they are those of the softmax written out; PyTorch's fused kernel has none."""
    exact = [x.requires_grad_() for x in inputs(5, 5, 8, 4)]
    brief = [x.detach().float().requires_grad_() for x in exact]
    found = []
    written_out = partial(explicit, mask=None, causal=True, scale=8**-0.5)
    for x, function in ((exact, written_out), (brief, partial(attention.attend, causal=True))):
        (gradient,) = torch.autograd.grad(function(*x).square().sum(), x[0], create_graph=True)
        if x is brief and not native.available():
            with pytest.raises(RuntimeError):
                torch.autograd.grad(gradient.square().sum() + x[0].sum(), x)
            return
        found.append(torch.autograd.grad(gradient.square().sum() + x[0].sum(), x))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-4, atol=1e-5)


def test_tangents_are_those_of_the_softmax_written_out():
    given = tuple(inputs(5, 5, 8, 4))
    along = tuple(torch.ones_like(x) for x in given)
    written_out = partial(explicit, mask=None, causal=True, scale=8**-0.5)
    expected = torch.func.jvp(written_out, given, along)[1]
    for dtype in (torch.float64, torch.float32):
        brief = [tuple(x.to(dtype) for x in part) for part in (given, along)]
        tangent = torch.func.jvp(partial(attention.attend, causal=True), *brief)[1]
        torch.testing.assert_close(tangent.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 40])
def test_16_bits_are_as_good_as_their_inputs(dtype, kind, T):
    q, k, v = (x.to(dtype) for x in inputs(T, T if kind == "causal" else 40, 16, 8))
    mask = some(2, T, 40) if kind == "mask" else None
    o = attention.attend(q, k, v, mask, causal=kind == "causal")
    expected = explicit(q.double(), k.double(), v.double(), mask, kind == "causal", 0.25)
    assert o.dtype == dtype
    assert (o - expected).norm() < 4 * torch.finfo(dtype).eps * expected.norm()


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor made under it that does not stand in the storage of `known`."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, leaf.numel())
        return out


@pytest.mark.parametrize("V", [4, 8])
@pytest.mark.parametrize("used", [500, 512])
def test_one_token_copies_no_cache(V, used):
    """The ring is a slice of a larger store, as in a cache that has room left."""
    q, k, v = inputs(1, 512, 8, V)
    ring = (k[:, :, :used], v[:, :, :used])
    mask = some(2, 1, used)
    with torch.inference_mode(), Allocations(k, v) as seen:
        o = attention.attend(q, *ring, mask)
    torch.testing.assert_close(o, explicit(q, *ring, mask, False, 8**-0.5), rtol=1e-12, atol=1e-12)
    assert 0 < seen.largest <= 2 * 3 * used, "scores, at most; keys and values are 4 and 8 times as large"


def test_the_recorder_sees_a_copy():
    q, k, v = inputs(1, 512, 8, 4)
    with torch.inference_mode(), Allocations(k, v) as seen:
        attention.attend(q, k.float(), v)
    assert seen.largest >= k.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_causal_attention_of_fewer_or_more_queries_than_keys_is_refused(T, dtype):
    with refused(ValueError, "causal", T, 5):
        attention.attend(*(x.to(dtype) for x in inputs(T, 5, 8, 8)), causal=True)


@pytest.mark.parametrize("T", [1, 3])
def test_weights_of_few_queries_are_dropped_too(T):
    """All of them: nothing is left of a query, in a window of one token either."""
    q, k, v = (x.requires_grad_() for x in inputs(T, T, 8, 8))
    assert not attention.attend(q, k, v, causal=True, drop=torch.zeros_like).any()
    ring = tuple(x.new_zeros(2, 3, 1, 8) for x in (k, v))
    start, at = torch.zeros(2, dtype=torch.int64), at_places(T, 2, False, False)
    assert not attention.windowed(q, k, v, ring, start, at, drop=torch.zeros_like).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_a_mask_and_causal_are_both_kept_and_values_may_be_wider(dtype, grad) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, H, 6, W, dtype=dtype) for H, W in ((4, 4), (2, 4), (2, 7)))
    mask = (torch.rand(2, 6, 6) < 0.6) | torch.eye(6, dtype=torch.bool)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    scores = (q * 4**-0.5) @ k.repeat_interleave(2, 1).mT
    q.requires_grad_(grad)
    for given, causal, sees in ((mask, True, mask & seen), (None, True, seen), (mask, False, mask)):
        sees = sees if sees.ndim == 2 else sees[:, None]
        want = scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
        for width in (7, 4):
            found = attention.attend(q, k, v[..., :width], given, causal=causal)
            torch.testing.assert_close(found.detach(), want[..., :width], rtol=1e-4, atol=1e-5)
