"""Chat templates: as transformers renders them, and no stranger's can hang, fill or read the process that asks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perspectron.data import template as module
from perspectron.data.template import RESERVED, Template, tokens_of
from perspectron.util.errors import ConfigError
from tests.data.templates import CONVERSATIONS, HOSTILE, TEMPLATES, WEATHER
from tests.foreign_tokenizers import KINDS
from tests.refusals import names, refused
from tests.waiting import PATIENCE

HI = [{"role": "user", "content": "hi"}]
WAYS: dict[str, dict[str, Any]] = {
    "ask": {"add_generation_prompt": True},
    "closed": {"add_generation_prompt": False},
    "go on": {"add_generation_prompt": False, "continue_final_message": True},
    "tools": {"add_generation_prompt": True, "tools": [WEATHER], "enable_thinking": False},
    "empty": {"add_generation_prompt": True, "tools": [], "documents": [], "date_string": "1 May"},
    "documents": {
        "add_generation_prompt": True,
        "documents": [{"title": "T", "text": "x y"}],
        "level": {"deep": [None]},
        "bos_token": "!",
    },
}


@pytest.fixture(scope="module")
def theirs():
    """A tokenizer of transformers, which renders templates."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **special)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_transformers_makes(theirs, name) -> None:
    """Of every conversation, in every way; where transformers refuses, so does ours, in a line."""
    template, same, none = Template(TEMPLATES[name], name), 0, 0
    for messages in CONVERSATIONS.values():
        for way in WAYS.values():
            kept = json.dumps(messages)
            try:
                expected = theirs.apply_chat_template(
                    messages, chat_template=TEMPLATES[name], tokenize=False, **way
                )
                assert "CONTINUE_FINAL" not in expected, "theirs keeps its mark where a message stands twice"
            except Exception:
                none += 1
                with refused(ConfigError):
                    template.prompt(messages, **{**theirs.special_tokens_map, **way})
            else:
                same += 1
                assert template.prompt(messages, **{**theirs.special_tokens_map, **way}) == expected
            assert json.dumps(messages) == kept, "what was given is as it was"
    assert same >= 15, (same, none)


@pytest.mark.parametrize(
    ("config", "legacy"),
    [
        ({"image_token": "<img>", "add_bos_token": True, "odd_token": None, "level_token": 5}, {}),
        ({"bos_token": "<s>", "extra_special_tokens": {"image_token": "<img>", "sound": "<a>"}}, {}),
        ({"extra_special_tokens": {"image_token": {"content": "<img>", "__type": "AddedToken"}}}, {}),
        ({"model_specific_special_tokens": {"image_token": "<img>"}}, {}),
        ({"added_tokens_decoder": {}, "image_token": "<img>"}, {"video_token": "<a>"}),
        ({"extra_special_tokens": ["<a>"]}, {"image_token": "<img>"}),
    ],
)  # fmt: skip
def test_a_template_sees_the_named_tokens_that_transformers_gives_it(tmp_path, config, legacy) -> None:
    from transformers import AutoTokenizer

    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(legacy))
    expected = AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    assert tokens_of(tmp_path) == expected and expected["image_token"] == "<img>"


def test_the_last_message_is_gone_on_with(theirs) -> None:
    plain = Template.named("plain")
    talk = [*HI, {"role": "assistant", "content": "I am "}]
    assert plain.prompt(talk, continue_final_message=True).endswith("### assistant\nI am ")
    trims = Template(TEMPLATES["trimmed"], "trims")
    assert trims.prompt(talk, continue_final_message=True) == "<user>hi</><assistant>I am"
    short = Template("{{ messages[0].content }}", "short")
    bare, odd = [{"role": "assistant"}], [{"role": "a", "content": ["text"]}]
    for messages, template in ((talk, short), ([], plain), (bare, plain), (odd, plain)):
        with refused(ConfigError, "continue_final_message", True):
            template.prompt(messages, continue_final_message=True)
    with refused(ConfigError, "add_generation_prompt", True):
        plain.prompt(talk, add_generation_prompt=True, continue_final_message=True)


def test_what_a_template_cannot_be_given_is_refused_by_name() -> None:
    plain = Template.named("plain")
    with refused(ConfigError, "chat_template_kwargs", "messages"):
        plain.prompt(HI, **{"messages": HI})
    assert set(RESERVED) > {"messages", "tools"}
    for messages in (["hi"], [{"role": "user", "content": {1, 2}}]):
        with refused(ConfigError, "messages"):
            plain.prompt(messages)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with refused(ConfigError, "messages"):
        plain.prompt(HI, documents=deep)
    assert plain.question("hi") == "### user\nhi\n\n### assistant\n"
    assert plain.question("half \ud83d") == "### user\nhalf \ud83d\n\n### assistant\n"


def test_it_is_said_which_names_a_template_uses() -> None:
    template = Template(TEMPLATES["calls"], "calls")
    assert all(map(template.uses, ("messages", "tools", "enable_thinking")))
    assert not any(map(template.uses, ("documents", "ns", "message", "bos_token")))
    assert not Template.named("plain").uses("tools")


@pytest.mark.parametrize(
    "text", ["{% for m in messages %}", "{{ x | nothing }}", "{% nothing %}", "{{", "{% break %}"]
)
def test_what_is_no_template_is_said_at_once(tmp_path, text) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    with refused(ConfigError, tmp_path / "chat_template.jinja"):
        Template.of(tmp_path)


