"""A safe set of the head's input: half-spaces that keep directions of meaning, or tokens, out
(docs/designs/perspective.md#safety-polytope).

The set is P = {h : N h ≤ b}. Membership is a fact about directions, not about meaning: what the probes do not tell
apart, the set does not keep out.

Shapes: N states, H half-spaces, D model width, V vocabulary.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from perspectron.decode.processors import Hook, Mark, Step
from perspectron.decode.reading import read
from perspectron.decode.row import Row
from perspectron.designs.perspective.projection import Faces, Report, faces, project
from perspectron.model.model import LanguageModel
from perspectron.model.state import Stateful
from perspectron.quant.linear import QuantEmbedding, QuantLinear
from perspectron.util.config import load, one_of, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import atomic, parse_json
from perspectron.util.tensors import JSON_ROOM, load_tensors, save_tensors

FORMAT = "perspectron-safety-1"
WEIGHT = 1.0  # of a probe's L2 term, in terms of the mean loss's, over the number of states
ROOM = 0.05  # of the mean deviation, by which the inner point is inside
Action = Literal["project", "flag", "stop", "mask"]
ACTIONS: tuple[Action, ...] = ("project", "flag", "stop", "mask")


@dataclass(frozen=True)
class About:
    """Metadata of a polytope's file, beside its tensors; fields as in `Polytope`."""

    labels: tuple[str, ...]
    epsilon: float
    alpha: float
    model: str

    def __post_init__(self) -> None:
        require(0 <= self.alpha < 1, "alpha", self.alpha, "in [0, 1)")
        for label in self.labels:
            short = len(label) <= 200 and label.isprintable()
            require(short, "labels", repr(label[:80]), "of at most 200 printable characters each")


@dataclass(frozen=True)
class Polytope:
    """Half-spaces n_j·h ≤ b_j with a point inside.

    normals: unit rows [H,D], float32. offsets: b [H], float64; epsilon is in them. inside: [D], float64. labels: of
    each half-space; "token:ID" of one that keeps a token under a reference. epsilon: by how many deviations of the
    allowed states probes are moved out, so that a share of at most alpha of such text is outside. model: fingerprint.
    """

    normals: Tensor
    offsets: Tensor
    inside: Tensor
    labels: tuple[str, ...]
    epsilon: float
    alpha: float
    model: str

    def __post_init__(self) -> None:
        for name, kind in (("normals", torch.float32), ("offsets", torch.float64), ("inside", torch.float64)):
            part = getattr(self, name)
            require(part.dtype == kind, f"polytope.{name}", part.dtype, str(kind))
            require(bool(part.isfinite().all()), f"polytope.{name}", "not finite", "finite numbers")
        H, *rest = self.normals.shape or (0,)
        shapes = tuple(self.offsets.shape), tuple(self.inside.shape), len(self.labels), len(rest)
        require(
            shapes == ((H,), (*rest,), H, 1), "polytope", shapes, f"offsets, point and labels of {H} rows"
        )
        for label in self.labels:
            number = label.removeprefix("token:")
            right = number == label or (number.isdecimal() and number.isascii() and len(number) < 19)
            require(right, "polytope.labels", repr(label[:80]), "token:ID with a number")
        norms_H = self.normals.norm(dim=1)
        require(bool(((norms_H - 1).abs() < 1e-5).all()), "polytope.normals", "of other lengths", "unit rows")

    @cached_property
    def faces(self) -> Faces:
        return faces(self.normals, self.offsets, self.inside)

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens that half-spaces keep below a reference."""
        return [int(label[6:]) for label in self.labels if label.startswith("token:")]

    def scores(self, h_ND: Tensor) -> Tensor:
        """The excess of each state over the half-spaces [N]: the greatest n·h − b; ≤ 0 is inside, −∞ where there are
        none."""
        excess_NH = h_ND.double() @ self.faces.normal_HD.T - self.faces.offset_H
        return excess_NH.amax(1) if self.labels else excess_NH.new_full((len(h_ND),), -math.inf)

    def add(self, rows: "Polytope") -> "Polytope":
        """The polytope with the half-spaces of another added; the inner point moves where it has to. ConfigError:
        nothing is left, or the other is of another model."""
        require(rows.model == self.model, "model of the rows", rows.model[:12], self.model[:12])
        width, own = len(rows.inside), len(self.inside)
        require(width == own, "width of the rows", width, f"{own}, as the polytope has")
        normals, offsets = torch.cat([self.normals, rows.normals]), torch.cat([self.offsets, rows.offsets])
        return replace(
            self, normals=normals, offsets=offsets, labels=(*self.labels, *rows.labels),
            inside=interior(normals, offsets, self.inside, ROOM * float(offsets.abs().mean())),
        )  # fmt: skip

    def remove(self, label: str) -> "Polytope":
        """The polytope without the half-spaces of a label. ConfigError: there are none."""
        kept = [j for j, own in enumerate(self.labels) if own != label]
        require(len(kept) < len(self.labels), "label", label, f"one of {', '.join(sorted(set(self.labels)))}")
        normals, offsets = self.normals[kept], self.offsets[kept]
        return replace(self, normals=normals, offsets=offsets, labels=tuple(self.labels[j] for j in kept))

    def save(self, path: Path) -> None:
        """Write one file, whole or not at all. StorageError."""
        tensors = {"normals": self.normals, "offsets": self.offsets, "inside": self.inside}
        about = {"labels": self.labels, "epsilon": self.epsilon, "alpha": self.alpha, "model": self.model}
        header = {"format": FORMAT, "about": json.dumps(about)}
        header["digest"] = _digest(header["about"], tensors)
        with atomic(path) as temporary:
            save_tensors(temporary, tensors, header)

    @classmethod
    def load(cls, path: Path, model: Stateful) -> "Polytope":
        """Read a file. ConfigError: missing, damaged, or fitted to another model; a quantised head is another."""
        header, tensors = load_tensors(path, ConfigError, "a polytope")
        about = header.get("about", "")
        known = header.get("format") == FORMAT and set(tensors) == {"normals", "offsets", "inside"}
        if not known or header.get("digest") != _digest(about, tensors):
            raise ConfigError(
                f"{path}: not a polytope, or damaged; this writes one: "
                f"perspectron perspective safety fit RUN {path} --allowed FILE --blocked FILE"
            )
        own, size = model.fingerprint(), model.config.vocab_size
        try:
            fields = load(About, parse_json(about, room=JSON_ROOM), "about")
            if fields.model != own:
                raise ConfigError(f"fitted to model {fields.model[:12]!r}, this is {own[:12]!r}; fit it anew")
            made = cls(tensors["normals"], tensors["offsets"], tensors["inside"], *astuple(fields))
            width = made.inside.shape[0]
            require(width == model.config.d_model, "width", width, f"{model.config.d_model}, the model's")
            most = max(made.tokens, default=0)
            require(most < size, "labels", f"token:{most}", f"below {size} tokens of the model")
            return made
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"{path}: no polytope for this model ({error})") from None


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---------------------------------------------------------------- fitting


@torch.inference_mode()
def states(model: LanguageModel, tokenizer: Any, texts: Sequence[str], rows: int = 32) -> Tensor:
    """The head's input after the last token of each text [N,D], float64."""
    found = []
    for start in range(0, len(texts), rows):
        special = tokenizer.specials
        ids = [special.begun(tokenizer.encode(text)) for text in texts[start : start + rows]]
        last_BD, _ = read(
            model, ids, model.init_state(len(ids)), fresh=[True] * len(ids), reset=special.reset
        )
        found.append(last_BD.double().cpu())
    return torch.cat(found)


