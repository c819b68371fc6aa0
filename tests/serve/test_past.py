"""The past of states on a server: log, diff, bisect, rebase and merge, for others that wait meanwhile too."""

import pytest
from fastapi.testclient import TestClient

from perspectron.decode.apart import diff
from perspectron.decode.past import Until, bisecting
from perspectron.decode.session import Session
from perspectron.serve.engine import Engine
from perspectron.serve.served import Served
from perspectron.serve.states import States
from perspectron.serve.web.app import create
from tests.decode.recalling import Letters, recalling
from tests.decode.test_past import planted
from tests.serve.conftest import served


@pytest.fixture(scope="module")
def both(tmp_path_factory, tokenizer):
    """A model that recalls, and another of another vocabulary."""
    folder, model = tmp_path_factory.mktemp("both"), recalling()
    engine = Engine(model, Letters(), rows=4, queue=4, together=False)
    recaller = Served("recalling", engine, Letters(), States(folder / "a"), States(folder / "b"), 64)
    tiny = served(folder, tokenizer)
    with TestClient(create([recaller, tiny]), base_url="http://localhost") as client:
        yield client, engine


def kept(client, id: str, prompt, **more) -> None:
    answer = client.post("/v1/states", json={"id": id, "prompt": prompt, **more})
    assert answer.status_code == 201, answer.text


def test_bisect_finds_a_planted_fact_in_20000_tokens(both) -> None:
    client, _ = both
    kept(client, "long", planted(4_711))
    asked = {"ask": "K", "until": "x", "max_tokens": 1}
    answer = client.post("/v1/states/long/bisect", json=asked)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["token"], found["spelled"], found["after"]) == (4_711, "x", "x") and found["readings"] <= 20
    likely = client.post("/v1/states/long/bisect", json=asked | {"until": "p(x) > 0.5"}).json()
    assert likely["token"] == 4_711


def test_others_are_answered_while_a_past_is_looked_into_and_who_leaves_is_let_go(both) -> None:
    client, engine = both

    def slow(session, tokens):
        while True:
            yield 9_000

    future = engine.run(bisecting(engine.session().read("ab"), "K", Until("slow", slow)))
    assert client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200
    assert not future.done()
    assert future.cancel()
    assert client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200
    assert not engine._tasks


WRONG = [
    ({"until": "y"}, "until"), ({"until": "p(a)>0"}, "until"), ({"until": "/x/"}, "until"), ({"until": ""}, "until"),
    ({"ask": ""}, "ask"), ({"ask": [9999]}, "ask"), ({"max_tokens": 65}, "max_tokens"), ({"since": 3}, "since"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), WRONG)
def test_what_cannot_be_looked_for_is_refused_by_name(both, body, field) -> None:
    client, _ = both
    kept(client, "short", planted(30, 60))
    answer = client.post("/v1/states/short/bisect", json={"ask": "K", "until": "x", "max_tokens": 1} | body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_a_log_names_the_parents(both) -> None:
    client, _ = both
    kept(client, "first", "abLK")
    client.post("/v1/completions", json={"prompt": "ab", "state": "first", "save": "second", "max_tokens": 2})
    told = client.get("/v1/states/second/log").json()
    first = client.get("/v1/states/first/log").json()
    steps = [(e["start"], e["stop"], e["what"]) for e in told["entries"]]
    assert steps == [(0, 4, "read"), (4, 4, "from"), (4, 6, "read"), (6, 8, "drawn")]
    assert told["entries"][1]["parent"] == first["digest"] and (told["tokens"], told["drawn"]) == (8, 2)
    assert client.get("/v1/states/nosuch/log").status_code == 404


def test_two_states_are_compared(both) -> None:
    client, engine = both
    kept(client, "a", "abcKx")
    kept(client, "b", "abcKyy")
    found = client.post("/v1/states/a/diff", json={"other": "b", "on": "aKx"}).json()
    a, b = (Session(engine.model, Letters()).read(text) for text in ("abcKx", "abcKyy"))
    expected = diff(a, b, "aKx")
    assert (found["shared"], found["kl"], found["mean"]) == (4, list(expected.kl), expected.mean)
    assert client.post("/v1/states/a/diff", json={"other": "b"}).json()["mean"] is None
    for body in ({"other": "b", "on": [9999]}, {"other": "b", "on": "É"}):
        answer = client.post("/v1/states/a/diff", json=body)
        assert answer.status_code == 400, answer.text
    assert client.post("/v1/states/a/diff", json={"other": "nosuch"}).status_code == 404


def test_a_state_is_replayed_on_another_on_a_prompt_and_by_another_model(both, tokenizer) -> None:
    client, _ = both
    kept(client, "talk", "the cat sat")
    kept(client, "before", "KKK")
    made = client.post("/v1/states/talk/rebase", json={"id": "moved", "onto": "before", "after": 4}).json()
    assert (made["tokens"], made["replayed"], made["after"], made["encoded"]) == (10, 7, 3, None)
    assert client.post("/v1/states/moved/restore", json={}).json()["text"] == "KKKcat sat"
    made = client.post("/v1/states/talk/rebase", json={"id": "moved", "prompt": "KK"}).json()
    assert made["tokens"] == 13 and made["parent"] == "talk"
    made = client.post("/v1/states/talk/rebase", json={"id": "other", "reader": "tiny"}).json()
    assert made["encoded"] == made["tokens"] == len(tokenizer.encode("the cat sat"))
    assert made["parent"] == ""  # which is a state of another model
    for body in ({"onto": "before", "prompt": "a"}, {"after": 12}, {"after": 11}):
        assert client.post("/v1/states/talk/rebase", json={"id": "no", **body}).status_code == 400
    assert client.post("/v1/states/talk/rebase", json={"id": "no", "reader": "nosuch"}).status_code == 404


def test_two_states_become_one_or_are_refused(both) -> None:
    client, _ = both
    kept(client, "fact", "Kx")
    kept(client, "filler", "abcabcL")
    made = client.post("/v1/states/fact/merge", json={"id": "one", "other": "filler", "on": "aKx"}).json()
    assert made["kl"] < 1e-9 < made["alone"]
    said = client.post(
        "/v1/completions", json={"state": "one", "prompt": "K", "max_tokens": 1, "temperature": 0}
    )
    assert said.json()["choices"][0]["text"] == "x"
    answer = client.post("/v1/states/fact/merge", json={"id": "two", "other": "filler", "on": "ab"})
    assert answer.status_code == 400 and "recalling" in answer.text
    assert client.get("/v1/states/two").status_code == 404
