"""Lens-gated GPT-2 and Lens 2, at named sizes."""

from perspectron.designs.lens.mixer import LensConfig
from perspectron.model.config import BlockConfig, ModelConfig, RouteGatedConfig, SequentialConfig
from perspectron.model.ffn import ContextMLPConfig, MLPConfig, SwiGLUConfig
from perspectron.presets.frame import GPT2_NORM, stack
from perspectron.presets.table import design, preset
from perspectron.util.config import FFNConfig, ResidualConfig, require


@design("GPT-2 with lenses, a route gate and context", "docs/designs/lens.md")
def lens(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    positions: int = 1024,
    mixer: LensConfig = LensConfig(heads=4),
    mlp: ContextMLPConfig = ContextMLPConfig(hidden=216, activation="gelu_tanh"),
    route: bool = True,
    route_scale: float = 1.0,
    anneal: float = 0.0,
    anneal_after: int = 0,
    embedding_norm: bool = True,
) -> ModelConfig:
    """GPT-2 with lenses; each part can be switched off, and without all of them it is GPT-2.

    mixer: the lenses, and whether their mixture is learned. mlp: the network, which with `context` reads what
    attention gave. route: the gate between attention and network; `RouteGatedConfig` has its other sizes.
    """
    _require_used(mixer)
    for key, value, usual in (
        ("route_scale", route_scale, 1),
        ("anneal", anneal, 0),
        ("anneal_after", anneal_after, 0),
    ):
        require(route or value == usual, key, value, "left out where route is off")
    require(anneal != 0 or anneal_after == 0, "anneal_after", anneal_after, "left out where anneal = 0")
    ffn: FFNConfig = mlp if mlp.context else MLPConfig(mlp.hidden, mlp.activation)
    residual: ResidualConfig = SequentialConfig()
    if route:
        residual = RouteGatedConfig(route_scale, anneal, anneal_after)
    block, more = BlockConfig(mixer, ffn, residual), {"embedding_norm": embedding_norm} | GPT2_NORM
    return stack(name, vocab_size, d_model, layers, block, positions=positions, **more)


def _require_used(mixer: LensConfig) -> None:
    discover, unused = mixer.discoverability or not mixer.disc_scale, "left out where discoverability is off"
    require(discover, "disc_scale", mixer.disc_scale, unused)


preset("lens-tiny", "GPT-2 with lenses, width 128", lens)
preset(
    "lens-20m", "GPT-2 with lenses, width 384", lens, vocab_size=8192, d_model=384, layers=8,
    mixer=LensConfig(6), mlp=ContextMLPConfig(752, activation="gelu_tanh"),
)  # fmt: skip
preset(
    "lens-gpt2-124m", "GPT-2 124M with every lens: 209.4 M", lens, vocab_size=50257, d_model=768, layers=12,
    mixer=LensConfig(12), mlp=ContextMLPConfig(3072, activation="gelu_tanh"), embedding_norm=False,
)  # fmt: skip


@design("attention with lenses and an output gate", "docs/designs/lens.md#lens2")
def lens2(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    hidden: int = 400,
    mixer: LensConfig = LensConfig(heads=4, output_gate=True, rope_base=10000.0),
    embedding_norm: bool = True,
) -> ModelConfig:
    """Lens with an output gate in place of the route gate and context, with rotary positions, RMSNorm and a SwiGLU."""
    _require_used(mixer)
    block = BlockConfig(mixer, SwiGLUConfig(hidden))
    return stack(name, vocab_size, d_model, layers, block, embedding_norm=embedding_norm)
