"""The four designs and the baselines at one size: training, decoding and memory; and three kernels against what they
replace.

Bars: ADR's GRU ≥ 20 times the document's loop over tokens and heads; lens attention ≤ 1.4 times plain attention,
forward and backward; drm-104k trains ≥ 10 times as fast as a plain loop of modules, and steps as fast late as early.
Everything that is compared takes turns in one process.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import common
import decode
import drm_modules
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron import presets
from perspectron.designs.adr import gru
from perspectron.designs.lens import op as lens
from perspectron.model.model import LanguageModel, build
from perspectron.ops import attention
from perspectron.train.optim import OptimConfig, optimizer_of

TESTS = (
    "tests/designs/adr/test_gru.py",
    "tests/designs/lens/test_op.py",
    "tests/designs/drm/test_op.py",
    "tests/designs/test_mixers.py::test_steps_equal_the_whole",
)
BARS = {
    "gru_to_loop": 20.0,
    "lens_to_plain": 1.4,
    "drm_to_modules": 10.0,
    "drm_late_to_early": 1.05,
}
MODELS = (
    *("perspective-20m-dense", "adr-20m", "lens-20m", "drm-37m"),
    *("transformer-20m", "gpt2-20m", "gla-20m", "ssd-20m"),
)


@dataclass(frozen=True)
class Sizes:
    """B sequences of T tokens in a training step; contexts to decode at; shapes of the three kernels; positions
    that learned tables get; sizes that presets take instead of their own."""

    B: int = 8
    T: int = 512
    contexts: tuple[int, ...] = (1024, 8192)
    positions: int = 16384
    sizes: Mapping[str, Any] | None = None
    gru: tuple[int, int, int, int] = (4, 512, 4, 64)
    lens: tuple[int, int, int, int] = (4, 12, 1024, 64)
    drm: tuple[int, int] = (8, 64)
    late: tuple[int, int] = (1024, 65536)


QUICK = Sizes(
    *(2, 16, (32, 64), 256),
    sizes={"vocab_size": 64, "layers": 2},
    gru=(2, 8, 2, 8),
    lens=(1, 2, 64, 8),
    drm=(2, 8),
    late=(32, 64),
)


def config_of(name: str, sizes: Sizes) -> Any:
    """The preset; a learned table of positions is made as long as the longest context asks."""
    overrides: dict[str, Any] = {"positions": sizes.positions, **(sizes.sizes or {})}
    return presets.get(name, **{k: v for k, v in overrides.items() if k in presets.sizes(name)})


# The systems


def trainer(name: str, sizes: Sizes) -> Callable[[], None]:
    """A call is one step: forward, loss with every term, backward, AdamW."""
    model = build(config_of(name, sizes))
    ids = torch.randint(model.config.vocab_size, (sizes.B, sizes.T + 1))
    return partial(update, model, optimizer_of(model, OptimConfig()), ids)


def update(model: LanguageModel, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model(ids[:, :-1], targets=ids[:, 1:]).objective().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def alone(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of two steps, weights, gradients and optimizer included, in this process."""
    torch.set_num_threads(spec["threads"])
    trainer(spec["name"], QUICK)()  # loads the libraries
    with common.Peak() as peak:
        step = trainer(spec["name"], Sizes(**spec["sizes"]))
        step()
        step()
    return {"peak_bytes": peak.bytes}


def systems(report: common.Report, sizes: Sizes, threads: int, repeats: int) -> dict[str, Any]:
    steps = {name: trainer(name, sizes) for name in MODELS}
    trained = common.interleave(steps, repeats)
    del steps
    with torch.inference_mode():
        decoded, states = decoding(sizes, repeats)
    found, rows = {}, []
    for name in MODELS:
        speed = common.Spread.of([sizes.B * sizes.T / s for s in trained[name]])
        with torch.device("meta"):
            count = sum(p.numel() for p in LanguageModel(config_of(name, sizes)).parameters())
        spec = {"name": name, "sizes": asdict(sizes), "threads": threads}
        memory = {"not_run": "quick"} if sizes is QUICK else common.child(spec, 4e9)
        steps_at = {context: common.Spread.of(decoded[name, context]) for context in sizes.contexts}
        held = {context: states[name, context] for context in sizes.contexts}
        found[name] = {
            "parameters": count,
            "tokens_per_second": speed,
            "to_transformer": common.ratios(trained["transformer-20m"], trained[name]),
            "training_memory": memory,
            "seconds_per_token": {str(context): spread for context, spread in steps_at.items()},
            "state_bytes": {str(context): size for context, size in held.items()},
        }
        rows.append(
            [
                name,
                f"{count / 1e6:.2f}",
                speed.text(),
                f"{found[name]['to_transformer'].median:.2f}",
                common.peak_text(memory),
                *(spread.text(1e3) for spread in steps_at.values()),
                *(f"{size / 1e6:.2f}" for size in held.values()),
            ]
        )
    header = ["", "M parameters", "tokens/s", "to twin", "peak memory"]
    header += [f"ms/token at {context}" for context in sizes.contexts]
    header += [f"state MB at {context}" for context in sizes.contexts]
    report.table(header, rows)
    return found


