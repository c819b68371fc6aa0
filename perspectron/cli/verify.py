"""`perspectron verify`."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import tyro

from perspectron.cli.options import Json, answer, open_model, say, table
from perspectron.cli.progress import Work
from perspectron.util.config import require

if TYPE_CHECKING:
    from rich.table import Table

    from perspectron.decode.verify import Way
    from perspectron.eval.engines import Server
    from perspectron.eval.exactness import Row

OF_A_RUN = ("cache", "here")
"""Options for a run; all others, except the run and `json`, are for a server."""
NARROWER = {"avx512": ("avx2", "scalar"), "avx2": ("scalar",)}
"""Instruction sets to try beside the one in use."""
TORCH = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "scalar": {
        "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Verify:
    """Check what a model's bits depend on, or what the answers of a server depend on.

    With RUN, the text is generated alone and in batches of 1 to 64, with the prompt split anywhere, on one thread
    and two, with other instruction sets, and with experts in memory and streamed. Prints a digest for each and which
    differ. Batches, splits and streaming must not change a bit; if they do, the exit code is 1.

    With --server, any server of OpenAI's API is asked the same in two ways, at temperature 0: repeated, with and
    without log-probabilities, streamed, after beginnings of the prompt, after other texts that begin alike, after a
    save and a restore, and among other requests. Texts, tokens and log-probabilities are compared with those of a
    prompt that is read from its first token. Where they are not equal, or a request fails, the exit code is 1; what a
    server does not offer is named and counts neither way.

    Example: perspectron verify runs/letters
    Example: perspectron verify --server http://127.0.0.1:8080
    """

    FIRST: ClassVar[tuple[str, ...]] = ("--server", "--model", "--only", "--save", "--json")
    run: tyro.conf.Positional[Path | None] = None
    """Folder of a run, of one of its checkpoints, or of an artifact."""
    server: str | None = None
    """Address of a server to ask instead, such as http://127.0.0.1:8080."""
    model: str | None = None
    """With --server: name of the model (default: the first that /v1/models lists)."""
    api_key: str | None = None
    """With --server: key to send (default: the value of PERSPECTRON_API_KEY, if it is set)."""
    save: Literal["llama.cpp", "perspectron", "none"] | None = None
    """With --server: how it saves and restores: llama.cpp's slots (start it with --slot-save-path), the states of
    `perspectron serve`, or not at all (default: by its routes)."""
    beside: str | None = None
    """With --server: address of a second server whose answers must be the same, such as one with another batch size."""
    length: int = 300
    """With --server: tokens of a prompt."""
    tokens: int = 24
    """With --server: tokens of an answer."""
    texts: int = 4
    """With --server: prompts that are asked at once."""
    rounds: int = 2
    """With --server: how often what may depend on chance is asked."""
    logprobs: int = 5
    """With --server: log-probabilities compared at each position."""
    tolerance: float = 0.0
    """With --server: difference of log-probabilities that is let pass where texts are equal."""
    only: tuple[str, ...] = ()
    """With --server: beginnings of the names of questions to ask, such as restored (default: all)."""
    seed: int | None = None
    """With --server: seed of the prompts' words (default: others each time, which no server has read before)."""
    cache: str | None = None
    """Memory for the experts of a streamed artifact, such as 512M; the result is compared with all experts in
    memory."""
    here: bool = False
    """Skip the other instruction sets, each of which needs a process."""
    json: Json = False

    def __call__(self) -> int:
        require(
            (self.run is None) != (self.server is None),
            "run",
            str(self.run),
            "given, or --server, and not both",
        )
        of_server = self.server is not None
        for field in fields(self):
            if field.name not in ("run", "server", "json") and (field.name in OF_A_RUN) == of_server:
                bound = f"left out with{'' if of_server else 'out'} --server"
                value = getattr(self, field.name)
                require(value == field.default, field.name, value, bound)
        return self._verify_run() if self.server is None else self._verify_server(self.server)

    def _verify_server(self, address: str) -> int:
        from perspectron.eval import engines, exactness

        self._check()
        key = self.api_key if self.api_key is not None else os.environ.get("PERSPECTRON_API_KEY") or None
        common: dict[str, Any] = {"model": self.model, "key": key, "likely": self.logprobs}
        keeping = self.save or engines.detected(address, **common)
        servers = [engines.Server(address, keeping=keeping, **common)]
        servers += [engines.Server(self.beside, **common)] if self.beside else []
        seed = {} if self.seed is None else {"seed": self.seed}
        plan = exactness.Plan(
            self.length, self.tokens, self.texts, self.rounds, self.tolerance, self.only, **seed
        )
        with Work(f"asking {address}") as work:
            for one in servers:
                one.meet()
            asked = exactness.Asked(servers[0], plan, beside=servers[1] if self.beside else None)
            count = len(asked.chosen())
            asked.on_row = lambda _: work.tell(len(asked.rows) + 1, count)
            rows = asked.all()
        holds = exactness.holds(rows)
        fields = {
            "server": _described(servers[0]),
            "plan": asdict(plan),
            "rows": [asdict(row) for row in rows],
        }
        answer(self.json, fields | {"holds": holds}, _table(servers[0], rows), *_differences(rows))
        if not holds:
            faults = sum(row.verdict in exactness.FAULTS for row in rows)
            say(f"{faults} of {len(rows)} questions found a difference or failed")
        return int(not holds)

    def _check(self) -> None:
        """ConfigError for what cannot be asked of a server."""
        for name, least in {"length": 32, "tokens": 4, "texts": 2, "rounds": 1, "logprobs": 0}.items():
            require(getattr(self, name) >= least, name, getattr(self, name), f"≥ {least}")
        require(self.tokens % 2 == 0, "tokens", self.tokens, "even: half of an answer is saved")
        require(self.tolerance >= 0, "tolerance", self.tolerance, "≥ 0")

    def _verify_run(self) -> int:
        from perspectron.decode import verify

        assert self.run is not None
        streamed = None if self.cache is None else open_model(self.run, self.cache)
        opened = open_model(self.run)
        with Work(f"verifying {self.run}"):
            ways = verify.ways(opened.model, opened.tokenizer)
        isa = verify.bits()["native"]
        with Work("other instruction sets"):
            for other in () if self.here else NARROWER.get(isa, ()):
                for together, digest in enumerate(_elsewhere(self.run, other)):
                    ways.append(verify.Way(bool(together), other, digest, False))
        if streamed is not None:
            for together in (False, True):
                digest = verify.digest(streamed.model, streamed.tokenizer, together=together)
                ways.append(verify.Way(together, f"experts in {self.cache}", digest, True))
        alone = {way.together: way.digest for way in reversed(ways)}  # that of the text alone comes first
        broken = [way for way in ways if way.promised and way.digest != alone[way.together]]
        fields = {"run": str(self.run), "bits": verify.bits(), "ways": [asdict(way) for way in ways]}
        lines = [line for together in (False, True) for line in _lines(ways, together)]
        answer(self.json, fields | {"holds": not broken}, *lines)
        if broken:
            said = f"{len(broken)} ways that should give the bits of the text alone do not"
            say(said)
        return int(bool(broken))


