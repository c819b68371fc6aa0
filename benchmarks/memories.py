"""What does a trained memory gain, number for number, and what does it cost where every row has another?

A small `perspective2` is trained on Python. Then its weights are frozen and it gets 80 updates of 1,024 tokens of
another text, each arm with other numbers to train: a first memory, vectors before the text, biases of the decays, an
offset of what is read, adapters of rank 1 and 4, all weights. What is told is bits per byte of held-out text, by how
many tokens stand before. The texts are made here: logs as JSON, orders as CSV, sums as questions, all by a generator
with a fixed seed; and prose, Python's own manual (`pydoc_data.topics`, of the Python that runs). Forms of the offset
that are not built in are arms of their own. Last, 64 rows with 64 memories: the bits of each beside those it has alone,
and the time of a step. With --json results are written after each arm, and a call that finds the file does only what
it lacks.
"""

import contextlib
import copy
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from perspectron import presets
from perspectron.cli.main import main as command
from perspectron.data import Tokenizer
from perspectron.data.loader import Batch
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.steps import stepped, steps_of
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState
from perspectron.model.tuned import Tuned, kinds_of, parts, with_parts
from perspectron.opening import load
from perspectron.train.config import TrainConfig
from perspectron.train.memory import RATES as FIT
from perspectron.train.memory import Memory, fit
from perspectron.train.optim import OptimConfig

TESTS = ("tests/decode/test_tuned.py::test_training_reads_what_decoding_reads_and_reaches_every_part",)
EDGES = (0, 64, 256, 1024, 4096)
READ = 1024  # tokens that the arm reads which trains nothing
RATES = {"vectors": 0.1, "lora": 0.03, "weights": 3e-3, "rank 1": 0.3, "scaled": 1.0}
PAGE = 60  # lines of a page of a generated text


# Texts


def logs(r: random.Random) -> str:
    services = {"auth": 40, "cart": 120, "mail": 300, "search": 80}
    time, rows = r.randrange(10**9), []
    for _ in range(PAGE):
        time += r.randint(1, 40)
        name = r.choice(list(services))
        failed = r.random() < 0.1
        row: dict[str, Any] = {"time": 1_700_000_000 + time, "level": "error" if failed else "info"}
        row |= {
            "service": name,
            "ms": round(services[name] * r.uniform(0.5, 2)),
            "status": 500 if failed else 200,
        }
        rows.append(json.dumps(row | {"user": f"u{r.randint(1, 60):03}"}))
    return "\n".join(rows) + "\n"


def orders(r: random.Random) -> str:
    goods = {"chair": 49, "desk": 180, "lamp": 25, "shelf": 75, "sofa": 640, "table": 210}
    rows = ["order,date,item,count,price,total"]
    for number in range(r.randrange(10**5), 10**9):
        name, count = r.choice(list(goods)), r.randint(1, 9)
        date = f"2026-{r.randint(1, 12):02}-{r.randint(1, 28):02}"
        rows.append(f"{number},{date},{name},{count},{goods[name]},{count * goods[name]}")
        if len(rows) > PAGE:
            return "\n".join(rows) + "\n"
    return ""


def sums(r: random.Random) -> str:
    pairs = [(r.randint(1, 99), r.randint(1, 99)) for _ in range(PAGE)]
    return "".join(f"Question: What is {a} plus {b}?\nAnswer: {a + b}.\n\n" for a, b in pairs)


def manual() -> Iterator[str]:
    from pydoc_data.topics import topics

    return iter(topics[name] for name in sorted(topics))


def generated(make: Callable[[random.Random], str]) -> Iterator[str]:
    r = random.Random(1)
    while True:
        yield make(r)


TEXTS: dict[str, Callable[[], Iterator[str]]] = {
    "JSON logs": lambda: generated(logs),
    "Python's manual": manual,
    "sums as questions": lambda: generated(sums),
    "CSV orders": lambda: generated(orders),
}


