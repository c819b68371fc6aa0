"""A document as Markdown. Charts become the tables of their numbers."""

import re
from functools import singledispatch

from perspectron.report.document import (
    Block,
    Cell,
    Code,
    Document,
    Facts,
    Figure,
    Gallery,
    Points,
    Table,
    Text,
)

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")


def write(document: Document) -> str:
    parts = [f"# {plain(document.title)}", plain(document.lede)]
    for section in document.sections:
        parts += [f"## {plain(section.title)}", *(_block(block) for block in section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """Text in which nothing is markup, in one line."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", " ".join(escaped.split()))


@singledispatch
def _block(block: Block) -> str:
    raise TypeError(type(block).__name__)


@_block.register
def _text(block: Text) -> str:
    parts = [
        f"**{plain(part).strip()}** " if i % 2 else plain(part) + " "
        for i, part in enumerate(block.parts)
        if part
    ]
    return "".join(parts).strip()


@_block.register
def _points(block: Points) -> str:
    return "\n".join(f"- {plain(item)}" for item in block.items)


@_block.register
def _facts(block: Facts) -> str:
    return "\n".join(f"- {plain(name)}: {plain(value)}" for name, value in block.pairs)


@_block.register
def _code(block: Code) -> str:
    longest = max((len(run) for run in re.findall("`+", block.text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{block.text}\n{fence}"


@_block.register
def _table(block: Table) -> str:
    rule = [":--" if i in block.words else "--:" for i in range(len(block.head))]
    rows = [[_cell(cell) for cell in row] for row in block.rows]
    lines = [" | ".join(row) for row in ([plain(name) or " " for name in block.head], rule, *rows)]
    return f"{plain(block.caption)}\n\n" + "\n".join(f"| {line} |" for line in lines)


@_block.register
def _gallery(block: Gallery) -> str:
    return "\n\n".join(part for figure in block.figures if (part := _figure(figure)))


def _figure(figure: Figure) -> str:
    parts = [plain(figure.caption), _table(figure.table) if figure.table else ""]
    body = "\n\n".join(part for part in parts if part)
    return f"### {plain(figure.title)}\n\n{body}" if body else ""


def _cell(cell: Cell) -> str:
    text = plain(cell.text)
    if cell.kind in ("best", "chosen") and text:
        text = f"**{text}**"
    return f"{text} ({plain(cell.note)})" if cell.note else text
