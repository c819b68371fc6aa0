"""The server: routes that clients of OpenAI and llama.cpp know, states of our own, and a page."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from perspectron.decode.apart import diffing
from perspectron.decode.merge import merging
from perspectron.decode.past import ANSWER, Rebased, bisecting, ids_for, rebasing, until_of
from perspectron.decode.said import said_in
from perspectron.decode.session import Session
from perspectron.serve.engine import Closed, Engine, Full
from perspectron.serve.served import Served
from perspectron.serve.states import Missing
from perspectron.serve.web import schema
from perspectron.serve.web.about import drawn_of, ids_of, model_of, texts, words
from perspectron.serve.web.answers import Answers
from perspectron.serve.web.guard import Guard, refusal
from perspectron.serve.web.hearing import Gone, back, result, turn
from perspectron.serve.web.likely import shown
from perspectron.serve.web.metrics import Metrics
from perspectron.serve.web.writing import saved, writing
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, PerspectronError, StorageError
from perspectron.util.lease import Busy
from perspectron.util.machine import memory
from perspectron.util.version import __version__

T = TypeVar("T")
PAGE = Path(__file__).parent / "page"


class Unknown(PerspectronError):
    """No model of this name is served."""


class App:
    """Handlers of all routes, over the models that are served."""

    def __init__(self, models: Sequence[Served]) -> None:
        self.models = {served.name: served for served in models}
        self.metrics = Metrics(models)
        self.loading = asyncio.Lock()
        """Held while an upload is in memory: one may take half of that."""

    def served(self, name: str) -> Served:
        """The model of a name, or the first one without a name. Unknown, which lists the names: there is none."""
        if name == "":
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Unknown(f"model {name[:80]!r} is not served; there are: {', '.join(self.models)}")
        return self.models[name]

    async def models_list(self) -> dict[str, Any]:
        """The models, by name."""
        return {"object": "list", "data": [model_of(served) for served in self.models.values()]}

    async def model(self, name: str) -> dict[str, Any]:
        """One model."""
        return model_of(self.served(name))

    async def health(self) -> dict[str, Any]:
        """Say that the server runs."""
        return {"status": "ok", "version": __version__}

    async def metrics_text(self) -> Response:
        """Counters, as Prometheus reads them."""
        return Response(self.metrics.text(), media_type=self.metrics.media_type)

    async def completions(self, body: schema.Completion, request: Request) -> Response:
        """Continue each of the prompts."""
        return await Answers(self.served(body.model), self.metrics).completions(body, request)

    async def chat(self, body: schema.Chat, request: Request) -> Response:
        """Answer in a conversation, of which the model's template makes a prompt."""
        return await Answers(self.served(body.model), self.metrics).chat(body, request)

    async def tokenize(self, body: schema.Tokenize, request: Request) -> Response:
        """Ids of a text."""
        return await asyncio.to_thread(ids_of, await _ids(self.served(body.model), body.content, request))

    async def detokenize(self, body: schema.Detokenize) -> Response:
        """Text of ids."""
        text = await asyncio.to_thread(self.served(body.model).tokenizer.decode, body.tokens)
        return await asyncio.to_thread(JSONResponse, {"content": text})

    async def states(self, model: schema.Name = "") -> dict[str, Any]:
        """The states that are kept, the oldest first."""
        found = await asyncio.to_thread(self.served(model).states.list)
        return {"object": "list", "data": [asdict(about) for about in found]}

    async def new_state(self, body: schema.NewState, request: Request) -> JSONResponse:
        """Read a prompt and keep the state."""
        served = self.served(body.model)
        served.states.path(body.id, "id")
        ids = await _ids(served, body.prompt, request)
        session = await result(request, served.engine.run(_reading(served.engine, ids)))
        about = await saved(served.states, body.id, session)
        return JSONResponse(asdict(about), 201)

    async def download(self, id: schema.Name, model: schema.Name = "") -> FileResponse:
        """The file of a state."""
        path, stat = await asyncio.to_thread(self.served(model).states.there, id)
        return FileResponse(
            path, media_type="application/octet-stream", filename=f"{id}.state", stat_result=stat
        )

    async def upload(self, id: schema.Name, request: Request, model: schema.Name = "") -> JSONResponse:
        """Keep the file of a state from elsewhere, if it is one of this model."""
        served = self.served(model)
        served.states.path(id)
        largest, size, path = _largest_upload(), 0, None
        try:
            with served.states.upload() as file:
                path = Path(file.name)
                async for part in request.stream():
                    size += len(part)
                    if size > largest:
                        return refusal(
                            413, f"a state of over {largest:,} bytes, half the memory of this machine"
                        )
                    await asyncio.to_thread(file.write, part)
            async with writing(served.states, id) as lease, turn(request, self.loading):
                fresh = served.engine.session()
                about = await asyncio.to_thread(served.states.take, id, path, fresh, lease)
        except ClientDisconnect:
            raise Gone from None
        except OSError as error:
            raise StorageError(f"{id}: not written ({error.strerror or error})") from None
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        return JSONResponse(asdict(about), 201)

    async def fork(self, id: schema.Name, body: schema.Fork, request: Request) -> JSONResponse:
        """Keep a copy of a state, or of what it was at an earlier token, under another name."""
        served = self.served(body.model)
        served.states.path(body.id, "id")
        session = await self._loaded(served, id)
        session = await result(request, served.engine.run(back(session, body.token)))
        about = await saved(served.states, body.id, session, id)
        return JSONResponse(asdict(about), 201)

    async def log(self, id: schema.Name, model: schema.Name = "") -> Response:
        """The past of a state: what was read and drawn, when, and from which states it came."""
        served = self.served(model)

        def told() -> Response:
            history, messages = served.states.history(id), served.states.said(id).messages
            fields = {name: value for name, value in asdict(history).items() if name != "ids"}
            fields["words"] = words(served.tokenizer, history, messages)
            return JSONResponse({"id": id, "object": "state.log", **fields})

        return await asyncio.to_thread(told)

    async def diff(self, id: schema.Name, body: schema.Diff, request: Request) -> JSONResponse:
        """Compare two states: how far they are apart, and what each expects next and in a probe text."""
        served = self.served(body.model)
        on = await _ids(served, body.on, request)
        a, b = [await self._loaded(served, name) for name in (id, body.other)]
        found = await result(request, served.engine.run(_later(diffing(a, b, on))))
        told = asdict(found) | {"mean": found.mean if found.kl else None}
        told["spelled"] = [[shown(served.tokenizer, token) for token, _ in each] for each in found.next]
        return JSONResponse({"id": id, "object": "state.diff", **told})

    async def bisect(self, id: schema.Name, body: schema.Bisect, request: Request) -> JSONResponse:
        """Find the first token of a state's past after which the answer to a question meets a condition."""
        served = self.served(body.model)
        most = served.largest
        asked = body.max_tokens or (None if most >= ANSWER else most)
        require((asked or 1) <= most, "max_tokens", asked, f"≤ {most}, what this server draws at most")
        until = until_of(body.until, expressions=False)
        ask = await _ids(served, body.ask, request)
        session = await self._loaded(served, id)
        steps = bisecting(session, ask, until, max_tokens=asked)
        found = await result(request, served.engine.run(_later(steps)))
        return JSONResponse({"id": id, "object": "state.bisect", **asdict(found)})

    async def rebase(self, id: schema.Name, body: schema.Rebase, request: Request) -> JSONResponse:
        """Replay the text of a state on another one, on a prompt, or with another model, and keep the new state."""
        served = self.served(body.model)
        reader = served if body.reader is None else self.served(body.reader)
        reader.states.path(body.id, "id")
        require(body.onto is None or body.prompt is None, "prompt", "a text", "left out with onto")
        ids = [] if body.prompt is None else await _ids(reader, body.prompt, request)
        session = await self._loaded(served, id)
        begun = reader.engine.session() if body.onto is None else await self._loaded(reader, body.onto)
        replayed = await asyncio.to_thread(ids_for, session, reader.tokenizer, after=body.after)
        reader.readable(replayed.ids)

        def steps() -> Generator[int, None, Rebased]:
            yield from begun.reading(ids)
            return (yield from rebasing(session, begun, replayed))

        found = await result(request, reader.engine.run(_later(steps())))
        parent = id if reader is served else ""  # it is a state of another model
        about = await saved(reader.states, body.id, found.session, parent)
        told = {"replayed": found.tokens, "after": found.prefix, "encoded": found.encoded}
        return JSONResponse(asdict(about) | told, 201)

    async def merge(self, id: schema.Name, body: schema.Merge, request: Request) -> JSONResponse:
        """Keep one state of two, if it is nearer to both texts read in turn than the second is alone."""
        served = self.served(body.model)
        served.states.path(body.id, "id")
        on = await _ids(served, body.on, request)
        a, b = [await self._loaded(served, name) for name in (id, body.other)]
        found = await result(request, served.engine.run(_later(merging(a, b, on))))
        about = await saved(served.states, body.id, found.session, id)
        return JSONResponse(asdict(about) | {"kl": found.kl, "alone": found.alone}, 201)

    async def _loaded(self, served: Served, id: str) -> Session:
        """A session that continues a saved state. Missing, StateError as `States.load`."""
        return await asyncio.to_thread(served.states.load, id, served.engine.session())

    async def restore(self, id: schema.Name, body: schema.Body) -> Response:
        """Load a state to check that it is whole, and say what it holds, token by token."""
        served, start = self.served(body.model), time.perf_counter()
        session = await asyncio.to_thread(served.states.load, id, served.engine.session(), anew=True)
        milliseconds = 1e3 * (time.perf_counter() - start)

        def told() -> Response:
            cuts, ends = texts(served.tokenizer, session.tokens)
            about = asdict(served.states.about(id)) | {"text": "".join(cuts), "ends": ends}
            said = said_in(session.extra)
            about |= {"messages": said.messages, "given": said.given, "drawn": drawn_of(session.log)}
            return JSONResponse(about | {"state_bytes": session.nbytes, "ms": milliseconds})

        return await asyncio.to_thread(told)

    async def delete(self, id: schema.Name, model: schema.Name = "") -> dict[str, Any]:
        """Delete a state."""
        states = self.served(model).states
        states.path(id)
        async with writing(states, id) as lease:
            await asyncio.to_thread(states.delete, id, lease)
        return {"id": id, "object": "state", "deleted": True}

    async def slots(self) -> list[dict[str, Any]]:
        """The slots of the first model, as llama.cpp lists them."""
        served = self.served("")
        return [
            {"id": id, "n_ctx": served.engine.model.config.room, "n_past": len(session.tokens)}
            for id, session in sorted(served.slots.items())
        ]

    async def slot(self, id: int, action: str, body: schema.Slot, request: Request) -> dict[str, Any]:
        """llama.cpp's save, restore and erase of a slot."""
        served, start = self.served(body.model), time.perf_counter()
        served.slot(id)
        require(action in ("save", "restore", "erase"), "action", action[:40], "save, restore or erase")
        if action == "erase":
            gone = served.slots.pop(id, None)
            return {"id_slot": id, "n_erased": 0 if gone is None else len(gone.tokens)}
        served.slot_files.path(body.filename, "filename")
        held = served.slots.get(id)
        if action == "save":
            if held is None:
                raise Missing(f"slot {id} holds nothing; send a completion with id_slot = {id} first")
            session = await result(request, served.engine.run(held.rereading()))
            about = await asyncio.to_thread(served.slot_files.save, body.filename, session)
        else:
            session = await asyncio.to_thread(served.slot_files.load, body.filename, served.engine.session())
            about = await asyncio.to_thread(served.slot_files.about, body.filename)
        if served.slots.get(id) is held:
            served.slots[id] = session
        elif action == "restore":
            raise Busy(f"slot {id}: another request used it meanwhile; ask again when that is done")
        done, moved = ("saved", "written") if action == "save" else ("restored", "read")
        timings = {f"{action}_ms": 1e3 * (time.perf_counter() - start)}
        counts = {f"n_{done}": len(session.tokens), f"n_{moved}": about.bytes, "timings": timings}
        return {"id_slot": id, "filename": body.filename, **counts}


