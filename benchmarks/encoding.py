"""Encoding a text on one core and on all: MB/s, processor time, peak memory, and the tokenizer's speed alone.
The text is Python files of the packages installed.

python -m benchmarks.encoding --megabytes 200
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perspectron import data

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, LEARNED = 8192, 8_000_000  # tokens, and bytes of text that they are learned from
SAMPLE = 8_000_000  # bytes of text that the tokenizer encodes alone


def text(folder: Path, size: int) -> int:
    """Write so many bytes of text as files of a folder, and return how many it is."""
    written = 0
    while written < size:
        for i, document in enumerate(data.open_corpus("sources", 0.01).documents("train")):
            encoded = document.text.encode()
            (folder / f"{written:012d}-{i}.txt").write_bytes(encoded)
            written += len(encoded)
            if written >= size:
                break
    return written


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(folder: str, out: str) -> dict[str, float]:
    """Encode in this process, which does nothing else."""
    tokenizer = data.Tokenizer.load(Path(folder) / ".tokenizer.json")
    corpus, before = data.open_corpus(folder, 0.01), spent()
    began = time.perf_counter()
    shards = data.encode(corpus, tokenizer, Path(out))
    seconds = time.perf_counter() - began
    size = sum(shards.split(split).text_bytes for split in shards.splits)
    return {
        "MB": size / 1e6,
        "seconds": seconds,
        "cpu_seconds": spent() - before,
        "MB_per_s": size / 1e6 / seconds,
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def alone(folder: str) -> float:
    """MB of text for each second of a processor, by the tokenizer's library alone."""
    tokenizer = data.Tokenizer.load(Path(folder) / ".tokenizer.json")
    texts, size = [], 0
    for document in data.open_corpus(folder, 0.01).documents("train"):
        texts.append(document.text)
        size += len(document.text.encode())
        if size > SAMPLE:
            break
    began = time.process_time()
    for text in texts:
        tokenizer._inner.encode_batch_fast([text])
    return size / 1e6 / (time.process_time() - began)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--megabytes", type=float, default=200)
    options.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        folder, out = given.one
        print(json.dumps(measure(folder, out) if out else {"alone": alone(folder)}))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "text"
        folder.mkdir()
        size = text(folder, int(given.megabytes * 1e6))
        texts, learned = [], 0
        for document in data.open_corpus(str(folder), 0.01).documents("train"):
            texts.append(document.text)
            learned += len(texts[-1])
            if learned > LEARNED:
                break
        data.Tokenizer.train(texts, VOCABULARY).save(folder / ".tokenizer.json")
        print(f"{size / 1e6:.0f} MB, {data.cores()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        for name, cores in (("", "false"), ("one", "false"), ("all", "true")):
            out = str(Path(scratch) / name) if name else ""
            command = [sys.executable, "-m", "benchmarks.encoding", "--one", str(folder), out]
            environment = os.environ | {"TOKENIZERS_PARALLELISM": cores, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
            )
            print(done.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
