"""What does a request that wants to stop the server cost everyone else?

A server of its own is started and each hostile thing is sent to it, body or chat template, while /health is asked all
the time. Told are the slowest /health, what the request was answered and after how long, and by how much the server's
memory grew meanwhile at most. A server that does not answer within the limit is killed, and another is started.

python benchmarks/hostile.py --json results/hostile.json
"""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import common

TESTS = ("tests/serve/test_guard.py", "tests/data/test_template.py")
RUN = common.ROOT / "tests" / "vectors" / "run"
LIMIT = 60.0  # seconds for an answer
SIZE = 15 << 20  # bytes of a large body
JSON = "application/json"


class Case(NamedTuple):
    """A request: a body by its size, to a route, of a type. template: of the model that it is for."""

    route: str
    body: Callable[[int], bytes]
    kind: str = JSON
    template: str = ""


def completion(value: Callable[[int], bytes]) -> Case:
    """A completion with a prompt of any JSON."""
    return Case("/v1/completions", lambda size: b'{"max_tokens": 1, "prompt": ' + value(size) + b"}")


def chat(name: str) -> Case:
    """A short message to the model with a template."""
    message = {"messages": [{"role": "user", "content": "hi"}], "model": name, "max_tokens": 1}
    return Case("/v1/chat/completions", lambda _: json.dumps(message).encode(), template=name)


