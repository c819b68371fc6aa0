"""`perspectron perspective safety`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from perspectron.cli.options import Json, OpenedFrom, answer, named_file, open_model
from perspectron.cli.progress import Work
from perspectron.data import Tokenizer
from perspectron.data.reading import text_of
from perspectron.designs.perspective.projection import project
from perspectron.designs.perspective.safety import Polytope, fit, states
from perspectron.model.model import LanguageModel
from perspectron.util.config import require
from perspectron.util.errors import DataError


@dataclass(frozen=True)
class SafetyOf:
    """Fit a safe set of hidden states to allowed and blocked text, or test one.

    Example: perspectron perspective safety fit runs/letters set.safe --allowed letters.txt --blocked verse=other.txt

    Test it: perspectron perspective safety test runs/letters set.safe --allowed letters.txt --blocked other.txt

    Then: perspectron generate runs/letters "The key" --safety set.safe
    """

    action: tyro.conf.Positional[Literal["fit", "test"]]
    """ "fit" writes the file; "test" prints the share of each text that is outside."""
    run: OpenedFrom
    file: tyro.conf.Positional[Path]
    """File of the safe set."""
    allowed: Path
    """Text file of allowed sentences, one per line."""
    blocked: tuple[str, ...]
    """Text files of blocked sentences; NAME=FILE names their category, else the file does. Files of one name are one
    category."""
    facets: int = 8
    """Half-spaces for each category (fit only)."""
    alpha: float = 0.02
    """Share of allowed text that may lie outside (fit only)."""
    seed: int = 0
    """Seed of the clusters and of the split of the allowed text (fit only)."""
    json: Json = False

    def __call__(self) -> int:
        require(len(self.blocked) > 0, "blocked", "none", "one file or more")
        options: dict[str, Any] = {"facets": self.facets, "alpha": self.alpha, "seed": self.seed}
        if self.action == "test":
            for name, value in options.items():
                require(
                    value == getattr(SafetyOf, name),
                    name,
                    value,
                    "left out: a set is tested as it was fitted",
                )
        files = [named_file(text, "blocked") for text in self.blocked]
        for text, (name, _) in zip(self.blocked, files, strict=True):
            require(name != "allowed", "blocked", text, "NAME=FILE with another name than allowed")
        opened = open_model(self.run)
        model, tokenizer = opened.model, opened.tokenizer
        with Work("reading the sentences"):
            allowed_ND = _states(self.allowed, model, tokenizer)
            found = [(name, _states(path, model, tokenizer)) for name, path in files]
        blocked = {name: torch.cat([h_ND for own, h_ND in found if own == name]) for name, _ in found}
        if self.action == "fit":
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


def _states(path: Path, model: LanguageModel, tokenizer: Tokenizer) -> torch.Tensor:
    texts = [line for line in text_of(path).splitlines() if line.strip()]
    if not texts:
        raise DataError(f"{path}: no sentences, need one a line")
    return states(model, tokenizer, texts)
