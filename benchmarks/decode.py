"""Milliseconds per token and bytes of state at growing contexts, a Perspective model against its twin.

Bar: perspective at the longest context ≤ 1.05 times the shortest, from steps taken in turn. One step is the
forward of one token after the context, head included, sampling not. Batch 1, float32, inference mode.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.model.cache import Cache
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState

TESTS = (
    "tests/model/test_model.py::test_prefill_any_split_and_steps_agree_over_1000_tokens",
    "tests/designs/test_mixers.py::test_steps_equal_the_whole",
)
BARS = {"perspective_longest_to_shortest": 1.05}
CONTEXTS, READ, CHUNK = (1024, 8192, 65536, 262144), 8192, 1024
MODELS = ("perspective-20m-dense", "transformer-20m")
NOTE = """\
The perspective model reads a random prompt in chunks up to {limit} tokens; beyond, the state has the same
shapes, so the one read last stands in with its length set (real rotary positions). The transformer's cache is
filled with random keys and values at full capacity: to prefill it with full attention is quadratic.
"""


class Stepper:
    """A model, its state at a context, and a token to read; `step` reads it and moves on."""

    def __init__(self, model: LanguageModel, state: LMState) -> None:
        self.model, self.state = model, state
        self.ids_11 = torch.ones(1, 1, dtype=torch.int64)

    def step(self) -> float:
        """Seconds of one token."""
        start = time.perf_counter()
        self.state = self.model(self.ids_11, self.state, consume_state=True).state
        return time.perf_counter() - start


def read(model: LanguageModel, contexts: list[int], limit: int) -> dict[int, LMState]:
    """The state after each context; those beyond `limit` are the one at `limit` with its length set."""
    ids = torch.randint(model.config.vocab_size, (1, limit), generator=torch.Generator().manual_seed(0))
    state, states = model.init_state(1), {}
    chunk = min(CHUNK, *contexts)
    for start in range(0, limit, chunk):
        state = model(ids[:, start : start + chunk], state, consume_state=True).state
        if start + chunk in contexts:
            states[start + chunk] = state.fork()
    for context in contexts:
        if context > limit:
            length = torch.tensor([context])
            layers = tuple(replace(layer, length_B=length.clone()) for layer in state.fork().layers)
            states[context] = LMState(layers)
    return states


def filled(model: LanguageModel, context: int, room: int) -> LMState:
    """A cache of `context` random tokens with room for some more."""
    layers = []
    for layer in model.init_state(1, capacity=context + room).layers:
        assert isinstance(layer, Cache)
        layer.k_BHSK.normal_()
        layer.v_BHSV.normal_()
        layers.append(replace(layer, length_B=torch.tensor([context]), used=context))
    return LMState(tuple(layers))


def prepare(
    report: common.Report, names: tuple[str, ...], contexts: list[int], limit: int, room: int
) -> dict[tuple[str, int], Stepper]:
    """A stepper for every model and context that fits into memory."""
    steppers: dict[tuple[str, int], Stepper] = {}
    for name in names:
        model = build(presets.get(name)).eval()
        if name.startswith("perspective"):
            states = read(model, contexts, limit)
            steppers |= {(name, context): Stepper(model, states[context]) for context in contexts}
            continue
        for context in contexts:
            with torch.device("meta"):
                needs = LanguageModel(model.config).init_state(1, capacity=context + room).nbytes
            if needs > 0.85 * common.available_bytes():
                report.say(f"not run: {name} at {context} needs {needs / 1e9:.1f} GB")
            else:
                steppers[name, context] = Stepper(model, filled(model, context, room))
    return steppers


def rounds(
    steppers: dict[tuple[str, int], Stepper], repeats: int, visit: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds per token: everyone takes turns of one step that warms the caches and `visit` that count."""

    def turn(stepper: Stepper, into: list[float]) -> None:
        stepper.step()
        into.append(sum(stepper.step() for _ in range(visit)) / visit)

    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steppers}
    turns = {"/".join(map(str, key)): partial(turn, steppers[key], seconds[key]) for key in steppers}
    common.interleave(turns, repeats)
    return {key: measured[1:] for key, measured in seconds.items()}


