"""Constraints: grammars that a text has to fit, token by token, such as a JSON schema
(docs/guides/your-text.md#json-and-other-ends).

Shapes: V vocabulary.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perspectron.decode.processors import Hook, Step
from perspectron.decode.row import Row, Vocabulary
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, NonFiniteError

INSTALL = "pip install 'perspectron[constrain]'"
MOST_BYTES = 64 << 10
"""Maximum size of a schema, in bytes."""
SECONDS, MEMORY = 2, 1 << 30
"""Seconds of processor time and bytes of address space that compiling a schema may take; some schemas would take the
library hours, or all memory, whatever its own limits."""
LIMITS: dict[str, Any] = {"max_lexer_states": 20_000, "verbose_errors": False}
"""The library's own limits on the time and memory of a text's grammar: at most 40 MB of states a row."""
BLANKS = r" |\n( {0,24}|\t{0,8})"
"""Blanks between two parts of a JSON text: a space, or a new line. Without a bound unsure models draw them for ever."""
UNSPELLED = "the tokenizer cannot spell what the grammar asks for"
OPTIONS = {"whitespace_pattern": BLANKS, "lenient": False, "coerce_one_of": False}

_ONE = ("items", "additionalItems", "additionalProperties")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_BOUNDS = (
    *("type", "enum", "const", "$ref", "pattern", "format", "minLength", "maxLength", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("required", "minProperties", "maxProperties"),
)
_ROUNDED = {"minimum": math.inf, "maximum": -math.inf}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "const")
_NOTES = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$anchor", "$comment"),
)
KEYWORDS = frozenset((*_ONE, *_LISTED, *_NAMED, *_BOUNDS, *_NOTES))
"""Keywords that a schema may have; those of _NOTES are accepted but do not constrain texts."""


class Matcher(Hook):
    """State of the grammar for one row. ends: tokens that are allowed wherever the text may end. error: why the grammar
    cannot go on; empty while it can."""

    reads_ahead = True

    def __init__(self, inner: Any, vocab_size: int, end: int) -> None:
        self._inner, self._vocab, self._end, self.ends = inner, vocab_size, end, frozenset((end,))
        self._bits = np.zeros((vocab_size + 31) // 32 * 4, np.uint8)
        self._where = self._bits.ctypes.data, self._bits.nbytes

    def allowed(self) -> Tensor:
        """Tokens [V] that may come next. NonFiniteError: the grammar cannot go on."""
        self._inner.unsafe_compute_mask_ptr(*self._where)
        allowed = np.unpackbits(self._bits, count=self._vocab, bitorder="little").view(np.bool_)
        allowed[list(self.ends)] = allowed[self._end]
        self._check()
        return torch.from_numpy(allowed)

    def logits(self, logits_NV: Tensor, step: Step) -> Tensor:
        return logits_NV.masked_fill(~self.allowed(), -torch.inf)

    def took(self, id: int) -> bool:
        """Advance by a token. True if the text is now complete and nothing may follow."""
        if id in self.ends:
            return False
        if not self._inner.consume_token(id):
            self._check()
        return bool(self._inner.is_stopped()) and not self._inner.is_error()

    def _check(self) -> None:
        if self.error:
            raise NonFiniteError(f"constraint: {self.error}")

    @property
    def error(self) -> str:
        if not self._inner.is_error():
            return ""
        said = " ".join(str(self._inner.get_error()).partition("<state>")[0].split())
        said = said.removesuffix(" <non-verbose/>")
        if UNSPELLED in said:
            return UNSPELLED
        if said == "NoExtensionBias":
            return "no text fits it"
        return said.replace(" Enable 'coerce_one_of' option to approximate oneOf with anyOf", " Use anyOf.")


@dataclass(frozen=True, eq=False)
class Constraint(Hook):
    """A grammar for one tokenizer: texts are drawn to fit it, and end ("stop") once complete. It is immutable: each row
    gets a matcher of its own, the first of which is compiled already. ConfigError: no text fits the grammar, or it is
    too complex."""

    tokenizer: Vocabulary
    grammar: str
    _ready: list[Matcher] = field(default_factory=list)

    def __post_init__(self) -> None:
        begun = self._compiled()
        try:
            fits = begun.allowed().any()
        except NonFiniteError:
            raise ConfigError(f"schema: {begun.error}") from None
        require(bool(fits), "schema", "of no text", "one that a token may begin")
        self._ready.append(begun)

    def begin(self, row: Row) -> Matcher:
        """A new matcher for a row, never a copy of another: copies would share the grammar's states, and so their
        limits. ConfigError: the row has another tokenizer, or `min_tokens`, though the grammar ends texts."""
        same = self.tokenizer is row.vocabulary
        require(same, "constraint", "of another tokenizer", "of the one that the rows have")
        require(row.early == 0, "min_tokens", row.early, "0 with a constraint, which ends texts itself")
        try:
            matcher = self._ready.pop()
        except IndexError:
            matcher = self._compiled()
        matcher.ends = row.ends
        return matcher

    def _compiled(self) -> Matcher:
        import llguidance

        limits, tokens = llguidance.LLParserLimits(**LIMITS), _tokens(self.tokenizer)  # type: ignore[arg-type]
        inner = llguidance.LLMatcher(tokens, self.grammar, log_level=0, limits=limits)
        return Matcher(inner, self.tokenizer.vocab_size, _end(self.tokenizer))


def json_schema(schema: dict[str, Any], tokenizer: Vocabulary) -> Constraint:
    """Limit texts to JSON that a schema (draft 2020-12, as far as KEYWORDS go) accepts; properties come in its order.

    ConfigError, naming what is wrong: a keyword that is unknown or that the library cannot enforce, or a schema that is
    invalid, fits no text, or is too large or too complex. Compiling may take SECONDS at most. Nothing but the schema is
    read: a `$ref` to elsewhere is refused.
    """
    try:
        import llguidance
    except ImportError:
        raise ConfigError(f"llguidance is not installed: {INSTALL}") from None
    require(isinstance(schema, dict), "schema", type(schema).__name__, "an object")
    try:
        text = json.dumps(schema, allow_nan=False)
        require(len(text) <= MOST_BYTES, "bytes of the schema", len(text), f"≤ {MOST_BYTES}")
        text = json.dumps(_inward(json.loads(text)))
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"schema: not a JSON schema ({error})") from None
    _check(schema, "schema")
    _try(grammar)
    return Constraint(tokenizer, grammar)


_TRIAL = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[3]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except ImportError:
    pass
sys.path.insert(0, sys.argv[1])
from llguidance import LLMatcher, LLTokenizer, LLParserLimits
LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0).compute_bitmask()
"""


