"""Docstrings open with what a thing is: no fragment that needs the name before it to be read."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRAGMENT = re.compile(
    r"(Of|As|In|Whether|What|Where|When|Which|Who|Without|How|Until|For|From|Because|After|Before|On|At|To|By|"
    r"And|But|Also|Beside|Between|Under|Over|Than|It|Its|Nothing|Them|They|Into|Among)\b"
)
"""First words of such fragments. "With --train: …" is the form of an option that needs another one."""


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Every string that stands as a statement of its own, with its line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for one in getattr(node, "body", None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                found.append((one.lineno, str(one.value.value).strip()))
    return found


def test_docstrings_open_with_what_a_thing_is():
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in sorted((ROOT / "perspectron").rglob("*.py"))
        for line, text in docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert fragments == []


def test_a_fragment_is_seen(tmp_path):
    (tmp_path / "one.py").write_text('def f() -> int:\n    """Of a row, its place."""\n    return 1\n')
    [(line, text)] = docstrings(tmp_path / "one.py")
    assert line == 2 and FRAGMENT.match(text)
