"""`perspectron state`: files of memories."""

import os
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from perspectron import opening
from perspectron.cli.options import Device, Json, answer, open_model, say, table, text_or_input
from perspectron.cli.progress import Work
from perspectron.decode import apart, merge, past
from perspectron.decode.history import History, exhausted, history
from perspectron.decode.row import within
from perspectron.decode.session import Session
from perspectron.opening import Opened
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, PerspectronError
from perspectron.util.numbers import printable

T = TypeVar("T")
SHOWN = 40  # characters of a text in a table
Run = Annotated[
    Path | None, tyro.conf.arg(help="Folder of the model (default: the folder that the file is in).")
]


@dataclass(frozen=True)
class Read:
    """Read a text into a new file of a memory.

    Example: perspectron state read letters.txt --run runs/letters --out letters.state

    And another: perspectron state read other.txt --run runs/letters --out other.state
    """

    text: tyro.conf.Positional[Path]
    """File of a text in UTF-8; "-" reads standard input."""
    run: Path
    """Folder of the model."""
    out: Path
    """File of the memory."""
    device: Device = "auto"

    def __call__(self) -> int:
        text = text_or_input(self.text)
        require(text != "", "text", str(self.text), "not empty")
        session = _begun(_model(self.run, self.out, self.device))
        _read(session.reading(text))
        session.save(self.out)
        say(f"{self.out}: {len(session.tokens):,} tokens")
        return 0


@dataclass(frozen=True)
class Log:
    """Print the past of a memory: what was read and drawn, when, which files it went on from, and digests.

    Example: perspectron state log letters.state

    With the text: perspectron state log letters.state --run runs/letters --json
    """

    file: tyro.conf.Positional[Path]
    """File of a memory, as `state read`, `chat` and servers write it."""
    run: Path | None = None
    """Folder of the model, to show the text."""
    json: Json = False

    def __call__(self) -> int:
        told = history(self.file)
        texts = [""] * len(told.entries)
        if self.run is not None:
            opened_ = open_model(self.run)
            _begun(opened_).loaded(self.file)
            texts = [past.text_of(opened_.tokenizer, told.ids, e.start, e.stop) for e in told.entries]
        fields = {name: value for name, value in asdict(told).items() if name != "ids"}
        steps = [
            asdict(e) | ({"text": text} if self.run else {})
            for e, text in zip(told.entries, texts, strict=True)
        ]
        rows = [
            (
                f"{e.start:,}–{e.stop:,}" if e.stop > e.start else f"{e.stop:,}",
                e.what,
                "" if e.when is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e.when)),
                e.digest[:12],
                e.parent[:12] or (text and repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")),
            )
            for e, text in zip(told.entries, texts, strict=True)
        ]
        head = ("tokens", "", "UTC", "digest of the text", "parent, or text")
        return answer(self.json, fields | {"entries": steps}, table(_title(self.file, told), head, rows))


@dataclass(frozen=True)
class Diff:
    """Compare two memories of a model: where their texts part, how far their states are, what each expects next.

    Example: perspectron state diff letters.state other.state --run runs/letters

    With the KL divergence of what they expect of a text:

    perspectron state diff letters.state other.state --run runs/letters --on "Dear Sir"
    """

    a: tyro.conf.Positional[Path]
    """File of a memory."""
    b: tyro.conf.Positional[Path]
    """File of another."""
    run: Run = None
    on: str = ""
    """A probe text, read after each."""
    device: Device = "auto"
    json: Json = False

    def __call__(self) -> int:
        opened_ = _model(self.run, self.a, self.device)
        begun, tokenizer = _begun(opened_), opened_.tokenizer
        a, b = begun.loaded(self.a), begun.loaded(self.b)
        found = _worked("comparing", apart.diffing(a, b, self.on))
        parts = ["beginnings are not known"]
        if found.shared is not None:
            parts = [
                f"the texts share {found.shared:,} tokens, of {found.tokens[0]:,} and {found.tokens[1]:,}"
            ]
            start, end = found.shared, found.shared + past.AROUND
            tails = [past.text_of(tokenizer, s.tokens, start, end) for s in (a, b)]
            parts += [f"  {p}: {tail!r}" for p, tail in zip((self.a, self.b), tails, strict=True)]
        if found.kl:
            parts.append(
                f"KL on {len(found.kl):,} tokens: {found.mean:.4g} nats a token, at most {max(found.kl):.4g}"
            )
        states = table(
            "states", ("layer", "distance"), [(f"{i}", f"{d:.4g}") for i, d in enumerate(found.layers)]
        )
        expected = ([repr(within(tokenizer, [id])) + f" {p:.3f}" for id, p in one] for one in found.next)
        rows = [*zip_longest(*expected, fillvalue="")]  # of a text without a token there is no prediction
        return answer(
            self.json, asdict(found), *parts, states, table("next token", (str(self.a), str(self.b)), rows)
        )


