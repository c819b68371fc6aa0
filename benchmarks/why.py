"""When does a model learn to go on as a text went on before, and which part of it does?

Small models of one size are trained on the same text, and looked at between updates with random tokens that are told
twice. In the second telling everything can be known: whoever finds the place after the same token has the next one.
What is measured, by layer: of attention, the share that a head gives to that place, and to the token before; of any
mixer, how often a linear probe of its output, fitted on other texts, names the token that came next (of 64); and of the
model, how many nats the second telling is cheaper by, and its loss on text that it does not train on. A token that has
the one before it in its key is found in one step, else it takes a layer that writes it there. With --json results are
written after each arm, and a call that finds the file does only what it lacks. With --trained the models of
trainings by `perspectron scale` are looked at instead, and their losses on the same batches are told.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import presets
from perspectron.data import Shards, Tokenizer, encode, made_in, open_corpus, open_shards
from perspectron.model import cache
from perspectron.model.model import LanguageModel
from perspectron.opening import open_model
from perspectron.presets.rates import rate, warmup
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.heldout import heldout
from perspectron.train.loop import Trainer
from perspectron.train.optim import OptimConfig
from perspectron.util import plot
from perspectron.util.config import load

TESTS = ("tests/model/test_near.py",)
BOTH = "transformer[shift=k+v+network,first_values=true]"
ARMS = (
    "transformer", "transformer[shift=k]", "transformer[shift=x+network]", "transformer[shift=k+v+network]",
    "transformer[input_conv=k]", BOTH, "kda", "kda[shift=k]", "rwkv7",
    "perspective2",
)  # fmt: skip
LETTERS, LENGTH, ROWS = 64, 64, 64
RIDGE = 1e-2
MEAN = 128  # updates whose losses are told as one
READ = 1 << 15  # tokens of dev by which the loss is told
LOOKS = (0, 15, 30, 61, 122, 183, 244, 305, 366, 427, 488)


@contextmanager
def attended() -> Iterator[list[tuple[Tensor, Tensor, float | None]]]:
    """Queries, keys and scales of every layer that attends to a cache, in order."""
    found, plain = list[tuple[Tensor, Tensor, float | None]](), cache.attend

    def noted(q: Tensor, k: Tensor, *args: Any, **options: Any) -> Any:
        found.append((q.detach(), k.detach(), options.get("scale")))
        return plain(q, k, *args, **options)

    cache.attend = noted
    try:
        yield found
    finally:
        cache.attend = plain


def maps(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """Attention of each head [B,H,T,T]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def named(y_BTD: Tensor, next_BT: Tensor) -> float:
    """How often a linear probe names the next of LETTERS, fitted on half of the rows by ridge regression and asked of
    the others."""
    half = len(y_BTD) // 2
    fit, ask = (y.flatten(0, 1).double() for y in (y_BTD[:half], y_BTD[half:]))
    fit, ask = (torch.cat([y, torch.ones(len(y), 1, dtype=y.dtype)], 1) for y in (fit, ask))
    wanted = F.one_hot(next_BT[:half].flatten(), LETTERS).double()
    gram = fit.mT @ fit
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    guess = (ask @ torch.linalg.solve(gram, fit.mT @ wanted)).argmax(1)
    return float((guess == next_BT[half:].flatten()).double().mean())


@torch.no_grad()
def look(model: LanguageModel, vocab_size: int, rows: int = ROWS) -> dict[str, Any]:
    """What the model does with random tokens that are told twice. after, before: of each layer that attends, the share
    that the head which has most of it gives to the place after the same token, and to the token before; named: of each
    mixer; nats: by which the second telling is cheaper."""
    draw = torch.Generator().manual_seed(0)
    alphabet = 1 + torch.randperm(vocab_size - 1, generator=draw)[:LETTERS]
    once = torch.stack([torch.randperm(LETTERS, generator=draw)[:LENGTH] for _ in range(rows)])
    letters = torch.cat([once, once, once[:, :1]], 1)
    ids, T = alphabet[letters], 2 * LENGTH
    outputs = list[Tensor]()
    hooks = [
        mixer.register_forward_hook(lambda _, __, out: outputs.append(out[0].float()))
        for block in model.blocks
        for mixer in block.mixers
    ]
    model.eval()
    with attended() as seen:
        logits = model(ids[:, :T]).logits.float()
    for hook in hooks:
        hook.remove()
    model.train()
    nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(rows, T)
    second, t = slice(LENGTH, T - 1), torch.arange(LENGTH, T - 1)
    heads = [maps(*layer) for layer in seen]
    return {
        "after": [float(each[:, :, t, t - LENGTH + 1].mean((0, 2)).max()) for each in heads],
        "before": [float(each[:, :, t, t - 1].mean((0, 2)).max()) for each in heads],
        "named": [named(y[:, second], letters[:, LENGTH + 1 : T]) for y in outputs],
        "nats": float(nats[:, : LENGTH - 1].mean() - nats[:, second].mean()),
    }


