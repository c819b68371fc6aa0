"""Talks that are kept: their messages are in the state's file, wherever it goes."""

import pytest
from fastapi.testclient import TestClient

from perspectron.cli.chat import Chat, Talk
from perspectron.data.template import Template
from perspectron.decode.history import exhausted
from perspectron.decode.session import Session
from perspectron.serve.distant import DistantStates
from perspectron.serve.web.app import create
from perspectron.util.lease import Leases
from perspectron.util.objects import Folder
from tests.serve.conftest import TEMPLATE, served

HELLO = {"role": "user", "content": "The cat"}


@pytest.fixture
def talking(client, tiny) -> TestClient:
    tiny.template = Template(TEMPLATE, "here")
    return client


def chat(client, messages, **body) -> str:
    asked = {"messages": messages, "seed": 5, "max_tokens": 6} | body
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def restored(client, id: str) -> dict:
    answer = client.post(f"/v1/states/{id}/restore", json={})
    assert answer.status_code == 200, answer.text
    return answer.json()


def messages(client, id: str) -> list[dict[str, str]]:
    return restored(client, id)["messages"]


def words(client, id: str) -> str:
    return client.get(f"/v1/states/{id}/log").json()["words"]


def test_a_talk_keeps_its_messages_in_copies_and_files(talking, tiny, tmp_path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "The "}, {"type": "text", "text": "cat"}]}
    first = [HELLO, {"role": "assistant", "content": chat(talking, [parts], save="one")}]
    assert messages(talking, "one") == first
    asked = [*first, {"role": "user", "content": "on"}]
    second = [*asked, {"role": "assistant", "content": chat(talking, asked, save="two", state="one")}]
    assert messages(talking, "two") == second and messages(talking, "one") == first
    whole = restored(talking, "two")["tokens"]
    for id, token in (("copy", None), ("all", whole)):
        talking.post("/v1/states/two/fork", json={"id": id, "token": token})
        assert messages(talking, id) == second
    data = talking.get("/v1/states/copy").content
    assert talking.put("/v1/states/brought", content=data).status_code == 201
    assert messages(talking, "brought") == second
    again = TestClient(create([tiny]), base_url="http://localhost")
    assert messages(again, "brought") == second
    assert words(talking, "two") == "on"


def test_a_text_is_no_talk(talking) -> None:
    chat(talking, [HELLO], save="one")
    talking.post("/v1/states/one/fork", json={"id": "early", "token": 3})
    talking.post("/v1/completions", json={"prompt": "x", "state": "one", "save": "text", "max_tokens": 2})
    talking.post("/v1/states", json={"id": "read", "prompt": "The cat"})
    assert [messages(talking, id) for id in ("early", "text", "read")] == [[], [], []]


