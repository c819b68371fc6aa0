"""A client of servers that speak OpenAI's API over HTTP: requests, answers with their log-probabilities, and what
servers keep (llama.cpp's slots, our saved states)."""

import contextlib
import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from perspectron.util.config import require
from perspectron.util.errors import PerspectronError

Prompt = str | Sequence[int]
Keeping = Literal["llama.cpp", "perspectron", "none"]
REFUSALS = (400, 403, 404, 405, 415, 422, 501)
"""HTTP statuses with which a server says that it does not offer something."""
BUSY = (429, 503)
ROOM = 1 << 26  # bytes of one answer
TIMEOUT = 600.0  # seconds
ATTEMPTS = 100  # while the server is busy


class NotOffered(PerspectronError):
    """The server does not offer what was asked."""


class EngineError(PerspectronError):
    """The server failed, or gave no answer that can be read."""


@dataclass(frozen=True)
class Answer:
    """A server's answer to a prompt. text: None if only its tokens are known. ids: of its tokens, if the server gives
    them. logprobs: of each token. top: log-probabilities of the likeliest tokens at each position, by id, or else by
    text and number among tokens of that text. cached, read: tokens of the prompt that were reused, and all; None: not
    told."""

    text: str | None
    finish: str | None = None
    ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[Any, float], ...] = ()
    cached: int | None = None
    read: int | None = None

    def shown(self, most: int = 8) -> dict[str, Any]:
        """The text and its first log-probabilities, for a report."""
        return {"text": self.text, "ids": list(self.ids), "logprobs": list(self.logprobs[:most])}


@dataclass(frozen=True)
class Difference:
    """How two answers differ. texts: in text or reason to finish. at: the first token in which they differ. largest:
    difference of log-probabilities up to there. compared: how many were compared."""

    texts: bool
    at: int | None
    largest: float
    compared: int

    @property
    def exact(self) -> bool:
        """True if nothing differs."""
        return not self.texts and self.at is None and self.largest == 0


