"""Clients that leave while something waits for its turn, and texts that no state can hold."""

import asyncio
import functools
import json
import time

import pytest
from fastapi.testclient import TestClient

from perspectron.data.template import Template
from perspectron.serve.web import answers
from perspectron.serve.web.answers import _event
from perspectron.serve.web.hearing import Gone, turn
from perspectron.serve.web.writing import Writing
from tests.serve.conftest import TEMPLATE
from tests.waiting import until

HALF, TOOL = "\ud83d", {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("busy", [0, 40], ids=["idle", "busy"])
def test_a_save_whose_request_is_cancelled_lets_its_name_go(tiny, busy) -> None:
    """Before a thread has begun it, too: it is saved, or not, and the next one gets the lease."""
    session = tiny.engine.session().read("The cat")

    async def left() -> None:
        for _ in range(busy):
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.2)
        writing = await Writing.of(tiny.states, "kept")
        task = asyncio.create_task(writing.save(session, ""))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writing.let_go()

    asyncio.run(left())
    until(lambda: not tiny.states.leases._held)

    async def again() -> None:
        writing = await Writing.of(tiny.states, "kept")
        await writing.save(session, "")
        assert not writing.error

    asyncio.run(again())
    assert tiny.states.about("kept").tokens == len(session.tokens)


class Client:
    """A request of a client that leaves."""

    left = False

    async def is_disconnected(self) -> bool:
        return self.left


def test_work_for_a_client_that_left_while_it_waited_is_not_begun() -> None:
    async def asked() -> list[str]:
        lock, begun, clients = asyncio.Lock(), [], [Client(), Client(), Client()]

        async def work(name: str, client: Client) -> None:
            async with turn(client, lock):
                begun.append(name)

        async with lock:
            tasks = [asyncio.create_task(work(str(i), client)) for i, client in enumerate(clients)]
            await asyncio.sleep(0)
            clients[1].left = True
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[1], Gone) and not lock.locked()
        return begun

    assert asyncio.run(asked()) == ["0", "2"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "look", "parameters": {"a": [HALF]}}}]),
        ("tools", [{"type": "function", "function": {"name": "look", "parameters": {HALF: 1}}}]),
        ("chat_template_kwargs", {"a": HALF}),
        ("chat_template_kwargs", {"a": float("nan")}),
        ("chat_template_kwargs", {"a": [2**64]}),
        ("chat_template_kwargs", {"a": [0] * (1 << 18)}),
        ("reasoning_effort", HALF),
        ("messages.0.name", HALF),
        ("messages.1.tool_calls.0.id", HALF),
        ("messages.1.tool_calls.0.function.name", HALF),
        ("messages.1.tool_calls.0.function.arguments", json.dumps({"x": HALF})),
        ("messages.1.tool_calls.0.function.arguments", {"x": float("inf")}),
    ],
)
def test_what_no_state_can_hold_is_refused_by_name(client, tiny, field, value) -> None:
    tiny.template = Template(TEMPLATE, "here")
    body = {"messages": [{"role": "user", "content": "The cat"}], "max_tokens": 2, "save": "one"}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "tool_calls": [call]}
    body["messages"] += [said, {"role": "user", "content": "on"}] if field.startswith("messages.1") else []
    *path, last = field.split(".")
    at = functools.reduce(lambda one, key: one[int(key) if key.isdigit() else key], path, body)
    at[last] = value
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/chat/completions", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)


def test_events_are_ascii(client: TestClient) -> None:
    """Clients that split lines as Python does would split a text at U+2028."""
    event = _event({"text": "a\u2028b\u0085c — é"}).encode()
    assert event.isascii() and event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: ").strip())["text"] == "a\u2028b\u0085c — é"


def test_a_stream_that_is_not_read_ends_with_a_line_in_the_log(monkeypatch, caplog) -> None:
    monkeypatch.setattr(answers, "PATIENCE", 0.05)
    ended = []

    async def events():
        try:
            while True:
                yield _event({"text": "a"})
        finally:
            ended.append(True)

    async def unread(message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def here() -> dict:
        await asyncio.sleep(60)
        return {}

    response = answers._Stream(events(), ping=15, send_timeout=answers.PATIENCE)
    asyncio.run(response({"type": "http", "method": "POST"}, here, unread))
    assert ended == [True] and "0.05 s" in caplog.text
