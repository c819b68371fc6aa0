"""`perspectron chat`."""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import tyro
from msgspec.structs import replace

from perspectron.cli import kept
from perspectron.cli.kept import Kept
from perspectron.cli.options import (
    Cache,
    Device,
    Draft,
    DraftTokens,
    OpenedFrom,
    drafts_of,
    open_model,
    say,
    spoken,
)
from perspectron.cli.progress import Work
from perspectron.cli.typed import FENCE, Messages, unheard
from perspectron.data import Tokenizer
from perspectron.data.template import Template
from perspectron.decode.drafts import Drafter
from perspectron.decode.rows import Rows
from perspectron.decode.said import SAID, Said, said_in
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.saved import alike
from perspectron.decode.session import Session
from perspectron.decode.suggested import Asked
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, NonFiniteError, PerspectronError, StateError
from perspectron.util.machine import signals

HELP = f"""\
Each message is appended to the text on a new line, and the model continues from there. An empty message lets the model
continue by itself. A model with a chat template answers your message. Put {FENCE} before and after several lines;
pasted without, each line is a message.
  /save FILE   save the memory to a file       /load FILE   load it from a file
  /fork        keep this point                 /back [N]    return to the last point kept, or the N-th last
  /state       show the size of the memory     /new         begin another talk
  /quit        leave (or end the input)
Type // for a message that begins with /. Ctrl-C stops an answer or drops what is typed; other keys typed during an
answer are ignored."""


@dataclass(frozen=True)
class Chat:
    """Write a text in turns with a model that keeps everything in its memory.

    Example: perspectron chat runs/letters

    On a terminal the talk is kept in RUN/chat.state after each answer, and goes on from there the next time, also when
    the program was killed in the middle of an answer. /new begins another.

    Continue what /save or `generate --save-state` saved, or begin with a memory that `train --state` made:
    perspectron chat runs/letters --load-state tree.state

    Over a pipe, each line is a message: perspectron chat runs/letters --max-tokens 40 < other.txt
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--max-tokens", "--temperature", "--top-p", "--seed", "--stop", "--keep", "--load-state",
    )  # fmt: skip
    run: OpenedFrom
    max_tokens: int = 100
    """Maximum number of tokens in an answer."""
    sampling: Asked = field(default_factory=Asked)
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A string that ends an answer and is not shown; may be given several times."""
    keep: Path | None = None
    """Keep the talk in this file, and go on with the one that is there (default: RUN/chat.state on a terminal, none
    over a pipe or of a checkpoint)."""
    load_state: Path | None = None
    """Continue this saved conversation, or begin with this trained memory; the talk is then not kept."""
    draft: Draft = None
    draft_tokens: DraftTokens = None
    device: Device = "auto"
    cache: Cache = None

    def __call__(self) -> int:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "≥ 1")
        opened = open_model(self.run, self.cache, device=self.device)
        drafts = drafts_of(self.draft, self.draft_tokens, opened)
        sampling, line = opened.sampling(self.sampling)
        talk = Talk(opened.model, opened.tokenizer, self, opened.template(), sampling, drafts)
        require(
            self.keep is None or self.load_state is None, "keep", str(self.keep), "left out with load_state"
        )
        terminal = sys.stdin.isatty()
        if terminal:
            say(f"{opened.model.config.name}; /help lists the commands")
        if line:
            say(line)
        if self.load_state is not None:
            talk.load(str(self.load_state))
        elif self.keep is not None:
            talk.kept = Kept(self.keep)
        elif terminal and opened.folder.path != self.run:
            say(
                f"this talk is not kept: {self.run} is a checkpoint, which training removes; --keep FILE keeps it"
            )
        elif terminal and not os.access(self.run, os.W_OK):
            say(f"this talk is not kept: {self.run} cannot be written; --keep FILE keeps it")
        elif terminal:
            talk.kept = Kept(self.run / kept.FILE)
        with contextlib.nullcontext() if talk.kept is None else talk.kept.alone():
            talk.go_on()
            return self._answers(talk, terminal)

    def _answers(self, talk: "Talk", terminal: bool) -> int:
        lines = Messages(terminal)
        for message in lines:
            if not (message or terminal or talk.goes_on):
                continue  # a blank line of a script, where no answer is left to continue
            talk.stopped = False
            try:
                if not talk.take(message):
                    break
            except PerspectronError as error:
                if not terminal:  # a script would continue from a state it does not expect
                    raise
                print(f"perspectron: error: {error}", file=sys.stderr)
                talk.stopped = True
            if talk.stopped and (lost := lines.drop()):
                say(f"{lost} more pasted lines are dropped")
        return 0


