"""Saving states under leases, off the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from perspectron.decode.session import Session
from perspectron.serve.states import About, States
from perspectron.util.errors import PerspectronError, StorageError
from perspectron.util.lease import Lease


@dataclass
class Writing:
    """The state as which an answer is to be saved, if at all. error: a field of the answer that says why it was not
    saved; the text is drawn all the same."""

    states: States | None = None
    name: str = ""
    lease: Lease | None = None
    error: dict[str, str] = field(default_factory=dict)

    @classmethod
    async def of(cls, states: States, name: str | None) -> "Writing":
        """Prepare to save under a name (None: not at all), with a lease of it. Busy: somebody else writes to it."""
        made = cls(states, name or "")
        if name is not None:
            try:
                made.lease = await leased(states, name)
            except StorageError as error:
                made.error = {"state_error": str(error)}
        return made

    async def save(self, session: Session, parent: str) -> None:
        """Save the text and let the lease go, before the client may ask again."""
        if self.states is None or self.lease is None:
            return
        states, lease = self.states, self.lease
        self.lease = None  # if the request ends meanwhile, the save still lets it go

        def saved() -> None:
            try:
                states.save(self.name, session, parent, lease)
            finally:
                states.leases.let_go(lease)

        # Not `to_thread`: a request that ends before a thread has begun would cancel it, and keep the lease for ever.
        work = asyncio.get_running_loop().run_in_executor(None, saved)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(work)
        except PerspectronError as error:
            self.error = {"state_error": str(error)}

    def let_go(self) -> None:
        """Let the lease go, in the background."""
        if self.states is not None and self.lease is not None and not self.lease.over:
            asyncio.get_running_loop().run_in_executor(None, self.states.leases.let_go, self.lease)


async def leased(states: States, name: str) -> Lease:
    """A lease of the name of a state. Busy: somebody else has one and renews it. StorageError: the store fails."""
    at = f"{states.place}/{name}"
    for pause in states.leases.pauses(at):
        if (lease := await asyncio.to_thread(states.leases.tried, at)) is not None:
            return lease
        await asyncio.sleep(pause)
    raise AssertionError


@contextlib.asynccontextmanager
async def writing(states: States, name: str) -> AsyncIterator[Lease]:
    """Hold a lease while the block runs; errors as `leased`."""
    lease = await leased(states, name)
    try:
        yield lease
    finally:
        await asyncio.to_thread(states.leases.let_go, lease)


async def saved(states: States, name: str, session: Session, parent: str = "") -> About:
    """Save a text under a lease of its own; errors as `leased` and `States.save`."""
    async with writing(states, name) as lease:
        return await asyncio.to_thread(states.save, name, session, parent, lease)