@dataclass(frozen=True)
class Text:
    """Ids of what is trained on, and windows of what is not [B,T+1]."""

    learnt: np.ndarray
    held_BS: Tensor

    @classmethod
    def of(cls, pages: Iterator[str], tokenizer: Tokenizer, rows: int, length: int, learnt: int) -> "Text":
        need, sides = (rows * (length + 1), learnt), ([], [])  # type: ignore[var-annotated]
        for number, page in enumerate(pages):
            side = 0 if number % 4 == 0 and len(sides[0]) < need[0] else 1
            sides[side].extend(tokenizer.encode(page))
            if all(len(ids) >= size for ids, size in zip(sides, need, strict=True)):
                break
        held, rest = (ids[:size] for ids, size in zip(sides, need, strict=True))
        return cls(np.array(rest), torch.tensor(held).view(rows, length + 1))

    def batches(self, seed: int, rows: int, length: int) -> Callable[[], Batch]:
        r = np.random.default_rng(seed)

        def next_batch() -> Batch:
            starts = r.integers(0, len(self.learnt) - length - 1, rows)
            ids = torch.from_numpy(np.stack([self.learnt[at : at + length + 1] for at in starts]))
            none = torch.zeros(rows, length, dtype=torch.bool)
            return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), none, rows * length)

        return next_batch


# Arms


class Arm(nn.Module):
    """Numbers to train, as `train.memory.fit` wants them. rate: their learning rate."""

    rate = 1e-3

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self._model = [model]

    @property
    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def start(self, rows: int = 1) -> LMState:
        return self._model[0].init_state(rows)

    def groups(self, lr: float) -> list[dict[str, object]]:
        return [{"params": list(self.parameters()), "share": lr}]

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        yield


class Vectors(Arm):
    """Vectors before the text."""

    rate = RATES["vectors"]

    def __init__(self, model: LanguageModel, count: int) -> None:
        super().__init__(model)
        weight = model.embedding.weight.detach()
        some = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))[:count]
        self.vectors = nn.Parameter(weight[some].clone())

    def start(self, rows: int = 1) -> LMState:
        return self._model[0].hidden(inputs_embeds=self.vectors.expand(rows, -1, -1))[1]


class Lora(Arm):
    """Adapters of all linear layers of the blocks, W + B A."""

    rate = RATES["lora"]

    def __init__(self, model: LanguageModel, rank: int) -> None:
        super().__init__(model)
        generator = torch.Generator().manual_seed(0)
        self._linears = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for linear in self._linears:
            down = torch.randn(rank, linear.in_features, generator=generator) * linear.in_features**-0.5
            self.down.append(nn.Parameter(down))
            self.up.append(nn.Parameter(torch.zeros(linear.out_features, rank)))

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        def added(down: Tensor, up: Tensor) -> Callable[..., Tensor]:
            return lambda _, given, out: out + F.linear(F.linear(given[0], down), up)

        pairs = zip(self._linears, self.down, self.up, strict=True)
        handles = [linear.register_forward_hook(added(down, up)) for linear, down, up in pairs]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Weights(Arm):
    """All weights."""

    rate = RATES["weights"]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._model[0].parameters(recurse)


class Offset(Arm):
    """Forms of the offset that the model does not have: C of rank 1 in each layer, a bᵀ; or one that a token's decays
    scale, (1 − γ) ⊙ C q."""

    def __init__(self, model: LanguageModel, form: str) -> None:
        super().__init__(model)
        self.form, self.rate = form, RATES[form]
        generator = torch.Generator().manual_seed(0)
        self.left, self.right = nn.ParameterList(), nn.ParameterList()
        for part in parts(model.init_state(1, tuned=("offset",))):
            _, D, R = part.offset.shape
            ones = torch.randn(R, generator=generator) if form == "rank 1" else torch.zeros(D, R)
            self.left.append(nn.Parameter(torch.zeros(D) if form == "rank 1" else ones))
            if form == "rank 1":
                self.right.append(nn.Parameter(ones))

    def start(self, rows: int = 1) -> LMState:
        if self.form == "rank 1":
            made = iter([a[:, None] * b for a, b in zip(self.left, self.right, strict=True)])
        else:
            made = iter(self.left)

        def filled(part: Tuned) -> Tuned:
            part = replace(part, offset=next(made).expand(rows, -1, -1))
            return part if self.form == "rank 1" else Scaled(*(getattr(part, n) for n in FIELDS))

        return with_parts(self._model[0].init_state(rows, tuned=("offset",)), filled)