def fit(
    model: Stateful,
    allowed_ND: Tensor,
    blocked: Mapping[str, Tensor],
    *,
    facets: int = 8,
    alpha: float = 0.02,
    seed: int = 0,
) -> Polytope:
    """Probes between allowed states and `facets` clusters of each category's blocked states, moved out by one ε.

    A half of the allowed states is for the probes. With ε, the ⌈(1 − α)(m + 1)⌉-th smallest score of the other m, a
    share of at most α of further allowed states is outside, in expectation (split conformal).
    ConfigError: states that are not finite, none of a category, too few for α, or an empty interior.
    """
    require(0 < alpha < 1, "alpha", alpha, "in (0, 1)")
    require(facets >= 1, "facets", facets, "≥ 1")
    for name, states_ND in [("allowed", allowed_ND), *blocked.items()]:
        require(len(states_ND) > 0, f"states of {name}", "none", "one or more")
        require(bool(states_ND.isfinite().all()), f"states of {name}", "not finite", "finite numbers")
    draw = np.random.default_rng(seed)
    order = torch.from_numpy(draw.permutation(len(allowed_ND)))
    learnt_ND, fresh_ND = allowed_ND.double()[order].tensor_split(2)
    place = math.ceil((1 - alpha) * (len(fresh_ND) + 1))
    least = 2 * math.ceil(1 / alpha - 1)
    require(
        place <= len(fresh_ND), "alpha", alpha, f"larger, or {least:,} allowed texts, for {len(allowed_ND):,}"
    )
    normals, middles, labels = list[Tensor](), list[Tensor](), list[str]()
    for name, states_ND in blocked.items():
        for cluster_ND in _clusters(states_ND.double(), facets, draw):
            normal_D = probe(learnt_ND, cluster_ND)
            normals.append(normal_D)
            middles.append(((learnt_ND @ normal_D).mean() + (cluster_ND @ normal_D).mean()) / 2)
            labels.append(name)
    require(bool(normals), "blocked", "none", "states of one category or more")
    normal_HD, middle_H = torch.stack(normals).float(), torch.stack(middles)
    spread_H = (learnt_ND @ normal_HD.double().T).std(0)
    score_N = ((fresh_ND @ normal_HD.double().T - middle_H) / spread_H).amax(1)
    epsilon = float(score_N.sort().values[place - 1])
    offset_H, inside_D = middle_H + epsilon * spread_H, learnt_ND.mean(0)
    _refuse_empty(normal_HD, offset_H, inside_D, ROOM * float(spread_H.mean()), labels)
    return Polytope(normal_HD, offset_H, inside_D, tuple(labels), epsilon, alpha, model.fingerprint())


