"""Quantising a trained model: linear layers are packed block by block, each block calibrated on the output of the
packed blocks before it. The embedding and the head get 8 bits; experts become ternary, but those of a mixture get the
blocks' format.

Shapes: n texts, T tokens of each, B of them at a time, D model width, N × K a matrix, E experts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from perspectron.experts.fetched import Held, PackedMixture, Shard
from perspectron.experts.layer import EXPERTS, RoutedSwiGLU
from perspectron.experts.mixture import MATRICES, Mixture
from perspectron.experts.ternary import converted
from perspectron.model import half
from perspectron.model.block import NORMS, Block
from perspectron.model.ffn import TiedConfig
from perspectron.model.mixer import Mixer
from perspectron.model.model import LanguageModel
from perspectron.ops import tiles
from perspectron.ops.packing import Packed, dequantise
from perspectron.quant.formats import quantise
from perspectron.quant.gptq import FORMATS, Hessian, together
from perspectron.quant.linear import QuantEmbedding, QuantLinear, bytes_of, is_router
from perspectron.util.config import one_of, require
from perspectron.util.hooks import hooked

SMALL = 32  # rows or columns below which packing is not worth it
BATCH = 8  # texts at a time
TABLES = ("embedding", "positions")


@dataclass
class Report:
    """Report on a conversion. kept: matrices that stay float, and why. experts, expert_bytes: number of packed experts,
    and their bytes. bytes: bytes of everything else by format or dtype. before: bytes of the model as it was given,
    experts included."""

    before: int
    kept: dict[str, str] = field(default_factory=dict)
    experts: int = 0
    expert_bytes: int = 0
    bytes: dict[str, int] = field(default_factory=dict)


@torch.no_grad()
def convert(model: LanguageModel, linear: str = "2bit", calibration_nT: Tensor | None = None) -> Report:
    """Pack a model in place, for inference only. linear: format of the blocks' matrices. calibration: windows
    of token ids like those the model will read; without them everything is rounded to nearest. Experts stay float
    modules with ternary values, which an artifact packs exactly.

    The embedding, learned positions and the output matrix get 8 bits (`eight_bits`), as do matrices that a mixer reads
    past their layers (`Mixer.calls_linears`), because their inputs are not observed. The experts of a mixture are
    rounded to nearest: few windows have tokens for all of them. Routers and matrices with fewer
    than 32 rows or columns stay float.

    ConfigError for an unknown format, a model that is not float32 or whose experts are only partly converted, or ids
    out of bounds.
    """
    one_of(linear, FORMATS, "linear")
    report = Report(sum(bytes_of(model).values()))
    half.widen(model)
    require(model.dtype == torch.float32, "dtype", str(model.dtype), "float32")
    require(converted(model), "experts", "half converted", "float or ternary as a whole")
    model.eval().requires_grad_(False)
    texts = list[Text]()
    if calibration_nT is not None:
        V = model.config.vocab_size
        good = calibration_nT.ndim == 2 and calibration_nT.numel() > 0
        require(good, "calibration", tuple(calibration_nT.shape), "[n, T] ids")
        least, most = (int(value) for value in calibration_nT.aminmax())
        require(least >= 0 and most < V, "calibration", f"{least} … {most}", f"ids in 0 … {V - 1}")
    _embeddings(model, eight_bits(linear))
    if calibration_nT is not None:
        for ids_BT in calibration_nT.to(model.device).split(BATCH):
            length_B = model.init_state(len(ids_BT)).length_B
            texts.append(Text(model.placed(model.embedding(ids_BT), length_B)[0], {}))
    work = _Work(model, linear, report, texts)
    for index in range(len(model.blocks)):
        work.block(index)
    work.head()
    report.bytes = bytes_of(model, without=EXPERTS)
    return report


def pack_expert(ffn: RoutedSwiGLU, expert: int) -> tuple[Packed, Packed, Packed]:
    """An expert's gate, up and down in ternary form: exact if it was trained so, else rounded."""
    weights = ffn.weights(torch.tensor([expert], device=ffn.gate_EFD.device))
    gate, up, down = (quantise(weight[0], "ternary") for weight in weights)
    return gate, up, down


@torch.no_grad()
def rounded(ffn: RoutedSwiGLU) -> RoutedSwiGLU:
    """The float layer that computes what the packed one will: with the values of `pack_expert`, and 8-bit
    activations."""
    config = replace(ffn.config, base=False, ternary=False, int8_activations=True)
    with torch.device("meta"):
        made = RoutedSwiGLU(ffn.route_proj.in_features, config)
    weights = {name: torch.empty_like(getattr(ffn, name)) for name in MATRICES}
    for expert in range(len(ffn.gate_EFD)):
        for into, matrix in zip(weights.values(), pack_expert(ffn, expert), strict=True):
            into[expert] = dequantise(matrix)
    kept = {name: part for name, part in ffn.state_dict().items() if name in made.state_dict()}
    made.load_state_dict(kept | weights, assign=True)
    return made.eval().requires_grad_(False)