async def _ids(served: Served, prompt: str | list[int], request: Request) -> list[int]:
    return await served.ids(prompt, turn(request, served.encoding))


def create(models: Sequence[Served], *, key: str | None = None) -> FastAPI:
    """The application. When it ends, its engines finish what they have and stop."""
    app = App(models)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.gather(*(asyncio.to_thread(served.engine.close) for served in models))

    refused: dict[int | str, dict[str, Any]] = {
        code: {"description": "An error object"} for code in (400, 401, 403, 404, 409, 413, 429, 503, 507)
    }
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
    binary: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}
    api = FastAPI(
        title="perspectron", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        responses=refused, dependencies=[Depends(_known)],
    )  # fmt: skip
    api.get("/health")(app.health)
    api.get("/metrics", response_class=PlainTextResponse)(app.metrics_text)
    api.get("/v1/models")(app.models_list)
    api.get("/v1/models/{name}")(app.model)
    api.post("/v1/completions", responses=stream)(app.completions)
    api.post("/v1/chat/completions", responses=stream)(app.chat)
    api.post("/tokenize")(app.tokenize)
    api.post("/detokenize")(app.detokenize)
    api.get("/v1/states")(app.states)
    api.post("/v1/states", status_code=201)(app.new_state)
    api.get("/v1/states/{id}", response_class=Response, responses=binary)(app.download)
    api.put("/v1/states/{id}", status_code=201)(app.upload)
    api.post("/v1/states/{id}/fork", status_code=201)(app.fork)
    api.post("/v1/states/{id}/restore")(app.restore)
    api.get("/v1/states/{id}/log")(app.log)
    api.post("/v1/states/{id}/diff")(app.diff)
    api.post("/v1/states/{id}/bisect")(app.bisect)
    api.post("/v1/states/{id}/rebase", status_code=201)(app.rebase)
    api.post("/v1/states/{id}/merge", status_code=201)(app.merge)
    api.delete("/v1/states/{id}")(app.delete)
    api.get("/slots")(app.slots)
    api.post("/slots/{id}")(app.slot)
    for file in PAGE.iterdir():  # each a route, so that other paths are not there for any method
        api.add_route("/" if file.name == "index.html" else f"/{file.name}", _file(file))
    for kind in (RequestValidationError, HTTPException, PerspectronError, Full, Closed, Gone, Exception):
        api.add_exception_handler(kind, _answer)
    api.add_middleware(Guard, key=key, largest_upload=_largest_upload())
    return api