class Point(NamedTuple):
    """A point of a talk: its memory and, with a chat template, what was said."""

    session: Session
    said: Said = Said()

    @classmethod
    def of(cls, session: Session) -> "Point":
        """The point that a file gives. If its messages, or the place where they begin, are not known, new messages
        begin after its text."""
        said, tokens = said_in(session.extra), len(session.tokens)
        if SAID in session.extra and said == Said():
            say("the file does not have what was said as messages: messages begin after its text")
        if not said.messages or said.start > tokens or (said.start == 0 and not session.whole):
            said = Said(start=tokens, gone=said.gone)
        return cls(session, said)

    def answered(self, answer: str) -> "Point":
        """The point after an answer, or after a continuation of the last answer, which may come from a loaded file."""
        before = self.said.messages
        if not before:
            return self._replace(said=replace(self.said, start=len(self.session.tokens)))
        last = {"role": "assistant", "content": answer}
        if before[-1]["role"] == "assistant":
            before, last = before[:-1], before[-1] | {"content": before[-1]["content"] + answer}
        return self._replace(said=replace(self.said, messages=(*before, last)))

    def fork(self) -> "Point":
        return self._replace(session=self.session.fork())

    def save(self, path: Path) -> None:
        """Write to one file. StorageError if it cannot be."""
        self.session.save(path, extra=self.said.extra())


