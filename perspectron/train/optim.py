"""AdamW with weight decay on matrices only, Muon for the matrices of blocks, recipes of designs, and learning-rate
schedules."""

import fnmatch
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from perspectron.experts.router import Routed
from perspectron.model.mixer import Mixer
from perspectron.util.config import at_least, one_of, positive, require, require_choices


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """ "muon": the updates of the blocks' matrices are orthogonalised (torch.optim.Muon), each as large as AdamW's;
    all else has AdamW, stacks of matrices too (experts, ADR's GRU, DRM's trunk)."""
    groups: str = "plain"
    """Weights with a rate and a decay of their own: "plain" is none (experts' positions decay, too), "own" as the
    authors of each mixer have them, or the kind of a mixer, such as "rwkv7", whose alone are taken. *"""
    lr: float = 1e-3
    """Peak learning rate. `perspectron train` takes the one of the design and size (perspectron/presets/rates.py), with
    --init and in stages this one."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Schedule after the warm-up: a cosine, or constant until the last `cooldown` share of the steps; a constant run
    can be given more steps later."""
    warmup: int = 50
    """Warm-up steps, in which the rate rises linearly; in stages at most a fifth of each. *"""
    final: float = 0.1
    """Final rate as a share of the peak."""
    cooldown: float = 0.2
    """Share of the steps in which a constant rate falls at the end."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""
    clip: float = 1.0
    """Largest gradient norm; 0 is no limit."""

    def __post_init__(self) -> None:
        require_choices(self)
        positive(self, "lr")
        at_least(0, self, "warmup", "weight_decay", "clip")
        require(0 <= self.final <= 1, "final", self.final, "in [0, 1]")
        require(0 <= self.cooldown <= 1, "cooldown", self.cooldown, "in [0, 1]")
        require(0 <= self.beta1 < 1, "beta1", self.beta1, "in [0, 1)")
        require(0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")

    @property
    def title(self) -> str:
        """The optimizer's name, with its `groups` unless they are plain."""
        name = "AdamW" if self.optimizer == "adamw" else "Muon and AdamW"
        return name + ("" if self.groups == "plain" else f" ({self.groups} groups)")


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrappers of its methods for torch.compile, which load the compiler: a second of every
    training."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)


class Muon(AdamW):
    """AdamW, and torch's Muon for the parameters of the last group. Both keep a parameter's moments in `state`."""

    def __init__(
        self, groups: list[dict[str, Any]], matrices: list[nn.Parameter], config: OptimConfig
    ) -> None:
        super().__init__(groups, **_options(config))
        self.muon = torch.optim.Muon(
            matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.muon.state = self.state
        self.param_groups += self.muon.param_groups

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Make one update."""
        *self.param_groups, last = self.param_groups
        try:
            super().step()
        finally:
            self.param_groups.append(last)
        inspect.unwrap(torch.optim.Muon.step)(self.muon)


def recipe_of(model: nn.Module, groups: str) -> dict[int, tuple[float, float]]:
    """(factor of the learning rate, factor of the weight decay) of each weight with its own, by id. ConfigError, naming
    `groups`: they are of a mixer, or of experts, that the model lacks."""
    found = dict[int, tuple[float, float]]()
    parts = [module for module in model.modules() if isinstance(module, Mixer | Routed) and module.recipe]
    kinds = {part.config.kind for part in parts}
    one_of(groups, ("plain", "own", *sorted(kinds)), "groups")
    for part in parts:
        if groups in ("own", part.config.kind):
            for name, parameter in part.named_parameters():
                fitting = (share for key, share in part.recipe.items() if fnmatch.fnmatchcase(name, key))
                if share := next(fitting, None):
                    found[id(parameter)] = share
    return found


def optimizer_of(model: nn.Module, config: OptimConfig) -> AdamW:
    """The optimizer of all parameters that are not frozen: one group of matrices, with decay, one of vectors (norms,
    biases), without, one for each other pair of factors in the recipe, and with Muon one of the blocks' matrices
    outside of it. A module names in `no_decay` its parameters that are stacked vectors, one a head. `rate` of a group
    is its factor of the learning rate."""
    recipe, stacked = recipe_of(model, config.groups), _stacked(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name for name, p in trained.items() if p.ndim >= 2 and id(p) not in stacked}
    hidden = by_muon(model, config)
    known = {id(p) for p in hidden}
    shared: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, 1.0): [], (1.0, 0.0): []}
    for name, p in trained.items():
        if id(p) not in known:
            shared.setdefault(recipe.get(id(p), (1.0, float(name in matrices))), []).append(p)
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay * config.weight_decay, "rate": rate}
        for (rate, decay), params in shared.items()
    ]
    return Muon(groups, hidden, config) if known else AdamW(groups, **_options(config))


def by_muon(model: nn.Module, config: OptimConfig) -> list[nn.Parameter]:
    """The matrices for which Muon keeps one moment: of the blocks, if they learn and are not in the recipe."""
    if config.optimizer != "muon":
        return []
    apart = {*recipe_of(model, config.groups), *_stacked(model)}
    return [
        p
        for name, p in model.named_parameters()
        if name.startswith("blocks.") and p.ndim == 2 and p.requires_grad and id(p) not in apart
    ]


def _stacked(model: nn.Module) -> set[int]:
    """Ids of the parameters that are stacked vectors."""
    return {id(getattr(m, name)) for m in model.modules() for name in getattr(m, "no_decay", ())}


def _options(config: OptimConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.beta1, config.beta2), "fused": True}


def freeze(model: nn.Module, only: tuple[str, ...]) -> None:
    """Let only the parameters learn whose names match one of these patterns; all, without a pattern. ConfigError for a
    pattern that matches no name."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in only:
        known = bool(fnmatch.filter(names, pattern))
        require(known, "only", pattern, "the name of a parameter, or a pattern")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only))


def learning_rate(step: float, steps: int, config: OptimConfig) -> float:
    """Learning rate of the step-th update (0-based) of `steps`; between two updates for a step that is not whole."""
    if step < config.warmup:
        return config.lr * min(1.0, (step + 1) / config.warmup)
    if config.schedule == "cosine":
        done = (step - config.warmup) / max(1, steps - config.warmup)
        fall = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    else:
        fall = min(1.0, (steps - step) / max(1.0, config.cooldown * steps))
        whole = step == int(step)  # of an update, where rounding has it a little below
        fall = 1.0 if whole and step < falls_at(steps, config) else fall
    return config.lr * (config.final + (1 - config.final) * max(0.0, fall))


def falls_at(steps: int, config: OptimConfig) -> int:
    """Number of first updates whose rate does not depend on `steps`: those before a constant rate falls. From a
    checkpoint up to there a run can still be given more steps. 0 for a cosine."""
    if config.schedule == "cosine":
        return 0
    return math.floor(steps - max(1.0, config.cooldown * steps)) + 1
