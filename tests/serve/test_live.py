"""A server on a socket: clients of other people, clients that leave, and the command."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import uvicorn
from sse_starlette.sse import AppStatus

from perspectron.cli.main import main
from perspectron.data.template import Template
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.serve.web.app import create
from tests.refusals import in_a_line
from tests.serve.conftest import TEMPLATE, served
from tests.serve.test_routes import said
from tests.waiting import until

KEY = "correct horse"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("served")
    (folder / "chat.jinja").write_text(TEMPLATE)
    one = served(folder, tokenizer)
    return dataclasses.replace(one, template=Template.load(folder / "chat.jinja"), largest=10**6)


@contextlib.contextmanager
def listening_at(tiny) -> Iterator[str]:
    """Where it listens, on a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    AppStatus.disable_automatic_graceful_drain()
    config = uvicorn.Config(create([tiny], key=KEY), log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listening.close()


@pytest.fixture(scope="module")
def url(tiny) -> Iterator[str]:
    with listening_at(tiny) as where:
        yield where


def idle(tiny) -> None:
    until(lambda: not (tiny.engine.active or tiny.engine.waiting))


def test_the_openai_client_gets_what_a_session_says(url, tiny) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    ask = {"model": "tiny", "prompt": "The cat sat", "seed": 5, "max_tokens": 12}
    whole = client.completions.create(**ask, n=2, logprobs=2)
    expected = said(tiny.engine.model, tiny.tokenizer, "The cat sat")
    assert whole.choices[0].text == expected and whole.choices[0].finish_reason == "length"
    assert len(whole.choices[1].logprobs.token_logprobs) == 12 and whole.usage.completion_tokens == 24
    streamed = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in streamed[:-1]) == expected
    assert streamed[-1].usage.completion_tokens == 12
    assert client.completions.create(**ask, stop=[expected[5:8]]).choices[0].finish_reason == "stop"
    talk = {"model": "tiny", "messages": [{"role": "user", "content": "Row"}], "seed": 5, "max_tokens": 8}
    answer = client.chat.completions.create(**talk, logprobs=True, top_logprobs=1)
    deltas = [part.choices[0].delta.content for part in client.chat.completions.create(**talk, stream=True)]
    assert "".join(deltas) == answer.choices[0].message.content
    assert len(answer.choices[0].logprobs.content) == 8
    for wrong, kind in (
        ({"model": "gpt-5"}, openai.NotFoundError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"n": 16, "max_tokens": 99999}, openai.BadRequestError),
    ):
        with pytest.raises(kind) as caught:
            client.completions.create(**ask | wrong)
        assert caught.value.body["message"]
    with client.completions.create(**ask | {"n": 8, "max_tokens": 99999}, stream=True) as busy:
        next(iter(busy))
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**ask)
    idle(tiny)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


