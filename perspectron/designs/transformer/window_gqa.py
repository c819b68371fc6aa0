"""Windowed grouped-query attention whose queries may read another input than keys and values
(docs/designs/perspective.md#windowed-attention).

Shapes: B batch, T time, D model width.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from perspectron.designs.transformer.attention import Attention, AttentionConfig
from perspectron.model.masks import Inputs
from perspectron.model.parts import projected, split_inputs
from perspectron.util.config import MixerConfig, at_least, require


@dataclass(frozen=True)
class WindowGQAConfig(MixerConfig):
    """The options of windowed attention.

    heads: H query heads, which divide the model width into even head widths. kv_heads: G, divides H.
    window: W tokens a query sees, itself counted. rope_base: of the rotary frequencies."""

    kind = "window_gqa"
    heads: int
    kv_heads: int
    window: int
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "window")
        require(self.kv_heads >= 1 and self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads,
                f"a divisor of heads = {self.heads}")  # fmt: skip
        require(self.rope_base > 1, "rope_base", self.rope_base, "> 1")


class WindowGQA(Attention):
    """softmax(q kᵀ / √K) v over the last W tokens."""

    small = WindowGQAConfig(heads=4, kv_heads=2, window=8)
    about = "attention to the last W tokens, query heads in groups, rotary positions"
    source = "docs/designs/perspective.md#windowed-attention"

    mix_exponents = (0.2, 0.7)  # of queries; of keys and values

    def __init__(self, d_model: int, norm_eps: float, config: WindowGQAConfig) -> None:
        own = AttentionConfig(config.heads, config.rope_base, kv_heads=config.kv_heads, window=config.window)
        super().__init__(d_model, norm_eps, own)
        self.config = config

    def _project(self, d_model: int) -> None:
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.kv_proj = nn.Linear(d_model, 2 * self.value_channels, bias=False)

    def _inputs(self, x: Inputs) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        x_q, *x_kv = split_inputs(x, len(self.mix_exponents))
        x_k, x_v = x_kv[0], x_kv[-1]  # keys and values may have an input for both
        k, v = projected(self.kv_proj, (x_k, x_v), [self.value_channels] * 2).chunk(2, -1)
        return (self.q_proj(x_q), k, v), (x_q, x_v)

    def _matrices(self) -> tuple[Tensor, ...]:
        return (self.q_proj.weight, *self.kv_proj.weight.chunk(2))
