"""A model as it is served: its engine, its states, and the bounds on what one request may ask."""

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from perspectron.data import Tokenizer
from perspectron.data.template import Template
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.serve.engine import Engine
from perspectron.serve.states import States
from perspectron.util.config import require

OPENAI = SamplingConfig(temperature=1.0)
"""Sampling settings for what a request leaves out, unless the model came with its own."""
SHORT = 1 << 13  # characters of a text that is encoded on the event loop itself


@dataclass
class Served:
    """A served model. states: by name; slot_files: what llama.cpp's clients save; slots: sessions in their slots."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    states: States
    slot_files: States
    largest: int
    """Most tokens that one request may draw."""
    longest: int = 1 << 20
    """Most tokens that one prompt may have."""
    template: Template | None = None
    sampling: SamplingConfig = OPENAI
    """Sampling settings for what a request leaves out."""
    created: int = field(default_factory=lambda: int(time.time()))
    slots: dict[int, Session] = field(default_factory=dict)
    encoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Bounds how many long texts are encoded at a time."""
    rendering: asyncio.Lock = field(default_factory=asyncio.Lock)
    compiling: asyncio.Lock = field(default_factory=asyncio.Lock)

    def slot(self, id: int) -> int:
        """The number of a slot, checked. ConfigError: there are not so many slots."""
        require(
            0 <= id < self.engine.limit, "id_slot", id, f"≥ 0 and < {self.engine.limit}, the rows there are"
        )
        return id

    def readable(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, checked. ConfigError: more than `longest` of them."""
        require(len(ids) <= self.longest, "tokens of the prompt", len(ids),
                f"≤ {self.longest}, what this server reads at most")  # fmt: skip
        return ids

    async def ids(self, prompt: str | list[int], turn: AbstractAsyncContextManager[None]) -> list[int]:
        """The ids of a prompt; errors as `readable`. Texts longer than SHORT are encoded in threads, when it is their
        `turn` (of `encoding`), so that a short one waits neither for the event loop nor for a thread."""
        if not isinstance(prompt, str) or len(prompt) <= SHORT:
            return self.readable(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

        def encoded() -> list[int]:
            ids = list[int]()
            for piece in self.tokenizer.pieces(prompt):
                ids += piece
                self.readable(ids)
            return ids

        async with turn:
            return await asyncio.to_thread(encoded)
