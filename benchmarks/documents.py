"""What the documents say of trained models and no comparison of losses decides, on small models, three seeds each:
whether half-lives grow with depth when ADR learns them, how coherent its text is beside GPT-2's, how a DRM moves, what
PDR's gates know of syntax by depth, what states in fewer bits cost, and what the training plan's gate says.

Each model is trained where the folder of runs does not have it yet; an interrupted measurement goes on there.
"""

import contextlib
import io
import json
import math
import re
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common
import torch

from perspectron.cli.main import main as cli
from perspectron.data import Tokenizer, open_shards
from perspectron.decode.generate import generate
from perspectron.decode.reading import CHUNK
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.adr.mixer import ADR
from perspectron.eval.reading import byte_counts
from perspectron.model.model import LanguageModel
from perspectron.model.narrow import Dtype
from perspectron.model.state import load_state, save_state
from perspectron.opening import open_model
from perspectron.util.files import plain
from perspectron.util.stats import interval

TESTS = (
    "tests/designs/drm/test_geometry.py",
    "tests/designs/perspective/suites/test_depth.py",
    "tests/designs/adr/test_mixer.py",
)
SMALL = ["d_model=64", "layers=4"]
MODELS: dict[str, tuple[list[str], list[str], int]] = {  # sizes, options, updates
    "pdr": ([*SMALL, "hidden=128", "rank=16", "heads=4", "kv_heads=2", "window=64"],
            ["--preset", "perspective", "--lr", "8e-3"], 400),
    "gla": ([*SMALL, "hidden=108", "heads=4"], ["--preset", "gla", "--lr", "8e-3"], 400),
    "adr-learned": ([*SMALL, "hidden=128", "heads=4", "learned=head"], ["--preset", "adr", "--lr", "4e-3"], 300),
    "adr": ([*SMALL, "hidden=128", "heads=4"], ["--preset", "adr", "--lr", "4e-3"], 300),
    "gpt2": ([*SMALL, "hidden=224", "heads=4"], ["--preset", "gpt2", "--lr", "4e-3"], 300),
    "staged": ([*SMALL, "hidden=128", "rank=16", "heads=4", "kv_heads=2", "window=64", "torus=[4,2]"],
               ["--preset", "perspective-tiny", "--recipe", "staged", "--lr", "8e-3"], 400),
    "drm": ([], ["--preset", "drm-104k"], 500),
}  # fmt: skip
"""Rates were not searched: what is asked here is not whose loss is lower."""
CONTEXTS = (1024, 16384, 131072)
STATES: tuple[Dtype, ...] = ("full", "float16", "int8")
TEXTS, LONG = 200, 512  # continuations, and their tokens


def trained(runs: Path, name: str, seed: int, *, quick: bool) -> Path:
    """The run of a model and seed."""
    out, (sizes, options, steps) = runs / f"{name}-{seed}", MODELS[name]
    if not (out / "config.json").is_file():
        data = str(runs / ("bytes" if name == "drm" else "bpe"))
        if quick:
            steps, sizes = 9, [re.sub(r"^(d_model|hidden)=.*", r"\1=32", size) for size in sizes]
        command = ["train", *options, "--data", data, "--seed", str(seed), "--steps", str(steps)]
        length, measured = ("32", "2048") if quick else ("128", "32768")
        command += ["--batch-size", "8", "--seq-len", length, "--eval-every", "0", "--save-every", "0"]
        command += ["--eval-tokens", measured, "--dtype", "float32", *(["--set", *sizes] if sizes else [])]
        require_done([*command, "--out", str(out)])
    return out


def texts(runs: Path, data: str) -> None:
    """Both encodings of the text, made once."""
    of_bytes = ["--tokenizer", "bytes", "--vocab-size", "257"]
    for name, options in (("bpe", ["--vocab-size", "2048"]), ("bytes", of_bytes)):
        if not (runs / name / "manifest.json").is_file():
            require_done(["tokenize", data, "--out", str(runs / name), *options])


