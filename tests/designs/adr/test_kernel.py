"""The kernel of the decayed GRU against the plain loop in float64, in every instruction set."""

import pytest
import torch

from perspectron import native
from perspectron.designs.adr import gru, gru_loop
from perspectron.designs.adr.gru import Cells

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
ISAS = ("avx512", "avx2", "scalar")
SIZES = [(1, 1, 1, 1, 3), (3, 63, 2, 2, 5), (8, 64, 1, 1, 40), (5, 65, 1, 3, 33)]
"""B, T, G, R, D."""


def case(sizes, masked=False, learned=False, dtype=torch.float32):
    (B, T, G, R, D), draw = sizes, torch.Generator().manual_seed(0)
    shapes = [(B, T, G, R, D), (G, D, 3 * D), (G, D, 3 * D), (G, 3 * D), (G, 3 * D), (B, G, R, D)]
    tensors = [torch.randn(shape, generator=draw) for shape in shapes]
    tensors[1:3] = [w * D**-0.5 for w in tensors[1:3]]
    gamma = torch.rand(G, R, generator=draw) if learned else None
    leaves = [x.to(dtype).requires_grad_() for x in (*tensors, *([gamma] if learned else []))]
    masks = {}
    if masked:
        masks = {name: torch.rand(B, T, generator=draw) < 0.2 for name in ("reset_BT", "pad_BT")}
    return leaves, masks


def results(sizes, masked, learned, raw, dtype=torch.float32, backend="auto"):
    """All outputs, and the gradients of a fixed weighting of them."""
    leaves, masks = case(sizes, masked, learned, dtype)
    x, *cells, state = leaves[:6]
    gamma = leaves[6] if learned else 0.9
    found = gru.scan(x, Cells(*cells), gamma, state, raw=raw, backend=backend, **masks)
    outputs, draw = [y for y in found if y is not None], torch.Generator().manual_seed(1)
    loss = sum((y * torch.randn(y.shape, generator=draw).to(dtype)).sum() for y in outputs)
    return [y.detach() for y in outputs] + list(torch.autograd.grad(loss, leaves))


@pytest.mark.few(24)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents and padding"])
@pytest.mark.parametrize("learned", [False, True], ids=["one rate", "learned rates"])
@pytest.mark.parametrize("raw", [False, True], ids=["decayed", "raw too"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_equals_the_plain_loop(isa, sizes, masked, learned, raw, use_isa, monkeypatch):
    use_isa(isa)
    calls, own = [], gru_loop.kernel.backward
    monkeypatch.setattr(gru_loop.kernel, "backward", lambda *args: calls.append(1) or own(*args))
    found = results(sizes, masked, learned, raw)
    assert len(calls) == -(-sizes[1] // gru_loop.CHUNK)
    exact = results(sizes, masked, learned, raw, torch.float64, "naive")
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours - theirs).norm() <= 3e-6 * theirs.norm() + 1e-12


def test_bits_do_not_depend_on_instruction_set_or_threads(use_isa):
    def bits(isa, threads):
        use_isa(isa)
        native.set_threads(threads)
        try:
            return results((5, 66, 3, 3, 33), masked=True, learned=True, raw=True)
        finally:
            native.set_threads(None)

    first = bits("avx512", 1)
    for isa, threads in (("avx512", 2), ("avx2", 1), ("avx2", 2), ("scalar", 1)):
        assert all(map(torch.equal, first, bits(isa, threads))), (isa, threads)


def test_padding_leaves_a_memory_as_it_is():
    """To the bit, and where it is 0, too."""
    (x, *cells, state), _ = case((2, 5, 1, 1, 19))
    state.data[0] = 0
    pad_BT = torch.zeros(2, 5, dtype=torch.bool)
    pad_BT[:, 1:] = pad_BT[0] = True
    h, _, last = gru.scan(x, Cells(*cells), 0.5, state, pad_BT=pad_BT)
    assert not h[0].any()
    assert torch.equal(h[1, 1:], h[1, :1].expand(4, -1, -1, -1)) and torch.equal(last[1], h[1, 0])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nothing_of_before_a_reset_is_remembered(backend):
    """Not even a NaN; and gradients of what comes after do not see it."""
    (x, *cells, state), _ = case((1, 8, 1, 1, 5))
    broken = x.detach().clone()
    broken[0, 2] = float("nan")
    broken.requires_grad_()
    reset_BT = torch.arange(8)[None] == 4
    h, _, last = gru.scan(broken, Cells(*cells), 0.9, state, reset_BT=reset_BT, backend=backend)
    assert h[0, 2:4].isnan().all() and h[0, 4:].isfinite().all()
    (gradient,) = torch.autograd.grad(last.sum(), broken)
    assert gradient[0, 4:].isfinite().all() and gradient[0, 4:].any()


def test_a_gradient_asked_for_alone_is_the_same():
    leaves, _ = case((3, 9, 2, 1, 5))
    whole = results((3, 9, 2, 1, 5), masked=False, learned=False, raw=False)[2:]
    for i, leaf in enumerate(leaves):
        inputs = [x.detach() for x in leaves]
        inputs[i] = leaf
        x, *cells, state = inputs
        outputs = [y for y in gru.scan(x, Cells(*cells), 0.9, state) if y is not None]
        draw = torch.Generator().manual_seed(1)
        loss = sum((y * torch.randn(y.shape, generator=draw)).sum() for y in outputs)
        torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], whole[i])
