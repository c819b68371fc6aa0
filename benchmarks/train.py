"""Training throughput: a Perspective model and its transformer twin.

A step is forward, loss, backward and fused AdamW on 4096 random tokens; no clipping, no documents' resets.
Bars: perspective ≥ 0.8 times the twin's tokens per second at T = 512, more than the twin's at T = 4096.

FLOPs are those of the model, not of the kernels: 6 per parameter and token (the tied matrix counts once, for
the head), attention's two products over the keys a query may see, the PDR tree's matrix products as pdr_scan
counts them.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import common
import pdr_scan
import torch

from perspectron import presets
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build
from perspectron.train.estimate import autocast
from perspectron.train.optim import OptimConfig, optimizer_of

TESTS = ("tests/ops/test_pdr.py", "tests/designs/test_mixers.py::test_gradients_flow_through_the_state")
BARS = {"perspective_to_twin": {"512": 0.8, "4096": 1.0}}
PERSPECTIVE, TWIN = "perspective-20m-dense", "transformer-20m"


@dataclass(frozen=True)
class Setting:
    """What a step is of: overrides of the presets' sizes, and B sequences of T."""

    B: int
    T: int
    sizes: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.B}×{self.T}"


FULL = (Setting(8, 512, {}), Setting(1, 4096, {}))
TINY = {"vocab_size": 512, "d_model": 48, "hidden": 96, "rank": 8, "window": 16, "layers": 4}
QUICK = (Setting(2, 32, TINY),)


def sized(name: str, setting: Setting) -> ModelConfig:
    """The preset with the sizes of the setting that it has."""
    return presets.get(name, **{k: v for k, v in setting.sizes.items() if k in presets.sizes(name)})


def stepper(name: str, setting: Setting, dtype: str) -> Callable[[], None]:
    """A call of which is one step."""
    torch.manual_seed(0)
    model = build(sized(name, setting)).train()
    vocab_size = presets.get(PERSPECTIVE, **setting.sizes).vocab_size
    ids, targets = torch.randint(vocab_size, (2, setting.B, setting.T)).unbind()
    optimizer = optimizer_of(model, OptimConfig())

    def step() -> None:
        with autocast(torch.device("cpu"), dtype):
            loss = model(ids, targets=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def flops(name: str, setting: Setting) -> tuple[int, int]:
    """(parameters, FLOPs of a step)."""
    B, T, tokens = setting.B, setting.T, setting.B * setting.T
    with torch.device("meta"):
        model = LanguageModel(sized(name, setting))
    count = common.parameters(model)
    total, D = 6 * count * tokens, model.config.d_model
    for block in model.config.blocks:
        match block.mixer:
            case PDRConfig(rank=R):
                total += pdr_scan.matmul_flops(pdr_scan.Shape(B, T, D, R))
            case WindowGQAConfig(window=W):
                total += attention_flops(B, T, D, W)
            case AttentionConfig():
                total += attention_flops(B, T, D, T)
    return count, total


def attention_flops(B: int, T: int, D: int, window: int) -> int:
    """q kᵀ and its product with v over the keys that each query may see, forward and (twice) backward."""
    seen = sum(min(t + 1, window) for t in range(T))
    return 3 * 4 * D * seen * B


def alone(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of two steps, weights, gradients and optimizer included, in this process."""
    torch.set_num_threads(spec["threads"])
    setting = Setting(**spec["setting"])
    stepper(spec["name"], QUICK[0], spec["dtype"])()  # loads the libraries
    with common.Peak() as peak:
        step = stepper(spec["name"], setting, spec["dtype"])
        step()
        step()
    return {"peak_bytes": peak.bytes}


def measure(
    names: list[str], setting: Setting, dtype: str, threads: int, repeats: int, *, quick: bool
) -> dict[str, Any]:
    tokens = setting.B * setting.T
    peak = common.matmul_peak(getattr(torch, dtype), quick=quick)
    seconds = common.interleave({name: stepper(name, setting, dtype) for name in names}, repeats)
    peak = max(peak, common.matmul_peak(getattr(torch, dtype), quick=quick))
    result: dict[str, Any] = {"batch": setting.B, "seq_len": setting.T, "dtype": dtype, "models": {}}
    result["matmul_peak_gflops_per_second"] = peak / 1e9
    for name in names:
        count, total = flops(name, setting)
        spec = {"name": name, "setting": asdict(setting), "dtype": dtype, "threads": threads}
        needs = 32 * count + 1500 * tokens * presets.get(PERSPECTIVE, **setting.sizes).d_model
        result["models"][name] = {
            "parameters": count,
            "seconds_per_step": common.Spread.of(seconds[name]),
            "tokens_per_second": common.Spread.of([tokens / s for s in seconds[name]]),
            "flops_per_step": total,
            "share_of_matmul_peak": total / common.Spread.of(seconds[name]).median / peak,
            "memory": {"not_run": "quick"} if quick else common.child(spec, needs),
        }
        if name != PERSPECTIVE:
            result[f"perspective_to_{name}"] = common.ratios(seconds[name], seconds[PERSPECTIVE])
    return result


def show(report: common.Report, setting: Setting, result: dict[str, Any]) -> None:
    peak = result["matmul_peak_gflops_per_second"]
    report.say(f"{setting}, {result['dtype']} (matrix product: {peak:.0f} GFLOP/s)")
    rows = [
        [
            name,
            f"{found['parameters'] / 1e6:.2f}",
            found["tokens_per_second"].text(),
            f"{found['flops_per_step'] / 1e9:.0f}",
            f"{found['share_of_matmul_peak']:.0%}",
            common.peak_text(found["memory"]),
        ]
        for name, found in result["models"].items()
    ]
    report.table(["", "M parameters", "tokens/s", "GFLOP/step", "of peak", "peak memory"], rows)
    for name in result["models"]:
        if name != PERSPECTIVE:
            bar = BARS["perspective_to_twin"].get(str(setting.T))
            wanted = "" if bar is None else f" (bar {'>' if bar == 1 else '≥'} {bar})"
            report.say(f"tokens/s, perspective / {name}: {result[f'perspective_to_{name}'].text()}{wanted}")
    report.say("")


def main() -> None:
    parser = common.parser(__doc__ or "", threads=torch.get_num_threads(), repeats=5)
    parser.add_argument("--bf16-repeats", type=int, default=2, help="rounds in bfloat16 (%(default)s)")
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16")
    )
    args = parser.parse_args()
    if args.child:
        print(json.dumps(alone(json.loads(args.child))))
        return
    torch.set_num_threads(args.threads)
    settings = QUICK if args.quick else FULL
    shapes = ", ".join(map(str, settings))
    report = common.Report(args, TESTS, dtype=", ".join(args.dtypes), shapes=f"batch×time {shapes}")
    names = [PERSPECTIVE, TWIN]
    report.say(
        "bfloat16 is autocast; its share is of the bfloat16 matrix product, the PDR scan stays float32", ""
    )
    results = []
    for dtype in args.dtypes:
        repeats = 1 if args.quick else args.repeats if dtype == "float32" else args.bf16_repeats
        for setting in settings:
            results.append(measure(names, setting, dtype, args.threads, repeats, quick=args.quick))
            show(report, setting, results[-1])
    report.finish({"bars": BARS, "runs": results})


if __name__ == "__main__":
    main()