def trained(
    arm: str, seed: int, run: Path, tokenizer: Tokenizer, shards: Shards, size: int, looks: tuple[int, ...]
) -> list[dict[str, Any]]:
    """A model of an arm between its updates: what it does, and its loss on dev in bits per byte."""
    config = presets.solve(arm, size, vocab_size=tokenizer.vocab_size, seq_len=256)
    steps = looks[-1]
    lr = rate(presets.design_of(config), size)
    train = TrainConfig(
        data=str(run.parent / "text"), measured_on="dev", steps=steps, batch_size=8, seq_len=256, seed=seed,
        dtype="float32", device="cpu", eval_every=steps, eval_tokens=1 << 15, save_every=steps, keep=1,
        optim=replace(load(OptimConfig, presets.training(arm), arm), lr=lr, warmup=warmup(steps)),
    )  # fmt: skip
    trainer, found = Trainer(run, RunConfig(config, train), tokenizer, shards), list[dict[str, Any]]()
    for step in looks:
        if step:
            trainer.fit(until=step)
        trainer.model.eval()
        read = heldout(trainer.model, shards.split("dev"), tokenizer, seq_len=256, limit_tokens=READ)
        seen = look(trainer.model, tokenizer.vocab_size)
        found.append({"step": step, "dev_bits_per_byte": read.bits_per_byte} | seen)
    return found


def looked(run: Path) -> dict[str, Any]:
    """What a model of a scaling study does, and what it is: its point in the study, design, parameters, tokens of
    training, and seed; losses: by tokens read, the mean of nats over each MEAN updates, before them."""
    opened = open_model(run)
    if opened.checkpoint is None:
        raise SystemExit(f"{run}: is an artifact, need a run")
    model, config = opened.model, opened.checkpoint.config
    about = {"design": config.model.name, "parameters": common.parameters(model)}
    about |= {"tokens": opened.checkpoint.progress.tokens, "seed": config.train.seed}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {line["step"]: (line["tokens"], line["loss"]) for line in lines if "loss" in line}
    taken = [steps[step] for step in sorted(steps)]
    parts = [taken[at : at + MEAN] for at in range(0, len(taken) - MEAN + 1, MEAN)]
    losses = [[part[-1][0], round(fmean(loss for _, loss in part), 4)] for part in parts]
    found = look(model, opened.tokenizer.vocab_size)
    return {"point": run.parents[2].name} | about | found | {"losses": losses}


def leads(runs: list[dict[str, Any]]) -> str:
    """By tokens read, how much lower the loss is with both parts than without, on the same batches: for each point of
    the study, means over seeds."""
    losses = {(x["point"], x["design"], x["seed"]): x["losses"] for x in runs}
    points = sorted({(x["tokens"], x["point"]) for x in runs if x["design"] == ARMS[0]})
    lines = []
    for number, point in enumerate(dict.fromkeys(point for _, point in points)):
        pairs = [
            list(zip(plain, losses[point, BOTH, seed], strict=False))
            for (its, arm, seed), plain in losses.items()
            if its == point and arm == ARMS[0] and (point, BOTH, seed) in losses
        ]
        if pairs:
            ahead = [[plain[1] - both[1] for plain, both in at] for at in zip(*pairs, strict=False)]
            read = [at[0][0] / 1e6 for at, *_ in zip(*pairs, strict=False)]
            means = [(tokens, fmean(each)) for tokens, each in zip(read, ahead, strict=True)]
            lines.append(
                plot.Line(
                    point.replace("-", " parameters × "),
                    means,
                    number,
                    [(min(each), max(each)) for each in ahead],
                )
            )
    if not lines:
        raise SystemExit(f"--figure: needs runs of {ARMS[0]} and {BOTH} with one seed")
    y = "training loss without both parts, less with them, nats"
    return plot.draw([plot.Chart("the lead of both parts", "millions of tokens read", y, lines, log_x=True)])


