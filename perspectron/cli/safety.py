"""`perspectron safety`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from perspectron.cli.options import answer, open_model
from perspectron.cli.progress import Work
from perspectron.config import require
from perspectron.data import Tokenizer
from perspectron.decode.projection import project
from perspectron.decode.safety import Polytope, fit, states
from perspectron.errors import DataError
from perspectron.files import read_text
from perspectron.model import LanguageModel


@dataclass(frozen=True)
class SafetyOf:
    """Fit a safe set of what the head reads to allowed and blocked text, or test one.

    Example: perspectron safety fit runs/letters set.safe --allowed letters.txt --blocked verse=other.txt

    How much is outside: perspectron safety test runs/letters set.safe --allowed letters.txt --blocked other.txt

    And then: perspectron generate runs/letters "The key" --safety set.safe
    """

    action: tyro.conf.Positional[Literal["fit", "test"]]
    """ "fit" writes the file, "test" says what a file lets through."""
    run: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of an artifact."""
    file: tyro.conf.Positional[Path]
    """The set."""
    allowed: Path
    """Text file of allowed sentences, one a line."""
    blocked: tuple[str, ...]
    """Text files of blocked ones; NAME=FILE names their category."""
    facets: int = 8
    """Half-spaces of each category. fit alone"""
    alpha: float = 0.02
    """Share of allowed text that may be outside. fit alone"""
    seed: int = 0
    """Of the clusters, and of which half of the allowed text is for what. fit alone"""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        require(len(self.blocked) > 0, "blocked", "none", "one file or more")
        opened = open_model(self.run)
        model, tokenizer = opened.model, opened.tokenizer
        with Work("reading the sentences"):
            allowed_ND = _states(self.allowed, model, tokenizer)
            blocked = {name: _states(path, model, tokenizer) for name, path in map(_named, self.blocked)}
        if self.action == "fit":
            options: dict[str, Any] = {"facets": self.facets, "alpha": self.alpha, "seed": self.seed}
            made = fit(model, allowed_ND, blocked, **options)
            made.save(self.file)
            fields = {"half_spaces": len(made.labels), "epsilon": made.epsilon, "alpha": made.alpha}
            said = (
                f"{len(made.labels)} half-spaces, moved out by {made.epsilon:.2f} deviations; in {self.file}"
            )
            return answer(self.json, fields, said)
        made = Polytope.load(self.file, model)
        shares = {name: outside(made, h_ND) for name, h_ND in {"allowed": allowed_ND, **blocked}.items()}
        moved = float(project(allowed_ND, made.faces)[1].moved_N.mean())
        lines = [f"{name}: {share:.1%} outside" for name, share in shares.items()]
        return answer(self.json, {"outside": shares, "moved": moved}, *lines)


def outside(made: Polytope, h_ND: torch.Tensor) -> float:
    """Share of states outside."""
    return float((made.scores(h_ND) > 0).double().mean())


def _named(text: str) -> tuple[str, Path]:
    name, _, path = (
        text.partition("=") if "=" in text and not Path(text).exists() else (Path(text).stem, "", text)
    )
    require(name != "", "blocked", text, "FILE or NAME=FILE")
    return name, Path(path)


def _states(path: Path, model: LanguageModel, tokenizer: Tokenizer) -> torch.Tensor:
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise DataError(f"{path}: no sentences, need one a line")
    return states(model, tokenizer, texts)
