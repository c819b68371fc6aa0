"""Forward and backward of a routed top-1 network against a dense one of the same active size.

Contenders, in turn, on the same input and output gradient: "routed", the whole layer with its router, gate, losses
and counts, of which each token uses one expert; "dense", a SwiGLU as wide as one expert; "autograd", the same
experts by plain torch operations on unbound weights. Bar: routed ≤ 1.25 times dense at 4,096 tokens, 32 experts.

What must be more: the weights of all experts are read twice and their gradients written once, E times the dense
layer's bytes; the products are the same. Shapes: N tokens, D model width, F hidden width, E experts.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.router import RoutedConfig
from perspectron.experts.torus import gini
from perspectron.model.ffn import SwiGLU, SwiGLUConfig
from perspectron.ops.experts import load

TESTS = ("tests/experts/test_layer.py", "tests/experts/test_router.py", "tests/experts/test_torus.py")
BAR = 1.25


@dataclass(frozen=True)
class Shape:
    N: int
    D: int
    F: int
    torus: tuple[int, ...]

    @property
    def E(self) -> int:
        return torch.Size(self.torus).numel()

    def __str__(self) -> str:
        return f"{self.N:,} tokens, d {self.D}, hidden {self.F}, {self.E} experts"


TORUS = (4, 4, 2)
SHAPES = (Shape(4096, 384, 1408, TORUS), Shape(4096, 768, 2816, TORUS), Shape(4096, 256, 688, TORUS))
QUICK = (Shape(128, 16, 24, (2, 2)),)
BATCH = 4  # rows the tokens stand in


def layers(shape: Shape) -> tuple[RoutedSwiGLU, SwiGLU]:
    routed = RoutedSwiGLU(shape.D, RoutedConfig(shape.F, shape.torus))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        routed.route_proj.weight.normal_(generator=draw)
        routed.route_proj.bias.zero_()
        routed.init_weights(draw)
    return routed, SwiGLU(shape.D, SwiGLUConfig(shape.F))


@torch.no_grad()
def even_out(layer: RoutedSwiGLU, x_ND: Tensor) -> float:
    """Let the biases settle, as they do in training; the Gini coefficient of the load then."""
    for step in range(600):
        layer.set_step(step)
        load_E = load(layer.router.route(x_ND).expert_N, len(layer.gate_EFD))
        layer.load_E += load_E
    return gini(load_E).item()


def by_autograd(layer: RoutedSwiGLU, x_BTD: Tensor) -> Tensor:
    x_ND = x_BTD.flatten(0, 1)
    choice = layer.router.route(x_ND)
    order_N = choice.expert_N.argsort(stable=True)
    counts = torch.bincount(choice.expert_N, minlength=len(layer.gate_EFD)).tolist()
    weights = (weight.unbind() for weight in layer.weights())
    parts = [
        F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        for x, gate, up, down in zip(x_ND[order_N].split(counts), *weights, strict=True)
    ]
    y_ND = torch.cat(parts)[order_N.argsort()] * (choice.gate_N / choice.gate_N.detach())[:, None]
    return y_ND.view_as(x_BTD)


def measure(shape: Shape, repeats: int) -> dict[str, Any]:
    routed, dense = layers(shape)
    draw = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(BATCH, shape.N // BATCH, shape.D, generator=draw) for _ in "xy")
    uneven = even_out(routed, x.flatten(0, 1))
    x.requires_grad_()
    inputs = {"routed": [x, *routed.parameters()], "dense": [x, *dense.parameters()]}

    def routed_pass() -> tuple[Tensor, ...]:
        y, terms = routed(x)
        loss = sum(term.weight * term.value for term in terms.values() if term.weight)
        return torch.autograd.grad([y, loss], inputs["routed"], [dy, None])

    contenders: dict[str, Callable[[], object]] = {
        "routed": routed_pass,
        "dense": lambda: torch.autograd.grad(dense(x)[0], inputs["dense"], dy),
        "autograd": lambda: torch.autograd.grad(by_autograd(routed, x), inputs["routed"], dy),
    }
    with torch.no_grad():
        same = torch.allclose(by_autograd(routed, x), routed(x)[0], rtol=1e-3, atol=1e-4)
    if not same:
        raise SystemExit(f"not measured: contenders differ at {shape}")
    seconds = common.interleave(contenders, repeats)
    weights = 4 * 3 * shape.D * shape.F
    return {
        "shape": asdict(shape),
        "gini": uneven,
        "seconds": {name: common.Spread.of(values) for name, values in seconds.items()},
        "ratio_to_dense": {
            name: common.ratios(seconds[name], seconds["dense"]) for name in ("routed", "autograd")
        },
        "matmul_flops": 18 * shape.N * shape.D * shape.F,
        "weight_bytes": {"routed": 3 * shape.E * weights, "dense": 3 * weights},
    }


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes, repeats = (QUICK, 2) if args.quick else (SHAPES, args.repeats)
    report = common.Report(args, TESTS, dtype="float32", shapes="; ".join(map(str, shapes)))
    results = []
    for shape in shapes:
        result = measure(shape, repeats)
        results.append(result)
        report.say(
            f"{shape} (Gini of their load {result['gini']:.3f}): forward and backward, medians (least–greatest)"
        )
        rows = [
            [name, spread.text(1e3), result["ratio_to_dense"][name].text() if name != "dense" else "1"]
            for name, spread in result["seconds"].items()
        ]
        report.table(["", "ms", "times dense"], rows)
        report.say(
            f"{result['matmul_flops'] / 1e9:.1f} GFLOP of products in each; weights read twice and gradients written "
            f"once: {result['weight_bytes']['routed'] / 1e6:.0f} MB routed, "
            f"{result['weight_bytes']['dense'] / 1e6:.0f} MB dense",
            f"routed: {result['ratio_to_dense']['routed'].median:.2f} × dense (bar, at the first size: ≤ {BAR:g})",
            "",
        )
    report.finish({"bar": BAR, "shapes": results})


if __name__ == "__main__":
    main()