def decoding(
    sizes: Sizes, repeats: int
) -> tuple[dict[tuple[str, int], list[float]], dict[tuple[str, int], int]]:
    """Seconds per token at each context, the tokens before it really read; and bytes of state there."""
    steppers = {}
    for name in MODELS:
        model = build(config_of(name, sizes)).eval()
        longest = max(sizes.contexts)
        states = decode.read(model, list(sizes.contexts), longest)
        steppers |= {(name, context): decode.Stepper(model, state) for context, state in states.items()}
    held = {key: stepper.state.nbytes for key, stepper in steppers.items()}
    return decode.rounds(steppers, repeats + 1, 4), held


# The kernels


def gru_against_loop(report: common.Report, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Decayed GRU memories over keys and values, forward and backward."""
    B, T, H, K = sizes.gru
    draw = torch.Generator().manual_seed(0)
    cells = nn.ModuleList(nn.GRUCell(K, K) for _ in range(2 * H))
    x_BTG1K, do = (torch.randn(B, T, 2 * H, 1, K, generator=draw) for _ in range(2))
    x_BTG1K.requires_grad_()
    stacked = [torch.stack([getattr(cell, name) for cell in cells]).detach()
               for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]  # fmt: skip
    weights = gru.Cells(
        *(x.mT.contiguous().requires_grad_() for x in stacked[:2]), *(x.requires_grad_() for x in stacked[2:])
    )
    start, gamma = x_BTG1K.new_zeros(B, 2 * H, 1, K), 0.97

    def loop() -> Tensor:
        """As the document has it: a cell per head, a token at a time."""
        outputs = []
        for cell, x_BTK in zip(cells, x_BTG1K[:, :, :, 0].unbind(2), strict=True):
            h, states = start[:, 0, 0], []
            for x_BK in x_BTK.unbind(1):
                h = gamma * h + (1 - gamma) * cell(x_BK, h)
                states.append(h)
            outputs.append(torch.stack(states, 1))
        y = torch.stack(outputs, 2)[:, :, :, None]
        torch.autograd.grad(y, [x_BTG1K, *cells.parameters()], do)
        return y.detach()

    def ours() -> Tensor:
        y = gru.scan(x_BTG1K, weights, gamma, start)[0]
        torch.autograd.grad(y, [x_BTG1K, *weights], do)
        return y.detach()

    agreement = (loop() - ours()).abs().max().item()
    seconds = common.interleave({"loop": loop, "ours": ours}, repeats)
    ratio = common.ratios(seconds["loop"], seconds["ours"])
    shape = f"B{B} T{T} H{H} D{K}, keys and values"
    report.say(f"GRU memories, {shape}: {ratio.text()} times the loop (bar ≥ {BARS['gru_to_loop']})")
    spreads = {name: common.Spread.of(values) for name, values in seconds.items()}
    return {"shape": shape, "seconds": spreads, "loop_to_ours": ratio, "largest_difference": agreement}


def lens_against_plain(report: common.Report, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Attention through three lenses and through one, of ours and of PyTorch; the lenses' explicit form beside them."""
    B, H, T, K = sizes.lens
    q, k, v = (torch.randn(B, H, T, K).requires_grad_() for _ in range(3))
    u, gates = torch.randn(H, K).mul_(0.02).requires_grad_(), torch.randn(H, 3).requires_grad_()
    do = torch.randn(B, H, T, K)

    def plain() -> None:
        torch.autograd.grad(attention.attend(q, k, v, causal=True), (q, k, v), do)

    def pytorch() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), do)

    def lenses() -> None:
        query, key = lens.features(q, k, u, gates.softmax(-1))
        o = attention.attend(query, key, v, causal=True, scale=K**-0.5)
        torch.autograd.grad(o, (q, k, v, u, gates), do)

    def explicit() -> None:
        torch.autograd.grad(lens.naive(q, k, v, u, gates.softmax(-1)), (q, k, v, u, gates), do)

    seconds = common.interleave(
        {"plain": plain, "pytorch": pytorch, "lens": lenses, "explicit": explicit}, repeats
    )
    ratio, theirs = (common.ratios(seconds["lens"], seconds[name]) for name in ("plain", "pytorch"))
    against = common.ratios(seconds["explicit"], seconds["lens"])
    shape = f"B{B} H{H} T{T} D{K}"
    report.say(
        f"lens attention, {shape}: {ratio.text()} times plain attention (bar ≤ {BARS['lens_to_plain']}), "
        f"{theirs.text()} times PyTorch's; "
        f"the explicit form takes {against.text()} times as long"
    )
    spreads = {name: common.Spread.of(values) for name, values in seconds.items()}
    found = {"lens_to_plain": ratio, "lens_to_pytorch": theirs, "explicit_to_lens": against}
    return {"shape": shape, "seconds": spreads} | found


