"""Parts of a run's page about its model: texts that it writes, and how long the rows of its memory last."""

import math
from collections.abc import Sequence

from perspectron.data import Tokenizer
from perspectron.decode.generate import generate
from perspectron.decode.row import within
from perspectron.decode.sampling import SamplingConfig
from perspectron.eval.gates import halflives
from perspectron.model.model import LanguageModel
from perspectron.train.loop import Trainer
from perspectron.util.numbers import printable
from perspectron.util.plot import Heat, draw_heat

TOKENS, SAMPLING = 40, SamplingConfig(temperature=0.8)
LETTERS = 9  # of a token
SHOWN = 64  # tokens of the text over which a memory is drawn
LAYERS = 3  # of those that have such a memory, from the first to the last


def written(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """A model's continuation of each text, with noise of its own: no generator of torch is used."""
    longest = max(len(tokenizer.encode(text)) for text in texts) + len(tokenizer.specials.start)
    room = model.config.room or math.inf
    tokens = int(min(TOKENS, room - longest))
    if tokens < 1:  # a table of positions that the texts fill
        return [""] * len(texts)
    return generate(model, tokenizer, list(texts), max_tokens=tokens, sampling=SAMPLING).texts


def heats(trainer: Trainer) -> list[str]:
    """A picture for some of the layers whose memory fades: rows of the state, the slowest on top, over the first tokens
    of the text that is not trained on."""
    tokenizer, split = trainer.tokenizer, trainer.heldout_split
    start = len(tokenizer.specials.start)
    end = min(SHOWN + start, split.tokens, trainer.model.config.positions or split.tokens)
    ids = split.read(start, end).tolist()
    words = [_shown(within(tokenizer, [id])) for id in ids]
    found = list(halflives(trainer.model, ids, tokenizer.specials).items())
    chosen = sorted({round(n * (len(found) - 1) / (LAYERS - 1)) for n in range(LAYERS)}) if found else []
    pictures = []
    for block, halflife_TD in (found[n] for n in chosen):
        order = halflife_TD.log().mean(0).argsort(descending=True)
        heat = Heat(f"block {block}", words, halflife_TD[:, order].T.tolist())
        pictures.append(draw_heat(heat, slug=f"heat{block}-"))
    return pictures


def _shown(word: str) -> str:
    """A token as a label: spaces and line breaks visible, and no longer than some letters."""
    text = printable(word).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"
