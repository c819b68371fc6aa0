"""Requests turned into what the engine takes: prompts, sampling settings, grammars. ConfigError, naming the field, for
what is not possible."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from perspectron.data import Tokenizer
from perspectron.data.template import RESERVED, Template
from perspectron.decode.constrain import Constraint, json_schema
from perspectron.decode.sampling import SamplingConfig
from perspectron.serve.served import Served
from perspectron.serve.web import schema
from perspectron.util.config import require
from perspectron.util.errors import ConfigError


def prompt_of(body: schema.Chat, template: Template, tokenizer: Tokenizer) -> str:
    """The prompt of a chat, for this tokenizer. ConfigError: the template fails, or does not read what the chat gives
    it."""
    given, own = given_to(body), body.chat_template_kwargs
    for name in own:
        if name in RESERVED:
            raise ConfigError(f"chat_template_kwargs.{name}: a template is not given that so; leave it out")
    template = template.for_tools(given.get("tools"))
    for name, value in given.items():
        if not template.uses(name):
            field = f"chat_template_kwargs.{name}" if name in own else name
            said = f"{field} = {schema.short(value)}, must be left out"
            raise ConfigError(f"{said}: this model's chat template does not read it")
    for at, message in enumerate(body.messages):
        if message.tool_calls and "tool_calls" not in template.text:
            said = "must be left out: this model's chat template does not read them"
            raise ConfigError(f"messages.{at}.tool_calls = {schema.short(message.tool_calls)}, {said}")
    messages = [message.seen(parts=template.takes_parts) for message in body.messages]
    return template.marked(
        messages, tokenizer, add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message, **given,
    )  # fmt: skip


def given_to(body: schema.Chat) -> dict[str, Any]:
    """The values besides its messages that a chat gives to the template. ConfigError: one that is given twice, with
    another value each."""
    tools = body.tools if body.tool_choice == "auto" else None
    named = {"tools": tools or None, "reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in body.chat_template_kwargs.items():
        said = schema.short(given.setdefault(name, value))
        same = f"left out, or {schema.short(value)} as in chat_template_kwargs"
        require(given[name] == value, name, said, same)
    return given


def tokens_of(body: schema.Chat) -> int | None:
    """The most tokens that a chat asks for in its answer; None if it sets no limit."""
    given = {most for most in (body.max_completion_tokens, body.max_tokens) if most is not None}
    require(len(given) < 2, "max_tokens", body.max_tokens, "left out with max_completion_tokens")
    return given.pop() if given else None


def sampling_of(body: schema.Sampled, otherwise: SamplingConfig) -> SamplingConfig:
    """The sampling settings of a request, those of `otherwise` for what it leaves out; without a seed, a random one."""
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    asked = {name: value for name in names if (value := getattr(body, name)) is not None}
    if asked.get("top_k") == -1:
        asked["top_k"] = 0
    if asked.get("top_p") == 0:  # nothing of the probability: the most likely token
        asked["top_p"] = 1e-9
    return replace(otherwise, **asked, seed=seed)


def check(body: schema.Sampled, prompts: Sequence[str | list[int]], tokens: int, served: Served) -> None:
    """Check a request against the limits of the server, and its fields against each other."""
    largest, known = served.largest, served.tokenizer.vocab_size
    require(tokens <= largest, "max_tokens", tokens, f"≤ {largest}, what this server draws at most")
    if isinstance(body, schema.Completion):
        require(tokens > 0 or body.echo, "max_tokens", tokens, "≥ 1 without echo")
        require(
            body.best_of in (None, body.n), "best_of", body.best_of, f"n = {body.n}: none is left out here"
        )
    elif isinstance(body, schema.Chat):
        require(tokens > 0, "max_tokens", tokens, "≥ 1")
        top = body.top_logprobs
        require(body.logprobs or not top, "top_logprobs", top, "left out without logprobs")
    texts, most = body.n * len(prompts) if tokens else 0, served.engine.limit + served.engine.queue
    name = "n" if body.n > 1 else "prompt"
    require(texts <= most, name, f"{texts} texts", f"≤ {most}, what this server takes at once")
    single = body.n == 1 and len(prompts) == 1 and tokens > 0
    for name, value in (("save", body.save), ("id_slot", body.id_slot)):
        bound = "left out with n > 1, several prompts or max_tokens = 0"
        require(value in (None, -1) or single, name, value, bound)
    require(body.min_tokens <= tokens, "min_tokens", body.min_tokens, f"≤ max_tokens = {tokens}")
    for id in body.stop_token_ids:
        require(id < known, "stop_token_ids", id, f"< {known}, the tokens there are")
    if body.save is not None:
        served.states.path(body.save, "save")


async def constraint_of(
    body: schema.Sampled, tokenizer: Tokenizer, turn: AbstractAsyncContextManager[None]
) -> Constraint | None:
    """The grammar that the answer must follow; None if none is asked for. Grammars are compiled off the event loop,
    when it is their `turn`, one at a time, so that slow ones hold one thread. ConfigError, naming the field: it cannot
    be compiled."""
    form = body.response_format
    asked: dict[str, dict[str, Any] | None] = {
        "json_schema": body.json_schema,
        "guided_json": body.guided_json,
    }
    asked = {name: wanted for name, wanted in asked.items() if wanted is not None}
    if form is not None and form.type != "text":
        asked["response_format"] = form.schema_ if form.json_schema is None else form.json_schema.schema_
    require(len(asked) < 2, " and ".join(asked), "given", "one of them alone")
    for name, wanted in asked.items():
        schema_of = {"type": "object"} if wanted is None else wanted
        try:
            async with turn:
                return await asyncio.to_thread(json_schema, schema_of, tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    return None
