"""A model's code as files beside its weights, for `trust_remote_code`: one file for each module that our model imports,
with imports of our other modules made relative. It needs some packages, which the guide names, but not
perspectron. A table of the parts that the model has replaces the registry, so no designs are looked for."""

import ast
from pathlib import Path

from perspectron.model.config import ModelConfig
from perspectron.util import registry

ENTRY = "perspectron.interop.hf.modeling"
REGISTRY = "perspectron.util.registry"
THIS = "THIS_MODULE"
_ROOT = Path(__file__).resolve().parents[3]


def auto_map() -> dict[str, str]:
    """The places where AutoConfig and AutoModelForCausalLM find their classes: both in one file, as transformers
    loads the modules that a file needs once for each file."""
    classes = {"AutoConfig": "PerspectronConfig", "AutoModelForCausalLM": "PerspectronForCausalLM"}
    return {auto: f"{_flat(ENTRY)}.{name}" for auto, name in classes.items()}


def sources(config: ModelConfig) -> dict[str, str]:
    """Text by file name, of all modules that a model needs."""
    text, waiting = _registry(config)
    written = {f"{_flat(REGISTRY)}.py": text}
    waiting.append(ENTRY)
    while waiting:
        module = waiting.pop()
        if f"{_flat(module)}.py" not in written:
            written[f"{_flat(module)}.py"], needs = _flattened(module)
            waiting += needs
    return written


def _registry(config: ModelConfig) -> tuple[str, list[str]]:
    """The text of a registry of a model's mixers and head, and the modules that it needs."""
    used = {"mixers": {mixer.kind for block in config.blocks for mixer in block.mixers}}
    used["heads"] = set() if config.head is None else {config.head.kind}
    names, branches, modules = dict[str, list[str]](), list[str](), list[str]()
    for table, kinds in used.items():
        places = registry.places(table)
        names[table] = sorted(kinds & places.keys())
        for kind in names[table]:
            module, _, attribute = str(places[kind]).partition(":")
            branches.append(
                f"    if (table, name) == {(table, kind)!r}:\n"
                f"        from .{_flat(module)} import {attribute}\n\n        return {attribute}\n"
            )
            modules.append(module)
    text = f"NAMES = {names!r}\n\n\ndef part(table, name):\n{''.join(branches)}    raise KeyError(name)\n"
    text += "\n\ndef places(table):\n    return dict.fromkeys(NAMES.get(table, ()))\n"
    text += "\n\ndef parts(table):\n    return ((name, part(table, name)) for name in places(table))\n"
    return f"import sys\n\n{THIS} = sys.modules[__name__]\n{text}", modules


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _file(module: str) -> Path | None:
    path = _ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def _flattened(module: str) -> tuple[str, list[str]]:
    """A module's text with relative imports, and the modules that it needs."""
    file = _file(module)
    assert file is not None, module
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    unused = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inside in ast.walk(node)
    }
    lines, needs = text.splitlines(), list[str]()
    for node in ast.walk(tree):
        ours = isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "perspectron"
        if ours and id(node) not in unused:
            assert isinstance(node, ast.ImportFrom)
            assert node.module
            assert node.end_lineno
            new, needed = _relative(node.module, node.names)
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [
                "\n".join(indent + line for line in new),
                *[None] * (node.end_lineno - node.lineno),  # type: ignore[list-item]
            ]
            needs += needed
    place = next((n.lineno for n in tree.body if not _is_docstring(n)), len(lines) + 1) - 1
    lines.insert(place, f"import sys\n\n{THIS} = sys.modules[__name__]\n")
    note = f"# Written by perspectron from {module}. Apache-2.0.\n"
    return note + "\n".join(line for line in lines if line is not None) + "\n", needs


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _relative(module: str, names: list[ast.alias]) -> tuple[list[str], list[str]]:
    """The lines that replace `from module import names`, and the modules they need. transformers follows only imports
    of the form `from .module import name`, so each module exports itself under the name THIS_MODULE."""
    lines, needs, plain = [], [], []
    for name in names:
        part = f"{module}.{name.name}"
        if _file(part) is not None:
            lines.append(f"from .{_flat(part)} import {THIS} as {name.asname or name.name}")
            needs.append(part)
        else:
            plain.append(name.name + (f" as {name.asname}" if name.asname else ""))
    if plain:
        lines.append(f"from .{_flat(module)} import {', '.join(plain)}")
        needs.append(module)
    return lines, needs
