"""`perspectron chat`: a text in turns, over a pipe and on a terminal."""

import io
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

import perspectron
from perspectron.cli import chat
from perspectron.cli.main import main
from perspectron.data.template import Template
from perspectron.decode.generate import generate
from perspectron.decode.said import Said
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from tests.cli.small import PLAIN
from tests.refusals import in_a_line, names
from tests.waiting import PATIENCE, until

QUICK = ["--seq-len", "32", "--batch-size", "2", "--dtype", "float32", "--steps", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "text.txt").write_text("the cat sat on the mat, and the dog sat on the log.\n" * 80)
    assert (
        main(["train", "--data", str(folder / "text.txt"), "--out", str(folder / "run"), *PLAIN, *QUICK]) == 0
    )
    return folder / "run"


@pytest.fixture
def talk(run, capsys, monkeypatch):
    """Say some lines; (exit code, answers, what was said beside them)."""

    def talk(*lines: str, options: tuple[str, ...] = ()):
        capsys.readouterr()
        text = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        code = main(["chat", str(run), "--max-tokens", "6", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return talk


def test_it_remembers_all_that_was_said(talk, run):
    """Two messages are one text, of which the second stands on a line of its own."""
    code, said, _ = talk("the cat", "the dog")
    model, tokenizer = perspectron.load(run)
    first = generate(model, tokenizer, ["the cat"], max_tokens=6)
    second = generate(model, tokenizer, ["\nthe dog"], max_tokens=6, conversation=first.conversation)
    assert "end" not in first.finished
    assert (code, said) == (0, f"{first.texts[0]}\n{second.texts[0]}\n")


def test_an_empty_message_goes_on(talk):
    _, twice, _ = talk("the cat", "")
    _, whole, _ = talk("the cat", options=("--max-tokens", "12"))
    assert twice.count("\n") - whole.count("\n") == 1
    assert twice.replace("\n", "") == whole.replace("\n", "")


def test_the_end_of_a_text_does_not_empty_the_memory(talk, run, monkeypatch):
    model, tokenizer = perspectron.load(run)
    options = chat.Chat(run, max_tokens=40)
    for seed in range(40):
        one = chat.Talk(model, tokenizer, options, sampling=SamplingConfig(temperature=5.0, seed=seed))
        one.answer("the cat")
        assert 0 not in one.now.session.tokens
        if one.now.session.drawn < 39:
            break
    else:
        pytest.fail("no text ended")
    before = one.now.session.tokens
    one.answer("the dog")
    assert one.now.session.tokens[: len(before)] == before


def test_several_lines_are_one_message_between_fences(talk, run):
    _, said, _ = talk('"""', "the cat", "the dog", '"""')
    model, tokenizer = perspectron.load(run)
    assert said == generate(model, tokenizer, ["the cat\nthe dog"], max_tokens=6).texts[0] + "\n"


def test_save_load_fork_and_back(talk, tmp_path):
    file = tmp_path / "talk.state"
    code, said, beside = talk("the cat", f"/save {file}", "the dog")
    assert code == 0 and f"saved to {file}" in beside
    second = said.split("\n", 1)[1]
    assert talk(f"/load {file}", "the dog")[1] == second
    assert talk("the dog", options=("--load-state", str(file)))[1] == second
    _, forked, beside = talk("the cat", "/fork", "the dog", "/back", "the dog", "/back", "the dog")
    assert forked == said.split("\n", 1)[0] + "\n" + 3 * second
    assert "point 1 kept; /back returns to it" in beside and beside.count("back at point 1") == 2
    _, deep, _ = talk("/fork", "the dog", "/fork", "the cat", "/back 2", "the dog")
    first = talk("the dog")[1]
    assert deep.startswith(first) and deep.endswith(first)


def test_state_and_help_and_quit(talk):
    code, said, beside = talk("/state", "the cat", "/state", "/help", "/quit", "the dog")
    assert code == 0 and said.count("\n") >= 1
    assert "0 bytes of memory; 0 tokens drawn; 0 points kept" in beside
    assert "; 6 tokens drawn" in beside and "/save FILE" in beside
    assert said == talk("the cat")[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "/nope",
            "/nope: no such command; the commands are /save, /load, /fork, /back, /state, /new, /help, /quit",
        ),
        ("/save", "/save needs a file, as in /save talk.state"),
        ("/save {tmp}/a", "/save: there is nothing to save yet"),
        ("/load {tmp}/none", "none: no such file"),
        ("/load .", ".: unreadable (not a regular file)"),
        ("/back", "/back = '1', must be used after /fork, which keeps a point"),
        ("/back x", "/back = 'x', must be"),
    ],
)
def test_a_mistake_ends_a_script_in_one_line(line, words, talk, tmp_path):
    code, said, beside = talk(line.format(tmp=tmp_path), "the cat")
    assert code == 2 and said == "" and words in beside and beside.count("\n") == 1
    assert not (tmp_path / "a").exists()


