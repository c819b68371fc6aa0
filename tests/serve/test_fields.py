"""Every field that clients send is honoured, may be ignored as it is written, or is refused by its name.

    python -m tests.serve.test_fields

writes the table of OpenAI's fields into the guide.
"""

import asyncio
import collections.abc
import json
import re
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from typing_extensions import is_typeddict

from perspectron.data import Tokenizer
from perspectron.data.template import Template
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.serve.web import asked, schema
from perspectron.serve.web.app import create
from tests.decode.conftest import VOCAB
from tests.refusals import in_a_line
from tests.serve.conftest import served
from tests.waiting import PATIENCE

GUIDE = Path(__file__).parents[2] / "docs/guides/serve.md"
READS = "{% if tools or enable_thinking or reasoning_effort or verbosity %}{% endif %}"
TALK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ROUTES = {
    "/v1/chat/completions": (chats, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "/v1/completions": (completions, {"prompt": "hi", "max_tokens": 2}),
}
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True}, "max_completion_tokens": {"max_tokens": None},
    "stream_options": {"stream": True},
}  # fmt: skip


def values(kind: Any, depth: int = 0) -> Iterator[Any]:
    """Legal values of a type: each literal, each branch of a union, each optional key of an object once."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for arg in args:
            yield from values(arg, depth)
    elif origin is Literal:
        yield from args
    elif kind is type(None):
        yield None
    elif origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        for value in values(args[0], depth + 1):
            yield [value]
    elif origin is dict or kind is object:
        yield (
            {"type": "object"}
            if kind is object or args[1] is object
            else {"1": next(values(args[1], depth + 1))}
        )
    elif is_typeddict(kind):
        hints = get_type_hints(kind)
        told = get_type_hints(kind, include_extras=True)  # what must be there is said of each, in a string
        must = [name for name in hints if kind.__total__ or get_origin(told[name]) is Required]
        least = {name: next(values(hints[name], depth + 1)) for name in must}
        for name in sorted(hints):
            for value in values(hints[name], depth + 1):
                yield least | {name: value}
    else:
        yield from {str: ["x"], int: [1], float: [0.5, 0.0], bool: [True, False]}[kind]


def fields(module: Any) -> dict[str, Any]:
    """The fields of a route and their types."""
    parts = (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming)
    own, streams = (get_type_hints(part) for part in parts)
    return own | {"stream": own["stream"] | streams["stream"]}


def answered(client: TestClient, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = client.post(route, json=body)
    return answer.status_code, answer.json().get("error", {}) if answer.status_code != 200 else {}


def outcome(client: TestClient, route: str, name: str, kind: Any, base: dict[str, Any]) -> str:
    """What the server does with the legal values of a field. AssertionError: it refuses one without naming it, or takes
    one of a field that it does not know."""
    taken, refused = list[Any](), dict[str, None]()
    for value in values(kind):
        value = "tiny" if name == "model" and value is not None else value
        status, error = answered(client, route, base | BESIDE.get(name, {}) | {name: value})
        assert status in (200, 400), (name, value, error)
        if status == 200:
            taken.append(value)
            continue
        said, where = error["message"], error["param"] or ""
        assert where.split(".")[0] == name and said.startswith(where), (name, value, error)
        short = said.partition(", must be")[0].removeprefix(f"{name}.")
        refused[re.sub(r"\b0\.", "", short.removeprefix(f"{name} = "))] = None
    model = schema.Chat if "chat" in route else schema.Completion
    if name in model.ignored:
        assert not refused
        return f"may be given: {model.ignored[name]}"
    if name in model.neutral:
        asks = " or ".join(f"`{json.dumps(value)}`" for value in model.neutral[name])
        assert refused
        return f"refused unless {asks}" if asks else "refused"
    assert name in model.model_fields and taken, (name, refused)
    return "honoured" + (f"; refused: {', '.join(f'`{one}`' for one in refused)}" if refused else "")


def table(client: TestClient) -> str:
    """Fields of OpenAI's requests, and what becomes of them."""
    found = dict[str, list[str]]()
    for at, (route, (module, base)) in enumerate(ROUTES.items()):
        for name, kind in fields(module).items():
            found.setdefault(name, ["", ""])[at] = outcome(client, route, name, kind, base)
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, cells in sorted(found.items())]
    return "\n".join(["| field | chat | completions |", "|---|---|---|", *lines])


@pytest.fixture
def talking(tiny) -> Iterator[TestClient]:
    """A server whose template reads all that a chat can give one."""
    tiny.template = Template(READS + TALK, "here")
    with TestClient(create([tiny]), base_url="http://localhost") as client:
        yield client


