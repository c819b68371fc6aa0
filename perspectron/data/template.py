"""Chat templates: messages to a prompt, by Jinja that a model's folder or its user gives.

A template is a program of a stranger. It runs in a process of its own (perspectron.data.rendering), with limits of
time and memory, which is kept for the next prompt.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perspectron.data import added
from perspectron.data.shield import Shield
from perspectron.data.tokenizer import Tokenizer
from perspectron.util.config import meant_beside, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import read_object, read_text, remove, write_text

SECONDS, MEMORY = 2.0, 512 << 20
"""Limits for one prompt: seconds of a processor, and bytes of memory of the process that makes it."""
STANDSTILL = 60.0  # seconds by the clock, in case that process does not get a processor at all
FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Files with the template and its tokens in a folder of transformers; the first also in a run's, with the template that
the prompts of its training were made by."""
TOOLS = "tool_use"
"""Name of the template for requests with tools, where a model has one of its own."""
TOOLS_FILE = f"additional_chat_templates/{TOOLS}.jinja"
MORE = ("extra_special_tokens", "model_specific_special_tokens")
"""Fields that may have further ones by name."""
NO_TOKENS: Mapping[str, str] = {"bos_token": "", "eos_token": ""}
"""Special tokens, by name, that a template sees if the tokenizer's have no names."""
Messages = Sequence[Mapping[str, Any]]
PLAIN, OWN = "plain", "own"
_PLAIN = """\
{%- for message in messages %}{{ '### ' + message.role + '\\n' + message.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant\\n' }}{% endif -%}
"""
_QUESTION, _ANSWER = "question", "answer"  # stand for messages to see how a template ends the latter
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Names of a template's values that are arguments of their own here."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message has its reasoning. Templates read the first, some the second."""
SCRIPT = Path(__file__).with_name("rendering.py")
log = logging.getLogger("perspectron")