def test_a_pipe_that_is_not_utf_8_ends_in_a_line_after_the_answers_before(talk, run, capsys, monkeypatch):
    _, answers, _ = talk("the cat", "a d\u00f6g")
    text = "the cat\na d\u00f6g\n".encode() + b"sat\xe9 on\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    assert main(["chat", str(run), "--max-tokens", "6"]) == 2
    out, said = capsys.readouterr()
    in_a_line(said, text.index(b"\xe9"))
    assert out == answers


def test_a_folder_is_no_file_of_a_talk(talk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, _, beside in (talk("the cat", "/save ."), talk("the cat", options=("--keep", "."))):
        assert code == 2
        in_a_line(beside, ".")


def test_on_a_terminal_a_mistake_is_told_and_the_talk_goes_on(run, capsys, monkeypatch):
    lines = iter(["/nope", "the cat"])

    def typed(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    assert main(["chat", str(run), "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert names(captured.err, "/nope") and captured.out.strip("\n")


def test_an_answer_is_ended_by_an_interrupt_and_the_talk_goes_on(run):
    model, tokenizer = perspectron.load(run)
    talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=10**6))
    handlers = signal.getsignal(signal.SIGINT)
    step, count = chat.Rows.step, [0]

    def interrupted(self):
        count[0] += 1
        if count[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat.Rows, "step", interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            talk.answer("the cat")
        finally:
            signal.signal(signal.SIGINT, before)
    assert talk.now.session.drawn <= 6 and signal.getsignal(signal.SIGINT) == handlers


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role == 'user' }}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    ],
    ids=["as it was", "trimmed", "left out", "another beginning"],
)
def test_each_answer_is_that_to_the_whole_conversation_as_the_template_writes_it_now(run, text):
    """The memory has these ids and no others, and the bits of a text that was read in the same pieces."""
    model, tokenizer = perspectron.load(run)
    template = Template(text, "writes")
    talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=4), template)
    for message in (" the cat\n", "the dog ", "a log"):
        talk.answer(message)
        asked = template.ids(talk.now.said.messages[:-1], tokenizer)
        assert talk.now.session.tokens[: len(asked)] == asked
        answer = tokenizer.decode(talk.now.session.tokens[len(asked) :])
        assert talk.now.said.messages[-1] == {"role": "assistant", "content": answer}
    assert [m["role"] for m in talk.now.said.messages] == ["user", "assistant"] * 3


def test_a_conversation_that_the_template_extends_reads_nothing_again(run, monkeypatch):
    model, tokenizer = perspectron.load(run)
    template = Template.named("plain")
    talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=4), template)

    def says(session, _):
        session.append(tokenizer.encode("on the mat"))
        return False, "on the mat"

    with monkeypatch.context() as patch:
        patch.setattr(talk, "_said", says)
        talk.answer("the cat")
    before, seen, read = talk.now.session.tokens, list[int](), Session.at

    def at(self, token):
        seen.append(token)
        return read(self, token)

    monkeypatch.setattr(Session, "at", at)
    talk.answer("a")
    assert seen == [len(before)]
    ids = template.ids(talk.now.said.messages[:-1], tokenizer)
    assert talk.now.session.tokens[: len(ids)] == ids
    assert ids[: len(before)] == before


def spoken(model, tokenizer, text):
    return generate(model, tokenizer, [text], max_tokens=1).conversation


