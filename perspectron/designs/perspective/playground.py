"""The page that `perspectron quickstart` ends with: what was trained, what it writes, and how long its memory lasts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perspectron.cli.options import printable
from perspectron.data import Tokenizer
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.eval.gates import halflives
from perspectron.model.model import LanguageModel
from perspectron.util.files import read_text, write_text
from perspectron.util.plot import Heat, draw_heat, page_template, variables

PAGE = "playground.html"
PROMPTS = ("import ", "def main(", "class ")
TEMPERATURES = (0.0, 0.7, 1.0)
TEXT = '''\
def read_lines(path):
    """The lines of a file."""
    with open(path) as file:
        return file.read()
'''
SHOWN = 64  # tokens of the text
SEED = 1
MOST_CURVE = 8 << 20  # bytes


def write(
    path: Path, model: LanguageModel, tokenizer: Tokenizer, curve: Path, facts: Sequence[tuple[str, str]]
) -> None:
    """Write the page. curve: the run's picture of its losses. facts: names and values of the table at its top.
    StorageError when it cannot be written."""
    ids = tokenizer.encode(TEXT)[:SHOWN]
    page = page_template("perspectron.designs.perspective", "playground.html.j2").render(
        name=model.config.name,
        facts=facts,
        curve=_inline(read_text(curve, MOST_CURVE)) if curve.is_file() else "",
        samples=_samples(model, tokenizer),
        heats=_heats(model, tokenizer, ids),
        text=tokenizer.decode(ids),
        light=variables(0),
        dark=variables(1),
    )
    write_text(path, page)


def _inline(svg: str) -> str:
    """A picture that is a file of its own, within a page that has the palette already."""
    start, end = svg.find("<style>"), svg.find("</style>")
    return svg if start < 0 else svg[:start] + svg[end + len("</style>") :]


def _samples(model: LanguageModel, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The model's continuation of each prompt, at each temperature."""
    samples = []
    for temperature in TEMPERATURES:
        sampling = SamplingConfig(temperature=temperature, min_p=0.02, seed=SEED)
        texts = generate(model, tokenizer, list(PROMPTS), max_tokens=60, sampling=sampling).texts
        pairs = zip(PROMPTS, map(printable, texts), strict=True)
        samples.append({"temperature": temperature, "texts": [{"prompt": p, "text": t} for p, t in pairs]})
    return samples


def _heats(model: LanguageModel, tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """A picture for each recurrent layer: rows of the state, the slowest on top, over the tokens of the text."""
    words = [_shown(tokenizer.decode([id])) for id in ids]
    pictures = []
    for block, halflife_TD in halflives(model, ids, tokenizer.specials).items():
        order = halflife_TD.log().mean(0).argsort(descending=True)
        rows = halflife_TD[:, order].T.tolist()
        pictures.append(draw_heat(Heat(f"block {block}", words, rows), slug=f"heat{block}-"))
    return pictures


def _shown(word: str) -> str:
    """A token as a label: spaces and line breaks visible."""
    return printable(word).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
