"""What does learning while reading gain, and what does it cost?

Prequential bits per byte: each token is scored before anything is learned from it. Streams are a run's held-out text
("own") and texts of other kinds, KIND=FILE, one after the other with held-out text at the end ("shift"). Arms: the
model as it is, its state reset every 1,000 tokens, adapters by each estimator, and dynamic evaluation (SGD on all
weights). Slow arms read the start of a stream alone and are compared at the tokens that they read. Then: what is left
of the held-out loss, whether facts are remembered, memory, and speed in turns.
"""

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode.reading import CHUNK, prefill
from perspectron.designs.perspective.adapt import AdaptConfig, Adapter, Learner, merge
from perspectron.designs.perspective.adapt.gradient import Piece, losses
from perspectron.model.model import LanguageModel, build
from perspectron.opening import Opened, open_model
from perspectron.train.heldout import heldout

TESTS = ("tests/designs/perspective/adapt",)
STEP = 500  # tokens between two records
SGD = 0.1  # rate of dynamic evaluation
OFTEN = 50  # tokens between two updates in the document, and of dynamic evaluation
FAST = ("none", "reset", "trace", "trace, every 50", "trace, every 128", "dynamic")
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "reset": {},
    "trace": {},
    "trace, every 50": {"every": OFTEN, "lr": 1e-4 * OFTEN},
    "trace, every 128": {"every": CHUNK, "lr": 1e-4 * CHUNK},
    "backprop, 256": {"estimator": "backprop", "window": 256},
    "backprop, 64": {"estimator": "backprop", "window": 64},
    "jvp, K = 8": {"estimator": "jvp"},
    "jvp, K = m = 64": {"estimator": "jvp", "directions": 64, "subspace": 64},
    "dynamic": {},
}


def plain(model: LanguageModel, every: int = 0) -> Callable[[list[int]], torch.Tensor]:
    """Nats of tokens, read by the model as it is; every: tokens after which its state is set back."""
    at = {"state": model.init_state(1), "last": 0, "read": 0}

    @torch.no_grad()
    def read(ids: list[int]) -> torch.Tensor:
        if every and at["read"] and at["read"] % every == 0:
            at["state"] = model.init_state(1)
        nats_BT, at["state"] = losses(model, Piece([at["last"], *ids], at["state"], fresh=at["read"] == 0))
        at["last"], at["read"] = ids[-1], at["read"] + len(ids)
        return nats_BT[0].double()

    return read


def dynamic(model: LanguageModel, every: int) -> tuple[LanguageModel, Callable[[list[int]], torch.Tensor]]:
    """Dynamic evaluation: a step of SGD on all weights after so many tokens."""
    model = copy.deepcopy(model).requires_grad_(True)
    at = {"state": model.init_state(1), "last": 0, "fresh": True}

    def read(ids: list[int]) -> torch.Tensor:
        nats = []
        for start in range(0, len(ids), every):
            part = ids[start : start + every]
            nats_BT, state = losses(model, Piece([at["last"], *part], at["state"], fresh=at["fresh"]))
            nats_BT.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= SGD * parameter.grad
                    parameter.grad = None
            at.update(state=state.detach(), last=part[-1], fresh=False)
            nats.append(nats_BT[0].detach().double())
        return torch.cat(nats)

    return model, read


