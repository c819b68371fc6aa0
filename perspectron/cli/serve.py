"""`perspectron serve`."""

import os
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import tyro

from perspectron.cli.options import (
    Cache,
    Draft,
    DraftTokens,
    drafts_of,
    needs,
    open_model,
    perspectives_of,
    say,
    size,
)
from perspectron.ops.experts import FEW
from perspectron.util.config import require
from perspectron.util.errors import ConfigError
from perspectron.util.lease import Leases
from perspectron.util.objects import Folder, Objects, folder_of, objects_of

if TYPE_CHECKING:
    from perspectron.opening import Opened
    from perspectron.serve.served import Served

NEEDED = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")
KEY = "PERSPECTRON_API_KEY"
KEEP_ALIVE = 75  # seconds that an idle connection stays: longer than clients keep one, so that they close it
DRAIN = 60  # seconds for texts under way when the server is stopped

SWITCH = 5e-4
"""Seconds after which a thread that computes lets another go on. The event loop may wait so long at each of its turns:
with Python's 5e-3 signs of life took 0.57 s beside 200 mixed requests, now 0.13 to 0.38."""


@dataclass(frozen=True)
class Serve:
    """Serve models over HTTP: an OpenAI-compatible API, saved states, and a page to try them on.

    Example: perspectron serve runs/quickstart/perspective

    Then open http://127.0.0.1:8000, or point any OpenAI client at http://127.0.0.1:8000/v1.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--host", "--port", "--api-key", "--template", "--store", "--rows", "--max-tokens",
    )  # fmt: skip
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, of their checkpoints, or of artifacts; each is served under the name of its folder."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines can reach requires a key."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must send (default: the value of PERSPECTRON_API_KEY, if it is set)."""
    template: str | None = None
    """Chat template for /v1/chat/completions: "plain", or a file with one in Jinja (default: that of the run, if it was
    trained with one)."""
    store: str | None = None
    """Where states, slots and shared prompt prefixes are kept, so that they outlive the server and other servers go on
    with them: a folder, for servers of one machine, or a URL such as s3://bucket/folder, or file:///mnt/folder of a
    disk that several machines mount (default: nothing is kept)."""
    rows: int = 16
    """Maximum number of texts processed at once."""
    queue: int = 64
    """Maximum number of texts waiting; further requests are asked to retry."""
    max_tokens: int = 4096
    """Maximum number of tokens that one request may generate."""
    max_prompt: int = 1 << 20
    """Maximum number of tokens that one prompt may have."""
    memory: str = "256M"
    """Memory for shared prompt prefixes, for each model."""
    disk: str = "4G"
    """With --store: space for shared prompt prefixes."""
    deterministic: bool = False
    """Compute every text separately (default: only if that costs at most a tenth more than one batch). Either way the
    other texts change no bit, which `perspectron verify` checks on this machine."""
    perspectives: bool = False
    """Ask several views of the experts where a model is unsure; each choice of an answer then carries their verdict on
    each token. Prompt prefixes are not shared."""
    calibration: Path | None = None
    """File that `perspective views` wrote for the model (default: fixed thresholds)."""
    draft: Draft = None
    draft_tokens: DraftTokens = None
    cache: Cache = None

    def __call__(self) -> int:
        self._check()
        import uvicorn
        from sse_starlette.sse import AppStatus

        from perspectron.opening import describe
        from perspectron.serve.web.app import create

        AppStatus.disable_automatic_graceful_drain()  # requests under way when the server stops are finished
        with ExitStack() as stack:
            listening = stack.enter_context(self._listen())
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perspectron-")))
            folder = own if self.store is None else folder_of(self.store)
            objects = None
            if folder is None:
                objects = objects_of(str(self.store))
                objects.check()
            # Open all first: an artifact may change the number of threads, which the keys of stores depend on.
            streamed = {run for run in self.runs if describe(run).experts is not None}
            bound = "left out without a model that has experts on disk"
            require(self.cache is None or bool(streamed), "cache", self.cache, bound)
            opened = [open_model(run, self.cache if run in streamed else None) for run in self.runs]
            served = [
                self._served(*each, folder or own, objects) for each in zip(self.runs, opened, strict=True)
            ]
            app = create(served, key=self._key())
            for one in served:
                way = "all rows in one step" if one.engine.together else "each row in a step of its own"
                cost = one.engine.cost
                say(f"{one.name}: {way}" + (f" (one by one takes {cost:.2f} times as long)" if cost else ""))
            config = uvicorn.Config(
                app, log_level="warning", access_log=False, server_header=False, timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=DRAIN,
            )  # fmt: skip
            shown = f"[{self.host}]" if ":" in self.host else self.host
            say(f"http://{shown}:{listening.getsockname()[1]}")
            signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn drains, and then raises it again
            sys.setswitchinterval(SWITCH)
            uvicorn.Server(config).run(sockets=[listening])
        return 0

    def _check(self) -> None:
        """ConfigError for what cannot be served, before anything is loaded."""
        for name in NEEDED:
            needs(name, "serve")
        from perspectron.serve.web.guard import is_local

        require(len(self.runs) >= 1, "runs", "none", "at least one folder")
        names = [run.resolve().name for run in self.runs]
        require(len(set(names)) == len(names), "runs", ", ".join(names), "folders of different names")
        one = self.calibration is None or len(self.runs) == 1
        require(one, "calibration", str(self.calibration), "left out with several models: it is of one")
        for name in ("memory", "disk") if self.perspectives else ():
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            require(
                value == default, name, value, "left out with --perspectives, which share no prompt prefixes"
            )
        kept = self.store is not None or self.disk == type(self).__dataclass_fields__["disk"].default
        require(kept, "disk", self.disk, "left out without --store, which says where")
        require(self.store != "", "store", "''", "a folder or a URL")
        require(0 <= self.port < 65536, "port", self.port, "≥ 0 and < 65536")
        require(
            self.rows <= FEW, "rows", self.rows, f"≤ {FEW}, beyond which other rows change a row's last bits"
        )
        for name, least in {"max_tokens": 1, "max_prompt": 1, "rows": 1, "queue": 0}.items():
            require(getattr(self, name) >= least, name, getattr(self, name), f"≥ {least}")
        key = self._key()
        require(key is None or len(key) >= 8, "api_key", "of less than 8 characters", "8 characters or more")
        bound = "127.0.0.1 or localhost without --api-key"
        require(key is not None or is_local(self.host), "host", self.host, bound)

    def _key(self) -> str | None:
        return self.api_key if self.api_key is not None else os.environ.get(KEY) or None

    def _listen(self) -> socket.socket:
        """The socket to listen on. ConfigError: the address is taken, or not of this machine."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"host, port: {self.host}:{self.port} cannot be had ({error.strerror})"
            ) from None

    def _served(self, run: Path, opened: "Opened", folder: Path, objects: Objects | None = None) -> "Served":
        from perspectron.decode.store import PrefixStore
        from perspectron.serve.distant import DistantStates
        from perspectron.serve.engine import Engine
        from perspectron.serve.served import OPENAI, Served
        from perspectron.serve.states import States

        name = run.resolve().name
        looks = perspectives_of(self.perspectives, self.calibration, opened)
        store = None
        if not looks:  # with perspectives, rows read their prompts themselves
            store = PrefixStore(
                opened.model,
                memory_bytes=size(self.memory, "memory"),
                folder=None if self.store is None or objects is not None else folder / "prefixes",
                disk_bytes=size(self.disk, "disk"),
                shared=objects,
            )
        engine = Engine(
            opened.model, opened.tokenizer, store=store, rows=self.rows, queue=self.queue,
            together=False if self.deterministic else None, hooks=looks,
            drafts=drafts_of(self.draft, self.draft_tokens, opened),
        )  # fmt: skip
        leases, places = Leases(objects or Folder(folder)), (f"{kind}/{name}" for kind in ("states", "slots"))
        kept, slots = (
            States(folder / place, leases, place)
            if objects is None
            else DistantStates(folder / place, objects, place, leases)
            for place in places
        )
        sampling, line = opened.sampling(otherwise=OPENAI)
        if line:
            say(f"{name}: {line}")
        return Served(
            name, engine, opened.tokenizer, kept, slots, self.max_tokens, longest=self.max_prompt,
            template=opened.template(self.template), sampling=sampling,
        )  # fmt: skip
