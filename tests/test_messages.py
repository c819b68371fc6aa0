"""Every message of the package's errors and warnings, in one list: who rewords one changes that list and no test.

    python -m tests.test_messages

writes tests/goldens/messages.txt anew; read aloud what `git diff` then shows. {…} stands for what is filled in.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "perspectron"
GOLDEN = Path(__file__).parent / "goldens" / "messages.txt"
CALLS = ("error", "refuse", "warn", "warning")
"""What makes an error or a warning of a text, beside classes of errors, what is raised, and `require`."""


def messages() -> list[str]:
    """Templates of all messages in the package, each once, sorted."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found.update(_of(node, id(node) in raised, known))
    return sorted(" ".join(text.split()) for text in found if re.search(r"\w{2}", re.sub(r"{.*?}", "", text)))


def _of(call: ast.Call, raised: bool, known: dict[str, ast.expr]) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "require" and len(call.args) == 4:
        field, value, bound = (" or ".join(_texts(part, known)) or _filled(part) for part in call.args[1:])
        yield f"{field} = {value}, must be {bound}"
    elif name.lstrip("_") in ("error", "wrong") and len(call.args) > 1:
        yield ", ".join(" or ".join(_texts(part, known)) or _filled(part) for part in call.args)
    elif raised or name in CALLS or name.endswith("Error"):
        for part in call.args:
            yield from _texts(part, known)


def _texts(node: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """What an expression can read; nothing of one that is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr():
            parts = (
                part.value if isinstance(part, ast.Constant) else _filled(part.value) for part in node.values
            )
            return ["".join(map(str, parts))]
        case ast.BinOp(op=ast.Add()):
            left, right = _texts(node.left, known), _texts(node.right, known)
            return [
                a + b for a in left or [_filled(node.left)] for b in right or [_filled(node.right)]
            ] * bool(left + right)
        case ast.IfExp():
            return _texts(node.body, known) + _texts(node.orelse, known)
        case ast.BoolOp():
            return [text for value in node.values for text in _texts(value, known)]
        case ast.Name(id=name) if name in known and name.isupper():
            return _texts(known[name], {})
    return []


def _filled(node: ast.expr) -> str:
    """What stands for a value: the last name of its expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"{{{name}}}"
        case ast.Subscript(value=inner) | ast.BinOp(left=inner) | ast.Call(args=[inner, *_]):
            return _filled(inner)
        case ast.Call(func=inner):
            return _filled(inner)
    return "{…}"


def test_every_message_stands_in_the_list():
    found, listed = set(messages()), set(GOLDEN.read_text(encoding="utf-8").splitlines())
    new, gone = (sorted(some) for some in (found - listed, listed - found))
    assert not new and not gone, "read them aloud, then run python -m tests.test_messages\n" + "\n".join(
        [*(f"new:  {text}" for text in new), *(f"gone: {text}" for text in gone)]
    )


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(messages()) + "\n", encoding="utf-8")
