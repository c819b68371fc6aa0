"""Questions of exactness to any server: whether an answer depends on anything but its own request.

Each question asks for the same answer in two ways and compares texts, tokens and log-probabilities. The reference is a
prompt that is read from its first token while nothing else is asked."""

import math
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from perspectron.eval.engines import Answer, EngineError, NotOffered, Prompt, Server, difference
from perspectron.util.config import require

EXACT, CLOSE, SAME, DIFFERS, FAILED, MISSING = (
    "exact", "within tolerance", "same texts", "differs", "failed", "not offered",
)  # fmt: skip
"""exact: texts and log-probabilities are equal to the last digit. same texts: log-probabilities differ. within
tolerance: they differ by no more than is allowed. failed: the server gave an error instead of an answer."""
FAULTS = (SAME, DIFFERS, FAILED)
MORE = 24  # tokens of a turn after an answer
SHOWN = 3
"""Most differences of a question that a report shows."""

THINGS = (  # noqa: SIM905
    "lamp river clock garden window letter bridge candle market harbour engine violin forest mirror castle "
    "kettle ladder meadow needle orchard pencil quarry ribbon saddle tunnel valley wagon anchor barrel compass"
).split()
DEEDS = (
    "carries",
    "watches",
    "paints",
    "repairs",
    "remembers",
    "counts",
    "hides",
    "describes",
    "measures",
    "borrows",
)
WHO = (
    "The teacher",
    "A sailor",
    "My neighbour",
    "The old baker",
    "Her brother",
    "The clerk",
    "A young doctor",
)


@dataclass
class Row:
    """A question and its result. compared: answers; numbers: log-probabilities among them. texts: how many answers had
    another text or other tokens. largest: difference of log-probabilities. reused: tokens of prompts that were not read
    again, and all of these prompts, if the server tells them. shown: what was unequal. requests: as they were sent,
    prompts as numbers of tokens."""

    question: str
    way: str
    verdict: str = MISSING
    compared: int = 0
    numbers: int = 0
    texts: int = 0
    largest: float = 0.0
    reused: tuple[int, int] | None = None
    note: str = ""
    shown: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Settings of the questions. length: tokens of a prompt, about. tokens: of an answer. texts: prompts asked at once.
    rounds: how often a question that may depend on chance is asked. tolerance: of log-probabilities. only: beginnings
    of the names of questions to ask; empty is all. seed: of the prompts' words."""

    length: int = 300
    tokens: int = 24
    texts: int = 4
    rounds: int = 2
    tolerance: float = 0.0
    only: tuple[str, ...] = ()
    seed: int = field(default_factory=lambda: secrets.randbits(32))


