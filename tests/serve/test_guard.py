"""Bodies that want to stop the server, or to fill its memory: what is looked at first, and at what cost."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, get_args, get_origin

import hypothesis
import hypothesis.strategies as st
import pytest
from pydantic import BaseModel

from perspectron.serve.web import guard, schema
from perspectron.serve.web.guard import Guard
from perspectron.util.machine import Peak

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\[]{},:é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\[,:', max_size=3), inner)
    ),
    max_leaves=20,
)


def counted(value: Any, level: int = 0) -> tuple[int, int, int]:
    """(levels, lists with objects and fields, commas) of JSON."""
    if not isinstance(value, list | dict):
        return level, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    found = [(level + 1, 0, 0), *(counted(each, level + 1) for each in inner)]
    own = 1 + (len(value) if isinstance(value, dict) else 0)
    return (
        max(levels for levels, _, _ in found),
        own + sum(parts for _, parts, _ in found),
        max(0, len(value) - 1) + sum(commas for _, _, commas in found),
    )


@hypothesis.given(VALUES, st.booleans(), st.integers(1, 9))
@hypothesis.settings(deadline=None)
def test_levels_and_values_are_counted_exactly_wherever_a_piece_ends(value, ascii_only, piece) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    levels, parts, values = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "PIECE", piece)
        for bounds, fits in (
            ((levels, parts, values), True), ((levels - 1, parts, values), levels == 0),
            ((levels, parts - 1, values), parts == 0), ((levels, parts, values - 1), values == 0),
        ):  # fmt: skip
            for name, bound in zip(("DEEPEST", "MOST_PARTS", "MOST_VALUES"), bounds, strict=True):
                patch.setattr(guard, name, max(0, bound))
            assert (guard._excess(body) is None) == fits, (bounds, body)


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "quotes": lambda size: b'"' * size,
    "quotes and escaped quotes": lambda size: b'"\\"' * (size // 3),
    "backslashes": lambda size: b'"' + b"\\" * size,
    "escaped quotes": lambda size: b'"' + b'\\"' * (size // 2),
    "strings": lambda size: b'["' + b'a","' * (size // 4) + b'"]',
    "closing brackets": lambda size: b"]" * size,
    "spaces": lambda size: b" " * size,
}


def cost(call: Callable[[], object]) -> float:
    """Seconds of this thread, at least."""
    taken = []
    for _ in range(3):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return max(min(taken), 1e-3)


@pytest.mark.parametrize("name", HOSTILE)
def test_looking_at_a_body_takes_time_in_proportion(name) -> None:
    small, large = (HOSTILE[name](size) for size in (1 << 16, 1 << 21))
    assert cost(lambda: guard._excess(large)) < 8 * 32 * cost(lambda: guard._excess(small))


@pytest.mark.parametrize("name", HOSTILE)
def test_looking_at_a_body_takes_little_memory(name) -> None:
    body = HOSTILE[name](15 << 20)
    with Peak() as peak:
        guard._excess(body)
    assert peak.bytes is None or peak.bytes < 48 << 20


def test_a_body_in_many_parts_takes_time_in_proportion() -> None:
    async def app(scope, receive, send) -> None:
        await receive()

    def sent(parts: int) -> None:
        left = parts

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= 1
            return {"type": "http.request", "body": bytes(1024), "more_body": left > 0}

        async def send(_: object) -> None: ...

        scope = {"type": "http", "path": "/tokenize", "method": "POST", "headers": [(b"host", b"localhost")]}
        asyncio.run(Guard(app, key=None, largest_upload=1)(scope, receive, send))

    assert cost(lambda: sent(12_000)) < 4 * 8 * cost(lambda: sent(1_500))


@pytest.mark.parametrize(
    "content",
    [b"[" * 33, b'{"prompt": [' + b"[]," * 70_000 + b"[]]}", b'{"prompt": [' + b"1," * 1_100_000 + b"1]}",
     '{"prompt": "∀"}'.encode("utf-16"), '{"prompt": "x"}'.encode("utf-32-be")],
)  # fmt: skip
def test_what_would_take_long_to_parse_is_refused_in_a_line(client, content) -> None:
    answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("body: JSON")


def test_a_prompt_of_many_ids_and_a_text_of_many_brackets_are_none(client, tiny) -> None:
    text = '[{"\\' * 300_000
    ids = client.post("/tokenize", json={"content": text[:9000]}).json()["tokens"]
    assert ids == tiny.tokenizer.encode(text[:9000])
    asked = {"prompt": "x", "max_tokens": 1}
    assert client.post("/v1/completions", json=asked | {"user": text}).status_code == 200
    assert client.post("/detokenize", json={"tokens": [65] * 1_000_000}).json() == {
        "content": "a" * 1_000_000
    }
    assert client.post("/tokenize", json={"content": ""}).json() == {"tokens": []}


def lists(kind: Any, limits: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """Every list in a type, with what stands beside it in its annotation."""
    if get_origin(kind) is list:
        return [(kind, limits), *(one for inner in get_args(kind) for one in lists(inner))]
    if hasattr(kind, "__metadata__"):
        told = tuple(more for one in kind.__metadata__ for more in getattr(one, "metadata", [one]))
        return lists(kind.__origin__, told)
    return [one for inner in get_args(kind) for one in lists(inner, limits)]


def test_every_list_in_a_body_is_short_or_checked_up_to_its_first_fault() -> None:
    """A million faults take ten seconds and 2 GB to tell, while nobody else is served."""
    kinds = [kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, BaseModel)]
    found = [
        (kind.__name__, name, limits)
        for kind in kinds
        for name, field in kind.model_fields.items()
        for _, limits in lists(field.annotation, tuple(field.metadata))
    ]
    assert len(found) > 8
    for kind, name, limits in found:
        short = any(getattr(limit, "max_length", 1 << 20) <= 64 for limit in limits)
        assert short or any(getattr(limit, "fail_fast", False) for limit in limits), (kind, name, limits)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain", "origin": "https://evil.example"}, 403),
        ({"content-type": "text/plain", "origin": "null"}, 403),
        ({"content-type": "text/plain", "sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain; charset=utf-8", "sec-fetch-site": "same-site"}, 403),
        ({"content-type": "application/x-www-form-urlencoded", "origin": "http://localhost:9"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"content-type": "text/plain", "origin": "http://localhost"}, 400),
        ({"content-type": "text/plain"}, 400),
        ({"content-type": "application/json", "origin": "https://app.example"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8", "sec-fetch-site": "cross-site"}, 200),
    ],
)
def test_a_page_elsewhere_cannot_send_what_no_browser_asks_about_first(client, headers, status) -> None:
    """A form or plain text of a foreign page is refused before it is read; JSON needs a preflight, which is denied."""
    answer = client.post("/tokenize", content=b'{"content": "x"}', headers=headers)
    assert answer.status_code == status and ("error" in answer.json()) == (status != 200)
    assert status != 403 or "application/json" in answer.json()["error"]["message"]
    preflight = client.options("/tokenize", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers
