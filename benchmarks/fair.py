"""A server that reads a long prompt: how long others wait beside it, and how long its sign of life takes.

`perspectron serve` runs as a process of its own on an untrained model. While it reads a prompt of 200,000 tokens, and
then a state of as many, short prompts ask for their first token, `/health` is asked twenty times a second, and two
hundred requests of all kinds come at once.

python benchmarks/fair.py --json results/fair.json
"""

import contextlib
import http.client
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import common

TESTS = ("tests/serve/test_engine.py",)
SHORT, EVERY = 4, 0.05  # tokens of a short prompt; seconds between signs of life


def trained(folder: Path, design: str) -> Path:
    """A run of one update; what it says means nothing."""
    text, run = folder / "text.txt", folder / "model"
    text.write_text(
        "".join(f"Row {n} of {n * n}: the cat sat on the mat, and the mat sat.\n" for n in range(9000))
    )
    command = [
        "train",
        "--data",
        str(text),
        "--preset",
        design,
        "--steps",
        "1",
        "--batch-size",
        "1",
        "--lr",
        "1e-4",
    ]
    subprocess.run(
        [sys.executable, "-m", "perspectron", *command, "--out", str(run)], check=True, capture_output=True
    )
    return run


@contextlib.contextmanager
def serving(run: Path) -> Iterator[int]:
    """The port of a server of its own."""
    command = [sys.executable, "-m", "perspectron", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield int(next(line for line in server.stderr if "http://" in line).rsplit(":", 1)[1])
        finally:  # else it would be waited for
            server.kill()


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, float, float]:
    """(status, seconds to the first byte of the answer's body, seconds to its last)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1800)
    start = time.perf_counter()
    connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read(1)
    first = time.perf_counter() - start
    answer.read()
    connection.close()
    return answer.status, first, time.perf_counter() - start


class Health:
    """Asks for signs of life from a process of its own, and keeps the slowest of each stage."""

    def __init__(self, port: int) -> None:
        forked, self.stages = multiprocessing.get_context("fork"), list[tuple[float, str]]()
        self.told: Queue[tuple[float, float]] = forked.Queue()
        self.process = forked.Process(target=signs, args=(port, self.told, os.getpid()), daemon=True)
        self.process.start()
        self.stage("warm")

    def stage(self, name: str) -> None:
        self.stages.append((time.monotonic(), name))

    def slowest(self) -> dict[str, float]:
        """Seconds, by stage: of the sign that was asked for while it lasted."""
        found = dict[str, float]()
        while not self.told.empty():
            asked, seconds = self.told.get()
            name = next(name for start, name in reversed(self.stages) if start <= asked)
            found[name] = max(found.get(name, 0.0), seconds)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def signs(port: int, said: "Queue[tuple[float, float]]", parent: int) -> None:
    """Asked for until the process that wants them has gone."""
    while os.getppid() == parent:
        asked = time.monotonic()
        with contextlib.suppress(OSError, http.client.HTTPException):
            ask(port, "GET", "/health")
            said.put((asked, time.monotonic() - asked))
        time.sleep(EVERY)


def shorts(port: int, draw: random.Random, count: int, until: Callable[[], bool]) -> list[float]:
    """Seconds to the first token of short prompts, one after another."""
    waited = []
    while len(waited) < count and not (waited and until()):
        body = {"prompt": [draw.randrange(1, 250) for _ in range(SHORT)], "max_tokens": 2, "stream": True}
        status, first, _ = ask(port, "POST", "/v1/completions", body)
        assert status == 200
        waited.append(first)
    return waited


def mixed(port: int, draw: random.Random, count: int) -> Counter[int]:
    """Requests of all kinds, 32 at once: how many got each status."""
    ids = [draw.randrange(1, 250) for _ in range(2000)]
    kinds: list[tuple[str, str, Any]] = [
        ("POST", "/v1/completions", {"prompt": ids[:40], "max_tokens": 8}),
        ("POST", "/v1/completions", {"prompt": ids, "max_tokens": 2, "n": 2}),
        ("POST", "/v1/completions", {"prompt": "The cat", "max_tokens": 30, "stream": True}),
        ("POST", "/v1/states", {"id": "mixed", "prompt": ids[:700]}), ("GET", "/v1/states", None),
        ("POST", "/tokenize", {"content": "the cat sat on the mat " * 20_000}), ("GET", "/v1/models", None),
        ("POST", "/v1/completions", {"prompt": [-1]}), ("GET", "/metrics", None),
    ]  # fmt: skip
    with ThreadPoolExecutor(32) as pool:
        return Counter(pool.map(lambda kind: ask(port, *kind)[0], draw.choices(kinds, k=count)))


def measured(port: int, tokens: int, count: int, requests: int) -> dict[str, Any]:
    """What short prompts, and signs of life, take alone and beside each long thing."""
    draw, health = random.Random(0), Health(port)
    shorts(port, draw, 3, lambda: False)  # warm
    health.stage("idle")
    time.sleep(100 * EVERY)
    health.stage("alone")
    found: dict[str, Any] = {"short_alone": shorts(port, draw, count, lambda: False)}

    def beside(stage: str, path: str, body: Any, work: Callable[[Future[Any]], Any]) -> Any:
        health.stage(stage)
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(ask, port, "POST", path, body)
            time.sleep(4 * EVERY)
            result = work(long)
            status, _, found[f"{stage}_seconds"] = long.result()
        assert status in (200, 201, 400), status
        health.stage("between")
        return result

    def prompt() -> list[int]:
        return [draw.randrange(1, 250) for _ in range(tokens)]

    for stage, path, body in (
        ("prompt", "/v1/completions", {"prompt": prompt(), "max_tokens": 1}),
        ("state", "/v1/states", {"id": "long", "prompt": prompt()}),
    ):
        found[f"short_beside_{stage}"] = beside(
            stage, path, body, lambda long: shorts(port, draw, count, long.done)
        )
    body = {"prompt": prompt(), "max_tokens": 1}
    found["statuses"] = beside("mixed", "/v1/completions", body, lambda _: mixed(port, draw, requests))
    body = {"prompt": "The cat sat. " * (tokens * 6), "max_tokens": 1}  # 15 MB where there are 200,000
    found["short_beside_text"] = beside(
        "text", "/v1/completions", body, lambda long: shorts(port, draw, count, long.done)
    )
    slowest = health.slowest()
    health.close()
    return found | {"health": slowest}


def main() -> None:
    parser = common.parser(__doc__, threads=2, repeats=1)
    parser.add_argument("--model", default="perspective-tiny-dense", help="preset (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200_000, help="of the long prompts (%(default)s)")
    parser.add_argument(
        "--shorts", type=int, default=40, help="prompts of four tokens in each stage (%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=200, help="of all kinds at once (%(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.shorts, args.requests = 3000, 3, 12
    shapes = f"{args.model}; prompts of {args.tokens:,} and of {SHORT} tokens"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(common.ROOT)}
    with tempfile.TemporaryDirectory() as folder, serving(trained(Path(folder), args.model)) as port:
        found = measured(port, args.tokens, args.shorts, args.requests)
    rows = [["nothing asked", "", f"{found['health']['idle'] * 1e3:.0f}", ""]]
    for stage in ("alone", "beside_prompt", "beside_state", "beside_text"):
        spread = common.Spread.of(found[f"short_{stage}"])
        name = stage.removeprefix("beside_")
        rows.append([stage.replace("_", " a long "), spread.text(1e3), f"{found['health'].get(name, 0) * 1e3:.0f}",
                     f"{found.get(f'{name}_seconds', 0):.1f}"])  # fmt: skip
    rows.append(
        [
            "mixed requests",
            "",
            f"{found['health'].get('mixed', 0) * 1e3:.0f}",
            f"{found['mixed_seconds']:.1f}",
        ]
    )
    report.table(["", "first token of four, ms", "slowest /health, ms", "the long one, s"], rows)
    report.say(f"statuses of the mixed ones: {dict(found['statuses'])}")
    report.finish(found)


if __name__ == "__main__":
    main()