def told(arm: str, seed: int, seen: dict[str, Any]) -> str:
    text = f"{arm}, seed {seed}: named {max(seen['named']):.2f}, {seen['nats']:.2f} nats cheaper"
    return text + (f", a head gives it {max(seen['after']):.2f}" if seen["after"] else "")


def picture(arms: dict[str, list[list[dict[str, Any]]]]) -> str:
    """By updates, means over seeds: the best head, the probe's best layer, what the second telling gains, and the
    loss."""
    charts = []
    for title, y, of in (
        (
            "the place after the same token",
            "share of a head's attention",
            lambda x: max(x["after"], default=None),
        ),
        ("the next token, by a probe of a mixer", "share named", lambda x: max(x["named"])),
        ("the second telling", "nats a token cheaper", lambda x: x["nats"]),
        ("text", "bits per byte, on dev", lambda x: x["dev_bits_per_byte"] if x["step"] else None),
    ):
        lines = []
        for number, (arm, seeds) in enumerate(arms.items()):
            looks = [at for at in zip(*seeds, strict=True) if of(at[0]) is not None]
            if looks:
                values = [[of(x) for x in at] for at in looks]
                points = [
                    (float(at[0]["step"]), sum(v) / len(v)) for at, v in zip(looks, values, strict=True)
                ]
                spans = [(min(each), max(each)) for each in values]
                lines.append(plot.Line(presets.title(arm), points, number, spans))
        charts.append(plot.Chart(title, "updates", y, lines))
    return plot.draw(charts)


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=3)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="(default: %(default)s)")
    parser.add_argument("--params", type=int, default=300_000, help="(%(default)s)")
    parser.add_argument("--data", default="stdlib", help="(%(default)s)")
    parser.add_argument("--figure", type=Path, help="draw it here, too")
    parser.add_argument("--trained", nargs="+", type=Path, metavar="RUN", help="look at these runs instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    if args.trained:
        report = common.Report(args, TESTS, dtype="float32", shapes=f"{len(args.trained)} runs")
        runs = [looked(run) for run in args.trained]
        report.say(*(told(f"{x['design']}, {x['parameters']:,} parameters", x["seed"], x) for x in runs))
        if args.figure:
            args.figure.write_text(leads(runs), encoding="utf-8")
        report.finish({"runs": runs})
        return
    looks, vocabulary = LOOKS, 1024
    if args.quick:
        args.arms, args.params, args.repeats = ["transformer[shift=k]", "kda"], 60_000, 1
        looks, vocabulary = (0, 2), 300
    shapes = f"{args.params:,} parameters, {looks[-1]} updates of 2,048 tokens of {args.data}"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    arms = report.before("arms")
    with tempfile.TemporaryDirectory() as scratch:
        corpus = open_corpus(args.data, 0.05, dev=0.05)
        folder = Path(scratch) / "text"
        encode(corpus, made_in(folder, "bpe", corpus, vocabulary), folder)
        tokenizer, shards = Tokenizer.load(folder / "tokenizer.json"), open_shards(folder)
        for seed in range(args.repeats):
            for arm in args.arms:
                known = arms.setdefault(arm, [])
                if len(known) > seed:
                    continue
                run = Path(scratch) / f"{len(known)}-{args.arms.index(arm)}"
                known.append(trained(arm, seed, run, tokenizer, shards, args.params, looks))
                last = known[-1][-1] = report.stamped(known[-1][-1])
                report.say(told(arm, seed, last))
                report.keep({"arms": arms})
    if args.figure:
        args.figure.write_text(picture(arms), encoding="utf-8")
    report.finish({"arms": arms})


if __name__ == "__main__":
    main()