@pytest.mark.parametrize("said", ["hello", {"messages": [{"role": "user"}]}, {"start": -1}, None])
def test_a_file_that_tells_no_talk_is_gone_on_from_as_a_text_and_it_says_so(run, talk, tmp_path, said):
    """Under the name of what was said a file may have anything."""
    model, tokenizer = perspectron.load(run)
    session = perspectron.Session(model, tokenizer).read("the cat")
    for name, extra in (("plain", {}), ("odd", {"said": said})):
        session.save(tmp_path / name, extra=extra)
    wanted, found = (talk(f"/load {tmp_path / name}", "the dog") for name in ("plain", "odd"))
    assert found[:2] == wanted[:2] and "messages begin after its text" in found[2]
    assert "messages begin" not in wanted[2]


def test_what_was_loaded_goes_on_with_and_without_a_message(run, tmp_path, monkeypatch):
    model, tokenizer = perspectron.load(run)
    path, plain = tmp_path / "talk.state", Template.named("plain")
    before = spoken(model, tokenizer, plain.question("What is 1 and 2?"))
    before.fork().save(path, model)
    talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=3), plain)
    talk.load(str(path))
    talk.answer("")  # the answer that was cut off goes on
    assert talk.now.said.messages == () and talk.now.session.drawn == 3
    talk.answer("What is 3 and 4?")
    assert [m["role"] for m in talk.now.said.messages] == ["user", "assistant"]
    assert talk.now.session.drawn == 6
    talk.save(str(tmp_path / "again.state"))
    again = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=3), plain)
    again.load(str(tmp_path / "again.state"))
    for one in (talk, again):  # a model that says what its template writes as it was
        monkeypatch.setattr(
            one, "_said", lambda session, _: session.append(tokenizer.encode("7")) or (False, "7")
        )
        one.now = chat.Point(one.now.session, Said(start=len(one.now.session.tokens)))
        one.answer("What is 3 and 4?")
    talk.save(str(tmp_path / "again.state"))
    again.load(str(tmp_path / "again.state"))
    assert again.now == talk.now._replace(session=again.now.session)
    for one in (talk, again):
        one.answer("And?")
    assert len(again.now.said.messages) == 4 and again.now.session.tokens == talk.now.session.tokens


def test_a_talk_on_a_file_without_a_way_back_says_that_it_begins_anew(run, tmp_path, capsys):
    model, tokenizer = perspectron.load(run)
    template = Template(
        "{% for m in messages %}<{{ m.content if loop.last or m.role == 'user' }}>{% endfor %}", "it"
    )
    spoken(model, tokenizer, "the cat").save(tmp_path / "talk.state", model)
    for turn in range(2):
        talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=3), template)
        talk.load(str(tmp_path / "talk.state"))
        before, told = talk.now.session.tokens, talk.now.said.messages
        assert len(told) == 2 * turn
        capsys.readouterr()
        talk.answer("a dog")
        assert ("begins anew" in capsys.readouterr().err) == (turn == 1)
        asked = tokenizer.specials.bare(template.ids([{"role": "user", "content": "a dog"}], tokenizer))
        assert talk.now.session.tokens[: len(before) + len(asked)] == before + asked
        talk.answer("a log")  # whose way back is at hand
        assert "begins anew" not in capsys.readouterr().err and len(talk.now.said.messages) == 4
        talk.now = talk.now._replace(said=replace(talk.now.said, messages=talk.now.said.messages[:2]))
        talk.save(str(tmp_path / "talk.state"))


def test_what_was_saved_goes_on_as_if_nothing_had_been(run, tmp_path):
    model, tokenizer = perspectron.load(run)
    path, plain = tmp_path / "talk.state", Template.named("plain")
    talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=3), plain)
    talk.answer("What is 1 and 2?")
    talk.save(str(path))
    again = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=3), plain)
    again.load(str(path))
    assert again.now.said.messages == talk.now.said.messages
    for one in (talk, again):
        one.answer("And?")
    assert again.now.session.tokens == talk.now.session.tokens