async def _answer(request: Request, error: Exception) -> Response:
    """Any error as one object, with the status that clients know what to do with."""
    if isinstance(error, RequestValidationError):
        message, field = schema.described(error.errors()[0])
        return refusal(400, message, param=field)
    if isinstance(error, HTTPException):
        return _refused(request, error)
    if isinstance(error, Full):
        return refusal(
            429, "all rows are taken and the queue is full; ask again", "overloaded", Retry_After="1"
        )
    if isinstance(error, Gone):
        return Response(status_code=499)
    if isinstance(error, Closed):
        return refusal(503, "the server is stopping; ask again when it is back", "stopping", Retry_After="5")
    if isinstance(error, Unknown):
        return refusal(404, str(error), "model_not_found", param="model")
    if isinstance(error, Missing):
        return refusal(404, str(error), "state_not_found")
    if isinstance(error, Busy):
        return refusal(409, str(error), "state_busy", Retry_After="1")
    if isinstance(error, StorageError):
        return refusal(507, str(error), "storage")
    if isinstance(error, PerspectronError):
        lead = re.match(r"[a-z_]+(?:\.[A-Za-z0-9_]+)*(?= = |: )", str(error))
        known = lead is not None and lead[0].partition(".")[0] in schema.FIELDS
        return refusal(400, str(error), param=lead[0] if lead and known else None)
    return refusal(500, "the server failed; its log says why")


