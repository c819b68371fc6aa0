"""The three lenses in one attention call, against the document's formula with every score written out.

Shapes: B batch, H heads, T time, K head width.
"""

import itertools

import pytest
import torch
from torch import Tensor

from perspectron.designs.lens import op as lens
from perspectron.ops import attention

B, H, K = 2, 3, 8
LENGTHS = [1, 2, 63, 64, 65]
SWITCHES = list(itertools.product([True, False], repeat=4))  # reciprocity, discoverability, gates, disc_scale


def inputs(T: int, *, learned: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """q, k, v [B,H,T,K], u [H,K] and the gates [H,3]: of any size, or those of the start."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, H, T, K), "k": (B, H, T, K), "v": (B, H, T, K), "u": (H, K), "gates": (H, 3)}
    found = {name: torch.randn(s, generator=draw, dtype=torch.float64) for name, s in shapes.items()}
    if not learned:
        found["gates"] = torch.tensor([2.773, 1.099, 0.0], dtype=torch.float64).repeat(H, 1)
    return found


def mixture(gates_H3: Tensor, reciprocity: bool, discoverability: bool) -> Tensor:
    """Softmax over the lenses that are on."""
    off = torch.tensor([False, not reciprocity, not discoverability])
    return gates_H3.masked_fill(off, float("-inf")).softmax(-1)


def fast(x: dict[str, Tensor], reciprocity: bool, discoverability: bool, disc_scale: bool, call) -> Tensor:
    w_H3 = mixture(x["gates"], reciprocity, discoverability)
    u_HK = x["u"] if discoverability else None
    q, k = lens.features(x["q"], x["k"], u_HK, w_H3, reciprocity=reciprocity, disc_scale=disc_scale)
    assert q.shape == k.shape == (B, H, x["q"].shape[2], 2 * K if reciprocity else K)
    return call(q, k, x["v"])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.attend(q, k, v, causal=True, scale=K**-0.5)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As after a reset: the same keys, by a mask."""
    T = q.shape[2]
    seen_BTT = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
    return attention.attend(q, k, v, seen_BTT, scale=K**-0.5)


@pytest.mark.parametrize("call", [causal, masked])
@pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "".join("01"[on] for on in s))
def test_one_call_equals_the_formula_forward_and_backward(switches, call):
    reciprocity, discoverability, learned, disc_scale = switches
    for T in LENGTHS:
        x = {name: value.requires_grad_() for name, value in inputs(T, learned=learned).items()}
        w_H3 = mixture(x["gates"], reciprocity, discoverability)
        slow = lens.naive(x["q"], x["k"], x["v"], x["u"], w_H3, disc_scale=disc_scale)
        found = fast(x, reciprocity, discoverability, disc_scale, call)
        torch.testing.assert_close(found, slow, rtol=1e-12, atol=1e-12)
        weighting = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        wanted = {name: value for name, value in x.items() if discoverability or name != "u"}
        gradients = [torch.autograd.grad((o * weighting).sum(), list(wanted.values())) for o in (found, slow)]
        for name, a, b in zip(wanted, *gradients, strict=True):
            alone = T == 1 and name != "v"  # one key is read whatever its score
            flat = name == "gates" and not reciprocity and not discoverability
            assert (b.abs().max() > 1e-3) is not (alone or flat), name
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"d{n}: {m}")


def plainly(q: Tensor, k: Tensor, v: Tensor, u: Tensor, w: Tensor, i: int, disc_scale: bool) -> Tensor:
    """Output [K] at position i of one head of one row, from single products."""
    logits = torch.stack([
        w[0] * (q[i] @ k[j]) / K**0.5 + w[1] * (q[j] @ k[i]) / K**0.5
        + w[2] * (k[j] @ u) / (K**0.5 if disc_scale else 1)
        for j in range(i + 1)
    ])  # fmt: skip
    return logits.softmax(0) @ v[: i + 1]


@pytest.mark.parametrize("disc_scale", [False, True])
def test_the_formula_is_the_documents(disc_scale):
    x = inputs(5)
    w_H3 = mixture(x["gates"], True, True)
    o = lens.naive(x["q"], x["k"], x["v"], x["u"], w_H3, disc_scale=disc_scale)
    for b, h, i in itertools.product(range(B), range(H), range(5)):
        head = (x[name][b, h] for name in "qkv")
        expected = plainly(*head, x["u"][h], w_H3[h], i, disc_scale)
        torch.testing.assert_close(o[b, h, i], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [causal, masked])
def test_nothing_before_a_token_hears_of_it(call):
    x = inputs(66)
    before = fast(x, True, True, False, call)
    for t in (0, 1, 31, 64, 65):
        changed = {name: value.clone() for name, value in x.items()}
        for name in "qkv":
            changed[name][:, :, t] += 1
        after = fast(changed, True, True, False, call)
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert (after[:, :, t:] - before[:, :, t:]).abs().amax((0, 1, 3)).min() > 1e-6, "each later one does"


@pytest.mark.parametrize("name", ["q", "k", "v", "u", "gates"])
def test_a_query_of_the_past_scores_the_key_of_now(name):
    """Each input matters to the last token, the first token's query too, but only through the transpose."""
    for reciprocity in (True, False):
        x = inputs(9)
        before = fast(x, reciprocity, True, False, causal)[:, :, -1]
        part = x[name][:, :, 0] if name in "qkv" else x[name][..., 0]
        part += 1
        moved = (fast(x, reciprocity, True, False, causal)[:, :, -1] - before).abs().max() > 1e-6
        assert moved == (reciprocity or name != "q")
