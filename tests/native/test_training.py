"""The kernels of a training against PyTorch in float64, in every instruction set."""

import pytest
import torch
import torch.nn.functional as F

from perspectron import native
from perspectron.native import training
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
ISAS = ("avx512", "avx2", "scalar")
DTYPES = {
    "float32": (torch.float32, 2e-6),
    "bfloat16": (torch.bfloat16, 5e-3),
}  # half a unit in the last place


def draw(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def close(found, exact, bound):
    for a, b in zip(found, exact, strict=True):
        assert (a - b).abs().max() <= bound * b.abs().max().clamp_min(1e-30)


def gradients(function, inputs, dy):
    inputs = [x.double().requires_grad_() for x in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.double())]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 5, 16, 257, 512])
def test_the_loss_and_its_gradient_are_those_of_float64(isa, dtype, V, use_isa):
    use_isa(isa)
    dtype, bound = DTYPES[dtype]
    logits, target = draw(9, V, dtype=dtype, scale=5), torch.arange(9) % V
    target[4] = -100
    losses, total = training.entropy(logits, target)
    found = training.entropy_backward(logits, target, total, 0.25)

    def exact(x):
        return F.cross_entropy(x, target, reduction="none")

    y, dx = gradients(exact, [logits], torch.full((9,), 0.25))
    assert losses.dtype == torch.float32 and found.dtype == dtype
    close([losses], [y], 2e-6)
    close([found], [dx], bound)
    assert losses[4] == 0 and not found[4].any()


def test_the_loss_of_far_logits():
    """Where e^x would overflow; a logit of −∞ is a token that cannot come; NaN and +∞ are NaN."""
    logits = torch.tensor([[1000.0, 998.0, -1e4], [3.0, float("-inf"), 2.0], [-2e4, -2e4, -2e4]])
    target = torch.tensor([1, 0, 2])
    close([training.entropy(logits, target)[0]], [F.cross_entropy(logits, target, reduction="none")], 1e-6)
    for wrong in (float("nan"), float("inf")):
        for width in (3, 16, 33):
            for at in range(0, width, 2):
                row = torch.zeros(1, width)
                row[0, at] = wrong
                assert training.entropy(row, torch.tensor([1]))[0].isnan().all(), (wrong, width, at)


def test_a_target_beyond_the_vocabulary_is_refused():
    with refused(ValueError, "target", 7):
        training.entropy(draw(2, 7), torch.tensor([0, 7]))


