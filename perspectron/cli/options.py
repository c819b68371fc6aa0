"""Options as a user types them (sizes like 24G, rates like 3G/s, KEY=VALUE, the folder of a model), and the answer of a
command: a JSON object, or tables and lines."""

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from perspectron.cli.progress import Work
from perspectron.util.config import assignment, meant_beside, require
from perspectron.util.errors import CheckpointError, ConfigError, DataError, escaped
from perspectron.util.files import plain
from perspectron.util.numbers import printable

if TYPE_CHECKING:
    from rich.table import Table

    from perspectron.data.template import Template
    from perspectron.decode.drafts import Drafter
    from perspectron.decode.processors import Hook
    from perspectron.opening import Folder, Opened
    from perspectron.util.page import Table as PageTable

NGRAM = "ngram"
POWERS = "KMGT"
WIDEST = 1000  # characters of a table
LARGEST = 2**62
Sets = UseAppendAction[tuple[tuple[str, ...], ...]]
"""The values of every `--set KEY=VALUE …`; the option may be given several times."""

# Options that several commands have.
CACHE = "Memory for the experts of an artifact, such as 512M or 2G (default: the free memory)."
DRAFT = """Read tokens ahead that may follow, where that pays: "ngram" takes those that followed the last ones before, \
a folder of a smaller model with the same tokenizer those that it draws. The text is the same."""
ENCODING = "Encoding of the text, such as utf-16, latin-1 or cp1252 (default: UTF-8)."
OPENED = "Folder of a run, of one of its checkpoints, or of an artifact."
BatchSize = Annotated[int, arg(help="Windows in a batch.")]
Cache = Annotated[str | None, arg(help=CACHE)]
Device = Annotated[str, arg(help='"auto" is CUDA where there is one.')]
Draft = Annotated[str | None, arg(help=DRAFT)]
DraftTokens = Annotated[int | None, arg(help="With --draft: tokens of a draft, at most (default: 15).")]
Encoding = Annotated[str, arg(help=ENCODING)]
Jobs = Annotated[int, arg(help="Number of trainings at the same time.")]
Json = Annotated[bool, arg(help="Print one JSON object.")]
OpenedFrom = Annotated[Positional[Path], arg(help=OPENED)]
SeqLen = Annotated[int, arg(help="Tokens in a window.")]

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT])(i?))?B?", re.ASCII | re.IGNORECASE)
_COMMAND = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
BOUND = "a size like 24G, 512M or 1.5GiB"


def size(text: str, field: str) -> int:
    """Bytes of "24G", "512M", "1.5GiB" or "4096": K, M, G and T are powers of 1000, KiB, MiB and so on of 1024;
    lower case is the same.

    ConfigError, naming the field, for anything else, and for less than one byte.
    """
    return _parse(text, text, field, BOUND)


def count(text: str, field: str) -> int:
    """The number that "5M", "20M" or "1500000" stands for. ConfigError, naming the field, for anything else."""
    bound = "a number like 5M or 20M"
    require(not text.strip().upper().endswith(("B", "I")), field, text, bound)
    return _parse(text, text, field, bound)


def rate(text: str, field: str) -> int:
    """Bytes per second of "3G/s" or "800MiB/s"; ConfigError for anything else."""
    amount, slash, second = text.strip().partition("/")
    bound = "a rate like 3G/s or 800M/s"
    require(slash == "/" and second == "s", field, text, bound)
    return _parse(amount, text, field, bound)


def _parse(amount: str, text: str, field: str, bound: str) -> int:
    match = _SIZE.fullmatch(amount.strip())
    require(match is not None, field, text, bound)
    assert match is not None
    number, prefix, binary = match.groups()
    value = float(number) * (1024 if binary else 1000) ** (POWERS.index(prefix.upper()) + 1 if prefix else 0)
    require(math.isfinite(value) and 1 <= value <= LARGEST, field, text, f"{bound}, from 1 to 2⁶²")
    return round(value)