def test_keys_typed_during_an_answer_are_neither_in_it_nor_in_the_next_message(run, monkeypatch, capsys):
    """A terminal shows what is typed at once, and keeps it for the next line that is asked for."""
    master, slave = os.openpty()
    taken, real, shown = list[str](), chat.Talk.take, chat.spoken

    def take(talk, message):
        taken.append(message)
        going = real(talk, message)
        os.write(master, b"/quit\n")
        return going

    def typing(text):
        os.write(master, b"zzz\n")
        return shown(text)

    monkeypatch.setattr(chat.Talk, "take", take)
    monkeypatch.setattr(chat, "spoken", typing)
    with open(slave, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(master, b"the cat\n")
        assert main(["chat", str(run), "--max-tokens", "6", "--keep", str(run / "keys.state")]) == 0
        echoed = os.read(master, 10_000).decode()
    os.close(master)
    assert taken == ["the cat", "/quit"] and "the cat" in echoed and "zzz" not in echoed
    assert "zzz" not in capsys.readouterr().out


PASTING = """
import sys
if sys.argv[1] == "plain":
    sys.modules["readline"] = None
from perspectron.cli.typed import Messages, unheard
lines = Messages(True)
for message in lines:
    print("GOT", ascii(message), flush=True)
    try:
        with unheard():
            if message == "drop":
                print("DROPPED", lines.drop(), flush=True)
            if message == "wait":
                print("WAITING", flush=True)
                import time; time.sleep(0.5)
                raise ValueError
    except ValueError:
        pass
    print("AFTER", ascii(message), flush=True)
"""


@pytest.mark.parametrize("edited", ["readline", "plain"])
def test_pasted_lines_are_messages_one_after_the_other(edited):
    """What has no end of a line yet stays to be typed on; keys typed during an answer are lost even if it fails, and
    what was typed before an interrupt, between two fences, too."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"PYTHONPATH": str(Path(perspectron.__file__).parents[1]), "TERM": "dumb"}
        os.execv(sys.executable, [sys.executable, "-c", PASTING, edited])
    shown = bytearray()

    def tell(text: str, answer: str) -> None:
        start = len(shown)
        os.write(terminal, text.encode())
        until(lambda: shown.extend(os.read(terminal, 4096)) or answer.encode() in shown[start:])

    until(lambda: shown.extend(os.read(terminal, 4096)) or b"> " in shown)
    tell('one\n\nt\u2028wo\n"""\nthree\n\nfour\n"""\n\u00e9\nfi', "AFTER '\\xe9'")
    tell("ve\n", "AFTER 'five'")
    tell("drop\nsix\nseven\n", "AFTER 'drop'")
    os.write(terminal, b"\xff\n")
    until(lambda: b"UTF-8" in shown or shown.extend(os.read(terminal, 4096)))
    tell("wait\n", "WAITING")
    tell("zzz\n", "AFTER 'wait'")
    until(lambda: b"> " in shown.rpartition(b"AFTER")[2] or shown.extend(os.read(terminal, 4096)))
    for typed in ("half", '"""\nopen\nhalf'):
        tell(typed, "half")
        # readline does not hear an interrupt that comes just before it waits for a key
        start, heard, end = len(shown), False, time.monotonic() + PATIENCE
        while b"> " not in shown[start:]:
            assert time.monotonic() < end, "interrupts are not heard"
            if not heard:
                os.write(terminal, b"\x03")
            if heard := bool(select.select([terminal], [], [], 5)[0]):
                shown.extend(os.read(terminal, 4096))
    tell("eight\n", "AFTER 'eight'")
    os.write(terminal, b"\x04")
    assert os.waitpid(process, 0)[1] == 0
    os.close(terminal)
    got = re.findall(rb"GOT (\S*'.*')", shown)
    expected = ["one", "t\u2028wo", "three\n\nfour", "\u00e9", "five", "drop", "wait", "eight"]
    assert b"DROPPED 2" in shown
    assert [text.decode().strip() for text in got] == list(map(ascii, expected))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_shows_the_prompt_before_its_text_and_a_pipe_does_not(run, colours, monkeypatch, capsys):
    (monkeypatch.delenv if colours else monkeypatch.setenv)(*("NO_COLOR", False if colours else "1"))
    command = ["generate", str(run), "the \x1b[2Jcat", "--max-tokens", "4"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout", Terminal())
    assert main(command) == 0
    prompt, text = sys.stdout.getvalue().split("cat", 1)
    assert prompt.startswith("\x1b[2mthe " if colours else "the ")
    assert "\x1b[2J" not in prompt  # which a terminal would obey
    assert text.removeprefix("\x1b[22m") == alone
