"""The final table on the clean split of `--data books`, which no training, choice or comparison had read before.

python benchmarks/clean.py transformer=RUN transformer=RUN perspective2=RUN … --json results/clean.json

Runs of one name are seeds of a design; the first name is the reference. Both scores are measured of each document.
Differences have two intervals: over seeds, paired, and over documents, of the means over seeds. The split is read
once: what exists is not written again, and the program must be that of a commit, which is recorded.
"""

import math
import multiprocessing
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from perspectron import build, presets
from perspectron.data import Split, Tokenizer
from perspectron.data.books import clean, documents, is_clean, listed
from perspectron.eval import perplexity
from perspectron.eval.reading import LEAST, span
from perspectron.opening import Folder, Opened, open_model
from perspectron.train import checkpoint
from perspectron.train.heldout import Heldout, heldout
from perspectron.util.errors import ConfigError, DataError
from perspectron.util.machine import commit
from perspectron.util.stats import paired

TESTS = ("tests/eval/test_streaming.py", "tests/data/test_books.py")
SCORES = ("windows", "streaming")


def scored(opened: Opened, texts: Sequence[str], window: int) -> dict[str, Any]:
    """Bits of each document by both scores; of a design that is not read as a stream, why."""
    found: dict[str, Any] = {score: [] for score in SCORES}
    try:
        found["state_bytes"] = perplexity.streaming_state_bytes(opened.model, window)
    except ConfigError as error:
        found |= {"state_bytes": None, "why": str(error)}
    dtype, tokenizer, model = opened.folder.dtype, opened.tokenizer, opened.model
    for text in texts:
        ((ids, _),) = tokenizer.encode_items([("", text)], "int64")
        if tokenizer.decode(ids) != text:
            raise DataError(f"clean: the tokens of {text[:40]!r} are not that text")
        split = Split("heldout", [np.asarray(ids)], np.zeros(1, np.int64), len(text.encode()))
        found["windows"].append(_bits(heldout(model, split, tokenizer, seq_len=window, dtype=dtype)))
        if found["state_bytes"] is not None:
            carried = perplexity.streaming(model, split, tokenizer, window=window, dtype=dtype)
            found["streaming"].append(_bits(carried))
    return found


def _bits(loss: Heldout) -> float:
    return loss.bits_per_byte * loss.text_bytes


def compared(runs: dict[str, list[dict[str, Any]]], sizes: Sequence[int]) -> dict[str, Any]:
    """Bits per byte of each design and seed, and how much less the reference, the first, has; above zero is worse.
    The bits of each seed and document are kept, so that other pairs are compared without another reading.
    DataError for too few documents for an interval."""
    if len(sizes) < LEAST:
        raise DataError(f"clean: documents = {len(sizes)}, must be ≥ {LEAST} for an interval")
    reference, whole, rows = next(iter(runs)), sum(sizes), dict[str, Any]()
    for name, seeds in runs.items():
        rows[name] = {key: seeds[0].get(key) for key in ("state_bytes", "why")}
        for score in SCORES:
            bits_SN, theirs_SN = (np.array([one[score] for one in runs[who]]) for who in (name, reference))
            if not bits_SN.size:
                continue
            rows[name][score] = {
                "seeds": (bits_SN.sum(1) / whole).tolist(),
                "bits": bits_SN.round(2).tolist(),
            }
            if name == reference or not theirs_SN.size:
                continue
            if len(bits_SN) == len(theirs_SN):
                pair = paired(*((x.sum(1) / whole).tolist() for x in (bits_SN, theirs_SN)))
                rows[name][score]["by_seed"] = pair and pair._asdict()
            apart_N = torch.from_numpy((bits_SN.mean(0) - theirs_SN.mean(0)) * math.log(2))
            rows[name][score]["by_document"] = span(apart_N, torch.tensor(sizes))
    return rows


def made_up() -> tuple[dict[str, list[Opened]], list[str], str]:
    """Untrained models and texts that show that it runs."""
    texts = [f"Chapter {i}. " + "It was late, and the lamp was lit. " * (40 + i) for i in range(5)]
    tokenizer = Tokenizer.train(texts, 300)
    made = defaultdict[str, list[Opened]](list)
    for name in ("transformer", "perspective2", "gpt2"):
        for seed in range(2):
            model = build(presets.small(name, vocab_size=300, d_model=32, layers=2, seq_len=16), seed=seed)
            made[name].append(Opened(Folder(Path("run"), model.config), model, tokenizer))
    return made, texts, "The sea was grey. " * 100