def attention_inputs(B, T, H, G, K, V, window, dtype=torch.float32):
    """Queries, keys, values, the gradient of the outputs, and what each token sees: two documents and a window."""
    shapes = ((H, K), (G, K), (G, V), (H, V))
    tensors = [draw(B, T, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    time = torch.arange(T)
    start = torch.where(time < T // 3, 0, T // 3)
    first = torch.maximum(time - window + 1, start).to(torch.int32).expand(B, T).contiguous()
    return tensors, first


def attention_written_out(q, k, v, first, scale):
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    time = torch.arange(q.shape[1])
    sees = (time <= time[:, None]) & (time >= first[:, :, None])
    scores = torch.einsum("bthk,bshk->bhts", q, k) * scale
    weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v)


ATTENTION = [  # B, T, H, G, K, V, window
    (1, 1, 1, 1, 2, 1, 5),
    (2, 7, 2, 1, 4, 3, 3),
    (1, 130, 3, 3, 32, 32, 64),
    (2, 77, 4, 2, 90, 33, 16),
    (1, 200, 2, 2, 48, 20, 300),
    (1, 1030, 2, 1, 18, 20, 2000),  # longer than the keys that are taken at once
    (2, 1541, 2, 2, 16, 16, 530),
    (1, 700, 1, 1, 8, 5, 40),
    (1, 1541, 2, 2, 16, 16, 531),
]


@pytest.mark.few(24)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", ATTENTION, ids=str)
def test_attention_to_what_a_token_may_see(isa, dtype, sizes, use_isa):
    use_isa(isa)
    dtype, bound = DTYPES[dtype]
    (q, k, v, dy), first = attention_inputs(*sizes, dtype)
    o, lse = training.attention(q, k, v, first, 0.3)
    found = [o, *training.attention_backward(q, k, v, first, 0.3, o, lse, dy)]
    exact = gradients(lambda q, k, v: attention_written_out(q, k, v, first, 0.3), [q, k, v], dy)
    if sizes[1] == 1:  # one key: queries and keys change nothing
        assert not found[1].any() and not found[2].any()
        found, exact = (found[0], found[3]), (exact[0], exact[3])
    close(found, exact, 2 * bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("B", "T", "ahead", "H", "G", "K", "V"), [
    (2, 9, 0, 3, 1, 4, 3), (1, 1, 40, 2, 2, 8, 8), (2, 77, 23, 4, 2, 90, 33), (1, 70, 1005, 2, 1, 18, 20),
])  # fmt: skip
def test_attention_after_other_keys_is_the_same_however_the_chunk_is_cut(
    isa, B, T, ahead, H, G, K, V, use_isa
):
    use_isa(isa)
    S = ahead + T
    q, k, v = draw(B, T, H, K), draw(B, G, S, K, seed=1), draw(B, G, S, V, seed=2)
    first = torch.zeros(B, T, dtype=torch.int32)
    first[:, T // 2 :] = ahead // 2

    def part(begin: int, end: int) -> torch.Tensor:
        seen = ahead + end
        chunk = (q[:, begin:end], k[:, :, :seen], v[:, :, :seen], first[:, begin:end])
        return training.attention_after(*(x.contiguous() for x in chunk), 0.3)

    whole = part(0, T)
    key = torch.arange(S)
    sees = (key <= torch.arange(ahead, S)[:, None]) & (key >= first[:, :, None])
    many = [x.double().repeat_interleave(H // G, 1) for x in (k, v)]
    scores = torch.einsum("bthk,bhsk->bhts", q.double(), many[0]) * 0.3
    weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1)
    close([whole], [torch.einsum("bhts,bhsv->bthv", weights, many[1])], 1e-6)
    for cut in {1, T // 2, T - 1} - {0, T}:
        assert torch.equal(torch.cat([part(0, cut), part(cut, T)], 1), whole)


def test_attention_after_fewer_keys_than_tokens_is_refused():
    with refused(ValueError, "S", 2):
        training.attention_after(
            draw(1, 3, 1, 4), draw(1, 1, 2, 4), draw(1, 1, 2, 4), torch.zeros(1, 3, dtype=torch.int32), 1.0
        )


def test_attention_of_documents_with_padding_between():
    """Padding sees itself alone, and what a token sees may begin before what the one before it sees."""
    T, draws = 1100, torch.Generator().manual_seed(0)
    (q, k, v, dy), _ = attention_inputs(1, T, 2, 1, 12, 8, T)
    time, start = torch.arange(T), torch.where(torch.arange(T) < 620, 30, 620)
    alone = (torch.rand(T, generator=draws) < 0.2) | (time < 30)
    first = torch.where(alone, time, start).to(torch.int32)[None]
    o, lse = training.attention(q, k, v, first, 0.3)
    found = [o, *training.attention_backward(q, k, v, first, 0.3, o, lse, dy)]
    close(found, gradients(lambda q, k, v: attention_written_out(q, k, v, first, 0.3), [q, k, v], dy), 2e-5)


@pytest.mark.parametrize("scale", [-60.0, 60.0])
def test_attention_whose_weights_rise_or_fall_from_key_to_key(scale):
    """What was gathered of earlier keys fades away, or all that comes later hardly counts."""
    T = 1600
    time, v = torch.arange(T).view(1, T, 1, 1), draw(1, T, 1, 4, seed=1)
    k, q = scale * time / T + draw(1, T, 1, 1), torch.ones(1, T, 1, 1)
    first = torch.zeros(1, T, dtype=torch.int32)
    o, lse = training.attention(q, k, v, first, 1.0)
    found = [o, *training.attention_backward(q, k, v, first, 1.0, o, lse, v)]
    close(found, gradients(lambda q, k, v: attention_written_out(q, k, v, first, 1.0), [q, k, v], v), 1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "begins"), [(torch.float32, (3, 64)), (torch.bfloat16, (4, 64))], ids=str)
def test_attention_of_a_token_depends_on_what_it_sees_alone(isa, dtype, begins, use_isa):
    """Bit for bit, among keys that are taken at once: later tokens and those before its window are others, and it
    stands elsewhere in its tile, of bfloat16 by whole pairs."""
    use_isa(isa)
    (q, k, v, _), _ = attention_inputs(1, 150, 2, 2, 20, 20, 40, dtype)
    first = (torch.arange(150) - 39).clamp_min(0).to(torch.int32)[None]
    whole, _ = training.attention(q, k, v, first, 0.2)
    for begin in begins:
        q2, k2, v2 = (x[:, begin : begin + 60].contiguous() for x in (q, k, v))
        part, _ = training.attention(q2, k2, v2, first[:, :60].contiguous(), 0.2)
        assert torch.equal(part[:, 39:], whole[:, begin + 39 : begin + 60])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [2, 14, 32, 70])
def test_heads_turned_by_their_positions(isa, dtype, K, use_isa):
    use_isa(isa)
    dtype, bound = DTYPES[dtype]
    x, angle = draw(10, 2, 3, K, dtype=dtype)[:, 1], draw(10, K // 2, seed=1)  # rows apart from each other
    y = training.turned(x, angle.cos(), angle.sin())
    cos, sin = (f(angle.double())[:, None] for f in (torch.cos, torch.sin))
    a, b = x.double().chunk(2, -1)
    close([y], [torch.cat([a * cos - b * sin, a * sin + b * cos], -1)], bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(2, 3), (5, 13), (130, 48)])
def test_norms_and_their_gradients_are_those_of_float64(isa, shape, use_isa):
    use_isa(isa)
    x, weight, dy = draw(*shape), draw(shape[1], seed=1), draw(*shape, seed=2)
    y, r = training.norm(x, weight, 1e-5)
    found = [y, *training.norm_backward(x, weight, r, dy)]
    close(found, gradients(lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), [x, weight], dy), 3e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (40, 33)])
def test_gated_products_and_their_gradients_are_those_of_float64(isa, dtype, shape, use_isa):
    use_isa(isa)
    dtype, bound = DTYPES[dtype]
    a, b, dy = (draw(*shape, seed=seed, dtype=dtype, scale=3) for seed in range(3))
    found = [training.gated(a, b), *training.gated_backward(a, b, dy)]
    close(found, gradients(lambda a, b: F.silu(a) * b, [a, b], dy), bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (40, 33)])
