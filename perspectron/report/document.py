"""The report as plain blocks, which page.py writes as HTML and marked.py as Markdown. All text is as it is read;
escaping is the writers' part."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """Of a table. note: smaller, beneath. kind: "best", "chosen", "bad" or "quiet". style: of the swatch beside it."""

    text: str
    note: str = ""
    kind: str = ""
    style: int | None = None


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its head. words: columns that hold text, to be set from the left."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: Sequence[int] = (0,)


@dataclass(frozen=True)
class Text:
    """A paragraph; every second part, from the second on, is strong."""

    parts: Sequence[str]
    kind: str = ""


@dataclass(frozen=True)
class Points:
    items: Sequence[str]


@dataclass(frozen=True)
class Facts:
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Figure:
    """A chart and, where it has one, the table of its numbers."""

    title: str
    svg: str
    caption: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class Gallery:
    """Figures side by side; small ones take half the room. key: (style, name) of their lines."""

    figures: Sequence[Figure]
    key: Sequence[tuple[int, str]] = ()
    small: bool = False


Block = Table | Text | Points | Facts | Code | Gallery


@dataclass(frozen=True)
class Section:
    slug: str
    title: str
    blocks: Sequence[Block] = field(default=())


@dataclass(frozen=True)
class Document:
    title: str
    lede: str
    sections: Sequence[Section]
