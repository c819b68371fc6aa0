"""The checks before every route: who may ask, and how much at once."""

import asyncio
import base64
import hmac
import ipaddress
import json
import re

from fastapi.security.utils import get_authorization_scheme_param
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 16 << 20
DEEPEST, MOST_PARTS, MOST_VALUES = 32, 1 << 16, 1 << 20
"""Bounds on the JSON of a body: levels; objects, lists and their named fields; values in lists. Parsing and checking a
body blocks the interpreter: for 0.1 s at these bounds, for seconds with 16 MiB of brackets."""
PIECE = 1 << 18  # bytes that are scanned without a pause for other threads
POLICY = (
    "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
)
BRACKETS = b"[]{}"
OTHERS = bytes(byte for byte in range(256) if byte not in BRACKETS)


def refusal(
    status: int, message: str, code: str | None = None, param: str | None = None, **headers: str
) -> JSONResponse:
    """An error as OpenAI's clients read it. param: the field that is wrong."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    error = {"message": message, "type": kind, "param": param, "code": code}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"error": error}, status, named)


class Guard:
    """Keeps an app behind a key, if there is one, and bounds the size of bodies; uploads of states have a bound of
    their own. Without a key, only requests to a host that `is_local` are answered, so that a foreign page cannot have
    its own name resolve to this machine (DNS rebinding)."""

    def __init__(self, app: ASGIApp, *, key: str | None, largest_upload: int) -> None:
        self.app, self.key, self.largest_upload = app, key, largest_upload

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _secured(send)
        headers = Headers(scope=scope)
        refused = self._refused(scope["path"], headers) or _foreign(scope["method"], headers)
        upload = scope["method"] == "PUT"
        largest = self.largest_upload if upload else LARGEST_BODY
        length = headers.get("content-length", "0")
        if refused is None and not (re.fullmatch("[0-9]{1,18}", length) and int(length) <= largest):
            refused = refusal(413, f"body = {json.dumps(length[:24])} bytes, must be ≤ {largest:,}")
        if refused is not None:
            await refused(scope, receive, send)
            return
        if upload:
            await self.app(scope, receive, send)
            return
        received, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            received += message.get("body", b"")
            more = message.get("more_body", False)
            if len(received) > largest:
                await refusal(413, f"body is over {largest:,} bytes; send less at once")(scope, receive, send)
                return
        body = bytes(received)
        received.clear()
        problem = _excess(body) if len(body) <= PIECE else await asyncio.to_thread(_excess, body)
        if problem is not None:
            await refusal(400, f"body: {problem}")(scope, receive, send)
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    def _refused(self, path: str, headers: Headers) -> JSONResponse | None:
        if path == "/health":
            return None
        if self.key is None:
            host = headers.get("host", "")
            if is_local(re.sub(r":\d*$", "", host).removeprefix("[").removesuffix("]")):
                return None
            return refusal(403, f"host = {host[:80]!r}, must be localhost where no key is set")
        if hmac.compare_digest(_key(headers.get("authorization")), self.key.encode()):
            return None
        message = "a key is needed: send the header Authorization: Bearer KEY"
        return refusal(401, message, "invalid_api_key", www_authenticate='Basic realm="perspectron"')


def is_local(host: str) -> bool:
    """True for localhost and an address of this machine that no other reaches: what is served without a key."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _secured(send: Send) -> Send:
    """`send`, with headers added by which browsers do no more than the page itself does."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
        await send(message)

    return sending


def _key(header: str | None) -> bytes:
    """The key of a header: a bearer's, or the password of a browser that asked for one."""
    scheme, value = get_authorization_scheme_param(header)
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return value.encode("latin-1") if scheme.lower() == "bearer" else b""


def _foreign(method: str, headers: Headers) -> JSONResponse | None:
    """The refusal of what a foreign page can send without a preflight request: a form, or text that looks like JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method != "POST" or kind == "application/json":  # a browser asks before it sends these, and is told no
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    own = origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
    if own and site in ("none", "same-origin"):
        return None
    shown = (origin or site)[:80]
    return refusal(403, f"origin = {shown!r}, must be this server's own, or content-type application/json")


def _excess(body: bytes) -> str | None:
    """Say what a body of JSON has too much of; None if nothing. One pass, a piece at a time, which may stop where the
    body is not JSON, as a parser does too."""
    if not json.detect_encoding(body).startswith("utf-8"):
        return "JSON in UTF-8 is needed"
    level = parts = values = 0
    inside, held = False, b""  # a string goes on; a backslash whose other half is in the next piece
    for start in range(0, len(body), PIECE):
        piece = (held + body[start : start + PIECE]).replace(rb"\\", b"")
        held = b"\\" if piece.endswith(b"\\") else b""
        texts = piece.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        outside = b"".join(texts[inside::2])
        inside ^= len(texts) % 2 == 0
        parts += sum(map(outside.count, (b"[", b"{", b":")))
        values += outside.count(b",")
        if parts > MOST_PARTS or values > MOST_VALUES:
            return f"JSON of more than {MOST_PARTS:,} lists, objects and fields, or {MOST_VALUES:,} values"
        for byte in outside.translate(None, OTHERS):
            level += 1 if byte in b"[{" else -1
            if level > DEEPEST:
                return f"JSON of more than {DEEPEST} levels"
            if level < 0:
                return None
    return None
