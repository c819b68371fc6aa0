"""`perspectron generate`."""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import tyro
from rich.table import Table

from perspectron import native
from perspectron.cli.options import (
    Cache,
    Device,
    Draft,
    DraftTokens,
    OpenedFrom,
    answer,
    drafts_of,
    open_model,
    perspectives_of,
    say,
    spoken,
    table,
    text_or_input,
)
from perspectron.cli.progress import Work
from perspectron.data import Tokenizer
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import Generation, generate
from perspectron.decode.row import Piece
from perspectron.decode.suggested import Asked
from perspectron.eval.timing import Bench, bench
from perspectron.model.model import LanguageModel
from perspectron.model.narrow import Dtype
from perspectron.opening import Opened
from perspectron.stream.engine import StreamedModel
from perspectron.stream.usage import FILE, FIRST, Usage
from perspectron.util.config import require
from perspectron.util.errors import ConfigError
from perspectron.util.machine import pick_device
from perspectron.util.registry import part

UNDERLINED, DIM = "\033[4m{}\033[24m", "\033[2m{}\033[22m"
PROMPT = "def read_lines(path):\n"  # of --bench
MEASURED = {"prompts", "max_tokens", "sampling", "device", "cache", "verify", "bench", "json"}
"""Options that are allowed with --bench."""


@dataclass(frozen=True)
class Generate:
    """Continue one or more prompts, or a saved conversation; without a prompt, start a new text.

    Example: perspectron generate runs/letters "Dear Sir" --max-tokens 200

    Save the conversation: perspectron generate runs/letters "Dear Sir" --save-state tree.state

    Continue it later: perspectron generate runs/letters --load-state tree.state

    Read a long prompt from standard input: perspectron generate runs/letters - < other.txt

    Adapt to the prompt while reading it: perspectron generate runs/routed "Dear Sir" --adapt
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--max-tokens", "--temperature", "--top-p", "--seed", "--stop", "--save-state", "--load-state", "--json",
    )  # fmt: skip
    run: OpenedFrom
    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Texts to continue, in one batch, each with its own random stream; "-" reads standard input; without a prompt a
    new text starts. A terminal shows a prompt that was typed before its text; a pipe has the text alone."""
    max_tokens: int = 200
    """Maximum number of tokens to generate for each prompt."""
    sampling: Asked = field(default_factory=Asked)
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A string that ends the text and is not shown; may be given several times."""
    load_state: Path | None = None
    """Continue this saved conversation; a prompt is read after it. Or begin each prompt with this memory, which
    `train --state` made."""
    save_state: Path | None = None
    """Save the conversation to this file."""
    state_dtype: Dtype = "full"
    """Precision of the saved conversation: full resumes bit for bit; the others are smaller and approximate."""
    adapt: bool = False
    """Learn from each prompt while reading it, as `perspective adapt` does, and generate with the result."""
    adapter: Path | None = None
    """Generate with this saved adapter; with --adapt, continue learning from it."""
    save_adapter: Path | None = None
    """With --adapt or --adapter, and one prompt: save the adapter to this file. With --save-state, `--load-state FILE
    --adapter FILE` continues as if nothing had stopped."""
    warm: bool = False
    """First load the experts that this machine has used most; the artifact's usage.json counts them."""
    device: Device = "auto"
    cache: Cache = None
    verify: bool = False
    """Check every file of an artifact first."""
    perspectives: bool = False
    """Ask several views of the experts where the model is unsure; tokens they disagree on are underlined, and rates are
    printed at the end."""
    calibration: Path | None = None
    """File that `perspective views` wrote for this model (default: fixed thresholds)."""
    safety: Path | None = None
    """Safe set that `perspective safety fit` wrote for this model."""
    action: str = "project"
    """With --safety: project states into the set, flag tokens, stop, or mask the tokens that the set names."""
    draft: Draft = None
    draft_tokens: DraftTokens = None
    bench: bool = False
    """Measure the cost of a token instead, next to the time to read its bytes from memory (on the CPU, one prompt,
    greedy)."""
    json: bool = False
    """Print one JSON object instead of streaming the text."""

    def __call__(self) -> int:
        if self.bench:
            self._check_bench()
        opened = open_model(self.run, self.cache, verify=self.verify)
        model, tokenizer = opened.model, opened.tokenizer
        usage = self._warm(opened)
        if self.bench:
            return _bench(model, tokenizer, "".join(self.prompts), self.max_tokens, json=self.json)
        sampling, line = opened.sampling(self.sampling)
        if line:
            say(line)
        device = pick_device(self.device)
        model.to(device)
        conversation = None
        if self.load_state is not None:
            conversation = Conversation.load(self.load_state, model)
            conversation = replace(conversation, state=conversation.state.to(device))
            if conversation.begins and len(self.prompts) > 1:
                conversation = Conversation.stack([conversation.fork() for _ in self.prompts])
        safe = self.safety is not None or self.action == Generate.action
        require(safe, "action", self.action, "left out without --safety")
        full = self.save_state is not None or self.state_dtype == "full"
        require(full, "state_dtype", self.state_dtype, "full without --save-state")
        texts, start = self._texts(conversation), time.perf_counter()
        hooks, adapter = (
            perspectives_of(self.perspectives, self.calibration, opened),
            self._adapter(model, texts),
        )
        if self.safety is not None:
            hooks.append(part("hooks", "safety").of(model, self.safety, self.action))
        drafts = drafts_of(self.draft, self.draft_tokens, opened)
        single = not self.json and len(texts) == 1
        marks = single and sys.stdout.isatty()
        before = [texts[0]] if marks and self.prompts != ("-",) else []
        with Work("reading the prompt") as reading:

            def show(piece: Piece) -> None:
                reading.stop()
                while before:  # on a terminal the prompt comes first
                    print(
                        (DIM if "NO_COLOR" not in os.environ else "{}").format(spoken(before.pop())), end=""
                    )
                flagged = any(verdict.flagged for verdict in piece.verdicts.values())
                text = spoken(piece.text)
                print(UNDERLINED.format(text) if marks and flagged else text, end="", flush=True)

            result = generate(
                model,
                tokenizer,
                texts,
                max_tokens=self.max_tokens,
                sampling=sampling,
                stop=self.stop,
                conversation=conversation,
                on_piece=show if single else None,
                on_read=reading.tell,
                hooks=hooks if adapter is None else [*hooks, adapter],
                drafts=drafts,
            )
        self._save(result.conversation, model, adapter, usage)
        seconds = time.perf_counter() - start
        reports = [hook.report(result.verdicts.get(hook.name, []), seconds) for hook in hooks]
        more = dict(item for more, _ in reports for item in more.items())
        self._print(
            texts,
            result,
            single,
            seconds,
            more | ({} if drafts is None else {"drafts": asdict(drafts.counts)}),
        )
        if drafts is not None:
            say(f"{drafts.counts.accepted} of {drafts.counts.drafted} drafted tokens were drawn")
        if usage is not None and usage.asked:
            share = usage.served / usage.asked
            say(f"{share:.0%} of the experts of the first {FIRST} tokens were at hand")
        for line in (line for _, line in reports if line):
            say(line)
        return 0

    def _save(self, after: Conversation, model: LanguageModel, adapter: Any, usage: Usage | None) -> None:
        """Keep what was asked to be kept."""
        if self.save_adapter is not None:
            adapter.save(self.save_adapter)
        if self.save_state is not None:
            after.save(self.save_state, model, self.state_dtype)
        if usage is not None:
            usage.save()

    def _warm(self, opened: Opened) -> Usage | None:
        """With --warm, first load the experts that were used most: the counts of their use."""
        if not self.warm:
            return None
        model = opened.model
        if not isinstance(model, StreamedModel):
            raise ConfigError("warm = True, must be left out for a run: artifacts have experts on disk")
        return model.warm(opened.folder.path / FILE)

    def _check_bench(self) -> None:
        """ConfigError for options that a measurement would ignore."""
        require(len(self.prompts) <= 1, "prompts", len(self.prompts), "at most 1 with --bench")
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "≥ 1 with --bench")
        require(self.device in ("auto", "cpu"), "device", self.device, "left out with --bench")
        plain = Generate(self.run)
        for name, value in (*vars(self).items(), *vars(self.sampling).items()):
            known = getattr(plain, name, getattr(plain.sampling, name, None))
            require(name in MEASURED or value == known, name, value, "left out with --bench")

    def _adapter(self, model: LanguageModel, texts: list[str]) -> Any:
        """An adapter for each row, as a hook, if any is asked for."""
        saves, has = self.save_adapter is not None, self.adapt or self.adapter is not None
        require(has or not saves, "save_adapter", self.save_adapter, "with --adapt or --adapter")
        if not has:
            return None
        one = not saves or len(texts) == 1
        require(one, "save_adapter", self.save_adapter, "left out with several adapted prompts")
        return part("hooks", "adapter")(model, self.adapter, learns=self.adapt, saves=saves)

    def _texts(self, conversation: Conversation | None) -> list[str]:
        if self.prompts == ("-",):
            return [text_or_input(Path("-"))]
        if "-" in self.prompts:
            raise ConfigError('prompts: "-" reads standard input and must be the only prompt')
        if self.prompts:
            return list(self.prompts)
        return [""] * (1 if conversation is None else conversation.rows)

    def _print(
        self, prompts: list[str], result: Generation, single: bool, seconds: float, more: dict[str, Any]
    ) -> None:
        if self.json:
            counts = [len(ids) for ids in result.ids]
            fields = {"texts": result.texts, "finished": result.finished, "tokens": counts}
            print(json.dumps(fields | {"seconds": seconds} | more))
        elif single:
            print()
        else:
            for prompt, text in zip(prompts, result.texts, strict=True):
                print(f"── {prompt!r}\n{spoken(text)}")