def drm_against_modules(report: common.Report, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Training steps of drm-104k against a plain loop of modules with the same weights; steps late and early."""
    B, T = sizes.drm
    model = build(presets.get("drm-104k"))
    plain = drm_modules.PlainDRM(model.config).take(model)
    ids = torch.randint(model.config.vocab_size, (B, T + 1))
    ours, theirs = optimizer_of(model, OptimConfig()), optimizer_of(plain, OptimConfig())

    def modules() -> None:
        plain(ids[:, :-1], ids[:, 1:]).backward()
        theirs.step()
        theirs.zero_grad(set_to_none=True)

    with torch.no_grad():
        difference = plain(ids[:, :-1], ids[:, 1:]) - model(ids[:, :-1], targets=ids[:, 1:]).objective()
    seconds = common.interleave({"modules": modules, "ours": partial(update, model, ours, ids)}, repeats)
    speeds = {name: common.Spread.of([B * T / s for s in values]) for name, values in seconds.items()}
    ratio = common.ratios(seconds["modules"], seconds["ours"])
    with torch.inference_mode():
        early, late = (decode.Stepper(model, decode.read(model, [n], n)[n]) for n in sizes.late)
        pair = decode.paired(early, late, 200 if repeats > 1 else 4)
    flat = common.Spread.of(decode.middle_half([b / a for a, b in zip(*pair, strict=True)]))
    report.say(
        f"drm-104k, B{B} T{T}: {speeds['ours'].text()} tokens/s, modules in a loop "
        f"{speeds['modules'].text()}: {ratio.text()} times (bar ≥ {BARS['drm_to_modules']})",
        f"drm-104k, one step after {sizes.late[1]} tokens: {flat.text()} times one after {sizes.late[0]} "
        f"(bar ≤ {BARS['drm_late_to_early']}; middle half of the pairs)",
    )
    return {
        "tokens_per_second": speeds,
        "ours_to_modules": ratio,
        "late_to_early": flat,
        "loss_difference": difference.item(),
    }


def bars_missed(results: dict[str, Any]) -> list[str]:
    """Names of the bars that the medians do not reach."""
    drm = results["drm"]
    reached = {
        "gru_to_loop": results["gru"]["loop_to_ours"].median >= BARS["gru_to_loop"],
        "lens_to_plain": results["lens"]["lens_to_plain"].median <= BARS["lens_to_plain"],
        "drm_to_modules": drm["ours_to_modules"].median >= BARS["drm_to_modules"],
        "drm_late_to_early": drm["late_to_early"].median <= BARS["drm_late_to_early"],
    }
    return [name for name, is_reached in reached.items() if not is_reached]


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    parser.add_argument("--kernels", action="store_true", help="the kernels alone, without the systems")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(alone(json.loads(args.child))))
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes, repeats = (QUICK, 1) if args.quick else (Sizes(), args.repeats)
    shapes = f"training {sizes.B}×{sizes.T}, decoding batch 1 at {', '.join(map(str, sizes.contexts))}"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    results: dict[str, Any] = {
        "gru": gru_against_loop(report, sizes, repeats),
        "lens": lens_against_plain(report, sizes, repeats),
        "drm": drm_against_modules(report, sizes, repeats),
    }
    missed = bars_missed(results)
    report.say(f"bars missed: {', '.join(missed) or 'none'}", "")
    if not args.kernels:
        results["systems"] = systems(report, sizes, args.threads, max(2, repeats // 2))
    report.finish({"bars": BARS, "missed": missed, **results})


if __name__ == "__main__":
    main()
