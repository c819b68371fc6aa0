"""Continuous batching: one thread owns a model, texts join and leave its rows at any step, no prompt holds it up."""

import contextlib
import itertools
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from perspectron.decode.batch import WIDTH
from perspectron.decode.drafts import Drafter
from perspectron.decode.graphs import PATIENCE, Graphs
from perspectron.decode.processors import Hook, Processor
from perspectron.decode.row import Piece, Vocabulary
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.steps import stepped, steps_of
from perspectron.decode.store import WORTHWHILE, PrefixStore
from perspectron.model.model import LanguageModel
from perspectron.util.config import require
from perspectron.util.errors import PerspectronError
from perspectron.util.machine import synchronise

T = TypeVar("T")
Event = Piece | PerspectronError
FAIR = 4  # one in so many pieces that are read is of the text that has waited longest
NEARLY = 1.1  # rows are stepped one by one if that takes at most so many times as long as one batch
log = logging.getLogger("perspectron")


class Full(Exception):
    """There is no room in the queue: ask again later."""


class Closed(Exception):
    """The engine is closing and takes no more texts."""


@dataclass(eq=False)
class Job:
    """One text to generate. session: the text so far, which belongs to the engine until the last event. emit: called on
    the engine's thread with every piece, or once with an error; must return at once. stream, logprobs, hooks,
    min_tokens, stop_ids, shares: as in `Rows.add`. ids: tokens drawn. spared: tokens of the prompt that the
    session had read before, or the store had. turn: the turn in which a piece of it was last read."""

    session: Session
    max_tokens: int
    emit: Callable[[Event], None]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop: Sequence[str] = ()
    stream: int = 0
    logprobs: int | None = None
    hooks: Sequence[Hook | Processor] = ()
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    shares: bool = True
    row: int | None = None
    ids: list[int] = field(default_factory=list)
    spared: int = 0
    cancelled: bool = False
    turn: int = 0


@dataclass
class Counters:
    """steps: steps of the rows. drawn: tokens drawn. finished, cancelled, failed: texts that ended so."""

    steps: int = 0
    drawn: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0


