"""Memory that is kept: restoring a state, the first token of a prompt read before, branches of one text, rows together.

A state is saved and loaded as `Session` does it, files in the page cache. Time to first token is `Rows` from `add` to
the first piece: cold, from the store's memory, and from its disk by a store that has just been opened.
"""

import os
import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.decode.row import Piece
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.model import appended
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState, packed, read_state
from perspectron.serve.engine import Engine, Event, Full, Job
from perspectron.util.machine import Peak

TESTS = ("tests/decode/test_store.py", "tests/decode/test_session.py")
SAMPLING = SamplingConfig(temperature=0.0)


def prompt_of(model: LanguageModel, length: int) -> list[int]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (length,), generator=draw).tolist()


def restored(model: LanguageModel, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds to load a session, and what its file has."""
    tokenizer, path = common.Letters(model.config.vocab_size), folder / "session"
    store = PrefixStore(model, memory_bytes=0)  # takes the model's fingerprint once, as a server does
    session = Session(model, tokenizer, store=store).read(prompt_of(model, 200))
    session.save(path)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        session.loaded(path)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    last = seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
    size = path.stat().st_size
    return {"p50": seconds[len(seconds) // 2], "p99": last, "repeats": repeats, "bytes": size}


class Shapes:
    """A model of which there is only the shape, which is all that a file of its state asks for."""

    def __init__(self, name: str) -> None:
        self.config = presets.get(name)
        with torch.device("meta"):
            self.model = LanguageModel(self.config)
        self.number = self.model.number

    def init_state(self, batch_size: int, **options: Any) -> LMState:
        return self.model.init_state(batch_size, **options)

    def fingerprint(self) -> str:
        return "0" * 64


def restored_state(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds to read a file of a state of this preset, without its weights: warm, and after the file was dropped from
    the page cache."""
    shapes, path, found = Shapes(name), folder / "whole", dict[str, Any]()
    appended.write(path, packed(path, shapes.init_state(1, device="cpu"), shapes, {}), path)
    size = path.stat().st_size
    for kind in ("warm", "cold"):
        seconds = []
        for _ in range(repeats):
            if kind == "cold":
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            read_state(path, shapes)
            seconds.append(time.perf_counter() - start)
        found[kind] = common.Spread.of(seconds)
    return found | {"bytes": size}


def first_token(
    model: LanguageModel, store: PrefixStore | None, ids: list[int]
) -> tuple[float, list[int | None]]:
    """Seconds to the first of four tokens, and the four."""
    rows = Rows(model, common.Letters(model.config.vocab_size), together=False, store=store)
    start = time.perf_counter()
    rows.add(ids, max_tokens=4, sampling=SAMPLING)
    while not (pieces := rows.step()):
        pass
    seconds = time.perf_counter() - start
    while rows.active:
        pieces += rows.step()
    return seconds, [piece.id for piece in pieces]


def firsts(model: LanguageModel, folder: Path, length: int, repeats: int) -> dict[str, Any]:
    """Seconds to the first token cold, from memory and from disk, and how many tokens differ."""
    ids, seconds, differ = prompt_of(model, length), dict[str, list[float]](), 0
    cold = None
    for repeat in range(repeats):
        place = folder / f"store-{length}-{repeat}"
        first = PrefixStore(model, folder=place)
        again = None
        for name in ("cold", "memory", "disk"):
            store = first
            if name == "disk":
                store = again = PrefixStore(model, folder=place)
            took, tokens = first_token(model, store, ids)
            cold = tokens if cold is None else cold
            differ += sum(one != other for one, other in zip(cold, tokens, strict=True))
            seconds.setdefault(name, []).append(took)
        first.close()
        if again is not None:
            again.close()
    return {name: common.Spread.of(times) for name, times in seconds.items()} | {"tokens_that_differ": differ}


def branches(model: LanguageModel, context: int, count: int) -> dict[str, Any]:
    """So many branches of one text, each held with a state of its own, that say two tokens."""
    session = Session(model, common.Letters(model.config.vocab_size))
    start = time.perf_counter()
    session.read(prompt_of(model, context))
    read = time.perf_counter() - start
    with Peak() as peak:
        start = time.perf_counter()
        held = [session.fork() for _ in range(count)]
        for number, branch in enumerate(held):
            branch.say(2, sampling=SamplingConfig(seed=number))
        took = time.perf_counter() - start
    return {
        "context": context, "branches": count, "read_seconds": read, "seconds": took, "peak_bytes": peak.bytes,
        "state_bytes": session.nbytes,
    }  # fmt: skip


def throughput(model: LanguageModel, rows: int, together: bool, steps: int) -> float:
    """Tokens a second of so many rows."""
    under_way = Rows(model, common.Letters(model.config.vocab_size), together=together)
    for row in range(rows):
        under_way.add(prompt_of(model, 20 + row), max_tokens=10**6, sampling=SamplingConfig(seed=row))
    while under_way.read[1] or not under_way.step():
        under_way.step()
    start, drawn = time.perf_counter(), 0
    for _ in range(steps):
        drawn += len(under_way.step())
    return drawn / (time.perf_counter() - start)


def overloaded(model: LanguageModel, rows: int, requests: int, tokens: int) -> dict[str, Any]:
    """Requests that come at twice the rate at which they are answered: seconds between the tokens of those that were
    taken, and how many were told to ask again."""
    tokenizer = common.Letters(model.config.vocab_size)
    alone = throughput(model, rows, True, 10)
    engine = Engine(model, tokenizer, rows=rows, queue=rows)
    gaps, told, done = list[float](), 0, queue.Queue[None]()

    def emit_of(last: list[float]) -> Callable[[Event], None]:
        def emit(event: Event) -> None:
            now = time.perf_counter()
            gaps.append(now - last[0])
            last[0] = now
            if not isinstance(event, Piece) or event.finished is not None:
                done.put(None)

        return emit

    taken, every = 0, tokens / alone / 2
    for number in range(requests):
        session = engine.session()
        session.append(prompt_of(model, 20))
        sampling = SamplingConfig(seed=number)
        try:
            engine.submit([Job(session, tokens, emit_of([time.perf_counter()]), sampling)])
            taken += 1
        except Full:
            told += 1
        time.sleep(every)
    for _ in range(taken):
        done.get(timeout=600)
    engine.close()
    gaps.sort()
    return {
        "rows": rows, "requests": requests, "taken": taken, "refused": told, "p50": gaps[len(gaps) // 2],
        "p99": gaps[int(0.99 * (len(gaps) - 1))], "together": engine.together,
    }  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=3)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["perspective-tiny-dense", "perspective-20m-dense", "perspective-125m-dense"],
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2000, 100_000], help="of prompts, of the first model"
    )
    parser.add_argument("--context", type=int, default=1_000_000, help="of the branches (%(default)s)")
    parser.add_argument("--branches", type=int, default=1000)
    parser.add_argument("--conversations", type=int, nargs="+", default=[1, 4, 16, 64])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    restores, steps, requests, whole = 200, 30, 60, ["perspective-1t"]
    if args.quick:
        args.models, args.lengths, args.context, args.branches = args.models[:1], [300], 400, 5
        args.conversations, args.repeats, restores, steps = [1, 4], 1, 5, 3
        requests, whole = 4, ["perspective-tiny"]
    shapes = f"{', '.join(args.models)}; prompts of {', '.join(map(str, args.lengths))} tokens"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    result: dict[str, Any] = {"restore": {}, "first_token": {}, "throughput": {}}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        models = {name: build(presets.get(name)).eval() for name in args.models}
        rows = []
        for name, model in models.items():
            got = result["restore"][name] = restored(model, Path(folder), restores)
            rows.append(
                [name, f"{got['bytes'] / 1e6:.2f}", f"{got['p50'] * 1e3:.2f}", f"{got['p99'] * 1e3:.2f}"]
            )
        report.table(["restore", "file MB", "p50 ms", "p99 ms"], rows)
        for name in whole:
            got = result["restore"][f"{name}, state alone"] = restored_state(name, Path(folder), args.repeats)
            report.say(
                f"{name}, {got['bytes'] / 1e6:.0f} MB of state: {got['warm'].text(1e3)} ms warm, "
                f"{got['cold'].text(1e3)} ms after the file left the page cache\n"
            )
        name, model = next(iter(models.items()))
        rows = []
        for length in args.lengths:
            repeats = args.repeats if length <= 10_000 else 1
            timed = result["first_token"][str(length)] = firsts(model, Path(folder), length, repeats)
            told = [timed[kind].text(1e3) for kind in ("cold", "memory", "disk")]
            rows.append([f"{length}", *told, str(timed["tokens_that_differ"])])
        report.table([f"first token, {name}", "cold ms", "memory ms", "disk ms", "tokens that differ"], rows)
        rows = []
        for count in args.conversations:
            both = {
                kind: throughput(model, count, kind == "together", steps)
                for kind in ("together", "one by one")
            }
            result["throughput"][str(count)] = both
            rows.append([f"{count}", f"{both['together']:,.0f}", f"{both['one by one']:,.0f}"])
        report.table([f"conversations, {name}", "together tokens/s", "one by one tokens/s"], rows)
        forked = result["branches"] = branches(model, args.context, args.branches)
        crowd = result["overloaded"] = overloaded(model, 4 if args.quick else 16, requests, 16)
    report.say(
        f"twice the capacity of {crowd['rows']} rows: {crowd['taken']} texts taken, {crowd['refused']} told to ask "
        f"again; {crowd['p50'] * 1e3:.1f} ms between tokens at p50, {crowd['p99'] * 1e3:.1f} at p99"
    )
    report.say(
        f"{forked['branches']} branches from one text of {forked['context']:,} tokens (read in "
        f"{forked['read_seconds']:.1f} s), two tokens each: {forked['seconds']:.1f} s; a state has "
        f"{forked['state_bytes'] / 1e3:.1f} kB; {common.peak_text(forked)} more memory at the most"
    )
    report.finish(result)


if __name__ == "__main__":
    main()
