"""`perspectron adr demo`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import perspectron
from perspectron import presets
from perspectron.cli.console import Console
from perspectron.cli.fit import fit
from perspectron.cli.options import print_json, shown
from perspectron.compare.report.page import Section, rendered
from perspectron.data import Tokenizer, absolute, encode
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.adr.countries import ASKED, PHRASINGS, Fact, Sentences, facts
from perspectron.designs.adr.literal import tried
from perspectron.model.census import census
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.optim import OptimConfig
from perspectron.util.config import require
from perspectron.util.files import locked, write_json, write_text
from perspectron.util.numbers import printable
from perspectron.util.page import Cell
from perspectron.util.page import Table as PageTable

PRESET, TWIN, VOCABULARY, PAGE = "adr-demo", "gpt2", 1024, "demo.html"
PROMPT = PHRASINGS[0].format(country=ASKED, capital="").removesuffix(" .")
LIKELIEST, LONGEST = 5, 12  # tokens shown; tokens of an answer
GROUPS = {
    "told": ("told", "in the training text"),
    "unseen": ("rephrased", "told in five phrasings, asked in the sixth"),
    "unknown": ("hardly told", "in one phrasing, asked in the others"),
}


@dataclass(frozen=True)
class Demo:
    """Train the ADR document's demo from scratch on countries and their capitals, beside GPT-2, and ask for Italy's.

    Example: perspectron adr demo
    First it says what the demo as printed does. If you run it again, it resumes where it stopped.
    """

    out: Path = Path("runs/demo-adr")
    """Output folder."""
    steps: int = 400
    """Number of updates for each model, of 8 × 64 tokens each."""
    json: bool = False
    """Print one JSON object instead."""

    def __call__(self) -> int:
        require(self.steps >= 1, "steps", self.steps, "≥ 1")
        start, console = time.perf_counter(), Console(highlight=False, soft_wrap=True, stderr=self.json)
        tokenizer = self._text()
        literal = self._literal(console, tokenizer)
        results: dict[str, Any] = {"prompt": PROMPT, "steps": self.steps, "literal": literal, "models": {}}
        for name, config in self._models(tokenizer.vocab_size).items():
            console.print(f"\n[bold]Training[/]  {name}")
            if stopped := fit(self.out / name, RunConfig(config, self._training())):
                return stopped
            model, _ = perspectron.load(self.out / name)
            results["models"][name] = measured(model, tokenizer)
        results["seconds"] = time.perf_counter() - start
        write_json(self.out / "demo.json", results)
        write_text(self.out / PAGE, page(results))
        if self.json:
            print_json(results)
            return 0
        for table_ in tables(results):
            console.print(shown(table_))
        console.print(f"\n{told(results)}", markup=False)
        console.print(
            f"done in {results['seconds']:.0f} s; the same as a page: {self.out / PAGE}", markup=False
        )
        longer = f"perspectron adr demo --steps {4 * self.steps} --out {self.out}-longer"
        console.print(f"train longer: {longer}", markup=False)
        return 0

    def _text(self) -> Tokenizer:
        """The tokenizer of the sentences, which are encoded beside it."""
        data = self.out / "data"
        if not (data / "manifest.json").is_file():
            corpus = Sentences()
            with locked(data):
                documents = corpus.documents("train")
                tokenizer = Tokenizer.train((document.text for document in documents), VOCABULARY)
                tokenizer.save(data / "tokenizer.json")
                encode(corpus, tokenizer, data)
        return Tokenizer.load(data / "tokenizer.json")

    def _literal(self, console: Console, tokenizer: Tokenizer) -> dict[str, Any]:
        """Run the document's own code, and say what came out."""
        positions = presets.get(PRESET).positions
        found = tried(tokenizer.encode(PROMPT), tokenizer.vocab_size, positions)
        literal = found | {"text": tokenizer.decode([int(found["token"])])}
        console.print(f"[bold]The demo as the document prints it[/], untrained: {PROMPT}", markup=True)
        console.print(f"  Prediction: {literal['text']!r}", markup=False)
        for line in faults(literal):
            console.print(f"  {line}", markup=False)
        return literal

    def _models(self, vocab_size: int) -> dict[str, ModelConfig]:
        """The demo's model, and GPT-2 with about as many parameters."""
        adr = presets.get(PRESET, vocab_size=vocab_size)
        sizes = {
            "vocab_size": vocab_size, "d_model": adr.d_model, "layers": len(adr.blocks), "positions": adr.positions,
            "dropout": adr.dropout,
        }  # fmt: skip
        one, two = (census(presets.get(TWIN, **sizes, hidden=hidden)).parameters for hidden in (4, 8))
        hidden = 4 + round((census(adr).parameters - one) / (two - one)) * 4
        return {"adr": adr, "gpt2": presets.get(TWIN, **sizes, hidden=hidden)}

    def _training(self) -> TrainConfig:
        return TrainConfig(
            data=absolute(str(self.out / "data")),
            steps=self.steps,
            batch_size=8,
            seq_len=64,
            dtype="float32",
            eval_every=0,
            save_every=0,
            optim=OptimConfig(lr=2e-3, warmup=min(30, self.steps)),
        )


