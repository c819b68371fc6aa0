"""`perspectron quickstart`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

import perspectron
from perspectron import presets
from perspectron.cli.console import Console
from perspectron.cli.fit import fit
from perspectron.cli.options import Encoding, differences, table
from perspectron.cli.tokenize import Tokenize
from perspectron.data import absolute, open_shards
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.eval.perplexity import compressors, text_of
from perspectron.model.census import census
from perspectron.presets import rates
from perspectron.train.checkpoint import load_config
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import OptimConfig
from perspectron.train.page import PAGE, course, facts_of, losses, parts, read_samples
from perspectron.util.config import require
from perspectron.util.files import write_text
from perspectron.util.page import Cell, page_template
from perspectron.util.page import Table as PageTable

PROMPT = "def read_lines(path):\n"
STATE = "conversation.state"
MODELS = {"perspective": "perspective2-tiny", "transformer": "transformer-tiny"}


@dataclass(frozen=True)
class Quickstart:
    """Train a small Perspective model and its transformer twin, compare them, generate text, stop and resume.

    Example: perspectron quickstart
    The text is Python's own standard library. If you run it again, it resumes where it stopped.

    With a model of another program, import it, and stop and resume a conversation:
    perspectron quickstart --model model.gguf
    """

    out: Path = Path("runs/quickstart")
    """Output folder."""
    data: str = "stdlib"
    """The text: "stdlib", or what `perspectron train --data` takes."""
    encoding: Encoding = ""
    steps: int = 600
    """Number of updates for each model, of 8 × 128 tokens each."""
    model: Path | None = None
    """A GGUF file, or a folder of transformers, to talk to instead."""

    def __call__(self) -> int:
        if self.model is not None:
            from perspectron.cli.quickstart_model import show

            for name, (value, _) in differences(self, Quickstart(self.out, model=self.model)).items():
                require(False, name.removeprefix("--").replace("-", "_"), value, "left out with --model")
            return show(self.model, self.out)
        require(self.steps >= 1, "steps", self.steps, "≥ 1")
        start, console = time.perf_counter(), Console(highlight=False, soft_wrap=True)
        console.print(f"[bold]1  Text[/]  {escape(str(self.data))}")
        vocab_size = presets.get(MODELS["perspective"]).vocab_size
        Tokenize(self.data, self.out / "corpus", vocab_size, encoding=self.encoding).within(self.out)
        console.print(
            "\n[bold]2  Training[/]  perspective2-tiny, then its twin, on the same tokens in the same order"
        )
        for name, preset in MODELS.items():
            model = presets.get(preset)
            config = RunConfig(
                model, self._training(rates.rate(presets.design_of(model), census(model).parameters))
            )
            stopped = fit(self.out / name, config)
            if stopped:
                return stopped
        console.print("\n[bold]3  Held-out text[/]  lower is better; gzip and xz see this text alone")
        title, head, rows = self._comparison()
        console.print(table(title, head, rows))
        console.print(
            "Most of the difference is two parts that a transformer can have, too: perspectron compare "
            "--designs perspective2,transformer+ …"
        )
        console.print("\n[bold]4  Generation[/]  by perspective2-tiny, then continued from the saved state")
        self._conversation(console)
        self._page(title, head, rows)
        console.print(f"\n[bold]5  A page[/]  with both models side by side: {escape(str(self.out / PAGE))}")
        console.print(f"\ndone in {time.perf_counter() - start:.0f} s; try one of these next:")
        console.print(
            f'  perspectron generate {self.out}/perspective "import " --max-tokens 200', markup=False
        )
        console.print(
            f"  perspectron generate {self.out}/perspective --load-state {self.out}/{STATE}", markup=False
        )
        console.print(
            "  perspectron train --data YOUR_TEXT --out runs/mine     perspectron inspect perspective-1t"
        )
        return 0

    def _training(self, lr: float) -> TrainConfig:
        return TrainConfig(
            data=absolute(str(self.out / "corpus")),
            steps=self.steps,
            batch_size=8,
            seq_len=128,
            eval_every=0,
            eval_tokens=0,
            save_every=0,
            optim=OptimConfig(lr=lr, warmup=presets.warmup(self.steps)),
        )

    def _comparison(self) -> tuple[str, tuple[str, ...], list[list[str]]]:
        """Title, head and rows of a table."""
        rows = list[list[str]]()
        for name in MODELS:
            model, tokenizer = perspectron.load(self.out / name)
            bits = read_metrics(self.out / name)[-1]["heldout_bits_per_byte"]
            size = sum(parameter.numel() for parameter in model.parameters())
            state = model.init_state(1, capacity=8192).nbytes
            rows.append([model.config.name, f"{bits:.3f}", f"{size:,}", f"{state:,} bytes"])
        split = open_shards(self.out / "corpus").split("heldout")
        for other, bits in compressors(text_of(split, tokenizer, split.tokens)).items():
            rows.append([other, f"{bits:.3f}"])
        title = f"on all {split.text_bytes:,} held-out bytes, which no model was trained on"
        return title, ("model or compressor", "bits per byte", "parameters", "state at 8,192 tokens"), rows

    def _page(self, title: str, head: Sequence[str], rows: list[list[str]]) -> None:
        """Write the page of both models."""
        runs = {preset: self.out / name for name, preset in MODELS.items()}
        courses = {preset: course(run) for preset, run in runs.items()}
        models = []
        for (preset, run), name in zip(runs.items(), MODELS, strict=True):
            config, own = load_config(run), courses[preset]
            told = own.facts() + facts_of(config)
            models.append(parts(config, own, read_samples(run)) | {"page": f"{name}/{PAGE}", "facts": told})
        cells = [[*map(Cell, row), *[Cell("")] * (len(head) - len(row))] for row in rows]
        page = page_template("perspectron.cli", "quickstart.html.j2").render(
            models=models, figures=[figure for figure in losses(courses) if figure is not None],
            text=self.data, table=PageTable(title, head, cells),
        )  # fmt: skip
        write_text(self.out / PAGE, page)

    def _conversation(self, console: Console) -> None:
        model, tokenizer = perspectron.load(self.out / "perspective")
        sampling, path = SamplingConfig(temperature=0.7, min_p=0.05), self.out / STATE
        first = generate(model, tokenizer, [PROMPT], max_tokens=80, sampling=sampling)
        first.conversation.save(path, model)
        again = Conversation.load(path, model)
        second = generate(model, tokenizer, [""], max_tokens=80, sampling=sampling, conversation=again)
        whole = generate(model, tokenizer, [PROMPT], max_tokens=160, sampling=sampling)
        console.print(PROMPT + first.texts[0], markup=False, end="")
        console.print(
            f"\n── saved to {escape(str(path))} ({path.stat().st_size:,} bytes), loaded, continued ──",
            style="dim",
        )
        console.print(second.texts[0], markup=False)
        parts = first.ids[0] + second.ids[0]
        same = parts[: len(whole.ids[0])] == whole.ids[0]
        console.print(f"── same tokens as without the stop: {'yes' if same else 'no'} ──", style="dim")
