"""Completions and chats: requests become jobs of the engine, and their pieces become answers, whole or streamed."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from perspectron.decode.row import Piece
from perspectron.decode.said import Said, said_in
from perspectron.decode.saved import alike
from perspectron.decode.session import Session
from perspectron.serve.engine import Event, Job, log
from perspectron.serve.served import Served
from perspectron.serve.web import schema
from perspectron.serve.web.asked import check, constraint_of, given_to, prompt_of, sampling_of, tokens_of
from perspectron.serve.web.hearing import back, heard, result, turn
from perspectron.serve.web.likely import Completed, Mark, chatted, marks_of
from perspectron.serve.web.metrics import Metrics
from perspectron.serve.web.writing import Writing
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, PerspectronError

PING = 15  # seconds between signs of life in a stream
PATIENCE = 60  # seconds that a client may leave its stream unread
CHAT_TOKENS = 1024  # most tokens drawn where a chat sets no limit; fewer where the model lacks room
ENTRIES = 1 << 18  # most log-probabilities of prompts in one answer


class _Stream(EventSourceResponse):
    """A stream of events that ends where its client does not read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning(f"a client read nothing of its stream for {PATIENCE} s; its text is ended")


@dataclass
class _Choice:
    """One text of an answer as it grows."""

    text: str = ""
    finish: str | None = None
    marks: list[Piece] = field(default_factory=list)