def difference(one: Answer, other: Answer) -> Difference:
    """The difference of two answers to the same question. A token among the likeliest of only one of them counts with
    how far it is above the least of the other's, if the other has any there."""
    told = one.text is not None and other.text is not None
    texts = (told and one.text != other.text) or one.finish != other.finish
    tokens = [(a.ids or a.tokens) for a in (one, other)]
    pairs = list(zip(*tokens, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None and tokens[0] and tokens[1] and len(tokens[0]) != len(tokens[1]):
        at = len(pairs)
    largest, compared = 0.0, 0
    for i in range(min(len(one.logprobs), len(other.logprobs))):
        if at is not None and i > at:
            break
        if i != at:
            largest, compared = max(largest, _apart(one.logprobs[i], other.logprobs[i])), compared + 1
        if i < min(len(one.top), len(other.top)) and (a := one.top[i]) and (b := other.top[i]):
            for here, there in ((a, b), (b, a)):
                for token, value in here.items():
                    beside = there.get(token, min(value, *there.values()))
                    largest, compared = max(largest, _apart(value, beside)), compared + 1
    return Difference(texts, at, largest, compared)


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b else math.inf if math.isnan(a - b) else abs(a - b)


@dataclass
class Server:
    """A server at an address. model: the name that requests give. keeping: how it saves. likely: log-probabilities
    asked for at each position. fresh_by: "cache_prompt", if a request can forbid reuse of what was read before;
    "first", if only a prompt that was never asked is read anew. slots: how many it has; 0: requests do not choose one.
    log: called with each request and how it was answered."""

    url: str
    model: str | None = None
    key: str | None = None
    keeping: Keeping = "none"
    likely: int = 5
    fresh_by: Literal["cache_prompt", "first"] = "first"
    slots: int = 0
    tokenizes: bool = False
    logprobs: bool = True
    log: Callable[[dict[str, Any]], None] = lambda _: None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname)
        require(right, "server", self.url, "an address like http://127.0.0.1:8000")
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    # Routes

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The object that a route answers with. NotOffered: it refuses. EngineError: it fails."""
        with self._response(method, path, body) as response:
            text = response.read(ROOM)
        try:
            return json.loads(text)
        except ValueError:
            raise EngineError(f"{method} {path}: the answer is no JSON ({text[:80]!r})") from None

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        for left in reversed(range(ATTEMPTS)):
            connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT)
            try:
                connection.request(method, self._base + path, data, headers)
                response = connection.getresponse()
                if response.status in BUSY and left:
                    time.sleep(0.1)
                    continue
                if response.status >= 300:
                    said = _message(response.read(1 << 16))
                    kinds = NotOffered if response.status in REFUSALS else EngineError
                    raise kinds(f"{method} {path}: {response.status} {said}")
                yield response
                return
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{method} {self.url}{path}: {error or type(error).__name__}") from None
            finally:
                connection.close()

    def meet(self) -> None:
        """Find out what is offered: the model's name, slots, a tokenizer, log-probabilities, readings from the first
        token. EngineError: nobody answers, or there are no completions."""
        try:
            names = [entry["id"] for entry in self.ask("GET", "/v1/models")["data"]]
        except (NotOffered, KeyError, TypeError):
            names = []
        if self.model is None and names:
            self.model = names[0]
        with contextlib.suppress(NotOffered):
            self.tokenizes = isinstance(self.ask("POST", "/tokenize", {"content": "a"})["tokens"][0], int)
        probe: Prompt = self.encode("One, two, three, four, five, six, seven, eight, nine, ten.")
        self.logprobs = True
        try:
            self.complete(probe, 1)
        except NotOffered:
            self.logprobs = False
            try:
                self.complete(probe, 1)
            except NotOffered as error:
                raise EngineError(f"{self.url}: no completions ({error})") from None
        self.fresh_by = "cache_prompt"
        try:
            twice = [self.complete(probe, 1, fresh=True).cached for _ in "12"]
        except NotOffered:
            twice = [None, None]
        if twice[1] != 0:  # not told, or reused all the same
            self.fresh_by = "first"
        if self.keeping == "llama.cpp":
            self.slots = self._count_slots()

    def _count_slots(self) -> int:
        with contextlib.suppress(NotOffered):
            listed = self.ask("GET", "/slots")
            if listed:
                return len(listed)
        for count in (4, 2):  # our server lists the slots that hold something
            with contextlib.suppress(NotOffered):
                self.complete("a", 1, slot=count - 1)
                return count
        return 1

    def encode(self, text: str) -> Prompt:
        """Tokens of a text where the server tells them, else the text."""
        if not self.tokenizes:
            return text
        body = {"content": text} | (
            {"model": self.model} if self.model and self.keeping == "perspectron" else {}
        )
        ids: list[int] = self.ask("POST", "/tokenize", body)["tokens"]
        return ids

    # Texts

    def complete(
        self,
        prompt: Prompt,
        tokens: int,
        *,
        fresh: bool = False,
        slot: int | None = None,
        likely: int | None = -1,
        stream: bool = False,
        **fields: Any,
    ) -> Answer:
        """The answer to a prompt, at temperature 0 unless `fields` say otherwise. fresh: read the prompt from its first
        token. likely: log-probabilities at each position; −1: as many as `Server.likely`, None: do not ask for them."""
        body: dict[str, Any] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        body |= self._settings(tokens, fresh, slot)
        if (count := self._count(likely)) is not None:
            body["logprobs"] = count
        return self._said("/v1/completions", body | fields, stream)

    def _count(self, likely: int | None) -> int | None:
        return (self.likely if self.logprobs else None) if likely == -1 else likely

    def _settings(self, tokens: int, fresh: bool, slot: int | None) -> dict[str, Any]:
        """The fields that completions and chats have alike."""
        body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0}
        if self.model is not None:
            body["model"] = self.model
        if fresh and self.fresh_by == "cache_prompt":
            body["cache_prompt"] = False
        if slot is not None and self.keeping == "llama.cpp":
            body["id_slot"] = slot
        return body

    def chat(
        self, messages: Sequence[Mapping[str, str]], tokens: int, *, fresh: bool = False,
        slot: int | None = None, likely: int | None = -1, stream: bool = False, **fields: Any,
    ) -> Answer:  # fmt: skip
        """The answer of a chat, as `complete` has it."""
        body: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        body |= self._settings(tokens, fresh, slot)
        if (count := self._count(likely)) is not None:
            body |= {"logprobs": True, "top_logprobs": count}
        return self._said("/v1/chat/completions", body | fields, stream)

    def _said(self, route: str, body: dict[str, Any], stream: bool) -> Answer:
        if not stream:
            answer = _answer([self.ask("POST", route, body)])
        else:
            with self._response("POST", route, body | {"stream": True}) as response:
                answer = _answer(list(_events(response)))
        self.log(_summary(route, body, stream, answer))
        return answer

    def together(self, calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """The answers of calls that are made at once. The error of the first that failed is raised."""
        found: list[Answer | BaseException | None] = [None] * len(calls)
        gate = threading.Barrier(len(calls))

        def run(index: int) -> None:
            gate.wait()
            try:
                found[index] = calls[index]()
            except BaseException as error:  # raised below, in the caller's thread
                found[index] = error

        threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Answer)]

    # What is kept

    def save(self, slot: int, name: str) -> None:
        """Write what a slot holds to a file of this name."""
        self._slot(slot, "save", {"filename": name})

    def restore(self, slot: int, name: str) -> None:
        """Read a slot from a file."""
        self._slot(slot, "restore", {"filename": name})

    def erase(self, slot: int) -> None:
        """Forget what a slot holds."""
        self._slot(slot, "erase", {})

    def _slot(self, slot: int, action: str, body: dict[str, Any]) -> None:
        if self.keeping != "llama.cpp":
            raise NotOffered("no slots that are saved and restored (--save llama.cpp)")
        path = f"/slots/{slot}?action={action}"
        answer = self.ask("POST", path, body)
        self.log({"route": path, **body, "answer": answer})

    def forget(self, name: str) -> None:
        """Delete a saved state, where the server has a route for that."""
        if self.keeping == "perspectron":
            with contextlib.suppress(NotOffered, EngineError):
                self.ask("DELETE", f"/v1/states/{name}")


def detected(url: str, **settings: Any) -> Keeping:
    """The kind of keeping that a server offers, judged by its routes."""
    server = Server(url, **settings)
    with contextlib.suppress(NotOffered):
        server.ask("GET", "/v1/states")
        return "perspectron"
    with contextlib.suppress(NotOffered):
        server.ask("GET", "/slots")
        return "llama.cpp"
    return "none"


def _message(text: bytes) -> str:
    """The message of an error response."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, KeyError, TypeError):
        return text[:200].decode("utf-8", "replace")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The objects of a stream. EngineError: it reports an error, has no JSON, or ends before [DONE]."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError:
            raise EngineError(f"a stream has what is no JSON ({text[:80]!r})") from None
        if isinstance(event, dict) and "error" in event:
            raise EngineError(f"a stream failed: {_message(text)}")
        yield event
    raise EngineError("a stream ended before [DONE]")


def _answer(parts: Sequence[dict[str, Any]]) -> Answer:
    """The answer in an object, or in those of a stream."""
    text, finish, usage = "", None, dict[str, Any]()
    ids, tokens = list[int](), list[str]()
    logprobs, top = list[float](), list[Mapping[Any, float]]()
    try:
        if not any(part.get("choices") for part in parts):
            raise ValueError("no choices")
        for part in parts:
            usage = part.get("usage") or usage
            for choice in part.get("choices", ())[:1]:
                said = choice.get("message") or choice.get("delta") or {}
                text += choice.get("text") or said.get("content") or ""
                finish = choice.get("finish_reason") or finish
                for token, id, logprob, likely in _positions(choice.get("logprobs")):
                    tokens.append(token)
                    ids += [] if id is None else [id]
                    logprobs.append(logprob)
                    top.append(likely)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise EngineError(f"an answer that is none of OpenAI's API ({error!r})") from None
    details = usage.get("prompt_tokens_details") or {}
    whole = tuple(ids) if len(ids) == len(tokens) else ()
    return Answer(
        text, finish, whole, tuple(tokens), tuple(logprobs), tuple(top), details.get("cached_tokens"),
        usage.get("prompt_tokens"),
    )  # fmt: skip


def _positions(said: Any) -> Iterator[tuple[str, int | None, float, Mapping[Any, float]]]:
    """(token, id, log-probability, likeliest tokens with theirs) at each position, from log-probabilities in the form
    of completions or of chats."""
    if not said:
        return
    if said.get("content") is not None:
        for entry in said["content"]:
            seen, likely = dict[str, int](), dict[Any, float]()
            for one in entry.get("top_logprobs") or ():
                number = seen[one["token"]] = seen.get(one["token"], -1) + 1
                likely[one["id"] if "id" in one else (one["token"], number)] = _number(one["logprob"])
            yield entry["token"], entry.get("id"), _number(entry["logprob"]), likely
        return
    ids = said.get("token_ids") or [None] * len(said["tokens"])
    tops = said.get("top_logprobs") or [None] * len(said["tokens"])
    for token, id, logprob, likely in zip(said["tokens"], ids, said["token_logprobs"], tops, strict=True):
        yield (
            token,
            id,
            _number(logprob),
            {(name, 0): _number(value) for name, value in (likely or {}).items()},
        )


def _number(value: Any) -> float:
    """A log-probability; null is that of probability 0."""
    return -math.inf if value is None else float(value)


def _summary(route: str, body: Mapping[str, Any], stream: bool, answer: Answer) -> dict[str, Any]:
    """A request in short: its prompt as a number of tokens or characters."""
    fields = {name: value for name, value in body.items() if name not in ("prompt", "messages", "model")}
    if "prompt" in body:
        fields["prompt"] = (
            f"{len(body['prompt'])} {'characters' if isinstance(body['prompt'], str) else 'tokens'}"
        )
    else:
        fields["messages"] = len(body["messages"])
    kept = {} if answer.cached is None else {"cached": answer.cached}
    return (
        {"route": route, **fields}
        | ({"stream": True} if stream else {})
        | {"answer": kept | {"text": answer.text}}
    )