@lru_cache(maxsize=256)
def _try(grammar: str) -> None:
    """Compile a grammar in a process of its own. ConfigError: it does not succeed within SECONDS and MEMORY."""
    import llguidance

    place = str(Path(llguidance.__file__).parents[1])
    command = [sys.executable, "-I", "-c", _TRIAL, place, str(SECONDS), str(MEMORY)]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=30 * SECONDS)
        ended = done.returncode == 0
    except subprocess.TimeoutExpired:
        ended = False
    if not ended:
        raise ConfigError(f"schema: too complex, must compile within {SECONDS} s and {MEMORY >> 20} MiB")


@lru_cache(maxsize=4)
def _tokens(tokenizer: Vocabulary) -> Any:
    """The tokenizer in the library's form, cached: a large one takes a second to convert."""
    import llguidance

    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Spelled(tokenizer)),
        n_vocab=tokenizer.vocab_size,
        eos_token=_end(tokenizer),
    )


def _end(tokenizer: Vocabulary) -> int:
    """The token that ends a text where the grammar allows it. ConfigError: there is none."""
    end = tokenizer.specials.end
    ends = sorted(tokenizer.specials.stops) if end is None else [end]
    require(bool(ends), "constraint", "of this tokenizer", "of one with a token that ends texts")
    return ends[0]


