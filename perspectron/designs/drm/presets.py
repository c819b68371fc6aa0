"""The DRM emitter and DRM 2, at named sizes."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from perspectron.designs.drm.head import EmitterConfig
from perspectron.designs.drm.mixer import DRMConfig, Risk
from perspectron.designs.drm.terms import AIMS_OF_GATES, OF_GATES
from perspectron.model.config import BlockConfig, ModelConfig, NoResidualConfig
from perspectron.presets.table import DESIGNS, Shape, Sizes, design, preset
from perspectron.util.config import require


def _widths(_: Shape) -> Iterable[Sizes]:
    """Sizes of a block of any width, which alone has about 30 S² weights."""
    for width in range(16, 1 << 14, 16):
        yield {"d_model": width, "d_token": width * 3 // 4, "hidden": width, "emitter": width, "rank": 8}


OF_DIRECTIONS = ("gate_bias", "gate_temperature", "direction_norm")
"""Fields of a mixer's config that do nothing without directions."""


@design(
    "one vector that moves under a learned metric", "docs/designs/drm.md", knob="emitter", variants=_widths
)
def drm(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 256,
    mixer: DRMConfig = DRMConfig(directions=16, rank=8, hidden=256, d_token=192, dt=1.0),
    emitter: int = 256,
    stability: float = 0.0,
    risk: bool = False,
    embedding_norm: bool = False,
) -> ModelConfig:
    """One recurrent block with an emitter as its head; embeddings start at N(0, 1) (docs/designs/drm.md#head)."""
    blindspot = mixer.losses.blindspot
    require(risk or blindspot == 0, "blindspot", blindspot, "0 where risk is off")
    if mixer.directions == 0:
        for own, names in ((mixer, OF_DIRECTIONS), (mixer.losses, (*OF_GATES, *AIMS_OF_GATES))):
            for key in names:
                value, usual = getattr(own, key), getattr(type(own), key)
                off = key in OF_GATES and value == 0
                bound = f"{usual}{' or 0' if key in OF_GATES else ''} where directions = 0"
                require(off or value == usual, key, value, bound)
    mixer = replace(mixer, risk=Risk() if risk else None)
    block, head = BlockConfig(mixer, None, NoResidualConfig()), EmitterConfig(emitter, stability)
    return ModelConfig(
        name, vocab_size, d_model, (block,), head, embedding_std=1.0, embedding_norm=embedding_norm
    )


preset(
    "drm-104k", "the emitter on bytes: 64 coordinates, 8 directions", drm, vocab_size=257, d_model=64, emitter=64,
    mixer=DRMConfig(directions=8, rank=4, hidden=64, d_token=24, dt=1.0),
)  # fmt: skip
preset("drm-3m", "256 coordinates, 16 directions", drm)
preset(
    "drm-37m", "1024 coordinates, 32 directions on factorised bases", drm, vocab_size=8192, d_model=1024, emitter=1152,
    mixer=DRMConfig(32, 16, 1024, 768, direction_basis=256, metric_basis=256, dt=1.0),
)  # fmt: skip


DESIGNS["drm2"] = DESIGNS["drm"]._replace(
    make=partial(drm, mixer=DRMConfig(directions=0, rank=8, hidden=256, d_token=192, dt=4.0)),
    about="one vector that moves along its axes under a learned metric",
    source="docs/designs/drm.md#drm2",
)