@pytest.mark.slow
def test_every_field_of_openai_is_honoured_or_refused_by_its_name(talking) -> None:
    """And the guide says which: the table there is this one."""
    assert table(talking) in GUIDE.read_text(), "run python -m tests.serve.test_fields"


CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


def refused(client: TestClient, route: str, body: dict[str, Any]) -> tuple[str, str]:
    """The field of a request that is refused, and the words."""
    status, error = answered(client, route, body)
    assert status == 400 and error["type"] == "invalid_request_error", error
    return error["param"], error["message"]


@pytest.mark.parametrize(
    ("route", "field", "value", "named"),
    [
        ("/v1/completions", "temprature", 0.5, ["temprature", "temperature"]),
        ("/v1/completions", "zzz", None, ["zzz"]),
        ("/v1/completions", "grammar", "root ::= 'a'", ["grammar"]),
        ("/v1/completions", "ignore_eos", True, ["ignore_eos", "true"]),
        ("/v1/completions", "frequency_penalty", 0.5, ["frequency_penalty", 0.5]),
        ("/v1/completions", "frequency_penalty", False, ["frequency_penalty", "false"]),
        ("/v1/completions", "guided_regex", "a+", []),
        ("/v1/completions", "guided_json", "[", ["guided_json", "JSON"]),
        ("/v1/completions", "stop_token_ids", [10**6], ["stop_token_ids", 300]),
        (CHAT, "messages", [], ["messages"]),
        (CHAT, "tool_choice", "required", ["tool_choice", "required", "auto"]),
        (CHAT, "functions", [{"name": "f"}], ["functions"]),
        (CHAT, "chat_template", "{{ 1 }}", []),
        (CHAT, "chat_template_kwargs", {"tools": []}, ["chat_template_kwargs.tools"]),
        (CHAT, "chat_template_kwargs", {"enable_thinkin": False}, []),
        (CHAT, "chat_template_kwargs", {"x.messages": False}, []),
        (CHAT, "top_logprobs", 2, ["logprobs"]),
        (CHAT, "max_completion_tokens", 5, ["max_completion_tokens"]),
        (CHAT, "response_format", {"type": "json_schema"}, ["response_format"]),
        (CHAT, "response_format", {"type": "text", "schema": {}}, ["response_format"]),
        (CHAT, "response_format", {"type": "xml"}, ["json_object", "json_schema"]),
        (CHAT, "response_format", {"type": "json_object", "schema": {"unknown": 1}}, ["unknown"]),
        (CHAT, "json_schema", {"type": "number", "minimum": 2, "maximum": 1}, ["json_schema"]),
        (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
         ["messages.0.content.0.type", "image_url"]),
        (CHAT, "messages", [{"role": "user", "content": None}], ["messages.0.content", "null"]),
        (CHAT, "messages", [{"role": "assistant"}], ["messages.0.content", "null"]),
        (CHAT, "messages", [{"role": "user", "content": "x", "nme": "y"}],
         ["messages.0.nme", "name"]),
        (CHAT, "messages", [{"role": "user", "content": 5}], ["messages.0.content", 5]),
        (CHAT, "messages", [{"content": "x"}], ["messages.0.role"]),
        (CHAT, "tools", [{"type": "custom", "custom": {"name": "x"}}], ["tools.0.type", "custom"]),
        (CHAT, "tools", [{"type": "function", "function": {}}], ["tools.0.function.name"]),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_its_name(talking, route, field, value, named) -> None:
    param, message = refused(talking, route, (HI if "chat" in route else {"prompt": "x"}) | {field: value})
    in_a_line(message, *named)
    assert param.split(".")[0] == field or field == "max_completion_tokens"


def test_null_is_as_if_it_were_left_out(talking) -> None:
    for route, body in ((CHAT, HI), ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "temperature": 0})):
        model = schema.Chat if "chat" in route else schema.Completion
        must = [name for name, field in model.model_fields.items() if field.is_required()]
        names = {*model.model_fields, *model.neutral, *model.ignored} - {*must, *body}
        nothing = {"stream_options": {"include_usage": None, "include_obfuscation": None}}
        plain, null = (
            talking.post(route, json=body | extra).json() for extra in ({}, dict.fromkeys(names) | nothing)
        )
        assert len(names) > 25 and null["choices"] == plain["choices"]
        for name in must:
            param, words = refused(talking, route, body | {name: None})
            assert param == name
            in_a_line(words, name)


