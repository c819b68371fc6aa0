"""Routed experts: one answer for any grouping, a router that learns, loads that even out, resuming bit for bit.

Shapes: B batch, T time, N tokens, D model width, F hidden width, E experts, A axes.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import perspectron
from perspectron import presets
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.experts.layer import RoutedSwiGLU, _StraightThrough, sparse
from perspectron.experts.router import OFFSET, SPREAD, RoutedConfig
from perspectron.experts.torus import gini, lattice, nudged
from perspectron.model.census import census
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.ops import experts
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D = 32
WEIGHTS = ("gate_EFD", "up_EFD", "down_EDF")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def routed(
    torus: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0, **options
) -> RoutedSwiGLU:
    """A layer in which every part is drawn: queries all over the torus, positions off their centres."""
    module = RoutedSwiGLU(D, RoutedConfig(12, torus, **options))
    draw = generator(seed)
    module.route_proj.weight.normal_(0, 0.3, generator=draw)
    module.route_proj.bias.zero_()
    module.init_weights(draw)
    if hasattr(module, "offset_EA"):
        module.offset_EA.normal_(generator=draw)
    return module.to(dtype)


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(*shape, D, generator=generator(seed), dtype=torch.float64).to(dtype)


def nearest(module: RoutedSwiGLU, x_D: Tensor) -> int:
    """By hand: the cell at least power distance, the first of them."""
    torus, best = module.config.torus, []
    weight = module.route_proj.weight
    z_A = [
        SPREAD * (row @ x_D / row.norm()).item() + b.item()
        for row, b in zip(weight, module.route_proj.bias, strict=True)
    ]
    for e in range(math.prod(torus)):
        rest, d2 = e, 0.0
        for axis, (n, z) in enumerate(zip(torus, z_A, strict=True)):
            place = (rest % n + 0.5 + OFFSET * math.tanh(module.offset_EA[e, axis].item())) / n
            apart = abs(z - place) % 1
            d2 += min(apart, 1 - apart) ** 2
            rest //= n
        best.append((d2 - module.bias_E[e].item(), e))
    return min(best)[1]


# ---------------------------------------------------------------- one answer for any grouping


@pytest.mark.parametrize("torus", [(8, 4, 4), (3,), (2, 5), (1,), (1, 2)], ids=str)
def test_experts_equal_a_loop_over_tokens(torus):
    module = routed(torus)
    with torch.no_grad():
        module.bias_E.normal_(0, 0.02, generator=generator(3))
    x = tokens(3, 40)
    y, _ = module(x)
    reached = set()
    for b in range(3):
        for t in range(40):
            e = nearest(module, x[b, t])
            gate, up = module.gate_EFD[e] @ x[b, t], module.up_EFD[e] @ x[b, t]
            expected = module.down_EDF[e] @ (F.silu(gate) * up)
            torch.testing.assert_close(y[b, t], expected, rtol=1e-12, atol=1e-12)
            reached.add(e)
    assert len(reached) > 0.3 * len(module.gate_EFD)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"gate": "soft", "nearest": 3}, {"gate": "none"}, {"router": "switch", "gate": "soft"},
        {"base": True, "ternary": True}, {"ternary": True, "int8_activations": True},
    ],
    ids=str,
)  # fmt: skip
def test_batch_order_and_split_change_nothing(options):
    module = routed((4, 3), **options)
    x = tokens(2, 30)
    with torch.no_grad():
        whole = module(x)[0].flatten(0, 1)
        shuffle = torch.randperm(60, generator=generator(2))
        shuffled = module(x.flatten(0, 1)[None, shuffle])[0][0]
        torch.testing.assert_close(shuffled, whole[shuffle], rtol=1e-9, atol=1e-12)
        for n in range(0, 60, 7):
            one, terms = module(x.flatten(0, 1)[n : n + 1, None])
            torch.testing.assert_close(one[:, 0], whole[n : n + 1], rtol=1e-9, atol=1e-12)
            assert terms == {}
    torch.testing.assert_close(module(x)[0].detach().flatten(0, 1), whole, rtol=1e-12, atol=1e-12)


def test_one_expert_is_a_dense_network():
    module = routed((1,), gate="soft")
    x = tokens(2, 9)
    dense = F.linear(
        F.silu(F.linear(x, module.gate_EFD[0])) * F.linear(x, module.up_EFD[0]), module.down_EDF[0]
    )
    y, terms = module(x)
    torch.testing.assert_close(y, dense, rtol=1e-12, atol=1e-12)
    assert terms["balance"].value == 1 and terms["gini"].value == 0 and terms["delta"].value == 0


def test_straight_through_gives_exactly_what_no_gate_gives():
    x = tokens(2, 50, dtype=torch.float32)
    y, plain, soft = (
        routed((4, 2), torch.float32, gate=gate)(x)[0] for gate in ("straight_through", "none", "soft")
    )
    assert torch.equal(y, plain)
    module = routed((4, 2), torch.float32, gate="soft")
    gate_N = module.router.route(x.flatten(0, 1)).gate_N
    torch.testing.assert_close(soft, plain * gate_N.view(2, 50, 1))


def test_the_gate_is_a_softmax_over_the_nearest():
    module = routed((4, 4), nearest=5, temperature=0.7)
    with torch.no_grad():
        module.bias_E.normal_(0, 0.01, generator=generator(3))
    choice = module.router.route(tokens(40))
    assert module.config.tau == pytest.approx(0.7 / 16)
    for n in range(40):
        near = choice.distance2_NE[n].sort().values[:5]
        assert choice.gate_N[n].item() == pytest.approx((-near / (0.7 / 16)).softmax(0)[0].item())
        assert 1 / 5 <= choice.gate_N[n] <= 1
    assert 0.2 < choice.gate_N.mean() < 0.9, "neither flat nor all or nothing"


def test_ties_go_to_the_lowest_id():
    module = routed((4, 2), offsets=False)
    with torch.no_grad():
        module.route_proj.weight.zero_()
        module.route_proj.bias.copy_(torch.tensor([0.5, 0.5]))  # between 1 | 2 and 5 | 6
    assert module.router.route(tokens(6)).expert_N.tolist() == [1] * 6


def test_positions_stay_in_their_cells():
    module = routed((4, 2))
    with torch.no_grad():
        module.offset_EA.normal_(0, 100, generator=generator(1))
    apart = (module.router.positions() - lattice((4, 2)).double()).abs() * torch.tensor([4, 2])
    assert 0.3 < apart.max() <= OFFSET < 0.5


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("gate", ["none", "straight_through", "soft"])
def test_gradients_are_those_of_the_plain_operations(gate):
    module, x = routed((3, 2), gate=gate, delta=0.3, diversity=0.2), tokens(2, 20).requires_grad_()
    parameters = [x, *module.parameters()]

    def plain() -> Tensor:
        flat = x.flatten(0, 1)
        choice = module.router.route(flat)
        y = experts.naive(flat, choice.expert_N, *module.weights())
        if gate != "none":
            own = choice.distance2_NE.div(-module.config.tau).log_softmax(1)
            log_g = own.gather(1, choice.expert_N[:, None])
            y = y * (log_g.exp() if gate == "soft" else 1 + log_g - log_g.detach())
        return y.sin().sum()

    y, terms = module(x)
    fast = torch.autograd.grad(y.sin().sum(), parameters, allow_unused=True)
    for a, b, name in zip(fast, torch.autograd.grad(plain(), parameters, allow_unused=gate == "none"),
                          ["x", *(n for n, _ in module.named_parameters())], strict=True):  # fmt: skip
        if gate == "none" and name.startswith(("route_proj", "offset")):
            assert a is None and name != "x"
        else:
            assert b.abs().max() > 0
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert ("smooth" in terms) == ("balance" in terms) == (gate != "none")


def test_gradients_in_forward_mode():
    module, x, turn = routed((3, 2), router="switch"), tokens(20), tokens(20, seed=5)
    expert_N = module.router.route(x).expert_N
    weights = [getattr(module, name).detach() for name in WEIGHTS]
    tangents = [torch.randn(w.shape, generator=generator(7), dtype=w.dtype) for w in weights]
    units = slice(3, 5)

    def fast(x: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        return experts.swiglu(x, expert_N, *w, units=units)

    def plain(x: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
        sample = torch.cat([w[0][:, units], w[1][:, units], w[2][..., units].mT], 1)
        h = F.silu(torch.einsum("nfd,nd->nf", w[0][expert_N], x)) * torch.einsum(
            "nfd,nd->nf", w[1][expert_N], x
        )
        return torch.einsum("ndf,nf->nd", w[2][expert_N], h), sample

    _, a = torch.func.jvp(fast, (x, *weights), (turn, *tangents))
    _, b = torch.func.jvp(plain, (x, *weights), (turn, *tangents))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_losses_on_sampled_units_reach_all_of_them_in_turn():
    module = routed((3, 2), delta=1.0, diversity=1.0, gate="none")
    x, touched = tokens(1, 4), {name: torch.zeros_like(getattr(module, name)) for name in WEIGHTS}
    values = []
    for step in range(12):
        module.set_step(step)
        terms = module(x)[1]
        values.append(terms["delta"].value.item())
        loss = sum(term.weight * term.value for term in terms.values())
        gradients = torch.autograd.grad(loss, [getattr(module, name) for name in WEIGHTS])
        for name, gradient in zip(WEIGHTS, gradients, strict=True):
            touched[name] += gradient != 0
    assert all((count == 1).all() for count in touched.values())
    whole = torch.cat([module.gate_EFD, module.up_EFD, module.down_EDF.mT], 1).flatten(1)
    grid = whole.view(2, 3, -1)
    pairs = [grid[0, i] - grid[1, i] for i in range(3)]
    pairs += [grid[j, i] - grid[j, (i + 1) % 3] for i in range(3) for j in range(2)]
    assert sum(values) / 12 == pytest.approx(torch.stack(pairs).abs().mean().item())


@pytest.mark.parametrize("gate", ["none", "straight_through", "soft"])
def test_an_expert_nobody_reaches_gets_a_gradient_of_exactly_zero(gate):
    module = routed((4, 2), gate=gate, delta=0.0, balance=0.0, smooth=0.0)
    for x in (tokens(1, 3), tokens(1, 1)):
        module.zero_grad()
        reached = {nearest(module, one) for one in x[0]}
        y, terms = module(x)
        (y.square().sum() + sum(term.value for term in terms.values())).backward()
        assert terms["reached"].value.item() == pytest.approx(len(reached) / 8)
        for name in WEIGHTS:
            gradient = getattr(module, name).grad
            assert gradient.isfinite().all()
            for e in range(8):
                assert (gradient[e].abs().max() > 0) == (e in reached)
        assert (module.route_proj.weight.grad is None) == (gate == "none")
        assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_frozen_experts_cost_no_gradients_of_their_own():
    x, spent, found = tokens(1, 50), [], []
    for learns in (True, False):
        module = routed((4, 2), gate="none")
        for name in WEIGHTS:
            getattr(module, name).requires_grad_(learns)
        leaf = x.clone().requires_grad_()
        y = module(leaf)[0].square().sum()
        with FlopCounterMode(display=False) as counter:
            y.backward()
        spent.append(counter.get_total_flops())
        found.append(leaf.grad)
        assert all((getattr(module, name).grad is not None) == learns for name in WEIGHTS)
    assert torch.equal(*found)
    assert spent[0] - spent[1] == 3 * 2 * x.numel() * 12  # three products of N × D × F


def test_idle_parameters_are_those_a_token_does_not_touch():
    module = routed((4, 2), delta=0.0)
    module(torch.ones(1, 1, D, dtype=torch.float64))[0].sum().backward()
    touched = sum(int((getattr(module, name).grad != 0).sum()) for name in WEIGHTS)
    router = sum(p.numel() for p in (*module.route_proj.parameters(), module.offset_EA))
    whole = sum(p.numel() for p in module.parameters())
    assert whole - module.idle_parameters() == touched + router


@pytest.mark.parametrize("gate", ["straight_through", "soft"])
def test_the_gate_has_a_gradient_in_forward_mode(gate):
    """As the gradient says, along one direction in the router's bias and the input at once."""
    module, x, turn = routed((3, 2), gate=gate), tokens(1, 20), tokens(1, 20, seed=5)
    bias, push = module.route_proj.bias.detach(), torch.tensor([0.3, -0.2], dtype=torch.float64)

    def f(x: Tensor, bias: Tensor) -> Tensor:
        y, _ = torch.func.functional_call(module.eval(), {"route_proj.bias": bias}, (x,))
        return y.sin().sum()

    _, tangent = torch.func.jvp(f, (x, bias), (turn, push))
    inputs = (x.requires_grad_(), bias.clone().requires_grad_())
    dx, dbias = torch.autograd.grad(f(*inputs), inputs)
    assert (dbias @ push).abs() > 1e-3
    torch.testing.assert_close(tangent, (dx * turn).sum() + dbias @ push, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- the router learns


SIZE = 3  # of targets: what the task asks for is more than what balance does


def mixture(gate: str, seed: int, torus: tuple[int, ...] = (3,), steps: int = 400, **options) -> list[float]:
    """Accuracy at each step. Kinds of tokens, as many as experts, each with one expert that gives the target exactly;
    the router alone is trained, from targets, and sees the kind only as a direction in x."""
    draw, width, E = generator(seed), 16, math.prod(torus)
    module = RoutedSwiGLU(width, RoutedConfig(16, torus, gate=gate, **options))
    with torch.no_grad():
        module.route_proj.weight.normal_(0, width**-0.5, generator=draw)
        module.route_proj.bias.zero_()
        module.init_weights(draw)
        module.down_EDF.mul_(SIZE)
    kinds, best = torch.randn(E, width, generator=draw), torch.randperm(E, generator=draw)
    optimizer = torch.optim.Adam(module.route_proj.parameters())
    accuracy = []
    for step in range(steps):
        module.set_step(step)
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
        kind = torch.randint(E, (256,), generator=draw)
        x = F.rms_norm(kinds[kind] + 0.3 * torch.randn(256, width, generator=draw), (width,))
        with torch.no_grad():
            target = experts.swiglu(x, best[kind], *module.weights())[0]
        y, terms = module(x[None])
        loss = F.mse_loss(y[0], target) + sum(term.weight * term.value for term in terms.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy.append((module.router.route(x).expert_N == best[kind]).float().mean().item())
    return accuracy


@pytest.mark.parametrize(("gate", "seed"), [("straight_through", 0), ("soft", 1)])
def test_the_router_learns_which_expert_is_best(gate, seed):
    accuracy = mixture(gate, seed)
    assert accuracy[0] < 0.4
    assert min(accuracy[-20:]) > 0.9


def test_on_a_torus_of_two_axes_too():
    accuracy = mixture("soft", 1, (2, 2))
    assert accuracy[0] < 0.1 and min(accuracy[-20:]) > 0.9


def test_a_switch_learns_too():
    """Not from every start: of 16, one ended at 0.62."""
    accuracy = mixture("soft", 1, router="switch", bias_rate=0.0)
    assert accuracy[0] < 0.4 and min(accuracy[-20:]) > 0.9


def test_without_a_gate_no_gradient_reaches_the_router():
    accuracy = torch.tensor(mixture("none", 0, bias_rate=0.0))
    assert (accuracy[-20:].mean() - accuracy[:20].mean()).abs() < 0.03, "it stays as it starts"
    module = routed((4, 2), gate="none")
    y, terms = module(tokens(2, 30))
    objective = y.sum() + sum(term.value for term in terms.values())
    names = [*dict(module.route_proj.named_parameters()), "offset_EA"]
    router = [*module.route_proj.parameters(), module.offset_EA]
    assert len(names) == 3
    assert torch.autograd.grad(objective, router, allow_unused=True) == (None, None, None)


# ---------------------------------------------------------------- balance


def test_training_steps_even_out_the_load():
    module = routed((4, 4), torch.float32, bias_rate=0.1)
    ginis = []
    for step in range(300):
        module.set_step(step)
        y, terms = module(tokens(1, 500, seed=step, dtype=torch.float32) / 3)
        y.sum().backward()
        ginis.append(terms["gini"].value.item())
    assert ginis[0] > 0.35 and sum(ginis[-20:]) / 20 < 0.12
    assert terms["reached"].value == 1


def test_only_gradients_in_training_count_as_load_and_only_once():
    module = routed((4, 2))
    x = tokens(2, 25)
    expected = experts.load(module.router.route(x.flatten(0, 1)).expert_N, 8)
    module.set_step(0)
    module(x)
    with torch.no_grad():
        module(x)
    module.eval()(x)[0].sum().backward()
    assert module.train().load_E.sum() == 0
    for turn in (1, 2):
        module(x)[0].sum().backward()
        assert torch.equal(module.load_E, turn * expected)
    before = module.bias_E.clone()
    module.set_step(1)
    torch.testing.assert_close(module.bias_E, nudged(before, 2 * expected, 0.05 * module.config.tau))
    assert not torch.equal(module.bias_E, before) and module.load_E.sum() == 0
    after = module.bias_E.clone()
    module.set_step(1)
    assert torch.equal(module.bias_E, after), "said twice, done once"
    module(x)[0].sum().backward()
    module.set_step(0)
    assert torch.equal(module.bias_E, after), "before the first update there is no load"


def test_padding_counts_nowhere():
    module = routed((4, 2))
    x, pad = tokens(2, 12), torch.zeros(2, 12, dtype=torch.bool)
    pad[:, 9:] = True
    wild = x.masked_fill(pad[..., None], 1e3)
    (y, short), (_, padded), (_, worse) = module(x[:, :9]), module(x, pad_BT=pad), module(wild, pad_BT=pad)
    assert short.keys() == padded.keys() >= {"gini", "reached", "balance", "smooth", "delta"}
    for name, term in short.items():
        torch.testing.assert_close(padded[name].value, term.value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(worse[name].value, term.value, rtol=1e-12, atol=1e-12)
    y.sum().backward()
    counted = module.load_E.clone()
    module.set_step(0)
    module(x, pad_BT=pad)[0].sum().backward()
    assert torch.equal(module.load_E, counted) and counted.sum() == 18
    everything = torch.ones_like(pad)
    _, terms = module(x, pad_BT=everything)
    assert all(term.value.isfinite() for term in terms.values()) and terms["gini"].value == 0


# ---------------------------------------------------------------- in a model


def model(**options) -> perspectron.LanguageModel:
    block = BlockConfig(PDRConfig(4), RoutedConfig(8, (2, 2), bias_rate=0.5, **options))
    return perspectron.build(ModelConfig("routed", 50, 16, (block, block)), 0)


def trained(net: perspectron.LanguageModel, steps: range, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        net.set_step(step)
        ids = torch.randint(50, (2, 33), generator=generator(step))
        for half in ids.split(1):  # two parts of one update
            net(half[:, :-1], targets=half[:, 1:]).objective().backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def test_a_stop_changes_no_bit_biases_included():
    whole, first, second = model(), model(), model()
    trained(whole, range(12), optimizer_of(whole))
    before = optimizer_of(first)
    trained(first, range(7), before)
    second.load_state_dict(first.state_dict())
    after = optimizer_of(second)
    after.load_state_dict(before.state_dict())
    trained(second, range(7, 12), after)
    expected, found = whole.state_dict(), second.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    biases = [name for name in expected if name.endswith("bias_E")]
    assert len(biases) == 2 and all(expected[name].abs().max() > 0 for name in biases)
    assert all(expected[name.replace("bias_E", "load_E")].sum() == 64 for name in biases)


def test_recomputing_activations_counts_the_load_once():
    plain, again = model(), model()
    again.recompute = True
    for net in (plain, again):
        trained(net, range(6), optimizer_of(net))
    expected, found = plain.state_dict(), again.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert expected["blocks.0.ffn.load_E"].sum() == 64


def test_losses_add_up_over_layers_and_diagnostics_are_averaged():
    net = model()
    reports = []
    for block in net.blocks:
        block.ffn.register_forward_hook(lambda module, args, out: reports.append(out[1]))
    ids = torch.randint(50, (2, 40), generator=generator())
    output = net(ids[:, :-1], targets=ids[:, 1:])
    assert len(reports) == 2
    for name in ("gini", "reached"):
        mean = (reports[0][name].value + reports[1][name].value) / 2
        assert output.aux[name].mean() == mean and output.aux[name].weight == 0
    for name, weight in {"balance": 0.01, "smooth": 0.005, "delta": 0.001}.items():
        assert output.aux[name].value == reports[0][name].value + reports[1][name].value
        assert output.aux[name].weight == weight
    total = output.loss + sum(
        w * output.aux[n].value for n, w in (("balance", 0.01), ("smooth", 0.005), ("delta", 0.001))
    )
    torch.testing.assert_close(output.objective(), total)


def test_what_experts_write_into_the_residual_stream_is_scaled_as_a_dense_network():
    for options in ({}, {"base": True}):
        net = perspectron.build(
            ModelConfig("one", 50, 64, (BlockConfig(PDRConfig(4), RoutedConfig(96, (2, 2), **options)),) * 8),
            0,
        )
        ffn = net.blocks[0].ffn
        gate, _, down = ffn.weights()
        assert gate.std().item() == pytest.approx(64**-0.5, rel=0.05)
        assert down.std().item() == pytest.approx(96**-0.5 * 16**-0.5, rel=0.05)


# ---------------------------------------------------------------- precision and other parametrisations


def test_bfloat16_routes_as_float32_does():
    module = routed((4, 4), torch.float32)
    x = tokens(4, 100, dtype=torch.float32).bfloat16().float()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.bfloat16())
    choice, y = module.router.route(x.flatten(0, 1)), module(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        under = module.router.route(x.flatten(0, 1))
        y_auto, terms = module(x)
        (y_auto.float().sum() + terms["balance"].value).backward()
    assert y_auto.dtype == torch.bfloat16 and under.distance2_NE.dtype == torch.float32
    assert torch.equal(under.expert_N, choice.expert_N)
    torch.testing.assert_close(y_auto.float(), y, rtol=0.1, atol=0.1 * y.std().item())
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in module.parameters())
    low = routed((4, 4), torch.float32)
    low.load_state_dict(module.state_dict())
    low = low.bfloat16()
    assert torch.equal(low.router.route(x.bfloat16().flatten(0, 1)).expert_N, choice.expert_N)
    y_low, _ = low(x.bfloat16())
    y_low.sum().backward()
    assert y_low.dtype == torch.bfloat16 and low.gate_EFD.grad.dtype == torch.bfloat16


def test_a_difference_is_few_entries_and_all_of_them_learn():
    own = torch.randn(3, 40, 50, generator=generator(), dtype=torch.float64).requires_grad_()
    kept = sparse(own)
    share = (kept != 0).double().mean().item()
    assert 0.09 < share < 0.13, "of normal numbers 11% are over twice the mean magnitude"
    assert torch.equal(kept[kept != 0], own[kept != 0])
    kept.sum().backward()
    assert (own.grad == 1).all()


def test_experts_with_a_base_are_the_base_and_their_own():
    module = routed((2, 2), base=True)
    for name, weight in zip(WEIGHTS, module.weights(), strict=True):
        base = getattr(module, "base_" + name.replace("E", ""))
        own = (weight - base).abs() > 1e-12
        assert 0 < own.double().mean() < 0.15
    y, _ = module(tokens(1, 30))
    y.sum().backward()
    assert all(p.grad.abs().max() > 0 for p in module.parameters())


def test_ternary_experts_use_three_values_and_follow_their_share():
    module = routed((2, 2), ternary=True)
    for weight in module.weights():
        for matrix in weight:
            assert len(matrix.unique()) == 3
    module.ternary_share_1.zero_()
    assert all(torch.equal(w, getattr(module, n)) for n, w in zip(WEIGHTS, module.weights(), strict=True))
    module.ternary_share_1.fill_(0.5)
    module(tokens(1, 30))[0].sum().backward()
    assert module.gate_EFD.grad.abs().max() > 0


def test_eight_bit_activations_reach_both_products():
    module, plain = routed((2, 2), int8_activations=True), routed((2, 2))
    x = tokens(1, 30)
    y, exact = module(x)[0], plain(x)[0]
    assert 0 < (y - exact).abs().max() < 0.1 * exact.abs().max()
    from perspectron.experts.ternary import int8

    rough, expert_N = int8(x[0]), module.router.route(x[0]).expert_N
    for n in range(30):
        e = expert_N[n]
        h = int8(F.silu(module.gate_EFD[e] @ rough[n]) * (module.up_EFD[e] @ rough[n]))
        torch.testing.assert_close(y[0, n], module.down_EDF[e] @ h, rtol=1e-9, atol=1e-9)
    y.sum().backward()
    assert module.down_EDF.grad.abs().max() > 0


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"experts": 7}, ["experts", 7]),
        ({"torus": (4, 0)}, ["torus"]),
        ({"torus": ()}, ["torus"]),
        ({"hidden": 0}, ["hidden", 0]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"nearest": 0}, ["nearest", 0]),
        ({"gate": "hard"}, ["gate", "hard"]),
        ({"delta": -1.0}, ["delta"]),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_named(options, named):
    with refused(ConfigError, *named):
        dataclasses.replace(
            RoutedConfig(8, (4, 2), 8), experts=0, **options
        ) if "experts" not in options else (dataclasses.replace(RoutedConfig(8, (4, 2)), **options))


