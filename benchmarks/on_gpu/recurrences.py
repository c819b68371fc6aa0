"""Each recurrence twice: this project's operation and fla-core's, on inputs of the same values.

Ours take [B,H,T,·] and gates, theirs [B,T,H,·] and logarithms of gates. What both compute is the same function of
queries, keys, values, gates and what else the recurrence has (β, or a and b), so gradients can be compared too: that of
a logarithm is the gate times that of the gate. All inputs are numbers of bfloat16, so that rounding them changes
nothing; a gate is the exponential of its logarithm.

Shapes: B batch, H heads, T time, K key width, V value width, A gate width (K or 1); PDR's [B,T,·] have no heads: R is
its rank, D its width.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.ops import delta, gla, pdr

Values = dict[str, Tensor]
Result = tuple[Tensor, Tensor]


class Kind(NamedTuple):
    """A recurrence with heads of K × V. backends: ours, but for the reference. fla: its module and two functions, of
    chunks and of steps. narrow: one gate a head. products: of a token with each number of the state. more: its
    inputs beside q, k, v and the gate. half: fla's layers have the logarithms of gates in bfloat16, not float32."""

    K: int
    V: int
    backends: tuple[str, ...]
    fla: tuple[str, str, str]
    narrow: bool = False
    products: int = 2
    more: tuple[str, ...] = ()
    half: bool = True


