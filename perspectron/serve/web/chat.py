"""Chats to prompts, by the template of a model."""

import re
import secrets

from perspectron.config import require
from perspectron.data.template import Template
from perspectron.errors import ConfigError
from perspectron.serve.web import schema

GIVEN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
"""Names of a template that have fields of their own, or are the model's."""


def prompt_of(body: schema.Chat, template: Template) -> str:
    """The prompt of a chat. ConfigError: the template fails, or does not read what the chat gives it."""
    tools = body.tools if body.tool_choice == "auto" else []
    extra = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    extra = {name: value for name, value in extra.items() if value is not None}
    for name, value in body.chat_template_kwargs.items():
        if name in GIVEN:
            raise ConfigError(f"chat_template_kwargs.{name}: it is none of a template's own; leave it out")
        extra[name] = value
    for name, value in (extra | ({"tools": tools} if tools else {})).items():
        field = f"chat_template_kwargs.{name}" if name in body.chat_template_kwargs else name
        if not re.search(rf"\b{re.escape(name)}\b", template.text):
            given = schema.short(value)
            raise ConfigError(
                f"{field} = {given}, must be left out: this model's chat template does not read it"
            )
    messages = [message.seen() for message in body.messages]
    if not body.continue_final_message:
        asks = body.add_generation_prompt in (True, None)
        return template.prompt(messages, tools=tools or None, add_generation_prompt=asks, **extra)
    require(
        not body.add_generation_prompt, "add_generation_prompt", True, "left out with continue_final_message"
    )
    last = messages[-1]["content"]
    require(
        isinstance(last, str), "continue_final_message", True, "left out: the last message has no content"
    )
    # Where the content ends is where a mark after it stands; a space after the mark tells whether the template trims.
    mark = secrets.token_hex(16)
    messages[-1]["content"] = f"{last}{mark} "
    before, found, after = template.prompt(
        messages, tools=tools or None, add_generation_prompt=False, **extra
    ).rpartition(mark)
    require(
        found == mark, "continue_final_message", True, "left out: the template does not show the last message"
    )
    return before if after.startswith(" ") else before.rstrip()