FIELDS = ("mixer", "offset", "gates", "first")


class Scaled(Tuned):
    """An offset scaled by how much a token forgets."""

    def decays(self, logits: Tensor) -> Tensor:
        object.__setattr__(self, "forgets", torch.sigmoid(-logits))
        return logits

    def read(self, o: Tensor, q: Tensor, scale: float = 1.0) -> Tensor:
        forgets = self.forgets  # type: ignore[attr-defined]
        groups = len(o) // len(forgets)
        forgets = forgets.unflatten(-1, (groups, -1)).transpose(1, 2).flatten(0, 1)
        return o + forgets * (super().read(torch.zeros_like(o), q, scale))


pytree.register_dataclass(Scaled, field_names=list(FIELDS))


def tuned(*kinds: str) -> Callable[[LanguageModel], Any]:
    return lambda model: Memory(model, kinds)


ARMS: dict[str, Callable[[LanguageModel], Any]] = {
    "first memory": tuned("first"),
    "16 vectors": lambda model: Vectors(model, 16),
    "decay biases": tuned("gates"),
    "offset": tuned("offset"),
    "offset, decay biases": tuned("offset", "gates"),
    "offset, first memory": tuned("offset", "first"),
    "LoRA, rank 1": lambda model: Lora(model, 1),
    "LoRA, rank 4": lambda model: Lora(model, 4),
    "all weights": Weights,
}
FORMS: dict[str, Callable[[LanguageModel], Any]] = {
    "offset of rank 1": lambda model: Offset(model, "rank 1"),
    "offset scaled by decays": lambda model: Offset(model, "scaled"),
}


# Measuring


@torch.inference_mode()
def curve(model: LanguageModel, tokenizer: Tokenizer, held_BS: Tensor, start: LMState) -> list[float]:
    """Bits per byte of held-out windows, between EDGES."""
    counts_V = torch.from_numpy(np.asarray(tokenizer.byte_counts())).double()
    ids, targets, nats, state = held_BS[:, :-1], held_BS[:, 1:], list[Tensor](), start
    for at in range(0, ids.shape[1], 512):
        output = model(ids[:, at : at + 512].contiguous(), state, consume_state=at > 0)
        state, wanted = output.state, targets[:, at : at + 512]
        losses = F.cross_entropy(output.logits.transpose(1, 2).float(), wanted, reduction="none")
        nats.append(losses.double())
    nats_BT, bytes_BT = torch.cat(nats, 1), counts_V[targets]
    edges = [edge for edge in EDGES if edge < ids.shape[1]] + [ids.shape[1]]
    return [
        float(nats_BT[:, a:b].sum() / bytes_BT[:, a:b].sum().clamp_min(1)) / math.log(2)
        for a, b in itertools.pairwise(edges)
    ]