def failure(call: Callable[[], Any]) -> str:
    """What a ConfigError says, in one line; nothing where there is none."""
    try:
        call()
    except ConfigError as error:
        said = str(error)
    else:
        said = ""
    assert said.isprintable() or not said
    return said


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_a_line_and_the_next_prompt_is_answered(name, monkeypatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.5)
    other = Template.named("plain")
    said = failure(lambda: Template(HOSTILE[name], name))
    assert not said or said.startswith(f"{name}: ")
    if not said:
        template = Template(HOSTILE[name], name)
        for _ in range(2):
            said = failure(lambda: template.prompt(HI))
            assert not said or said.startswith("messages: ")
            assert "SIG" not in said
    assert other.question("hi") == "### user\nhi\n\n### assistant\n"


def test_the_limits_are_named(monkeypatch) -> None:
    def hi(name: str) -> str:
        return failure(lambda: Template(HOSTILE[name], name).prompt(HI))

    for name, limit in (("string", [512, "MiB"]), ("format", [512, "MiB"]), ("long", [1 << 24])):
        assert names(hi(name), *limit), name
    for name in ("recursion", "parentheses"):
        assert hi(name), name
    monkeypatch.setattr(module, "SECONDS", 0.25)
    for name in ("loops", "power", "folded"):
        assert names(hi(name), 0.25), name


def test_the_process_is_kept_for_the_next_prompt_and_replaced_when_it_ends() -> None:
    template = Template.named("plain")
    first = process_of(template)
    assert template.question("a") != template.question("b") and process_of(template) == first
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    assert template.question("a").startswith("### user\na") and process_of(template) != first


def test_an_interrupted_answer_is_never_that_of_the_next_prompt(monkeypatch) -> None:
    template = Template.named("plain")
    template.question("a")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("perspectron.data.template.threading.Timer.start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.question("first")
    assert template.question("second").startswith("### user\nsecond")


def test_several_threads_have_each_their_own_answer() -> None:
    template = Template.named("plain")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(template.question, map(str, range(400))))
    assert found == [f"### user\n{i}\n\n### assistant\n" for i in range(400)]


def test_the_process_is_light_and_sees_no_secret(monkeypatch) -> None:
    monkeypatch.setenv("PERSPECTRON_API_KEY", "correct horse")
    status = Path(f"/proc/{process_of(Template.named('plain'))}")
    if not status.exists():
        pytest.skip("this system has no /proc")
    template = Template.named("plain")
    status = Path(f"/proc/{process_of(template)}")
    assert "correct horse" not in (status / "environ").read_text()
    assert "torch" not in (status / "maps").read_text()
    resident = next(line for line in (status / "status").read_text().splitlines() if line.startswith("VmRSS"))
    assert int(resident.split()[1]) < 64 << 10


def test_the_process_ends_with_its_template_and_with_the_program_however_that_ends(tmp_path) -> None:
    template = Template.named("plain")
    process = process_of(template)
    del template
    assert gone(process)
    program = "import sys, time\nfrom perspectron.data.template import Template\n"
    program += f"t = Template({HOSTILE['loops']!r}, 'x')\nprint(t._renderer._process.pid, flush=True)\n"
    for rest in ("", "time.sleep(600)", "t.question('x')"):
        command = [sys.executable, "-c", program + rest]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
            assert parent.stdout is not None
            process = int(parent.stdout.readline())
            if rest:
                parent.kill()
        assert gone(process), rest


def test_a_fork_of_the_program_starts_a_process_of_its_own() -> None:
    template = Template.named("plain")
    first = process_of(template)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        try:
            os.write(there, template.question("a").encode() + str(process_of(template)).encode())
        finally:  # else it would go on as a second process of the tests
            os._exit(0)
    os.waitpid(child, 0)
    os.close(there)
    said = os.read(here, 1000).decode()
    os.close(here)
    assert said.startswith("### user\na") and not said.endswith(str(first))
    assert process_of(template) == first and template.question("b").startswith("### user\nb")


def test_a_system_without_a_limit_of_memory_says_so(tmp_path, monkeypatch, caplog) -> None:
    script = (Path(module.__file__).with_name("rendering.py")).read_text()
    (tmp_path / "rendering.py").write_text(
        script.replace("resource.setrlimit(limit", "str((limit").replace("(most, most))", "most))")
    )
    monkeypatch.setattr(module, "SCRIPT", tmp_path / "rendering.py")
    assert Template.named("plain").question("a").startswith("### user")
    assert caplog.records


def test_a_process_that_gets_no_processor_is_not_waited_for_for_ever(monkeypatch) -> None:
    template = Template.named("plain")
    monkeypatch.setattr(module, "STANDSTILL", 0.2)
    os.kill(process_of(template), signal.SIGSTOP)
    with refused(ConfigError, 0.2):
        template.question("a")


def process_of(template: Template) -> int:
    assert template._renderer is not None
    return template._renderer._process.pid


def gone(process: int) -> bool:
    """Whether a process ends, or is left to its parent as a zombie."""
    for _ in range(6000):
        try:
            os.kill(process, 0)
            state = Path(f"/proc/{process}/stat")
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
