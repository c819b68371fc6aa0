"""Merged memories of every design: KL to the memory of two texts read in turn, beside that of the second one alone.

A small model of each design is trained on bytes of Python's standard library. For pairs of files that were held out, A
is the beginning of one, B that of another, and the probe what follows B. `merged` is `perspectron.decode.merge`;
"B's window" has B's caches and windows in place of A's and B's behind one another; `alone` is B read by itself. KL in
nats a byte of what is expected after A and then B, means over pairs.

python benchmarks/merging.py --json results/merging.json
"""

import math
import random
import statistics
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch
import torch.utils._pytree as pytree

from perspectron import presets
from perspectron.data.specials import OURS
from perspectron.decode.apart import diverging
from perspectron.decode.history import exhausted
from perspectron.decode.merge import carrying
from perspectron.decode.session import Session
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState, Ragged
from perspectron.util.errors import PerspectronError

TESTS = ("tests/decode/test_past.py",)
V, A, PROBE = 257, 512, 64
LENGTHS = (16, 128, 512)


class Bytes:
    """An id for each byte."""

    vocab_size, specials = V, OURS

    def encode(self, text: str) -> list[int]:
        return [1 + byte for byte in text.encode()]

    def decode(self, ids: Any) -> str:
        return bytes(id - 1 for id in ids if id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id - 1]) if id else b""


def files() -> list[list[int]]:
    """Ids of files that are long enough."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    return [[1 + byte for byte in text] for text in texts if len(text) > 2 * A]


def trained(
    design: str, texts: list[list[int]], steps: int, seq: int, d_model: int
) -> tuple[LanguageModel, float]:
    """A model after so many updates of 8 pieces, and its loss over the last tenth of them."""
    config = presets.small(design, vocab_size=V, d_model=d_model, layers=3, seq_len=2048)
    model, draw, losses = build(config, seed=0), random.Random(0), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        rate = min(1, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        parts = [(text, draw.randrange(len(text) - seq)) for text in draw.choices(texts, k=8)]
        ids_BT = torch.tensor([text[at : at + seq + 1] for text, at in parts])
        output = model(ids_BT[:, :-1], targets=ids_BT[:, 1:])
        output.objective().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(output.loss.item())
    return model.eval(), statistics.mean(losses[-max(1, steps // 10) :])


def with_windows(state: LMState, own: LMState) -> LMState:
    """A state with the caches and windows of another."""

    def kept(part: Any, other: Any) -> Any:
        return other.fork() if isinstance(part, Ragged) else part

    mixed: LMState = pytree.tree_map(kept, state, own, is_leaf=lambda part: isinstance(part, Ragged))
    return replace(mixed, model=state.model)


def measured(
    model: LanguageModel, texts: list[list[int]], length: int, pairs: int
) -> dict[str, float | None]:
    """Means of KL over pairs of texts."""
    found: dict[str, list[float]] = {"merged": [], "B's window": [], "alone": []}
    for number in range(pairs):
        first, second = texts[2 * number % len(texts)], texts[(2 * number + 1) % len(texts)]
        a, b = (Session(model, Bytes()).read(ids) for ids in (first[:A], second[:length]))
        probe, last = second[length : length + PROBE], second[length - 1 : length]
        true = a.fork().read(second[:length])
        state = exhausted(carrying(a, b))
        contenders = {"merged": a.remembered(state.fork(), last), "alone": b}
        parts = pytree.tree_leaves(state, is_leaf=lambda part: isinstance(part, Ragged))
        if any(isinstance(part, Ragged) for part in parts) and state.length_B is None:
            own = exhausted(b.at(length - 1).remembering())
            contenders["B's window"] = a.remembered(with_windows(state, own), last)
        for name, session in contenders.items():
            kl = exhausted(diverging(true.fork(), session.fork(), probe))
            found[name].append(statistics.mean(kl))
    return {name: statistics.mean(kl) if kl else None for name, kl in found.items()}


def main() -> None:
    parser = common.parser(__doc__, threads=1, repeats=4)
    parser.add_argument("--steps", type=int, default=160, help="updates of each model (%(default)s)")
    parser.add_argument("--designs", nargs="*", help="some of them alone")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    steps, d_model, seq = (2, 32, 64) if args.quick else (args.steps, 64, 128)
    designs = args.designs or [name for name in presets.DESIGNS if "[" not in name]
    designs = designs[:2] if args.quick else designs
    lengths = (16,) if args.quick else LENGTHS
    shapes = (
        f"d_model {d_model}, 3 layers, {steps} updates of 8 × {seq} bytes, A {A}, B {lengths}, probe {PROBE}"
    )
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{shapes}, {args.repeats} pairs")
    texts = files()
    held, learnt = texts[::10], [text for index, text in enumerate(texts) if index % 10]
    results, rows = dict[str, Any](), list[list[str]]()
    for design in designs:
        start = time.perf_counter()
        try:
            model, loss = trained(design, learnt, steps, seq, d_model)
            with torch.inference_mode():
                found = {str(n): measured(model, held, n, 1 if args.quick else args.repeats) for n in lengths}
        except PerspectronError as error:
            report.say(f"{design}: {type(error).__name__}: {error}")
            results[design] = {"failed": f"{type(error).__name__}: {error}"}
            continue
        results[design] = {"loss": loss, "kl": found, "seconds": time.perf_counter() - start}
        cells = [
            "" if (kl := found[str(n)][name]) is None else f"{kl:.2g}"
            for n in lengths
            for name in ("merged", "B's window", "alone")
        ]
        rows.append([design, f"{loss:.2f}", *cells])
        report.say(f"{design}: {results[design]}")
    head = ["", "loss", *(f"{name} {n}" for n in lengths for name in ("merged", "B's window", "alone"))]
    report.table(head, rows)
    report.finish(results)


if __name__ == "__main__":
    main()
