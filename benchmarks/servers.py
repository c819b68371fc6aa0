"""Three servers behind nginx, of which one is killed every few seconds: does a conversation notice?

Conversations of several turns go round robin to three servers over one store, half of them as texts that grow, half as
named states, each turn asked again until it is answered whole. Meanwhile one server after another is killed (-9) and
started again. Every token and log-probability is compared with those of one server that kept all in memory, and at the
end each named state is restored. Then, with nobody killed: seconds to the first token of a text that this server has
in memory, that another one left in the store, and that nobody has read.

python benchmarks/servers.py --json results/servers.json   (needs nginx: apt-get install nginx)
"""

import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from fair import trained

TESTS = ("tests/serve/test_servers.py", "tests/decode/test_shared.py")
NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream perspectron {{ {servers} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://perspectron; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_set_header Host $host;
      proxy_buffering off; proxy_read_timeout 600s; client_max_body_size 16m;
      proxy_connect_timeout 2s; proxy_next_upstream error timeout http_503 non_idempotent;
    }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """A server of its own, that may be killed and started again."""

    def __init__(self, run: Path, store: str | None) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-m", "perspectron", "serve", str(run), "--port", str(self.port)]
        self._command += ["--deterministic", "--rows", "8", *([] if store is None else ["--store", store])]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(common.ROOT)}
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )

    def wait(self) -> None:
        """Until it answers."""
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            if self._process.poll() is not None:
                raise SystemExit(f"a server ended with code {self._process.returncode}")
            time.sleep(0.1)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def serving(run: Path, store: str | None, count: int) -> Iterator[list[Server]]:
    servers = [Server(run, store) for _ in range(count)]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()