def assignments(given: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The values of every `--set`, by key; the last one of a key counts."""
    return dict(assignment(text, "set") for texts in given for text in texts)


def describe(model: str, given: Sequence[Sequence[str]]) -> "Folder":
    """Description of a preset with the given sizes replaced, or of a folder, where none can be."""
    from perspectron import opening, presets

    if "/" in model and not Path(model).is_dir():
        raise CheckpointError(f"no run at {model}{meant_beside(Path(model))}")
    if not Path(model).is_dir():
        return opening.Folder(Path(), presets.get(model, **assignments(given)))
    require(not given, "set", " ".join(text for texts in given for text in texts), "left out for a folder")
    return opening.describe(Path(model))


def differences(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """The values in which two of the same dataclass differ, by flag."""
    result: dict[str, tuple[Any, Any]] = {}
    for item in fields(one):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if a != b:
            inside = is_dataclass(a) and type(a) is type(b)
            result |= differences(a, b) if inside else {"--" + item.name.replace("_", "-"): (a, b)}
    return result


def named_file(text: str, field: str) -> tuple[str, Path]:
    """The name and the file of NAME=FILE; a file alone has its own name. ConfigError: there is none."""
    path = Path(text)
    name, _, file = text.partition("=") if "=" in text and not path.exists() else (path.stem, "", text)
    require(name != "", field, text, "FILE or NAME=FILE")
    return name, Path(file)


def open_model(
    path: Path, cache: str | None = None, *, verify: bool = False, device: str = "cpu"
) -> "Opened":
    """The model of a folder, as `opening.open_model` has it, on a device; cache: memory for experts, as typed.

    For an artifact, a line on standard error says what of it is in memory and what streams, and torch is left one
    thread: its own operations between the kernels, which have the others, are too small to share.
    """
    import torch

    from perspectron import native, opening
    from perspectron.util.machine import pick_device

    cache_bytes, place = None if cache is None else size(cache, "cache"), pick_device(device)
    try:
        with Work(f"loading {path}"):
            opened = opening.open_model(path, cache_bytes=cache_bytes, verify=verify)
    except ConfigError as error:
        typed = f"cache = {cache!r} ({cache_bytes:,} bytes)" if cache_bytes else ""
        raise ConfigError(re.sub(rf"^cache = {cache_bytes}( bytes)?", typed, str(error))) from None
    if opened.line:
        say(opened.line)
        if native.available() and torch.get_num_threads() > 1:
            native.set_threads(torch.get_num_threads())
            torch.set_num_threads(1)
    opened.model.to(place)
    return opened


def text_or_input(path: Path) -> str:
    """The text of a file, or of standard input where it is "-". DataError: it is missing, or not UTF-8."""
    from perspectron.util.files import opened

    if str(path) == "-":
        name, data = "standard input", sys.stdin.buffer.read()
    else:
        with opened(path, DataError) as file:
            name, data = str(path), file.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: byte {error.start} is not UTF-8") from None


def perspectives_of(asked: bool, calibration: Path | None, opened: "Opened") -> "list[Hook]":
    """The perspectives to ask, if any: with fixed thresholds, or calibrated for this model. ConfigError for a
    calibration without them, or of another model."""
    from perspectron.util.registry import part

    require(asked or calibration is None, "calibration", str(calibration), "left out without --perspectives")
    if not asked:
        return []
    return [part("hooks", "perspectives").of(opened.model, opened.tokenizer.fingerprint, calibration)]


def drafts_of(draft: str | None, tokens: int | None, opened: "Opened") -> "Drafter | None":
    """The drafts that are asked for, if any. ConfigError for a number of tokens without drafts, or that the model has
    no room for, and for a model of another vocabulary."""
    from perspectron.decode.drafts import Drafter, DraftModel, NGrams

    require(draft is not None or tokens is None, "draft_tokens", tokens, "left out without --draft")
    if draft is None:
        return None
    made: Drafter
    if draft == NGRAM:
        made = NGrams(tokens)
    else:
        other = open_model(Path(draft))
        other.model.to(opened.model.device)
        made = DraftModel(other.model, other.tokenizer, opened.tokenizer, tokens)
    made.fits(opened.model)
    return made


def needs(package: str, extra: str) -> None:
    """ConfigError with the command that installs it, where a package of an extra is missing."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: pip install 'perspectron[{extra}]'")


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """Table for a terminal: the first column to the left, the others, numbers, to the right. Where it is too wide,
    cells are broken between words, and only names within them."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(escaped(title)), title_justify="left")
    cells = [[*map(escaped, row)] for row in rows]
    for index, (name, *column) in enumerate(zip_longest(head, *cells, fillvalue="")):
        longest = max((len(word) for cell in (name, *column) for word in cell.split()), default=0)
        made.add_column(
            Text(escaped(name)), justify="right" if index else "left", overflow="fold",
            min_width=longest if index else min(longest, 16),
        )  # fmt: skip
    for row in cells:
        made.add_row(*map(Text, row))  # a Text has no markup
    return made


def shown(made: "PageTable") -> "Table":
    """A page's table for a terminal: each cell with its note in one line."""
    rows = [[printable(f"{c.text}: {c.note}" if c.note else c.text) for c in row] for row in made.rows]
    return table(made.caption, made.head, rows)


def say(line: str) -> None:
    """A line on standard error, under the program's name."""
    print(f"perspectron: {escaped(line)}", file=sys.stderr, flush=True)


def say_template(source: str, template: "Template | None") -> None:
    """A line on the chat template by which the records of a source are read, if they are."""
    if template is not None:
        say(f"{source}: read by the chat template of the run's training, {template.name}")


def spoken(text: str) -> str:
    """A model's text for standard output; on a terminal, control characters are escaped."""
    return _COMMAND.sub(lambda sign: escaped(sign[0]), text) if sys.stdout.isatty() else text


def print_json(fields: dict[str, Any]) -> None:
    """Print a line of JSON, with null for a number that is not finite, and pass it on at once."""
    print(json.dumps(plain(fields), allow_nan=False), flush=True)


def answer(as_json: bool, fields: dict[str, Any], *parts: "Table | str") -> int:
    """Print one JSON object, or tables and lines for people; the exit code 0."""
    from perspectron.cli.console import Console

    if as_json:
        print_json(fields)
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        free = console.options.update(width=WIDEST)
        widths = [console.measure(part, options=free).maximum for part in parts if not isinstance(part, str)]
        console.width = (
            max(console.width, *widths) if widths else console.width
        )  # wrapped by the terminal, not cut
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return 0