def test_an_empty_prompt_begins_a_text(client, tiny) -> None:
    body = {"max_tokens": 5, "temperature": 0}
    texts = [
        client.post("/v1/completions", json=body | extra).json()["choices"][0]["text"]
        for extra in ({}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": ["", "x"]}, {"prompt": None})
    ]
    assert len(set(texts)) == 1
    assert texts[0] == Session(tiny.engine.model, tiny.tokenizer).say(
        5, sampling=SamplingConfig(temperature=0)
    )


def seen(client: TestClient, tiny, template: str, **body: Any) -> str:
    """The prompt that a chat makes, as its log-probabilities count it: the answer is of one token."""
    prompts = list[str]()
    tiny.template = Template(template, "here")
    ask = tiny.template.marked

    def spy(*args: Any, **kwargs: Any) -> str:
        prompts.append(ask(*args, **kwargs))
        return prompts[-1]

    tiny.template.marked = spy
    answer = client.post(CHAT, json=HI | body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(tiny.tokenizer.encode(prompts[0]))
    return prompts[0]


def test_what_a_message_has_reaches_the_template(client, tiny) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": "ü"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]  # fmt: skip
    template = (
        "{% for m in messages %}"
        "{{ [m.role, m.name, m.content or '', m.tool_call_id, m.reasoning_content] | join('|') }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}"
        "{{ c.function.arguments.items() | list }}{% endfor %}"
        "/{% endfor %}"
    )
    assert seen(client, tiny, template, messages=messages) == (
        "user|Ann|one two||/assistant||||hmc1add[('b', 1), ('a', 'ü')]/tool||3|c1|/"
    )


def test_parts_reach_a_template_that_goes_through_them_and_their_text_another(client, tiny) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "three"}]
    reads = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    reads += "{% for part in m.content %}<{{ part.type }}>{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    assert seen(client, tiny, reads, messages=messages) == "<text>one<text>twothree"
    plain = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}"
    assert seen(client, tiny, plain, messages=messages) == "onetwo.three."


def test_a_template_that_fails_on_the_messages_says_what_it_says(client, tiny) -> None:
    tiny.template = Template("{{ raise_exception('roles must alternate') }}", "here")
    param, words = refused(client, CHAT, HI)
    assert param == "messages"
    assert "roles must alternate" in words  # as the template says