def _refused(request: Request, error: HTTPException) -> Response:
    """Errors of the framework in our words."""
    what = f"{request.method} {request.url.path[:80]!r}"
    if error.status_code == 405:
        ways = [route for route in request.app.routes if route.path_regex.match(request.url.path)]
        allowed = ", ".join(sorted({method for route in ways for method in route.methods}))
        return refusal(405, f"{what}: this route takes {allowed}", allow=allowed)
    if error.status_code == 404:
        return refusal(404, f"{what}: no such route; GET /openapi.json lists them")
    return refusal(error.status_code, f"{what}: the body is no JSON in UTF-8")


async def _known(request: Request) -> None:
    """ConfigError for a parameter of the query that the route does not have; monitors ask with some of their own."""
    if request.url.path in ("/health", "/metrics"):
        return
    names = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in names:
            there = ", ".join(names) or "none; fields go into the body"
            raise ConfigError(f"query parameter {name[:80]!r}: not known here; there are: {there}")


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def file(_: Request) -> Response:
        return FileResponse(
            path, headers={"Cache-Control": "no-cache"}
        )  # a new version's files belong together

    return file


def _largest_upload() -> int:
    return memory() // 2


def _reading(engine: Engine, ids: Sequence[int]) -> Generator[int, None, Session]:
    session = engine.session()
    yield from session.reading(ids)
    return session


def _later(steps: Generator[int, None, T]) -> Generator[int, None, T]:
    """The same task, with a pause before it does anything."""
    yield 0
    return (yield from steps)
