"""Work of the engine for a client that may leave."""

import asyncio
from collections.abc import Awaitable, Generator
from typing import TypeVar

from fastapi import Request

from perspectron.decode.session import Session

T = TypeVar("T")


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


def back(session: Session, token: int | None) -> Generator[int, None, Session]:
    """A session as it was after so many tokens; itself, where that is all of them."""
    yield 0
    return session if token in (None, len(session.tokens)) else (yield from session.back_to(token))
