"""Chats to prompts, by the template of a model."""

from typing import Any

from perspectron.data.template import Template
from perspectron.errors import ConfigError
from perspectron.serve.web import schema

OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
"""Names that a template sees, and that have fields of their own or are the model's."""


def prompt_of(body: schema.Chat, template: Template) -> str:
    """The prompt of a chat. ConfigError: the template fails, or does not read what the chat gives it."""
    named = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    tools = body.tools if body.tool_choice == "auto" else []
    seen = {"tools": tools} if tools else {}
    seen |= given
    for name, value in body.chat_template_kwargs.items():
        if name in OWN:
            raise ConfigError(f"chat_template_kwargs.{name}: a template is not given that so; leave it out")
        seen[f"chat_template_kwargs.{name}"] = given[name] = value
    for field, value in seen.items():
        if not template.uses(field.rpartition(".")[2]):
            said = f"{field} = {schema.short(value)}, must be left out"
            raise ConfigError(f"{said}: this model's chat template does not read it")
    return template.prompt(
        [message.seen() for message in body.messages], tools=tools or None,
        add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message, **given,
    )  # fmt: skip
