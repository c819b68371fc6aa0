"""What clients of OpenAI and llama.cpp get, and what is said to those who ask for what cannot be."""

import dataclasses
import functools
import json
import os
import random
import re
import subprocess
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import msgspec
import pytest
import schemathesis
import torch
from fastapi.testclient import TestClient
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from perspectron.data import Tokenizer
from perspectron.data.template import Template
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.designs.perspective.views import PerspectivesConfig
from perspectron.model.tuned import parts
from perspectron.serve import states as states_module
from perspectron.serve.states import States
from perspectron.serve.web.app import PAGE, create
from perspectron.serve.web.likely import shown
from perspectron.util.tensors import read_header
from tests.refusals import names
from tests.serve.conftest import TEMPLATE, served

PROMPT = {"prompt": "The cat sat", "seed": 5, "max_tokens": 12}


def said(model, tokenizer, text: str, tokens: int = 12, **settings) -> str:
    sampling = SamplingConfig(**{"temperature": 1.0, "seed": 5} | settings)
    return generate(model, tokenizer, [text], max_tokens=tokens, sampling=sampling).texts[0]


def complete(client, **body):
    answer = client.post("/v1/completions", json=PROMPT | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client, route: str, body: dict) -> list[dict]:
    with client.stream("POST", route, json=body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_completion_is_what_generate_says(client, tiny) -> None:
    answer = complete(client)
    expected = said(tiny.engine.model, tiny.tokenizer, "The cat sat")
    assert answer["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
    read = len(tiny.tokenizer.encode("The cat sat"))
    assert answer["usage"] == {
        "prompt_tokens": read, "completion_tokens": 12, "total_tokens": read + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    again = complete(client, prompt=tiny.tokenizer.encode("The cat sat"))
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": read}


def test_a_prompt_is_read_from_its_first_token_without_its_cache(client, tiny) -> None:
    """Nothing that was read before is used, of the store or of a slot, and nothing is stored."""
    answers = [complete(client, cache_prompt=False, id_slot=1, logprobs=3) for _ in range(2)]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 0]
    first = complete(client, logprobs=3)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = complete(client, logprobs=3)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert all(answer["choices"] == cached["choices"] for answer in (*answers, first))


@pytest.mark.parametrize("design", ["perspective-tiny", "transformer-tiny"])
def test_what_is_echoed_without_its_cache_is_not_stored(tmp_path, tokenizer, design) -> None:
    """Nor after a state."""
    one = served(tmp_path, tokenizer, design=design)
    with TestClient(create([one]), base_url="http://localhost") as client:
        client.post("/v1/states", json={"id": "short", "prompt": "Row 3"})
        there = len(one.engine.store)
        for state in (None, "short"):
            complete(client, prompt="The cat. " * 99, state=state, cache_prompt=False, echo=True, logprobs=0)
        assert len(one.engine.store) == there


@pytest.mark.parametrize("together", [False, True])
def test_a_text_that_goes_on_from_a_state_has_the_bits_of_one_that_never_stopped(
    tmp_path, tokenizer, together
) -> None:
    """The token that was drawn last is read in a step as it would have been, also in a batch."""
    one = served(tmp_path, tokenizer, design="transformer-tiny", together=together)
    with TestClient(create([one]), base_url="http://localhost") as client:
        whole = complete(client, logprobs=3, temperature=0)["choices"][0]["logprobs"]
        first = complete(client, logprobs=3, temperature=0, max_tokens=5, save="a")["choices"][0]["logprobs"]
        rest = complete(client, logprobs=3, temperature=0, max_tokens=7, prompt="", state="a")
        rest = rest["choices"][0]["logprobs"]
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert first[key] + rest[key] == whole[key]


def test_perspectives_say_what_they_say_of_each_token(tmp_path, tokenizer) -> None:
    """As `generate` has them, whole and streamed, in both routes; without them, no such field."""
    looks = PerspectivesConfig(trigger_p=0, trigger_entropy=99, every=2, threshold=0.02)
    one = served(tmp_path, tokenizer, looks=looks)
    one.template = Template(TEMPLATE, "here")
    sampling = SamplingConfig(temperature=1.0, seed=5)
    made = generate(
        one.engine.model, tokenizer, ["The cat sat"], max_tokens=12, sampling=sampling, hooks=one.engine.hooks
    )
    expected = [
        verdict._asdict() | {"votes": list(verdict.votes)} for verdict in made.verdicts["perspectives"][0]
    ]
    assert len(expected) == 12 and {view["triggered"] for view in expected} == {False, True}
    with TestClient(create([one]), base_url="http://localhost") as client:
        (choice,) = complete(client)["choices"]
        assert (choice["text"], choice["perspectives"]) == (made.texts[0], expected)
        frames = streamed(client, "/v1/completions", PROMPT)
        assert [view for f in frames for c in f["choices"] for view in c.get("perspectives", ())] == expected
        two = complete(client, n=2, prompt=["The cat sat", "Row 3"])["choices"]
        assert two[0]["perspectives"] == expected and all(len(c["perspectives"]) == 12 for c in two)
        begun = complete(client, max_tokens=5, save="five")["choices"][0]
        on = complete(client, prompt="", max_tokens=7, state="five")["choices"][0]
        assert begun["perspectives"] + on["perspectives"] == expected
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        (choice,) = client.post("/v1/chat/completions", json=chat).json()["choices"]
        assert len(choice["perspectives"]) == 3 and 0 <= choice["perspectives"][0]["confidence"] <= 1


def test_choices_stops_echo_and_logprobs(client, tiny) -> None:
    model, tokenizer = tiny.engine.model, tiny.tokenizer
    whole = said(model, tokenizer, "The cat sat")
    stop = whole[5:8]
    answer = complete(client, stop=stop, echo=True)["choices"][0]
    assert answer["text"] == "The cat sat" + whole[: whole.find(stop)] and answer["finish_reason"] == "stop"
    answer = complete(client, n=3, prompt=["The cat sat", "Row 3"])["choices"]
    assert [choice["index"] for choice in answer] == list(range(6))
    assert answer[0]["text"] == whole and len({choice["text"] for choice in answer}) == 6
    answer = complete(client, logprobs=3, temperature=0)["choices"][0]["logprobs"]
    for id, logprob, top in zip(
        answer["token_ids"], answer["token_logprobs"], answer["top_logprobs"], strict=True
    ):
        assert logprob == max(top.values()) and next(iter(top)) == shown(tokenizer, id) and len(top) == 3


def test_a_stream_joins_to_the_answer(client) -> None:
    whole = complete(client, n=2, logprobs=1)
    frames = streamed(
        client, "/v1/completions", PROMPT | {"n": 2, "logprobs": 1, "stream_options": {"include_usage": True}}
    )
    assert frames[-1]["choices"] == [] and frames[-1]["usage"]["completion_tokens"] == 24
    for index in range(2):
        parts = [frame["choices"][0] for frame in frames[:-1] if frame["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["choices"][index]["text"]
        ids = [id for part in parts for id in part["logprobs"]["token_ids"]]
        assert ids == whole["choices"][index]["logprobs"]["token_ids"]
        assert [part["finish_reason"] for part in parts] == [None] * 11 + ["length"]


def test_a_base_model_does_not_chat_and_a_template_makes_it(client, tiny, tmp_path) -> None:
    messages = {"messages": [{"role": "user", "content": "Row"}], "seed": 5, "max_tokens": 8}
    answer = client.post("/v1/chat/completions", json=messages)
    assert (
        answer.status_code == 400
        and "is a base model, served without --template" in answer.json()["error"]["message"]
    )
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    tiny.template = Template.load(tmp_path / "chat.jinja")
    expected = said(tiny.engine.model, tiny.tokenizer, "user: Row\nassistant:", 8)
    answer = client.post("/v1/chat/completions", json=messages | {"logprobs": True, "top_logprobs": 2}).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert (
        len(choice["logprobs"]["content"]) == 8 and len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    )
    frames = streamed(client, "/v1/chat/completions", messages)
    assert frames[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(frame["choices"][0]["delta"]["content"] for frame in frames) == expected
    (tmp_path / "bad.jinja").write_text("{{ raise_exception('no system here') }}")
    tiny.template = Template.load(tmp_path / "bad.jinja")
    answer = client.post("/v1/chat/completions", json=messages)
    assert answer.status_code == 400 and "no system here" in answer.json()["error"]["message"]


def test_states_are_saved_gone_on_from_forked_moved_and_deleted(client, tiny, tmp_path) -> None:
    model, tokenizer = tiny.engine.model, tiny.tokenizer
    straight = Session(model, tokenizer).read("The cat sat")
    sampling = SamplingConfig(temperature=1.0, seed=5)
    parts = [straight.say(12, sampling=sampling), straight.read(" on").say(12, sampling=sampling)]
    assert client.post("/v1/states", json={"id": "root", "prompt": "The cat sat"}).status_code == 201
    assert complete(client, prompt="", state="root", save="one")["choices"][0]["text"] == parts[0]
    assert complete(client, prompt=" on", state="one", save="two")["choices"][0]["text"] == parts[1]
    about = client.post("/v1/states/two/restore", json={}).json()
    assert (
        about["text"] == straight.text
        and about["parent"] == "one"
        and about["tokens"] == len(straight.tokens)
    )
    assert about["ends"][-1] == len(about["text"]) and len(about["ends"]) == about["tokens"]
    back = {"id": "back", "token": len(tokenizer.encode("The cat sat"))}
    assert client.post("/v1/states/two/fork", json=back).json()["parent"] == "two"
    assert complete(client, prompt="", state="back")["choices"][0]["text"] == parts[0]
    file = client.get("/v1/states/one").content
    assert client.put("/v1/states/copy", content=file).status_code == 201
    assert complete(client, prompt=" on", state="copy")["choices"][0]["text"] == parts[1]
    listed = [state["id"] for state in client.get("/v1/states").json()["data"]]
    assert sorted(listed) == ["back", "copy", "one", "root", "two"]
    assert client.delete("/v1/states/copy").json()["deleted"]
    assert client.get("/v1/states/copy").json()["error"]["code"] == "state_not_found"


def test_states_share_their_memory_with_each_other_and_with_stored_prefixes(
    tmp_path, tokenizer, monkeypatch
) -> None:
    tiny = served(tmp_path, tokenizer, design="transformer")
    model, states = tiny.engine.model, tiny.states
    whole = tiny.engine.session().read("The cat sat on the mat. " * 60)
    before = tiny.engine.store.used_bytes
    for name in ("a", "b", "c"):
        states.save(name, whole)
    assert states.memory_bytes < 300 and tiny.engine.store.used_bytes == before, (
        "keys and values are the store's"
    )
    reads = []
    monkeypatch.setattr(
        Session, "loaded", lambda self, path, load=Session.loaded: reads.append(path) or load(self, path)
    )
    said = [states.load(name, tiny.engine.session()).say(9) for name in ("a", "b", "a")]
    assert said == [whole.fork().say(9)] * 3 and reads == []
    assert states.load("a", tiny.engine.session(), anew=True).say(9) == said[0] and len(reads) == 1
    states.save("a", whole.fork().read(" on"))
    assert states.load("a", tiny.engine.session()).text.endswith(" on"), "what is there now"
    other = Session(model, tokenizer).read("Row 7")
    other.save(states.path("b"))
    assert states.load("b", tiny.engine.session()).text == "Row 7" and len(reads) == 2, "of another's hand"
    monkeypatch.setattr("perspectron.serve.states.MOST", 0)
    states.load("b", Session(model, tokenizer))
    assert states.memory_bytes == 0 and states.load("b", tiny.engine.session()).text == "Row 7"
    tiny.engine.close()


def test_slots_as_llama_cpp_has_them(client, tiny, tmp_path, tokenizer) -> None:
    text = "The cat sat on the mat. " * 32
    first = complete(client, prompt=text, id_slot=1)
    saved = client.post("/slots/1?action=save", json={"filename": "talk"}).json()
    assert saved["n_saved"] == first["usage"]["total_tokens"] and saved["n_written"] > 0
    assert [slot["id"] for slot in client.get("/slots").json()] == [1]
    other = served(tmp_path / "other", tokenizer)
    other.slot_files = tiny.slot_files
    with TestClient(create([other]), base_url="http://localhost") as fresh:
        restored = fresh.post("/slots/2?action=restore", json={"filename": "talk"}).json()
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        on = text + first["choices"][0]["text"] + " And"
        answer = complete(fresh, prompt=on, id_slot=2)
        assert answer["choices"] == complete(client, prompt=on)["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * 128 - 1
        assert other.engine.store.counters.tokens_saved == 0
        assert fresh.post("/slots/2?action=erase", json={}).json()["n_erased"] > 0
    for slot, action, status in ((1, "burn", 400), (99, "save", 400), (0, "save", 404)):
        assert client.post(f"/slots/{slot}?action={action}", json={"filename": "a"}).status_code == status


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize("meanwhile", ["completion", "erase"])
def test_what_happens_to_a_slot_while_its_file_is_moved_stays(
    client, tiny, monkeypatch, action, meanwhile
) -> None:
    complete(client, id_slot=1)
    assert client.post("/slots/1?action=save", json={"filename": "talk"}).status_code == 200
    begun, goes_on = threading.Event(), threading.Event()
    moved = {"save": "save", "restore": "load"}[action]
    real = getattr(tiny.slot_files, moved)

    def slow(*args):
        begun.set()
        assert goes_on.wait(60)
        return real(*args)

    monkeypatch.setattr(tiny.slot_files, moved, slow)
    with ThreadPoolExecutor() as pool:
        moving = pool.submit(client.post, f"/slots/1?action={action}", json={"filename": "talk"})
        assert begun.wait(60)
        if meanwhile == "erase":
            client.post("/slots/1?action=erase", json={})
        else:
            complete(client, id_slot=1, prompt="Row 3 of 9")
        there = dict(tiny.slots)
        goes_on.set()
        assert moving.result().status_code == (200 if action == "save" else 409)
    assert tiny.slots == there


def test_models_tokens_health_metrics_and_the_page(client, tiny) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    about = client.get("/v1/models/tiny").json()
    session = Session(tiny.engine.model, tiny.tokenizer).read([5] * about["state_tokens"])
    assert about["state_bytes"] == session.nbytes > tiny.engine.model.init_state(1).nbytes
    ids = client.post("/tokenize", json={"content": "The cat"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": "The cat"}
    complete(client)
    assert client.get("/health").json()["status"] == "ok"
    metrics = client.get("/metrics").text
    assert 'perspectron_drawn_tokens_total{model="tiny"} 12.0' in metrics
    assert 'perspectron_first_token_seconds_count{model="tiny"} 1.0' in metrics
    page = client.get("/")
    assert (
        page.headers["content-type"].startswith("text/html")
        and "default-src 'self'" in page.headers["content-security-policy"]
    )
    for name in ("page.css", "page.js"):
        assert name in page.text
    for file in PAGE.iterdir():
        part = client.get("/" if file.name == "index.html" else f"/{file.name}")
        assert (
            part.status_code == 200
            and file.suffix.strip(".").replace("js", "javascript") in part.headers["content-type"]
        )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "gpt-5"}, 404, "model 'gpt-5' is not served; there are: tiny"),
        ({"state": "gone"}, 404, "state 'gone' is not there"),
        ({"state": "../../etc/passwd"}, 400, "1 to 64 letters"),
        ({"save": "a/b"}, 400, "save = 'a/b', must be 1 to 64 letters"),
        ({"save": "a", "n": 2}, 400, "left out with n > 1"),
        ({"max_tokens": 65}, 400, "max_tokens = 65, must be ≤ 64"),
        ({"max_tokens": 0}, 400, "max_tokens = 0, must be ≥ 1 without echo"),
        ({"max_tokens": 0, "echo": True, "save": "a"}, 400, "save = 'a', must be left out with"),
        ({"min_tokens": 13}, 400, "min_tokens = 13, must be ≤ max_tokens = 12"),
        ({"prompt": [300]}, 400, "token id"),
        ({"temperature": -1}, 400, "temperature = -1, must be greater than or equal to 0"),
        ({"stop": [""]}, 400, "stop.0 = '', String should have at least 1 character"),
        ({"stop": ["x"] * 17}, 400, "stop = a list of 17, List should have at most 16 items"),
        ({"stop": "x" * 300}, 400, "stop"),
        ({"stop": ["\ud800"]}, 400, "stop.0 = "),
        ({"n": 17}, 400, "n = 17, must be less than or equal to 16"),
        ({"logprobs": 21}, 400, "logprobs = 21, must be less than or equal to 20"),
        ({"best_of": 2}, 400, "best_of = 2, must be n = 1"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias = an object of 1, must be {}"),
        ({"id_slot": 9}, 400, "id_slot = 9"),
        ({"prompt": "x", "n": 9}, 400, "n = '9 texts', must be ≤ 8, what this server takes at once"),
        ({"prompt": ["x"] * 3, "n": 3}, 400, "n = '9 texts', must be ≤ 8"),
        ({"prompt": ["x"] * 9}, 400, "prompt = '9 texts', must be ≤ 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error_object(client, tiny, body, status, words) -> None:
    head = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=json.dumps(PROMPT | body), headers=head)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    assert tiny.engine.active == tiny.engine.waiting == 0
    complete(client)


@pytest.mark.parametrize("prefix", [(), (0,), (1, 2, 3)])
def test_counts_and_log_probabilities_hold_whatever_stands_before_a_text(tmp_path, tokenizer, prefix) -> None:
    specials = msgspec.structs.replace(tokenizer.specials, prefix=prefix, reset=None)
    own = Tokenizer.parse(tokenizer.to_str(), tmp_path / "tokenizer.json", specials)
    one = served(tmp_path, own, design="transformer-tiny")
    ids = [*prefix, *own.encode("The cat")]
    with TestClient(create([one]), base_url="http://localhost") as client:
        usage = [complete(client, max_tokens=2)["usage"] for _ in range(2)]
        cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
        assert cached == [0, usage[1]["prompt_tokens"]] and usage[0]["prompt_tokens"] > 0
        if prefix:
            client.post("/v1/states", json={"id": "empty", "prompt": ""})
        asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
        said = [
            complete(client, state=state, **asked)["choices"][0]["logprobs"]
            for state in (None, "empty" if prefix else None)
        ]
    assert said[0] == said[1] and said[0]["token_ids"] == ids
    assert [value is None for value in said[0]["token_logprobs"]] == [
        index < max(1, len(prefix)) for index in range(len(ids))
    ]


def test_a_schema_for_calls_that_nothing_holds_to_is_refused(client, tiny) -> None:
    tiny.template = Template(TEMPLATE, "here")
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "strict = true" in answer.json()["error"]["message"]


def test_what_has_no_room_now_may_ask_again(client, tiny, monkeypatch) -> None:
    monkeypatch.setattr(tiny.engine, "queue", 0)
    with monkeypatch.context() as taken:
        taken.setattr(tiny.engine, "_jobs", dict.fromkeys(range(4)))
        answer = client.post("/v1/completions", json=PROMPT)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1", answer.text
    complete(client)


def test_a_prompt_of_several_choices_counts_once_also_where_it_was_cached(client) -> None:
    prompts = ["The cat sat on the mat. " * 20, "Row 3 of 9: the mat sat. " * 20]
    for _ in range(2):
        usage = complete(client, prompt=prompts, n=2)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] > 128


@pytest.mark.parametrize("n", [1, 2])
def test_tokens_of_a_state_that_are_not_read_again_count_as_cached(client, n) -> None:
    first = complete(client, save="a")["usage"]
    usage = complete(client, prompt=" and", state="a", n=n)["usage"]
    assert usage["prompt_tokens"] > first["total_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == first["total_tokens"] - 1, "the last one was drawn and not read"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/completions?foo=1", "'foo': not known here; there are: none; fields go into the body"),
        ("POST", "/v1/states?model=tiny", "'model': not known here"),
        ("POST", "/v1/states/a/fork?model=tiny", "'model': not known here"),
        ("GET", "/v1/states?limit=1", "'limit': not known here; there are: model"),
        ("GET", "/slots?x=1", "'x': not known here"),
        ("POST", "/slots/0?action=erase&force=1", "'force': not known here; there are: action"),
    ],
)
def test_a_parameter_of_the_query_that_a_route_lacks_is_refused(client, method, path, words) -> None:
    body = PROMPT if "completions" in path else {"id": "b"} | ({} if "fork" in path else {"prompt": "x"})
    answer = client.request(method, path, json={} if "slots" in path else body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert client.get("/v1/states?model=tiny").json()["data"] == []
    assert client.get("/health?t=1").status_code == client.get("/metrics?t=1").status_code == 200


@pytest.mark.parametrize("design", ["gpt2", "transformer"])
def test_a_long_prompt_on_a_table_of_positions(tmp_path, tokenizer, design) -> None:
    from perspectron import presets
    from perspectron.model.model import build

    one = served(tmp_path, tokenizer)
    config = presets.small(design, vocab_size=tokenizer.vocab_size, d_model=32, seq_len=64)
    model = build(dataclasses.replace(config, longest=0 if config.positions else 64), seed=5)
    from perspectron.serve.engine import Engine

    one = dataclasses.replace(one, engine=Engine(model, tokenizer, together=False))
    with TestClient(create([one]), base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json={"prompt": [5] * 80})
        assert answer.status_code == 400 and "≤ positions = 64" in answer.json()["error"]["message"]
        answer = client.post("/v1/completions", json={"prompt": [5] * 60, "max_tokens": 16})
        assert answer.status_code == 400 and "max_tokens = 16" in answer.json()["error"]["message"]
        one.template = Template(TEMPLATE, "here")
        for said in ("x", "x" * 30):  # a chat that does not say how many gets what is left
            body = {"messages": [{"role": "user", "content": said}], "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body | {"logit_bias": {}})
            assert answer.status_code == 200, answer.text
            (choice,), usage = answer.json()["choices"], answer.json()["usage"]
            assert choice["finish_reason"] != "length" or usage["total_tokens"] == 64
        client.post("/v1/states", json={"id": "read", "prompt": "The cat sat. "})
        for route, asked in (("chat/completions", body), ("completions", {"prompt": [5] * 50})):
            answer = client.post(f"/v1/{route}", json=asked | {"state": "read", "temperature": 0})
            assert answer.status_code == 200, answer.text
        (about,) = client.get("/v1/models").json()["data"]
        assert about["context"] == about["state_tokens"] == 64


def test_bodies_that_are_too_much(client) -> None:
    head = {"content-type": "application/json"}
    for content, status in (
        (b'{"prompt": "\xff"}', 400),
        (b"x" * (17 << 20), 413), (b"[" * 100_000, 400), (b"{", 400), (b'{"n": NaN}', 400), (b"", 400), (b"7", 400),
    ):  # fmt: skip
        answer = client.post("/v1/completions", content=content, headers=head)
        assert answer.status_code == status and answer.json()["error"]["message"], content[:9]
    plain = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 400, "what a form elsewhere could send is no JSON"
    assert client.get("/nothing").status_code == 404 and "error" in client.get("/nothing").json()


def test_paths_that_are_not_there_are_404_for_every_method_and_others_name_theirs(client) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        for path in ("/v1/embeddings", "/v1/chat", "/nothing.js"):
            answer = client.request(method, path, json={} if method != "GET" else None)
            said = answer.json()["error"]["message"]
            assert answer.status_code == 404 and names(said, method, path)
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"), ("POST", "/health", "GET"), ("POST", "/", "GET, HEAD"),
        ("PATCH", "/page.js", "GET, HEAD"), ("POST", "/v1/states/x", "DELETE, GET, PUT"),
    ):  # fmt: skip
        answer = client.request(method, path, json={} if method != "GET" else None)
        assert answer.status_code == 405 and answer.headers["allow"] == allowed
        assert f"this route takes {allowed}" in answer.json()["error"]["message"]
    assert client.head("/").status_code == 200


def test_with_a_key_every_route_but_health_needs_it(tiny) -> None:
    with TestClient(create([tiny], key="correct horse"), base_url="http://localhost") as client:
        routes = [(m, r.path) for r in client.app.routes if hasattr(r, "methods") for m in r.methods]
        assert len(routes) > 15
        for method, path in [*routes, ("GET", "/"), ("GET", "/page.js")]:
            answer = client.request(method, path, headers={"authorization": "Bearer wrong"})
            assert answer.status_code == (200 if path == "/health" else 401), path
        assert client.get("/v1/models", headers={"authorization": "Bearer correct horse"}).status_code == 200
        assert client.get("/", auth=("anyone", "correct horse")).status_code == 200


def test_without_a_key_another_name_for_this_machine_is_refused(client) -> None:
    assert client.get("/v1/models", headers={"host": "evil.example:8000"}).status_code == 403
    assert client.get("/v1/models", headers={"host": "127.0.0.1:8000"}).status_code == 200


def test_a_conversation_begins_with_a_trained_memory(tmp_path, tokenizer) -> None:
    """Uploaded, and named by requests that share a batch with others; nothing of it gets into the store."""
    one = served(tmp_path, tokenizer, together=True)
    model = one.engine.model
    start = model.init_state(1, tuned=("offset", "first"))
    for part in parts(start):
        part.offset.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
        part.first.normal_(0, 0.5, generator=torch.Generator().manual_seed(2))
    begun = Session(model, tokenizer, start=model.begun(start))
    begun.save(tmp_path / "legal.state")
    sampling = SamplingConfig(temperature=1.0, seed=5)
    expected = begun.fork().read("The cat sat").say(12, sampling=sampling)
    with TestClient(create([one]), base_url="http://localhost") as client:
        content = (tmp_path / "legal.state").read_bytes()
        assert client.put("/v1/states/legal", content=content).status_code == 201
        bare = complete(client)["choices"][0]["text"]
        for _ in range(2):
            answer = complete(client, state="legal", save="talk", id_slot=0)
            assert answer["choices"][0]["text"] == expected != bare
            assert complete(client, id_slot=0)["choices"][0]["text"] == bare
        complete(client, state="legal", id_slot=0)
        client.post("/slots/0?action=save", json={"filename": "kept"})
        client.put("/v1/states/slot", content=(one.slot_files.folder / "kept.state").read_bytes())
        on, again = (
            complete(client, prompt=" and", state=state, max_tokens=5, logprobs=1)["choices"][0]
            for state in ("talk", "slot")
        )
        assert on == again
        on = on["text"]
    begun.read("The cat sat").say(12, sampling=sampling)
    assert on == begun.read(" and").say(5, sampling=sampling)


def test_foreign_states_are_refused_and_leave_nothing(client, tiny, tmp_path, tokenizer) -> None:
    client.post("/v1/states", json={"id": "mine", "prompt": "The cat"})
    file = client.get("/v1/states/mine").content
    other = Session(
        served(tmp_path / "o", tokenizer, design="transformer-tiny").engine.model, tokenizer
    ).read("x")
    other.save(tmp_path / "other")
    draw = random.Random(1)
    bad = [b"", b"junk", file[:-1], (tmp_path / "other").read_bytes()]
    for _ in range(20):
        at = draw.randrange(len(file))
        bad.append(file[:at] + bytes([file[at] ^ 1 << draw.randrange(8)]) + file[at + 1 :])
    for content in bad:
        answer = client.put("/v1/states/theirs", content=content)
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert [path.name for path in tiny.states.folder.iterdir()] == ["mine.state"]
    (tiny.states.folder / "mine.state").write_bytes(b"damaged")
    assert client.post("/v1/completions", json=PROMPT | {"state": "mine"}).status_code == 400


def test_the_header_of_a_state_is_parsed_once_for_lists(client, tiny, monkeypatch) -> None:
    for name in "ab":
        client.post("/v1/states", json={"id": name, "prompt": "The cat"})
    parsed, real = list[str](), states_module.read_metadata

    def read_metadata(path):
        parsed.append(path.name)
        return real(path)

    before = client.get("/v1/states").json()
    monkeypatch.setattr(states_module, "read_metadata", read_metadata)
    assert client.get("/v1/states").json() == before and not parsed
    answer = client.post("/v1/completions", json=PROMPT | {"state": "nosuch"})
    assert answer.status_code == 404 and "there are: a, b" in answer.json()["error"]["message"] and not parsed
    complete(client, state="a", save="b")
    parsed.clear()
    after = {about["id"]: about for about in client.get("/v1/states").json()["data"]}
    assert (after["b"]["parent"], after["a"]) == ("a", before["data"][0]) and "a.state" not in parsed
    assert client.delete("/v1/states/b").status_code == 200
    assert [about["id"] for about in client.get("/v1/states").json()["data"]] == ["a"]
    assert len(tiny.states._entries) == 1


def test_a_full_disk_is_said_and_the_server_goes_on(client, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("perspectron.model.appended.write", full)
        answer = client.post("/v1/states", json={"id": "a", "prompt": "The cat"})
        assert answer.status_code == 507 and "No space left" in answer.json()["error"]["message"]
    complete(client)


def test_no_answer_shows_where_files_are(client, tiny, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    client.post("/v1/states", json={"id": "mine", "prompt": "The cat"})
    (tiny.states.folder / "mine.state").write_bytes(b"damaged")
    answers = [
        client.post("/v1/completions", json=PROMPT | {"state": "mine"}),
        client.post("/v1/states/mine/restore", json={}),
        client.put("/v1/states/theirs", content=b"junk"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr("perspectron.model.appended.write", full)
        answers.append(client.post("/v1/states", json={"id": "a", "prompt": "The cat"}))
    assert [answer.status_code for answer in answers] == [400, 400, 400, 507]
    for answer, name in zip(answers, ("mine.state", "mine.state", "theirs", "a.state"), strict=True):
        said = answer.json()["error"]["message"]
        assert name in said and "/" not in said and ".tmp" not in said, said


def test_uploads_are_for_their_owner_alone_as_saves_are(client, tiny) -> None:
    client.post("/v1/states", json={"id": "mine", "prompt": "The cat"})
    file = client.get("/v1/states/mine").content
    assert client.put("/v1/states/theirs", content=file).status_code == 201
    modes = {path.name: path.stat().st_mode & 0o777 for path in tiny.states.folder.iterdir()}
    assert modes == {"mine.state": 0o600, "theirs.state": 0o600}


def test_a_server_begins_without_what_killed_ones_left(tmp_path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [tmp_path / f".{pid}-{'0' * 16}.tmp" for pid in (ended.pid, os.getppid())]
    for path in (*left, tmp_path / "mine.state"):
        path.write_bytes(b"half of an upload")
    States(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([left[1], tmp_path / "mine.state"])  # a living one's stays


def test_only_this_machine_is_local(client) -> None:
    for host in (
        "testserver",
        "example.org",
        "localhost.example.org",
        "127.0.0.1.example.org",
        "10.0.0.1:80",
    ):
        assert client.get("/v1/models", headers={"host": host}).status_code == 403
    for host in ("LOCALHOST:8080", "127.0.0.2:8000", "[::1]:8000", "[::1]"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("wrong", ["disk", "header"])
def test_what_was_drawn_is_answered_also_where_its_state_cannot_be_saved(
    client, tiny, monkeypatch, wrong
) -> None:
    """And the answer says so by name, whole and streamed; nothing is listed that would be denied."""
    messages = {"messages": [{"role": "user", "content": "Row"}], "seed": 5, "max_tokens": 4, "save": "b"}
    tiny.template, whole = Template(TEMPLATE, "here"), complete(client)
    spoken = client.post("/v1/chat/completions", json=messages).json()
    assert "state_error" not in spoken and client.get("/v1/states/b").status_code == 200
    words = "not written (No space left on device)" if wrong == "disk" else ", must be ≤ 300; a text"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if wrong == "disk":
        monkeypatch.setattr("perspectron.model.appended.write", full)
    else:
        monkeypatch.setattr("perspectron.util.tensors.MAX_JSON", 300)
        monkeypatch.setattr("perspectron.util.tensors.read_header", functools.partial(read_header, most=300))
    failed = complete(client, save="a")
    assert failed["choices"] == whole["choices"] and failed["usage"]["completion_tokens"] == 12
    assert failed["state_error"].startswith("a.state: ") and words in failed["state_error"]
    frames = streamed(client, "/v1/completions", PROMPT | {"save": "a"})
    assert "".join(frame["choices"][0]["text"] for frame in frames) == whole["choices"][0]["text"]
    *before, last = (frame.get("state_error") for frame in frames)
    size = r"header of [\d,]+ bytes"  # longer where the answer went over the end of a second
    assert before == [None] * 11 and re.sub(size, "", last) == re.sub(size, "", failed["state_error"])
    answer = client.post("/v1/chat/completions", json=messages | {"save": "a"}).json()
    assert answer["choices"] == spoken["choices"] and words in answer["state_error"]
    answer = client.post("/v1/states", json={"id": "a", "prompt": "The cat"})
    assert (
        answer.status_code == (507 if wrong == "disk" else 400) and words in answer.json()["error"]["message"]
    )
    monkeypatch.undo()
    assert [state["id"] for state in client.get("/v1/states").json()["data"]] == ["b"]


def test_a_prompt_of_more_tokens_than_the_bound_is_refused_with_both_numbers(client, tiny) -> None:
    tiny.longest = 20
    assert complete(client, prompt=[5] * 20)["usage"]["prompt_tokens"] == 20
    words = "tokens of the prompt = 21, must be ≤ 20, what this server reads at most"
    for route, body in (
        ("/v1/completions", {"prompt": [5] * 21}), ("/v1/completions", {"prompt": [[5], [5] * 21]}),
        ("/v1/states", {"id": "a", "prompt": [5] * 21}),
    ):  # fmt: skip
        answer = client.post(route, json=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    tiny.template = Template(TEMPLATE, "here")
    body = {"messages": [{"role": "user", "content": "x" * 40}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "≤ 20, what this server reads" in answer.json()["error"]["message"]
    assert tiny.engine.active == tiny.engine.waiting == 0


NAMES = [
    "model", "prompt", "max_tokens", "temperature", "top_p", "seed", "n", "stop", "logprobs", "state", "save",
    "id_slot", "stream", "messages", "tokens", "content", "id", "token", "filename", "echo",
]  # fmt: skip
VALUES = [
    None, True, 0, 1, -1, 2**63, 1e308, "", "x", "\u0000", "\ud83d", [], [1], [[1]], ["x"], {}, {"a": []}, 3.5,
]  # fmt: skip
ROUTES = [
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/states", "/v1/states/x/fork",
    "/slots/0?action=save",
]  # fmt: skip


def throw(client, draw: random.Random, count: int) -> Counter[int]:
    """Bodies of the known names with values of any type: how many got each status."""
    head, said = {"content-type": "application/json"}, Counter[int]()
    for _ in range(count):
        body = {name: draw.choice(VALUES) for name in draw.sample(NAMES, draw.randint(0, 5))}
        status = client.post(draw.choice(ROUTES), content=json.dumps(body), headers=head).status_code
        assert status < 500, body
        said[status] += 1
    return said


def test_bodies_of_any_kind_never_fail_the_server(client) -> None:
    assert sum(throw(client, random.Random(3), 250).values()) == 250


def test_what_the_schema_allows_and_what_it_does_not(client) -> None:
    """Requests that schemathesis makes of the OpenAPI document: no route fails, and none answers what it does not
    say."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers={"host": "localhost"})
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]

    for found in schema.get_all_operations():
        operation = found.ok()

        @hypothesis.settings(
            max_examples=3, derandomize=True, deadline=None, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            case.validate_response(case.call(session=client), checks=checks)

        ask()