def _clusters(states_ND: Tensor, count: int, draw: np.random.Generator) -> list[Tensor]:
    """Clusters by k-means, none of them empty."""
    from scipy.cluster.vq import kmeans2

    count = max(1, min(count, len(states_ND) // 4))
    _, own_N = kmeans2(states_ND.numpy(), count, minit="++", rng=draw, missing="warn")
    groups = (states_ND[torch.from_numpy(own_N == index)] for index in range(count))
    return [group_ND for group_ND in groups if len(group_ND) > 0]


def probe(these_ND: Tensor, those_ND: Tensor) -> Tensor:
    """The unit normal [D] that points from these states to those: of a logistic regression in which both classes weigh
    the same, with an L2 term. float64, as the states are."""
    from scipy.optimize import minimize

    x_ND, sizes = torch.cat([these_ND, those_ND]).numpy(), [len(these_ND), len(those_ND)]
    y_N, weight_N = np.repeat([-1.0, 1.0], sizes), np.repeat([0.5 / size for size in sizes], sizes)
    middle_D, scale = x_ND.mean(0), x_ND.std() or 1.0
    x_ND = (x_ND - middle_D) / scale

    def loss(parameters: Any) -> Any:
        w_D, bias = parameters[:-1], parameters[-1]
        margin_N = y_N * (x_ND @ w_D + bias)
        pull_N = -weight_N * y_N / (1 + np.exp(np.clip(margin_N, -500, 500)))
        value = weight_N @ np.logaddexp(0, -margin_N) + WEIGHT / len(x_ND) * (w_D @ w_D) / 2
        return value, np.append(x_ND.T @ pull_N + WEIGHT / len(x_ND) * w_D, pull_N.sum())

    found = minimize(loss, np.zeros(x_ND.shape[1] + 1), jac=True, method="L-BFGS-B").x[:-1]
    return torch.from_numpy(found / np.linalg.norm(found))


def _refuse_empty(
    normal_HD: Tensor, offset_H: Tensor, inside_D: Tensor, room: float, labels: Sequence[str]
) -> None:
    """ConfigError, naming the three worst half-spaces, unless the point is inside all by `room`."""
    short_H = normal_HD.double() @ inside_D - offset_H + room
    if (short_H > 0).any():
        worst = [f"{j} ({labels[j]})" for j in short_H.argsort(descending=True)[:3].tolist()]
        raise ConfigError(
            f"polytope: the mean of the allowed states is not inside half-spaces {', '.join(worst)}; "
            "give other blocked text, fewer facets or a smaller alpha"
        )


def interior(normal_HD: Tensor, offset_H: Tensor, start_D: Tensor, room: float) -> Tensor:
    """The point nearest to `start` that is inside all half-spaces by `room`. ConfigError: there is none."""
    at_1D = project(start_D[None], faces(normal_HD, offset_H - room, start_D))[0]
    if not bool((normal_HD.double() @ at_1D[0] <= offset_H - room / 2).all()):
        raise ConfigError(
            "polytope: no point is inside all half-spaces; remove some, or ask for a smaller margin"
        )
    return at_1D[0]


def of_tokens(
    model: LanguageModel, ids: Sequence[int], reference: int, margin: float, inside_D: Tensor
) -> Polytope:
    """Half-spaces on which the logit of each id is `margin` nats below that of `reference`: p ≤ e^−margin · p of the
    reference, for every input. They lift the reference, too; "mask" does not. ConfigError: a head that is no matrix, is
    packed, so that it rounds its inputs, or whose logits are capped."""
    matrix = model.embedding if model.config.head is None else getattr(model, "lm_head", None)
    packed = isinstance(matrix, QuantLinear | QuantEmbedding)
    require(
        not packed, "tokens", model.config.name, "of a model whose head is not packed: it rounds its inputs"
    )
    weight_VD = getattr(getattr(model, "lm_head", None), "weight", None)
    if model.config.head is None:
        weight_VD = model.embedding(torch.arange(model.config.vocab_size, device=model.device))
    require(weight_VD is not None, "tokens", model.config.name, "of a model whose head is one matrix")
    assert weight_VD is not None
    cap = model.config.logits_cap
    require(
        not cap, "logits_cap", cap, "0: where logits are capped, no half-space keeps tokens a margin apart"
    )
    weight_VD = weight_VD.detach().double().cpu() * model.config.logits_factor
    V = len(weight_VD)
    for id in (*ids, reference):
        require(0 <= id < V, "tokens", id, f"≥ 0 and < {V}")
    require(reference not in ids, "reference", reference, "none of the blocked tokens")
    apart_HD = weight_VD[list(ids)] - weight_VD[reference]
    length_H = apart_HD.norm(dim=1)
    normals, offsets = (apart_HD / length_H[:, None]).float(), -margin / length_H
    labels = tuple(f"token:{id}" for id in ids)
    inside_D = interior(normals, offsets, inside_D.double(), ROOM)
    return Polytope(normals, offsets, inside_D, labels, 0.0, 0.0, model.fingerprint())


# ---------------------------------------------------------------- in decoding


@dataclass(frozen=True)
class Safety(Hook):
    """A polytope and what is done with a state outside. "project": the head reads the nearest state inside; "flag":
    the token is marked; "stop": the text ends before it; "mask": tokens that the polytope names are never drawn.

    window: the mean of each `window` states in a row is tested too, and marks or stops; 0: never. on_both: "stop"
    ends a text where a hook before it, such as the perspectives, flags a token and the projection moves the state by
    more than `kappa` of its length.
    """

    polytope: Polytope
    action: Action = "project"
    window: int = 16
    on_both: Literal["go on", "stop"] = "go on"
    kappa: float = 0.1

    name = "safety"

    def __post_init__(self) -> None:
        one_of(self.action, ACTIONS, "action")
        one_of(self.on_both, ("go on", "stop"), "on_both")
        require(self.window >= 0, "window", self.window, "≥ 0")
        if self.action == "mask":
            require(bool(self.polytope.tokens), "action", "mask", "another: the polytope names no tokens")

    @classmethod
    def of(cls, model: Stateful, path: Path, action: Action) -> "Safety":
        """The safe set of a file that was fitted to this model."""
        return cls(Polytope.load(path, model), action)

    def begin(self, row: Row) -> "_Guard":
        return _Guard(self)

    def report(self, verdicts: Sequence[Sequence[Mark]], seconds: float) -> tuple[dict[str, Any], str]:
        """The numbers of the tokens from states outside, and a line with their count."""
        outside = [[at for at, mark in enumerate(row) if mark.flagged] for row in verdicts]
        count = sum(map(len, verdicts))
        line = f"{sum(map(len, outside))} of {count} tokens from states outside the safe set"
        return {"unsafe": outside}, line if any(outside) else ""


class _Guard(Hook):
    """The hook of one row. projected: report on its last state. window: states not tested yet."""

    name = Safety.name

    def __init__(self, safety: Safety) -> None:
        self.safety = safety
        self.projected: Report | None = None
        self.window: tuple[Tensor, ...] = ()

    def hidden(self, hidden_ND: Tensor, step: Step) -> Tensor:
        x_ND, report = project(hidden_ND.cpu(), self.safety.polytope.faces)
        if hidden_ND is step.hidden_1D:
            self.projected = report
        if self.safety.action != "project" or not report.violated_N.any():
            return hidden_ND
        return x_ND.to(hidden_ND.device)

    def logits(self, logits_NV: Tensor, step: Step) -> Tensor:
        if self.safety.action != "mask":
            return logits_NV
        known = [id for id in self.safety.polytope.tokens if id < logits_NV.shape[1]]
        return logits_NV.index_fill(1, torch.tensor(known, dtype=torch.int64), -math.inf)

    def verdict(self, step: Step, id: int) -> Mark:
        safety, hidden_1D = self.safety, step.hidden_1D.cpu().double()
        report = project(hidden_1D, safety.polytope.faces)[1] if self.projected is None else self.projected
        outside, self.projected = bool(report.violated_N), None
        if safety.window > 0:
            self.window = (*self.window, hidden_1D)
            if len(self.window) == safety.window:
                outside |= bool(safety.polytope.scores(torch.stack(self.window).mean(0)) > 0)
                self.window = ()
        stop = outside and safety.action == "stop"
        if safety.on_both == "stop" and any(verdict.flagged for verdict in step.verdicts.values()):
            stop |= bool(report.moved_N > safety.kappa * hidden_1D.norm())
        return Mark(outside, stop=stop)