KINDS: Mapping[str, Kind] = {
    "gla": Kind(64, 128, ("torch", "triton"), ("gla", "chunk_gla", "fused_recurrent_gla")),
    "ssd": Kind(
        128, 64, ("torch", "triton"),
        ("simple_gla", "chunk_simple_gla", "fused_recurrent_simple_gla"), narrow=True, half=False,
    ),
    "gdn": Kind(
        128, 128, ("torch", "triton"),
        ("gated_delta_rule", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        narrow=True, products=3, more=("beta",), half=False,
    ),
    "kda": Kind(
        128, 128, ("torch", "triton"), ("kda", "chunk_kda", "fused_recurrent_kda"), products=3, more=("beta",),
        half=False,
    ),
    "rwkv7": Kind(
        64, 64, ("torch", "triton"), ("rwkv7", "chunk_rwkv7", "fused_recurrent_rwkv7"), products=4, more=("a", "b")
    ),
    "pdr": Kind(64, 64, ("torch", "triton"), ("", "", "")),
    "gla64": Kind(64, 64, (), ("gla", "chunk_gla", "fused_recurrent_gla")),
}  # fmt: skip

BESIDE = {"pdr": "gla64"}
"""Of which recurrence of fla's a recurrence stands beside: it has no PDR, but a GLA with a state of as many numbers,
which reads four inputs of the model's width where PDR reads two, and two of its rank."""


def heads(kind: Kind, d: int) -> int:
    return max(1, d // kind.V)


def drawn(name: str, B: int, T: int, d: int, device: torch.device) -> Values:
    """The inputs [B,H,T,·] in float32, the logarithms of the gates as `log`; the state [B,H,K,V] is not among them.
    PDR's are [B,T,·]."""
    kind, draw = KINDS[name], torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    if name == "pdr":
        R = kind.K
        made = {"q": normal(B, T, R), "k": normal(B, T, R), "v": normal(B, T, d)}
        made["log"] = F.logsigmoid(normal(B, T, d) + 2)
        return {key: _rounded(x) for key, x in made.items()}
    H, K, V = heads(kind, d), kind.K, kind.V
    made = {"q": normal(B, H, T, K), "k": normal(B, H, T, K), "v": normal(B, H, T, V)}
    gate = normal(B, H, T, 1 if kind.narrow else K)
    made["log"] = -0.6065 * gate.sigmoid() if name == "rwkv7" else F.logsigmoid(gate + 3)
    if kind.more:  # I − k eᵀ must not expand
        made["k"] = F.normalize(made["k"], dim=-1)
    if "beta" in kind.more:
        made["beta"] = normal(B, H, T, 1).sigmoid()
    if "a" in kind.more:
        made["a"] = -F.normalize(normal(B, H, T, K), dim=-1)
        made["b"] = -made["a"] * normal(B, H, T, K).sigmoid()
    return {key: _rounded(x) for key, x in made.items()}


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def state(name: str, B: int, d: int, device: torch.device) -> Tensor:
    """A first state: PDR's [B,D,R], the others' [B,H,K,V]."""
    kind, draw = KINDS[name], torch.Generator(device).manual_seed(1)
    shape = (B, d, kind.K) if name == "pdr" else (B, heads(kind, d), kind.K, kind.V)
    return torch.randn(shape, generator=draw, device=device)


# ---------------------------------------------------------------- ours


def ours(name: str, values: Values) -> Values:
    """What our operation differentiates: the inputs, the gate in the place of its logarithm."""
    made = {key: x.clone() for key, x in values.items() if key != "log"}
    return made | {"gate": values["log"].exp()}


def run_ours(name: str, leaves: Values, first: Tensor | None, backend: str, **options: Any) -> Result:
    """Our operation: (outputs, last state)."""
    q, k, v, gate = (leaves[key] for key in ("q", "k", "v", "gate"))
    options = {"backend": backend, "checked": False, **options}
    if name == "pdr":
        return pdr.scan(q, k, v, gate, first, **options)
    if name in ("gla", "gla64", "ssd"):
        return gla.scan(q, k, v, gate, first, **options)
    if name == "rwkv7":
        return delta.scan_rwkv7(q, k, v, leaves["a"], leaves["b"], gate, first, scale=1.0, **options)
    beta = leaves["beta"]
    return delta.scan(q, k, beta * k, beta * v, gate, first, scale=q.shape[-1] ** -0.5, **options)


# ---------------------------------------------------------------- theirs


def theirs(name: str, values: Values, dtype: torch.dtype) -> Values:
    """What fla differentiates, in its layout: inputs of the dtype, and logarithms in float32 where its layers have them
    so."""
    kind, made = KINDS[name], {}
    for key, x in values.items():
        x = x.transpose(1, 2)
        x = x.squeeze(-1) if key == "beta" or (key == "log" and kind.narrow) else x
        made[key] = x.to(torch.float32 if key == "log" and not kind.half else dtype).contiguous()
    return made


def of_theirs(name: str, key: str, x: Tensor) -> Tensor:
    """A gradient or an output of fla in our layout, in float32."""
    x = x.float()
    return (x.unsqueeze(-1) if x.dim() == 3 else x).transpose(1, 2)


def run_theirs(name: str, leaves: Values, first: Tensor | None, *, steps: bool, last: bool) -> Result:
    """fla's operation by chunks or by steps: (outputs, last state if wanted)."""
    return _function(name, steps)(leaves, initial_state=first, output_final_state=last)


def _function(name: str, steps: bool) -> Callable[..., Result]:
    """fla's function of the leaves. ImportError: there is none."""
    from importlib import import_module

    folder, chunk, step = KINDS[name].fla
    function = getattr(import_module(f"fla.ops.{folder}"), step if steps else chunk)
    gate = "gk" if folder == "gla" and steps else "w" if name == "rwkv7" else "g"
    named = {"q": "r" if name == "rwkv7" else "q", "log": gate}
    scale = 1.0 if name == "rwkv7" else None

    def call(leaves: Values, **options: Any) -> Result:
        return function(**{named.get(key, key): x for key, x in leaves.items()}, scale=scale, **options)

    return call


# ---------------------------------------------------------------- the reference, and errors


def naive(name: str, leaves: Values, do: Tensor | None, tokens: int) -> Values:
    """Outputs and gradients, in float64, of the first row's first tokens; `do` is the gradient of the outputs."""
    time = 1 if name == "pdr" else 2
    first = {key: x.detach()[:1].narrow(time, 0, tokens).double() for key, x in leaves.items()}
    if do is None:
        with torch.no_grad():
            return {"o": run_ours(name, first, None, "naive")[0]}
    wanted = {key: x.requires_grad_() for key, x in first.items()}
    o, _ = run_ours(name, wanted, None, "naive")
    gradients = torch.autograd.grad(o, list(wanted.values()), do[:1].narrow(time, 0, tokens).double())
    return {"o": o.detach(), **dict(zip(wanted, gradients, strict=True))}


def error(found: Values, exact: Values) -> dict[str, float]:
    """‖found − exact‖ / ‖exact‖ of each, over what the exact one has."""
    errors = {}
    for key, x in exact.items():
        cut = tuple(slice(0, n) for n in x.shape)
        difference = torch.linalg.vector_norm(found[key][cut].double() - x.double())
        errors[key] = float(difference / torch.linalg.vector_norm(x.double()).clamp_min(1e-30))
    return errors


# ---------------------------------------------------------------- what it takes at least


def floats(name: str, d: int) -> dict[str, float]:
    """Numbers of a token: inputs, those of them that are logarithms of gates, and outputs."""
    kind = KINDS[name]
    if name == "pdr":
        return {"inputs": 2 * kind.K + 2 * d, "gates": d, "outputs": d}
    H = heads(kind, d)
    gates = H * (1 if kind.narrow else kind.K)
    each = {"beta": 1, "a": kind.K, "b": kind.K}
    inputs = H * (2 * kind.K + kind.V + sum(each[key] for key in kind.more)) + gates
    return {"inputs": inputs, "gates": gates, "outputs": H * kind.V}


def state_floats(name: str, d: int) -> int:
    kind = KINDS[name]
    return d * kind.K if name == "pdr" else heads(kind, d) * kind.K * kind.V


def least_bytes(name: str, d: int, tokens: int, size: int, gate: int, *, backward: bool) -> float:
    """The fewest bytes that must move with numbers of so many bytes: inputs are read and outputs written once; with the
    backward pass inputs and the outputs' gradient are read again and gradients written."""
    n = floats(name, d)
    inputs = (n["inputs"] - n["gates"]) * size + n["gates"] * gate
    outputs = n["outputs"] * size
    return tokens * (3 * inputs + 2 * outputs if backward else inputs + outputs)


def flops(name: str, d: int, tokens: int, *, backward: bool) -> float:
    """Operations of the step form, two for each multiply-add: the state is written and read, and the delta rule reads
    it once more, RWKV-7 writes it once more too. The backward pass counts twice."""
    return 2.0 * KINDS[name].products * state_floats(name, d) * tokens * (3 if backward else 1)


def step(name: str, backend: str, leaves: Values, first: Tensor) -> Callable[[], Result]:
    """One token of ours, which writes into its state."""
    return partial(run_ours, name, leaves, first, backend, consume_state=True)