class Engine:
    """Generates texts on one model, at most `rows` of them at once, while up to `queue` more wait.

    Between two steps it reads one piece of unread input: a chunk of a prompt, or of a task. The shortest remaining
    input goes first, but one piece in FAIR is of the text that has waited longest, so that none starves; cancelled
    texts stop after their piece. At most `rows` prompts and `rows` tasks are half read. together: step rows as one
    batch, as in `Rows`; None: one by one where that costs at most a tenth more, as measured at the start. When nobody
    waits, a finished text is read again as a prompt would be, so that the next turn finds it in the store. hooks,
    drafts: for all texts, as in `Rows`.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Vocabulary,
        *,
        store: PrefixStore | None = None,
        rows: int = 16,
        queue: int = 64,
        together: bool | None = None,
        hooks: Sequence[Hook | Processor] = (),
        drafts: Drafter | None = None,
    ) -> None:
        require(rows >= 1, "rows", rows, "≥ 1")
        require(queue >= 0, "queue", queue, "≥ 0")
        self.model, self.tokenizer, self.store, self.hooks = model, tokenizer, store, hooks
        self.limit, self.queue, self.drafts = rows, queue, drafts
        self.cost = row_by_row_cost(model, min(rows, 4)) if together is None else None
        self.together = self.cost > NEARLY if self.cost is not None else bool(together)
        self.counters = Counters()
        self._rows = self._fresh()
        self._waiting, self._jobs = deque[Job](), dict[int, Job]()
        self._tasks, self._later = deque[_Task](), deque[_Task](maxlen=rows)
        self._turns = 0
        self._changed = threading.Condition()
        self._draining = self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Number of texts that have a row: their prompts are being read, or tokens are drawn."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Number of texts that wait for a row."""
        return len(self._waiting)

    def session(self) -> Session:
        """A new session of this model, without text."""
        chunk = self._rows.chunk
        return Session(self.model, self.tokenizer, chunk=chunk, store=self.store)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue texts, all or none. Full: the queue has no room for them. Closed: the engine is draining."""
        with self._changed:
            if self._draining:
                raise Closed
            idle = max(0, self.limit - len(self._jobs))
            if len(self._waiting) + len(jobs) > self.queue + idle:
                raise Full
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Cancel texts: they are gone before the step after the next, and emit nothing from then on."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def run(self, task: Generator[int, None, T]) -> "Future[T]":
        """Run a task on the engine's thread, from one yield to the next between two steps: a future of its result. It
        yields the number of tokens it has left, and does little before that. Once the future is cancelled, it ends
        within one piece. Closed: the engine is draining. Full: as many tasks wait as `queue` and `rows` allow."""
        with self._changed:
            if self._draining:
                raise Closed
            if len(self._tasks) >= self.queue + self.limit:
                raise Full
            made = _Task(task, self._turns)
            self._tasks.append(made)
            self._changed.notify()
        return made.result

    def close(self, timeout: float | None = None) -> None:
        """Take nothing more, finish what is there within `timeout` seconds (None: however long it takes), stop."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        if self.store is not None:
            self.store.close()

    def _fresh(self) -> Rows:
        chunk: dict[str, Any] = {} if self.store is None else {"chunk": self.store.chunk}
        return Rows(
            self.model,
            self.tokenizer,
            together=self.together,
            store=self.store,
            hooks=self.hooks,
            drafts=self.drafts,
            **chunk,
        )

    def _loop(self) -> None:
        while self._next():
            try:
                self._turn()
            except Exception as error:
                self._fail(error)

    def _turn(self) -> None:
        """One step of the rows, and what comes before and after it."""
        self._let_go()
        self._admit()
        chosen = self._chosen()
        idle = chosen is None and not self._jobs and not self._waiting
        if isinstance(chosen, _Task) and chosen.advance():
            with self._changed:
                self._tasks.remove(chosen)
        elif idle and self._later and self._later[0].advance():
            self._later.popleft()
        pieces = self._rows.step([chosen.row] if isinstance(chosen, Job) and chosen.row is not None else [])
        self.counters.steps += bool(pieces)
        for piece in pieces:
            self._deliver(piece)

    def _chosen(self) -> "Job | _Task | None":
        """The text or task of which a piece is read next; None if nothing is unread."""
        self._turns += 1
        left = self._rows.unread
        unread: list[tuple[int, Job | _Task]] = [
            (left[row], job) for row, job in self._jobs.items() if row in left
        ]
        with self._changed:
            unread += [(task.left, task) for task in itertools.islice(self._tasks, self.limit)]
        if not unread:
            return None
        aged = self._turns % FAIR == 0
        _, chosen = min(unread, key=lambda each: (0 if aged else each[0], each[1].turn))
        chosen.turn = self._turns
        return chosen

    def _next(self) -> bool:
        """Wait until there is something to do; False when all is done."""
        with self._changed:
            while not self._stopped:
                if self._waiting or self._jobs or self._tasks:
                    return True
                if self._draining:
                    return False
                if self._later:
                    return True
                self._changed.wait()
        return False

    def _let_go(self) -> None:
        """Drop cancelled texts and tasks, those that wait too."""
        with self._changed:
            left = [job for job in self._waiting if not job.cancelled]
            self.counters.cancelled += len(self._waiting) - len(left)
            self._waiting = deque(left)
            for task in [task for task in self._tasks if task.result.cancelled()]:
                task.steps.close()
                self._tasks.remove(task)
        for row, job in list(self._jobs.items()):
            if job.cancelled:
                del self._jobs[row]
                self.counters.cancelled += 1
                with contextlib.suppress(PerspectronError):  # raised by a hook: nobody listens any more
                    self._rows.remove(row)

    def _admit(self) -> None:
        """Let texts join while there are rows."""
        while len(self._jobs) < self.limit:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            try:
                job.row = job.session.enter(
                    self._rows, max_tokens=job.max_tokens, sampling=job.sampling, stop=job.stop, stream=job.stream,
                    logprobs=job.logprobs, hooks=job.hooks, min_tokens=job.min_tokens, stop_ids=job.stop_ids,
                    shares=job.shares,
                )  # fmt: skip
            except Exception as error:
                self.counters.failed += 1
                job.emit(_told(error))
            else:
                self._jobs[job.row], job.turn = job, self._turns
            if job.hooks:
                return  # others step before the next grammar, which may take long to compile

    def _deliver(self, piece: Piece) -> None:
        job = self._jobs[piece.row]
        event: Event = piece
        if piece.id is not None:
            job.ids.append(piece.id)
        if len(job.ids) == 1:
            job.spared = job.session.done + self._rows.spared(piece.row)
        if piece.finished is not None:
            try:
                if piece.error is None:
                    job.session.leave(self._rows, piece.row, job.ids)
                else:
                    self._rows.remove(piece.row)
            except PerspectronError as error:  # raised by a hook as the row ends
                event = error if piece.error is None else piece
            del self._jobs[piece.row]  # not before: any other error up to here is told to this job, too
            if event is not piece or piece.error is not None:
                self.counters.failed += 1
            else:
                self.counters.finished += 1
                session = job.session
                plain = session.whole and session.start is None
                if self.store is not None and job.shares and plain and len(job.ids) >= self._least:
                    lacks = session.before < len(self.tokenizer.specials.prefix)
                    self._later.append(_Task(self._reread(session.tokens, whole=lacks), 0))
        self.counters.drawn += piece.id is not None
        job.emit(event)

    def _reread(self, ids: list[int], *, whole: bool) -> Generator[int, None, None]:
        """Read a finished text as a prompt, so that the store keeps it. whole: as `Session.append` has it."""
        session = self.session()
        session.append(ids, whole=whole)
        yield from session.reading([])
        if self.store is not None and self.store.anywhere:
            yield from session.remembering()

    @property
    def _least(self) -> int:
        """Number of drawn tokens from which on it pays to read them as a prompt."""
        return WORTHWHILE if self.store is not None and self.store.anywhere else self._rows.chunk

    def _fail(self, error: Exception) -> None:
        """Give up all rows after an error that spoils them, and go on with new ones."""
        log.exception("a step failed; the texts under way are given up", exc_info=error)
        jobs, self._jobs, self._rows = list(self._jobs.values()), {}, self._fresh()
        self.counters.failed += len(jobs)
        for job in jobs:
            job.emit(_told(error))