@contextlib.contextmanager
def balanced(nginx: str, folder: Path, servers: Sequence[Server]) -> Iterator[int]:
    """The port of nginx before these servers."""
    port, lines = free_port(), " ".join(f"server 127.0.0.1:{one.port} max_fails=0;" for one in servers)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, servers=lines))
    process = subprocess.Popen(
        [nginx, "-p", str(folder), "-e", f"{folder}/nginx.log", "-c", str(folder / "nginx.conf")],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


Said = tuple[list[int], list[float]]


def ask(port: int, body: dict[str, Any]) -> tuple[Said, float] | None:
    """(ids and log-probabilities of an answer, seconds to its first token); None where it did not come whole."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    ids, logprobs, first, start = list[int](), list[float](), 0.0, time.perf_counter()
    try:
        text = json.dumps(body | {"stream": True, "logprobs": 0})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status in (409, 429, 502, 503, 504):
            return None
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {answer.read()[:400]!r}")
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return (ids, logprobs), first
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - start
                event = json.loads(line[6:])
                if "error" in event or "state_error" in event:
                    return None
                for choice in event["choices"]:
                    if choice["logprobs"]:
                        ids += choice["logprobs"]["token_ids"]
                        logprobs += choice["logprobs"]["token_logprobs"]
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return None


class Talk:
    """A conversation: what is said in each turn, and what was answered."""

    def __init__(self, number: int, turns: int, tokens: int) -> None:
        draw = random.Random(number)
        self.name, self.tokens, self.kept = f"talk-{number}", tokens, number % 2 == 0
        self.turns = [[draw.randrange(1, 250) for _ in range(draw.randrange(20, 60))] for _ in range(turns)]

    def held(self, port: int) -> tuple[list[Said], list[float], int]:
        """All answers, the seconds to the first token of each as it was answered, and how often one was asked again."""
        text, said, firsts, again = list[int](), list[Said](), list[float](), 0
        for number, turn in enumerate(self.turns):
            body: dict[str, Any] = {"max_tokens": self.tokens, "seed": number, "prompt": [*text, *turn]}
            if self.kept:
                body |= {"prompt": turn, "save": f"{self.name}.{number}"}
                body |= {"state": f"{self.name}.{number - 1}"} if number else {}
            while (got := ask(port, body)) is None:
                again += 1
                time.sleep(0.1)
            said.append(got[0])
            firsts.append(got[1])
            text += [*turn, *got[0][0]]
        return said, firsts, again


def all_held(talks: Sequence[Talk], port: int, at_once: int) -> tuple[list[list[Said]], list[float], int]:
    with ThreadPoolExecutor(at_once) as pool:
        held = list(pool.map(lambda talk: talk.held(port), talks))
    return (
        [said for said, _, _ in held],
        [s for _, firsts, _ in held for s in firsts],
        sum(n for *_, n in held),
    )


class Killer:
    """Kills one server after another, and starts it again; each is up before the next goes."""

    def __init__(self, servers: Sequence[Server], every: float) -> None:
        self.kills, self._servers, self._every, self._over = 0, servers, every, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for server in itertools.cycle(self._servers):
            if self._over.wait(self._every):
                return
            server.kill()
            self.kills += 1
            server.start()
            server.wait()

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def restored(talks: Sequence[Talk], said: Sequence[Sequence[Said]], port: int) -> int:
    """How many named states are not there, or have not all tokens that were read and answered."""
    lost = 0
    for talk, answers in zip(talks, said, strict=True):
        for number in range(len(talk.turns) if talk.kept else 0):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request(
                "POST", f"/v1/states/{talk.name}.{number}/restore", "{}", {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            about = json.loads(answer.read())
            connection.close()
            parts = zip(talk.turns[: number + 1], answers[: number + 1], strict=True)
            lost += answer.status != 200 or about["tokens"] != sum(len(t) + len(ids) for t, (ids, _) in parts)
    return lost


def costs(run: Path, store: str, length: int, repeats: int) -> dict[str, Any]:
    """Seconds to the first token of texts of so many tokens."""
    found, draw = dict[str, list[float]](), random.Random(length)
    with serving(run, store, 2) as (one, two):
        for number in range(repeats + 1):
            ids = [draw.randrange(1, 250) for _ in range(length)]
            body = {"prompt": ids, "max_tokens": 4, "seed": 1}
            state = {"state": f"cost-{length}-{number}"}
            asked: list[tuple[str, Server, dict[str, Any]]] = [
                ("nobody", one, body | {"save": state["state"]}), ("memory", one, body), ("store", two, body),
                ("state, memory", one, body | {"prompt": [7]} | state),
                ("state, store", two, body | {"prompt": [7]} | state),
            ]  # fmt: skip
            for name, server, what in asked:
                if name == "store":
                    time.sleep(1.0)  # until it is written
                got = ask(server.port, what)
                assert got is not None
                if number:  # the first is warm-up
                    found.setdefault(name, []).append(got[1])
    return {name: common.Spread.of(seconds) for name, seconds in found.items()}


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=7)
    parser.add_argument("--nginx", default=shutil.which("nginx"), help="its program (default: that of PATH)")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (%(default)s)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between kills (%(default)s)")
    parser.add_argument("--designs", nargs="+", default=["perspective-tiny-dense", "transformer-tiny"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000])
    args = parser.parse_args()
    if args.nginx is None:
        raise SystemExit("nginx is not installed: apt-get install nginx, or name its program with --nginx")
    count, at_once = 3, 8
    if args.quick:
        args.conversations, args.turns, args.tokens, args.every, args.repeats = 4, 2, 4, 0.5, 1
        args.designs, args.lengths, count = args.designs[:1], [100], 2
    shapes = f"{args.conversations} conversations of {args.turns} turns, {count} servers; {', '.join(args.designs)}"
    report = common.Report(args, TESTS, dtype="float32", shapes=shapes)
    results: dict[str, Any] = {}
    for design in args.designs:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            run, found = trained(folder, design), dict[str, Any]()
            talks = [Talk(number, args.turns, args.tokens) for number in range(args.conversations)]
            with serving(run, None, 1) as (alone,):
                expected, firsts, _ = all_held(talks, alone.port, at_once)
            found["alone"] = {"first_token": common.Spread.of(firsts)}
            for kind, store in {"folder": f"{folder}/store", "file": f"file://{folder}/objects"}.items():
                with (
                    serving(run, store, count) as servers,
                    balanced(args.nginx, folder, servers) as port,
                ):
                    start = time.perf_counter()
                    with Killer(servers, args.every) as killer:
                        said, firsts, again = all_held(talks, port, at_once)
                    took = time.perf_counter() - start
                    lost = restored(talks, said, port)
                pairs = [(a, b) for some, others in zip(said, expected, strict=True)
                         for a, b in zip(some, others, strict=True)]  # fmt: skip
                found[kind] = got = {
                    "answers": len(pairs), "tokens": sum(len(ids) for (ids, _), _ in pairs),
                    "answers_that_differ": sum(a != b for a, b in pairs), "lost": lost, "kills": killer.kills,
                    "asked_again": again, "seconds": took, "first_token": common.Spread.of(firsts),
                }  # fmt: skip
                report.say(
                    f"{design}, {kind}: {got['answers']} answers of {got['tokens']} tokens, {killer.kills} kills in "
                    f"{took:.0f} s, {again} asked again: {got['answers_that_differ']} differ, {lost} states lost\n"
                )
                found[kind]["costs"] = {
                    str(n): costs(run, f"{store}-{n}", n, args.repeats) for n in args.lengths
                }
                for length, own in found[kind]["costs"].items():
                    report.table(
                        [f"{kind}, {length} tokens", "first token, ms"],
                        [[name, spread.text(1e3)] for name, spread in own.items()],
                    )
            results[design] = found
    report.finish(results)


if __name__ == "__main__":
    main()
