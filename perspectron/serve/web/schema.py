"""Bodies of requests, as OpenAI's, llama.cpp's and vLLM's clients send them. Each field is honoured, may be ignored as
IGNORED says, or is refused by name; null stands for a field that is left out."""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, LiteralString, Self, get_args

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
"""Long lists are checked up to their first fault: to report a million faults would take ten seconds and 2 GB."""
HALVED = "must be text, without half of a surrogate pair"
LEAST_INT, MOST_INT, VALUES = -(2**63), 2**64 - 1, 1 << 18


def _halved(text: str) -> bool:
    """True if a text has half of a surrogate pair, and is none that a file can hold."""
    return not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)


def _storable(value: Any) -> Any:
    """A value of JSON that a file of a state can hold. ValidationError: half a surrogate, no number or one of more than
    64 bits, or over VALUES values."""
    left, seen = [value], 0
    while left:
        one, seen = left.pop(), seen + 1
        if seen + len(left) > VALUES:
            raise wrong((), value, f"must have at most {VALUES:,} values")
        if isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str) and _halved(one):
            raise wrong((), one, HALVED)
        elif isinstance(one, float) and not math.isfinite(one):
            raise wrong((), one, "must have finite numbers")
        elif isinstance(one, int) and not LEAST_INT <= one <= MOST_INT:
            raise wrong((), one, "must have numbers of at most 64 bits")
    return value


Object = Annotated[dict[str, Any], AfterValidator(_storable)]

IGNORED = {
    "user": "says who asks", "safety_identifier": "says who asks", "metadata": "nothing is kept under it",
    "store": "nobody trains on what is asked here", "prompt_cache_key": "prompts that begin alike share that anyway",
    "prompt_cache_options": "prompts that begin alike share that anyway", "prediction": "changes no token",
}  # fmt: skip
"""Fields on which nothing in an answer depends, and why."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "service_tier": ("auto", "default"),
    "ignore_eos": (False,), "grammar": ("",), "prompt_cache_retention": (),
}  # fmt: skip
"""Fields of features that this server lacks, and the values with which they ask for nothing."""


def wrong(
    at: Sequence[int | str], value: object, words: str, kind: LiteralString = "ours"
) -> ValidationError:
    """The error of a value at the path `at` within what is being validated."""
    error = PydanticCustomError(kind, "{words}", {"words": words})
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
        """The given fields that are honoured. ValidationError: a field is unknown, or asks for what this server does
        not do."""
        if not isinstance(value, dict):
            return value
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        kinds = get_args(cls.model_fields["type"].annotation) if "type" in fields else ()
        if kinds and value.get("type", kinds[0]) not in kinds:
            return {"type": value["type"]}  # what it is, is wrong before what it has
        for name, given in value.items():
            if isinstance(given, str) and _halved(given):
                raise wrong((name,), given, HALVED)
            if name in fields | cls.ignored.keys() or (given is None and name in cls.neutral):
                continue
            if name not in cls.neutral:
                near = difflib.get_close_matches(name[:80], fields, 1)
                words = "no field here" + "".join(f"; did you mean {one}?" for one in near)
                raise wrong((name,), given, words, "unknown")
            if not any(given == one and type(given) in (type(one), float) for one in cls.neutral[name]):
                least = " or ".join(map(repr, cls.neutral[name]))
                raise wrong((name,), given, f"must be {least or 'left out'}: this server does not do that")
        return {name: given for name, given in value.items() if name in fields and given is not None}


TEXT, IDS, PARTS = "a text", "a list of token ids", "a list of parts of type 'text'"
Prompt = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[Tokens, Tag(IDS)],
    Discriminator(
        lambda value: IDS if isinstance(value, list) else TEXT if isinstance(value, str) else None,
        custom_error_type="ours",
        custom_error_message=f"must be {TEXT} or {IDS}",
    ),
]


def _listed(value: object) -> object:
    """A list of texts or prompts; a single one becomes a list of one."""
    ids = isinstance(value, list) and len(value) > 0 and type(value[0]) is int
    return [value] if isinstance(value, str) or ids else value


Prompts = Annotated[
    list[Prompt],
    Field(min_length=1, max_length=PROMPTS, fail_fast=True),
    BeforeValidator(_listed, json_schema_input_type=str | list[Token] | list[str] | list[list[Token]]),
]
Stops = Annotated[
    list[Stop], Field(max_length=STOPS), BeforeValidator(_listed, json_schema_input_type=Stop | list[Stop])
]


class Body(Strict):
    """model: its name; if left out, the first model that is served."""

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
    """schema: given with type "json_object", as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None
    schema_: Object | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise wrong(
                ("json_schema",),
                self.json_schema and {},
                'must be given where type = "json_schema", and only there',
            )
        if self.schema_ is not None and self.type != "json_object":
            raise wrong(("schema",), self.schema_, 'must be left out unless type = "json_object"')
        return self