def asked(runs: Sequence[str]) -> tuple[list[tuple[str, Path]], int]:
    """The last steps of NAME=RUN, and the tokens of a window, which they share."""
    found, windows, seeds = list[tuple[str, Path]](), set[int](), defaultdict[str, list[int]](list)
    if len({Path(text.partition("=")[2]).resolve() for text in runs}) != len(runs):
        raise SystemExit(f"runs: {' '.join(runs)}, must differ: one that is given twice is no other seed")
    for name, _, run in (text.partition("=") for text in runs):
        train = checkpoint.load_config(Path(run)).train
        found.append((name, checkpoint.path_of(Path(run), train.steps)))
        open_model(found[-1][1])  # what cannot be read is told before the split is
        windows.add(train.seq_len)
        seeds[name].append(train.seed)
    if len({tuple(each) for each in seeds.values()}) != 1:
        raise SystemExit(
            f"seeds: {dict(seeds)}, must be the same of all names, in one order: they are paired"
        )
    if len(windows) != 1:
        raise SystemExit(f"seq_len: {sorted(windows)}, must be one and the same of all runs")
    return found, windows.pop()


def read(run: Path, texts: Sequence[str], window: int) -> dict[str, Any]:
    """`scored` of a run, in a process of its own."""
    return scored(open_model(run), texts, window)


def line(name: str, row: dict[str, Any]) -> list[str]:
    """A design's row of the table."""
    cells = [name]
    for score in SCORES:
        found = row.get(score, {"seeds": [math.nan]})
        seeds, gaps = found.get("by_seed"), found.get("by_document")
        cells.append(f"{np.mean(found['seeds']):.4f}")
        cells.append(
            f"{seeds['low']:+.4f} to {seeds['high']:+.4f}" if seeds and seeds["p"] is not None else "-"
        )
        cells.append(f"{gaps[0]:+.4f} to {gaps[1]:+.4f}" if gaps else "-")
    return [*cells, str(row["state_bytes"] or row["why"])]


def main() -> None:
    parser = common.parser(__doc__, threads=2, repeats=1)
    parser.add_argument("runs", nargs="*", help="NAME=RUN, read at its last step")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs that are read at the same time (%(default)s)"
    )
    args = parser.parse_args()
    if not args.quick:
        if args.json in (None, "-") or Path(args.json).exists():
            raise SystemExit(f"--json: {args.json}, must be a new file: the clean split is read once")
        if "changes" in commit():
            raise SystemExit(f"commit: {commit()}, must be without: a reading names the program that read")
    torch.set_num_threads(args.threads)
    shapes = f"clean split, sha256 {listed()[1].sha256}"
    runs = defaultdict[str, list[dict[str, Any]]](list)
    if args.quick:
        opened, texts, before = made_up()
        window = 16
    else:
        last, window = asked(args.runs)
        texts = [path.read_text(encoding="utf-8") for _, path in clean()]
        before = "".join(path.read_text(encoding="utf-8") for name, path in documents() if not is_clean(name))
    report = common.Report(args, TESTS, dtype="as trained", shapes=shapes)
    sizes = [len(text.encode()) for text in texts]
    if args.quick:
        for name, seeds in opened.items():
            runs[name] = [scored(one, texts, window) for one in seeds]
    else:
        own = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, own, torch.set_num_threads, (args.threads,)) as pool:
            reading = [(name, pool.submit(read, run, texts, window)) for name, run in last]
            for name, result in reading:
                runs[name].append(result.result())
    rows = compared(runs, sizes)
    packed = perplexity.compressors("".join(texts).encode(), before.encode()[-perplexity.PRIMED :])
    against = ["against the first, seeds", "documents"]
    report.table(
        ["", "windows", *against, "streaming", *against, "state"], [line(*item) for item in rows.items()]
    )
    report.table(["", "bits per byte"], [[name, f"{bits:.4f}"] for name, bits in packed.items()])
    about = {
        "window": window,
        "documents": len(texts),
        "bytes": sum(sizes),
        "sizes": sizes,
        "compressors": packed,
    }
    report.finish(about | {"designs": rows})


if __name__ == "__main__":
    main()