def _bench(model: LanguageModel, tokenizer: Tokenizer, prompt: str, tokens: int, *, json: bool) -> int:
    """Decode and print what a token cost."""
    ids = tokenizer.specials.begun(tokenizer.encode(prompt or PROMPT))
    measured = bench(model, tokenizer.vocab_size, ids, tokens)
    sums = {"median": measured.median, "share": measured.share, "bytes": measured.touched.total}
    return answer(json, asdict(measured) | sums, _table(model, measured))


def _table(model: LanguageModel, measured: Bench) -> Table:
    low, high = min(measured.seconds), max(measured.seconds)
    rows = [
        ("milliseconds", f"{measured.median * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})"),
        ("tokens a second", f"{1 / measured.median:.2f}"),
    ]
    names = {"state": "state, read and written", "caches": "keys and values read"}
    counts = asdict(measured.touched).items()
    threads = native.threads()
    rows += [(f"bytes of {names.get(name, name)}", f"{count:,}") for name, count in counts]
    rows += [
        ("bytes in all", f"{measured.touched.total:,}"),
        ("in memory as state", f"{measured.state_bytes:,} bytes"),
        ("read from memory", f"{measured.bandwidth / 1e9:.1f} GB/s on {threads} thread{'s'[: threads > 1]}"),
        ("share of that", f"{measured.share:.2f}"),
    ]
    if measured.missed:
        rows.append(("bytes from disk", f"{measured.missed:,.0f}, waited {measured.waited * 1e3:.1f} ms"))
    return table(f"{model.config.name}: one token of {len(measured.seconds)}", ("", "measured"), rows)
