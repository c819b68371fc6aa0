"""Do several views of the experts know when a model is wrong, and what do they cost?

Small routed models are trained on ordinary text and invented facts (benchmarks/facts.py), one for each seed. On
held-out text the suite `perspectives` is measured; facts say whether a wrong answer is seen. Then what a token costs
with and without the views, in turns.
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from facts import COUNTS, LR, QUICK, SEEDS, SIZES, STEPS, TRAIN, Fact, facts, prepared, trained
from torch import Tensor

from perspectron.decode.generate import generate
from perspectron.decode.reading import read
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective.measures import compared, entropy, majority, probabilities
from perspectron.designs.perspective.suites import views as suite
from perspectron.designs.perspective.suites.detection import auroc
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig
from perspectron.eval.subject import Subject
from perspectron.opening import Opened
from perspectron.util.files import plain

TESTS = ("tests/designs/perspective/test_views.py",)
FALSE_FLAGS = 0.1  # share of right answers that a detector may flag
FULL_SIZE = {"shared": 2.02, "expert": 1.63, "state": 0.50}  # GB that a token of perspective-1t reads


def cost_model(share: float) -> dict[str, float]:
    """Bytes of a token with the views asked at a share of tokens, over those without: as rows of one pass, and one
    after another."""
    shared, expert, state = FULL_SIZE.values()
    plain = shared + expert + state
    rows = shared + 3 * expert + 3 * state
    return {"one pass": 1 + share * rows / plain, "one after another": 1 + share * 3}


@torch.inference_mode()
def answers(opened: Opened, config: PerspectivesConfig, prompts: Sequence[str]) -> Tensor:
    """Probabilities [N,P,V] of what follows each prompt, by every perspective, which read it all."""
    model, looked, found = opened.model, Perspectives(opened.model, config), []
    for start in range(0, len(prompts), 64):
        ids = [[0, *opened.tokenizer.encode(text)] for text in prompts[start : start + 64]]
        fresh = [True] * len(ids)
        base_ND, _ = read(model, ids, model.init_state(len(ids)), fresh=fresh, reset=0)
        others_NPD, _ = looked.others(ids, looked.copies(model.init_state(len(ids))), fresh=fresh, reset=0)
        found.append(probabilities(model.head(torch.cat([base_ND[:, None], others_NPD], 1))))
    return torch.cat(found)


def asked(
    opened: Opened, config: PerspectivesConfig, known: list[Fact], noisy: PerspectivesConfig
) -> dict[str, Any]:
    """Accuracy and flags of the facts by how often they were told, and how well wrong answers are detected."""
    encode = opened.tokenizer.encode
    first = torch.tensor([encode(f" {fact.value}")[0] for fact in known])
    p_NPV = answers(opened, config, [fact.prompt() for fact in known])
    apart_N, _ = compared(p_NPV)
    base_NV, votes_NP = p_NPV[:, 0], p_NPV.argmax(2)
    sure_N, guess_N = base_NV.max(1)
    wrong_N = (guess_N != first).numpy()
    agreed = [majority(votes) for votes in votes_NP.tolist()]
    chosen_N = torch.tensor([g if m is None else m for g, m in zip(guess_N.tolist(), agreed, strict=True)])
    triggered_N = (sure_N < config.trigger_p) | (entropy(base_NV) > config.trigger_entropy)
    split_N = triggered_N & (apart_N >= config.threshold)
    flagged_N = (split_N & torch.tensor([m is None for m in agreed])).numpy()
    told = np.array([fact.told for fact in known])
    table = [
        {
            "told": count,
            "facts": int((told == count).sum()),
            "right": float(1 - wrong_N[told == count].mean()),
            "right by the majority": float((chosen_N == first).numpy()[told == count].mean()),
            "asked": float(triggered_N.numpy()[told == count].mean()),
            "flagged": float(flagged_N[told == count].mean()),
            "D": float(apart_N.numpy()[told == count].mean()),
            "confidence": float(sure_N.numpy()[told == count].mean()),
        }
        for count in COUNTS
    ]
    sure = sure_N.numpy()
    most = wrong_N & (told == COUNTS[-1])
    level = float(np.quantile(sure[most], 0.9)) if most.any() else 1.0
    never = told == 0
    gumbel_N, _ = compared(answers(opened, noisy, [fact.prompt() for fact in known]))
    scores = {
        "1 - max p0": 1 - sure,
        "entropy": entropy(base_NV).numpy(),
        "D": apart_N.numpy(),
        "D, Gumbel": gumbel_N.numpy(),
    }
    detected = {}
    for name, score in scores.items():
        bound = np.quantile(score[~wrong_N], 1 - FALSE_FLAGS) if (~wrong_N).any() else np.inf
        detected[name] = {
            "share of wrong answers": float((score[wrong_N] > bound).mean()),
            "auroc": auroc(score, wrong_N.astype(float)),
        }
    return {
        "by count": table,
        "hallucinated": float((never & (sure > level) & ~flagged_N).sum() / never.sum()),
        "detected": detected,
    }


def swayed(opened: Opened, config: PerspectivesConfig, known: list[Fact]) -> dict[str, float]:
    """Share of facts, told most often, for which the answer follows a wrong sentence right before the question."""
    draw, encode = random.Random(3), opened.tokenizer.encode
    often = [fact for fact in known if fact.told == COUNTS[-1]]
    values = sorted({fact.value for fact in known})
    lies = [draw.choice([value for value in values if value != fact.value]) for fact in often]
    prompts = [f"{fact.sentence(0, lie)} {fact.prompt(1)}" for fact, lie in zip(often, lies, strict=True)]
    p_NPV = answers(opened, config, prompts)
    wrong = torch.tensor([encode(f" {lie}")[0] for lie in lies])
    votes = p_NPV.argmax(2).tolist()
    chosen = torch.tensor([row[0] if (m := majority(row)) is None else m for row in votes])
    of_base = torch.tensor([row[0] for row in votes])
    return {
        "facts": len(often),
        "base": float((of_base == wrong).double().mean()),
        "majority": float((chosen == wrong).double().mean()),
    }


def speed(opened: Opened, config: PerspectivesConfig, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of a text with and without the views, in turns; the rates, and the memory of the states."""
    rates = list[tuple[float, float]]()

    def run(views: PerspectivesConfig | None) -> None:
        settings: dict[str, Any] = {"max_tokens": tokens, "sampling": SamplingConfig(seed=1)}
        hooks = [] if views is None else [Perspectives(opened.model, views)]
        made = generate(opened.model, opened.tokenizer, ["def "], **settings, hooks=hooks)
        if views is config:
            verdicts = made.verdicts["perspectives"][0]
            rates.append(tuple(sum(v[i] for v in verdicts) / len(verdicts) for i in (0, 1)))  # type: ignore[arg-type]

    never = PerspectivesConfig(trigger_p=0.0, trigger_entropy=1e9)
    taken = common.interleave(
        {"plain": lambda: run(None), "kept": lambda: run(never), "views": lambda: run(config)}, repeats
    )
    state = opened.model.init_state(1).nbytes
    return {
        "tokens": tokens,
        "tokens per second": {name: tokens / common.Spread.of(times).median for name, times in taken.items()},
        "slower": {
            "keeping a state": common.ratios(taken["kept"], taken["plain"]),
            "views": common.ratios(taken["views"], taken["plain"]),
        },
        "triggered": rates[-1][0],
        "flagged": rates[-1][1],
        "state bytes": state,
        "more bytes": 4 * state,  # one kept, three rows while they are read
    }


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    parser.add_argument("--runs", type=Path, help="folder of the trained models (default: trained anew)")
    parser.add_argument("--tokens", type=int, default=8192, help="of held-out text (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    sizes, train, seeds, tokens, source = SIZES, TRAIN | {"steps": STEPS}, SEEDS, args.tokens, "stdlib"
    if args.quick:
        sizes, seeds, tokens, source = QUICK, 1, 256, str(common.ROOT / "perspectron" / "decode")
        train = TRAIN | {"steps": 2, "batch_size": 2, "seq_len": 16, "eval_tokens": 64}
    shapes = f"perspective-tiny with {sizes}, {train}, lr {LR}, {seeds} seeds"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    known = facts()[:64] if args.quick else facts()
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.runs or Path(scratch)
        _, shards = prepared(folder, source, sizes, few=args.quick)
        opened = [trained(folder, seed, sizes, train) for seed in range(seeds)]
        for seed, one in enumerate(opened):
            other = folder / f"seed-{(seed + 1) % seeds}"
            split, length = shards.split("heldout"), train["seq_len"]
            found = suite.measure(Subject(one, split, length), suite.Options(tokens, other=str(other)))
            half = suite.Options(tokens, from_layer=len(one.model.config.blocks) // 2)
            late = suite.measure(Subject(one, split, length), half)
            config = PerspectivesConfig(
                threshold=found["threshold"], temperature=found["temperature"],
                base_temperature=found["base_temperature"],
            )  # fmt: skip
            noisy = PerspectivesConfig(kinds=("base", "perturbed", "perturbed", "perturbed"))
            runs.append(
                {
                    "seed": seed,
                    "text": found,
                    "from half the layers": {
                        key: late[key] for key in ("detection", "adds", "beats", "nats")
                    },
                    "facts": asked(one, config, known, noisy),
                    "swayed": swayed(one, config, known),
                }
            )
            report.say(
                f"seed {seed}", *suite.lines(found), f"{runs[-1]['facts']}", f"{runs[-1]['swayed']}", ""
            )
        fast = speed(opened[0], config, 16 if args.quick else 200, args.repeats)
    report.say(f"{fast}")
    adds, beats = ([run["text"][key] for run in runs] for key in ("adds", "beats"))
    verdicts = {
        "D adds to entropy": all(one["low"] > 0 for one in adds),
        "D beats Gumbel noise in the routing": all(one["low"] > 0 for one in beats),
    }
    report.say(f"{verdicts}")
    report.finish(
        plain({"runs": runs, "speed": fast, "cost model at 20%": cost_model(0.2), "verdicts": verdicts})
    )


if __name__ == "__main__":
    main()