def test_loads_are_counted_per_expert():
    load_E = experts.load(torch.tensor([2, 0, 2, 2]), 4)
    assert load_E.tolist() == [1, 0, 3, 0] and gini(load_E) > 0


# ---------------------------------------------------------------- found in review


def test_rounding_experts_costs_a_token_only_its_own():
    """In the census, whatever the number of experts."""
    costs = {
        torus: census(
            presets.get("perspective-tiny", ternary=True, torus=list(torus)), (1024,)
        ).flops_per_token[1024]
        for torus in ((1,), (8, 4))
    }
    assert costs[8, 4] < 1.01 * costs[(1,)]


def test_what_training_counts_is_no_part_of_the_fingerprint():
    net = model()
    before = net.fingerprint()
    ids = torch.randint(50, (2, 40), generator=generator())
    net(ids[:, :-1], targets=ids[:, 1:]).objective().backward()
    assert any(buffer.any() for name, buffer in net.named_buffers() if name.endswith("load_E"))
    assert net.fingerprint() == before


def test_sizes_of_experts_are_refused_where_there_are_none():
    with refused(ConfigError, "ternary", True):
        presets.get("perspective-tiny-dense", ternary=True)


def test_a_second_derivative_through_the_gate_is_an_error():
    """`once_differentiable` gave a silent 0 for it, because the input is also reached another way."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    y = _StraightThrough.apply(x**2, w.exp())
    gradient = torch.autograd.grad((y**2).sum() + (x**3).sum() + (w**3).sum(), (x, w), create_graph=True)
    with refused(RuntimeError, "create_graph"):
        torch.autograd.grad(sum(part.sum() for part in gradient), (x, w))


def test_a_router_that_reads_what_the_mixer_gave():
    import perspectron
    from perspectron import presets
    from perspectron.designs.perspective.suites.routes import trace

    sizes = {"vocab_size": 60, "d_model": 32, "layers": 2, "hidden": 32, "rank": 4, "heads": 2, "kv_heads": 1,
             "period": 3, "torus": [2, 2]}  # fmt: skip
    config = presets.get("perspective-tiny", **sizes, reads="mixer")
    bare = (dataclasses.replace(config.blocks[0], mixer=None), *config.blocks[1:])
    with refused(ConfigError, "reads", "mixer"):
        perspectron.build(dataclasses.replace(config, blocks=bare))
    model = perspectron.build(config).eval()
    seen, ids = [], torch.arange(40)[None] % 60
    block = model.blocks[1]
    block.mixer.register_forward_hook(lambda _, inputs, out: seen.append(out[0]))
    routes = trace(model, ids)[1]
    expected = block.ffn.router.route(seen[0].clone().flatten(0, 1)).expert_N
    assert torch.equal(routes.expert_BT.flatten(), expected)
    assert model(ids).logits.shape == (1, 40, 60)
