"""The decayed GRU against torch's own cell and the plain loop, in every direction.

Shapes: B batch, T time, G groups of weights, R rows that share them, D width.
"""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from perspectron.designs.adr import gru
from perspectron.designs.adr.gru import Cells
from perspectron.util.errors import BackendError
from tests.refusals import refused

LENGTHS = [1, 2, 63, 64, 65, 150]
MASKS = [(), ("reset_BT",), ("pad_BT",), ("reset_BT", "pad_BT")]
NAMES = ["x", "wi", "wh", "bi", "bh", "state"]
GAMMA = 0.9

every_length = pytest.mark.parametrize("T", LENGTHS)
every_mask = pytest.mark.parametrize("masked", MASKS, ids=lambda names: "+".join(names) or "plain")
parallel = pytest.mark.parametrize("backend", ["torch"])


def inputs(T, B=3, G=2, R=2, D=5, scale=1.0, dtype=torch.float64, seed=0) -> list[Tensor]:
    """x, weights and biases, a non-zero state."""
    draw = torch.Generator().manual_seed(seed)
    weight = scale * D**-0.5
    sizes = [(B, T, G, R, D), (G, D, 3 * D), (G, D, 3 * D), (G, 3 * D), (G, 3 * D), (B, G, R, D)]
    scales = [1, weight, weight, 1, 1, 1]
    return [s * torch.randn(n, generator=draw, dtype=dtype) for n, s in zip(sizes, scales, strict=True)]


def masks(names, T, B=3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(7)
    drawn = {
        "reset_BT": torch.rand(B, T, generator=draw) < 0.1,
        "pad_BT": torch.rand(B, T, generator=draw) < 0.2,
    }
    drawn["reset_BT"][1, 0] = drawn["pad_BT"][2] = True
    return {name: drawn[name] for name in names}


def scan(tensors, **options):
    x, *cells, state = tensors
    return gru.scan(x, Cells(*cells), GAMMA, state, **options)


def everything(T, backend, raw, masked=(), wanted=(0, 1, 2), **kwargs) -> list[Tensor]:
    """Outputs, the last state and the gradients of a fixed weighting of those `wanted`."""
    tensors = [tensor.requires_grad_() for tensor in inputs(T, **kwargs)]
    outputs = scan(tensors, backend=backend, raw=raw, **masks(masked, T))
    draw = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=tensors[0].dtype)
    for i, output in enumerate(outputs):
        if output is not None and i in wanted:
            loss = loss + (output * torch.randn(output.shape, generator=draw, dtype=output.dtype)).sum()
    return [output for output in outputs if output is not None] + [*torch.autograd.grad(loss, tensors)]


def close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a - b).norm() <= tolerance * b.norm(), f"tensor {i} of {len(found)}"


# ---------------------------------------------------------------- values


@every_mask
def test_the_loop_is_torchs_cell_and_decay(masked):
    B, T, G, R, D = 3, 12, 2, 2, 5
    tensors = inputs(T)
    memories, raws, last = scan(tensors, backend="naive", raw=True, **masks(masked, T))
    chosen = masks(MASKS[-1], T)
    for g, r in itertools.product(range(G), range(R)):
        cell = nn.GRUCell(D, D, dtype=torch.float64)
        cell.load_state_dict(
            {
                name: w[g].mT if w.ndim == 3 else w[g]
                for name, w in zip(
                    ["weight_ih", "weight_hh", "bias_ih", "bias_hh"], tensors[1:5], strict=True
                )
            }
        )
        for b in range(B):
            h = tensors[5][b, g, r]
            for t in range(T):
                if "reset_BT" in masked and chosen["reset_BT"][b, t]:
                    h = torch.zeros_like(h)
                if "pad_BT" not in masked or not chosen["pad_BT"][b, t]:
                    raw = cell(tensors[0][b, t, g, r], h)
                    h = GAMMA * h + (1 - GAMMA) * raw
                    close([raws[b, t, g, r]], [raw], 1e-14)
                assert (memories[b, t, g, r] - h).abs().max() < 1e-14
            assert (last[b, g, r] - h).abs().max() < 1e-14


