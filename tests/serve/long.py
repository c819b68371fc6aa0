"""What the server and the store must bear for long, each by command:

python -m tests.serve.long bodies --count 10000
python -m tests.serve.long streams --count 1000
python -m tests.serve.long kills --count 100
python -m tests.serve.long soak --minutes 60
"""

import argparse
import dataclasses
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from fastapi.testclient import TestClient

from perspectron.data import Tokenizer
from perspectron.decode.disk import INDEX
from perspectron.decode.store import PrefixStore
from perspectron.serve.web.app import create
from perspectron.util.machine import return_memory
from tests.decode.conftest import VOCAB
from tests.decode.test_rows import equal, prompt_of
from tests.decode.test_store import CHUNK, answered, small
from tests.fuzz.soak import resident
from tests.serve.conftest import served
from tests.serve.test_live import all_leave, listening_at
from tests.serve.test_routes import throw

READERS = 3
TEXTS = 40


def tokenizer() -> Tokenizer:
    texts = [f"Row {i} of {i * i}: the cat sat on the mat, and then the mat sat.\n" for i in range(80)]
    return Tokenizer.train(texts, VOCAB)


def bodies(folder: Path, count: int) -> str:
    """Bodies of any values: none fails the server."""
    with TestClient(create([served(folder, tokenizer())]), base_url="http://localhost") as client:
        said = throw(client, random.Random(count), count)
    return f"{count} bodies: 0 times 5xx; {dict(sorted(said.items()))}"


def streams(folder: Path, count: int) -> str:
    """Streams that are dropped: they leave nothing."""
    tiny = dataclasses.replace(served(folder, tokenizer()), largest=10**6)
    with listening_at(tiny) as url:
        gone = all_leave(url, tiny, -(-count // 2))  # two of the three clients of a round have a stream
    return f"{count} streams dropped, {gone} texts let go; 0 rows, 0 files and 0 tasks are left"


def reader(folder: Path, seed: int, told: Connection) -> None:
    """Answers from a store that others write too, until it is killed; what differs from the plain run is told."""
    torch.set_num_threads(1)
    model, letters, draw = small("perspective"), tokenizer(), random.Random(seed)
    store = PrefixStore(model, chunk=CHUNK, memory_bytes=0, folder=folder, disk_bytes=400_000)
    expected: dict[int, tuple] = {}
    while True:
        number, cut = draw.randrange(TEXTS), draw.randint(1, 50)
        ids = prompt_of(50, number % 8)[:cut]
        key = number % 8 * 100 + cut
        if key not in expected:
            expected[key] = answered(model, letters, ids, None, count=1)
        got = answered(model, letters, ids, store, count=1)
        equal(got[1], expected[key][1])
        told.send((int(got[0] != expected[key][0]), store.counters.tokens_saved, store.counters.damaged))


def kills(folder: Path, count: int) -> str:
    """Processes that share a store, of which one after another is killed at any moment: not a bit differs, and nothing
    is damaged."""
    context, draw, start = multiprocessing.get_context("fork"), random.Random(count), time.monotonic()
    torch.set_num_threads(1)
    answers, totals, living = (
        0,
        Counter[str](),
        list[tuple[multiprocessing.process.BaseProcess, Connection]](),
    )

    def hear(told: Connection) -> int:
        heard = 0
        last = (0, 0, 0)
        while True:
            try:
                if not told.poll():
                    break
                last = told.recv()
            except (EOFError, OSError):  # killed within a message
                break
            heard += 1
            assert last[0] == 0, "an answer differs from the plain run"
        totals["damaged"] += last[2]
        totals["saved"] += last[1]
        return heard

    for seed in range(count + READERS):
        while len(living) >= READERS:
            time.sleep(draw.uniform(0.02, 0.6))
            process, told = living.pop(draw.randrange(len(living)))
            assert process.is_alive(), "a reader ended by itself"
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            answers += hear(told)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=reader, args=(folder, seed, there), daemon=True)
        process.start()
        there.close()
        living.append((process, here))
    for process, told in living:
        process.kill()
        process.join()
        answers += hear(told)
    store = PrefixStore(small("perspective"), chunk=CHUNK, memory_bytes=0, folder=folder)
    files = {path.stem for path in folder.glob("*.state")}
    assert store._disk is not None
    rows = {key for (key,) in store._disk._index.execute("SELECT key FROM entries")}
    missing, strangers = len(rows - files), len(files - rows)
    left = [path.name for path in folder.iterdir() if path.suffix != ".state" and INDEX not in path.name]
    store.close()
    assert strangers == 0, f"{strangers} files without an entry"
    assert totals["damaged"] == 0, f"{totals['damaged']} damaged files"
    return (
        f"{count} kills of {READERS} processes on one store in {time.monotonic() - start:.0f} s: {answers} answers, 0 "
        f"differ, {totals['saved']} calls saved, 0 damaged files, {missing} entries without a file; also there: {left}"
    )


def soak(folder: Path, minutes: float) -> str:
    """Requests of all kinds: by how much memory grows in the second half. The store is soon full: until then the index
    of what is on disk grows, and what SQLite keeps of it."""
    return_memory()
    tiny = served(folder, tokenizer(), room={"memory_bytes": 1 << 20, "disk_bytes": 8 << 20})
    draw, start = random.Random(1), time.monotonic()
    points, turns = list[tuple[float, int]](), 0
    with TestClient(create([tiny]), base_url="http://localhost") as client:
        while time.monotonic() - start < 60 * minutes:
            for _ in range(50):
                ask = {"prompt": f"The cat sat on mat {draw.randrange(10**6)}", "max_tokens": 6, "n": 2}
                for stream in (False, True):
                    assert client.post("/v1/completions", json=ask | {"stream": stream}).status_code == 200
                assert client.post("/v1/states", json={"id": "a", "prompt": ask["prompt"]}).is_success
                assert client.post("/v1/states/a/fork", json={"id": "b", "token": 3}).is_success
                assert client.post(
                    "/v1/completions", json=ask | {"n": 1, "state": "b", "save": "c"}
                ).is_success
                for name in "abc":
                    assert client.delete(f"/v1/states/{name}").is_success
                turns += 1
            throw(client, draw, 20)
            points.append((time.monotonic() - start, resident()))
            print(f"{points[-1][0]:7.0f} s  {points[-1][1] / 2**20:7.1f} MiB", file=sys.stderr, flush=True)
    half = points[len(points) // 2 :]
    slope = np.polyfit(*np.array(half).T, 1)[0] if len(half) > 1 else 0.0
    share = slope * points[-1][0] / points[-1][1]
    return (
        f"{turns} turns of 8 requests in {points[-1][0]:.0f} s: memory slope {share:+.2%} over the whole time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.long", description="Long forms.")
    parser.add_argument("what", choices=["bodies", "streams", "kills", "soak"])
    parser.add_argument("--count", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = {"bodies": bodies, "streams": streams, "kills": kills}
        if args.what == "soak":
            print(soak(Path(folder), args.minutes))
        else:
            print(run[args.what](Path(folder), args.count))


if __name__ == "__main__":
    main()