def measured(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: Text,
    name: str,
    seed: int,
    settings: "Settings",
    lr: float = 0.0,
) -> dict[str, Any]:
    """Numbers, and the curve, of an arm."""
    rows = len(text.held_BS)
    if name in ("nothing", f"{READ} tokens read"):
        start = model.init_state(rows)
        if name != "nothing":
            some = text.batches(100 + seed, rows, min(READ, len(text.learnt) // 2))().ids_BT
            with torch.inference_mode():
                start = model.hidden(some)[1]
        return {"numbers": 0, "curve": curve(model, tokenizer, text.held_BS, start)}
    model = copy.deepcopy(model)
    model.requires_grad_(name == "all weights")
    arm = (ARMS | FORMS)[name](model)
    rate = lr or getattr(arm, "rate", 0.0)
    if lr and isinstance(arm, Memory):  # of its first kind alone
        rate = lr * FIT["offset"] / FIT[arm.kinds[0]]
    optim = OptimConfig(lr=rate or FIT["offset"], warmup=settings.steps // 10, beta2=0.99)
    train = TrainConfig(steps=settings.steps, batch_size=settings.rows, seq_len=settings.length, optim=optim)
    with arm.hooked() if isinstance(arm, Arm) else contextlib.nullcontext():
        fit(model, arm, text.batches(seed, settings.rows, settings.length), train, lambda _: None)
        with torch.no_grad():
            start = arm.start(rows)
        return {"numbers": arm.numbers if name != "all weights" else common.parameters(model),
                "curve": curve(model, tokenizer, text.held_BS, start.detach())}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """steps, rows, length: of a training. held: windows of how many tokens are measured. base: updates of the model."""

    steps: int = 80
    rows: int = 4
    length: int = 256
    held: tuple[int, int] = (4, 4096)
    base: int = 600
    learnt: int = 120_000


def base_model(folder: Path, settings: Settings, quick: bool) -> tuple[LanguageModel, Tokenizer]:
    """A small model of Python, trained once."""
    if not (folder / "config.json").exists():
        data, sizes = "stdlib", ["vocab_size=1024"]
        if quick:
            source = folder.parent / "source.py"
            source.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(900)))
            data, sizes = str(source), ["vocab_size=300", "d_model=32", "layers=2", "hidden=32", "rank=8"]
        options = ["--dtype", "float32", "--eval-every", "0", "--save-every", "0", "--eval-tokens", "4096"]
        options += ["--seq-len", "32"] if quick else []
        code = command(
            ["train", "--data", data, "--preset", "perspective2-tiny", "--set", *sizes, "--steps", str(settings.base),
             "--out", str(folder), *options]
        )  # fmt: skip
        if code:
            raise SystemExit(f"the base was not trained: exit code {code}")
    model, tokenizer = load(folder)
    return model.requires_grad_(False).eval(), tokenizer


# 64 rows with 64 memories


def memories(model: LanguageModel, count: int) -> list[LMState]:
    found = []
    for seed in range(count):
        state = model.init_state(1, tuned=("offset",))
        for part in parts(state):
            part.offset.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
        found.append(model.begun(state))
    return found


def answers(
    model: LanguageModel, tokenizer: Tokenizer, starts: Sequence[LMState | None], which: Sequence[int], tokens: int,
    *, together: bool,
) -> list[list[Any]]:  # fmt: skip
    """What is drawn, with logprobs, by rows that each begin with their own."""
    rows, handles = Rows(model, tokenizer, together=together), []
    for i in which:
        session = Session(model, tokenizer, start=starts[i])
        session.append("def read" if i % 2 else "class A")
        sampling = SamplingConfig(temperature=1.0, seed=3)
        handles.append(session.enter(rows, max_tokens=tokens, sampling=sampling, stream=i, logprobs=2))
    pieces = []
    while rows.active:
        pieces += rows.step()
    return [[(p.id, p.logprob, p.likely) for p in pieces if p.row == handle] for handle in handles]


def batched(model: LanguageModel, tokenizer: Tokenizer, count: int, tokens: int) -> dict[str, Any]:
    """How many of these rows differ from themselves alone; every eighth has no memory."""
    starts: list[LMState | None] = [*memories(model, count)]
    starts[::8] = [None] * len(starts[::8])
    batch = answers(model, tokenizer, starts, range(count), tokens, together=True)
    alone = [answers(model, tokenizer, starts, [i], tokens, together=False)[0] for i in range(count)]
    return {"rows": count, "tokens": tokens, "differ": sum(a != b for a, b in zip(batch, alone, strict=True))}


def cost(model: LanguageModel, rows: int, repeats: int, tokens: int) -> dict[str, Any]:
    """Processor time of a step of so many rows with memories of their own and without, in turns, as a ratio."""
    ids, found = torch.ones(rows, 1, dtype=torch.int64), steps_of(model)
    with torch.inference_mode():
        states = {"with": LMState.stack(memories(model, rows)), "without": model.init_state(rows)}
        assert kinds_of(states["with"]) == ("offset",)
        taken: dict[str, list[float]] = {name: [] for name in states}
        for turn in range(repeats + 1):  # the first records them
            for name in states:
                start = time.process_time()
                for _ in range(tokens):
                    _, _, states[name] = stepped(model, found, ids, states[name])
                taken[name] += [time.process_time() - start] if turn else []
    ratio = common.ratios(taken["with"], taken["without"])
    return {"rows": rows, "ms": 1e3 * statistics.median(taken["without"]) / tokens, "ratio": ratio}


def found_before(path: str | None, shapes: str) -> dict[str, Any]:
    if path in (None, "-") or not Path(path).is_file():
        return {}
    whole = json.loads(Path(path).read_text(encoding="utf-8"))
    if whole["conditions"]["shapes"] != shapes:
        raise SystemExit(f"{path} has other settings: {whole['conditions']['shapes']}; name another file")
    return whole["results"]


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=3)
    parser.add_argument(
        "--base", type=Path, help="folder of the model of Python, trained where it is not there"
    )
    parser.add_argument("--only", nargs="+", metavar="ARM", help="these arms (default: all)")
    parser.add_argument(
        "--rates", nargs="+", type=float, help="try these rates for --only on one seed instead"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    settings, seeds, count = Settings(), args.repeats, 64
    names = ["nothing", f"{READ} tokens read", *ARMS, *FORMS]
    texts = list(TEXTS)
    if args.quick:
        settings, seeds, count, texts = Settings(2, 2, 16, (2, 96), 3, 600), 1, 3, texts[:2]
    shapes = f"{settings}; {seeds} seeds; EDGES {EDGES}"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    done = found_before(args.json, shapes)
    with tempfile.TemporaryDirectory() as scratch:
        model, tokenizer = base_model(args.base or Path(scratch) / "base", settings, args.quick)
        found = {name: Text.of(TEXTS[name](), tokenizer, *settings.held, settings.learnt) for name in texts}
        if args.rates:
            for name in args.only or names:
                for title, text in found.items():
                    for lr in args.rates:
                        curves = measured(model, tokenizer, text, name, 0, settings, lr)["curve"]
                        report.say(f"{name}, {title}, lr {lr:g}: " + " ".join(f"{x:.3f}" for x in curves))
            return
        done.setdefault("parameters", common.parameters(model))
        arms = done.setdefault("arms", {})
        todo = itertools.product(range(seeds), args.only or names, found.items())
        for seed, name, (title, text) in todo:
            known = arms.setdefault(title, {}).setdefault(name, {"numbers": 0, "curves": []})
            if seed < len(known["curves"]) or (seed and name in ("nothing", *FORMS)):
                continue
            one = measured(model, tokenizer, text, name, seed, settings)
            known["numbers"] = one["numbers"]
            known["curves"].append(one["curve"])
            report.say(f"{title}, {name}, seed {seed}: " + " ".join(f"{x:.3f}" for x in one["curve"]))
            report.keep(done)
        if not args.only:
            done.setdefault("batch", batched(model, tokenizer, count, 4 if args.quick else 32))
            tall = {"base": model}
            if not args.quick:
                tall["20 M"] = build(
                    presets.get("perspective2-tiny", d_model=512, layers=8, hidden=1408)
                ).eval()
            steps = 2 if args.quick else 64
            done.setdefault("cost", {
                name: [cost(one, rows, 9, steps) for rows in ((1, 8) if args.quick else (1, 8, 64))]
                for name, one in tall.items()
            })  # fmt: skip
    report.say("")
    for title in texts:
        report.table(*table(arms[title], title))
    for name, costs in done.get("cost", {}).items():
        for one in costs:
            report.say(
                f"a step of {one['rows']} rows, {name}: {one['ms']:.3f} ms, with memories {ratio(one)} of it"
            )
    if "batch" in done:
        whole = done["batch"]
        report.say(
            f"{whole['differ']} of {whole['rows']} rows with their own memories differ from themselves alone"
        )
    report.finish(done)


def ratio(one: dict[str, Any]) -> str:
    spread = one["ratio"]
    return spread.text() if hasattr(spread, "text") else f"{spread['median']:.4g}"


def table(arms: dict[str, Any], title: str) -> tuple[list[str], list[list[str]]]:
    """Bits per byte, by tokens before; the mean of the seeds, and least and greatest of the last column."""
    rows, edges = [], None
    for name, known in arms.items():
        columns = list(zip(*known["curves"], strict=True))
        edges = edges or [*EDGES[: len(columns)]]
        last = f" ({min(columns[-1]):.2f}–{max(columns[-1]):.2f})"
        cells = [f"{statistics.mean(column):.2f}" for column in columns]
        rows.append([name, f"{known['numbers']:,}", *cells[:-1], cells[-1] + last])
    return [title, "numbers", *(f"from {edge:,}" for edge in edges or ())], rows


if __name__ == "__main__":
    main()
