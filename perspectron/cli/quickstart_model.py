"""`perspectron quickstart --model`: a conversation with a model of another program, whose memory is a file."""

import contextlib
import io
import time
from pathlib import Path
from typing import Any

from rich.markup import escape

from perspectron.cli.chat import Chat, Talk
from perspectron.cli.console import Console
from perspectron.cli.import_ import Import
from perspectron.cli.kept import FILE, Kept
from perspectron.decode.sampling import SamplingConfig
from perspectron.opening import open_model
from perspectron.util.config import require
from perspectron.util.errors import ConfigError
from perspectron.util.files import read_json, remove, write_json

QUESTIONS = ("What is the capital of France?", "Tell me one more thing about that city.")
TOKENS = 60


def show(model: Path, out: Path) -> int:
    """Import a model, ask it something, save the conversation, load it in a model that was loaded anew, and ask on."""
    start, console = time.perf_counter(), Console(highlight=False, soft_wrap=True)
    run, path = out / "model", out / FILE
    require(model.exists(), "model", str(model), "a GGUF file or a folder of transformers that is there")
    source, known = _identity(model), out / "model.json"
    if run.exists():
        before = read_json(known, ConfigError) if known.is_file() else None
        bound = f"that of {run}, or a new folder as --out, or remove that one"
        require(before == source, "model", str(model), bound)
    console.print(f"[bold]1  Import[/]  {escape(str(model))}")
    if run.exists():
        console.print(f"{escape(str(run))} is there from before")
    else:
        Import(model, run)()
        write_json(known, source)
    console.print("\n[bold]2  A conversation[/]  kept in a file after each answer")
    for file in (path, path.with_name(f"{path.name}.asked")):
        remove(file)
    first = _talk(run, path)
    _ask(console, first, QUESTIONS[0])
    kept = f"── kept in {escape(str(path))} ({path.stat().st_size:,} bytes); the model is loaded anew ──"
    console.print(kept, style="dim")
    second = _talk(run, path)
    second.go_on()
    _ask(console, second, QUESTIONS[1])
    whole = _talk(run)
    with contextlib.redirect_stdout(io.StringIO()):
        for question in QUESTIONS:
            whole.answer(question)
    same = second.now.session.tokens == whole.now.session.tokens
    console.print(f"── same answer as without the stop: {'yes' if same else 'no'} ──", style="dim")
    console.print(f"\ndone in {time.perf_counter() - start:.0f} s; try one of these next:")
    console.print(f"  perspectron chat {run}     perspectron serve {run}", markup=False)
    return 0


def _identity(model: Path) -> dict[str, Any]:
    """What tells a model from another: its full path, and the sizes and times of its files."""
    files = sorted(model.rglob("*")) if model.is_dir() else [model]
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return {"path": str(model.resolve()), "files": [list(one) for one in facts]}


def _talk(run: Path, path: Path | None = None) -> Talk:
    """A talk with the model of a run, which is loaded for it; kept in a file."""
    opened = open_model(run)
    talk = Talk(
        opened.model, opened.tokenizer, Chat(run, max_tokens=TOKENS), opened.template(),
        SamplingConfig(temperature=0.0),
    )  # fmt: skip
    talk.kept = None if path is None else Kept(path)
    return talk


def _ask(console: Console, talk: Talk, question: str) -> None:
    console.print(f"> {question}", markup=False, style="bold")
    talk.answer(question)
