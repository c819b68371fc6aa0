"""Designs at any number of parameters: what `compare` trains.

Only the budget is given. Width and depth follow from it, the same for all designs that have layers. One size that
affects every layer, the knob, is then adjusted until the parameters match.
"""

import contextlib
import math
from types import MappingProxyType

from perspectron.model.census import active_parameters, state_bytes
from perspectron.model.config import ModelConfig
from perspectron.presets.table import DESIGNS, HEAD_WIDTH, Design, Shape, Sizes, made, sizes_of, variant
from perspectron.util.config import require
from perspectron.util.errors import ConfigError

TOLERANCE = 0.02  # of the parameters
DEPTHS = ((8e6, 4), (60e6, 8), (math.inf, 12))  # layers for fewer parameters than these
PER_LAYER = 14  # weights in units of d²: 3 in a PDR layer and 11 in a SwiGLU of 3.67 d
LEAST = 8  # least value of a knob
STEP = 4  # of a knob
LEAST_VOCABULARY = 512
OF_STATE = (
    "rank",
    "state",
    "heads",
    "head_dim",
    "expand",
)  # sizes by which a state grows or shrinks; the first of them that a design has is used
MOST_OF_STATE = 257
STATE_TOLERANCE = 0.05


def solve(
    design: str, params: int, *, vocab_size: int, seq_len: int, state: int | None = None
) -> ModelConfig:
    """Size a design, or a variant of it, at `params` parameters, within 2%; of experts, those that a token uses count.
    state: bytes of its state, within 5%; None leaves them as they come.

    ConfigError for an unknown design or size, and for a budget that its embedding and least layers exceed.

        >>> config = perspectron.presets.solve("gla", 300_000, vocab_size=512, seq_len=64)
        >>> perspectron.presets.design_of(config)
        'gla'
    """
    require(params >= 1, "params", params, "≥ 1")
    shape = _shape(params, vocab_size, seq_len)
    more = {} if state is None else _stated(design, shape, state)
    config, least = _fit(design, shape, params, more)
    reached = active_parameters(config)
    bound = (
        f"about {least:,} or more for {design} with a vocabulary of {vocab_size:,}: its embedding alone has"
    )
    bound += f" {vocab_size * config.d_token:,}"
    bound += "".join(f", {key} = {value} follows from the state" for key, value in more.items())
    require(abs(reached - params) <= TOLERANCE * params, "params", params, bound)
    if state is not None:  # the knob may change it, too
        has = state_bytes(config, seq_len) or 0
        near = f"near {has:,}, that of {design} at that many parameters"
        require(abs(has - state) <= STATE_TOLERANCE * state, "state", f"{state:,} bytes", near)
    return config


def vocabulary(params: int) -> int:
    """Choose the size of a vocabulary for so many parameters: the largest power of two whose square is at most four
    times their number; 2048 at 2 M, 8192 at 20 M.

        >>> perspectron.presets.vocabulary(2_000_000)
        2048
    """
    size = LEAST_VOCABULARY
    while (2 * size) ** 2 <= 4 * params:
        size *= 2
    return size


