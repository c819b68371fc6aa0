"""Bodies of requests, as OpenAI's, llama.cpp's and vLLM's clients send them. Each field is honoured, may be ignored as
IGNORED says, or is refused by name; null stands for a field that is left out."""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)  # fmt: skip
from pydantic_core import InitErrorDetails, PydanticCustomError

from perspectron.util.files import parse_json

STOPS, STOP_LENGTH, CHOICES, PROMPTS, LOGPROBS = 16, 256, 16, 64, 20
Name = Annotated[str, Field(max_length=200)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
FAST = Field(fail_fast=True)
Tokens = Annotated[list[Token], FAST]
"""Long lists are checked up to their first fault: a million faults would take ten seconds and 2 GB to tell."""
Object = dict[str, Any]

IGNORED = {
    "user": "says who asks", "safety_identifier": "says who asks", "metadata": "nothing is kept under it",
    "store": "nobody trains on what is asked here", "prompt_cache_key": "prompts that begin alike share that anyway",
    "prompt_cache_options": "prompts that begin alike share that anyway", "prediction": "changes no token",
}  # fmt: skip
"""Fields on which nothing in an answer depends, and why."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "service_tier": ("auto", "default"),
    "ignore_eos": (False,), "cache_prompt": (True,), "grammar": ("",), "prompt_cache_retention": (),
}  # fmt: skip
"""Fields of what this server does not do, and the values at which they ask for nothing."""


def wrong(at: Sequence[int | str], value: object, words: str) -> ValidationError:
    """The error of a value within what is validated."""
    error = PydanticCustomError("ours", "{words}", {"words": words})
    return ValidationError.from_exception_data(
        "body", [InitErrorDetails(type=error, loc=tuple(at), input=value)]
    )


class Strict(BaseModel):
    """An object of known fields."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ignored: ClassVar[Mapping[str, str]] = {}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def known(cls, value: Any) -> Any:
        """The fields that are honoured and given. ValidationError for one that is not known, or asks for what is not
        done."""
        if not isinstance(value, dict):
            return value
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        kinds = get_args(cls.model_fields["type"].annotation) if "type" in fields else ()
        if kinds and value.get("type", kinds[0]) not in kinds:
            return {"type": value["type"]}  # what it is, is wrong before what it has
        for name, given in value.items():
            if name in fields | cls.ignored.keys() or (given is None and name in cls.neutral):
                continue
            if name not in cls.neutral:
                near = difflib.get_close_matches(name[:80], fields, 1)
                raise wrong(
                    (name,), given, "no field here" + "".join(f"; did you mean {one}?" for one in near)
                )
            if not any(given == one and type(given) in (type(one), float) for one in cls.neutral[name]):
                least = " or ".join(map(repr, cls.neutral[name]))
                raise wrong((name,), given, f"{least or 'left out'}: this server does not do that")
        return {name: given for name, given in value.items() if name in fields and given is not None}


def _list_kind(value: object) -> str | None:
    """Tag of a text, or of a list by its first entry."""
    if isinstance(value, list):
        first = value[0] if value else ""
        return "ids" if type(first) is int else "lists" if isinstance(first, list) else "texts"
    return "text" if isinstance(value, str) else None


def _either(words: str, kind: Callable[[object], str | None]) -> Discriminator:
    return Discriminator(kind, custom_error_type="ours", custom_error_message=words)


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Tokens, Tag("ids")]
    | Annotated[list[Tokens], Field(max_length=PROMPTS, fail_fast=True), Tag("lists")]
    | Annotated[list[str], Field(min_length=1, max_length=PROMPTS, fail_fast=True), Tag("texts")],
    _either("a text, a list of token ids, or a list of one of them", _list_kind),
]
Stops = Annotated[
    Annotated[Stop, Tag("text")] | Annotated[list[Stop], Field(max_length=STOPS), Tag("texts")],
    _either(
        "a text or a list of texts",
        lambda value: _list_kind(value) and ("text", "texts")[isinstance(value, list)],
    ),
]


class Body(Strict):
    """model: by name; the first one that is served where it is left out."""

    model: Name = ""


class StreamOptions(Strict):
    neutral = {"include_obfuscation": (False,)}
    include_usage: bool = False


class Schema(Strict):
    """A JSON schema as OpenAI wraps it; strict or not, it is kept to."""

    name: Name = ""
    description: str = ""
    strict: bool = True
    schema_: Object | None = Field(None, alias="schema")


class ResponseFormat(Strict):
    """schema: beside "json_object", as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None
    schema_: Object | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise wrong(
                ("json_schema",), self.json_schema and {}, 'given where type = "json_schema", and only there'
            )
        if self.schema_ is not None and self.type != "json_object":
            raise wrong(("schema",), self.schema_, 'left out unless type = "json_object"')
        return self


def _schema(value: object) -> object:
    """A schema, also where it is JSON in a text, as some of vLLM's clients send it."""
    return _parsed(value) if isinstance(value, str) else value


