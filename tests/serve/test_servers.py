"""Several servers over one store: any goes on with any conversation, also one that another was killed in."""

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from fastapi.testclient import TestClient

from perspectron.decode.session import Session
from perspectron.serve import distant
from perspectron.serve.distant import DistantStates
from perspectron.serve.states import Missing, States
from perspectron.serve.web.app import create
from perspectron.util import lease
from perspectron.util.errors import StorageError
from perspectron.util.lease import Leases
from perspectron.util.objects import Folder, objects_of
from tests.serve.conftest import served
from tests.waiting import until

ROOT = Path(__file__).parents[2]
NUMBERS = itertools.count()


def started(*stores: str) -> Iterator[tuple[subprocess.Popen, openai.OpenAI]]:
    """Servers that start at once."""
    run, environment = (
        str(ROOT / "tests/vectors/run"),
        os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    command = [sys.executable, "-m", "perspectron", "serve", run, "--port", "0", "--deterministic", "--store"]
    servers = [
        subprocess.Popen([*command, store], stderr=subprocess.PIPE, text=True, env=environment)
        for store in stores
    ]
    for server in servers:
        assert server.stderr is not None
        url = next(line for line in server.stderr if "http://" in line).split()[-1]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def answers(client: openai.OpenAI = client) -> bool:
            with contextlib.suppress(openai.APIConnectionError):
                return bool(client.models.list())
            return False

        until(answers)
        yield server, client


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_conversation_goes_on_at_another_server_when_its_own_is_killed(kind: str, tmp_path) -> None:
    store = str(tmp_path / "store") if kind == "folder" else f"file://{tmp_path}/store"
    (one, first), (two, second), (alone, whole) = started(store, store, str(tmp_path / "alone"))
    try:
        ask = {"model": "run", "max_tokens": 6, "temperature": 1.0}

        def turn(client: openai.OpenAI, number: int) -> str:
            state = {"save": f"talk.{number}"} | ({"state": f"talk.{number - 1}"} if number else {})
            answer = client.completions.create(
                prompt=f"def turn{number}(self):", seed=number, extra_body=state, **ask
            )
            assert "state_error" not in (answer.model_extra or {})
            return answer.choices[0].text

        expected = [turn(whole, number) for number in range(4)]
        assert [turn(client, number) for number, client in enumerate((first, second, first))] == expected[:3]
        if (
            kind == "url"
        ):  # the text is under way, and its name leased for some seconds more, when its server is killed
            stream = first.completions.create(
                prompt="def",
                stream=True,
                extra_body={"state": "talk.2", "save": "talk.3"},
                model="run",
                max_tokens=4000,
            )
            next(iter(stream))
        one.send_signal(signal.SIGKILL)
        one.wait()
        assert turn(second, 3) == expected[3]
    finally:
        for server in (one, two, alone):
            server.kill()
            server.wait()
            server.stderr.close()


def test_named_states_at_a_url_are_those_of_every_server(tmp_path, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(lease, "SKEW", 0.1)
    objects = objects_of(f"memory://servers{next(NUMBERS)}")
    clients, states = [], []
    with contextlib.ExitStack() as stack:
        for name in "ab":
            one = served(tmp_path / name, tokenizer)
            own = Leases(objects, 4.0)  # longer than a save takes on a busy machine
            one.states = DistantStates(tmp_path / name, objects, "states/tiny", own)
            states.append(one.states)
            clients.append(stack.enter_context(TestClient(create([one]), base_url="http://localhost")))
        a, b = clients
        body = {"prompt": "The cat", "max_tokens": 5, "seed": 3}
        assert "state_error" not in a.post("/v1/completions", json=body | {"save": "x"}).json()
        texts = [
            client.post("/v1/completions", json=body | {"prompt": " and", "state": "x"}).json()["choices"][0][
                "text"
            ]
            for client in clients
        ]
        assert texts[0] == texts[1]
        assert b.get("/v1/states").json() == a.get("/v1/states").json()
        assert b.get("/v1/states/x").content == a.get("/v1/states/x").content
        b.post("/v1/completions", json=body | {"prompt": " and", "state": "x", "save": "x"})
        tokens = [client.post("/v1/states/x/restore", json={}).json()["tokens"] for client in clients]
        assert tokens[0] == tokens[1] > 10 and len(objects.listed("states/tiny/x")) == 1
        held = states[0].leases.tried("states/tiny/x")
        busy = b.post("/v1/completions", json=body | {"save": "x"})
        assert busy.status_code == 409 and busy.headers["retry-after"]
        states[0].leases.let_go(held)
        assert b.delete("/v1/states/x").status_code == 200 and a.get("/v1/states/x").status_code == 404
        assert objects.listed("leases", deep=True) == {}


def test_a_copy_stays_as_long_as_it_is_asked_for(tmp_path, tokenizer, monkeypatch) -> None:
    one, objects = served(tmp_path / "a", tokenizer), objects_of(f"memory://servers{next(NUMBERS)}")
    states, later = DistantStates(tmp_path / "a", objects, "states/tiny", Leases(objects)), 0.0
    monkeypatch.setattr(distant, "time", SimpleNamespace(time=lambda: time.time() + later))
    for name in ("x", "y"):
        states.save(name, one.engine.session().read("The cat"))
    for _ in range(3):
        later += distant.KEPT - 1
        copy = states.found("x")
    later += 2
    states.found("y")
    assert copy.is_file(), "a request that has just found it will read it"
    later += distant.KEPT
    states.found("y")
    assert not copy.is_file()


@pytest.mark.parametrize("what", ["", "/log"])
@pytest.mark.parametrize("kind", [States, DistantStates])
def test_a_state_that_is_deleted_while_it_is_asked_for_is_missing(
    kind, what, tmp_path, tokenizer, monkeypatch
):
    one, objects = served(tmp_path / "a", tokenizer), objects_of(f"memory://servers{next(NUMBERS)}")
    if kind is DistantStates:
        one.states = DistantStates(tmp_path / "a", objects, "states/tiny", Leases(objects))
    one.states.save("x", one.engine.session().read("The cat"))
    found = one.states.found

    def vanishing(name: str) -> Path:
        path = found(name)
        path.unlink()
        return path

    monkeypatch.setattr(one.states, "found", vanishing)
    with TestClient(create([one]), base_url="http://localhost") as client:
        assert client.get(f"/v1/states/x{what}").status_code == 404
    with pytest.raises(Missing):
        one.states.load("x", one.engine.session(), anew=True)


def test_a_download_can_go_on_where_it_was_cut(tmp_path, tokenizer):
    one = served(tmp_path / "a", tokenizer)
    one.states.save("x", one.engine.session().read("The cat"))
    whole = one.states.found("x").read_bytes()
    with TestClient(create([one]), base_url="http://localhost") as client:
        answer = client.get("/v1/states/x", headers={"Range": "bytes=100-"})
        assert (answer.status_code, answer.content) == (206, whole[100:])
        assert client.get("/v1/states/x").content == whole


@pytest.mark.parametrize("kind", [States, DistantStates])
def test_a_state_that_cannot_be_deleted_or_moved_is_a_fault_of_storage(
    kind, tmp_path, tokenizer, monkeypatch
):
    one, objects = served(tmp_path / "a", tokenizer), objects_of(f"memory://servers{next(NUMBERS)}")
    if kind is DistantStates:
        one.states = DistantStates(tmp_path / "a", objects, "states/tiny", Leases(objects))
    one.states.save("x", one.engine.session().read("The cat"))

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with TestClient(create([one]), base_url="http://localhost") as client:
        monkeypatch.setattr(Path, "unlink", read_only)
        answer = client.delete("/v1/states/x")
        assert answer.status_code == 507 and "Read-only file system" in answer.text
        monkeypatch.undo()
        monkeypatch.setattr(os, "replace", read_only)
        answer = client.post("/v1/states", json={"id": "y", "prompt": "a"})
        assert answer.status_code == 507 and "Read-only file system" in answer.text


@pytest.mark.parametrize("kind", [States, DistantStates])
@pytest.mark.parametrize("way", ["PUT", "DELETE"])
def test_what_is_written_after_its_lease_has_ended_is_refused(kind, way, tmp_path, tokenizer, monkeypatch):
    """As when the server was stopped for a while: the name may be another's by then."""
    one, objects = served(tmp_path / "a", tokenizer), objects_of(f"memory://servers{next(NUMBERS)}")
    if kind is DistantStates:
        one.states = DistantStates(tmp_path / "a", objects, "states/tiny", Leases(objects))
    one.states.save("x", one.engine.session().read("The cat"))
    session = one.engine.session().read("Row 3 of")
    session.save(tmp_path / "upload")
    slow = one.states.take if way == "PUT" else one.states.delete

    def stopped(*args):
        for held in one.states.leases._held:
            held._ends = 1.0
        return slow(*args)

    monkeypatch.setattr(one.states, slow.__name__, stopped)
    with TestClient(create([one]), base_url="http://localhost") as client:
        before = client.get("/v1/states/x").content
        answer = client.request(way, "/v1/states/x", content=(tmp_path / "upload").read_bytes())
        assert answer.status_code == 409 and client.get("/v1/states/x").content == before


def test_uploads_are_in_memory_one_at_a_time(tmp_path, tokenizer, monkeypatch):
    one = served(tmp_path / "a", tokenizer)
    one.engine.session().read("The cat").save(tmp_path / "upload")
    content, loading, most = (tmp_path / "upload").read_bytes(), list[int](), list[int]()
    real = Session.loaded

    def loaded(self, path):
        loading.append(1)
        most.append(len(loading))
        time.sleep(0.2)
        loading.pop()
        return real(self, path)

    monkeypatch.setattr(Session, "loaded", loaded)
    with TestClient(create([one]), base_url="http://localhost") as client, ThreadPoolExecutor() as pool:
        puts = [pool.submit(client.put, f"/v1/states/{name}", content=content) for name in "abc"]
        assert {put.result().status_code for put in puts} == {201}
    assert most == [1, 1, 1]


@pytest.mark.parametrize("parent", ["a/b", "x/../../../escaped", "a~b", "", "fine", 5])
def test_an_upload_that_claims_any_parent_is_kept_under_its_name(parent, tmp_path, tokenizer) -> None:
    """The name of its object has what the file says of itself."""
    one = served(tmp_path / "a", tokenizer)
    objects = objects_of(f"file://{tmp_path}/store/deep")
    states = DistantStates(tmp_path / "a", objects, "states/tiny", Leases(objects, 0.5))
    session = one.engine.session()
    session.append([5, 6])
    for _ in range(2):
        session.save(tmp_path / "upload", extra={"parent": parent})
        about = states.take("x", tmp_path / "upload", one.engine.session())
    assert about.id == "x" and about.parent == ("fine" if parent == "fine" else "5" if parent == 5 else "")
    assert [found.id for found in states.list()] == ["x"] and len(objects.listed("states/tiny/x")) == 1
    assert {path.parts[len(tmp_path.parts)] for path in tmp_path.rglob("*")} <= {"a", "store"}
    states.save("y", session)
    assert len(states._held) == 1
    states.delete("y")
    assert not states._held and [found.id for found in states.list()] == ["x"], "nothing of it is kept"


def test_a_store_that_is_full_leaves_the_answer_and_names_the_state_that_is_not_saved(
    tmp_path, tokenizer, monkeypatch
) -> None:
    objects = Folder(tmp_path / "store")
    one = served(tmp_path / "a", tokenizer)
    one.states = DistantStates(tmp_path / "mirror", objects, "states/tiny", Leases(objects))
    with TestClient(create([one]), base_url="http://localhost") as client:
        body = {"prompt": "The cat", "max_tokens": 5, "seed": 3, "save": "x"}
        first = client.post("/v1/completions", json=body).json()

        def full(*_, **__) -> None:
            raise StorageError("store: not written (No space left on device)")

        monkeypatch.setattr(objects, "put", full)
        again = client.post("/v1/completions", json=body).json()
        assert again["choices"] == first["choices"] and "store" in again["state_error"]
        assert client.post("/v1/states", json={"id": "y", "prompt": "a"}).status_code == 507
        monkeypatch.undo()
        assert client.post("/v1/states/x/restore", json={}).status_code == 200
        name = next(iter(objects.listed("states/tiny", deep=True)))
        objects.put(f"states/tiny/{name}", objects.get(f"states/tiny/{name}")[:-1])
        (tmp_path / "mirror").rename(tmp_path / "gone")
        one.states._held.clear()
        assert client.post("/v1/completions", json=body | {"state": "x", "save": "z"}).status_code == 400