def small(
    design: str, *, vocab_size: int, d_model: int = 64, layers: int = 2, seq_len: int = 256
) -> ModelConfig:
    """Size a design to be as large as a small transformer with a SwiGLU of 8/3 of its width, as near as its sizes
    allow. ConfigError for an unknown design, or a width of less than a head.

        >>> perspectron.presets.small("perspective2", vocab_size=280, d_model=32).vocab_size
        280
    """
    require(d_model >= HEAD_WIDTH, "d_model", d_model, f"≥ {HEAD_WIDTH}")
    shape = Shape(vocab_size, seq_len, d_model, layers)
    wide = {"hidden": 8 * d_model // 3 // 8 * 8}
    transformer = DESIGNS["transformer"]
    other = made(transformer.make, "transformer", _shared(transformer, shape) | wide)
    return _fit(design, shape, active_parameters(other))[0]


def _shape(params: int, vocab_size: int, seq_len: int) -> Shape:
    """The width, a multiple of the head width, and the depth whose plain layers come nearest to the budget."""
    layers = next(depth for below, depth in DEPTHS if params < below)
    widths = range(HEAD_WIDTH, HEAD_WIDTH * 256 + 1, HEAD_WIDTH)
    cost = {d: vocab_size * d + layers * PER_LAYER * d * d for d in widths}
    return Shape(vocab_size, seq_len, min(widths, key=lambda d: abs(math.log(cost[d] / params))), layers)


def _shared(design: Design, shape: Shape) -> dict[str, int]:
    """The sizes that follow from the shape, as far as the design has them (with a default other than None): a quarter
    as many heads for keys and values, and a window shorter than the text (docs/designs/perspective.md#stack)."""
    vocab_size, seq_len, d_model, layers = shape
    heads = d_model // HEAD_WIDTH
    follow = {
        "vocab_size": vocab_size, "d_model": d_model, "layers": layers, "positions": seq_len, "heads": heads,
        "kv_heads": max(k for k in range(1, heads + 1) if heads % k == 0 and (k == 1 or 4 * k <= heads)),
        "head_dim": HEAD_WIDTH, "window": max(1, min(512, seq_len // 2)), "rank": max(32, d_model // 48 * 8),
    }  # fmt: skip
    has = {key for key, size in sizes_of(design.make).items() if size.default is not None}
    return {key: value for key, value in follow.items() if key in has}


def _fit(name: str, shape: Shape, params: int, more: Sizes = MappingProxyType({})) -> tuple[ModelConfig, int]:
    """(the design as near to `params` as its knob gets, its fewest possible parameters). more: sizes beside those in
    the name."""
    design, _ = variant(name)
    sizes = _nearest(name, shape, params, more)

    def turned(knob: int) -> ModelConfig:
        return made(design.make, name, {**sizes, design.knob: knob})

    count = {k: active_parameters(turned(k)) for k in (LEAST, 2 * LEAST)}
    slope = (count[2 * LEAST] - count[LEAST]) / LEAST
    turns = round((params - count[LEAST]) / slope / STEP)
    return turned(max(LEAST, LEAST + turns * STEP)), count[LEAST]


def _nearest(name: str, shape: Shape, params: int, more: Sizes = MappingProxyType({})) -> Sizes:
    """The design's sizes nearest to the budget, the knob at its default; those in the name and `more` are kept."""
    design, given = variant(name)
    best: tuple[float, Sizes] = (math.inf, {})
    for sizes in design.variants(shape):
        sizes = _shared(design, shape) | dict(sizes) | given | dict(more)
        distance = abs(active_parameters(made(design.make, name, sizes)) - params)
        if distance >= best[0]:
            break  # variants grow, so later ones are farther
        best = (distance, sizes)
    return best[1]


def _stated(name: str, shape: Shape, state: int) -> Sizes:
    """Sizes at which the design's state has `state` bytes, within STATE_TOLERANCE, and its depth changes least.
    ConfigError, naming the nearest possible, if there are none."""
    design, given = variant(name)
    usual, known = _nearest(name, shape, 0), sizes_of(design.make)
    bound = "parameters: the state of it grows with the text"
    require(_state(name, usual, shape) is not None, f"match of {name}", "state", bound)
    layers = usual.get("layers", 0)
    pace = given.get("period", known["period"].default) if "period" in known else 1  # layers of a whole frame
    depths = {layers, *range(pace, 2 * layers + 1, pace)} if "layers" in known.keys() - given else {layers}
    keys = [f"mixer.{key}" if f"mixer.{key}" in known else key for key in OF_STATE]
    knobs = [key for key in keys if key in known and key != design.knob and key not in given]
    found = dict[int, Sizes]()
    for depth in sorted(depths, key=lambda depth: abs(depth - layers)):
        away = math.inf
        for value in range(1, MOST_OF_STATE) if knobs else [0]:
            sizes = {"layers": depth} if layers else {}
            sizes |= {knobs[0]: value} if knobs else {}
            with contextlib.suppress(ConfigError):  # a value may not divide a width
                size = _state(name, {**usual, **sizes}, shape) or 0
                found.setdefault(size, sizes)
                if abs(size - state) > away:
                    break  # states grow or shrink with the knob, so it is past the nearest
                away = abs(size - state)
        near = min(found, key=lambda size: abs(size - state), default=0)
        if abs(near - state) <= STATE_TOLERANCE * state:
            return found[near]
    nearest = sorted(sorted(found, key=lambda size: abs(size - state))[:2])
    require(
        False, "state", f"{state:,} bytes", f"near {' or '.join(f'{size:,}' for size in nearest)} for {name}"
    )
    return {}


def _state(name: str, sizes: Sizes, shape: Shape) -> int | None:
    return state_bytes(made(variant(name)[0].make, name, sizes), shape.seq_len)
