"""A document as one HTML page that holds all it needs: no script, no font, no address of anything else."""

from collections.abc import Callable
from functools import singledispatch
from html import escape

from perspectron.report.charts import swatch
from perspectron.report.document import (
    Block,
    Cell,
    Code,
    Document,
    Facts,
    Figure,
    Gallery,
    Points,
    Section,
    Table,
    Text,
)
from perspectron.report.style import STYLE


def write(document: Document) -> str:
    links = "".join(f'<a href="#{section.slug}">{escape(section.title)}</a>' for section in document.sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style></head>\n<body><main>"
        f'<header><h1>{escape(document.title)}</h1><p class="lede">{escape(document.lede)}</p>'
        f'<nav aria-label="Sections">{links}</nav></header>\n'
        f"{''.join(map(_section, document.sections))}</main></body></html>\n"
    )


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return (
        f'<section id="{section.slug}" aria-labelledby="{section.slug}-h">'
        f'<h2 id="{section.slug}-h">{escape(section.title)}</h2>\n{blocks}</section>\n'
    )


@singledispatch
def _block(block: Block) -> str:
    raise TypeError(type(block).__name__)


@_block.register
def _text(block: Text) -> str:
    parts = [
        f"<strong>{escape(part)}</strong>" if i % 2 else escape(part) for i, part in enumerate(block.parts)
    ]
    return f"<p{_class(block.kind)}>{''.join(parts)}</p>"


@_block.register
def _points(block: Points) -> str:
    return f'<ul class="points">{_all("li", block.items)}</ul>'


@_block.register
def _facts(block: Facts) -> str:
    pairs = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in block.pairs
    )
    return f'<dl class="facts">{pairs}</dl>'


@_block.register
def _code(block: Code) -> str:
    return f'<pre tabindex="0"><code>{escape(block.text)}</code></pre>'


@_block.register
def _table(block: Table) -> str:
    side: Callable[[int], str] = lambda column: ' class="words"' if column in block.words else ""  # noqa: E731
    head = "".join(f'<th scope="col"{side(i)}>{escape(name)}</th>' for i, name in enumerate(block.head))
    rows = []
    for row in block.rows:
        cells = [_cell(cell, "words" if i in block.words else "", i == 0) for i, cell in enumerate(row)]
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(block.caption)}"><table>'
        f"<caption><span>{escape(block.caption)}</span></caption><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


@_block.register
def _gallery(block: Gallery) -> str:
    key = "".join(f"<li>{swatch(style)}{escape(name)}</li>" for style, name in block.key)
    legend = f'<ul class="key" aria-label="Lines">{key}</ul>' if key else ""
    kind = "gallery small" if block.small else "gallery"
    return f'{legend}<div class="{kind}">{"".join(map(_figure, block.figures))}</div>'


def _figure(figure: Figure) -> str:
    caption = f"<p>{escape(figure.caption)}</p>" if figure.caption else ""
    numbers = f"<details><summary>Numbers</summary>{_table(figure.table)}</details>" if figure.table else ""
    title = f"<figcaption><h3>{escape(figure.title)}</h3>{caption}</figcaption>"
    return f"<figure>{title}{figure.svg}{numbers}</figure>\n"


def _cell(cell: Cell, side: str, first: bool) -> str:
    line = swatch(cell.style) if cell.style is not None else ""
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    kind = _class(" ".join(filter(None, (side, cell.kind))))
    content = f"{line}{escape(cell.text)}{note}"
    return f'<th scope="row"{kind}>{content}</th>' if first else f"<td{kind}>{content}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _all(tag: str, texts: object) -> str:
    assert isinstance(texts, list | tuple)
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