class Template:
    """A chat template as models carry it: it sees what transformers documents for one, by the same names.

    tokens: special tokens by the names under which it sees them, as `bos_token`. ConfigError, naming `source`: it is no
    template.
    """

    def __init__(self, text: str, source: object, tokens: Mapping[str, str] = NO_TOKENS) -> None:
        self.text, self.name, self.tokens = text, str(source), dict(tokens)
        self.tool_use: Template | None = None
        """The one for requests with tools, if there is another."""
        self._lock = threading.Lock()
        self._renderer: _Renderer | None = None
        try:
            with self._lock:
                started = self._started()
        except _Failed as error:
            raise ConfigError(f"{source}: no chat template ({error})") from None
        self._names = frozenset(started.names)
        self.takes_parts = started.parts
        """True if it goes through the parts of a message's content, False if it takes a text."""

    @classmethod
    def load(cls, path: Path, tokens: Mapping[str, str] = NO_TOKENS) -> "Template":
        """The template in a file. ConfigError: it cannot be read, or is not a template."""
        try:
            return cls(read_text(path, 1 << 20), path, tokens)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no chat template ({error})") from None

    @classmethod
    def named(cls, name: str, tokens: Mapping[str, str] = NO_TOKENS) -> "Template":
        """The template named "plain", in which a line such as "### user" stands before each message; or that of a
        file."""
        if name == PLAIN:
            return cls(_PLAIN, name, tokens)
        bound = f'"{PLAIN}", or a file with one in Jinja{meant_beside(Path(name))}'
        require(Path(name).exists(), "template", name, bound)
        return cls.load(Path(name), tokens)

    def save(self, folder: Path) -> None:
        """Keep it in a folder with a model, or with text that it makes prompts of, in the place of an earlier one.
        StorageError if it cannot be."""
        write_text(folder / FILE, self.text)
        if self.tool_use is None:
            remove(folder / TOOLS_FILE)
        else:
            write_text(folder / TOOLS_FILE, self.tool_use.text)

    @classmethod
    def of(cls, folder: Path, tokens: Mapping[str, str] | None = None) -> "Template | None":
        """The template in a folder with a model, of a file of its own or in tokenizer_config.json, if it has one; of
        several by name the one that is called "default", with its `tool_use`. tokens: by default those that the
        folder's files name. ConfigError: it is not a template."""
        tokens = tokens_of(folder) if tokens is None else tokens
        text, named = read_object(folder / CONFIG, ConfigError).get("chat_template"), dict[str, Any]()
        if isinstance(text, list):
            named = {str(each.get("name")): each.get("template") for each in text if isinstance(each, dict)}
            text = named.get("default")
        if (folder / FILE).is_file():
            found, named = cls.load(folder / FILE, tokens), {}
        elif isinstance(text, str):
            found = cls(text, folder / CONFIG, tokens)
        else:
            return None
        if (folder / TOOLS_FILE).is_file():
            found.tool_use = cls.load(folder / TOOLS_FILE, tokens)
        elif isinstance(tools := named.get(TOOLS), str):
            found.tool_use = cls(tools, f"{folder / CONFIG}: {TOOLS}", tokens)
        return found

    def for_tools(self, tools: Sequence[Any] | None) -> "Template":
        """The one that makes the prompt of a request with these tools, as transformers chooses it."""
        return self if self.tool_use is None or not tools else self.tool_use

    def uses(self, name: str) -> bool:
        """Say whether the template mentions a name that it does not set itself, such as "tools"."""
        return name in self._names

    def prompt(self, messages: Messages, /, **given: Any) -> str:
        """The text that asks for the next answer, or with continue_final_message for more of the last message.

        given: `tools`, by which `for_tools` chooses the template; `add_generation_prompt`: end with what begins an
        answer (default: unless continue_final_message); further values for the template, of the kinds that JSON has.
        ConfigError: the template fails on these messages, or takes more than its limits of time and memory.
        """
        return self.for_tools(given.get("tools"))._rendered(messages, **given)

    def marked(self, messages: Messages, tokenizer: Tokenizer, /, **given: Any) -> str:
        """The text of `prompt` for `tokenizer.encode`: the special tokens that the template writes are marked, what the
        messages and `given` spell like them is text. ConfigError as there."""
        template = self.for_tools(given.get("tools"))
        try:
            shield = Shield(tokenizer.special, template.text, [messages, given])
            text = template._rendered(shield.over(messages), **shield.over(given))
        except RecursionError:
            raise ConfigError("messages: nested too deeply, so not of JSON") from None
        return shield.off(tokenizer.marked(text))

    def ids(self, messages: Messages, tokenizer: Tokenizer, /, **given: Any) -> list[int]:
        """The ids of `marked`."""
        return tokenizer.encode(self.marked(messages, tokenizer, **given))

    def question(self, text: str) -> str:
        """The prompt that one message of a user makes."""
        return self.prompt(question(text))

    def read(self, asked: Messages, prompt: str, tokenizer: Tokenizer) -> str:
        """`marked` for messages of which `prompt` was made: they are rendered again only if one spells what could be a
        special token."""
        if Shield(tokenizer.special, self.text, asked).over(asked) == list(asked):
            return tokenizer.marked(prompt)
        return self.marked(asked, tokenizer)

    def end(self, tokenizer: Tokenizer) -> int | None:
        """The first of the tokens that end texts which the template writes after an answer; None if it writes none, or
        the answer otherwise than as it is."""
        talk = [*question(_QUESTION), {"role": "assistant", "content": _ANSWER}]
        with contextlib.suppress(ConfigError):
            _, found, after = self.prompt(talk, add_generation_prompt=False).rpartition(_ANSWER)
            ids = tokenizer.encode(tokenizer.marked(after)) if found else []
            return next((id for id in ids if id in tokenizer.specials.stops), None)
        return None

    def _rendered(
        self,
        messages: Messages,
        /,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        asks = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        said = "false with continue_final_message"
        require(not (asks and continue_final_message), "add_generation_prompt", asks, said)
        for name in kwargs:
            require(name not in RESERVED, "chat_template_kwargs", name, f"none of {', '.join(RESERVED)}")
        told = [_told(message) for message in messages]
        tag = f"<{secrets.token_hex(16)}> " if continue_final_message else ""
        final = _tagged(told, tag) if tag else ""
        given = {"documents": None, **self.tokens, **kwargs}
        text = self._answer({**given, "messages": told, "tools": tools, "add_generation_prompt": asks})
        if not tag:
            return text
        before, found, after = text.rpartition(tag.strip())
        kept = found and final.strip() in before and tag.strip() not in before
        said = "false: the template does not write the last message, or twice"
        require(bool(kept), "continue_final_message", True, said)
        return before if after.startswith(" ") else before.rstrip()

    def _answer(self, values: dict[str, Any]) -> str:
        try:
            with self._lock:
                text: str = self._started().ask(values)["text"]
                return text
        except _Failed as error:
            raise ConfigError(f"messages: the chat template fails on them ({error})") from None

    def _started(self) -> "_Renderer":
        """The process of this template; another one, where it has ended."""
        if self._renderer is None or not self._renderer.alive:
            self._renderer = _Renderer(self.text)
        return self._renderer


def question(text: str) -> Messages:
    """One message of a user."""
    return [{"role": "user", "content": text}]


def tokens_of(folder: Path) -> Mapping[str, str]:
    """The special tokens that the files of a folder of transformers name, as it gives them to templates. ConfigError: a
    file is no object, or a token has no spelling."""
    own, legacy = (read_object(folder / name, ConfigError) for name in (CONFIG, "special_tokens_map.json"))
    if "added_tokens_decoder" not in own:
        own = own | legacy
    found, more = dict[str, str](), dict[str, Any]()
    for given in map(own.get, MORE):
        more |= given if isinstance(given, dict) else {}
    for name, value in (own | more).items():
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and (name.endswith("_token") or name in more):
            found[name] = value
        elif value is not None and name in added.NAMED:
            raise ConfigError(f"{folder / CONFIG}: {name} is {value!r}, must be a token's spelling")
    return found if own else NO_TOKENS


class _Failed(Exception):
    pass


class _Renderer:
    """A process that renders one template. It ends with this object, and with this process however that ends."""

    def __init__(self, text: str) -> None:
        # Not a fork of this process, and nothing of its environment that may be secret.
        command = [sys.executable, "-P", "-S", str(SCRIPT), str(MEMORY), str(SECONDS)]
        kept = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end, self._process, self._owner)
        answer = self.ask(text)
        self.names: list[str] = answer["names"]
        self.parts: bool = answer["parts"]
        if not answer["held"]:
            log.warning("chat templates run without a limit of memory: this system keeps none")

    @property
    def alive(self) -> bool:
        """True while it can be asked; in a fork of the process that started it, it cannot."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: Any) -> dict[str, Any]:
        """The answer to a request. _Failed: none came; the text says why."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise _Failed(f"they are not of JSON: {error}") from None
        late = threading.Timer(STANDSTILL, process.kill)
        try:
            late.start()
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer.endswith(b"\n"):
                raise BrokenPipeError
        except BaseException as error:  # an answer that nobody takes would be that of the next request
            process.kill()
            code = process.wait()
            if not isinstance(error, OSError):
                raise
            raise _Failed(_why(code)) from None
        finally:
            late.cancel()
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise _Failed(found["error"])
        return found