def faults(literal: dict[str, Any]) -> list[str]:
    """Other faults of the document's code, in sentences."""
    return [
        f"It is not causal: another last token moves the first token's logits by up to {literal['leak']:.2g}.",
        f"Its memory outlives a text: the same prompt, asked again, moves its logits by up to {literal['again']:.2g}.",
    ]


@torch.inference_mode()
def measured(model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Likeliest next tokens of the prompt, and the share of capitals it names, by how they were told."""
    prompt = tokenizer.specials.begun(tokenizer.encode(PROMPT))
    logits_V = model(torch.tensor([prompt])).logits[0, -1].double()
    chances, ids = logits_V.softmax(-1).topk(LIKELIEST)
    every = range(len(PHRASINGS))
    asked: dict[str, list[tuple[Fact, int]]] = {
        "told": [(fact, fact.told[0]) for fact in facts()],
        "unseen": [(fact, i) for fact in facts() if fact.known for i in every if i not in fact.told],
        "unknown": [(fact, i) for fact in facts() if not fact.known for i in every if i not in fact.told],
    }
    pairs = zip(ids.tolist(), chances.tolist(), strict=True)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "likeliest": [[tokenizer.decode([id]), chance] for id, chance in pairs],
        "asked": {name: len(each) for name, each in asked.items()},
        "right": {name: named(model, tokenizer, each) for name, each in asked.items()},
    }


def named(model: LanguageModel, tokenizer: Tokenizer, asked: Sequence[tuple[Fact, int]]) -> float:
    """The share of prompts that the likeliest tokens continue with the capital."""
    prompts, greedy = [fact.prompt(i) for fact, i in asked], SamplingConfig(temperature=0)
    found = generate(model, tokenizer, prompts, max_tokens=LONGEST, sampling=greedy, stop=(".",)).texts
    right = [text == f" {fact.capital}" for text, (fact, _) in zip(found, asked, strict=True)]
    return sum(right) / len(right)


def told(results: dict[str, Any]) -> str:
    """The outcome in a sentence or two, the failure first."""
    adr, gpt2 = (results["models"][name] for name in ("adr", "gpt2"))
    (word, chance), *_ = adr["likeliest"]
    return (
        f"Of capitals that were told in one phrasing only, ADR names {adr['right']['unknown']:.0%} when asked in "
        f"another, GPT-2 {gpt2['right']['unknown']:.0%}. Of sentences told in five other phrasings ADR completes "
        f"{adr['right']['unseen']:.0%}, GPT-2 {gpt2['right']['unseen']:.0%}. One of these is “{PROMPT}”, which ADR "
        f"continues with “{printable(word).strip()}” ({chance:.0%})."
    )


def tables(results: dict[str, Any]) -> list[PageTable]:
    """Likeliest tokens, and shares of capitals named, of both models."""
    titles = {"adr": "ADR", "gpt2": "GPT-2"}
    models = results["models"]
    likely = [
        [
            Cell(str(place + 1)),
            *(
                Cell(
                    f"{printable(models[name]['likeliest'][place][0])} {models[name]['likeliest'][place][1]:.1%}"
                )
                for name in titles
            ),
        ]
        for place in range(LIKELIEST)
    ]
    shares = [
        [
            Cell(*words),
            Cell(f"{models['adr']['asked'][group]:,}"),
            *(Cell(f"{models[name]['right'][group]:.1%}") for name in titles),
        ]
        for group, words in reversed(GROUPS.items())
    ]
    return [
        PageTable("Capitals named", ("sentences", "asked", *titles.values()), shares),
        PageTable(f"The likeliest tokens after “{PROMPT}”", ("place", *titles.values()), likely),
    ]


def page(results: dict[str, Any]) -> str:
    """The page: the document's own result first, then what fails, then what works."""
    literal, models = results["literal"], results["models"]
    shares, likely = tables(results)
    facts_ = [
        ("updates of each model", f"{results['steps']:,} of 8 × 64 tokens"),
        ("parameters of ADR", f"{models['adr']['parameters']:,}"),
        ("parameters of GPT-2", f"{models['gpt2']['parameters']:,}"),
        ("half-life of each memory", "22.76 tokens (γ = 0.97)"),
        ("dropout", "0.1"),
        ("whole demo", f"{results['seconds']:.0f} s"),
    ]  # fmt: skip
    sections = [
        Section(
            "literal",
            "The demo as the document prints it",
            "Its model is not trained, so its prediction is chance. " + " ".join(faults(literal)),
            code=f"{PROMPT}\nPrediction: {printable(literal['text'])}",
        ),
        Section(
            "capitals",
            "What training teaches",
            f"{len(facts())} countries in {len(PHRASINGS)} phrasings. An answer counts when the likeliest tokens are "
            "the whole capital and a full stop.",
            tables=[shares],
        ),
        Section("likeliest", f"“{PROMPT}”", "This sentence was kept from training.", tables=[likely]),
        Section("conditions", "Conditions", facts=facts_),
    ]
    return rendered("“The capital of Italy is”, trained from scratch", told(results), sections)