def test_gelu_by_tanh_and_its_gradient_are_those_of_float64(isa, dtype, shape, use_isa):
    use_isa(isa)
    dtype, bound = DTYPES[dtype]
    x, dy = (draw(*shape, seed=seed, dtype=dtype, scale=3) for seed in range(2))
    found = [training.gelu(x), training.gelu_backward(x, dy)]
    close(found, gradients(lambda x: F.gelu(x, approximate="tanh"), [x], dy), bound)


def test_gelu_of_numbers_that_are_far_out():
    far = torch.tensor([-1e38, -200.0, -20.0, 20.0, 200.0, 1e38])
    assert (training.gelu(far) - far.clamp_min(0)).abs().max() < 1e-30
    assert (training.gelu_backward(far, torch.ones(6)) - (far > 0).float()).abs().max() < 1e-30
    assert training.gelu(torch.tensor([float("nan")])).isnan().all()


def shifted_inputs(B, T, D, N, resets):
    """Tokens, the last before them, mixes, where documents begin, and the gradients of the results."""
    reset = draw(B, T, seed=4) > 0.8 if resets else None
    return draw(B, T, D), draw(B, D, seed=1), draw(N, D, seed=2), reset, tuple(draw(N, B, T, D, seed=3))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(("B", "T", "D", "N"), [(1, 1, 1, 1), (3, 5, 7, 4), (2, 150, 48, 2), (5, 64, 16, 1)])
def test_mixes_with_the_token_before(isa, B, T, D, N, resets, use_isa):
    use_isa(isa)
    *inputs, reset, dy = shifted_inputs(B, T, D, N, resets)

    def exact(x, last, mix):
        before = torch.cat([last[:, None], x[:, :-1]], 1)
        before = before if reset is None else before.masked_fill(reset[:, :, None], 0)
        return x + (before - x) * mix[:, None, None]

    y = torch.stack(training.shifted(*inputs, reset))
    found = [y, *training.shifted_backward(*inputs, reset, dy)]
    close(found, gradients(exact, inputs, torch.stack(dy)), 3e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (40, 33)])