class Asked:
    """Questions to one server under a plan. on_row: called with each row as it is done."""

    def __init__(
        self,
        server: Server,
        plan: Plan,
        *,
        beside: Server | None = None,
        on_row: Callable[[Row], object] = lambda _: None,
    ) -> None:
        self.server, self.plan, self.beside, self.on_row = server, plan, beside, on_row
        self.rows = list[Row]()
        self._row = Row("", "")
        self._asked = 0
        self._read = self._cached = 0
        server.log = self._noted

    def all(self) -> list[Row]:
        """Ask all questions that are chosen; their rows."""
        for question, way, ask in self.chosen():
            self._row = Row(question, way)
            self._read = self._cached = 0
            try:
                ask()
                self._row.verdict = self._verdict()
            except NotOffered as error:
                differs = self._row.texts or self._row.largest > 0
                self._row.verdict, self._row.note = self._verdict() if differs else MISSING, str(error)
            except EngineError as error:
                self._row.verdict, self._row.note = FAILED, str(error)
            if self._read:
                self._row.reused = (self._cached, self._read)
            self.rows.append(self._row)
            self.on_row(self._row)
        return self.rows

    def chosen(self) -> list[tuple[str, str, Callable[[], None]]]:
        """The `questions` that the plan asks. ConfigError: it names one that does not exist."""
        every = [*self.questions()]
        names = [*dict.fromkeys(question for question, _, _ in every)]
        for name in self.plan.only:
            known = any(one.startswith(name) for one in names)
            require(known, "only", name, f"the beginning of one of: {'; '.join(names)}")
        return [each for each in every if not self.plan.only or each[0].startswith(self.plan.only)]

    def questions(self) -> Iterator[tuple[str, str, Callable[[], None]]]:
        """(question, way, function that asks it) of all questions."""
        yield "repeated = repeated", "greedy", self.repeated
        yield "repeated = repeated", "drawn with a seed", self.seeded
        yield "logprobs on = off", "completions", self.logprobs
        yield "streamed = not streamed", "completions", self.streamed
        yield "in pieces = at once", "a prompt after its beginnings", self.pieces
        yield "in pieces = at once", "a turn after an answer", self.turn
        yield "stopped = never stopped", "an answer in two requests", self.stopped
        yield "rolled back = never read", "the same again", self.regenerated
        yield "rolled back = never read", "the end edited", lambda: self.edited(8)
        yield "rolled back = never read", "the middle edited", lambda: self.edited(self.plan.length // 2)
        yield "rolled back = never read", "cut short", self.cut
        for name, ask in self._restores():
            yield "restored = never stopped", name, ask
        yield "alone = in a batch", f"{self.plan.texts} at once, read anew", self.batch
        yield (
            "alone = in a batch",
            f"{self.plan.texts} at once, after their beginnings",
            lambda: self.batch(warm=True),
        )
        yield "chat", "repeated, streamed, without logprobs", self.chat
        yield "chat", "answered again, edited", self.chat_back
        if self.beside is not None:
            yield "one server = another", self.beside.url, self.other

    def _restores(self) -> Iterator[tuple[str, Callable[[], None]]]:
        if self.server.keeping == "perspectron":
            yield "a saved state", self.state
            yield "a saved state, twice", lambda: self.state(times=2)
            yield "a turn after a saved state", self.state_turn
            return
        yield "the slot it was in", lambda: self.restored(0)
        yield "another slot", lambda: self.restored(1)
        yield "a turn after a restore", lambda: self.restored(0, turn=True)
        yield "an edit after a restore", lambda: self.restored(0, edit=True)

    # Parts of questions

    def text(self, length: int | None = None, number: int | None = None) -> str:
        """A text of about so many tokens that no other question has used, not even its first words."""
        if number is None:
            self._asked += 1
        draw = random.Random(f"{self.plan.seed}/{self._asked if number is None else number}")
        words = f"Note {draw.randrange(10**6)}."
        for _ in range(1 + (length or self.plan.length) // 8):
            words += f" {draw.choice(WHO)} {draw.choice(DEEDS)} the {draw.choice(THINGS)} by the {draw.choice(THINGS)}."
        return words

    def prompt(self, length: int | None = None) -> Prompt:
        """Exactly so many tokens of a text, if the server tells them; else a text that is long enough for them."""
        length = length or self.plan.length
        found = self.server.encode(self.text(2 * length))
        return found if isinstance(found, str) else found[:length]

    def more(self, number: int) -> Prompt:
        """Text to put behind a prompt or an answer, or its tokens; it depends on the number."""
        found = self.server.encode(f" Then {self.text(16, -number)}")
        return found if isinstance(found, str) else found[:MORE]

    def end(self, length: int) -> Prompt:
        """So many tokens for the end of a prompt, different each time."""
        self._asked += 1
        draw = random.Random(f"{self.plan.seed}/{self._asked}")
        found = self.server.encode("".join(f" {draw.choice(THINGS)}" for _ in range(length)))
        return found if isinstance(found, str) else found[:length]

    def draw(self, prompt: Prompt, tokens: int | None = None, **how: Any) -> Answer:
        """An answer of the length of the plan."""
        return self.server.complete(prompt, tokens or self.plan.tokens, **how)

    def warm(self, prompt: Prompt, tokens: int | None = None, **how: Any) -> Answer:
        """An answer that may reuse what was read before; the reuse is counted."""
        answer = self.draw(prompt, tokens, slot=self._slot(), **how)
        self._count(answer)
        return answer

    def anew(self, prompt: Prompt, tokens: int | None = None, **how: Any) -> Answer:
        """The answer of a prompt that is read from its first token."""
        return self.draw(prompt, tokens, fresh=True, **how)

    def compare(self, wanted: Answer, found: Answer, way: str = "") -> None:
        """Compare two answers, and count in the row what is unequal."""
        row, apart = self._row, difference(wanted, found)
        row.compared, row.numbers = row.compared + 1, row.numbers + apart.compared
        if apart.exact:
            return
        row.texts += apart.texts or apart.at is not None
        row.largest = max(row.largest, apart.largest)
        if len(row.shown) < SHOWN:
            row.shown.append(
                {
                    "way": way,
                    "at": apart.at,
                    "largest": apart.largest,
                    "wanted": wanted.shown(),
                    "found": found.shown(),
                }
            )

    def compared_after(self, prompt: Prompt, before: Callable[[], object], way: str = "") -> None:
        """Compare a prompt that is asked after something with the same prompt read from its first token. Where only a
        prompt that was never asked is read anew, that comes first."""
        if self.server.fresh_by == "first":
            wanted = self.anew(prompt)
            before()
            self.compare(wanted, self.warm(prompt), way)
        else:
            before()
            found = self.warm(prompt)
            self.compare(self.anew(prompt), found, way)

    def _slot(self) -> int | None:
        return 0 if self.server.keeping == "llama.cpp" else None

    def _count(self, answer: Answer) -> None:
        if answer.cached is not None and answer.read is not None:
            self._cached, self._read = self._cached + answer.cached, self._read + answer.read

    def _verdict(self) -> str:
        row = self._row
        if row.texts:
            return DIFFERS
        if row.largest == 0:
            return EXACT
        return CLOSE if row.largest <= self.plan.tolerance else SAME

    def _noted(self, entry: dict[str, Any]) -> None:
        self._row.requests.append(entry)

    # Questions

    def repeated(self) -> None:
        """The same prompt, read anew each time."""
        prompt = self.prompt()
        wanted = self.anew(prompt)
        for _ in range(self.plan.rounds):
            self.compare(wanted, self.anew(prompt))

    def seeded(self) -> None:
        """The same prompt and seed at temperature 1."""
        prompt = self.prompt()
        how: dict[str, Any] = {"temperature": 1.0, "seed": 7}
        wanted = self.anew(prompt, **how)
        for _ in range(self.plan.rounds):
            self.compare(wanted, self.anew(prompt, **how))

    def logprobs(self) -> None:
        """The same prompt without log-probabilities, and with other numbers of them."""
        if not self.server.logprobs:
            raise NotOffered("no log-probabilities of completions")
        prompt = self.prompt()
        wanted = self.anew(prompt)
        for count in (None, 1):
            found = self.anew(prompt, likely=count)
            self.compare(wanted, found, f"logprobs: {count}")

    def streamed(self) -> None:
        """The same prompt as a stream."""
        prompt = self.prompt()
        wanted = self.anew(prompt)
        for _ in range(self.plan.rounds):
            self.compare(wanted, self.anew(prompt, stream=True))

    def pieces(self) -> None:
        """A prompt of which a part was read before, up to all of it but one token."""
        for share in (0.25, 0.5, 0.9, 1.0):
            prompt = self.prompt()
            end = min(len(prompt) - 1, round(share * len(prompt)))
            end = end if not isinstance(prompt, str) else max(1, prompt.rfind(" ", 0, end))
            self.compared_after(prompt, partial(self.warm, prompt[:end], 1), f"after {share:.0%} of it")

    def turn(self) -> None:
        """A prompt, its answer and more, where prompt and answer were read already."""
        prompt = self.prompt()
        for number in range(self.plan.rounds):
            answer = self.warm(prompt) if self.server.fresh_by != "first" else self.anew(prompt)
            prompt = _join(prompt, self._drawn(answer), self.more(number))
            found = self.warm(prompt)
            self.compare(self.anew(prompt), found, f"turn {number + 1}")

    def regenerated(self) -> None:
        """A prompt again after its own answer, twice."""
        prompt = self.prompt()
        wanted = self.anew(prompt)
        for number in range(1 + self.plan.rounds):
            found = self.warm(prompt)
            self.compare(wanted, found, f"time {number + 1}")

    def edited(self, last: int) -> None:
        """A prompt after another that differs in the last tokens alone, and that one's answer."""
        start = self.prompt(self.plan.length - last)
        one, other = (_join(start, self.end(last)) for _ in "12")
        self.compared_after(other, lambda: self.warm(one), f"the last {last} tokens are others")
        self.compared_after(one, lambda: self.warm(other), "and back")

    def cut(self) -> None:
        """The beginning of a prompt, after all of it and its answer."""
        prompt = self.prompt()
        for share in (0.9, 0.5):
            end = round(share * len(prompt))
            end = end if not isinstance(prompt, str) else max(1, prompt.rfind(" ", 0, end))
            self.compared_after(prompt[:end], lambda: self.warm(prompt), f"{share:.0%} of it")

    def _drawn(self, answer: Answer) -> Prompt:
        """The tokens of an answer, to be part of a prompt; its text where prompts are texts."""
        if not self.server.tokenizes:
            return answer.text or ""
        if not answer.ids:
            return self.server.encode(answer.text or "")
        return list(answer.ids)

    def stopped(self) -> None:
        """Half an answer, then the rest by a request whose prompt has that half; compared with the whole answer."""
        prompt, half = self.prompt(), self.plan.tokens // 2
        whole = self.anew(prompt, 2 * half, slot=self._slot())
        first = self.anew(prompt, half, slot=self._slot())
        if not self.server.tokenizes:
            raise NotOffered("no route /tokenize, which gives the tokens to go on from")
        _require_half(first, half)
        found = self.warm([*prompt, *first.ids], half)
        self.compare(_rest(whole, first), found, "the second half")

    def restored(self, slot: int, *, turn: bool = False, edit: bool = False) -> None:
        """Half an answer, saved, erased and restored, then the other half; compared with the whole answer at once.
        turn: compared with the same turn in a slot that was not saved. edit: with the same edit, read anew."""
        server, name = self.server, f"exactness-{secrets.token_hex(4)}.bin"
        if server.keeping != "llama.cpp":
            raise NotOffered("nothing is saved and restored (--save)")
        if slot >= server.slots:
            raise NotOffered(f"there is one slot: slot {slot} is not there")
        if not server.tokenizes:
            raise NotOffered("no route /tokenize, which gives the tokens to go on from")
        prompt, half = self.prompt(), self.plan.tokens // 2
        whole = self.anew(prompt, 2 * half, slot=0)
        first = self.anew(prompt, half, slot=0)
        _require_half(first, half)
        on = [*prompt, *first.ids]
        if turn:
            on = [*on, *self.more(1)]
        elif edit:
            on = [*on[: len(prompt) - 8], *self.more(1)]
        unsaved = None
        if turn:
            unsaved = self.warm(on, half)
            self._count_off(unsaved)
            again = self.anew(prompt, half, slot=0)
            self.compare(first, again, "the same first half")
        server.save(0, name)
        server.erase(0)
        self.anew(self.prompt(), 2, slot=0)  # others use the slot meanwhile
        server.restore(slot, name)
        found = server.complete(on, half, slot=slot)
        self._count(found)
        if edit:
            self.compare(self.anew(on, half), found, "edited after a restore")
        elif unsaved is not None:
            self.compare(unsaved, found, "a turn after a restore")
        else:
            self.compare(_rest(whole, first), found, "the second half after a restore")

    def _count_off(self, answer: Answer) -> None:
        """Take back what `warm` counted: reuse is only reported for the restored text."""
        if answer.cached is not None and answer.read is not None:
            self._cached, self._read = self._cached - answer.cached, self._read - answer.read

    def state(self, times: int = 1) -> None:
        """A part of an answer, saved as a state, and the rest from there; compared with the whole answer at once."""
        server, names = self.server, [f"exactness-{secrets.token_hex(4)}" for _ in range(times)]
        prompt, part = self.prompt(), self.plan.tokens // (times + 1)
        whole = self.anew(prompt, part * (times + 1))
        found = self.anew(prompt, part, save=names[0])
        try:
            for index, name in enumerate(names):
                self.compare(_part(whole, index * part, part), found, f"part {index + 1}")
                _require_going_on(found)
                self.anew(self.prompt(), 2)
                more: dict[str, Any] = {"save": names[index + 1]} if index + 1 < times else {}
                found = server.complete("", part, state=name, **more)
            self.compare(_rest(whole, _part(whole, 0, times * part)), found, f"part {times + 1}")
        finally:
            for name in names:
                server.forget(name)

    def state_turn(self) -> None:
        """A turn after the saved state of a prompt, twice, compared with each other and with the whole read anew; and
        after a fork of the state 8 tokens back, compared with that read anew."""
        server, name = self.server, f"exactness-{secrets.token_hex(4)}"
        prompt, half = self.prompt(), self.plan.tokens // 2
        try:
            server.ask("POST", "/v1/states", {"id": name, "prompt": prompt})
            more = self.more(1)
            found = server.complete(more, half, state=name)
            again = server.complete(more, half, state=name)
            self.compare(found, again, "the same state twice")
            self.compare(self.anew(_join(prompt, more), half), found, "beside the whole prompt")
            server.ask("POST", f"/v1/states/{name}/fork", {"id": name + "-cut", "token": len(prompt) - 8})
            found = server.complete(more, half, state=name + "-cut")
            self.compare(self.anew(_join(prompt[:-8], more), half), found, "8 tokens back")
        finally:
            server.forget(name)
            server.forget(name + "-cut")

    def batch(self, *, warm: bool = False) -> None:
        """Each of some prompts of different lengths alone, then all at once. warm: after beginnings of them that were
        read before, each in its slot."""
        count = self.plan.texts
        for _ in range(self.plan.rounds):
            prompts = [self.prompt(max(8, self.plan.length * (i + 1) // count)) for i in range(count)]
            alone = [self.anew(prompt) for prompt in prompts]
            if warm:
                for i, prompt in enumerate(prompts):
                    self.draw(prompt[: len(prompt) // 2], 1, slot=self._of(i))
            calls = [
                partial(
                    self.draw, prompt, fresh=not warm, slot=self._of(i) if warm else None, stream=i % 2 == 1
                )
                for i, prompt in enumerate(prompts)
            ]
            for i, (wanted, found) in enumerate(zip(alone, self.server.together(calls), strict=True)):
                self.compare(wanted, found, f"text {i + 1} of {count}")
        if self.server.keeping == "llama.cpp" and self.server.slots < 2:
            self._row.note = "one slot: texts wait for each other"

    def _of(self, text: int) -> int | None:
        """The slot of a text, one for each if there are enough; else None."""
        return text if self.plan.texts <= self.server.slots else None

    def chat(self) -> None:
        """A chat again, as a stream, and without log-probabilities."""
        messages = self._messages(self.text())
        tokens = self.plan.tokens
        wanted = self.server.chat(messages, tokens, fresh=True)
        for way, how in {
            "again": {}, "streamed": {"stream": True}, "without logprobs": {"likely": None},
        }.items():  # fmt: skip
            found = self.server.chat(messages, tokens, fresh=True, **how)  # type: ignore[arg-type]
            self.compare(wanted, found, way)

    def chat_back(self) -> None:
        """A chat's answer again after its own, a further turn, and its last message edited; each beside the same chat
        read anew."""
        server, tokens, slot = self.server, self.plan.tokens, self._slot()
        one = self._messages(self.text())
        other = self._messages(one[-1]["content"] + " " + self.text(8))
        wanted = [server.chat(chat, tokens, fresh=True) for chat in (one, other)]
        turn = [
            *one,
            {"role": "assistant", "content": wanted[0].text or ""},
            {"role": "user", "content": "And then?"},
        ]
        for way, chat, right in (
            ("first", one, wanted[0]), ("again", one, wanted[0]), ("edited", other, wanted[1]),
            ("edited back", one, wanted[0]), ("a further turn", turn, None), ("back again", other, wanted[1]),
        ):  # fmt: skip
            found = server.chat(chat, tokens, slot=slot)
            self._count(found)
            if right is None:
                aside = server.slots - 1 if server.slots else None  # its text is not needed
                right = server.chat(chat, tokens, fresh=True, slot=aside)
            self.compare(right, found, way)

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = {"role": "system", "content": "You answer in one sentence."}
        return [system, {"role": "user", "content": f"Go on with this: {text}"}]

    def other(self) -> None:
        """Prompts of several lengths, read anew by both servers."""
        assert self.beside is not None
        for share in (0.1, 0.5, 1.0):
            prompt = self.prompt(max(2, round(share * self.plan.length)))
            found = self.beside.complete(prompt, self.plan.tokens, fresh=True)
            self.compare(self.anew(prompt), found, f"{len(prompt)} of it")


def _join(*parts: Prompt) -> Prompt:
    """Prompts joined into one; texts with a space where they would meet without one."""
    if all(isinstance(part, str) for part in parts):
        text = ""
        for part in parts:
            gap = "" if not text or text[-1:].isspace() or str(part)[:1].isspace() else " "
            text += gap + str(part)
        return text
    return [id for part in parts for id in part]  # type: ignore[misc]


def _require_half(first: Answer, half: int) -> None:
    """NotOffered unless all ids of the first half of an answer are known."""
    _require_going_on(first)
    if len(first.ids) != half:
        raise NotOffered("no ids of all the tokens that were drawn")


def _require_going_on(part: Answer) -> None:
    """NotOffered where the model ended its text in a part of an answer."""
    if part.finish not in (None, "length"):
        raise NotOffered("the model ended its text before it could be stopped")


def _rest(whole: Answer, first: Answer) -> Answer:
    """The rest of an answer after its first part."""
    return _part(whole, len(first.tokens) or len(first.ids), len(whole.tokens))


def _part(whole: Answer, start: int, count: int) -> Answer:
    """So many tokens of an answer from `start` on; finish is the answer's if they reach its end, else "length"."""
    end = start + count
    last = end >= len(whole.tokens)
    return Answer(
        None, whole.finish if last else "length", whole.ids[start:end],
        whole.tokens[start:end], whole.logprobs[start:end], whole.top[start:end],
    )  # fmt: skip


def holds(rows: Sequence[Row]) -> bool:
    """True if no question found a difference or failed; one that is not offered counts neither way."""
    return not any(row.verdict in FAULTS for row in rows)


def digits(value: float) -> str:
    """A difference of log-probabilities in few characters."""
    return "0" if value == 0 else "inf" if math.isinf(value) else f"{value:.1e}"