def _why(code: int) -> str:
    limits = {
        -signal.SIGPROF: f"it takes over {SECONDS:g} s",
        -signal.SIGKILL: f"it takes over {STANDSTILL:g} s",
    }
    return limits.get(code, f"the process that renders it ended with {code}")


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End a process that this process started; do nothing in a fork of the one that did."""
    if owner == os.getpid():
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not written has nobody to read it
                if pipe is not None:
                    pipe.close()


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: what is null is left out, and reasoning stands under each of its names."""
    require(isinstance(message, Mapping), "messages", message, "objects, each with a role and content")
    told = {name: value for name, value in message.items() if value is not None}
    thoughts = next((told[name] for name in THOUGHTS if name in told), None)
    if thoughts is not None:
        told = {"thinking": thoughts, **told, "reasoning_content": thoughts}
    return told


def _tagged(messages: list[dict[str, Any]], tag: str) -> str:
    """Put a tag behind the last text of the last message, and return that text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + tag
        return content
    parts = content if isinstance(content, list) else []
    texts = [isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts]
    require(any(texts), "continue_final_message", True, "false: the last message has no text to go on with")
    at = len(texts) - 1 - texts[::-1].index(True)
    final: str = parts[at]["text"]
    messages[-1]["content"] = [*parts[:at], {**parts[at], "text": final + tag}, *parts[at + 1 :]]
    return final
