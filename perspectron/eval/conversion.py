"""Losses and gains of a conversion: the converted model beside its teacher.

Suffixes: B batch, N pairs, T time.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perspectron.eval import position, timing
from perspectron.eval.reading import CHUNK
from perspectron.eval.subject import Subject
from perspectron.eval.timing import Spread
from perspectron.opening import describe, open_model
from perspectron.train.convert.run import FILE, config_of
from perspectron.util.config import at_least, require
from perspectron.util.errors import CheckpointError
from perspectron.util.files import read_json

PAST = (
    1,
    4,
    16,
)  # windows of the teacher's training: the contexts past which the loss of the same targets may rise


@dataclass(frozen=True)
class Options:
    """tokens: to read for the loss by position, over `stretches`; 0 is all. pairs: numbers of pairs of random tokens to
    recall, in `texts` texts, at once and after `later` tokens of held-out text. contexts: lengths at which a token is
    timed, in `rounds` rounds; those past a table of positions are left out."""

    tokens: int = 4 * 32768
    stretches: int = 4
    pairs: tuple[int, ...] = (8, 32)
    texts: int = 32
    later: int = 512
    contexts: tuple[int, ...] = (1024, 65536)
    rounds: int = 9

    def __post_init__(self) -> None:
        at_least(1, self, "stretches", "texts", "rounds", "later")
        for name, least in (("pairs", 1), ("contexts", 8)):
            values = getattr(self, name)
            require(all(value >= least for value in values), name, values, f"each ≥ {least}")
        require(len(self.contexts) >= 1, "contexts", self.contexts, "at least one")


def measure(subject: Subject, options: Options = Options()) -> dict[str, Any]:
    """The stages of the conversion, and of teacher and converted model: loss by position, recall of pairs, bytes of
    state and milliseconds a token. As text gets easier or harder along a document, `past` of a position compares the
    same targets with fewer tokens before them. CheckpointError for a run that was not converted, or whose teacher is
    gone."""
    folder = subject.opened.folder.path
    asked, notes = config_of(folder), read_json(folder / FILE, CheckpointError)
    teacher = open_model(Path(asked.teacher))
    dtype = subject.opened.folder.dtype  # of both
    teacher = replace(teacher, folder=replace(teacher.folder, dtype=dtype))
    teacher.model.to(subject.model.device)
    both = {"teacher": replace(subject, opened=teacher), "converted": subject}
    past = tuple(asked.seq_len * factor for factor in PAST)
    positions = position.Options(options.tokens, options.stretches, past)
    return {
        "conversion": notes,
        "position": {name: position.measure(one, positions) for name, one in both.items()},
        "recall": {name: recall(one, options) for name, one in both.items()},
        "cost": costs(both, options),
    }


@torch.inference_mode()
def recall(subject: Subject, options: Options) -> dict[str, float]:
    """The share of pairs of random tokens whose second is the likeliest after the first is read again, by their
    number; "N later" is after text in between, where positions and held-out text suffice."""
    found, V = dict[str, float](), subject.tokenizer.vocab_size
    longest = subject.model.config.positions or math.inf
    between_T = torch.from_numpy(
        subject.text.read(0, min(options.later, subject.text.tokens)).astype(np.int64)
    )
    for N in options.pairs:
        require(2 * N <= V, "pairs", N, f"≤ {V // 2}, half of the vocabulary")
        generator = torch.Generator().manual_seed(subject.seed)
        rows = [torch.randperm(V, generator=generator)[: 2 * N] for _ in range(options.texts)]
        orders = [torch.randperm(N, generator=generator) for _ in rows]
        pairs_BN2 = torch.stack(rows).unflatten(1, (N, 2))
        again_BN2 = torch.stack([pairs[order] for pairs, order in zip(pairs_BN2, orders, strict=True)])
        told_BT, asked_BT = pairs_BN2.flatten(1), again_BN2.flatten(1)
        for name, text_T in {str(N): between_T[:0], f"{N} later": between_T}.items():
            ids_BT = torch.cat([told_BT, text_T.expand(len(told_BT), -1), asked_BT], 1)
            if ids_BT.shape[1] > longest or 0 < len(text_T) < options.later:
                continue
            hits = [
                _hits(subject, part_BT, 2 * N) for part_BT in ids_BT.split(max(1, CHUNK // ids_BT.shape[1]))
            ]
            found[name] = sum(hits) / (N * options.texts)
    return found


def _hits(subject: Subject, ids_BT: Tensor, asked: int) -> int:
    """Number of hits: every second one of the last `asked` tokens, where the model finds it likeliest."""
    with subject.opened.autocast():
        hidden_BTD, _, _ = subject.model.hidden(ids_BT.to(subject.model.device))
        drawn_BN = subject.model.head(hidden_BTD[:, -asked::2]).argmax(-1).cpu()
    return int((drawn_BN == ids_BT[:, -asked:][:, 1::2]).sum())


def costs(both: Mapping[str, Subject], options: Options) -> dict[str, Any]:
    """Bytes of one conversation's state, and milliseconds of a token in turns, by context; those past a table of
    positions are left out."""
    first = next(iter(both.values())).model
    contexts = [n for n in options.contexts if n <= (first.config.positions or n)]
    models = {
        name: timing.decode_model(one.model.config, max(contexts, default=0), first.device)
        for name, one in both.items()
    }
    found: dict[str, Any] = {name: {} for name in models}
    for context in contexts:
        decoded = timing.decoding(models, context, rounds=options.rounds, visit=4)
        for name, one in decoded.items():
            ms = asdict(Spread.middle([1e3 * s for s in one.seconds])) if one.seconds else None
            found[name][str(context)] = {"state_bytes": one.state_bytes, "ms": ms, "skipped": one.skipped}
    return found


def lines(result: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    notes = result["conversion"]
    kept = [str(layer["layer"]) for layer in notes["layers"] if layer["attention"]]
    text = [
        f"converted from {describe(Path(notes['config']['teacher'])).model.name};"
        f" attention in {len(kept)} of {len(notes['layers'])} layers ({', '.join(kept) or 'none'})"
    ]
    first = notes["rows"][0]["bits_per_byte"]
    for row in notes["rows"]:
        over = row["bits_per_byte"] / first - 1
        text.append(
            f"{row['stage']:<28} {row['tokens']:>12,} tokens  {row['bits_per_byte']:.4f} ({over:+.1%})"
        )
    text.append(f"{'position':>18}  teacher  converted")
    bins = (result["position"][name]["bins"] for name in ("teacher", "converted"))
    for its, own in zip(*bins, strict=False):
        span = f"{its['from']:,}–{its['to'] - 1:,}"
        text.append(f"{span:>18}  {its['bits_per_byte']:>7.3f}  {own['bits_per_byte']:>9.3f}")
    pasts = [result["position"][name]["past"] for name in ("teacher", "converted")]
    for N in pasts[0]:
        gains = [
            f"{one['bits_per_byte']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})"
            for one in (past[N] for past in pasts)
            if one
        ]
        if len(gains) == len(pasts):
            text.append(f"more than {int(N):,} tokens before the same targets gain {gains[0]} and {gains[1]}")
    for pairs in result["recall"]["teacher"]:
        its, own = (result["recall"][name][pairs] for name in ("teacher", "converted"))
        text.append(f"{f'recall of {pairs}':>18}  {its:>7.1%}  {own:>9.1%}")
    for context in result["cost"]["teacher"]:
        its, own = (result["cost"][name][context] for name in ("teacher", "converted"))
        ms = " ".join(f"{one['ms']['median'] if one['ms'] else math.nan:>8.2f}" for one in (its, own))
        sizes = " ".join(f"{one['state_bytes'] / 1e6:>8.2f}" for one in (its, own))
        text.append(f"{int(context):>11,} tokens  ms {ms}  state MB {sizes}")
    return text
