"""Every field that clients send is honoured, may be ignored as it is written, or is refused by its name.

    python -m tests.serve.test_fields

writes the table of OpenAI's fields into the guide.
"""

import collections.abc
import json
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints

import pytest
from fastapi.testclient import TestClient
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from typing_extensions import is_typeddict

from perspectron.data import Tokenizer
from perspectron.data.template import Template
from perspectron.serve.web import schema
from perspectron.serve.web.app import create
from tests.decode.conftest import VOCAB
from tests.serve.conftest import served

GUIDE = Path(__file__).parents[2] / "docs/guides/serve.md"
READS = "{# tools documents enable_thinking #}"
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
    tiny.template = Template(READS + "{# reasoning_effort verbosity #}" + TALK, "here")
    with TestClient(create([tiny])) as client:
        yield client


def test_every_field_of_openai_is_honoured_or_refused_by_its_name(talking) -> None:
    """And the guide says which: the table there is this one."""
    assert table(talking) in GUIDE.read_text(), "run python -m tests.serve.test_fields"


def write() -> None:
    """Put the table into the guide."""
    texts = [f"Row {i} of {i * i}: the cat sat on the mat, and then the mat sat.\n" for i in range(80)]
    with tempfile.TemporaryDirectory() as folder:
        one = served(Path(folder), Tokenizer.train(texts, VOCAB))
        one.template = Template(READS + "{# reasoning_effort verbosity #}" + TALK, "here")
        with TestClient(create([one])) as client:
            made = table(client)
    start, end = "<!-- fields -->\n", "\n<!-- end of fields -->"
    before, _, rest = GUIDE.read_text().partition(start)
    GUIDE.write_text(before + start + made + end + rest.partition(end)[2])


if __name__ == "__main__":
    write()