@every_length
@every_mask
@pytest.mark.parametrize("raw", [False, True])
def test_fast_equals_loop_in_outputs_state_and_gradients(T, masked, raw):
    close(everything(T, "torch", raw, masked), everything(T, "naive", raw, masked), 1e-12)


@parallel
@every_mask
@pytest.mark.parametrize("raw", [False, True])
def test_a_decay_of_its_own_for_each_row_is_learned(backend, masked, raw):
    found = []
    for one in (backend, "naive"):
        x, *cells, state = inputs(150, scale=0.5)
        gamma_GR = torch.tensor([[0.0, 0.5], [0.9, 0.99]], dtype=x.dtype, requires_grad=True)
        outputs = gru.scan(x, Cells(*cells), gamma_GR, state, backend=one, raw=raw, **masks(masked, 150))
        loss = sum(((i + 1) * output).sin().sum() for i, output in enumerate(outputs) if output is not None)
        found.append([*(o for o in outputs if o is not None), *torch.autograd.grad(loss, gamma_GR)])
    close(*found, 1e-9)


def test_a_step_takes_a_decay_of_its_own_for_each_row():
    x, *cells, state = inputs(1)
    gamma_GR = torch.tensor([[0.0, 0.5], [0.9, 0.99]], dtype=x.dtype)
    with torch.inference_mode():
        found = gru.scan(x, Cells(*cells), gamma_GR, state, raw=True)
    close([*found], [*gru.scan(x, Cells(*cells), gamma_GR, state, raw=True, backend="naive")], 1e-14)


@parallel
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)], ids=["memories", "raws", "last"])
def test_gradients_of_one_output_alone(backend, wanted):
    close(
        everything(70, backend, True, MASKS[-1], wanted, scale=0.5),
        everything(70, "naive", True, MASKS[-1], wanted, scale=0.5),
        1e-9,
    )


@parallel
@pytest.mark.parametrize("raw", [False, True])
def test_in_inference_mode_values_are_the_same(backend, raw):
    for T in (2, 64, 150):
        tensors, masked = inputs(T, scale=0.5), masks(MASKS[-1], T)
        expected = scan(tensors, raw=raw, backend="naive", **masked)
        with torch.inference_mode():
            found = scan(tensors, raw=raw, backend=backend, **masked)
        for a, b in zip(found, expected, strict=True):
            assert (a is b is None) or (a - b).abs().max() < 1e-9


@every_mask
@pytest.mark.parametrize("R", [1, 2])
def test_a_step_writes_into_a_state_to_be_consumed(masked, R):
    tensors = inputs(1, R=R)
    for masks_ in (masks(masked, 1), {name: ~mask for name, mask in masks(masked, 1).items()}):
        expected = scan(tensors, raw=True, backend="naive", **masks_)
        with torch.inference_mode():
            state = tensors[5].clone()
            found = scan([*tensors[:5], state], raw=True, consume_state=True, **masks_)
        assert found[2].data_ptr() == state.data_ptr() != found[0].data_ptr()
        close(list(found), list(expected), 1e-14)
        with torch.inference_mode():
            kept = state.clone()
            scan([*tensors[:5], state], backend="torch", consume_state=True, **masks_)
        assert torch.equal(state, kept), "who asks for the loop gets the loop"


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.elements = max(self.elements, out.numel())
        return out


def test_without_gradients_only_memories_are_as_long_as_the_input():
    tensors = inputs(1000)
    with torch.inference_mode(), Largest() as made:
        memories, _, _ = scan(tensors)
    assert made.elements == memories.numel() // 1000 * 1001


