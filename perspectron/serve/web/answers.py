"""Completions and chats: requests to jobs of the engine, and their pieces to answers, whole or as they come."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from perspectron.config import require
from perspectron.decode.batch import Piece
from perspectron.decode.reading import check_ids
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.errors import NonFiniteError, PerspectronError
from perspectron.serve.engine import Event, Job
from perspectron.serve.web import schema
from perspectron.serve.web.metrics import Metrics

if TYPE_CHECKING:
    from perspectron.serve.web.app import Served

T = TypeVar("T")
PING = 15  # seconds between signs of life in a stream
CHAT_TOKENS = 1024  # drawn where a chat does not say how many


@dataclass
class _Choice:
    """One text of an answer as it grows."""

    text: str = ""
    finish: str | None = None
    marks: list[Piece] = field(default_factory=list)


@dataclass
class _Run:
    """Jobs of one request, and where their events arrive."""

    jobs: list[Job]
    prompt_tokens: int
    events: "asyncio.Queue[tuple[int, Event]]"
    save: str | None = None
    parent: str = ""
    slot: int | None = None
    unsaved: dict[str, str] = field(default_factory=dict)
    """What the answer says of a state that could not be saved."""

    def usage(self) -> dict[str, Any]:
        """Tokens, as OpenAI counts them; those that the store spared count as cached."""
        drawn = sum(len(job.ids) for job in self.jobs)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
            "prompt_tokens_details": {"cached_tokens": sum(max(0, job.spared - 1) for job in self.jobs)},
        }


class Answers:
    """Answers of one model."""

    def __init__(self, served: "Served", metrics: Metrics) -> None:
        self.served, self.metrics = served, metrics

    async def completions(self, body: schema.Completion, request: Request) -> Response:
        """Texts that go on after prompts."""
        prompts = _prompts(body.prompt)
        require(not (body.echo and body.logprobs is not None), "echo", True, "left out with logprobs")
        run = await self._run(body, prompts, body.max_tokens or 16, body.logprobs)
        starts = [self._text(prompts[index // body.n]) if body.echo else "" for index in range(len(run.jobs))]

        def choice(index: int, text: str, finish: str | None, marks: Sequence[Piece], first: bool) -> Any:
            said = self._legacy(marks) if body.logprobs is not None else None
            text = starts[index] + text if first else text
            return {"index": index, "text": text, "logprobs": said, "finish_reason": finish}

        frame = self._frame("cmpl-", "text_completion")
        return await self._answer(run, body, request, frame, frame, choice, choice)

    async def chat(self, body: schema.Chat, request: Request) -> Response:
        """The answer in a conversation. ConfigError: no template was given, or it fails."""
        template = self.served.template
        require(
            template is not None, "messages", f"{len(body.messages)} of a chat",
            f"a prompt for /v1/completions: {self.served.name} is a base model, served without --template",
        )  # fmt: skip
        assert template is not None
        text = template.prompt([message.model_dump() for message in body.messages])
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        tokens = body.max_completion_tokens or body.max_tokens or min(CHAT_TOKENS, self.served.largest)
        run = await self._run(body, [text], tokens, logprobs)

        def said(marks: Sequence[Piece]) -> Any:
            return {"content": [self._mark(mark) for mark in marks]} if logprobs is not None else None

        def whole(index: int, text: str, finish: str | None, marks: Sequence[Piece], _: bool) -> Any:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": said(marks), "finish_reason": finish}

        def piece(index: int, text: str, finish: str | None, marks: Sequence[Piece], first: bool) -> Any:
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            return {"index": index, "delta": delta, "logprobs": said(marks), "finish_reason": finish}

        plain, streamed = (
            self._frame("chatcmpl-", kind) for kind in ("chat.completion", "chat.completion.chunk")
        )
        return await self._answer(run, body, request, plain, streamed, whole, piece)

    async def _run(
        self, body: schema.Sampled, prompts: Sequence[str | list[int]], tokens: int, logprobs: int | None
    ) -> _Run:
        """Make the jobs of a request and hand them to the engine. ConfigError, StateError, Full: nothing was begun."""
        served, engine = self.served, self.served.engine
        require(
            tokens <= served.largest,
            "max_tokens",
            tokens,
            f"≤ {served.largest}, what this server draws at most",
        )
        single = body.n == 1 and len(prompts) == 1
        for name, value in (("save", body.save), ("id_slot", body.id_slot)):
            require(value in (None, -1) or single, name, value, "left out with n > 1 or several prompts")
        if body.save is not None:
            served.states.path(body.save)
        slot = None if body.id_slot in (None, -1) else served.slot(body.id_slot or 0)
        begun = None
        if body.state is not None:
            begun = await asyncio.to_thread(served.states.load, body.state, engine.session())
        count, loop = 0, asyncio.get_running_loop()
        run = _Run([], 0, asyncio.Queue(), body.save, body.state or "", slot)
        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
        sampling = SamplingConfig(
            body.temperature, body.top_k, body.top_p, body.min_p, body.repetition_penalty, seed=seed
        )
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        for prompt in prompts:
            ids = (
                await asyncio.to_thread(served.tokenizer.encode, prompt)
                if isinstance(prompt, str)
                else prompt
            )
            served.readable(ids)
            if begun is None or ids:
                check_ids(ids, served.tokenizer.vocab_size, 0)
            session = self._begun(ids, slot) if begun is None else begun.fork()
            session.append(ids[len(session.tokens) :] if begun is None else ids)
            count += len(session.tokens)
            for _ in range(body.n):
                index = len(run.jobs)
                own = session if single else session.fork()
                emit = _into(loop, run.events, index)
                run.jobs.append(Job(own, tokens, emit, sampling, stop, index, logprobs))
        run.prompt_tokens = count
        engine.submit(run.jobs)
        self.metrics.requests.labels(served.name).inc()
        return run

    def _begun(self, ids: Sequence[int], slot: int | None) -> Session:
        """A text that begins as `ids` do: from its slot, where that was read and nothing of it drawn, else from
        nothing."""
        held = None if slot is None else self.served.slots.get(slot)
        if held is None:
            return self.served.engine.session()
        return held.common(ids)

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
            first = await heard(request, anext(events))  # so that what cannot begin is an error, not a stream

            async def stream() -> AsyncIterator[ServerSentEvent]:
                begun = set[int]()
                try:
                    async for index, got in _chained(first, events):
                        marks = [got] if got.id is not None else []
                        choice = piece(index, got.text, _finish(got), marks, index not in begun) | _views(
                            marks
                        )
                        begun.add(index)
                        yield _event({**streamed, "choices": [choice], **run.unsaved})
                    if asked:
                        yield _event({**streamed, "choices": [], "usage": run.usage()})
                    yield ServerSentEvent("[DONE]", sep="\n")
                except PerspectronError as error:
                    yield _event(
                        {
                            "error": {
                                "message": str(error),
                                "type": "server_error",
                                "param": None,
                                "code": None,
                            }
                        }
                    )
                finally:
                    await events.aclose()

            return EventSourceResponse(stream(), ping=PING, sep="\n")
        choices = [_Choice() for _ in run.jobs]
        try:
            await heard(request, self._collect(run, choices))
        finally:
            self.served.engine.cancel(run.jobs)
        parts = [
            whole(i, got.text, got.finish, got.marks, True) | _views(got.marks)
            for i, got in enumerate(choices)
        ]
        return JSONResponse({**frame, "choices": parts, "usage": run.usage(), **run.unsaved})

    async def _collect(self, run: _Run, choices: Sequence[_Choice]) -> None:
        async for index, piece in self._events(run):
            choice = choices[index]
            choice.text += piece.text
            choice.finish = _finish(piece)
            if piece.id is not None:
                choice.marks.append(piece)

    async def _events(self, run: _Run) -> AsyncGenerator[tuple[int, Piece]]:
        """Pieces of all texts as they come, until all have ended; then what is to be kept is kept. Whoever stops
        listening lets the texts go."""
        left, start, begun = len(run.jobs), time.perf_counter(), False
        try:
            while left:
                index, event = await run.events.get()
                if isinstance(event, PerspectronError):
                    raise event
                if event.finished == "error":
                    said = "the logits are not finite; the model cannot continue this text"
                    raise NonFiniteError(event.error or said)
                if not begun:
                    begun = True
                    self.metrics.first_token.labels(self.served.name).observe(time.perf_counter() - start)
                left -= event.finished is not None
                if not left:
                    await self._keep(run)
                yield index, event
        finally:
            self.served.engine.cancel(run.jobs)

    async def _keep(self, run: _Run) -> None:
        """Save what was asked for, before the client hears that the text has ended, and whether it could be."""
        session = run.jobs[0].session
        if run.slot is not None:
            self.served.slots[run.slot] = session
        if run.save is not None:
            try:
                await asyncio.to_thread(self.served.states.save, run.save, session, run.parent)
            except PerspectronError as error:  # the text was drawn, and is answered
                path = str(self.served.states.path(run.save))
                run.unsaved = {"state_error": str(error).replace(path, run.save)}

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.served.tokenizer.decode(prompt)

    def _frame(self, prefix: str, kind: str) -> dict[str, Any]:
        id = prefix + secrets.token_hex(12)
        return {"id": id, "object": kind, "created": int(time.time()), "model": self.served.name}

    def _token(self, id: int) -> str:
        """A token as text; half a character shows as U+FFFD."""
        return (
            self.served.tokenizer.token_bytes(id).decode("utf-8", errors="replace") if id else "<|endoftext|>"
        )

    def _legacy(self, marks: Sequence[Piece]) -> dict[str, Any]:
        """Logprobs as completions have them, and the ids."""
        return {
            "tokens": [self._token(mark.id or 0) for mark in marks],
            "token_ids": [mark.id for mark in marks],
            "token_logprobs": [mark.logprob for mark in marks],
            "top_logprobs": [
                {self._token(id): value for id, value in reversed(mark.likely)} for mark in marks
            ],
        }

    def _mark(self, mark: Piece) -> dict[str, Any]:
        """Logprobs of one token as chats have them."""
        likely = [self._one(id, value) for id, value in mark.likely]
        return {**self._one(mark.id or 0, mark.logprob or 0.0), "top_logprobs": likely}

    def _one(self, id: int, logprob: float) -> dict[str, Any]:
        data = list(self.served.tokenizer.token_bytes(id))
        return {"token": self._token(id), "logprob": logprob, "bytes": data}


class Gone(Exception):
    """The client has left."""


async def heard(request: Request, work: Awaitable[T]) -> T:
    """The result of work that is cancelled when the client leaves. Gone: it has."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(leaving())
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return await task
    finally:
        left.cancel()
        task.cancel()


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _finish(piece: Piece) -> str | None:
    return "stop" if piece.finished == "end" else piece.finished


def _views(marks: Sequence[Piece]) -> dict[str, Any]:
    """Verdicts of the perspectives on each token, where they are asked."""
    verdicts = [mark.verdict for mark in marks if mark.verdict is not None]
    return {"perspectives": [verdict._asdict() for verdict in verdicts]} if verdicts else {}


def _event(value: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(value, ensure_ascii=False), sep="\n")


def _into(
    loop: asyncio.AbstractEventLoop, events: "asyncio.Queue[tuple[int, Event]]", index: int
) -> Callable[[Event], None]:
    """The path of a job's events from the engine's thread into the request's queue."""

    def emit(event: Event) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, (index, event))

    return emit


async def _chained(
    first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]
) -> AsyncIterator[tuple[int, Piece]]:
    yield first
    async for item in rest:
        yield item
