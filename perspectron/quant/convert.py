"""A trained model in few bits: linear layers packed block by block, each calibrated on what the packed blocks before
it give; the embedding and the head in 8 bits; experts ternary.

Shapes: n texts, T tokens of each, B of them at a time, D model width, N × K a matrix, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn

from perspectron.block import Block
from perspectron.config import one_of, require
from perspectron.experts import RoutedSwiGLU
from perspectron.mixers.drm import DRM
from perspectron.model import LanguageModel
from perspectron.ops.packing import Packed, dequantise, sizes
from perspectron.quant.formats import quantise
from perspectron.quant.gptq import FORMATS, Hessian, gptq
from perspectron.quant.linear import QuantEmbedding, QuantLinear, bytes_of
from perspectron.quant.ternary import converted

SMALL = 32  # rows or columns: less is not worth its bits
BATCH = 8  # texts at a time


@dataclass(frozen=True)
class QuantConfig:
    """linear: format of the blocks' matrices. formats: others for some, by patterns of their names, the first that
    fits; "float" leaves them. damping, act_order: as in `gptq`.

    Whatever this says, the embedding, learned positions and what gives the logits become int8, as do matrices of a
    mixer that reads them itself (DRM), because nothing sees their inputs; routers, and matrices with fewer than 32
    rows or columns, stay float.
    """

    linear: str = "2bit"
    formats: tuple[tuple[str, str], ...] = ()
    damping: float = 0.05
    act_order: bool = False

    def __post_init__(self) -> None:
        one_of(self.linear, FORMATS, "linear")
        for pattern, format in self.formats:
            one_of(format, (*FORMATS, "float"), f"formats: {pattern}")
        require(self.damping > 0, "damping", self.damping, "> 0")

    def format(self, name: str) -> str:
        """Of the matrix of this name."""
        return next((format for pattern, format in self.formats if fnmatchcase(name, pattern)), self.linear)


@dataclass(frozen=True)
class Layer:
    """method: "gptq", or "nearest". error: of the output on the calibration text, relative; nearest_error: had it been
    rounded to the nearest. None where no calibration saw it."""

    name: str
    shape: tuple[int, int]
    format: str
    method: str
    bytes: int
    error: float | None = None
    nearest_error: float | None = None


@dataclass
class Report:
    """layers: what was packed. kept: matrices that stay float, and why. experts, expert_bytes: how many became ternary,
    and what they take packed. bytes: of all else, by format or dtype. before: of the float model, experts too."""

    before: int
    layers: list[Layer] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    experts: int = 0
    expert_bytes: int = 0
    bytes: dict[str, int] = field(default_factory=dict)


@torch.no_grad()
def convert(
    model: LanguageModel,
    config: QuantConfig = QuantConfig(),
    calibration_nT: Tensor | None = None,
) -> Report:
    """Pack a float32 model in place, for inference only. calibration: token ids, windows of text like what the model
    will read; without them everything is rounded to the nearest. Experts stay float modules with ternary values, which
    an artifact packs exactly.

    ConfigError: a model that is not float32, or whose experts are half converted; ids out of bounds.
    """
    require(model.dtype == torch.float32, "dtype", str(model.dtype), "float32")
    require(converted(model), "experts", "half converted", "float or ternary as a whole")
    report = Report(sum(bytes_of(model).values()))
    model.eval().requires_grad_(False)
    texts = list[Tensor]()
    if calibration_nT is not None:
        V = model.config.vocab_size
        good = calibration_nT.ndim == 2 and calibration_nT.numel() > 0
        require(good, "calibration", tuple(calibration_nT.shape), "[n, T] ids")
        least, most = (int(value) for value in calibration_nT.aminmax())
        require(least >= 0 and most < V, "calibration", f"{least} … {most}", f"ids in 0 … {V - 1}")
    _embeddings(model, report)
    if calibration_nT is not None:
        texts = [_read(model, ids_BT) for ids_BT in calibration_nT.to(model.device).split(BATCH)]
    work = _Work(model, config, report, texts)
    for index in range(len(model.blocks)):
        work.block(index)
    work.head()
    report.bytes = bytes_of(model)
    if report.experts:
        float_experts = (m for m in model.modules() if isinstance(m, RoutedSwiGLU))
        for ffn in float_experts:
            report.bytes["float32"] -= sum(w.nbytes for w in (ffn.gate_EFD, ffn.up_EFD, ffn.down_EDF))
    return report


def pack_expert(ffn: RoutedSwiGLU, expert: int) -> tuple[Packed, Packed, Packed]:
    """gate, up and down as they are used, ternary: exactly, of those trained so; others rounded."""
    weights = ffn.weights(torch.tensor([expert], device=ffn.gate_EFD.device))
    gate, up, down = (quantise(weight[0], "ternary") for weight in weights)
    return gate, up, down


@torch.no_grad()
def rounded(ffn: RoutedSwiGLU) -> RoutedSwiGLU:
    """The same experts with the values that `pack_expert` gives them, and 8-bit activations: what packed ones will
    do, in float."""
    config = replace(ffn.config, base=False, ternary=False, int8_activations=True)
    with torch.device("meta"):
        made = RoutedSwiGLU(ffn.route_proj.in_features, config)
    weights = {name: torch.empty_like(getattr(ffn, name)) for name in ("gate_EFD", "up_EFD", "down_EDF")}
    for expert in range(len(ffn.gate_EFD)):
        for into, matrix in zip(weights.values(), pack_expert(ffn, expert), strict=True):
            into[expert] = dequantise(matrix)
    kept = {name: part for name, part in ffn.state_dict().items() if name in made.state_dict()}
    made.load_state_dict(kept | weights, assign=True)
    return made.eval().requires_grad_(False)


def _embeddings(model: LanguageModel, report: Report) -> None:
    for name in ("embedding", "positions"):
        table = getattr(model, name, None)
        if table is not None:
            matrix = quantise(table.weight, "int8")
            setattr(model, name, QuantEmbedding.of(matrix))
            report.layers.append(Layer(name, matrix.shape, "int8", "nearest", matrix.nbytes))


def _ternary_bytes(shape: torch.Size) -> int:
    codes, scales, _ = sizes("ternary", (shape[0], shape[1]))
    return codes[0] * codes[1] + 4 * scales[0]


def _read(model: LanguageModel, ids_BT: Tensor) -> Tensor:
    return model.embed(ids_BT, model.init_state(len(ids_BT)).length_B)[0]


class _Work:
    """One conversion under way. texts: what the next block reads, batch by batch [B,T,·]; empty without calibration.
    waiting: what a network has read in blocks that are tied to it and come before its own."""

    def __init__(
        self, model: LanguageModel, config: QuantConfig, report: Report, texts: list[Tensor]
    ) -> None:
        self.model, self.config, self.report, self.texts = model, config, report, texts
        self.waiting = dict[str, Hessian]()

    def block(self, index: int) -> None:
        """Pack what is a block's own, then read on through it."""
        block = cast(Block, self.model.blocks[index])
        ffn = getattr(block, "ffn", None)
        if isinstance(ffn, RoutedSwiGLU):
            block.ffn = rounded(ffn)
            self.report.experts += len(ffn.gate_EFD)
            shapes = (weight.shape[1:] for weight in (ffn.gate_EFD, ffn.up_EFD, ffn.down_EDF))
            self.report.expert_bytes += len(ffn.gate_EFD) * sum(map(_ternary_bytes, shapes))

        def run(x_BTD: Tensor) -> Tensor:
            state = block.init_state(len(x_BTD), self.model.device, self.model.dtype)
            y_BTD: Tensor = block(x_BTD, state, self.model.ffn_of(block), None, None)[0]
            return y_BTD

        self._own(f"blocks.{index}.", run)
        with _watch(self._linears(""), self._wait):
            self.texts = [run(x_BTD) for x_BTD in self.texts]

    def head(self) -> None:
        """Pack a head that is not the embedding."""
        self.texts = [self.model.norm(x_BTD) for x_BTD in self.texts]
        self._own("lm_head", self.model.head)

    def _own(self, prefix: str, run: Callable[[Tensor], Tensor]) -> None:
        """Pack the matrices of this prefix in the order of their work, each after those before it."""
        left = self._linears(prefix)
        for names in _stages(left, run, self.texts):
            hessian = self.waiting.pop(names[0], None) or self._hessian(left[names[0]])
            with _watch({names[0]: left[names[0]]}, lambda _, x: hessian.add(x)):  # noqa: B023  (used up here)
                for x_BTD in self.texts:
                    run(x_BTD)
            for name in names:
                self.waiting.pop(name, None)
                self._pack(name, left.pop(name), hessian)
        for name, linear in left.items():
            self._pack(name, linear, None)

    def _linears(self, prefix: str) -> dict[str, nn.Linear]:
        """The matrices whose names begin so that are still to be packed; what stays float is reported."""
        found = {}
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear) or not name.startswith(prefix):
                continue
            if isinstance(self.model.get_submodule(name.rpartition(".")[0]), RoutedSwiGLU):
                self.report.kept[name] = "router"
            elif min(module.weight.shape) < SMALL:
                self.report.kept[name] = f"fewer than {SMALL} rows or columns"
            elif self._format(name) == "float":
                self.report.kept[name] = "as asked"
            else:
                found[name] = module
        return found

    def _format(self, name: str) -> str:
        unseen = isinstance(self.model.get_submodule(name.rpartition(".")[0]), DRM)
        logits = name in ("lm_head", "lm_head.out_proj")
        return "int8" if unseen or logits else self.config.format(name)

    def _hessian(self, linear: nn.Linear) -> Hessian:
        return Hessian(linear.in_features, self.model.device)

    def _wait(self, name: str, x: Tensor) -> None:
        if name not in self.waiting:
            self.waiting[name] = self._hessian(cast(nn.Linear, self.model.get_submodule(name)))
        self.waiting[name].add(x)

    def _pack(self, name: str, linear: nn.Linear, hessian: Hessian | None) -> None:
        format, weight = self._format(name), linear.weight.detach()
        nearest = quantise(weight, format)
        matrix, error, nearest_error = nearest, None, None
        if hessian is not None:
            order, damping = self.config.act_order, self.config.damping
            matrix = gptq(weight, hessian, format, damping=damping, act_order=order)
            error, nearest_error = hessian.error(weight, matrix), hessian.error(weight, nearest)
        parent, _, own = name.rpartition(".")
        setattr(self.model.get_submodule(parent), own, QuantLinear.of(matrix, linear.bias))
        method = "nearest" if hessian is None else "gptq"
        self.report.layers.append(
            Layer(name, matrix.shape, format, method, matrix.nbytes, error, nearest_error)
        )


def _stages(
    linears: dict[str, nn.Linear], run: Callable[[Tensor], Tensor], texts: list[Tensor]
) -> list[list[str]]:
    """The names of those that work, in order, those that read the same together."""
    found: list[tuple[Tensor, list[str]]] = []

    def note(name: str, x: Tensor) -> None:
        if any(name in names for _, names in found):
            return
        for other, names in found:
            if x is other:
                names.append(name)
                return
        found.append((x, [name]))

    with _watch(linears, note):
        for x_BTD in texts[:1]:
            run(x_BTD[:1])
    return [names for _, names in found]


@contextmanager
def _watch(linears: dict[str, nn.Linear], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see` with the name and the input of each when it works."""
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
        for name, linear in linears.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
