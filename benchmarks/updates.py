"""Every design at equal parameters: training with and without the native kernels, and decoding, all in turns.

An update is forward, loss, backward, clipping and fused AdamW on 8 × 256 random tokens. "Without" runs the same program
on PyTorch's operations (before there were kernels for training; decoding is not affected). A decoded token is one step
of one row after 64 others, whole model, greedy. Seconds are processor time on one thread.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import common
import torch
from torch import Tensor

from perspectron import native, presets
from perspectron.decode.steps import stepped, steps_of
from perspectron.model.config import ModelConfig
from perspectron.model.model import build
from perspectron.util.machine import in_large_pages, memory_kept

TESTS = ("tests/native/test_training.py", "tests/ops/test_fused.py", "tests/ops/test_memory.py")
DESIGNS = (
    *("perspective", "perspective2", "adr", "adr2", "lens", "lens2", "drm", "drm2"),
    *("transformer", "gpt2", "gla", "ssd", "gdn", "kda", "gdn2", "rwkv7", "mamba3", "hgrn2", "mingru"),
    *(f"{design}[shift=true,first_values=true]" for design in ("transformer", "lens2", "gdn")),
)


def updates(model: Any, vocab: int, T: int, dtype: str) -> Callable[[], float]:
    """A call that makes one update and says how many seconds of the processor it took."""
    ids = torch.randint(0, vocab, (8, T + 1), generator=torch.Generator().manual_seed(0))

    def loss_of(ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return model(ids_BT, targets=targets_BT).objective()

    update = common.updating(model, loss_of, ids[:, :-1], ids[:, 1:], dtype)

    def timed() -> float:
        start = time.process_time()
        update()
        return time.process_time() - start

    return timed


def decoding(model: Any, tokens: int) -> Callable[[], float]:
    """A call that decodes so many tokens and says how many seconds of the processor one took."""

    @torch.inference_mode()
    def decode() -> float:
        state, steps = model(torch.arange(64)[None] % 200).state, steps_of(model)
        token = torch.tensor([[1]])
        start = time.process_time()
        for _ in range(tokens):
            _, logits_1V, state = stepped(model, steps, token, state)
            token = logits_1V.argmax(-1, keepdim=True)
        return (time.process_time() - start) / tokens

    return decode


def contenders(config: ModelConfig, T: int, dtype: str, tokens: int) -> dict[str, Callable[[], float]]:
    model = build(config, 0)
    update, decode = updates(model, config.vocab_size, T, dtype), decoding(model, tokens)

    def without() -> float:
        with mock.patch.object(native, "wanted", return_value=False):
            return update()

    return {"update": update, "without": without, "decode": decode}


def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    parser.add_argument("--designs", nargs="*", default=DESIGNS)
    parser.add_argument("--params", type=int, default=2_000_000)
    parser.add_argument("--length", type=int, default=256, help="tokens of a window (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    designs: tuple[str, ...] = ("perspective2", "gdn", "transformer") if args.quick else tuple(args.designs)
    T, tokens, params = (16, 2, 80_000) if args.quick else (args.length, 32, args.params)
    report = common.Report(args, TESTS, dtype=args.dtype, shapes=f"{params:,} parameters, 8 × {T} tokens")
    vocab = 300 if args.quick else presets.vocabulary(params)
    calls: dict[tuple[str, str], Callable[[], float]] = {}
    for name in designs:
        config = presets.solve(name, params, vocab_size=vocab, seq_len=T)
        calls |= {(name, way): call for way, call in contenders(config, T, args.dtype, tokens).items()}
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    with memory_kept():
        for call in calls.values():  # warm
            call()
        in_large_pages()
        for _ in range(1 if args.quick else args.repeats):
            for key, call in calls.items():
                taken[key].append(call())
    results, rows = {}, []
    for name in designs:
        seconds = {way: taken[name, way] for way in ("update", "without", "decode")}
        speed = common.Spread.of([8 * T / s for s in seconds["update"]])
        decode = common.Spread.of(seconds["decode"])
        ratio = common.ratios(seconds["without"], seconds["update"])
        results[name] = {"tokens_per_second": speed, "kernels": ratio, "decode_seconds": decode}
        rows.append((name, speed.text(), ratio.text(), decode.text(1e3)))
    report.table(("design", "training, tokens/s", "kernels, times", "decoding, ms/token"), rows)
    report.finish(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
