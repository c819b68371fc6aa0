"""Messages to a prompt, by a template in Jinja that the user gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perspectron.errors import ConfigError
from perspectron.files import read_text

LONGEST = 16 << 20  # characters of a prompt


class Template:
    """A chat template as models carry it: it sees `messages` and `add_generation_prompt`, and may `raise_exception`.

    ConfigError: it cannot be read, or is no template.
    """

    def __init__(self, path: Path) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(read_text(path, 1 << 20))
        except (OSError, ValueError, jinja2.TemplateError) as error:
            raise ConfigError(f"{path}: no chat template ({error})") from None

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text that asks for the next answer. ConfigError: the template fails on these messages."""
        text = ""
        try:
            for part in self._template.generate(
                messages=messages, add_generation_prompt=True, bos_token="", eos_token=""
            ):
                text += part
                if len(text) > LONGEST:
                    raise ConfigError(f"messages: the template makes over {LONGEST:,} characters of them")
        except ConfigError:
            raise
        except Exception as error:  # whatever the template does with what it is given
            raise ConfigError(f"messages: the chat template fails on them ({error})") from None
        return text


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