@dataclass(frozen=True)
class Bisect:
    """Find the first token of a memory's past after which a question is answered so, by exact replay.

    Example: perspectron state bisect letters.state --run runs/letters --ask "The code is " --until 4711

    By an expression: perspectron state bisect letters.state --run runs/letters --ask "The code is " --until /47+/

    By a probability: perspectron state bisect talk.state --run runs/letters --ask "It is " --until "p(red)>0.5"
    """

    file: tyro.conf.Positional[Path]
    """File of a memory."""
    ask: str
    """Question, which is read after each beginning of the text."""
    until: str
    """A text that the most likely answer contains, /an expression/ found in it, or p(TEXT) > NUMBER."""
    run: Run = None
    max_tokens: int | None = None
    """Tokens of an answer; left out: 16, or fewer where the model's positions end."""
    device: Device = "auto"
    json: Json = False

    def __call__(self) -> int:
        session = _begun(_model(self.run, self.file, self.device)).loaded(self.file)
        found = _worked("asking", past.bisecting(session, self.ask, self.until, max_tokens=self.max_tokens))
        return answer(
            self.json,
            asdict(found),
            f"from token {found.token:,} on, {found.spelled!r}, in {found.around!r} ({found.readings} readings)",
            f"  before: {printable(found.before)!r}",
            f"  after:  {printable(found.after)!r}",
        )


@dataclass(frozen=True)
class Rebase:
    """Replay a memory's text on another beginning, or with another model.

    Example: perspectron state rebase letters.state --run runs/letters --onto "My dear" --out kind.state

    Without its first tokens, after another memory:

    perspectron state rebase letters.state --run runs/letters --after 5 --onto other.state --out moved.state
    """

    file: tyro.conf.Positional[Path]
    """File of a memory."""
    out: Path
    """File of the new one."""
    onto: str = ""
    """Text that is to stand before it; the name of a file is that of a memory, which goes on with it."""
    model: Path | None = None
    """Folder of another model that is to read it."""
    after: int = 0
    """Number of its first tokens to leave out."""
    run: Run = None
    device: Device = "auto"

    def __call__(self) -> int:
        given = self.onto != "" or self.model is not None or self.after != 0
        require(given, "onto", self.onto, "given, or model, or after")
        opened_ = _model(self.run, self.file, self.device)
        session = _begun(opened_).loaded(self.file)
        begun = _begun(opened_ if self.model is None else _model(self.model, self.file, self.device))
        there = os.path.isfile(self.onto)  # False for a text too long for a name
        known = there or not self.onto.endswith(".state")
        require(known, "onto", self.onto, "a file that is there, or a text")
        if there:
            begun = begun.loaded(self.onto)
        elif self.onto:
            _read(begun.reading(self.onto))
        replayed = past.ids_for(session, begun.tokenizer, after=self.after)
        found = _read(past.rebasing(session, begun, replayed))
        found.session.save(self.out)
        other = (
            "" if found.encoded is None else f", encoded anew as {found.encoded:,}: the vocabularies differ"
        )
        say(f"{self.out}: {found.tokens:,} tokens{other}, after {found.prefix:,}")
        return 0


@dataclass(frozen=True)
class Merge:
    """Make one memory of two, as if the second text had been read after the first, without the first one's tokens.

    Example: perspectron state merge letters.state other.state --run runs/letters --out both.state

    Judged on a text:

    perspectron state merge letters.state other.state --run runs/letters --out judged.state --on "Dear Sir"
    """

    a: tyro.conf.Positional[Path]
    """File of a memory."""
    b: tyro.conf.Positional[Path]
    """File of the one that comes after it."""
    out: Path
    """File of the new one."""
    run: Run = None
    on: str = ""
    """A probe text on which it is judged (default: what the model would say after both texts)."""
    device: Device = "auto"
    json: Json = False

    def __call__(self) -> int:
        begun = _begun(_model(self.run, self.a, self.device))
        found = _worked("merging", merge.merging(begun.loaded(self.a), begun.loaded(self.b), self.on))
        found.session.save(self.out)
        fields = {"kl": found.kl, "alone": found.alone, "probe": list(found.probe)}
        told = f"{found.kl:.4g} nats a token, where {self.b} alone has {found.alone:.4g}"
        return answer(self.json, fields, f"{self.out}: KL to both texts read in turn: {told}")


def _model(run: Path | None, file: Path, device: str) -> Opened:
    """The model of a memory. ConfigError: --run is not given, and the file lies in no folder of a model."""
    if run is None:
        try:
            opening.describe(file.absolute().parent)
        except PerspectronError:
            raise ConfigError(f"{file}: lies in no folder of a model; name it with --run") from None
    return open_model(file.absolute().parent if run is None else run, device=device)


def _begun(found: Opened) -> Session:
    return Session(found.model, found.tokenizer)


def _worked(what: str, steps: Generator[int, None, T]) -> T:
    """The result of a generator, run to its end while progress is shown."""
    with Work(what):
        return exhausted(steps)


def _read(steps: Generator[int, None, T]) -> T:
    """The result of a generator that reads a text, while it is shown how many tokens are read of how many."""
    whole = 0
    with Work("reading") as work:
        while True:
            try:
                left = next(steps)
            except StopIteration as end:
                found: T = end.value
                return found
            whole = max(whole, left)
            work.tell(whole - left, whole)


def _title(path: Path, told: History) -> str:
    known = "" if told.whole else ", after what is remembered but not known"
    counts = f"{told.tokens:,} tokens, {told.drawn:,} drawn{known}"
    return f"{path}: {counts}; model {told.model[:12]}, digest {told.digest[:12]}"