@torch.no_grad()
def packed_mixture(ffn: Mixture, format: str, layer: int) -> PackedMixture:
    """The layer with its experts packed and in memory, each weight rounded to nearest. Takes each float matrix out of
    `ffn` once it is packed."""
    with torch.device("meta"):
        made = PackedMixture(ffn.route_proj.in_features, ffn.config, layer, format)
    packed = dict[str, list[Packed]]()
    for name, weight in ffn.matrices().items():
        packed[name] = [quantise(weight_NK, format) for weight_NK in weight]
        delattr(ffn, name)
    experts = range(ffn.config.experts)
    gates: list[Packed] | list[None] = packed.get("gate_EFD") or [None for _ in experts]
    made.source = Held([Shard(gates[e], packed["up_EFD"][e], packed["down_EDF"][e]) for e in experts])
    made.load_state_dict(ffn.state_dict(), assign=True)
    return made.eval().requires_grad_(False)


def linear_for(reset: int | None) -> str:
    """The format that the blocks' matrices get unless told. reset: the token by which the tokenizer parts texts; one of
    others, as imported models have it, has another than 0, or none."""
    return "2bit" if reset == 0 else "4bit32"


def formats(model: nn.Module, linear: str) -> dict[str, str]:
    """The format of each module that is packed where the blocks' matrices get `linear`, by its name; experts apart.
    The embedding, learned positions, the output matrix and what a mixer reads past its layers get 8 bits."""
    found = {name: eight_bits(linear) for name in TABLES if getattr(model, name, None) is not None}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not why_float(model, name, module):
            parent = model.get_submodule(name.rpartition(".")[0])
            unseen = isinstance(parent, Mixer) and not parent.calls_linears
            logits = name in ("lm_head", "lm_head.out_proj")
            found[name] = eight_bits(linear) if unseen or logits else linear
    return found


def why_float(model: nn.Module, name: str, module: nn.Linear) -> str:
    """Why a matrix is not packed; "" if it is."""
    if is_router(model, name):
        return "router"
    return f"fewer than {SMALL} rows or columns" if min(module.weight.shape) < SMALL else ""


def eight_bits(linear: str) -> str:
    """The 8-bit format that goes with `linear`, the format of the blocks' matrices."""
    return "8bit32" if linear in tiles.FORMATS else "int8"


def _embeddings(model: LanguageModel, format: str) -> None:
    for name in TABLES:
        table = getattr(model, name, None)
        if table is not None:
            setattr(model, name, QuantEmbedding.of(quantise(table.weight, format)))


class Text(NamedTuple):
    """The input of the next block for a batch [B,T,·], and what earlier blocks share with it."""

    x_BTD: Tensor
    shared: dict[str, Tensor]