@pytest.mark.parametrize("backend", gru.BACKENDS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_state_stays_and_the_last_is_its_own(backend, mode):
    for T in (1, 40):
        tensors = inputs(T, B=1, scale=0.5)
        kept = tensors[5].clone()
        with mode():
            *_, last = scan(tensors, backend=backend)
        assert torch.equal(tensors[5], kept) and not torch.equal(last, kept)
        assert last.untyped_storage().nbytes() == last.nbytes


@parallel
@pytest.mark.parametrize("split", [1, 63, 64, 65, 150])
def test_split_anywhere(backend, split):
    x, *cells, state = inputs(200, scale=0.5)
    whole, _, end = scan([x, *cells, state], backend=backend)
    first, _, middle = scan([x[:, :split], *cells, state], backend=backend)
    second, _, last = scan([x[:, split:], *cells, middle], backend=backend)
    close([torch.cat([first, second], 1), last], [whole, end], 1e-10)


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("backend", gru.BACKENDS)
def test_memories_grow_no_faster_than_the_decay_allows(backend):
    x, *cells, state = inputs(300, scale=5)
    x = 10 * x[:, :1].expand(x.shape)  # gates and candidates at their ends, and always the same ones
    memories, _, _ = scan([x, *cells, torch.zeros_like(state)], backend=backend)
    bound_T = 1 - GAMMA ** torch.arange(1, 301, dtype=torch.float64)
    size_T = memories.abs().amax((0, 2, 3, 4))
    assert (size_T <= bound_T * (1 + 1e-12)).all()
    assert (size_T > 0.8 * bound_T).all(), "a bound that nothing comes near shows nothing"


@pytest.mark.parametrize("backend", gru.BACKENDS)
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("fill", [1e30, float("inf"), float("nan")])
def test_padding_is_the_identity_to_the_last_bit(backend, T, fill):
    tensors = inputs(T, dtype=torch.float32)
    tensors[0] = torch.full_like(tensors[0], fill)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            state = tensors[5].clone()
            memories, raws, last = scan(
                [*tensors[:5], state], backend=backend, raw=True, pad_BT=torch.ones(3, T, dtype=torch.bool)
            )
        for found in (memories, raws, last[:, None]):
            assert torch.equal(found, tensors[5][:, None].expand_as(found))


@pytest.mark.parametrize("backend", gru.BACKENDS)
def test_padding_has_no_part_in_gradients(backend):
    gradients, pad_BT = [], masks(["pad_BT"], 70)["pad_BT"]
    for fill in (0.0, float("nan")):
        tensors = inputs(70, scale=0.5)
        tensors[0][pad_BT] = fill
        tensors = [tensor.requires_grad_() for tensor in tensors]
        memories, raws, _ = scan(tensors, backend=backend, raw=True, pad_BT=pad_BT)
        gradients.append(torch.autograd.grad((memories * raws).sum(), tensors))
    assert gradients[0][0][pad_BT].abs().max() == 0
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", gru.BACKENDS)
def test_nothing_is_remembered_across_a_reset(backend):
    x, *cells, state = inputs(90, scale=0.5, dtype=torch.float32)
    reset_BT = torch.zeros(3, 90, dtype=torch.bool)
    reset_BT[:, 40] = True
    memories, _, last = scan([x, *cells, state], backend=backend, reset_BT=reset_BT)
    x[:, :40], state = 1000 * x[:, :40], 1000 * state
    changed, _, other = scan([x, *cells, state], backend=backend, reset_BT=reset_BT)
    alone, _, _ = scan([x[:, 40:], *cells, torch.zeros_like(state)], backend=backend)
    close([changed[:, 40:], other], [memories[:, 40:], last], 0)
    close([alone], [memories[:, 40:]], 1e-4)


@parallel
def test_groups_and_rows_do_not_meet(backend):
    x, *cells, state = inputs(70, scale=0.5)
    before, _, _ = scan([x, *cells, state], backend=backend)
    x[1, :, 1, 0] += 1
    state[1, 1, 0] += 1
    after, _, _ = scan([x, *cells, state], backend=backend)
    differs_BGR = (after - before).abs().amax((1, 4)) > 1e-9
    expected = torch.zeros(3, 2, 2, dtype=torch.bool)
    expected[1, 1, 0] = True
    assert torch.equal(differs_BGR, expected)


def test_no_tokens_leave_the_state():
    tensors = inputs(0)
    memories, raws, last = scan(tensors, raw=True)
    assert memories.shape == raws.shape == (3, 0, 2, 2, 5) and torch.equal(last, tensors[5])


# ---------------------------------------------------------------- derivatives


@parallel
def test_gradients_are_those_of_finite_differences(backend):
    tensors = [tensor.requires_grad_() for tensor in inputs(5, B=1, D=2, scale=0.5)]
    reset_BT = torch.tensor([[False, False, False, True, False]])
    assert torch.autograd.gradcheck(
        lambda *x: scan(x, backend=backend, raw=True, reset_BT=reset_BT), tensors, rtol=1e-4
    )


@parallel
def test_gradients_by_torch_func(backend):
    x, *rest = inputs(70, scale=0.5)

    def loss(x, backend):
        memories, raws, last = scan([x, *rest], backend=backend, raw=True)
        return memories.square().sum() + raws.sin().sum() + last.sum()

    close([torch.func.grad(loss)(x, backend)], [torch.func.grad(loss)(x, "naive")], 1e-9)


@parallel
def test_second_derivatives_and_forward_mode_are_errors_not_silent_zeros(backend):
    x, *rest = inputs(5, scale=0.5)

    def loss(x):
        return scan([x, *rest], backend=backend)[0].square().sum()

    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x, create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(gradient.square().sum() + x.sum(), x)
    with refused(RuntimeError, "gru.scan"):
        torch.func.jvp(loss, (x,), (x,))
    with refused(RuntimeError, "gru.scan"):
        torch.func.jvp(torch.func.grad(loss), (x,), (x,))


def test_autograd_records_nothing_per_token():
    def nodes(T, backend):
        tensors = [tensor.requires_grad_() for tensor in inputs(T)]
        seen, todo = set(), [scan(tensors, backend=backend)[0].grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [following for following, _ in node.next_functions]
        return len(seen)

    assert nodes(100, "torch") == nodes(10, "torch") < 20 < nodes(10, "naive")


class Counted(TorchDispatchMode):
    """Operations that compute; views are free."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("masked", "raw", "forward", "backward"),
    [((), False, 6, 3), (("reset_BT",), False, 7, 5), (("pad_BT",), False, 6, 3), ((), True, 6, 4)],
)
def test_operations_per_token_are_few(masked, raw, forward, backward):
    counts = []
    for T in (20, 60):  # inside one chunk: only what runs per token differs
        tensors, chosen = [tensor.requires_grad_() for tensor in inputs(T)], masks(masked, T)
        with Counted() as going:
            memories, raws, _ = scan(tensors, raw=raw, **chosen)
        grad = torch.ones_like(memories)
        with Counted() as coming:
            torch.autograd.grad([memories] + ([raws] if raw else []), tensors, [grad] * (1 + raw))
        counts.append((going.total, coming.total))
    (a, b), (c, d) = counts
    assert ((c - a) / 40, (d - b) / 40) == (forward, backward)


# ---------------------------------------------------------------- numbers and errors


@parallel
def test_autocast_reaches_neither_pass(backend):
    tensors = [tensor.requires_grad_() for tensor in inputs(70, scale=0.5, dtype=torch.float32)]
    exact = scan(tensors, backend=backend)[0]
    expected = torch.autograd.grad(exact.sum(), tensors)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found = scan(tensors, backend=backend)[0]
        gradients = torch.autograd.grad(found.sum(), tensors)
    assert torch.equal(found, exact)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@parallel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_computed_in_float32(backend, dtype):
    tensors = inputs(150, scale=0.5, dtype=dtype)
    memories, _, last = scan(tensors, backend=backend)
    assert memories.dtype == last.dtype == torch.float32
    exact, _, end = scan([tensor.double() for tensor in tensors], backend="naive")
    close([memories, last], [exact, end], 2e-6)


@pytest.mark.parametrize("backend", gru.BACKENDS)
def test_shapes_are_known_on_the_meta_device(backend):
    for T in (1, 70):
        tensors = [tensor.to("meta") for tensor in inputs(T)]
        with torch.inference_mode():
            memories, _, last = scan(tensors, backend=backend)
        assert memories.shape == tensors[0].shape and last.shape == tensors[5].shape


def test_bad_calls_say_what_is_wrong():
    tensors = inputs(4)
    with refused(BackendError, "backend", "cuda"):
        scan(tensors, backend="cuda")
    with refused(ValueError, "state"):
        scan([*tensors[:5], tensors[5][:1]])
    for i, name in enumerate(NAMES[1:5], 1):
        bad = [tensor[..., :-1] if j == i else tensor for j, tensor in enumerate(tensors)]
        with refused(ValueError, name):
            scan(bad)
