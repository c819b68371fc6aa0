"""Designs at any size: what `compare` trains, with sizes solved so that parameters match.

A preset is one size of a design; here only the budget is given. Width and depth follow from it, the same for all
designs that have layers; one size that reaches every layer, the knob, is then turned until the parameters match.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from perspectron import presets
from perspectron.census import active_parameters
from perspectron.config import ModelConfig, one_of, require
from perspectron.presets import PRESETS, Sizes

HEAD_WIDTH = 32
TOLERANCE = 0.02  # of the parameters
DEPTHS = ((8e6, 4), (60e6, 8), (math.inf, 12))  # layers below so many parameters
PER_LAYER = 14  # weights over d²: 3 in a PDR layer and 11 in a SwiGLU of 3.67 d
LEAST = 8  # of a knob


class Shape(NamedTuple):
    """What the designs of a comparison share. d_model: of those with layers."""

    vocab_size: int
    seq_len: int
    d_model: int
    layers: int


class Design(NamedTuple):
    """preset: whose other sizes it has. make: its config from sizes. variants: sizes that a shape leaves open, of
    which the nearest is taken before the knob is turned in steps."""

    preset: str
    make: Callable[[str, Sizes], ModelConfig]
    variants: Callable[[Shape], Iterable[Sizes]]
    knob: str
    step: int
    about: str

    @property
    def source(self) -> str:
        return PRESETS[self.preset].source

    def config(self, name: str, sizes: Sizes) -> ModelConfig:
        return self.make(name, PRESETS[self.preset].sizes | sizes)


def _stack(shape: Shape) -> Sizes:
    return {"vocab_size": shape.vocab_size, "d_model": shape.d_model, "layers": shape.layers}


def _heads(shape: Shape) -> list[Sizes]:
    return [_stack(shape) | {"heads": shape.d_model // HEAD_WIDTH}]


def _positions(shape: Shape) -> list[Sizes]:
    return [_heads(shape)[0] | {"positions": shape.seq_len}]


def _perspective(shape: Shape) -> list[Sizes]:
    """A quarter as many heads for keys and values, as in the document, and a window that text goes past."""
    (sizes,) = _heads(shape)
    heads = sizes["heads"]
    kv_heads = max(k for k in range(1, heads + 1) if heads % k == 0 and (k == 1 or 4 * k <= heads))
    window = max(1, min(512, shape.seq_len // 2))
    return [sizes | {"rank": max(32, shape.d_model // 48 * 8), "kv_heads": kv_heads, "window": window}]


def _experts(shape: Shape) -> list[Sizes]:
    return [_perspective(shape)[0] | presets.ROUTED]


def _ssd(shape: Shape) -> list[Sizes]:
    """Two mixers where others have a mixer and a network, give or take two."""
    sizes = _stack(shape) | {"head_dim": HEAD_WIDTH}
    return [sizes | {"layers": n} for n in range(max(1, 2 * shape.layers - 2), 2 * shape.layers + 3)]


def _drm(shape: Shape) -> Iterable[Sizes]:
    """One block of any width, by itself about 30 S² weights."""
    for width in range(16, 1 << 14, 16):
        yield {
            "vocab_size": shape.vocab_size, "d_model": width, "d_token": width * 3 // 4, "hidden": width,
            "emitter": width,
        }  # fmt: skip


DESIGNS = {
    "perspective": Design(
        "perspective-tiny-dense", presets.perspective, _perspective, "hidden", 4,
        "three layers of Perspective Decay Recurrence, then one of windowed attention",
    ),
    "adr": Design(
        "adr-tiny", presets.adr, _positions, "hidden", 4, "attention to recurrent memories of keys and values"
    ),
    "lens": Design(
        "lens-tiny", presets.lens, _positions, "hidden", 4, "GPT-2 with lenses, a route gate and context"
    ),
    "drm": Design("drm-3m", presets.drm, _drm, "emitter", 4, "one state that moves by a learned metric"),
    "gpt2": Design("gpt2-tiny", presets.gpt2, _positions, "hidden", 4, "GPT-2: learned positions, GELU"),
    "transformer": Design(
        "transformer-tiny", presets.decoder, _heads, "hidden", 4, "full attention, RoPE, RMSNorm, SwiGLU"
    ),
    "gla": Design("gla-tiny", presets.gla, _heads, "hidden", 4, "gated linear attention"),
    "ssd": Design("ssd-tiny", presets.ssd, _ssd, "state", 4, "Mamba-2: a stack of state-space mixers"),
    "perspective-experts": Design(
        "perspective-tiny", presets.perspective, _experts, "hidden", 4,
        "the same with 8 experts a PDR layer; its active parameters match",
    ),
}  # fmt: skip


def shape(params: int, *, vocab_size: int, seq_len: int) -> Shape:
    """The width and depth for a budget of parameters: a multiple of the head width whose plain layers come nearest."""
    layers = next(depth for below, depth in DEPTHS if params < below)
    widths = range(HEAD_WIDTH, HEAD_WIDTH * 256 + 1, HEAD_WIDTH)
    cost = {d: vocab_size * d + layers * PER_LAYER * d * d for d in widths}
    return Shape(vocab_size, seq_len, min(widths, key=lambda d: abs(math.log(cost[d] / params))), layers)


def solve(design: str, params: int, *, vocab_size: int, seq_len: int) -> ModelConfig:
    """The design at `params` parameters, within 2%; of experts, those that a token uses count.

    ConfigError for an unknown design, and for a budget that its embedding and least layers exceed.
    """
    require(params >= 1, "params", params, "≥ 1")
    config, least = _fit(design, shape(params, vocab_size=vocab_size, seq_len=seq_len), params)
    reached = active_parameters(config)
    bound = (
        f"about {least:,} or more for {design} with a vocabulary of {vocab_size:,}: its embedding alone has"
    )
    bound += f" {vocab_size * config.d_token:,}"
    require(abs(reached - params) <= TOLERANCE * params, "params", params, bound)
    return config


def small(
    design: str, *, vocab_size: int, d_model: int = 64, layers: int = 2, seq_len: int = 256
) -> ModelConfig:
    """The design beside a small transformer with a SwiGLU of 8/3 of its width, as large as that as its sizes allow."""
    own = Shape(vocab_size, seq_len, d_model, layers)
    twin = DESIGNS["transformer"].config(
        "transformer", _heads(own)[0] | {"hidden": 8 * d_model // 3 // 8 * 8}
    )
    return _fit(design, own, active_parameters(twin))[0]


def design_of(config: ModelConfig) -> str:
    """Which design a model is, by its name, that of a preset or of a design. ConfigError when it is neither."""
    name = config.name
    if name in PRESETS:
        routed = any(getattr(block.ffn, "torus", None) for block in config.blocks)
        name = "perspective-experts" if routed else name.split("-")[0]
    return str(one_of(name, DESIGNS, "model name"))


def _fit(name: str, shape: Shape, params: int) -> tuple[ModelConfig, int]:
    """(the design as near to `params` as its knob comes, the fewest that it could have)."""
    design = DESIGNS[one_of(name, DESIGNS, "design")]
    sizes = _nearest(design, shape, params)
    count = {k: active_parameters(design.config(name, sizes | {design.knob: k})) for k in (LEAST, 2 * LEAST)}
    slope = (count[2 * LEAST] - count[LEAST]) / LEAST
    turns = round((params - count[LEAST]) / slope / design.step)
    return design.config(name, sizes | {design.knob: max(LEAST, LEAST + turns * design.step)}), count[LEAST]


def _nearest(design: Design, shape: Shape, params: int) -> Sizes:
    best: tuple[float, Sizes] = (math.inf, {})
    for sizes in design.variants(shape):
        distance = abs(active_parameters(design.config("", sizes)) - params)
        if distance >= best[0]:
            break  # they grow
        best = (distance, sizes)
    return best[1]
