"""mkdocs hooks: pages that live outside docs/, links to them, and citations in docstrings as links."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "results/README.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository, and the pages they become."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
CITATION = re.compile(r"\bdocs/([\w/-]+)\.md(#[\w-]+)?")


def on_files(files: Any, config: Any) -> Any:
    """The repository's own pages, beside those of docs/."""
    for source, page in ELSEWHERE.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as they are in the repository, turned to where their targets stand in the site."""
    origin = next((source for source, name in ELSEWHERE.items() if name == page.file.src_uri), None)
    origin = origin or f"docs/{page.file.src_uri}"

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[2]))
        place = ELSEWHERE.get(target, target.removeprefix("docs/"))
        if place == target:  # outside the site: left to mkdocs, which reports it
            return match[0]
        return match[1] + posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    return LINK.sub(turned, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Citations of pages in docstrings, as links."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    return CITATION.sub(lambda match: f'<a href="../{match[1]}.html{match[2] or ""}">{match[0]}</a>', html)
