"""`perspectron chat`: a text in turns, over a pipe and on a terminal."""

import io
import os
import signal

import pytest

import perspectron
from perspectron.cli import chat
from perspectron.cli.main import main
from perspectron.data.template import Template
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from tests.cli.small import PLAIN

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
    options = chat.Chat(run, max_tokens=40, sampling=SamplingConfig(temperature=3.0))
    for seed in range(40):
        one = chat.Talk(
            model, tokenizer, chat.replace(options, sampling=SamplingConfig(temperature=5.0, seed=seed))
        )
        one.answer("the cat")
        assert 0 not in one.memory.pending[0]
        if one.memory.drawn[0] < 40:
            break
    else:
        pytest.fail("no text ended")
    before = one.memory.state.length_B
    one.answer("the dog")
    assert before is None or int(one.memory.state.length_B[0]) > int(before[0])


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
        ("/back", "/back = '1', must be used after /fork, which keeps a point"),
        ("/back x", "/back = 'x', must be"),
    ],
)
def test_a_mistake_ends_a_script_in_one_line(line, words, talk, tmp_path):
    code, said, beside = talk(line.format(tmp=tmp_path), "the cat")
    assert code == 2 and said == "" and words in beside and beside.count("\n") == 1
    assert not (tmp_path / "a").exists()


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
    assert "/nope: no such command" in captured.err and captured.out.strip("\n")


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
    assert talk.memory.drawn[0] <= 6 and signal.getsignal(signal.SIGINT) == handlers


def test_a_template_that_trims_answers_is_read_again_from_the_start(run):
    model, tokenizer = perspectron.load(run)
    trims = Template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}", "trims")
    talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=4), trims)
    talk.now = chat.Point(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": " b\n"}),
                     text="<user>a<assistant> b\n")  # fmt: skip
    talk.now = talk.now._replace(memory=spoken(model, tokenizer, talk.now.text))
    asked = talk._asked("c")
    assert asked.text == "<user>a<assistant>b<user>c" and asked.memory is None
    talk.answer("c")
    greedy = generate(model, tokenizer, [asked.text], max_tokens=4, sampling=SamplingConfig())
    assert talk.now.messages[-1] == {"role": "assistant", "content": greedy.texts[0]}
    talk.answer("d")
    assert [m["content"] for m in talk.now.messages if m["role"] == "user"] == ["a", "c", "d"]


def spoken(model, tokenizer, text):
    return generate(model, tokenizer, [text], max_tokens=1).conversation


def test_what_was_loaded_goes_on_with_and_without_a_message(run, tmp_path):
    model, tokenizer = perspectron.load(run)
    path, plain = tmp_path / "talk.state", Template.named("plain")
    before = spoken(model, tokenizer, plain.question("What is 1 and 2?"))
    before.fork().save(path, model)
    talk = chat.Talk(model, tokenizer, chat.Chat(run, max_tokens=3), plain)
    talk.load(str(path))
    talk.answer("")  # the answer that was cut off goes on
    assert talk.now.messages == () and talk.memory.drawn == [4]
    talk.answer("What is 3 and 4?")
    assert [m["role"] for m in talk.now.messages] == ["user", "assistant"]
    assert talk.memory.drawn == [7]
