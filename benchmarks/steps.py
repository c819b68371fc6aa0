"""A decoded token by the modules and by a recording of their step, for every design, alone and in batches, and packed.

Random weights, float32 or packed, after a prompt of 256 tokens, head included, drawing not; the ways take turns in one
process. Seconds are processor time on one thread; ratios are round by round. Python: what of a recorded step is not
native code, without what experts do, by the clock on the wall. Witness: the share of a token that goes into comparing
what constants were made of; asked: a call of `steps_of`, once a text. Bars: Python ≤ 50 µs a token, and drm-104k
≤ 50 µs in all; a recording no slower than the modules; the witness ≤ 2% of a token.

python benchmarks/steps.py --json results/steps.json
"""

import statistics
import time
from collections.abc import Callable
from ctypes import Array, c_int64
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.decode.steps import stepped, steps_of
from perspectron.eval.timing import take_turns
from perspectron.model.model import LanguageModel, build
from perspectron.quant.convert import convert

TESTS = ("tests/decode/test_steps.py", "tests/native/test_tape.py")
BARS = {"python": 50e-6, "drm-104k": 50e-6, "ratio": 1.0, "witness": 0.02}
ROWS = (1, 8, 16)
PROMPT, VOCAB = 256, 2048
PRESETS = (
    "drm-104k", "perspective2-tiny", "transformer-tiny", "perspective-tiny", "perspective-20m-dense", "transformer-20m",
)  # fmt: skip
PACKED = tuple(f"{name}, {format}" for name in PRESETS[-2:] for format in ("int8", "4bit", "2bit"))
DESIGNS = (
    "perspective", "adr", "lens", "drm", "perspective2", "adr2", "lens2", "drm2", "transformer", "gpt2", "gla", "ssd",
    "gdn", "kda", "gdn2", "mamba3", "hgrn2", "mingru", "rwkv7",
)  # fmt: skip


def ways(model: LanguageModel, rows: int, tokens: int) -> dict[str, Callable[[], float]]:
    """Calls that say how many seconds a token of all rows takes: by the modules, by the recording, and its tape."""
    ids_BT = torch.arange(PROMPT).repeat(rows, 1) % (model.config.vocab_size - 1) + 1
    ids_B1 = torch.ones(rows, 1, dtype=torch.int64)
    start = model.hidden(ids_BT)[1]
    steps = steps_of(model)
    assert steps is not None

    def way(recorded: bool, clock: Callable[[], float] = time.process_time) -> Callable[[], float]:
        def turn() -> float:
            _, _, state = stepped(model, steps if recorded else None, ids_B1, start.fork())
            before = clock()
            for _ in range(tokens):
                _, _, state = stepped(model, steps if recorded else None, ids_B1, state)
            return (clock() - before) / tokens

        return turn

    recorded, by_the_wall = way(True), way(True, time.perf_counter)
    recorded()
    recording = steps._latest
    assert recording is not None, model.config.name
    spent, run = [0.0], recording._tape.run

    def counted(places: Array[c_int64]) -> None:
        before = time.perf_counter()
        run(places)
        spent[0] += time.perf_counter() - before

    def python() -> float:
        """Seconds of a token outside of the tape, by the clock on the wall: asking for processor time is a system call,
        and every token would ask twice."""
        spent[0], recording._tape.run = 0.0, counted
        whole = by_the_wall()
        recording._tape.run = run
        return whole - spent[0] / (tokens + 1)

    def witness() -> float:
        """Seconds of a token for the comparisons that its tape begins with, less those of a call that does nothing."""
        tape, seconds = recording._tape, list[float]()

        def watched(places: Array[c_int64]) -> None:
            marks = list[float]()
            for count in (0, 0, tape.checks):
                tape._native(tape.instructions.ctypes.data, count, places, 1)
                marks.append(time.perf_counter())
            seconds.append(marks[2] - 2 * marks[1] + marks[0])
            run(places)

        tape.run = watched
        recorded()
        tape.run = run
        return statistics.median(seconds)

    def asked() -> float:
        before = time.perf_counter()
        assert steps_of(model) is steps
        return time.perf_counter() - before

    return {
        "modules": way(False),
        "recorded": recorded,
        "python": python,
        "witness": witness,
        "asked": asked,
    }


def missed(results: dict[str, dict[str, Any]]) -> list[str]:
    """The models, with the bars that they miss."""
    told = []
    for name, by_rows in results.items():
        one = by_rows["1"]
        reached = {
            "python": one["python"].median <= BARS["python"],
            "drm-104k": name != "drm-104k" or one["recorded"].median <= BARS["drm-104k"],
            "witness": one["witness"].median <= BARS["witness"],
            "ratio": all(own["ratio"].median >= BARS["ratio"] for own in by_rows.values()),
        }
        told += [f"{name}: {bar}" for bar, is_reached in reached.items() if not is_reached]
    return told


def made(name: str, params: int) -> LanguageModel:
    """A design of so many parameters, or a preset; after a comma, the format that it is packed in."""
    name, _, format = name.partition(", ")
    known = name in presets.names()
    config = presets.get(name) if known else presets.solve(name, params, vocab_size=VOCAB, seq_len=512)
    model = build(config).eval().requires_grad_(False)
    if format:
        convert(model, format)
    return model


@torch.inference_mode()
def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = (
        ("drm-104k", "perspective2", "perspective2, 4bit") if args.quick else (*DESIGNS, *PRESETS, *PACKED)
    )
    params, tokens = (300_000, 3) if args.quick else (2_000_000, 24)
    report = common.Report(
        args, TESTS, dtype="float32, or as named", shapes=f"{params:,} parameters or a preset"
    )
    results, table = dict[str, dict[str, dict[str, common.Spread]]](), []
    for name in names:
        model = made(name, params)
        results[name] = {}
        for rows in ROWS[:1] if "20m" in name or name == "perspective-tiny" else ROWS:
            taken = take_turns(ways(model, rows, tokens), args.repeats)
            ratio = common.Spread.of(
                [a / b for a, b in zip(taken["modules"], taken["recorded"], strict=True)]
            )
            own = {way: common.Spread.of(seconds) for way, seconds in taken.items()} | {"ratio": ratio}
            pairs = zip(taken["witness"], taken["recorded"], strict=True)
            own["witness"] = common.Spread.of([a / b for a, b in pairs])
            results[name][str(rows)] = own
            said = [own[way].text(1e3) for way in ("modules", "recorded")]
            more = own["python"].text(1e6), own["witness"].text(100), own["asked"].text(1e6)
            table.append((name, str(rows), *said, ratio.text(), *more))
            report.say(
                f"{name}, {rows} rows: {said[0]} ms by the modules, {said[1]} recorded, {ratio.text()} times"
            )
    head = "model", "rows", "modules, ms", "recorded, ms", "times", "Python, µs", "witness, %", "asked, µs"
    report.table(head, table)
    below = missed(results)
    report.say(f"bars missed: {', '.join(below) or 'none'}")
    report.finish({"bars": BARS, "missed": below, "models": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