def paired(low: Stepper, high: Stepper, pairs: int) -> tuple[list[float], list[float]]:
    """A step of each in turn, `pairs` times, the first of the two changing."""
    turns: dict[str, list[float]] = {"low": [], "high": []}
    both = {"low": low, "high": high}
    for warming in (low, high) * 3:
        warming.step()
    for pair in range(pairs):
        for name in ("low", "high") if pair % 2 == 0 else ("high", "low"):
            turns[name].append(both[name].step())
    return turns["low"], turns["high"]


def middle_half(values: list[float]) -> list[float]:
    """The values between the quartiles: where a tight ratio lies, whatever else the machine did."""
    cut = len(values) // 4
    return sorted(values)[cut : len(values) - cut]


def measure(
    report: common.Report, names: tuple[str, ...], contexts: list[int], sizes: dict[str, int]
) -> dict[str, Any]:
    room = 64 + (sizes["repeats"] + 1) * (sizes["visit"] + 1)
    steppers = prepare(report, names, contexts, sizes["limit"], room)
    result: dict[str, Any] = {"models": {}, "longest_to_shortest": {}}
    perspective = [key for key in steppers if key[0].startswith("perspective")]
    low, high = paired(steppers[perspective[0]], steppers[perspective[-1]], sizes["pairs"])
    result["paired"] = {
        "model": perspective[0][0],
        "contexts": [perspective[0][1], perspective[-1][1]],
        "pairs": sizes["pairs"],
        "ratio": common.ratios(high, low),
        "ratio_middle_half": common.Spread.of(middle_half([a / b for a, b in zip(high, low, strict=True)])),
    }
    seconds = rounds(steppers, sizes["repeats"], sizes["visit"])
    rows = []
    for (name, context), measured in seconds.items():
        spread, state = common.Spread.of(measured), steppers[name, context].state.nbytes
        entry = {"seconds_per_token": spread, "state_bytes": state}
        result["models"].setdefault(name, {})[str(context)] = entry
        rows.append([name, f"{context}", spread.text(1e3), f"{state / 1e6:,.2f}"])
    report.table(["model", "context", "ms per token", "state MB"], rows)
    for name in names:
        ran = [context for model, context in seconds if model == name]
        ratio = common.ratios(seconds[name, ran[-1]], seconds[name, ran[0]])
        result["longest_to_shortest"][name] = {"contexts": [ran[0], ran[-1]], "ratio": ratio}
        report.say(f"{name}: {ran[-1]} tokens take {ratio.text()} times {ran[0]}, by rounds")
    return result


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=12)
    parser.add_argument("--visit", type=int, default=4, help="steps that count in each turn (%(default)s)")
    parser.add_argument("--pairs", type=int, default=400, help="steps in turn for the bar (%(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    args = parser.parse_args()
    if any(context % CHUNK for context in args.contexts if context <= READ):
        parser.error(f"contexts up to {READ} must be multiples of {CHUNK}")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    names, contexts = MODELS, sorted(args.contexts)
    sizes = {"repeats": args.repeats, "visit": args.visit, "pairs": args.pairs, "limit": READ}
    if args.quick:
        names, contexts = ("perspective-tiny-dense", "transformer-tiny"), [128, 256, 512]
        sizes = {"repeats": 2, "visit": 1, "pairs": 6, "limit": 256}
    shapes = f"batch 1, contexts {', '.join(map(str, contexts))}; {', '.join(names)}"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    report.say(NOTE.format(**sizes))
    with torch.inference_mode():
        result = measure(report, names, contexts, sizes)
    pair = result["paired"]
    bar, inner = BARS["perspective_longest_to_shortest"], pair["ratio_middle_half"]
    report.say(
        f"{pair['model']}: {pair['contexts'][1]} against {pair['contexts'][0]} tokens, {pair['pairs']} pairs of "
        f"steps: median of ratios {pair['ratio'].median:.4f} (half of them {inner.low:.3f}–{inner.high:.3f}, "
        f"all {pair['ratio'].low:.3f}–{pair['ratio'].high:.3f}); bar ≤ {bar}"
    )
    report.finish({"bars": BARS, **result})


if __name__ == "__main__":
    main()