async def leave(port: int, stream: bool) -> None:
    """A client that goes: after the first token of a stream, or without its answer."""
    body = json.dumps({"prompt": "The cat", "max_tokens": 900_000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await asyncio.sleep(0.05)
    writer.transport.abort()


def all_leave(url: str, tiny, rounds: int) -> int:
    """Three clients at once, that many times: how many texts the engine let go. AssertionError unless all rows, files
    and tasks are gone after them. (One round before opens what a server opens once.)"""
    port = int(url.rpartition(":")[2])

    async def leaving(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.gather(*(leave(port, stream) for stream in (True, True, False)))

    asyncio.run(leaving(1))
    idle(tiny)
    time.sleep(1)
    descriptors, before = len(os.listdir("/proc/self/fd")), tiny.engine.counters.cancelled
    asyncio.run(leaving(rounds))
    idle(tiny)
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert not tiny.engine._tasks
    return tiny.engine.counters.cancelled - before


def test_clients_that_leave_leave_nothing_behind(url, tiny) -> None:
    """Streams that are dropped after a token, and answers that nobody waits for."""
    assert 12 <= all_leave(url, tiny, 6) <= 18  # who leaves before it is read, never began


def test_an_upload_that_is_broken_off_leaves_nothing_and_no_traceback(url, tiny, caplog) -> None:
    folder = tiny.states.folder
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as sent:
        head = f"PUT /v1/states/half HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        sent.sendall(f"{head}Content-Length: 99999\r\n\r\nhalf".encode())
        until(lambda: any(folder.glob(".*.tmp")))
    until(lambda: not any(folder.glob(".*.tmp")))
    time.sleep(0.05)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/states", {"id": "left", "prompt": [5] * 9000}),
        ("/v1/states/long/fork", {"id": "left", "token": 8000}),
        ("/v1/completions", {"prompt": [5] * 9000, "save": "left", "stream": True}),
        ("/v1/completions", {"prompt": [5] * 9000, "save": "left"}),
    ],
    ids=["state", "fork", "stream", "answer"],
)
def test_who_leaves_while_a_prompt_is_read_is_read_no_further_and_nothing_is_saved(
    tmp_path, tokenizer, monkeypatch, route, body
) -> None:
    """The fourth piece is held until the server has heard of it, and is the last."""
    one, calls, held = served(tmp_path, tokenizer, room={"memory_bytes": 0}), list[int](), threading.Event()
    one.engine.store._disk = None
    if "fork" in route:
        one.states.save("long", Session(one.engine.model, tokenizer).read([5] * 9000))

    def slow(*arguments: object, read: Callable[..., object]) -> object:
        calls.append(1)
        assert len(calls) < 4 or held.wait(60)
        return read(*arguments)

    for owner, name in ((Rows, "_read_chunk"), (Session, "_call")):
        monkeypatch.setattr(owner, name, functools.partialmethod(slow, read=getattr(owner, name)))
    with listening_at(one) as url:
        data = json.dumps(body).encode()
        head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(head.encode() + data)
        try:
            until(lambda: len(calls) == 4)
            client.close()
            let_go = [*one.engine._tasks], [*one.engine._jobs.values()]
            until(
                lambda: all(t.result.cancelled() for t in let_go[0]) and all(j.cancelled for j in let_go[1])
            )
        finally:
            held.set()
        until(lambda: not (one.engine._tasks or one.engine.active or one.engine.waiting))
    assert len(calls) == 4 and sum(map(len, let_go)) == 1
    assert not list(one.states.folder.glob("left*"))


def test_the_command_says_what_it_needs(tmp_path, capsys, monkeypatch) -> None:
    for arguments, named in (
        ([], ["runs"]),
        ([str(tmp_path), "--host", "0.0.0.0"], ["--api-key"]),
        ([str(tmp_path), "--api-key", "short"], ["api_key"]),
        ([str(tmp_path), "--port", "70000"], ["port", 70000]),
        ([str(tmp_path), "--disk", "1G"], ["disk", "1G", "--store"]),
        ([str(tmp_path), "--max-prompt", "0"], ["max_prompt", 0]),
        ([str(tmp_path), str(tmp_path)], ["runs"]),
        ([str(tmp_path), "--port", "0"], [tmp_path]),
    ):
        assert main(["serve", *arguments]) == 2, arguments
        in_a_line(capsys.readouterr().err, *named)
    monkeypatch.setattr("perspectron.cli.options.find_spec", lambda name: None)
    assert main(["serve", str(tmp_path)]) == 2
    in_a_line(capsys.readouterr().err, "perspectron[serve]")


def test_an_idle_connection_outlives_what_clients_keep_of_theirs(monkeypatch) -> None:
    """httpx2, which OpenAI's client uses, closes its idle ones first; who sends as the server closes has an error."""
    made = list[uvicorn.Config]()
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **_: made.append(self.config))
    run = Path(__file__).parents[1] / "vectors/run"
    assert main(["serve", str(run), "--port", "0", "--template", "plain"]) == 0
    assert made[0].timeout_keep_alive == 75 > openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry


def test_the_openai_client_with_schemas_tools_and_echoes(url, tiny) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    wanted = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted, "strict": True}}
    talk = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Row"}]}],
        "seed": 5,
    }
    answer = client.chat.completions.create(**talk, response_format=form, max_completion_tokens=90)
    assert isinstance(json.loads(answer.choices[0].message.content)["a"], bool)
    talk["messages"] += [answer.choices[0].message, {"role": "user", "content": "on", "name": "Ann"}]
    assert client.chat.completions.create(**talk, max_tokens=3, user="me", metadata={"a": "b"}).usage
    echo = client.completions.create(model="tiny", prompt="The cat", echo=True, logprobs=2, max_tokens=0)
    assert echo.choices[0].text == "The cat" and echo.choices[0].logprobs.text_offset[0] == 0
    for wrong, field in (
        ({"tool_choice": "required"}, "tool_choice"), ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"), ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**talk, max_tokens=3, **wrong)
        assert caught.value.param == field and field in caught.value.body["message"]


@pytest.mark.slow
def test_a_signal_lets_what_is_under_way_end(tmp_path) -> None:
    root = Path(__file__).parents[2]
    run = str(root / "tests/vectors/run")
    command = [sys.executable, "-m", "perspectron", "serve", run, "--port", "0", "--store", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            url = next(line for line in server.stderr if "http://" in line).split()[-1]
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

            def answers() -> bool:
                with contextlib.suppress(openai.APIConnectionError):
                    return bool(client.models.list())
                return False

            until(answers)
            stream = client.completions.create(model="run", prompt="def", max_tokens=300, seed=1, stream=True)
            parts = [next(iter(stream))]
            server.send_signal(signal.SIGTERM)
            parts += list(stream)
            assert parts[-1].choices[0].finish_reason in ("length", "stop") and server.wait(30) == 0
        finally:  # a server that goes on would be waited for
            server.kill()


def test_a_seed_and_its_stream_are_the_sampling(url, tiny) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    ask = {"model": "tiny", "prompt": "The cat", "max_tokens": 6}
    free = {client.completions.create(**ask).choices[0].text for _ in range(3)}
    assert len(free) > 1, "without a seed each answer is drawn anew"
    greedy = client.completions.create(**ask, temperature=0).choices[0].text
    assert greedy == said(tiny.engine.model, tiny.tokenizer, "The cat", 6, temperature=0.0)
    assert SamplingConfig(temperature=0.0).seed == 0