def _told(error: Exception) -> PerspectronError:
    return error if isinstance(error, PerspectronError) else PerspectronError(f"a step failed ({error})")


class _Task:
    def __init__(self, steps: Generator[int, None, Any], turn: int) -> None:
        self.steps, self.result = steps, Future[Any]()
        self.left, self.turn = 0, turn

    def advance(self) -> bool:
        """Go on to the next yield; True when that was the last."""
        try:
            self.left = next(self.steps)
        except StopIteration as end:
            if self.result.set_running_or_notify_cancel():
                self.result.set_result(end.value)
        except Exception as error:
            if self.result.set_running_or_notify_cancel():
                self.result.set_exception(error)
        else:
            return False
        return True


@torch.inference_mode()
def row_by_row_cost(model: LanguageModel, rows: int) -> float:
    """Time of a step of `rows` rows one by one over that of one batch: the median of three rounds that measure both."""
    full = rows + -rows % WIDTH
    batch, alone = model.init_state(full), [model.init_state(1) for _ in range(rows)]
    ids_B1 = torch.ones(full, 1, dtype=torch.int64, device=model.device)
    ratios, steps = [], steps_of(model)
    for _ in range(4 + (PATIENCE if isinstance(steps, Graphs) else 0)):
        start = time.perf_counter()
        _, _, batch = stepped(model, steps, ids_B1, batch)
        synchronise(model.device)
        middle = time.perf_counter()
        for row in range(rows):
            _, _, alone[row] = stepped(model, steps, ids_B1[:1], alone[row])
        synchronise(model.device)
        ratios.append((time.perf_counter() - middle) / (middle - start))
    return statistics.median(ratios[-3:])