def test_decays_and_what_they_let_in(isa, dtype, shape, use_isa):
    use_isa(isa)
    dtype, bound = DTYPES[dtype]
    p, v = (draw(*shape, seed=seed, dtype=dtype, scale=4) for seed in range(2))
    dgamma, dy = draw(*shape, seed=2), draw(*shape, seed=3)
    found = [*training.decayed(p, v), *training.decayed_backward(p, v, dgamma, dy)]
    exact = [x.double().requires_grad_() for x in (p, v)]
    gamma = torch.sigmoid(exact[0])
    y = exact[1] * torch.sqrt(1 - gamma.square())
    gradients = torch.autograd.grad((gamma, y), exact, (dgamma.double(), dy.double()))
    close(found, [gamma, y, *gradients], bound)


@pytest.mark.parametrize("isa", ISAS)
def test_decays_that_round_to_one_have_gradients(isa, use_isa):
    use_isa(isa)
    p, v = torch.tensor([20.0, 60.0, 80.0, 1e4, -60.0, -1e4]), torch.ones(6)
    found = [*training.decayed(p, v), *training.decayed_backward(p, v, torch.zeros(6), v)]
    assert all(x.isfinite().all() for x in found)
    wanted = torch.sqrt(2 * torch.exp(-p[:3].double()))
    torch.testing.assert_close(found[1][:3].double(), wanted, rtol=1e-5, atol=1e-19)
    torch.testing.assert_close(found[2][:3].double(), -0.5 * wanted, rtol=1e-5, atol=1e-19)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("B", "T", "W", "C"), [(1, 1, 1, 1), (2, 3, 4, 5), (3, 20, 4, 48), (1, 5, 2, 17)])
def test_convolutions_and_their_gradients_are_those_of_float64(isa, masked, B, T, W, C, use_isa):
    use_isa(isa)
    u, weight, bias = draw(B, T + W - 1, C), draw(W, C, seed=1), draw(C, seed=2)
    sees = (draw(B, T, W, seed=3) > 0).float() if masked else None

    def exact(u, weight, bias):
        taps = u.unfold(1, W, 1)  # [B,T,C,W]
        if sees is not None:
            taps = taps * sees[:, :, None]
        return F.silu((taps * weight.T).sum(-1) + bias)

    dy = draw(B, T, C, seed=4)
    found = training.convolve(u, weight, bias, sees), *training.convolve_backward(u, weight, bias, sees, dy)
    close(found, gradients(exact, [u, weight, bias], dy), 3e-6)


def memory_inputs(kind, N, T, K, V, A):
    """q, k, v, e, b, α from exactly 0 to exactly 1, and a state; e and b as the kind has them."""
    q, k, e, b = (draw(N, T, K, seed=seed) / K**0.5 for seed in range(4))
    gate = draw(N, T, A, seed=4).sigmoid()
    gate = torch.where(gate < 0.2, 0.0, torch.where(gate > 0.7, 1.0, gate))
    e, b = (None if kind == "sum" else e), (b if kind == "two" else None)
    return [q, k, draw(N, T, V, seed=5), e, b, gate, draw(N, K, V, seed=6)]


def plain_memory(q, k, v, e, b, gate, state):
    outputs = []
    for t in range(q.shape[1]):
        u = v[:, t, None] if b is None else 0
        if e is not None:
            u = u - e[:, t, None] @ state
        state = gate[:, t, :, None] * state + (k if b is None else b)[:, t, :, None] * u
        if b is not None:
            state = state + k[:, t, :, None] * v[:, t, None]
        outputs.append(q[:, t, None] @ state)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["sum", "delta", "two"])
@pytest.mark.parametrize(
    ("N", "T", "K", "V", "A"),
    [(1, 1, 1, 1, 1), (2, 9, 5, 7, 5), (3, 17, 4, 33, 1), (1, 8, 16, 48, 16), (2, 5, 3, 150, 3)],
)
def test_memories_and_their_gradients_are_those_of_float64(isa, kind, N, T, K, V, A, use_isa):
    use_isa(isa)
    inputs = memory_inputs(kind, N, T, K, V, A)
    there = [x for x in inputs if x is not None]
    weights = draw(N, T, V, seed=7), draw(N, K, V, seed=8)
    outputs = training.memory(*inputs)
    found = [*outputs, *(x for x in training.memory_backward(*inputs, *weights) if x is not None)]
    exact = [None if x is None else x.double().requires_grad_() for x in inputs]
    wanted = plain_memory(*exact)
    wanted = [
        *wanted,
        *torch.autograd.grad(wanted, [x for x in exact if x is not None], [w.double() for w in weights]),
    ]
    assert len(found) == 2 + len(there)
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 3e-6 * b.norm().clamp_min(1e-30)