class Talk:
    """A conversation: its present point, and the points that /fork has kept. template: chat template, for a model that
    was trained to answer."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        options: Chat,
        template: Template | None = None,
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
        drafts: Drafter | None = None,
    ) -> None:
        self.model, self.tokenizer, self.options, self.template = model, tokenizer, options, template
        self.start: LMState | None = None
        """A trained memory, with which talks begin."""
        self.sampling, self.drafts = sampling, drafts
        self.now = Point(self._session())
        self.points: list[Point] = []
        self.kept: Kept | None = None
        self.stopped = False
        self.commands: dict[str, Callable[[str], None]] = {
            "save": self.save, "load": self.load, "fork": self.fork, "back": self.back, "state": self.state,
            "new": self.new, "help": lambda _: print(HELP, file=sys.stderr),
        }  # fmt: skip

    def _session(self) -> Session:
        return Session(self.model, self.tokenizer, start=self.start, drafts=self.drafts)

    @property
    def goes_on(self) -> bool:
        """True if an empty message continues the text."""
        tokens = self.now.session.tokens
        return self.template is None or (bool(tokens) and tokens[-1] not in self.tokenizer.specials.stops)

    def take(self, message: str) -> bool:
        """Do what a message says, or answer it; False where it ends the talk."""
        if not message.startswith("/") or message.startswith("//"):
            self.answer(message.replace("//", "/", 1) if message.startswith("//") else message)
            return True
        name, _, rest = message[1:].strip().partition(" ")
        if name in ("quit", "exit"):
            return False
        if name not in self.commands:
            known = ", ".join(f"/{known}" for known in (*self.commands, "quit"))
            raise ConfigError(
                f"/{name}: no such command; the commands are {known}; // begins a message with /"
            )
        self.commands[name](rest.strip())
        return True

    def go_on(self) -> None:
        """Go on with the talk that is kept, if there is one; a message that has no answer gets it."""
        if self.kept is None:
            return
        try:
            session, asked = self.kept.read(self._session())
        except StateError as error:
            raise StateError(f"{error}; move it away to begin another talk") from None
        if session is not None:
            self.start, self.now = session.start, Point.of(session)
            say(f"{self.kept.path} goes on: {session.drawn:,} tokens drawn; /new begins another talk")
        if asked is not None:
            say(f"> {asked}")
            self.answer(asked)

    def new(self, _: str) -> None:
        self.now = Point(self._session())
        self._keep()

    def answer(self, message: str) -> None:
        """Read a message and print the model's answer as it is drawn."""
        if self.kept is not None:
            self.kept.ask(self.now.session, self.now.said.gone, message)
        try:
            self._answer(message)
        except PerspectronError:
            if self.kept is not None:
                self.kept.forget(whole=False)
            raise
        self._keep()

    def _keep(self) -> None:
        """Save the talk as it is now, if it is kept in a file: of one that is empty the memory with which it begins, if
        that was trained."""
        if self.kept is not None and (self.now.session.tokens or self.start is not None):
            self.kept.answered(self.now.save)
        elif self.kept is not None:
            self.kept.forget()

    def _answer(self, message: str) -> None:
        asked = self._asked(message)
        ended, said = self._said(asked.session, asked.said.gone)
        if self.template:
            self.now = asked.answered(said)
            return
        if ended:  # reading the token that ends a text would empty the memory
            session = asked.session.at(len(asked.session.tokens) - 1)
            session.append("\n")
            asked = Point(session, Said(gone=asked.said.gone + 1))
        self.now = asked

    def _said(self, session: Session, gone: int) -> tuple[bool, str]:
        """Draw an answer and print it as it comes: (True if the model ended it, its text). An interrupt ends the answer
        where it is, or the reading before it."""
        options = self.options
        rows = Rows(self.model, self.tokenizer, together=False, drafts=self.drafts)
        ended, failed, said, ids = False, False, "", list[int]()
        with Work("reading") as work, signals() as caught, unheard():
            whole = 0
            for left in session.reading(()):
                whole = max(whole, left)
                work.tell(whole - left, whole)
                if caught:
                    self.stopped = True
                    return False, ""
            row = session.enter(
                rows, max_tokens=options.max_tokens, sampling=self.sampling, stop=options.stop, stream=gone
            )
            while rows.active and not caught:
                for piece in rows.step():
                    ended, failed = piece.finished == "end", piece.finished == "error"
                    ids += [] if piece.id is None else [piece.id]
                    if piece.text:
                        work.stop()
                        print(spoken(piece.text), end="", flush=True)
                        said += piece.text
        self.stopped = bool(caught)
        print(flush=True)
        if failed:
            raise NonFiniteError("logits are not finite; the memory is as it was before this message")
        if ids:
            session.leave(rows, row, ids)
        return ended, said

    def _asked(self, message: str) -> Point:
        """The point with a message added: formatted by the template, or on a line of its own. If the template now
        formats earlier messages differently (it trims answers, or leaves out the reasoning before them), the talk goes
        on from where both agree, and the rest is read again."""
        now, said = self.now, self.now.said
        if self.template is None:
            session = now.session.fork()
            last = self.tokenizer.decode(session.tokens[-1:])
            begins = not session.tokens or not message or last.endswith("\n")
            session.append(message if begins else f"\n{message}")
            return Point(session, Said(gone=said.gone))
        if not message:
            require(self.goes_on, "message", message, "given: there is no answer that a blank line continues")
            return now.fork()
        messages = (*said.messages, {"role": "user", "content": message})
        ids = self.template.ids(messages, self.tokenizer, **said.given)
        rest = self.tokenizer.specials.bare(ids)
        if said.start:
            shared = said.start + alike(now.session.tokens[said.start :], rest)
        else:
            shared = now.session.shared(ids, whole=True)
        try:
            session = now.session.at(shared) if shared else self._session()
        except ConfigError:
            say("the template writes the talk so far in another way, and its file has no way back: "
                "the template begins anew after it")  # fmt: skip
            self.now = Point(now.session, Said(start=len(now.session.tokens), gone=said.gone))
            return self._asked(message)
        session.append(rest[shared - said.start :] if shared else ids, whole=True)
        gone = said.gone + now.session.drawn - session.drawn
        return Point(session, replace(said, messages=messages, gone=gone))

    def save(self, file: str) -> None:
        path = _path(file, "/save")
        if not self.now.session.tokens:
            raise ConfigError("/save: there is nothing to save yet")
        self.now.save(path)
        print(f"saved to {file}", file=sys.stderr)

    def load(self, file: str) -> None:
        path = _path(file, "/load")
        session = self._session().loaded(path)
        self.start, self.now = session.start, Point.of(session)
        if self.kept is not None:
            say(f"{self.kept.path} stays as it is; what follows is not kept, unless by /save")
            self.kept = None

    def fork(self, _: str) -> None:
        self.points.append(self.now.fork())
        print(f"point {len(self.points)} kept; /back returns to it", file=sys.stderr)

    def back(self, text: str) -> None:
        count = int(text) if text.isdecimal() else 1 if not text else 0
        known = (
            f"a number from 1 to {len(self.points)}"
            if self.points
            else "used after /fork, which keeps a point"
        )
        require(1 <= count <= len(self.points), "/back", text or "1", known)
        del self.points[len(self.points) - count + 1 :]
        self.now = self.points[-1].fork()
        self.start = self.now.session.start
        self._keep()
        print(f"back at point {len(self.points)}", file=sys.stderr)

    def state(self, _: str) -> None:
        size, drawn = self.now.session.nbytes, self.now.session.drawn
        print(
            f"{size:,} bytes of memory; {drawn:,} tokens drawn; {len(self.points)} points kept",
            file=sys.stderr,
        )


def _path(file: str, command: str) -> Path:
    if not file:
        raise ConfigError(f"{command} needs a file, as in {command} talk.state")
    return Path(file)