def _parsed(value: object) -> object:
    """An object, parsed if it is JSON in a text, as OpenAI sends calls and some of vLLM's clients send schemas."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise wrong((), value, f"must be JSON ({error})") from None


Json = Annotated[Object, BeforeValidator(_parsed, json_schema_input_type=Object | str)]


class Sampled(Body):
    """The fields that completions and chats share. state: continue this saved state; save: keep the conversation under
    this name; id_slot: the slot that holds it. cache_prompt: begin at a prefix that was read before. json_schema,
    guided_json: llama.cpp's and vLLM's names for a schema that the answer must follow. temperature to
    repetition_penalty: if left out, those that the model came with, or else 1 and off."""

    ignored = IGNORED
    neutral = NEUTRAL
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=CHOICES)
    stop: Stops = []
    stop_token_ids: Annotated[list[Token], Field(max_length=STOPS)] = []
    response_format: ResponseFormat | None = None
    json_schema: Object | None = None
    guided_json: Json | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    state: Name | None = None
    save: Name | None = None
    id_slot: int | None = Field(None, ge=-1, lt=4096)
    cache_prompt: bool = True


class Completion(Sampled):
    neutral = NEUTRAL | {"suffix": ("",)}
    prompt: Prompts = [""]
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
    arguments: Json = {}


class Call(Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: Called


class Function(Strict):
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: Object = {}
    strict: Literal[False] | None = None
    """True is refused: what a model calls is not held to a schema."""


class Tool(Strict):
    type: Literal["function"]
    function: Function


_TOOLS = TypeAdapter(Annotated[list[Tool], FAST])
Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[Part], FAST, Tag(PARTS)],
    Discriminator(
        lambda value: PARTS if isinstance(value, list) else TEXT if isinstance(value, str) else None,
        custom_error_type="ours",
        custom_error_message=f"must be {TEXT} or {PARTS}",
    ),
]


def _tools(tools: list[Object]) -> list[Object]:
    """Tools as they were given, in their own order, which a template may show."""
    _TOOLS.validate_python(tools)
    return tools


class Message(Strict):
    """A message. An assistant's may have calls or reasoning and no content."""

    neutral = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], FAST] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says(self) -> Self:
        told = self.role == "assistant" and (self.tool_calls or self.reasoning_content is not None)
        if self.content is None and not told:
            raise wrong(("content",), None, f"must be {TEXT} or {PARTS}")
        return self

    @property
    def said(self) -> str:
        """The text of its content, that of its parts one after the other."""
        text = self.content or ""
        return text if isinstance(text, str) else "".join(part.text for part in text)

    def seen(self, *, parts: bool) -> Object:
        """The message as templates see it, without the fields that were not given. parts: leave content that is a list
        of parts as it is, for a template that takes them; else its texts are joined."""
        told = {"role": self.role} | self.model_dump(exclude_unset=True)
        if isinstance(self.content, list) and not parts:
            told["content"] = self.said
        return told


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
    prompt: Prompt


class Fork(Body):
    """A copy of a state, or of what it was after its first `token` tokens."""

    id: Name
    token: int | None = Field(None, ge=0)


class Diff(Body):
    """A comparison with another state, and a probe text on which to compare."""

    other: Name
    on: Prompt = ""


class Bisect(Body):
    """A question, and a condition on its answer of `max_tokens`: a text that it contains, or "p(TEXT) > NUMBER"."""

    ask: Prompt
    until: Annotated[str, Field(min_length=1, max_length=4096)]
    max_tokens: int | None = Field(None, ge=1)


class Rebase(Body):
    """A new state: the text of one from its token `after` on, replayed after the text of another or a prompt, by the
    model `reader`, or by the same one."""

    id: Name
    onto: Name | None = None
    prompt: Prompt | None = None
    after: int = Field(0, ge=0)
    reader: Name | None = None


class Merge(Body):
    """A new state of one and another that comes after it. on: a probe text on which it is judged."""

    id: Name
    other: Name
    on: Prompt = ""


class Slot(Body):
    filename: Name = ""


FIELDS = {
    name
    for body in (Completion, Chat, NewState, Fork, Diff, Bisect, Rebase, Merge, Slot)
    for name in body.model_fields
}


def described(problem: Mapping[str, Any]) -> tuple[str, str | None]:
    """An error of pydantic in a line, and the name of the field."""
    path = [str(part).encode("ascii", "backslashreplace").decode()[:80] for part in problem["loc"][1:]]
    where = ".".join(part for part in path if part not in (TEXT, IDS, PARTS))
    if problem["type"] == "json_invalid":
        return f"body: no JSON ({problem['ctx']['error']}, at character {where})", None
    if isinstance(problem["input"], bytes):
        return "body: no JSON; send it with Content-Type: application/json", None
    if problem["type"] == "missing":
        return f"{where or 'body'} is missing", where or None
    if problem["type"] == "unknown":
        return f"{where}: {problem['msg']}", where
    words = problem["msg"].replace("Input should be", "must be")
    return f"{where or 'body'} = {short(problem['input'])}, {words}", where or None


def short(value: object) -> str:
    """A value of a body, in a line."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else f"an object of {len(value)}"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