def test_tools_and_settings_reach_a_template_that_reads_them_and_are_refused_by_another(client, tiny) -> None:
    tool = {"function": {"description": "sum", "name": "add"}, "type": "function"}
    reads = "{{ tools | map(attribute='function.name') | list if tools else '-' }}{{ tools[0].keys() | list if tools }}"
    assert seen(client, tiny, reads, tools=[tool]) == "['add']['function', 'type']", "as it was given"
    assert seen(client, tiny, reads, tools=[tool], tool_choice="none") == "-"
    assert seen(client, tiny, reads, tools=[]) == "-"
    effort = "{{ reasoning_effort }}{{ enable_thinking }}"
    asked = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    assert seen(client, tiny, effort, **asked) == "lowFalse"
    twice = asked | {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert seen(client, tiny, effort, **twice) == "low"
    param, words = refused(client, CHAT, HI | twice | {"reasoning_effort": "high"})
    assert param == "reasoning_effort"
    in_a_line(words, "reasoning_effort", "'high'", "'low'", "chat_template_kwargs")
    tiny.template = Template(TALK, "here")
    for field, value in ({"tools": [tool], "verbosity": "low"} | asked).items():
        param, words = refused(client, CHAT, HI | {field: value})
        assert param.split(".")[0] == field
        in_a_line(words, param)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    talk = {"messages": [*HI["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    param, words = refused(client, CHAT, HI | talk)
    assert param == "messages.1.tool_calls"
    in_a_line(words, param)
    param, words = refused(client, CHAT, HI | {"chat_template_kwargs": {"a.messages": 1}})
    in_a_line(words, "chat_template_kwargs.a.messages", 1)


def test_the_last_message_is_gone_on_with(client, tiny) -> None:
    template = TALK.replace("\n", "<end>") + "{% if add_generation_prompt %}assistant:{% endif %}"
    hi = [{"role": "user", "content": "hi"}]
    assert seen(client, tiny, template, messages=hi) == "user: hi<end>assistant:"
    assert seen(client, tiny, template, messages=hi, add_generation_prompt=False) == "user: hi<end>"
    talk = [*hi, {"role": "assistant", "content": "The cat "}]
    on = seen(client, tiny, template, messages=talk, continue_final_message=True)
    assert on == "user: hi<end>assistant: The cat "
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(client, CHAT, HI | both)[0] == "add_generation_prompt"


def test_what_limits_an_answer_is_kept_to(client, tiny) -> None:
    def said(**body: Any) -> dict[str, Any]:
        answer = client.post(
            "/v1/completions", json={"prompt": "The cat", "seed": 7, "max_tokens": 60} | body
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    plain = said(logprobs=0)
    third = plain["logprobs"]["token_ids"][2]
    ended = said(stop_token_ids=[third])
    assert ended["finish_reason"] == "stop" and plain["text"].startswith(ended["text"])
    assert len(ended["text"]) < len(plain["text"])
    assert len(said(stop_token_ids=[third], min_tokens=30, logprobs=0)["logprobs"]["tokens"]) >= 30
    wanted = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms: list[dict[str, Any]] = [
        {"json_schema": wanted}, {"guided_json": wanted}, {"guided_json": json.dumps(wanted)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": wanted}},
    ]  # fmt: skip
    for form in forms:
        answer = said(**form)
        assert json.loads(answer["text"])["a"] in (1, 2) and answer["finish_reason"] == "stop"
    tiny.template = Template(TALK, "here")
    chat = client.post(CHAT, json=HI | forms[3] | {"max_tokens": 60, "temperature": 1.5}).json()["choices"][0]
    assert json.loads(chat["message"]["content"])["a"] in (1, 2)
    assert said(response_format={"type": "json_object"}, max_tokens=1)["text"].startswith("{")
    two = {"json_schema": wanted, "guided_json": wanted}
    in_a_line(refused(client, "/v1/completions", {"prompt": "x"} | two)[1], *two)
    assert said(response_format={"type": "text"}) == said()


def test_grammars_are_made_one_at_a_time_and_hold_up_no_other_request(monkeypatch) -> None:
    """Eight slow ones at once would take every thread that there is for other work."""
    inside, most, go_on = [], [], threading.Event()

    def slow(wanted: object, tokenizer: object) -> str:
        inside.append(wanted)
        most.append(len(inside))
        go_on.wait(PATIENCE)
        inside.pop()
        return "made"

    async def ask() -> list[object]:
        turn, one = asyncio.Lock(), schema.Completion(json_schema={"type": "object"})
        waiting = [asyncio.ensure_future(asked.constraint_of(one, None, turn)) for _ in range(8)]
        while not most:
            await asyncio.sleep(0.001)
        assert await asked.constraint_of(schema.Completion(), None, turn) is None
        go_on.set()
        return await asyncio.gather(*waiting)

    monkeypatch.setattr(asked, "json_schema", slow)
    assert asyncio.run(ask()) == ["made"] * 8 and set(most) == {1}


@settings(
    max_examples=150, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(
    some.sampled_from(
        [*ROUTES, "/tokenize", "/v1/states", "/v1/states/x/fork", "/slots/0?action=erase"]
    ),
    some.dictionaries(
        some.sampled_from(sorted(schema.FIELDS | {"type", "filename", "content"})),
        some.recursive(
            some.sampled_from(
                [None, True, -1, 3, 2**70, 0.5, 1e308, "", "x", "text", "\ud83d", "auto"]
            ),
            lambda inner: some.lists(inner, max_size=2) | some.dictionaries(
                some.sampled_from(["type", "role", "content", "text", "function", "name", "schema"]),
                inner, max_size=3,
            ),
            max_leaves=5,
        ),
        max_size=5,
    ),
)  # fmt: skip
def test_an_error_is_one_line_that_names_a_field(talking, route, body) -> None:
    answer = talking.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 201, 400, 404), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert "\n" not in error["message"] and error["message"].startswith(error["param"] or ""), error
        assert error["param"] or error["message"].startswith(("body", "state", "tokens of the prompt")), error


def write() -> None:
    """Put the table into the guide."""
    texts = [f"Row {i} of {i * i}: the cat sat on the mat, and then the mat sat.\n" for i in range(80)]
    with tempfile.TemporaryDirectory() as folder:
        one = served(Path(folder), Tokenizer.train(texts, VOCAB))
        one.template = Template(READS + TALK, "here")
        with TestClient(create([one]), base_url="http://localhost") as client:
            made = table(client)
    start, end = "<!-- fields -->\n", "\n<!-- end of fields -->"
    before, _, rest = GUIDE.read_text().partition(start)
    GUIDE.write_text(before + start + made + end + rest.partition(end)[2])


if __name__ == "__main__":
    write()
