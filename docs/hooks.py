"""mkdocs hooks: pages that live outside docs/, links to them, the files of results/, and citations in docstrings as
links."""

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "results/README.md": "results.md",
    "results/measurements.md": "measurements.md",
    "results/superseded.md": "superseded.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "CITATION.cff",
}
"""Files of the repository, and what they become in the site."""
LISTED = "results-files.md"
"""The page that lists the files of results/, which stand in the site as they are."""
AFTER = ("reference/", "lab-notes", "changelog", "results", "measurements", "superseded", "claims")
"""Pages that a search shows after the guides."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
LABEL = re.compile(r"^(```\w+) \w+$", re.MULTILINE)
CITATION = re.compile(r"\bdocs/([\w/-]+)\.md(#[\w-]+)?")


def on_config(config: Any) -> Any:
    """The link to the repository is that of pyproject.toml, which is the one place for it; without it there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    config.repo_name = config.repo_url and "repository"
    return config


def on_files(files: Any, config: Any) -> Any:
    """The repository's own pages, and the files of results/ with a page that lists them, beside those of docs/."""
    for source, page in ELSEWHERE.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    results = [path for path in sorted((ROOT / "results").rglob("*.*")) if path.suffix != ".md"]
    for path in results:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, LISTED, content=listed(results)))
    return files


def listed(results: list[Path]) -> str:
    """The page that lists files of results/, with the command that wrote each."""
    about = (
        "What they say is in [results](results.md), [other measurements](measurements.md) and "
        "[superseded](superseded.md). The commands are as they were given at that commit."
    )
    lines = ["# The files of the results", "", about, ""]
    for path in results:
        known = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        known = known.get("conditions", {})
        name = path.relative_to(ROOT).as_posix()
        link = f"[{name.removeprefix('results/')}]({name})"
        facts = ", ".join(filter(None, [link, known.get("commit"), (known.get("date") or "")[:10]]))
        lines.append(f"- {facts}: `{known['command']}`" if known.get("command") else f"- {facts}")
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as they are in the repository, turned to where their targets stand in the site."""
    origin = next((source for source, name in ELSEWHERE.items() if name == page.file.src_uri), None)
    origin = origin or f"docs/{page.file.src_uri}"

    def turned(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[2]))
        place = ELSEWHERE.get(target, target.removeprefix("docs/"))
        if place == target and not target.startswith(
            "results/"
        ):  # outside the site: left to mkdocs, which reports it
            return match[0]
        return match[1] + posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith(AFTER):
        page.meta["search"] = {"boost": 0.1}
    markdown = LABEL.sub(r"\1", markdown)  # of blocks that tests and CI find by it
    return markdown if origin == f"docs/{LISTED}" else LINK.sub(turned, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Citations of pages in docstrings, as links."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    return CITATION.sub(lambda match: f'<a href="../{match[1]}.html{match[2] or ""}">{match[0]}</a>', html)
