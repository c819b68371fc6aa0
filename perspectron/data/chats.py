"""Records of conversations: {"messages": [{"role": …, "content": …}, …]}, or ShareGPT's {"conversations": [{"from": …,
"value": …}, …]}. Each answer of the assistant is learned, as a completion of all messages before it; what it says
before the first message of a user is left out, and what has a `weight` of 0 is only read."""

from collections.abc import Iterator
from typing import Any

from perspectron.data.template import Template
from perspectron.util.errors import ConfigError

KEYS = ("messages", "conversations")
"""Fields of a record that may hold a conversation."""
BESIDE = ("tools", "functions")
"""Fields of a record that may hold the tools of its conversation."""
NAMES = (("role", "from"), ("content", "value"))
"""Field names of a message's role, and of its text."""
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
"""Roles as ShareGPT has them."""
NOTHING: tuple[Any, ...] = (None, False, "", "[]", "{}", "null", [], {})
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with what was thought before it, which is not learned."""
KNOWN = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, str]


class NoTalk(ValueError):
    """A record holds no conversation that can be learned; the text says why."""


def of(record: Any) -> list[Message] | None:
    """The messages of a record; None if it has none. NoTalk: something is wrong with them."""
    found = [name for name in KEYS if isinstance(record, dict) and isinstance(record.get(name), list)]
    if not found or (not any(map(record.get, found)) and "prompt" in record):
        return None
    field = next(filter(record.get, found), found[0])
    for name in BESIDE:
        if record.get(name) not in NOTHING:
            raise NoTalk(f"{name!r} beside {field!r}, which the prompts would lack")
    begin = next((number for number, one in enumerate(record[field]) if _role(one) == "user"), 0)
    talk = [one for number, one in enumerate(record[field]) if number >= begin or _role(one) != "assistant"]
    said = [_message(one, field) for one in talk]
    if not any(message["role"] == "assistant" for message in said):
        raise NoTalk(f"no answer of the assistant in {field!r}")
    return said


def _name(one: dict[str, Any], names: tuple[str, ...]) -> str:
    """The one of these names under which a message has a value. In a table it has all of them, the others with None."""
    return next((name for name in names if one.get(name) is not None), names[0])


def _role(one: Any) -> str | None:
    role = one.get(_name(one, NAMES[0])) if isinstance(one, dict) else None
    return ROLES.get(role, role) if isinstance(role, str) else None


def _message(one: Any, field: str) -> Message:
    if not isinstance(one, dict):
        raise NoTalk(f"{field!r}: a message that is no object")
    who, content = _role(one), _name(one, NAMES[1])
    if who is None:
        raise NoTalk(f"{field!r}: a message without {_name(one, NAMES[0])!r}")
    if who not in KNOWN:
        raise NoTalk(f"{field!r}: a role that is none of {', '.join(KNOWN)}")
    text = one.get(content)
    if one.get("tool_calls") or one.get("function_call"):
        raise NoTalk(f"{field!r}: calls of tools, which are not learned")
    if any(one.get(name) not in NOTHING for name in REASONING):
        raise NoTalk(f"{field!r}: reasoning in a field of its own, which is not learned")
    if isinstance(text, list):  # parts, of which texts are joined
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in text
        ]
        known = [part for part in parts if isinstance(part, str)]
        text = "".join(known) if len(known) == len(parts) else None
    if not isinstance(text, str):
        raise NoTalk(f"{field!r}: {content!r} is no text")
    return {"role": who, "content": text} | ({"weight": "0"} if one.get("weight") == 0 else {})


def answers(said: list[Message], template: Template) -> Iterator[tuple[str, str, list[Message]]]:
    """(prompt, answer, messages that the prompt was made of) for each answer that is not empty. NoTalk: the template
    fails on them."""
    plain = [{name: message[name] for name in ("role", "content")} for message in said]
    for number, message in enumerate(said):
        if message["role"] == "assistant" and message["content"] and "weight" not in message:
            try:
                yield template.prompt(plain[:number]), message["content"], plain[:number]
            except ConfigError as error:
                raise NoTalk(f"the chat template fails on them: {error}") from None