def repeated(unit: bytes, start: bytes = b"", end: bytes = b"") -> Callable[[int], bytes]:
    return lambda size: start + unit * (size // len(unit)) + end


def ids(count: int, value: bytes) -> Callable[[int], bytes]:
    return lambda size: b"[" + b",".join([value] * min(count, size // len(value) // 2)) + b"]"


TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a string of 3 GB": '{{ "a" * (3 * 10**9) }}',
    "a format of 3 GB": '{{ "%3000000000d" % 1 }}',
    "doubling": "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a great power": "{{ (8 + (messages | length)) ** (9 ** 9) }}",
    "endless text": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "recursion": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
}
CASES = {
    "quotes, 32 kB, as text": Case("/v1/completions", lambda _: b'"' + b'\\"' * 16_000, "text/plain"),
    "quotes, 32 kB": Case("/v1/completions", lambda _: b'"' + b'\\"' * 16_000),
    "quotes": Case("/v1/completions", repeated(b'"')),
    "escaped quotes": Case("/v1/completions", repeated(b'\\"', b'"')),
    "a string": Case("/tokenize", repeated(b"a b", b'{"content": "', b'"}')),
    "a string of escapes": Case("/tokenize", repeated(rb"\"", b'{"content": "', b'"}')),
    "a string of code points": Case("/tokenize", repeated(rb"\u00e9", b'{"content": "', b'"}')),
    "a string, ignored": Case("/tokenize", repeated(b"a", '{"content": "x", "other": "😀'.encode(), b'"}')),
    "open brackets": Case("/v1/completions", repeated(b"[")),
    "brackets": completion(repeated(b"[],", b"[", b"[]]")),
    "objects": completion(repeated(b"{},", b"[", b"{}]")),
    "names": Case("/v1/completions", repeated(b'"a":0,', b"{", b'"b":0}')),
    "integers": completion(lambda size: b"[" + b"1," * max(size // 2, 1_200_000) + b"1]"),
    "strings": completion(repeated(b'"",', b"[", b'""]')),
    "a number": completion(repeated(b"1")),
    "a million bad ids": completion(ids(1_000_000, b"-1")),
    "a million bad ids, nested": completion(lambda size: b"[[[" + ids(1_000_000, b"1")(size) + b"]]]"),
    "a million bad ids for text": Case(
        "/detokenize", lambda s: b'{"tokens": ' + ids(1_000_000, b"-1")(s) + b"}"
    ),
    "a million ids for text": Case("/detokenize", lambda s: b'{"tokens": ' + ids(1_000_000, b"65")(s) + b"}"),
    "65,000 fields": Case(
        "/v1/completions",
        lambda _: json.dumps({"prompt": "x", "max_tokens": 1} | {f"x{i}": i for i in range(65_000)}).encode(),
    ),
    "a million messages": Case(
        "/v1/chat/completions",
        repeated(b'{"role":"u","content":""},', b'{"model": "plain", "messages": [', b"{}]}"),
    ),
    "4,096 messages": Case(
        "/v1/chat/completions",
        lambda size: (
            b'{"model": "plain", "max_tokens": 1, "messages": ['
            + b",".join([b'{"role":"u","content":"%s"}' % (b"a" * (size // 4500))] * 4096)
            + b"]}"
        ),
        template="plain",
    ),
    "JSON in UTF-16": Case(
        "/v1/completions", lambda size: ("[" + "0,∀" * (size // 6) + "0]").encode("utf-16")
    ),
} | {f"template: {name}": chat(name.replace(" ", "-")) for name in TEMPLATES}


class Server:
    """`perspectron serve` of a checkout. It serves the same run under the names of templates, which are its own."""

    def __init__(self, tree: Path, folder: Path, run: Path, names: list[str]) -> None:
        for name in names:
            if not (folder / name).is_dir():
                shutil.copytree(run, folder / name)
                text = TEMPLATES.get(name.replace("-", " "), "{{ messages[0].content }}")
                (folder / name / "chat_template.jinja").write_text(text)
        runs = [str(folder / name) for name in names]
        command = [sys.executable, "-m", "perspectron", "serve", *runs, "--port", "0"]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tree)
        assert self.process.stderr is not None
        said = ""
        while "http://" not in (line := self.process.stderr.readline()):
            said += line
            if not line:
                raise SystemExit(f"the server ended: {said}")
        self.port = int(line.split()[-1].rpartition(":")[2])
        self.reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self.reader.start()  # so that it never waits for who reads what it says
        while self.ask("GET", "/health", LIMIT)[0] != 200:
            time.sleep(0.05)

    def ask(
        self, method: str, route: str, limit: float, body: bytes | None = None, kind: str = JSON
    ) -> tuple[int, str]:
        """(status, what was said); 0 where nobody answers."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit)
        try:
            client.request(method, route, body, {"Content-Type": kind} if body is not None else {})
            answer = client.getresponse()
            return answer.status, answer.read(400).decode(errors="replace")
        except OSError as error:
            return 0, type(error).__name__
        finally:
            client.close()

    def memory(self, key: str) -> int:
        """Bytes that are resident now (VmRSS), or were at most since they were last looked at (VmHWM); 0 where the
        system does not tell."""
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text().splitlines() if status.exists() else []
        if key == "VmRSS" and lines:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def watched(server: Server, every: float) -> Iterator[list[float]]:
    """Seconds of each /health that is asked meanwhile."""
    taken, stop = list[float](), threading.Event()

    def watch() -> None:
        while not stop.is_set():
            start = time.perf_counter()
            said, _ = server.ask("GET", "/health", LIMIT)
            taken.append(time.perf_counter() - start if said == 200 else LIMIT)
            stop.wait(every)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()


def measured(server: Server, case: Case, size: int) -> dict[str, Any]:
    """What came of a case."""
    body, before = case.body(size), server.memory("VmRSS")
    with watched(server, 0.01) as taken:
        time.sleep(0.1)
        start = time.perf_counter()
        status, said = server.ask("POST", case.route, LIMIT, body, case.kind)
        seconds = time.perf_counter() - start
        time.sleep(0.1)
    grown = max(0, server.memory("VmHWM") - before)
    return {
        "health": max(taken),
        "status": status,
        "seconds": seconds,
        "grown": grown,
        "bytes": len(body),
        "said": said,
    }


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=1)
    parser.add_argument("--tree", type=Path, default=common.ROOT, help="checkout to measure (this one)")
    parser.add_argument(
        "--run", type=Path, default=RUN, help="folder of the run that is served (%(default)s)"
    )
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    size = 200_000 if args.quick else SIZE
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{args.run.name}, bodies of {size:,} bytes")
    found, rows = dict[str, Any](), []
    names = ["plain", *dict.fromkeys(CASES[name].template for name in args.only)]
    names = [name for name in dict.fromkeys(names) if name]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.tree, Path(folder), args.run, names)
        for name in args.only:
            for _ in range(args.repeats):
                one = measured(server, CASES[name], size)
                if one["status"] == 0:
                    server.end()
                    server = Server(args.tree, Path(folder), args.run, names)
                if name not in found or one["health"] > found[name]["health"]:
                    found[name] = one
            one = found[name]
            answer = f"{one['status'] or 'none'}"
            rows.append(
                [name, f"{one['health']:.3f}", answer, f"{one['seconds']:.2f}", f"{one['grown'] / 2**20:.0f}"]
            )
            report.say(f"{name}: {one}") if args.json is None else None
        server.end()
    report.say("")
    report.table(["", "slowest /health, s", "status", "s", "memory, MiB"], rows)
    worst = max(found, key=lambda name: found[name]["health"])
    report.say(f"slowest /health: {found[worst]['health']:.3f} s, during {worst}")
    report.finish(found)


if __name__ == "__main__":
    main()