def test_an_answer_that_goes_on_is_one_message(talking, tiny) -> None:
    tiny.template = Template("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "here")
    begun = [HELLO, {"role": "assistant", "content": "sat"}]
    more = chat(talking, begun, save="one", continue_final_message=True, add_generation_prompt=False)
    assert messages(talking, "one") == [HELLO, {"role": "assistant", "content": f"sat{more}"}]


@pytest.mark.parametrize(
    "wrong",
    [
        3, [3], {"messages": "x"}, {"messages": [3]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": 1, "content": "x"}]}, {"messages": [HELLO, None]},
        {"messages": [HELLO], "start": -1}, {"messages": [HELLO], "given": 3}, {"messages": [HELLO], "more": 3},
    ],
)  # fmt: skip
def test_what_a_file_claims_to_be_messages_and_is_not_is_left_out(talking, tiny, tmp_path, wrong) -> None:
    session = Session(tiny.engine.model, tiny.tokenizer).read("The cat")
    session.save(tmp_path / "file", extra={"said": wrong})
    assert talking.put("/v1/states/brought", content=(tmp_path / "file").read_bytes()).status_code == 201
    assert messages(talking, "brought") == []
    assert words(talking, "brought") == "The cat"


def test_a_state_has_words_of_its_own(talking, tiny) -> None:
    talking.post("/v1/states", json={"id": "one", "prompt": "The cat"})
    talking.post("/v1/completions", json={"prompt": " on", "state": "one", "save": "two", "max_tokens": 2})
    assert words(talking, "one") == "The cat" and words(talking, "two").startswith(" on")
    talking.post("/v1/states/two/fork", json={"id": "back", "token": len(tiny.tokenizer.encode("The cat"))})
    assert words(talking, "back").startswith("…") and words(talking, "back").endswith("The cat")
    about, read = restored(talking, "two"), len(tiny.tokenizer.encode("The cat on"))
    assert about["drawn"] == [[read, read + 2]]


def test_servers_of_one_store_have_the_same_talk(tmp_path, tokenizer) -> None:
    objects = Folder(tmp_path / "objects")
    clients = []
    for name in ("a", "b"):
        one = served(tmp_path / name, tokenizer)
        one.template = Template(TEMPLATE, "here")
        one.states = DistantStates(tmp_path / name / "states", objects, "states/tiny", Leases(objects))
        clients.append(TestClient(create([one]), base_url="http://localhost"))
    said = chat(clients[0], [HELLO], save="one")
    for client in clients:
        assert messages(client, "one") == [HELLO, {"role": "assistant", "content": said}]
        assert words(client, "one") == "The cat"


def test_models_say_what_each_token_takes(tmp_path, tokenizer) -> None:
    for design, grows in (("perspective-tiny", False), ("transformer-tiny", True)):
        one = served(tmp_path / design, tokenizer, design=design)
        about = TestClient(create([one]), base_url="http://localhost").get("/v1/models/tiny").json()
        first, then = about["first_token_bytes"], about["next_token_bytes"]
        assert (then > 0) == grows and about["chat"] is False
        for tokens in (1, 7, 300):
            session = Session(one.engine.model, tokenizer).read([5] * tokens)
            state = exhausted(session.remembering())
            assert state.filled().nbytes == first + (tokens - 1) * then


@pytest.mark.parametrize("whole", [True, False])
def test_a_talk_after_a_text_is_read_once(talking, tiny, tmp_path, whole) -> None:
    """Each turn reads what it adds, though another text stands before the talk, also one that is not known."""
    text = "The dog sat on the mat. "
    talking.post("/v1/states", json={"id": "text", "prompt": text})
    if not whole:
        read = tiny.engine.session().read(text)
        read.remembered(exhausted(read.remembering()), [5]).save(tmp_path / "file.state")
        talking.put("/v1/states/text", content=(tmp_path / "file.state").read_bytes())
    said, before, state, grew = list[dict[str, str]](), restored(talking, "text")["tokens"], "text", []
    for turn in range(4):
        said.append({"role": "user", "content": "The cat"})
        answer = chat(talking, said, state=state, save=(state := f"turn-{turn}"))
        said.append({"role": "assistant", "content": answer})
        tokens = restored(talking, state)["tokens"]
        grew.append(tokens - before)
        before = tokens
        assert messages(talking, state) == said
    assert max(grew) <= 1.5 * grew[0], grew
    if not whole:  # a file knows no way back
        return
    talking.put("/v1/states/brought", content=talking.get(f"/v1/states/{state}").content)
    said.append({"role": "user", "content": "The cat"})
    chat(talking, said, state="brought", save="on")
    assert restored(talking, "on")["tokens"] - before <= 1.5 * grew[0]


def test_a_file_without_a_way_back_is_not_read_twice(talking, tiny, tmp_path) -> None:
    """Where the template writes an earlier answer in another way."""
    tiny.template = Template(
        "{% for m in messages %}<{{ m.content if loop.last else '' }}>{% endfor %}", "here"
    )
    read = tiny.engine.session().read("The dog sat on the mat. ")
    read.remembered(exhausted(read.remembering()), [5]).save(tmp_path / "file.state")
    talking.put("/v1/states/text", content=(tmp_path / "file.state").read_bytes())
    said = [HELLO, {"role": "assistant", "content": chat(talking, [HELLO], state="text", save="one")}]
    tiny.states._held.clear()  # as after a restart
    asked = {"messages": [*said, HELLO], "state": "one", "max_tokens": 2}
    answer = talking.post("/v1/chat/completions", json=asked)
    assert (
        answer.status_code == 400 and "'one'" in answer.text and answer.json()["error"]["param"] == "messages"
    )
    chat(talking, [HELLO], state="one", save="two")
    assert messages(talking, "two") == [
        HELLO,
        {"role": "assistant", "content": messages(talking, "two")[1]["content"]},
    ]


def test_a_talk_goes_from_the_server_to_chat_and_back(talking, tiny, tmp_path) -> None:
    """With what the template was given beside the messages, and what it reads of them."""
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tiny.template = template = Template(
        "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %};{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}", "here",
    )  # fmt: skip
    said = [
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    chat(talking, said, tools=[tool], save="one")
    (tmp_path / "one.state").write_bytes(talking.get("/v1/states/one").content)

    model, tokenizer = tiny.engine.model, tiny.tokenizer
    talk = Talk(model, tokenizer, Chat(tmp_path, max_tokens=4), template)
    talk.load(str(tmp_path / "one.state"))
    before = talk.now.session.tokens
    talk.answer("on")
    told = messages(talking, "one")
    asked = [*told, {"role": "user", "content": "on"}]
    assert [one["role"] for one in told] == ["user", "assistant", "tool", "assistant"]
    assert told[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    ids = tokenizer.specials.bare(template.ids(asked, tokenizer, tools=[tool]))
    assert talk.now.session.tokens[: len(ids)] == ids and tokenizer.decode(ids).startswith("[add]user")

    talk.save(str(tmp_path / "two.state"))
    talking.put("/v1/states/two", content=(tmp_path / "two.state").read_bytes())
    assert messages(talking, "two") == [*asked, talk.now.said.messages[-1]] and words(talking, "two") == "on"
    chat(talking, [*messages(talking, "two"), HELLO], tools=[tool], state="two", save="three")
    assert len(messages(talking, "three")) == 8
    assert len(before) < len(talk.now.session.tokens) < restored(talking, "three")["tokens"]