class _Spelled:
    """A tokenizer with the library's interface: tokens without bytes, and those that end texts, are special, and only a
    text's end is allowed."""

    bos_token_id = None

    def __init__(self, tokenizer: Vocabulary) -> None:
        self.eos_token_id = _end(tokenizer)
        silent = tokenizer.specials.silent
        spelled = [b"" if id in silent else tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = [id for id, data in enumerate(spelled) if not data]
        self.tokens = [data or f"<|{id}|>".encode() for id, data in enumerate(spelled)]
        self._encode, self._known = tokenizer.encode, lru_cache(4096)(self._spell)
        self._ids = {data: id for id, data in reversed([*enumerate(spelled)]) if data}
        self._longest = max(map(len, self._ids))

    def __call__(self, data: bytes) -> list[int]:
        return self._known(data)

    def _spell(self, data: bytes) -> list[int]:
        """The tokens of text that the grammar forces: the tokenizer's encoding, or, if that spells other bytes, such as
        a leading space, the longest tokens from the left. The library turns an error here into one of the matcher."""
        ids = self._encode(data.decode("utf-8", "replace"))
        if b"".join(self.tokens[id] for id in ids) == data:
            return ids
        ids, at = [], 0
        while at < len(data):
            ends = range(min(at + self._longest, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), 0)
            if not end:
                raise ValueError(UNSPELLED)
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


def _check(schema: Any, where: str) -> None:
    """ConfigError, naming its place, for an unknown keyword, which the library would ignore as an annotation."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key not in KEYWORDS:
            known = ", ".join(sorted(KEYWORDS))
            raise ConfigError(f"{where}: the keyword {key!r} is not supported; those that are: {known}")
        if key in ("exclusiveMinimum", "exclusiveMaximum"):
            number = not isinstance(value, bool)
            require(number, f"{where}.{key}", value, "a number, as drafts since 6 have it")
            _check_bound(schema, key, where)
        if key in _NUMBERS:
            _check_whole(value, f"{where}.{key}", 63 if key in _ROUNDED else 53)
    for place, part in _parts(schema):
        _check(part, f"{where}.{place}")


def _check_bound(schema: dict[str, Any], key: str, where: str) -> None:
    """ConfigError for an exclusive integer bound less than 1 from the other one: the library would allow its value."""
    bound, end = schema[key], "aximum" if key.endswith("inimum") else "inimum"
    others = [schema.get(f"m{end}"), schema.get(f"exclusiveM{end}")]
    near = [
        x
        for x in others
        if isinstance(x, int | float) and isinstance(bound, int | float) and abs(x - bound) < 1
    ]
    if near and bound == bound // 1 and schema.get("type") != "integer":
        raise ConfigError(f"{where}.{key} = {bound}, must be at least 1 from the other bound, {near[0]}")


def _check_whole(value: Any, where: str, bits: int) -> None:
    """ConfigError for a whole number that the library, for which numbers are of float64, would take for another."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        require(abs(value) < 1 << bits, where, value, f"> −2^{bits} and < 2^{bits}")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_whole(part, where, bits)


def _inward(schema: Any) -> Any:
    """The schema with each whole minimum and maximum as the next number of float64 that is within it."""
    if isinstance(schema, dict):
        for key, away in _ROUNDED.items():
            bound = schema.get(key)
            if type(bound) is int and abs(bound) < 1 << 63:
                near = int(float(bound))
                outside = near < bound if away > 0 else near > bound
                schema[key] = int(math.nextafter(near, away)) if outside else near
        for _, part in _parts(schema):
            _inward(part)
    return schema


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas nested directly in a schema, each with its place in it."""
    for key, value in schema.items():
        if key in _LISTED and isinstance(value, list):
            yield from ((f"{key}[{at}]", part) for at, part in enumerate(value))
        elif key in _NAMED and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items())
        elif key in _ONE:
            yield key, value
