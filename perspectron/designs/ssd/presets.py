"""Mamba-2 at named sizes."""

from collections.abc import Iterable

from perspectron.designs.ssd.mixer import SSDConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.presets.frame import stack
from perspectron.presets.table import Shape, Sizes, design, preset


def _depths(shape: Shape) -> Iterable[Sizes]:
    """Depths of two mixers for each layer, a mixer and a network, of other designs, give or take two."""
    return [{"layers": n} for n in range(max(1, 2 * shape.layers - 2), 2 * shape.layers + 3)]


@design(
    "Mamba-2: a stack of state-space mixers",
    "docs/designs/baselines.md#mamba-2",
    knob="state",
    variants=_depths,
)
def ssd(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 8,
    mixer: SSDConfig = SSDConfig(head_dim=32, state=64),
    embedding_norm: bool = True,
) -> ModelConfig:
    """Mamba-2: a stack of mixers, without feed-forward networks."""
    block = BlockConfig(mixer, None)
    return stack(name, vocab_size, d_model, layers, block, embedding_norm=embedding_norm)


preset("ssd-tiny", "Mamba-2, sized like perspective-tiny-dense", ssd)
preset(
    "ssd-20m", "Mamba-2, sized like perspective-20m-dense", ssd,
    vocab_size=8192, d_model=384, layers=17, mixer=SSDConfig(64, 128),
)  # fmt: skip
preset(
    "ssd-125m", "Mamba-2, sized like perspective-125m-dense", ssd,
    vocab_size=32768, d_model=768, layers=26, mixer=SSDConfig(64, 128),
)  # fmt: skip