def _described(server: "Server") -> dict[str, Any]:
    """Facts about a server, for people who read the result later."""
    fresh = "cache_prompt = false" if server.fresh_by == "cache_prompt" else "first reading"
    return {
        "url": server.url,
        "model": server.model,
        "save": server.keeping,
        "slots": server.slots,
        "fresh": fresh,
    }


def _table(server: "Server", rows: "list[Row]") -> "Table":
    """A line for each question."""
    from perspectron.eval.exactness import MISSING, digits

    told = _described(server)
    slots = f", {server.slots} slots" if server.slots else ""
    title = f"{told['model']} at {server.url} (saves: {server.keeping}{slots}; read anew by: {told['fresh']})"
    head = ["question", "way", "verdict", "other texts", "logprobs apart", "not read again"]
    lines = []
    for row in rows:
        counts = (
            ["", ""] if row.verdict == MISSING else [f"{row.texts} of {row.compared}", digits(row.largest)]
        )
        if row.verdict != MISSING and row.numbers == 0:
            counts[1] = "none given"
        reused = "" if row.reused is None else f"{row.reused[0]:,} of {row.reused[1]:,}"
        lines.append([row.question, row.way, row.verdict, *counts, reused])
    return table(title, head, lines)


def _differences(rows: "list[Row]") -> list[str]:
    """The first difference of each question that has one, and why the others have no answer."""
    from perspectron.eval.exactness import digits

    lines = []
    for row in rows:
        name = f"{row.question}, {row.way}"
        if row.note:
            lines.append(f"{name}: {row.note}")
        for one in row.shown[:1]:
            where = "no token" if one["at"] is None else f"token {one['at'] + 1}"
            way = f" ({one['way']})" if one["way"] else ""
            lines.append(f"{name}{way}: {where} differs, log-probabilities by {digits(one['largest'])}")
            if one["wanted"]["text"] != one["found"]["text"]:
                lines += [f"  wanted {one['wanted']['text']!r}", f"  found  {one['found']['text']!r}"]
    return lines


def _lines(ways: "list[Way]", together: bool) -> list[str]:
    """A line for each digest, with the ways that gave it."""
    known: dict[str, list[str]] = {}
    for way in ways:
        if way.together == together:
            known.setdefault(way.digest, []).append(way.name)
    title = "all rows in one step" if together else "each row in a step of its own"
    lines = [f"{title}:"]
    for number, (digest, names) in enumerate(known.items()):
        lines.append(f"  {digest[:16]}  {'differ: ' if number else ''}{', '.join(names)}")
    return lines


def _elsewhere(run: Path, isa: str) -> list[str]:
    """The digests of the text alone, one by one and together, from a process of another instruction set."""
    with _environment(TORCH[isa]), get_context("spawn").Pool(1) as pool:
        return pool.apply(digests, (run, isa))


def digests(run: Path, isa: str) -> list[str]:
    """The digests from this process, with native kernels of this instruction set."""
    import torch

    from perspectron import native, opening
    from perspectron.decode import verify

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if native.available():
        native.set_isa(isa)
    opened = opening.open_model(run)
    return [verify.digest(opened.model, opened.tokenizer, together=way) for way in (False, True)]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """An environment with these variables set."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