def every_result():
    for dtype, _ in DTYPES.values():
        logits, target = draw(40, 1030, dtype=dtype), torch.arange(40)
        losses, total = training.entropy(logits, target)
        yield from (losses, training.entropy_backward(logits, target, total, 0.3))
        a, b, dy = (draw(70, 1001, seed=seed, dtype=dtype) for seed in range(3))
        yield from (training.gated(a, b), *training.gated_backward(a, b, dy))
        yield from (training.gelu(a), training.gelu_backward(a, dy))
        yield from (*training.decayed(a, b), *training.decayed_backward(a, b, b.float(), dy.float()))
        sizes_of = ((2, 7, 2, 1, 4, 3, 3), (1, 1541, 1, 1, 16, 16, 530), (2, 77, 4, 2, 90, 33, 16))
        for sizes in (*sizes_of, (3, 90, 4, 2, 40, 24, 30)):
            (q, k, v, dy), first = attention_inputs(*sizes, dtype)
            o, lse = training.attention(q, k, v, first, 0.3)
            yield from (o, lse, *training.attention_backward(q, k, v, first, 0.3, o, lse, dy))
        yield training.turned(q.flatten(0, 1), draw(270, 20), draw(270, 20, seed=1))
    x, weight = draw(300, 130), draw(130, seed=1)
    y, r = training.norm(x, weight, 1e-5)
    *inputs, dy = shifted_inputs(2, 150, 130, 3, True)
    yield from (*training.shifted(*inputs), *training.shifted_backward(*inputs, dy))
    yield from (y, *training.norm_backward(x, weight, r, y))
    u, weight, bias = draw(3, 20, 33), draw(4, 33, seed=1), draw(33, seed=2)
    yield from training.convolve_backward(u, weight, bias, None, training.convolve(u, weight, bias, None))
    for kind, A in (("delta", 20), ("two", 1)):
        inputs = memory_inputs(kind, 3, 30, 20, 90, A)
        o, state = training.memory(*inputs)
        yield from (o, state, *(x for x in training.memory_backward(*inputs, o, state) if x is not None))


def test_threads_do_not_change_a_bit():
    native.set_threads(1)
    try:
        alone = list(every_result())
        native.set_threads(3)
        assert all(map(torch.equal, alone, every_result()))
    finally:
        native.set_threads(None)


@pytest.mark.parametrize("isa", ["avx2", "scalar"])
def test_instruction_sets_do_not_change_a_bit(isa, use_isa):
    best = list(every_result())
    use_isa(isa)
    assert all(map(torch.equal, best, every_result()))


def test_what_does_not_fit_is_refused():
    q, first = draw(1, 3, 4, 2), torch.zeros(1, 3, dtype=torch.int32)
    for call in (
        lambda: training.attention(q, q[:, :, :3].contiguous(), q[:, :, :3].contiguous(), first, 1.0),
        lambda: training.attention(q, q, q, first, -1.0),
        lambda: training.attention(q, q, q, first.long(), 1.0),
        lambda: training.turned(q[0], draw(3, 2), draw(3, 2)),
        lambda: training.turned(q[0, :, :, :1].contiguous(), draw(3, 0), draw(3, 0)),
        lambda: training.turned(q[0], draw(2, 1), draw(2, 1)),
        lambda: training.entropy(draw(2, 3).double(), torch.tensor([0, 1])),
        lambda: training.entropy(draw(3, 2).T, torch.tensor([0, 1])),
        lambda: training.norm(draw(2, 3), draw(4), 1e-5),
        lambda: training.gated(draw(2, 3), draw(2, 3).bfloat16()),
        lambda: training.decayed(draw(2, 3), draw(2, 4)),
        lambda: training.shifted(draw(1, 2, 3), draw(1, 3), draw(1, 4), None),
        lambda: training.shifted(draw(1, 0, 3), draw(1, 3), draw(1, 3), None),
        lambda: training.shifted_backward(draw(1, 2, 3), draw(1, 3), draw(2, 3), None, [draw(1, 2, 3)]),
        lambda: training.convolve(draw(1, 5, 3), draw(4, 2), draw(3), None),
        lambda: training.memory(*memory_inputs("sum", 2, 3, 4, 5, 3)),
    ):
        with refused(ValueError):
            call()
    with refused(ValueError, "S", 2):
        training.convolve(draw(1, 2, 3), draw(4, 3), draw(3), None)
