"""Waiting for the engine on behalf of a client that may disconnect."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Generator
from concurrent.futures import Future
from typing import TypeVar

from fastapi import Request

from perspectron.decode.session import Session

T = TypeVar("T")


class Gone(Exception):
    """The client has left."""


async def heard(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled if the client disconnects. Gone: it did."""

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


async def result(request: Request, task: Future[T]) -> T:
    """The result of a task of the engine, which is given up if the client disconnects. Gone: it did."""
    return await heard(request, asyncio.wrap_future(task))


@contextlib.asynccontextmanager
async def turn(request: Request, lock: asyncio.Lock | asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold a lock while the block runs. Gone: the client left while it waited."""
    async with lock:
        if await request.is_disconnected():
            raise Gone
        yield


def back(session: Session, token: int | None) -> Generator[int, None, Session]:
    """A task: the session as it was after `token` tokens; the session itself if these are all, or `token` is None."""
    yield 0
    return session if token in (None, len(session.tokens)) else (yield from session.back_to(token))