def _parsed(text: str) -> Object:
    """The object of a text. ValidationError: it is none."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise wrong((), text, f"JSON ({error})") from None
    if not isinstance(value, dict):
        raise wrong((), text, "JSON of an object")
    return value


class Sampled(Body):
    """The fields that completions and chats share. state: go on from this one; save: keep the conversation under this
    name; id_slot: the slot that holds it. json_schema, guided_json: as llama.cpp and vLLM call a schema to keep to."""

    ignored = IGNORED
    neutral = NEUTRAL
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=CHOICES)
    stop: Stops | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=STOPS)] = []
    response_format: ResponseFormat | None = None
    json_schema: Object | None = None
    guided_json: Annotated[Object | None, BeforeValidator(_schema, json_schema_input_type=Object | str)] = (
        None
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    state: Name | None = None
    save: Name | None = None
    id_slot: int | None = Field(None, ge=-1, lt=4096)


class Completion(Sampled):
    neutral = NEUTRAL | {"suffix": ("",)}
    prompt: Prompt = ""
    logprobs: int | None = Field(None, ge=0, le=LOGPROBS)
    echo: bool = False
    best_of: int | None = None


class Part(Strict):
    """A part of a message."""

    ignored = {"prompt_cache_breakpoint": IGNORED["prompt_cache_options"]}
    type: Literal["text"]
    text: str


class Called(Strict):
    """A function and what it is called with. arguments: JSON in a text, as OpenAI has it, or the object."""

    name: str
    arguments: Annotated[Object, BeforeValidator(_schema, json_schema_input_type=Object | str)] = {}


class Call(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: Called


class Function(Strict):
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: Object = {}
    strict: bool = False


class Tool(Strict):
    type: Literal["function"]
    function: Function


_PARTS, _TOOLS = TypeAdapter(Annotated[list[Part], FAST]), TypeAdapter(Annotated[list[Tool], FAST])


def _joined(content: Any) -> Any:
    """The text of a message's parts, one after the other."""
    if not isinstance(content, list):
        return content
    return "".join(part.text for part in _PARTS.validate_python(content))


def _tools(tools: list[Object]) -> list[Object]:
    """Tools as they were given, in their own order, which a template may show."""
    _TOOLS.validate_python(tools)
    return tools


class Message(Strict):
    """A message. An assistant's may have no content beside its calls or its reasoning."""

    neutral = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        str | None, BeforeValidator(_joined, json_schema_input_type=str | list[Part] | None)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[Call], FAST] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says(self) -> Self:
        told = self.role == "assistant" and (self.tool_calls or self.reasoning_content is not None)
        if self.content is None and not told:
            raise wrong(("content",), None, "a text or a list of parts of type 'text'")
        return self

    def seen(self) -> Object:
        """The message as templates see it: fields that were not given are not there."""
        return {"role": self.role, "content": self.content} | self.model_dump(exclude_unset=True)


class Chat(Sampled):
    """reasoning_effort, verbosity, chat_template_kwargs: given to the template, as `tools` are."""

    neutral = NEUTRAL | {
        "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (),
        "moderation": (), "web_search_options": (), "parallel_tool_calls": (True,),
    }  # fmt: skip
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=LOGPROBS)
    tools: Annotated[list[Object], FAST, AfterValidator(_tools)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Object = {}
    reasoning_effort: str | None = None
    verbosity: str | None = None


class Tokenize(Body):
    content: str


class Detokenize(Body):
    tokens: Tokens


class NewState(Body):
    """A state that has read a prompt."""

    id: Name
    prompt: Annotated[
        Annotated[str, Tag("text")] | Annotated[Tokens, Tag("ids")],
        _either(
            "a text or a list of token ids",
            lambda value: _list_kind(value) and ("text", "ids")[isinstance(value, list)],
        ),
    ]


class Fork(Body):
    """A copy of a state, of its first so many tokens where `token` says so."""

    id: Name
    token: int | None = Field(None, ge=0)


class Slot(Body):
    filename: Name = ""


FIELDS = {name for body in (Completion, Chat, NewState, Fork, Slot) for name in body.model_fields}
WORDS = {
    "greater_than_equal": "≥ {ge}", "greater_than": "> {gt}", "less_than_equal": "≤ {le}", "less_than": "< {lt}",
    "finite_number": "finite", "int_type": "a whole number", "int_from_float": "a whole number",
    "int_parsing": "a whole number", "int_parsing_size": "a whole number of 64 bits", "float_type": "a number",
    "bool_type": "true or false", "string_type": "a text", "string_unicode": "a text", "list_type": "a list",
    "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
    "literal_error": "{expected}", "string_too_short": "of at least {min_length} characters",
    "string_too_long": "of at most {max_length} characters",
    "too_short": "of at least {min_length} entries", "too_long": "of at most {max_length} entries", "ours": "{msg}",
}  # fmt: skip
"""Bounds by the type of a validator's error."""


def told(problem: Mapping[str, Any], body: object) -> tuple[str, str | None]:
    """An error of a validator in our words, and the name of the field."""
    kind, context, path = problem["type"], problem.get("ctx", {}), list[str]()
    for part in problem["loc"][1:]:  # names and places, and between them tags, which are not in the body
        if isinstance(body, list) and isinstance(part, int):
            body = body[part] if part < len(body) else None
        elif isinstance(body, dict) and (part in body or part == problem["loc"][-1]):
            body = body.get(part)
        elif problem["loc"][0] == "body":
            continue
        path.append(str(part).encode("ascii", "backslashreplace").decode()[:80])
    where = ".".join(path)
    if kind == "json_invalid":
        return f"body: no JSON ({context.get('error', '')}, at character {problem['loc'][-1]})", None
    if isinstance(problem["input"], bytes):
        return "body: no JSON; send it with Content-Type: application/json", None
    if kind == "missing":
        return f"{where or 'body'} is missing", where or None
    words = WORDS.get(kind, "another value ({type})").format(
        **{"type": kind, "msg": problem["msg"]} | context
    )
    if words.startswith("no field"):
        return f"{where}: {words}", where
    return f"{where or 'body'} = {short(problem['input'])}, must be {words}", where or None


def short(value: object) -> str:
    """A value of a body, in a line."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else f"an object of {len(value)}"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
