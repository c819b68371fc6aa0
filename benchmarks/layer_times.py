"""Milliseconds of each step of one token in full width (4096), from memory: what Perspective's document lists.

Four layers of perspective-1t, random weights, one distinct expert in each of three; a token goes through all of them
and the head, which together are more than a processor's cache. The prompt fills the attention window. Every part is
timed where the modules call it. What takes little time there (RMSNorm, residual, routing) is also timed alone. No bar:
the document's times are of a GPU that is not here.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch

from perspectron import native, presets
from perspectron.data import Tokenizer
from perspectron.decode.reading import prefill
from perspectron.decode.sampling import sample
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.eval.timing import GREEDY, reader
from perspectron.model.config import ModelConfig
from perspectron.stream.engine import StreamedModel, load_artifact
from perspectron.stream.synthetic import synthesize

TESTS = ("tests/stream/test_engine.py::test_streamed_is_resident_bit_by_bit",)
PROMPT = "def read_lines(path):\n"
LAYERS = 4
HALVES = (("pdr", "experts"), ("gqa", "shared_ffn"))
Times = dict[str, list[float]]


def timed(name: str, run: Callable[..., Any], times: Times) -> Callable[..., Any]:
    """`run`, whose seconds go to `times`."""

    def call(*given: Any, **options: Any) -> Any:
        start = time.perf_counter()
        out = run(*given, **options)
        times[name].append(time.perf_counter() - start)
        return out

    return call


def watch(model: StreamedModel, times: Times) -> None:
    """Time both halves of every layer where the modules call them."""
    for i, block in enumerate(model.blocks):
        mixer, network = HALVES[i % 4 == 3]
        block.mixer.forward = timed(mixer, block.mixer.forward, times)
        block.ffn.forward = timed(network, block.ffn.forward, times)


def measure(model: StreamedModel, ids: list[int], vocab_size: int, tokens: int) -> tuple[Times, list[float]]:
    """(seconds by part, bytes a second read from memory meanwhile)."""
    times: Times = defaultdict(list)
    logits_1V, state = prefill(model, [ids])
    token = logits_1V[:, :vocab_size].argmax(-1)
    watch(model, times)
    read, speeds = reader(model), []
    x_1D = torch.randn(1, model.config.d_model, generator=torch.Generator().manual_seed(0))
    alone: dict[str, Callable[[], Any]] = {
        "embed": lambda: model.embedding(token[:, None]),
        "norm": lambda: model.norm(x_1D),
        "residual": lambda: x_1D + x_1D,
        "route": lambda: model.routed[0].router.select(model.routed[0].router.distances(x_1D)),
        "output": lambda: model.head(model.norm(x_1D)),
        "sample": lambda: sample(logits_1V[:, :vocab_size], [[]], 0, GREEDY),
    }
    for _ in range(2 + tokens):
        speeds.append(read())
        start = time.perf_counter()
        hidden_11D, state, _ = model.hidden(token[:, None], state, consume_state=True)
        times["layers"].append(time.perf_counter() - start)
        for name, run in alone.items():
            timed(name, run, times)()
        token = sample(model.head(hidden_11D)[:, 0, :vocab_size], [[]], 0, GREEDY)
    warm = {name: values[2 * len(values) // (2 + tokens) :] for name, values in times.items()}
    return warm, speeds[2:]


def window(config: ModelConfig) -> int:
    """Tokens that attention sees."""
    return max(b.mixer.window for b in config.blocks if isinstance(b.mixer, WindowGQAConfig))


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=30)
    args = parser.parse_args()
    name = "perspective-tiny" if args.quick else "perspective-1t"
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    native.set_threads(args.threads)
    config = presets.get(name, layers=LAYERS)
    shapes = f"{LAYERS} layers of {name}, batch 1, after {window(config)} tokens"
    report = common.Report(args, TESTS, dtype="2-bit, ternary, int8, float32 state", shapes=shapes)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        at = Path(folder) / "artifact"
        synthesize(config, at, lambda: Tokenizer.train([PROMPT * 9], 300), experts=1)
        model, tokenizer = load_artifact(at)
        prompt = tokenizer.encode(PROMPT * window(config))[: window(config)]
        times, speeds = measure(model, prompt, tokenizer.vocab_size, 3 if args.quick else args.repeats)
    found = {part: common.Spread.of([1e3 * second for second in values]) for part, values in times.items()}
    speed = common.Spread.of([speed / 1e9 for speed in speeds])
    report.table(["part", "ms"], [[part, spread.text()] for part, spread in found.items()])
    report.say(f"reading memory meanwhile: {speed.text()} GB/s")
    report.finish({"milliseconds": found, "read_gigabytes_per_second": speed})


if __name__ == "__main__":
    main()
