"""Bodies of requests, as OpenAI's and llama.cpp's clients send them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

STOPS, STOP_LENGTH, CHOICES, PROMPTS, LOGPROBS = 16, 256, 16, 64, 20
Name = Annotated[str, Field(max_length=200)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Prompt = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
"""Long lists are checked up to their first fault: a million faults would take ten seconds and 2 GB to tell."""


class Body(BaseModel):
    """model: by name; the first one that is served where it is left out."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model: Name = ""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


class Sampled(Body):
    """The fields that completions and chats share. state: go on from this one; save: keep the conversation under this
    name; id_slot: the slot that holds it. What this server does not do may be given where it changes nothing."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    state: Name | None = None
    save: Name | None = None
    id_slot: int | None = Field(None, ge=-1, lt=4096)
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None


class Completion(Sampled):
    prompt: (
        Annotated[str, Field()]
        | Prompt
        | Annotated[list[str], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
        | Annotated[list[Prompt], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
    ) = ""
    logprobs: int | None = Field(None, ge=0, le=LOGPROBS)
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str


class Chat(Sampled):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=LOGPROBS)
    tools: Annotated[list[Any], Field(max_length=0)] | None = None


class Tokenize(Body):
    content: str


class Detokenize(Body):
    tokens: Tokens


class NewState(Body):
    """A state that has read a prompt."""

    id: Name
    prompt: str | Tokens


class Fork(Body):
    """A copy of a state, of its first so many tokens where `token` says so."""

    id: Name
    token: int | None = Field(None, ge=0)


class Slot(Body):
    filename: Name = ""
