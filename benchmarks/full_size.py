"""Decoding the full-size model (width 4096, 80 layers, 14.9 B active parameters) from memory and from disk.

Bars: from memory at least 0.70 of the speed at which reading the touched bytes once would be all there is to do; from
disk at least 0.75 of reading those that were needed, with as many readers as are fastest there; peak memory within
the budget + 64 MiB; a state that does not grow. Reads take turns with tokens, so that both see the same machine. The
weights are random: they cost what trained ones cost. With one distinct expert in a layer every guess of the router is
right; with four many are wrong, and what is read ahead in vain counts for nothing.

The artifact takes about 1.9 GB of disk and 1.6 GB for each distinct expert of a layer: 8.4 GB with four.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import torch
import torch.utils._pytree as pytree

from perspectron import native, presets
from perspectron.data import Tokenizer, open_corpus
from perspectron.decode.reading import prefill
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.eval.timing import decode, reader
from perspectron.model.census import touched
from perspectron.model.state import LMState
from perspectron.stream.artifact import SHARED, layer_file, read_header
from perspectron.stream.engine import StreamedModel, load_artifact
from perspectron.stream.reader import Method, ShardFile
from perspectron.stream.synthetic import synthesize
from perspectron.stream.tensors import HUGE, aligned
from perspectron.util.errors import ConfigError, StorageError

TESTS = ("tests/stream/test_engine.py::test_streamed_is_resident_bit_by_bit",)
BARS = {"memory_share": 0.70, "disk_share": 0.75, "over_budget": 64 << 20}
PROMPT = "def read_lines(path):\n"
CLAIMED = "the document: 12-14 on a 4 GB GPU, 1-2 on a CPU"
PIECE, READERS = 4 << 20, (1, 2, 4)
EXPERTS = 4


def make(folder: Path, args: argparse.Namespace, report: common.Report) -> None:
    """Write an artifact of random weights; with one distinct expert in a layer where the default has no room."""
    name = "perspective-tiny" if args.quick else "perspective-1t"
    config, data = presets.get(name), str(common.ROOT / "perspectron") if args.quick else "stdlib"

    def tokenizer() -> Tokenizer:
        texts = (document.text for document in open_corpus(data, 0.05).documents("train"))
        return Tokenizer.train(texts, 400 if args.quick else config.vocab_size)

    report.say(f"writing {folder}")
    try:
        synthesize(config, folder, tokenizer, experts=args.experts or EXPERTS)
    except StorageError as error:
        if args.experts:
            raise
        report.say(f"{error}: 1 distinct expert in a layer, not {EXPERTS}")
        synthesize(config, folder, tokenizer, experts=1)


class Disk:
    """Reads the expert files as the engine does, into as much memory, but does nothing with them. amount: bytes read
    at a time, and of the memory."""

    def __init__(self, folder: Path, amount: int) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        for path in sorted((folder / "experts").iterdir()):
            size = path.stat().st_size
            fd = _open(path)
            self.pieces += [(fd, at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
        self.pool = ThreadPoolExecutor(max(READERS))
        # One piece, which stays in the processor's cache, would be filled faster.
        self.memory = aligned(-(-amount // PIECE) * PIECE)
        self.amount, self.next = amount, 0
        self.tried = {readers: max(self.read(readers) for _ in range(3)) for readers in READERS}
        self.readers = max(self.tried, key=lambda readers: self.tried[readers])

    def read(self, readers: int = 0) -> float:
        """Bytes a second over the next bytes, with so many readers, or as many as were fastest at first."""
        readers = readers or self.readers
        places = range(0, self.amount, PIECE)
        chosen = [(place, *self.pieces[(self.next + i) % len(self.pieces)]) for i, place in enumerate(places)]
        self.next += len(places)
        start = time.perf_counter()
        done = self.pool.map(self._some, (chosen[i::readers] for i in range(readers)))
        return sum(done) / (time.perf_counter() - start)

    def _some(self, pieces: list[tuple[int, int, int, int]]) -> int:
        memory = self.memory.data
        return sum(os.preadv(fd, [memory[place : place + size]], at) for place, fd, at, size in pieces)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Decode in this process, and count its memory."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    native.set_threads(spec["threads"])
    folder = Path(spec["folder"])
    warm_up()
    disk = None if spec["cache"] is None else Disk(folder, spec["sample"])  # its memory is not the model's
    with common.Peak() as peak:
        model, tokenizer = load_artifact(folder, cache_bytes=spec["cache"], method=method(folder))
        ids, counted = tokenizer.encode(PROMPT), []
        states = {n: sizes(prefill(model, [(ids * n)[:n]])[1]) for n in spec["contexts"]}
        speeds, read = [], reader(model)

        def between() -> None:
            speeds.append(read() if disk is None else disk.read())
            counted.append(model.cache.counters)

        seconds, state = decode(
            model, tokenizer.vocab_size, ids, spec["tokens"], warmup=spec["warmup"], between=between
        )
        after = model.cache.counters
    before = vars(counted[spec["warmup"]])
    counters = {name: value - before[name] for name, value in vars(after).items()}
    needed = counters["bytes_read"] - counters["bytes_wasted"]
    states[len(ids) + spec["tokens"] + spec["warmup"] + 1] = sizes(state)
    return {
        "seconds": seconds,
        "speeds": speeds[spec["warmup"] :],
        "touched": vars(touched(model, state)),
        "read": counters["bytes_read"] / spec["tokens"],
        "needed": needed / spec["tokens"],
        "readers": None if disk is None else {"tried": disk.tried, "chosen": disk.readers},
        "state_bytes": {context: found[0] for context, found in states.items()},
        "rings": sorted({slots for found in states.values() for slots in found[1]}),
        "peak_bytes": peak.bytes,
        "budget": budget(model, state.nbytes),
        "line": model.line(),
        "counters": counters,
    }


def sizes(state: LMState) -> tuple[int, set[int]]:
    """Bytes of a state, and the slots of its rings of attention."""
    leaves = pytree.tree_leaves_with_path(state)
    rings = {leaf.shape[2] for where, leaf in leaves if pytree.keystr(where).endswith(("k_BGWK", "v_BGWK"))}
    return state.nbytes, rings


def method(folder: Path) -> Method:
    """Method of reading: past the page cache, where the disk can."""
    try:
        ShardFile(next((folder / "experts").iterdir()), "direct").close()
    except ConfigError:
        return "buffered"
    return "direct"


def warm_up() -> None:
    """Run a tiny model, so that code which is loaded on first use is not counted as memory of the large one."""
    with tempfile.TemporaryDirectory() as folder:
        config = presets.get("perspective-tiny")
        synthesize(config, Path(folder) / "tiny", lambda: Tokenizer.train([PROMPT * 9], 300), experts=1)
        model, tokenizer = load_artifact(Path(folder) / "tiny")
        decode(model, tokenizer.vocab_size, tokenizer.encode(PROMPT), 2)


def budget(model: StreamedModel, state_bytes: int) -> dict[str, int]:
    """Bytes that may be in memory, by kind."""
    cache = model.cache
    assert cache is not None
    return {
        "shared": model.shared_bytes,
        "experts": cache.slots * cache.slot_bytes,
        "state": state_bytes,
    }


def told(report: common.Report, name: str, found: dict[str, Any], work: float) -> dict[str, Any]:
    """Print a run; its results. work: bytes that a token has to wait for."""
    bound = [work / speed for speed in found["speeds"]]
    share = statistics.median(bound) / statistics.median(found["seconds"])
    milliseconds = common.Spread.of([1e3 * second for second in found["seconds"]])
    speed = common.Spread.of([speed / 1e9 for speed in found["speeds"]])
    allowed = sum(found["budget"].values())
    report.say(
        found["line"],
        f"{name}: {milliseconds.text()} ms a token, {1e3 / milliseconds.median:.2f} tokens/s ({CLAIMED})",
        f"  bytes: {work:,.0f} at {speed.text()} GB/s read meanwhile: share {share:.2f} (bar {BARS[f'{name}_share']})",
        f"  memory: {common.peak_text(found)} over that of the imports; budget "
        + " + ".join(f"{part} {size:,}" for part, size in found["budget"].items())
        + f" = {allowed:,}",
        f"  state by context: {found['state_bytes']}; rings of attention have {found['rings']} slots in all of them",
        *_from_disk(found),
        "",
    )
    over = None if found["peak_bytes"] is None else found["peak_bytes"] - allowed
    return {
        "milliseconds": milliseconds,
        "tokens_per_second": 1e3 / milliseconds.median,
        "read_gigabytes_per_second": speed,
        "share": share,
        "bytes": found["touched"] | {name: found[name] for name in ("read", "needed")},
        "readers": found["readers"],
        "right_guesses": right_guesses(found),
        "rings": found["rings"],
        "state_bytes": found["state_bytes"],
        "over_budget": over,
        "budget": found["budget"],
        "counters": found["counters"],
    }


def right_guesses(found: dict[str, Any]) -> float | None:
    """Share of the experts read ahead that were used."""
    counters = found["counters"]
    return counters["useful"] / counters["prefetched"] if counters["prefetched"] else None


def _from_disk(found: dict[str, Any]) -> list[str]:
    if found["readers"] is None:
        return []
    right, wasted = right_guesses(found), found["read"] - found["needed"]
    tried = ", ".join(f"{n}: {speed / 1e9:.2f}" for n, speed in found["readers"]["tried"].items())
    return [
        f"  read {found['read']:,.0f} bytes a token, {wasted:,.0f} of them in vain; guesses that were right: "
        + ("none made" if right is None else f"{right:.0%}"),
        f"  readers of the disk alone, GB/s: {tried}; with {found['readers']['chosen']} beside the tokens",
    ]


def missed_bars(results: dict[str, Any]) -> list[str]:
    """Measures that are below their bars, and those not taken."""
    missed = []
    for name in ("memory", "disk"):
        found = results.get(name)
        if found is None:
            missed.append(f"{name}: not run")
            continue
        if found["share"] < BARS[f"{name}_share"]:
            missed.append(f"{name}_share")
        if found["over_budget"] is None:
            missed.append(f"{name}_over_budget: not measured")
        elif found["over_budget"] > BARS["over_budget"]:
            missed.append(f"{name}_over_budget")
        if len(set(found["state_bytes"].values())) > 1:
            missed.append(f"{name}_state")
    return missed


def measure(folder: Path, args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    header = read_header(folder)
    assert header.experts is not None
    shard = ShardFile(folder / layer_file(header.experts.layers[0]))
    size = shard.header.layout.bytes
    slot = -(-size // HUGE) * HUGE if size >= HUGE else size
    shard.close()
    windows = {
        block.mixer.window for block in header.model.blocks if isinstance(block.mixer, WindowGQAConfig)
    }
    # 600 tokens of the large model take minutes; the small one is read past its window.
    contexts = [2, 2 * max(windows) + 1] if args.quick else [2]
    spec = {
        "folder": str(folder),
        "threads": args.threads,
        "warmup": 2,
        "sample": 8 * size,
        "contexts": contexts,
    }
    needs = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) * 1.2
    shared = (folder / SHARED).stat().st_size
    results: dict[str, Any] = {"about": header.about}
    report.say(header.about, "")
    for name, cache, tokens in (
        ("memory", None, args.repeats),
        ("disk", args.slots * slot, args.disk_tokens),
    ):
        one = spec | {"cache": cache, "tokens": tokens}
        room = needs if cache is None else 1.2 * (shared + cache) + 5e8
        found = run(one) if args.quick else common.child(one, room)
        if "not_run" in found:
            report.say(f"{name}: not run: {found['not_run']}")
            continue
        work = sum(found["touched"].values()) if cache is None else found["needed"]
        results[name] = told(report, name, found, work)
    missed = missed_bars(results)
    report.say(f"missed: {', '.join(missed) or 'nothing'}")
    return results | {"bars": BARS, "missed": missed}


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=20)
    parser.add_argument(
        "--dir", type=Path, help="artifact to use, made there if it is not (default: a temporary one)"
    )
    parser.add_argument(
        "--experts",
        type=int,
        help=f"distinct experts of each layer ({EXPERTS}, or 1 where the disk is too small)",
    )
    parser.add_argument(
        "--slots", type=int, default=8, help="experts that the cache holds from disk (%(default)s)"
    )
    parser.add_argument("--disk-tokens", type=int, default=6, help="decoded from disk (%(default)s)")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(json.loads(args.child))))
        return
    if args.quick:
        args.repeats, args.disk_tokens, args.slots = 3, 3, 2
    name = "perspective-tiny" if args.quick else "perspective-1t"
    shapes = f"{name}, batch 1, from disk {args.slots} experts in memory"
    report = common.Report(args, TESTS, dtype="2-bit, ternary, int8, float32 state", shapes=shapes)
    common.of_artifact(args, report, make, measure)


if __name__ == "__main__":
    main()
