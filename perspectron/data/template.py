"""Chat templates: messages to a prompt, by Jinja that a model's folder or its user gives."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perspectron.config import require
from perspectron.errors import ConfigError
from perspectron.files import read_text, write_text

LONGEST = 16 << 20  # characters of a prompt
FILE = "chat_template.jinja"
"""Name of the template in the folder of a run, as in one of transformers."""
PLAIN = "plain"
_PLAIN = """\
{%- for message in messages %}{{ '### ' + message.role + '\\n' + message.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant\\n' }}{% endif -%}
"""


class Template:
    """A chat template as models carry it: it sees `messages` and `add_generation_prompt`, and may `raise_exception`.

    ConfigError, naming `source`: it is no template.
    """

    def __init__(self, text: str, source: object) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self.text, self.name = text, str(source)
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{source}: no chat template ({error})") from None

    @classmethod
    def load(cls, path: Path) -> "Template":
        """The template in a file. ConfigError: it cannot be read, or is none."""
        try:
            return cls(read_text(path, 1 << 20), path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no chat template ({error})") from None

    @classmethod
    def named(cls, name: str) -> "Template":
        """The one that is called "plain", in which a line such as "### user" stands before each message; or that of a
        file."""
        return cls(_PLAIN, name) if name == PLAIN else cls.load(Path(name))

    def save(self, folder: Path) -> None:
        """Keep it in a folder with a model, or with text that it makes prompts of. StorageError if it cannot be."""
        write_text(folder / FILE, self.text)

    @classmethod
    def of(cls, folder: Path) -> "Template | None":
        """The template of a folder with a model, if it has one."""
        return cls.load(folder / FILE) if (folder / FILE).is_file() else None

    def uses(self, name: str) -> bool:
        """Whether the template mentions a name that it does not set itself, such as "tools"."""
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text that asks for the next answer. ConfigError: the template fails on these messages."""
        text, asks = (
            "",
            not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        )
        require(
            not (asks and continue_final_message),
            "add_generation_prompt",
            asks,
            "false with continue_final_message",
        )
        told = [dict(message) for message in messages]
        if continue_final_message:
            told[-1]["content"] += "\0 "
        try:
            for part in self._template.generate(
                messages=told, tools=tools, add_generation_prompt=asks, bos_token="", eos_token="", **kwargs
            ):
                text += part
                if len(text) > LONGEST:
                    raise ConfigError(f"messages: the template makes over {LONGEST:,} characters of them")
        except ConfigError:
            raise
        except Exception as error:  # whatever the template does with what it is given
            raise ConfigError(f"messages: the chat template fails on them ({error})") from None
        return text.rpartition("\0")[0] if continue_final_message else text

    def question(self, text: str) -> str:
        """The prompt that one message of a user makes."""
        return self.prompt([{"role": "user", "content": text}])


def copy(folder: Path, out: Path) -> None:
    """Give a model's template, if it has one, to a folder that is made of it."""
    if (template := Template.of(folder)) is not None:
        template.save(out)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
