"""What can each design be taught to remember, and where does a fixed state fail?

Small models of every design (width 64, two layers) are trained from scratch on multi-query associative recall. Of the
perspective model that is two PDR layers, without its windowed attention; of `perspective2` it is one layer of PDR 2 and
one of attention to half a text, with both of its parts; then PDR with smaller memories: states of R columns, for R keys
by theory. Then a needle of one fact (any value in the text is the answer), also for windowed attention alone, with a
window that reaches it and with one that does not. Last the parity of 64 bits, for recurrences that can flip a sign and
for those that cannot. A run ends when its task is solved or its steps are done. With --json results are written after
each arm, and a call that finds the file does only what it lacks.
"""

from dataclasses import replace
from typing import Any

import common
import torch

from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.eval.recall import SOLVED, Options, Setting, config_for, measure_setting
from perspectron.eval.tasks import MQAR, Needle
from perspectron.eval.tracking import Parity
from perspectron.model.config import ModelConfig

TESTS = ("tests/eval/test_tasks.py::test_answers_are_those_of_a_plain_solver",)
DESIGNS = ("transformer", "perspective", "ssd", "lens", "gpt2", "gla", "drm", "adr")
DESIGNS += ("perspective2", "gdn", "kda", "gdn2", "rwkv7", "mamba3", "hgrn2", "mingru")
PARITY = dict.fromkeys(("gdn[negative=true]", "kda[negative=true]", "gdn2[negative=true]"), "can flip a bit")
PARITY |= {"mamba3": "turns a key by half a circle", "rwkv7": "flips a sign, and keeps less than half of it"}
PARITY |= dict.fromkeys(("gdn", "kda", "gdn2", "perspective", "gla", "ssd", "hgrn2", "mingru"), "chance")
PARITY |= {"transformer": "at no length beyond those it saw"}
"""What theory says of the parity of bits: whether a token can turn a state into its negative."""
RATES = (3e-3, 1e-3, 6e-3, 1.2e-2, 3e-4)
RANKS = (1, 2, 4, 8)
WINDOW, LAYERS = 4, 2

Arm = tuple[ModelConfig, Setting, str]


def arms(pairs: int, length: int, steps: int, options: Options) -> dict[str, Arm]:
    """Name: (model, setting, what theory says). The designs that tell most come first."""
    mqar = Setting(MQAR(length, pairs=pairs, keys=2 * pairs, values=2 * pairs), steps)
    needle = Setting(Needle(length, distance=length - 8, facts=1), steps)

    def model(design: str, setting: Setting) -> ModelConfig:
        return config_for(design, setting.task, options.d_model, LAYERS)

    def with_mixers(mixer: PDRConfig | WindowGQAConfig, setting: Setting) -> ModelConfig:
        config = model("perspective", setting)
        return replace(config, blocks=tuple(replace(block, mixer=mixer) for block in config.blocks))

    seen = LAYERS * (WINDOW - 1)
    found: dict[str, Arm] = {name: (model(name, mqar), mqar, "") for name in DESIGNS}
    found |= {
        f"PDR, R = {rank}": (with_mixers(PDRConfig(rank), mqar), mqar, f"room for {rank} of {pairs} keys")
        for rank in RANKS
        if rank < config_rank(found["perspective"][0])
    }
    found["needle: transformer"] = (model("transformer", needle), needle, "attention sees it")
    found["needle: perspective"] = (model("perspective", needle), needle, "if gates stay open")
    reach = {length: "attention sees it", WINDOW: f"chance: sees {seen} tokens back of {length - 9}"}
    for window, expected in reach.items():
        model_of = with_mixers(WindowGQAConfig(heads=2, kv_heads=1, window=window), needle)
        found[f"needle: window {window}"] = (model_of, needle, expected)
    parity = Setting(Parity(2 * length), steps)
    found |= {f"parity: {name}": (model(name, parity), parity, theory) for name, theory in PARITY.items()}
    return found


def config_rank(config: ModelConfig) -> int:
    return max(block.mixer.rank for block in config.blocks if isinstance(block.mixer, PDRConfig))


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=3)
    parser.add_argument("--steps", type=int, default=600, help="of a run at most (%(default)s)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(RATES), help="learning rates (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="ARM", help="these arms (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    pairs, length, steps, seeds = 8, 32, args.steps, args.repeats
    options = Options(seeds=seeds, rates=tuple(args.rates), layers=LAYERS)
    if args.quick:
        pairs, length, steps = 4, 16, 2
        options = replace(options, seeds=2, batch_tokens=64, d_model=32)
    shapes = (
        f"MQAR of {pairs} pairs in {length} tokens, ids {4 * pairs + 1}; {options}; at most {steps} steps"
    )
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    done = report.before("arms")
    asked = arms(pairs, length, steps, options)
    if unknown := set(args.only or ()) - set(asked):
        parser.error(f"--only: no arm {', '.join(sorted(unknown))}; there are {', '.join(asked)}")
    for name in args.only or asked:
        config, setting, theory = asked[name]
        if name not in done:
            found = measure_setting(config, setting, options)
            done[name] = report.stamped(found | {"task": setting.task.name, "theory": theory})
            report.keep({"solved": SOLVED, "arms": done})
        done[name]["theory"] = theory
        report.say(line(name, done[name]))
    report.say("")
    header = ["arm", "task", "accuracy", "chance", "solved", "steps", "state", "parameters", "CPU s"]
    report.table([*header, "theory"], [row(name, done[name]) for name in asked if name in done])
    report.say("Accuracy and steps: median (least–greatest) over seeds. State: bytes after a text.")
    report.say("Who knows which values a text of recall has, and not with which keys, guesses 1/pairs.")
    report.finish({"solved": SOLVED, "arms": done})


def line(name: str, found: dict[str, Any]) -> str:
    each = " ".join(f"{value:.3f}" for value in found["accuracy"])
    return f"{name}: {each} in {found['steps']} steps, {found['seconds']:.0f} s of CPU"


def row(name: str, found: dict[str, Any]) -> list[str]:
    accuracy, steps = (common.Spread.of(found[key]).text() for key in ("accuracy", "steps"))
    solved = sum(value >= SOLVED for value in found["accuracy"])
    return [
        *(name, found["task"], accuracy, f"{found['chance']:.4f}", f"{solved} of {len(found['accuracy'])}"),
        *(steps, f"{found['state_bytes']:,}", f"{found['parameters']:,}", f"{found['seconds']:.0f}"),
        found["theory"],
    ]


if __name__ == "__main__":
    main()