@dataclass
class _Run:
    """Jobs of one request, n for each prompt, and where their events arrive. texts: how many its answer has; they have
    no jobs where nothing is drawn. echoed: log-probabilities of each prompt, if asked for."""

    jobs: list[Job]
    n: int
    texts: int
    prompt_tokens: int
    events: "asyncio.Queue[tuple[int, Event]]"
    echoed: list[list[Mark]]
    parent: str = ""
    slot: int | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of a chat; what is drawn is added to the last one."""
    given: dict[str, Any] = field(default_factory=dict)
    """Values besides the messages that the template is given."""
    begins: int = 0
    """Tokens of the session's text that come before the chat."""
    writing: Writing = field(default_factory=Writing)
    """The state as which the text is saved."""

    def usage(self) -> dict[str, Any]:
        """Tokens as OpenAI counts them, a prompt once however many choices it has. Those that a state, a slot or the
        store spared all choices count as cached, except what stands before a text."""
        drawn = sum(len(job.ids) for job in self.jobs)
        starts = range(0, len(self.jobs), self.n)
        spared = (
            min(job.spared - job.session.before for job in self.jobs[at : at + self.n]) for at in starts
        )
        cached = sum(max(0, each) for each in spared)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Answers:
    """Answers requests to one model."""

    def __init__(self, served: Served, metrics: Metrics) -> None:
        self.served, self.metrics = served, metrics

    async def completions(self, body: schema.Completion, request: Request) -> Response:
        """Continue each of the prompts."""
        prompts, tokens = body.prompt, 16 if body.max_tokens is None else body.max_tokens
        run = await self._run(body, prompts, tokens, body.logprobs, request, cut=body.max_tokens is None)
        tokenizer, echoed = self.served.tokenizer, run.echoed or [[] for _ in prompts]
        starts = [self._text(prompts[index // body.n]) if body.echo else "" for index in range(run.texts)]
        begins = [body.state is None and not self._text(prompt) for prompt in prompts]
        writers = [
            Completed(tokenizer, echoed[i // body.n], start, begins=begins[i // body.n])
            for i, start in enumerate(starts)
        ]

        def choice(index: int, text: str, finish: str | None, pieces: Sequence[Piece], first: bool) -> Any:
            said = writers[index].write(marks_of(pieces)) if body.logprobs is not None else None
            text = starts[index] + text if first else text
            return {"index": index, "text": text, "logprobs": said, "finish_reason": finish}

        frame = self._frame("cmpl-", "text_completion")
        return await self._answer(run, body, request, frame, frame, choice, choice)

    async def chat(self, body: schema.Chat, request: Request) -> Response:
        """Answer in a conversation. ConfigError: the model has no template, or it fails."""
        template = self.served.template
        require(
            template is not None, "messages", f"{len(body.messages)} of a chat",
            f"a prompt for /v1/completions: {self.served.name} is a base model, served without --template",
        )  # fmt: skip
        assert template is not None
        async with turn(
            request, self.served.rendering
        ):  # so that templates never hold more than one thread of a model
            text = await asyncio.to_thread(prompt_of, body, template, self.served.tokenizer)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        ids = await self.served.ids(text, turn(request, self.served.encoding))
        given = tokens_of(body)
        tokens = min(CHAT_TOKENS, self.served.largest) if given is None else given
        run = await self._run(body, [ids], tokens, logprobs, request, cut=given is None)

        run.messages = [one.seen(parts=False) | {"content": one.said} for one in body.messages]
        run.given = given_to(body)
        if not body.continue_final_message:
            run.messages.append({"role": "assistant", "content": ""})

        def said(pieces: Sequence[Piece]) -> Any:
            return chatted(self.served.tokenizer, marks_of(pieces)) if logprobs is not None else None

        def whole(index: int, text: str, finish: str | None, pieces: Sequence[Piece], _: bool) -> Any:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": said(pieces), "finish_reason": finish}

        def piece(index: int, text: str, finish: str | None, pieces: Sequence[Piece], first: bool) -> Any:
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            return {"index": index, "delta": delta, "logprobs": said(pieces), "finish_reason": finish}

        plain, streamed = (
            self._frame("chatcmpl-", kind) for kind in ("chat.completion", "chat.completion.chunk")
        )
        return await self._answer(run, body, request, plain, streamed, whole, piece)

    async def _run(
        self,
        body: schema.Sampled,
        prompts: Sequence[str | list[int]],
        tokens: int,
        logprobs: int | None,
        request: Request,
        *,
        cut: bool,
    ) -> _Run:
        """Make the jobs of a request and hand them to the engine, under a lease of the name to save to. cut: draw fewer
        tokens, where the model has no room for all of them. ConfigError, StateError, Full, Busy: nothing was begun."""
        check(body, prompts, tokens, self.served)
        writing = await Writing.of(self.served.states, body.save)
        try:
            run = await self._begin(body, prompts, tokens, logprobs, request, cut)
        except BaseException:
            writing.let_go()
            raise
        run.writing = writing
        return run

    async def _begin(
        self,
        body: schema.Sampled,
        prompts: Sequence[str | list[int]],
        tokens: int,
        logprobs: int | None,
        request: Request,
        cut: bool,
    ) -> _Run:
        served, engine = self.served, self.served.engine
        single = body.n == 1 and len(prompts) == 1
        constraint = await constraint_of(body, served.tokenizer, turn(request, served.compiling))
        hooks = () if constraint is None else (constraint,)
        slot = None if body.id_slot in (None, -1) else served.slot(body.id_slot or 0)
        begun = None
        if body.state is not None:
            begun = await asyncio.to_thread(served.states.load, body.state, engine.session())
        begins, asked = 0, [await served.ids(each, turn(request, served.encoding)) for each in prompts]
        read = asked
        whole = isinstance(body, schema.Chat) and served.tokenizer.specials.lacks(read[0])
        if begun is not None and isinstance(body, schema.Chat):
            begun, read, begins = await self._agreed(begun, read[0], body, request)
        elif begun is None:
            read = [served.tokenizer.specials.bare(ids) for ids in read]
        run = _Run(
            [], body.n, body.n * len(prompts), 0, asyncio.Queue(), [], body.state or "", slot, begins=begins
        )
        if isinstance(body, schema.Completion) and body.echo and logprobs is not None:
            run.echoed = await self._echoed(asked, body, logprobs, begun, request)
        sampling = sampling_of(body, served.sampling)
        for ids in read:
            held = slot if body.cache_prompt else None
            session = self._begun(ids, held, whole) if begun is None else begun.fork()
            more = ids[len(session.tokens) :] if begun is None else ids
            await asyncio.to_thread(session.append, more, whole=whole)  # which looks at each of them
            run.prompt_tokens += len(session.tokens)
            left = session.left if cut else None
            most = tokens if left is None else min(tokens, max(left, 1))
            for _ in range(body.n if tokens else 0):
                index = len(run.jobs)
                own = session if single else session.fork()
                emit = _into(asyncio.get_running_loop(), run.events, index)
                job = Job(own, most, emit, sampling, body.stop, index, logprobs, hooks, body.min_tokens)
                job.stop_ids, job.shares = body.stop_token_ids, body.cache_prompt
                run.jobs.append(job)
        for index in range(0 if tokens else run.texts):
            run.events.put_nowait((index, Piece(index, None, "", "length")))
        engine.submit(run.jobs)
        self.metrics.requests.labels(served.name).inc()
        return run

    async def _echoed(
        self,
        read: Sequence[list[int]],
        body: schema.Completion,
        count: int,
        begun: Session | None,
        request: Request,
    ) -> list[list[Mark]]:
        """Log-probabilities of the tokens of prompts; none for a text's first one, or its prefix, as clients expect."""
        entries = body.n * sum(map(len, read)) * (count + 1)
        bound = f"left out for more than {ENTRIES:,} of them at once; these prompts have {entries:,}"
        require(entries <= ENTRIES, "logprobs", count, bound)
        found = list[list[Mark]]()
        for ids in read:
            session = self.served.engine.session() if begun is None else begun
            task = session.likely(ids, count, shares=body.cache_prompt)
            pairs = await result(request, self.served.engine.run(task))
            prefix = len(ids) - len(self.served.tokenizer.specials.bare(ids))
            unsaid = max(len(ids) - len(pairs), 0 if begun is not None else max(1, prefix))
            first = [Mark(id, None, ()) for id in ids[:unsaid]]
            rest = ids[unsaid:]
            said = pairs[len(pairs) - len(rest) :]
            found.append([*first, *(Mark(id, *pair) for id, pair in zip(rest, said, strict=True))])
        return found

    async def _agreed(
        self, session: Session, ids: list[int], body: schema.Chat, request: Request
    ) -> tuple[Session, list[list[int]], int]:
        """(the session to go on from, the prompts to read there, the tokens of its text before the chat). Of a chat
        that begins with the saved text, or with the conversation in it, the rest is read; of one that parts from it and
        has answers, what follows the part that both share, as templates may write earlier turns in another way; any
        other chat is read as a whole, after the text."""
        begins, bare = said_in(session.extra).start, self.served.tokenizer.specials.bare(ids)
        own = session.tokens[begins:]  # none, where a file claims more than there are
        shared = alike(own, bare) if begins else session.shared(ids, whole=True)
        answered = any(message.role == "assistant" for message in body.messages)
        if shared < len(own) and not (answered and shared):
            return session, [bare], len(session.tokens)
        if shared < len(own):
            task = back(session, begins + shared)
            try:
                session = await result(request, self.served.engine.run(task))
            except ConfigError:
                raise ConfigError(
                    f"messages: state {body.state!r} comes from a file without the beginning of its text, and cannot "
                    "go back to where these messages part from it; send those after it alone, without answers"
                ) from None
        return session, [bare[shared:]], begins

    def _begun(self, ids: Sequence[int], slot: int | None, whole: bool) -> Session:
        """A session for `ids`: what they share with their slot's, if that was read and none of it drawn, else a new
        one."""
        held = None if slot is None else self.served.slots.get(slot)
        if held is None:
            return self.served.engine.session()
        return held.common(ids, whole=whole)

    async def _answer(
        self,
        run: _Run,
        body: schema.Sampled,
        request: Request,
        frame: dict[str, Any],
        streamed: dict[str, Any],
        whole: Callable[..., Any],
        piece: Callable[..., Any],
    ) -> Response:
        """The response: one object, or a stream of them."""
        asked = body.stream_options is not None and body.stream_options.include_usage
        if body.stream:
            events = self._events(run)
            try:
                first = await heard(
                    request, anext(events)
                )  # so that what cannot begin is an error, not a stream
            except BaseException:
                run.writing.let_go()
                raise

            async def stream() -> AsyncIterator[ServerSentEvent]:
                begun = set[int]()
                item: tuple[int, Piece] | None = first
                try:
                    while item is not None:
                        index, got = item
                        marks = [got] if got.id is not None else []
                        choice = piece(index, got.text, _finish(got), marks, index not in begun) | _views(
                            marks
                        )
                        begun.add(index)
                        yield _event({**streamed, "choices": [choice], **run.writing.error})
                        item = await anext(events, None)
                    if asked:
                        yield _event({**streamed, "choices": [], "usage": run.usage()})
                    yield ServerSentEvent("[DONE]", sep="\n")
                except PerspectronError as error:
                    failure = {"message": str(error), "type": "server_error", "param": None, "code": None}
                    yield _event({"error": failure})
                finally:
                    await events.aclose()

            return _Stream(stream(), ping=PING, sep="\n", send_timeout=PATIENCE)
        choices = [_Choice() for _ in range(run.texts)]
        try:
            await heard(request, self._collect(run, choices))
        finally:
            self.served.engine.cancel(run.jobs)
            run.writing.let_go()

        def response() -> Response:
            parts = [
                whole(i, got.text, got.finish, got.marks, True) | _views(got.marks)
                for i, got in enumerate(choices)
            ]
            return JSONResponse({**frame, "choices": parts, "usage": run.usage(), **run.writing.error})

        return await asyncio.to_thread(response)  # of a long text it takes a while

    async def _collect(self, run: _Run, choices: Sequence[_Choice]) -> None:
        async for index, piece in self._events(run):
            choice = choices[index]
            choice.text += piece.text
            choice.finish = _finish(piece)
            if piece.id is not None:
                choice.marks.append(piece)

    async def _events(self, run: _Run) -> AsyncGenerator[tuple[int, Piece]]:
        """Pieces of all texts as they come, until all have ended; then save what was asked for. If the caller stops
        iterating, the texts are cancelled."""
        left, start, begun = run.texts, time.perf_counter(), False
        try:
            while left:
                index, event = await run.events.get()
                if isinstance(event, PerspectronError):
                    raise event
                if event.error is not None:
                    raise event.error
                if not begun:
                    begun = True
                    self.metrics.first_token.labels(self.served.name).observe(time.perf_counter() - start)
                if run.messages:
                    run.messages[-1]["content"] += event.text
                left -= event.finished is not None
                if not left:
                    await self._keep(run)
                yield index, event
        finally:
            self.served.engine.cancel(run.jobs)
            run.writing.let_go()

    async def _keep(self, run: _Run) -> None:
        """Save what was asked for, before the client hears that the text has ended and whether it was saved."""
        if run.slot is not None:
            self.served.slots[run.slot] = run.jobs[0].session
        if run.jobs:
            run.jobs[0].session.extra = Said(tuple(run.messages), run.begins, given=run.given).extra()
            await run.writing.save(run.jobs[0].session, run.parent)

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.served.tokenizer.decode(prompt)

    def _frame(self, prefix: str, kind: str) -> dict[str, Any]:
        id = prefix + secrets.token_hex(12)
        return {"id": id, "object": kind, "created": int(time.time()), "model": self.served.name}


def _finish(piece: Piece) -> str | None:
    return "stop" if piece.finished == "end" else piece.finished


def _views(marks: Sequence[Piece]) -> dict[str, Any]:
    """Verdicts of hooks on each token, by their names."""
    found = dict[str, list[Any]]()
    for mark in marks:
        for name, verdict in mark.verdicts.items():
            found.setdefault(name, []).append(verdict._asdict())
    return found


def _event(value: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(value), sep="\n")  # ASCII: some clients split lines at U+2028, too


def _into(
    loop: asyncio.AbstractEventLoop, events: "asyncio.Queue[tuple[int, Event]]", index: int
) -> Callable[[Event], None]:
    """A function that passes a job's events from the engine's thread into the request's queue."""

    def emit(event: Event) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, (index, event))

    return emit