def arm(name: str, model: LanguageModel, ids: list[int], counts_V: torch.Tensor) -> dict[str, Any]:
    """One arm over a stream: nats and bytes of each `STEP` tokens, and the model that it ends with."""
    after, learner = model, None
    if name == "dynamic":
        after, read = dynamic(model, OFTEN)
    elif name in ("none", "reset"):
        read = plain(model, 1000 if name == "reset" else 0)
    else:
        adapter = Adapter(model)
        learner = Learner(model, adapter, AdaptConfig(**ARMS[name]))
        read = lambda part: learner.read(part).nats  # noqa: E731
    nats, sizes, resident = [], [], []
    clock = common.time.process_time()  # other programs wait their turn outside of it
    for start in range(0, len(ids), STEP):
        part = ids[start : start + STEP]
        nats.append(float(read(part).sum()))
        sizes.append(int(counts_V[part].sum()))
        resident.append(common.machine.resident())
    seconds = common.time.process_time() - clock
    found: dict[str, Any] = {
        "arm": name, "tokens": len(ids), "nats": nats, "bytes": sizes, "cpu_seconds": seconds,
        "resident": [resident[len(resident) // 10], resident[-1]],
    }  # fmt: skip
    if learner is not None:
        found["counters"] = vars(learner.adapter.counters)
        after = merge(model, learner.adapter)
    return found | {"after": after}


def bits(found: dict[str, Any], start: int = 0, stop: int | None = None) -> float:
    """Bits per byte of a part of a stream, in tokens."""
    part = slice(start // STEP, None if stop is None else stop // STEP)
    return sum(found["nats"][part]) / math.log(2) / max(sum(found["bytes"][part]), 1)


def facts(model: LanguageModel, tokenizer: Tokenizer) -> dict[str, float]:
    """Invented constants read once, the state set back, and asked again: nats of each value and how often all of it
    is the likeliest, by the model and with what the adapter learned."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(100, 1000, (40,), generator=draw).tolist()
    lines = [f"LIMIT_{chr(65 + i % 26)}{i} = {value}\n" for i, value in enumerate(values)]
    adapter = Adapter(model)
    Learner(model, adapter).read(tokenizer.encode("".join(lines)))
    found = {}
    for name, each in (("before", model), ("after", merge(model, adapter))):
        nats, right = 0.0, 0
        for line in lines:
            ids = [0, *tokenizer.encode(line)]
            first = 1 + len(tokenizer.encode(line.split("=")[0] + "="))  # of the value
            with torch.no_grad():
                logits_TV = each(torch.tensor([ids])).logits[0, first - 1 : -1]
            said_T = torch.tensor(ids[first:])
            nats += float(torch.nn.functional.cross_entropy(logits_TV, said_T, reduction="sum"))
            right += bool((logits_TV.argmax(1) == said_T).all())
        found |= {f"nats of a value {name}": nats / len(lines), f"right {name}": right / len(lines)}
    return found


def opened(args: Any) -> tuple[LanguageModel, Tokenizer, Opened | None]:
    if not args.quick:
        one = open_model(args.run)
        return one.model, one.tokenizer, one
    tokenizer = Tokenizer.train([f"row {i} of {i * i}\n" for i in range(60)], 300)
    sizes = {"vocab_size": 300, "d_model": 96, "hidden": 32, "rank": 4, "heads": 2, "kv_heads": 1}
    return build(presets.get("perspective-tiny-dense", **sizes), 1), tokenizer, None


def streams(args: Any, tokenizer: Tokenizer, one: Opened | None) -> Iterator[tuple[str, list[int], list]]:
    """(name, ids, [(kind, first token, end)]) of each."""
    if one is None:
        yield "own", tokenizer.encode("row 7 of 49\n" * 400)[: 2 * STEP], [("own", 0, 2 * STEP)]
        return
    split = one.shards(one.folder.path).split("heldout")
    first = int(split.starts[1])  # the first document chose the rates
    yield "own", split.read(first, first + args.tokens).tolist(), [("own", 0, args.tokens)]
    kinds, ids = [(text.partition("=")[0], Path(text.partition("=")[2])) for text in args.texts], []
    each, spans = args.tokens // (len(kinds) + 1) // STEP * STEP, []
    for kind, path in kinds:
        part = tokenizer.encode(path.read_text())[: each - 1]
        spans.append((kind, len(ids), len(ids) + each))
        ids += [0, *part]
    spans.append(("own", len(ids), len(ids) + each))
    if kinds:
        yield "shift", ids + split.read(first + args.tokens, first + args.tokens + each).tolist(), spans


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    parser.add_argument("run", nargs="?", type=Path, help="a run with PDR layers")
    parser.add_argument("--texts", nargs="*", default=[], help="KIND=FILE")
    parser.add_argument("--tokens", type=int, default=100_000, help="of each stream (%(default)s)")
    parser.add_argument("--slow-tokens", type=int, default=5000, help="of slow arms (%(default)s)")
    parser.add_argument("--stream", type=int, default=0, help="tokens along which memory is measured (none)")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="all unless given")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    if args.child:
        print(json.dumps(child(json.loads(args.child))))
        return
    model, tokenizer, one = opened(args)
    counts_V = torch.tensor(tokenizer.byte_counts())
    shapes = f"{model.config.name}, {args.tokens:,} tokens a stream, {args.slow_tokens:,} of slow arms"
    report = common.Report(args, TESTS, dtype=str(model.dtype), shapes=shapes)
    results: dict[str, Any] = {"streams": {}}
    results["cost"] = cost(args, model)
    report.say("processor seconds for 512 tokens, and ratios", json.dumps(results["cost"], default=vars))
    results["facts"] = facts(model, tokenizer)
    report.say("facts, read once", json.dumps(results["facts"]))
    for name, ids, spans in streams(args, tokenizer, one):
        arms = results["streams"][name] = {}
        for which in args.arms:
            part = ids if which in FAST or args.quick else ids[: args.slow_tokens]
            found = arm(which, model, part, counts_V)
            after = found.pop("after")
            if one is not None:
                split = one.shards(one.folder.path).split("heldout")
                left = heldout(after, split, tokenizer, seq_len=256, limit_tokens=8192, spread=True)
                found["heldout"] = left.bits_per_byte
            found["bits"] = {
                kind: bits(found, start, stop) for kind, start, stop in spans if stop <= len(part)
            }
            found["start"] = bits(found, 0, min(args.slow_tokens, len(part)))
            arms[which] = found
            report.say(
                f"{name}, {which}: {len(part):,} tokens {bits(found):.4f}, at the start {found['start']:.4f}, "
                f"{len(part) / found['cpu_seconds']:.0f} tokens a second of the processor, {found['bits']}, "
                f"held-out {found.get('heldout', math.nan):.4f}, {found.get('counters', '')}"
            )
            report.keep(results)
    report.finish(results)


def cost(args: Any, model: LanguageModel) -> dict[str, Any]:
    """Learning, reading and decoding 512 tokens in turns; peak memory beyond the weights, and whether it grows along a
    stream."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (512,), generator=draw).tolist()
    learners = {
        "learning, unguarded": Learner(model, Adapter(model), AdaptConfig(guard=0)),
        "learning": Learner(model, Adapter(model)),
        "learning, every 50": Learner(model, Adapter(model), AdaptConfig(**ARMS["trace, every 50"])),
        "learning, every 128": Learner(model, Adapter(model), AdaptConfig(**ARMS["trace, every 128"])),
    }
    scored = plain(model)

    @torch.inference_mode()
    def decode() -> None:
        state = model.init_state(1)
        for id in ids[:102]:
            hidden, state, _ = model.hidden(torch.tensor([[id]]), state, consume_state=True)
            model.head(hidden)

    def scoring(every: int) -> None:
        for start in range(0, len(ids), every):
            scored(ids[start : start + every])

    calls: dict[str, Callable[[], object]] = {
        name: partial(learner.read, ids) for name, learner in learners.items()
    }
    calls |= {
        "reading": lambda: prefill(model, [ids]),
        "reading in 50s": lambda: prefill(model, [ids], chunk=OFTEN),
        "reading, scored": lambda: scoring(CHUNK),
        "reading in 50s, scored": lambda: scoring(OFTEN),
        "reading in 256s, scored": lambda: scoring(256),
        "a fifth, one by one": decode,
    }
    clock = common.time.process_time  # other programs wait their turn outside of it
    timed = {name: common.timed(call, clock=clock) for name, call in calls.items()}
    times = common.take_turns(timed, 1 if args.quick else args.repeats, 1)
    spread = {name: common.Spread.of(values) for name, values in times.items()}
    pairs = [
        *((one, other) for one in learners for other in ("reading", "reading, scored")),
        ("learning, every 50", "reading in 50s"), ("learning, every 50", "reading in 50s, scored"),
        ("learning", "reading in 256s, scored"),
    ]  # fmt: skip
    ratios = {f"speed of {one} / {other}": common.ratios(times[other], times[one]) for one, other in pairs}
    fifth = [5 * value for value in times["a fifth, one by one"]]
    ratios["speed of learning / one by one"] = common.ratios(fifth, times["learning"])
    memory = {
        name: {"not_run": "quick"}
        if args.quick
        else common.child({"memory": name, "layers": model.config.name})
        for name in ("read", "learn")
    }
    along = {"run": str(args.run), "tokens": args.stream}
    memory["stream"] = common.child(along) if args.stream and not args.quick else {"not_run": "not asked"}
    return {"seconds": spread, "ratios": ratios, "memory": memory}


def child(spec: dict[str, Any]) -> dict[str, Any]:
    """Memory of reading or of learning 2,000 tokens, or along a stream, in a process of its own."""
    if "run" in spec:
        return along(Path(spec["run"]), spec["tokens"])
    model = build(presets.get(spec["layers"]), 1)
    ids = torch.randint(1, 2000, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    calls = {
        "read": lambda part: prefill(model, [part], chunk=CHUNK),
        "learn": Learner(model, Adapter(model)).read,
    }
    call = calls[spec["memory"]]
    call(ids[:600])  # what is loaded once
    before = common.machine.resident()
    with common.Peak() as peak:
        call(ids)
    return {
        "resident_before": before,
        "peak_bytes": peak.bytes,
        "weights": sum(p.nbytes for p in model.parameters()),
    }


def along(run: Path, tokens: int) -> dict[str, Any]:
    """Bytes of the process while it learns along a stream, held-out text over and over with its state kept: after each
    hundredth, and the slope of a line through all but the first tenth, as a share of the mean over the whole stream."""
    opened = open_model(run)
    split, model = opened.shards(run).split("heldout"), opened.model
    ids = split.read(0, min(split.tokens, 100_000)).tolist()
    learner, each, resident, at = Learner(model, Adapter(model)), tokens // 100, [], 0
    clock = common.time.process_time()
    for _ in range(100):
        for start in range(0, each, STEP):
            part = [ids[(at + i) % len(ids)] for i in range(min(STEP, each - start))]
            learner.read(part)
            at += len(part)
        resident.append(common.machine.resident())
    late = np.array(resident[10:], dtype=float)
    slope = float(np.polyfit(np.arange(len(late)), late, 1)[0])
    return {
        "tokens": at, "resident": resident, "slope": slope * 100 / late.mean(),
        "cpu_seconds": common.time.process_time() - clock, "counters": vars(learner.adapter.counters),
        "state_bytes": learner.state.nbytes,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
