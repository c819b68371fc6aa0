"""Any order of requests, forks, files, evictions, aborts, kills and restarts: not a token and not a logit that differs
from the run without any of them, for every design.

    python -m tests.serve.test_fuzz --operations 100000
"""

import argparse
import queue
import random
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode.row import Piece
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.serve.engine import Engine, Job
from tests.decode.conftest import VOCAB
from tests.decode.test_store import CHUNK, small
from tests.waiting import PATIENCE

LONGEST = 40  # tokens of a text, within every design's positions


class Fuzz:
    """An engine that things happen to, and the same texts without it. texts: the engine's session and the plain one."""

    def __init__(self, design: str, tokenizer: Tokenizer, folder: Path, seed: int) -> None:
        self.model, self.tokenizer, self.folder = small(design), tokenizer, folder
        self.draw = random.Random(seed)
        self.base = [self.draw.randrange(1, VOCAB) for _ in range(LONGEST)]
        self.texts: list[tuple[Session, Session]] = []
        self.compared = self.tokens_saved = 0
        self.engines: list[Engine] = []
        self.restart()

    def restart(self) -> None:
        """A new process, as far as the files can tell: what was in memory is gone, and nothing was closed."""
        if self.engines:
            assert self.engine.store is not None
            self.tokens_saved += self.engine.store.counters.tokens_saved
        store = PrefixStore(
            self.model, chunk=CHUNK, memory_bytes=self.room(), folder=self.folder / "prefixes"
        )
        self.engine = Engine(self.model, self.tokenizer, store=store, rows=3, queue=99, together=False)
        self.engines = [*self.engines[-1:], self.engine]
        for number, (session, _) in enumerate(self.texts):
            session.save(self.folder / str(number))
        self.texts = [
            (self.engine.session().loaded(self.folder / str(number)), plain)
            for number, (_, plain) in enumerate(self.texts)
        ]

    def room(self) -> int:
        return self.draw.choice([0, 20_000, 100_000, 1 << 30])

    def run(self, operations: int) -> None:
        while operations > 0:
            for _ in range(self.draw.randint(1, 4)):
                self.draw.choice(
                    [self.request, self.request, self.fork, self.file, self.evict, self.damage]
                )()
            self.turns()
            if self.draw.random() < 0.15:
                self.restart()
            operations -= 5

    def request(self) -> None:
        cut, more = self.draw.randint(1, 24), self.draw.choice([0, 0, 3, 9])
        ids = self.base[:cut] + [self.draw.randrange(1, VOCAB) for _ in range(more)]
        pair = self.engine.session(), Session(self.model, self.tokenizer, chunk=CHUNK)
        for session in pair:
            session.append(ids)
        self.texts = [*self.texts[-7:], pair]

    def fork(self) -> None:
        if self.texts:
            session, plain = self.draw.choice(self.texts)
            token = self.draw.randint(1, len(plain.tokens))

            def back() -> Generator[int, None, Session]:
                yield 0
                return session.at(token)

            self.texts = [*self.texts[-7:], (self.engine.run(back()).result(60), plain.at(token))]

    def file(self) -> None:
        if self.texts:
            at = self.draw.randrange(len(self.texts))
            self.texts[at][0].save(self.folder / "kept")
            self.texts[at] = self.engine.session().loaded(self.folder / "kept"), self.texts[at][1]

    def evict(self) -> None:
        assert self.engine.store is not None
        self.engine.store.memory_bytes = self.room()

    def damage(self) -> None:
        files = sorted((self.folder / "prefixes").glob("*.state"))
        if files:
            file = self.draw.choice(files)
            if self.draw.random() < 0.5:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(file.read_bytes()[: self.draw.randrange(2000)])

    def turns(self) -> None:
        """Some texts go on together; some of them are let go half way."""
        chosen = self.draw.sample(range(len(self.texts)), min(len(self.texts), self.draw.randint(1, 4)))
        jobs, events = [], []
        for at in chosen:
            session, plain = self.texts[at]
            room = LONGEST - len(plain.tokens)
            if room < 3:
                continue
            more = [self.draw.randrange(1, VOCAB) for _ in range(self.draw.choice([0, 0, min(5, room - 2)]))]
            session.append(more), plain.append(more)
            sampling = SamplingConfig(temperature=self.draw.choice([0.0, 1.0]), seed=self.draw.randrange(3))
            arrived: queue.Queue[object] = queue.Queue()
            count = self.draw.randint(1, min(6, room - len(more)))
            job = Job(session, count, arrived.put, sampling, stream=self.draw.randrange(2), logprobs=VOCAB)
            jobs.append((at, job)), events.append(arrived)
        self.engine.submit([job for _, job in jobs])
        gone = [job for _, job in jobs if self.draw.random() < 0.2]
        self.engine.cancel(gone)
        for (at, job), arrived in zip(jobs, events, strict=True):
            if job in gone:
                del arrived  # it stays as it was: its text is tried again later
                self.texts[at] = (self.copy(self.texts[at][1]), self.texts[at][1])
                continue
            got = []
            while not got or got[-1].finished is None:
                piece = arrived.get(timeout=PATIENCE)
                assert isinstance(piece, Piece), piece
                got.append(piece)
            assert told(got) == told(self.plain(self.texts[at][1], job))
            self.compared += len(got)

    def copy(self, plain: Session) -> Session:
        plain.save(self.folder / "plain")
        return self.engine.session().loaded(self.folder / "plain")

    def plain(self, session: Session, job: Job) -> list[Piece]:
        """The same turn alone, without an engine or a store."""
        rows = Rows(self.model, self.tokenizer, chunk=CHUNK, together=False)
        settings = {"max_tokens": job.max_tokens, "sampling": job.sampling}
        row, pieces = session.enter(rows, **settings, stream=job.stream, logprobs=VOCAB), []
        while rows.active:
            pieces += rows.step()
        session.leave(rows, row, [piece.id for piece in pieces if piece.id is not None])
        return pieces


def told(pieces: list[Piece]) -> list[tuple]:
    return [(piece.id, piece.text, piece.finished, piece.logprob, piece.likely) for piece in pieces]


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_nothing_that_happens_changes_a_bit(design: str, tokenizer, tmp_path) -> None:
    fuzz = Fuzz(design, tokenizer, tmp_path, seed=len(design))
    fuzz.run(25)
    assert fuzz.compared > 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = [f"Row {i} of {i * i}: the cat sat on the mat, and then the mat sat.\n" for i in range(80)]
    tokenizer, each = Tokenizer.train(texts, VOCAB), max(1, args.operations // len(presets.DESIGNS))
    for number, design in enumerate(presets.DESIGNS):
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        fuzz = Fuzz(design, tokenizer, folder, args.seed * 1000 + number)
        fuzz.run(each)
        saved = fuzz.tokens_saved
        print(
            f"{design}: {each} operations, {fuzz.compared} tokens with all their logits, 0 differ; {saved} calls saved",
            flush=True,
        )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
