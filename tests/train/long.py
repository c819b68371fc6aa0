"""The long forms of test_parallel: `python -m tests.train.long OUT [equal|kills|speed|context]`, minutes each.

equal: 20 updates of every layout. kills: 20 kills of random ranks. speed: tokens per second and memory of 1, 2 and 4
processes with one thread each, beside one of two threads and two that share nothing. context: a window of 1 M tokens on
4 processes. Prints what it found.
"""

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from perspectron import presets
from perspectron.data import Tokenizer, encode, open_corpus
from perspectron.train.config import Layout, RunConfig, Shard, TrainConfig
from perspectron.train.loop import Trainer
from perspectron.train.parallel import ParallelTrainer
from perspectron.train.team import Team
from perspectron.util.machine import Peak, resident
from perspectron.util.ranks import together
from tests.train.conftest import write_texts
from tests.train.ranks import Cases, equal, fork, killed, wait


def encoded(out: Path) -> Path:
    """The small corpus of the tests."""
    if not (out / "data").exists():
        corpus = open_corpus(str(write_texts(out / "texts")), heldout=0.2)
        tokenizer = Tokenizer.train((document.text for document in corpus.documents("train")), 300)
        encode(corpus, tokenizer, out / "data")
        tokenizer.save(out / "data" / "tokenizer.json")
    return out / "data"


def speed(cases: Cases, preset: str = "perspective-20m-dense", steps: int = 6) -> None:
    """Tokens per second of each process, and its memory. The time is the median of some updates; those of two processes
    that share nothing, with half of the rows each, are what the machine allows."""
    torch.set_default_dtype(torch.float32)
    batch, seq_len = 8, 512
    train = TrainConfig(
        steps=steps,
        batch_size=batch,
        seq_len=seq_len,
        dtype="float32",
        device="cpu",
        eval_every=0,
        save_every=0,
    )
    config = RunConfig(presets.get(preset, vocab_size=300), train)
    half = replace(config, train=replace(train, batch_size=batch // 2))

    alone: tuple[tuple[str, int, Shard], ...] = (("1", 1, "fsdp"), ("1 of two threads", 1, "fsdp"))
    shared: tuple[tuple[str, int, Shard], ...] = (("2", 2, "fsdp"), ("2 by ddp", 2, "ddp"))
    for name, size, shard in (*alone, *shared, ("2 apart", 2, "fsdp"), ("4", 4, "fsdp")):

        def work(rank: int, name: str = name, size: int = size, shard: Shard = shard) -> None:
            torch.set_num_threads(2 if name == "1 of two threads" else 1)
            before = resident()
            if size == 1 or name == "2 apart":
                own, part = cases.folder(f"speed {name} {rank}"), config if size == 1 else half
                timed(Trainer(own, part, cases.tokenizer, cases.shards), before)
                return
            with Team() as team:
                run = f"speed {name}"
                team.of_first(lambda: cases.folder(run))
                given = (cases.folder(run), config, cases.tokenizer, cases.shards)
                timed(ParallelTrainer(team, Layout(shard), *given), before)

        def timed(trainer: Trainer, before: int, name: str = name, size: int = size) -> None:
            trainer.step()
            seconds = statistics.median(_seconds(trainer) for _ in range(steps - 1))
            each = batch * seq_len / size / seconds
            row = {"processes": name, "tokens_per_second_each": each, "MB": (resident() - before) / 1e6}
            print(row, flush=True)

        wait(fork(size, work), 900)


def _seconds(trainer: Trainer) -> float:
    start = time.perf_counter()
    trainer.step()
    return time.perf_counter() - start


def context(cases: Cases, tokens: int = 1 << 20) -> None:
    """The peak memory and time of one update, by processes that share a window of `tokens` and of half as many."""
    torch.set_default_dtype(torch.float32)
    model = presets.get("perspective2-tiny", layers=1, d_model=32, hidden=32, rank=8, heads=2, kv_heads=1, window=64,
                        vocab_size=300)  # fmt: skip

    for size, T in ((2, tokens // 2), (4, tokens)):

        def work(rank: int, size: int = size, T: int = T) -> None:
            with Team() as team:
                team.of_first(lambda: cases.folder(f"long{size}"))
                train = TrainConfig(steps=1, batch_size=1, seq_len=64, dtype="float32", device="cpu")
                given = (
                    cases.folder(f"long{size}"),
                    RunConfig(model, train),
                    cases.tokenizer,
                    cases.shards,
                )
                trainer = ParallelTrainer(team, Layout(context_parallel=size), *given)
                draw = torch.Generator().manual_seed(rank)
                ids = torch.randint(1, 300, (1, T // size + 1), generator=draw)
                start = time.perf_counter()
                with together(trainer.ranks), Peak() as peak:
                    loss = trainer.model(ids[:, :-1], targets=ids[:, 1:]).objective()
                    loss.backward()
                row = {"processes": size, "rank": rank, "tokens": T, "loss": loss.item()}
                row |= {"peak_MB": (peak.bytes or 0) / 1e6, "seconds": time.perf_counter() - start}
                print(row, flush=True)

        wait(fork(size, work), 900)


if __name__ == "__main__":
    out, which = Path(sys.argv[1]), sys.argv[2:] or ["equal", "kills", "speed", "context"]
    out.mkdir(parents=True, exist_ok=True)
    made = Cases(encoded(out), out)
    if "equal" in which:
        equal(made, 20)
        for run, apart in json.loads((out / "apart.json").read_text()).items():
            print(run, {name: f"{value:.1e}" for name, value in apart.items()})
    if "kills" in which:
        killed(made, 20)
    if "speed" in which:
        speed(made)
    if "context" in which:
        context(made)