def require_done(command: list[str]) -> str:
    """What a command prints; SystemExit when it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli(command)
    if code:
        raise SystemExit(f"perspectron {' '.join(command)}: exit code {code}")
    return out.getvalue()


def asked(*command: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    found: dict[str, Any] = json.loads(require_done([*command, "--json"]))
    return found


def halflives(run: Path) -> list[list[float]]:
    """Of each layer and head, in tokens."""
    model = open_model(run).model
    found = []
    for module in model.modules():
        if isinstance(module, ADR):
            gamma = module.gamma()
            assert isinstance(gamma, torch.Tensor)
            found.append((-math.log(2) / gamma.detach().double().log()).tolist())
    return found


def slope(lives: list[list[float]]) -> float:
    """The least-squares slope of the logarithm of half-lives over layers: the factor from one to the next is its
    exponential."""
    ys = [statistics.fmean(math.log(life) for life in layer) for layer in lives]
    mean = (len(ys) - 1) / 2
    return sum((x - mean) * y for x, y in enumerate(ys)) / sum((x - mean) ** 2 for x in range(len(ys)))


def coherence(run: Path, judge: Path, *, quick: bool) -> dict[str, float]:
    """Of continuations drawn at temperature 1 (min-p 0.02): the share of 4-grams that were there before, of names in
    the second half those that the first half has, and bits per byte of an independent model."""
    opened, other = open_model(run), open_model(judge)
    count, length = (4, 64) if quick else (TEXTS, LONG)
    split, tokenizer = open_shards(judge.parent / "bpe").split("heldout"), opened.tokenizer
    starts = [
        split.read(at, at + 16).tolist() for at in range(0, split.tokens - 16, split.tokens // (count + 1))
    ]
    prompts = [[id for id in ids if id != 0] or [1] for ids in starts[:count]]
    sampling, repeated, again, nats, size = SamplingConfig(temperature=1.0, min_p=0.02), [], [], 0.0, 0
    for at in range(0, count, 25):
        made = generate(opened.model, tokenizer, prompts[at : at + 25], max_tokens=length, sampling=sampling)
        for ids in made.ids:
            grams = Counter(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
            repeated.append(1 - len(grams) / max(1, sum(grams.values())))
            first, second = (names(tokenizer, part) for part in (ids[: length // 2], ids[length // 2 :]))
            if second:
                again.append(len(second & first) / len(second))
            if len(ids) > 1:
                with torch.inference_mode():
                    logits = other.model(torch.tensor([[0, *ids]])).logits[0, :-1].double()
                nats += torch.nn.functional.cross_entropy(logits, torch.tensor(ids), reduction="sum").item()
                size += int(byte_counts(tokenizer, torch.tensor(ids)).sum())
    return {
        "repeated_4grams": statistics.fmean(repeated),
        "names_again": statistics.fmean(again) if again else math.nan,
        "bits_per_byte": nats / math.log(2) / max(1, size),
    }


def names(tokenizer: Tokenizer, ids: list[int]) -> set[str]:
    """The identifiers of four letters or more."""
    words = "".join(c if c.isidentifier() or c.isdigit() else " " for c in tokenizer.decode(ids)).split()
    return {word for word in words if len(word) >= 4 and word.isidentifier()}


@torch.inference_mode()
def states(run: Path, contexts: tuple[int, ...]) -> dict[str, Any]:
    """Nats that a token after a loaded state costs more than after the state itself, mean over the next 512."""
    opened = open_model(run)
    model, split = opened.model, open_shards(run.parent / "bpe").split("train")
    found: dict[str, Any] = {}
    state, at = model.init_state(1), 0
    for context in contexts:
        while at < context:
            count = min(CHUNK, context - at)
            _, state, _ = model.hidden(
                torch.tensor([split.read(at, at + count).tolist()]), state, consume_state=True
            )
            at += count
        ids = torch.tensor([split.read(context, context + 513).tolist()])
        losses = {}
        for dtype in STATES:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state"
                save_state(path, state, model, dtype=dtype)
                losses[dtype] = (loss(model, load_state(path, model), ids), path.stat().st_size)
        full = losses["full"][0]
        found[str(context)] = {
            name: {"more": each - full, "bytes": size} for name, (each, size) in losses.items()
        }
    return found


def loss(model: LanguageModel, state: Any, ids: torch.Tensor) -> float:
    logits = model(ids[:, :-1], state).logits[0].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))


def spread(values: list[float]) -> dict[str, Any]:
    """Values of the seeds, and the interval of their mean."""
    span = interval(values)
    return {
        "values": values,
        "mean": statistics.fmean(values),
        "low": span and span[0],
        "high": span and span[1],
    }


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{', '.join(SMALL)}; drm-104k")
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch) if args.quick else args.runs
        runs.mkdir(parents=True, exist_ok=True)
        report.finish(plain(measured(args, runs, report)))


def measured(args: Any, runs: Path, report: common.Report) -> dict[str, Any]:
    """Train what is not there, and measure."""
    texts(runs, args.data)
    run = {
        name: [trained(runs, name, seed, quick=args.quick) for seed in range(args.seeds)]
        for name in MODELS
        if name != "gla" or not args.quick  # whose size is matched for the models as they are
    }
    results: dict[str, Any] = {"seeds": args.seeds}
    lives = [halflives(path) for path in run["adr-learned"]]
    results["halflives"] = {"layers": lives, "slope": spread([slope(each) for each in lives])}
    report.say(f"half-lives: {results['halflives']['slope']}")
    results["coherence"] = {
        name: [
            coherence(one, judge, quick=args.quick) for one, judge in zip(run[name], run["pdr"], strict=True)
        ]
        for name in ("adr", "gpt2")
    }
    report.say(f"coherence: {results['coherence']}")
    tokens, steps = (2300, 40) if args.quick else (args.tokens, args.steps)
    few = ["--tokens", str(tokens), "--steps", str(steps)] + (["--points", "300"] if args.quick else [])
    results["geometry"] = [asked("drm", "geometry", str(path), *few) for path in run["drm"]]
    size = ["--tokens", "1600", "--set", "longest=256"] if args.quick else ["--tokens", "10000"]
    results["depth"] = [asked("eval", str(path), "--suite", "depth", *size) for path in run["pdr"]]
    results["states"] = states(run["pdr"][0], CONTEXTS[:1] if args.quick else CONTEXTS)
    report.say(f"states: {results['states']}")
    results["gate"] = asked(
        "perspective", "gate", *map(str, [*run["pdr"], *run.get("gla", []), *run["staged"]])
    )
    report.say(f"gate: {results['gate']}")
    return results


def arguments() -> Any:
    made = common.parser(__doc__ or "", threads=1, repeats=1)
    made.add_argument(
        "--runs", type=Path, default=Path("runs/documents"), help="folder of the models (%(default)s)"
    )
    made.add_argument("--data", default="stdlib", help="text (%(default)s)")
    made.add_argument("--seeds", type=int, default=3, help="seeds of each model (%(default)s)")
    made.add_argument("--tokens", type=int, default=20_000, help="tokens of a DRM's geometry (%(default)s)")
    made.add_argument(
        "--steps", type=int, default=2_000, help="tokens of its Lyapunov exponent (%(default)s)"
    )
    return made.parse_args()


if __name__ == "__main__":
    main()
