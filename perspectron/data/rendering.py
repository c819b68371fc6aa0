"""The process that renders a chat template of a stranger, under limits that the kernel keeps.

perspectron.data.template starts this file as a script: it imports no part of perspectron, and no torch. Requests come
on standard input and answers go to standard output, each a line of JSON: first the template, which is answered by the
names that it uses, then the values of those names, answered by the text. It ends with its input, so with the process
that started it.
"""

import contextlib
import io
import json
import mmap
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST = 16 << 20  # characters of a text


class Generation(Extension):
    """`{% generation %}`, by which trainers find what the model has said: here it gives its content and no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)

    def said(self, caller: Macro) -> str:
        return caller()


def environment() -> ImmutableSandboxedEnvironment:
    """The environment of Jinja that transformers gives to chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def rendered(template: jinja2.Template, values: dict[str, Any]) -> str:
    """The text of a template. ValueError: it is too long."""
    text = io.StringIO()
    for part in template.generate(values):
        text.write(part)
        if text.tell() > LONGEST:
            raise ValueError(f"it makes over {LONGEST:,} characters of them")
    return text.getvalue()


def takes_parts(tree: nodes.Template) -> bool:
    """Say whether a template goes through the content of a message part by part."""
    called = {"content"}

    def of_content(part: nodes.Node) -> bool:
        while isinstance(part, nodes.Filter) and part.node is not None:
            part = part.node
        if isinstance(part, nodes.Getitem):
            return isinstance(part.arg, nodes.Const) and part.arg.value == "content"
        named = isinstance(part, nodes.Name) and part.name in called
        return named or (isinstance(part, nodes.Getattr) and part.attr == "content")

    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and of_content(assigned.node):
            called.add(assigned.target.name)
    return any(of_content(loop.iter) for loop in tree.find_all(nodes.For))


def hold(memory: int) -> bool:
    """Take at most so many bytes of memory, write no file and start no process; False where this system lets a
    process take more all the same."""
    for name, most in (("AS", memory), ("CORE", 0), ("FSIZE", 0), ("NPROC", 0)):
        limit = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (most, most))
    try:
        mmap.mmap(-1, memory).close()
    except (OSError, MemoryError):
        return True
    return False


def answered(
    request: bytes, template: jinja2.Template | None
) -> tuple[dict[str, Any], jinja2.Template | None]:
    """The answer to a request, and the template that the next one is for."""
    value = json.loads(request)
    if template is not None:
        return {"text": rendered(template, value)}, template
    made = environment()
    tree = made.parse(value)
    names = sorted(meta.find_undeclared_variables(tree))
    return {"names": names, "parts": takes_parts(tree)}, made.from_string(value)


def main() -> None:
    """Answer requests until there are no more. A request that takes too long ends this process: what the kernel's
    timer does, no template can put off."""
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    template = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held = hold(memory)
    for request in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer, template = answered(request, template)
            line = json.dumps({**answer, "held": held})
        except MemoryError:
            line = json.dumps({"error": f"it takes over {memory >> 20} MiB of memory"})
        except RecursionError:
            line = json.dumps({"error": "it is nested too deeply"})
        except Exception as error:  # whatever a template does with what it is given
            line = json.dumps({"error": (str(error) or type(error).__name__)[:2000]})
        print(line, flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
