"""The processes (ranks) that torchrun or Slurm started for one training: how they meet, agree, and all end when one of
them does.

What they say outside of the training itself goes through the store that torch's own process groups use. Each rank tells
it that it is alive; rank 0 watches the others, and they watch rank 0, so that a rank that was killed ends all, also
those that wait for it in the midst of an update.
"""

import contextlib
import hashlib
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from perspectron.util.errors import ConfigError, PerspectronError, RankError

A = TypeVar("A")
MEETING = 300.0  # seconds in which all ranks must have joined
BEAT = 1.0  # seconds between signs of life
GONE = 20.0  # seconds without one
GRACE = 10.0  # seconds in which a rank may end by itself, once another has
LOST = "rank {} has ended or does not answer"
STEP = timedelta(hours=2)  # limit of a collective: ranks may be reading, and dead ones are found otherwise


def code_digest() -> str:
    """A digest of the program and of the versions it runs on."""
    digest = hashlib.sha256(f"{platform.python_version()} {torch.__version__}".encode())
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


class Team:
    """`with Team() as team:` all ranks have joined, have the same code and the same command, and end together.

    An error of one rank ends all: rank 0 raises it, the others leave with its exit code. A rank that was killed is a
    RankError that names it. `rank`, `size`: this process and how many there are; `local`: its number on this
    machine, of `locals`."""

    def __init__(self, *, meeting: float = MEETING, gone: float = GONE) -> None:
        environment = os.environ
        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.local = int(environment.get("LOCAL_RANK", "0"))
        self.locals = int(environment.get("LOCAL_WORLD_SIZE", str(self.size)))
        self._meeting, self._gone = meeting, gone
        attempt = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
        self._attempt = "/".join(attempt)
        self._ended: tuple[str, int] | None = None  # a message and an exit code
        self._left = threading.Event()

    def __enter__(self) -> Self:
        self._serve = self._connect()
        self._store = self._connect()
        threading.Thread(target=self._watch, args=(self._connect(),), daemon=True).start()
        try:
            self._meet()
            self.same(
                "code", code_digest(), "use the same version of perspectron, torch and Python everywhere"
            )
            self.same("command", json.dumps(sys.argv[1:]), "type the same command everywhere")
            if torch.cuda.is_available():
                torch.cuda.set_device(self.local)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend, store=PrefixStore("groups", self._store), rank=self.rank, world_size=self.size,
                timeout=STEP,
            )  # fmt: skip
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
            return
        self.agree(lambda: None)
        self._left.set()
        dist.destroy_process_group()

    # ------------------------------------------------------------ meeting

    def _connect(self) -> Store:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        try:
            store = TCPStore(
                host, port, self.size, serves and not hasattr(self, "_serve"),
                timedelta(seconds=self._meeting), wait_for_workers=False,
            )  # fmt: skip
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise RankError(
                f"rank {self.rank}: rank 0 is not to be reached at {host}:{port} ({why})"
            ) from None
        return PrefixStore(f"perspectron/{self._attempt}", store)

    def _meet(self) -> None:
        """Wait until all ranks have joined. RankError names those that did not come in time."""
        self._store.set(f"here/{self.rank}", "1")
        until = time.monotonic() + self._meeting
        while self.rank == 0:
            missing = [rank for rank in range(self.size) if not self._store.check([f"here/{rank}"])]
            if not missing:
                self._store.set("met", "1")
                break
            if time.monotonic() > until:
                names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
                raise RankError(
                    f"rank {names} of {self.size} did not come within {self._meeting:g} s: start all of them, "
                    "or fewer (torchrun --nnodes, --nproc-per-node)"
                )
            time.sleep(0.05)
        self._await("met")

    def _await(self, key: str) -> bytes:
        """The value of a key, once somebody has set it; the end of another rank ends the wait."""
        while not self._store.check([key]):
            if self._ended is not None:
                raise RuntimeError(self._ended[0])
            time.sleep(0.05)
        return self._store.get(key)

    def same(self, what: str, value: str, otherwise: str) -> None:
        """Raise ConfigError, naming the ranks, unless `value` is the same for all. otherwise: what to do then."""
        self._store.set(f"same/{what}/{self.rank}", hashlib.sha256(value.encode()).hexdigest())
        if self.rank > 0:
            self._await(f"same/{what}")
            return
        digests = [self._await(f"same/{what}/{rank}").decode() for rank in range(self.size)]
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            rank = other[0]
            more = f" and {len(other) - 1} more" if len(other) > 1 else ""
            raise ConfigError(
                f"{what}: rank {rank}{more} has {digests[rank][:12]}, rank 0 {digests[0][:12]}; {otherwise}"
            )
        self._store.set(f"same/{what}", "1")

    # ------------------------------------------------------------ agreeing

    def tell(self, order: dict[str, Any]) -> None:
        """Send an order from rank 0 to the other ranks."""
        self._store.set("order", json.dumps(order))

    def hear(self) -> dict[str, Any]:
        """Wait for rank 0's order, however long it takes, and return it."""
        return json.loads(self._await("order"))

    def gather(self, value: A, group: Any = None) -> list[A]:
        """The values of all ranks, in their order. group: of processes, if another thread uses the default one."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group)
        return found

    def agree(self, work: Callable[[], A], group: Any = None) -> A:
        """The result of `work`, on every rank its own. The error of the first rank that has one is raised by all."""
        error, result = None, None
        try:
            result = work()
        except PerspectronError as raised:
            error = raised
        first = next(((rank, e) for rank, e in enumerate(self.gather(error, group)) if e is not None), None)
        if first is not None:
            raise first[1]
        return result  # type: ignore[return-value]

    def of_first(self, work: Callable[[], A], group: Any = None) -> A:
        """The result of `work` on rank 0, which alone does it; its error is raised by all."""
        value = self.agree(lambda: work() if self.rank == 0 else None, group)
        found: list[Any] = [value]
        dist.broadcast_object_list(found, 0, group)
        return found[0]

    # ------------------------------------------------------------ ending

    def _fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends, and end as they do: rank 0 says why, the others have its exit code."""
        user = isinstance(error, PerspectronError)
        if user:
            own = f"rank {self.rank}: {error}" if self.rank else str(error)
            self._end(own, error.exit_code)  # type: ignore[attr-defined]
        elif not isinstance(error, RuntimeError) or not self._told(self._gone + 4 * BEAT):
            self._end(f"rank {self.rank}: {type(error).__name__}: {error}", 1)
            self._leave()
            return  # a bug keeps its traceback
        self._leave()
        assert self._ended is not None
        text, code = self._ended
        if self.rank > 0 and not text.startswith(LOST.format(0)):
            raise SystemExit(code) from None
        if not user:
            raise RankError(text, code) from None

    def _leave(self) -> None:
        """Give no more signs of life; rank 0, which serves the store, waits until the others know why."""
        self._left.set()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "1")
            until = time.monotonic() + GRACE
            others = {f"left/{rank}" for rank in range(1, self.size) if self._store.check([f"here/{rank}"])}
            while self.rank == 0 and others and time.monotonic() < until:
                others = {key for key in others if not self._store.check([key]) and not self._lost_now(key)}
                time.sleep(0.05)

    def _lost_now(self, key: str) -> bool:
        """True if the rank of a key is the one that has ended."""
        assert self._ended is not None
        return self._ended[0].startswith(LOST.format(key.rpartition("/")[2]))

    def _told(self, seconds: float) -> bool:
        """True if another rank has ended, as is known within so many seconds."""
        until = time.monotonic() + seconds
        while self._ended is None and time.monotonic() < until:
            time.sleep(0.05)
        return self._ended is not None

    def _end(self, text: str, code: int) -> None:
        """Have all ranks end; the first reason that is given counts."""
        mine = json.dumps([text, code])
        with contextlib.suppress(RuntimeError):
            mine = self._store.compare_set("ended", "", mine).decode() or mine
        self._ended = tuple(json.loads(mine))

    def _watch(self, store: Store) -> None:
        """Tell that this rank is alive, and see whether others are, until it has left; a rank that does not end by
        itself after another has is ended here."""
        seen: dict[int, tuple[bytes, float]] = {}
        beat = 0
        while self._ended is None and not self._left.wait(BEAT):
            try:
                beat += 1
                store.set(f"beat/{self.rank}", str(beat))
                lost = self._lost(store, seen)
                if store.check(["ended"]):
                    self._ended = tuple(json.loads(store.get("ended")))
            except RuntimeError:  # the rank that serves the store has ended
                lost = 0
            if lost is not None and self._ended is None and not self._left.is_set():
                text = f"{LOST.format(lost)}; go on with the same command and --resume RUN"
                if lost > 0:
                    self._end(text, RankError.code)
                else:
                    self._ended = (text, RankError.code)
        if self._ended is None:
            return
        text, code = self._ended
        if not self._left.wait(GRACE) and (self.rank == 0 or text.startswith(LOST.format(0))):
            print(f"perspectron: error: {text}", file=sys.stderr, flush=True)
        elif self._left.is_set():
            time.sleep(GRACE)  # the process ends before, unless one of its threads waits for another rank
        os._exit(code)

    def _lost(self, store: Store, seen: dict[int, tuple[bytes, float]]) -> int | None:
        """A rank that has shown no sign of life for too long."""
        now = time.monotonic()
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            if not store.check([f"beat/{rank}"]):
                continue  # it has not joined yet
            beat = store.get(f"beat/{rank}")
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = (beat, now)
            elif now - seen[rank][1] > self._gone:
                return rank
        return None
