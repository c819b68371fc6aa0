"""What it costs that no other text of a batch changes a bit: filled batches, batches as they come, one by one.

For each design, milliseconds of processor time of a step and its head, states after 32 tokens, in turns. "as they come"
is a batch of so many rows and no more, whose bits depend on their number; "filled" is what `Rows` does.
"""

import time
from collections.abc import Callable
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.decode.batch import WIDTH
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState

TESTS = ("tests/decode/test_verify.py",)


def stepper(model: LanguageModel, rows: int, calls: int) -> Callable[[], float]:
    """Processor seconds of a step of so many rows, in so many calls."""
    ids_BT = torch.randint(1, model.config.vocab_size, (1, 32))
    _, read, _ = model.hidden(ids_BT)
    states = [LMState.stack([read] * rows) for _ in range(calls)]
    ids_B1 = torch.ones(rows, 1, dtype=torch.int64)

    def step() -> float:
        start = time.process_time()
        for at, state in enumerate(states):
            hidden_B1D, states[at], _ = model.hidden(ids_B1, state, consume_state=True)
            model.head(hidden_B1D)
        return time.process_time() - start

    return step


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=15)
    parser.add_argument("--designs", nargs="+", default=[d for d in presets.DESIGNS if "[" not in d])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 13, 16])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes: dict[str, Any] = {"d_model": 128, "layers": 4, "vocab_size": 4096, "seq_len": 512}
    if args.quick:
        args.designs, args.rows, args.repeats, sizes["d_model"] = args.designs[:2], [1, 3], 1, 32
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{sizes}")
    result: dict[str, Any] = {}
    with torch.inference_mode():
        for design in args.designs:
            model = build(presets.small(design, **sizes)).eval()
            for rows in args.rows:
                full = rows + -rows % WIDTH
                contenders = {
                    "as they come": stepper(model, rows, 1),
                    "filled": stepper(model, full, 1),
                    "one by one": stepper(model, 1, rows),
                }
                seconds = common.take_turns(contenders, args.repeats, 2)
                result.setdefault(design, {})[str(rows)] = {
                    name: common.Spread.of(times) for name, times in seconds.items()
                } | {
                    f"{name} / as they come": common.ratios(seconds[name], seconds["as they come"])
                    for name in ("filled", "one by one")
                }
    for rows in args.rows:
        report.table(
            [f"{rows} rows", "as they come ms", "filled, times", "one by one, times"],
            [
                [
                    design,
                    f"{one[str(rows)]['as they come'].median * 1e3:.2f}",
                    one[str(rows)]["filled / as they come"].text(),
                    one[str(rows)]["one by one / as they come"].text(),
                ]
                for design, one in result.items()
            ],
        )
    report.finish(result)


if __name__ == "__main__":
    main()