class _Work:
    """A conversion in progress. texts: input of the next block, batch by batch; empty without calibration. waiting:
    statistics of what a network has read in blocks that are tied to it and come before its own."""

    def __init__(self, model: LanguageModel, linear: str, report: Report, texts: list[Text]) -> None:
        self.model, self.linear, self.report, self.texts = model, linear, report, texts
        self.waiting = dict[str, Hessian]()
        self.formats = formats(model, linear)
        self.tied = any(isinstance(block.ffn, TiedConfig) for block in model.config.blocks)

    def block(self, index: int) -> None:
        """Pack a block's own matrices, then run the texts through it."""
        block = cast(Block, self.model.blocks[index])
        ffn = getattr(block, "ffn", None)
        if isinstance(ffn, RoutedSwiGLU):
            block.ffn = rounded(ffn)
            self.report.experts += len(ffn.gate_EFD)
            one = sum(matrix.nbytes for matrix in pack_expert(ffn, 0))
            self.report.expert_bytes += len(ffn.gate_EFD) * one
        if isinstance(ffn, Mixture):
            block.ffn = packed_mixture(ffn, self.linear, index)
            shards = cast(Held, block.ffn.source).shards
            self.report.experts += len(shards)
            self.report.expert_bytes += sum(matrix.nbytes for shard in shards for matrix in shard)

        def run(text: Text) -> Tensor:
            state = block.init_state(len(text.x_BTD), self.model.device, self.model.dtype)
            given = (text.x_BTD, state, self.model.ffn_of(block), None, None, False, text.shared)
            y_BTD: Tensor = block(*given)[0]
            return y_BTD

        self._own(f"blocks.{index}.", run)
        with _watch(self._linears(""), self._wait):
            self.texts = [text._replace(x_BTD=run(text)) for text in self.texts]

    def head(self) -> None:
        """Pack a head that is not the embedding."""
        self._own("lm_head", lambda text: self.model.head(self.model.norm(text.x_BTD)))

    def _own(self, prefix: str, run: Callable[[Text], Tensor]) -> None:
        """Pack the matrices whose names begin with `prefix`; those with the same input are packed together."""
        left, leader = self._linears(prefix), dict[str, str]()
        hessians, first = dict[str, Hessian](), list[tuple[str, Tensor]]()
        norms = {
            name: norm
            for name, norm in self.model.named_modules()
            if name.startswith(prefix) and _is_norm(norm)
        }
        normed, made = dict[str, str](), list[tuple[str, Tensor]]()

        def note(name: str, x: Tensor) -> None:
            if name not in leader:
                leader[name] = next((other for other, y in first if y is x), name)
                first.append((name, x))
                normed.update((name, norm) for norm, y in made if y is x)
            if leader[name] == name:
                if name not in hessians:
                    hessians[name] = self.waiting.get(name) or Hessian(x.shape[-1], x.device)
                hessians[name].add(x)

        hooks = [
            norm.register_forward_hook(lambda *call, name=name: made.append((name, call[2])))
            for name, norm in norms.items()
        ]
        with _watch(left, note), hooked(hooks):
            for text in self.texts:
                run(text)
                first.clear()
                made.clear()
        for name, norm in normed.items():
            if leader[name] == name:
                self._even(
                    [left[other] for other in left if leader.get(other) == name],
                    norms[norm],
                    hessians[name],
                    run,
                )
        stages = defaultdict[tuple[str, str], list[str]](list)
        for name in left:
            self.waiting.pop(name, None)
            stages[leader.get(name, name), self.formats[name]].append(name)
        for (name, format), names in stages.items():
            self._pack({name: left[name] for name in names}, format, hessians.get(name))

    def _even(
        self, linears: list[nn.Linear], norm: nn.Module, hessian: Hessian, run: Callable[[Text], Tensor]
    ) -> None:
        """Even out the channels that these matrices read from a norm, so that rounding a group of them to 8 bits loses
        less, though rounding columns loses more (SmoothQuant: Xiao et al. 2022, arXiv 2211.10438). The norm's weights
        make up for it, unless something else reads its output. Columns of 4 bits would lose more than it gains."""
        if self.linear != "8bit32" or self.tied:
            return
        size_K = hessian.sum_KK.diagonal().sqrt()
        by_K = size_K.clamp_min(1e-3 * float(size_K.max())).sqrt()
        by_K = (by_K / by_K.log().mean().exp()).float()
        before = run(self.texts[0])
        parts = [x.data for x in norm.parameters()]
        weights = [linear.weight.data for linear in linears]
        kept = [x.clone() for x in (*parts, *weights)]
        for x in parts:
            x /= by_K
        for x in weights:
            x *= by_K
        # Of what the block adds to each token, so that one huge channel hides nothing.
        added = (before - self.texts[0].x_BTD).square().mean(-1, keepdim=True).sqrt()
        if bool(((run(self.texts[0]) - before).abs() <= 1e-4 * added + 1e-5 * before.abs()).all()):
            hessian.sum_KK /= by_K.double().outer(by_K.double())
        else:
            for x, old in zip((*parts, *weights), kept, strict=True):
                x.copy_(old)

    def _linears(self, prefix: str) -> dict[str, nn.Linear]:
        """Matrices with this prefix that are not packed yet; those that stay float are reported."""
        linears = {}
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear) or not name.startswith(prefix):
                continue
            if why := why_float(self.model, name, module):
                self.report.kept[name] = why
            else:
                linears[name] = module
        return linears

    def _wait(self, name: str, x: Tensor) -> None:
        if name not in self.waiting:
            self.waiting[name] = Hessian(x.shape[-1], x.device)
        self.waiting[name].add(x)

    def _pack(self, linears: dict[str, nn.Linear], format: str, hessian: Hessian | None) -> None:
        weights = [linear.weight.detach() for linear in linears.values()]
        if hessian is None:
            packed = [quantise(weight, format) for weight in weights]
        else:
            packed = together(weights, hessian, format)
        for (name, linear), matrix in zip(linears.items(), packed, strict=True):
            parent, _, own = name.rpartition(".")
            setattr(self.model.get_submodule(parent), own, QuantLinear.of(matrix, linear.bias))


def _is_norm(module: nn.Module) -> bool:
    """True for a norm with a weight for each channel."""
    return isinstance(module, tuple(NORMS.values())) and getattr(module, "weight", None) is not None


@contextmanager
def _watch(linears: dict[str, nn.Linear], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see` with the name and the input of each matrix when it is used."""
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
        for name, linear in linears.items()
    ]
    with hooked(hooks):
        yield
