"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434) without positions, as in Kimi Linear: each token
keeps one small vector, the latent, from which all heads compute their keys and values.

A head's key is a matrix times the latent, so its product with a query is that of the latent with the query times that
matrix. Likewise attention averages latents first, and turns the mean into a value. Heads then share one key, the latent
beside the shared part, and nothing else of a token is kept.

Shapes: B batch, T time, D model width, H heads, R latent width, N width of a head's own part of a key, P width of the
part that all heads share, V value width.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from perspectron.model import cache
from perspectron.model.cache import Cache
from perspectron.model.masks import Mask, masked
from perspectron.model.mixer import Mixer
from perspectron.ops import attention
from perspectron.ops.fused import RMSNorm
from perspectron.util.config import MixerConfig, at_least, one_of, positive, require
from perspectron.util.terms import Term


@dataclass(frozen=True)
class MLAConfig(MixerConfig):
    """The options of latent attention.

    heads: H. rank: R. key_dim: N. shared_dim: P. value_dim: V. norm_eps: of the latent's norm; None is the model's.
    cache: latents and shared parts in the model's dtype, or rounded to bfloat16 once computed, so that all ways to read
    a text see the same ones."""

    kind = "mla"
    heads: int
    rank: int
    key_dim: int
    shared_dim: int
    value_dim: int
    norm_eps: float | None = None
    cache: Literal["full", "bfloat16"] = "full"

    def __post_init__(self) -> None:
        at_least(1, self, "heads", "rank", "key_dim", "shared_dim", "value_dim")
        positive(self, "norm_eps")
        one_of(self.cache, ("full", "bfloat16"), "cache")


class MLA(Mixer):
    """c = norm(W_c x), p = W_p x; of each head q = W_q x, k = (W_k c, p) and v = W_v c;
    W_o (softmax(q kᵀ / √(N + P)) v) over all earlier tokens. Of each, c and p are kept."""

    small: ClassVar[MixerConfig] = MLAConfig(2, 10, 6, 4, 5)
    about = "attention to all earlier tokens, whose keys and values are made of one small vector of each"
    source = "arXiv 2405.04434"
    drops = True

    def __init__(self, d_model: int, norm_eps: float, config: MLAConfig) -> None:
        super().__init__()
        H, R, N, P, V = config.heads, config.rank, config.key_dim, config.shared_dim, config.value_dim
        self.config = config
        self.exact_cells = 8 if config.cache != "bfloat16" else 0  # as in `Attention`
        self.q_proj = nn.Linear(d_model, H * (N + P), bias=False)
        self.kv_proj = nn.Linear(d_model, R + P, bias=False)
        self.kv_norm = RMSNorm(R, config.norm_eps or norm_eps)
        self.key_HRN = nn.Parameter(torch.empty(H, R, N))
        self.value_HVR = nn.Parameter(torch.empty(H, V, R))
        self.o_proj = nn.Linear(H * V, d_model, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the matrices so that keys and values are as large as latents."""
        for weight in (self.key_HRN, self.value_HVR):
            weight.normal_(0, self.config.rank**-0.5, generator=generator)

    def require_onnx(self, name: str) -> None:
        """ConfigError: values in its cache have no width, which a step in ONNX does not take."""
        require(False, name, self.config.kind, "another mixer to be exported to ONNX")

    def init_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0
    ) -> Cache:
        """The empty cache of c and p [B,1,S,R+P], with room for `capacity` tokens."""
        width = self.config.rank + self.config.shared_dim
        dtype = torch.bfloat16 if self.config.cache == "bfloat16" else dtype
        return cache.empty(batch_size, 1, width, 0, device, dtype, capacity)

    @masked
    def forward(
        self, x_BTD: Tensor, state: Cache, reset_BT: Mask, pad_BT: Mask, consume_state: bool
    ) -> tuple[Tensor, Cache, dict[str, Term]]:
        R, N, P = self.config.rank, self.config.key_dim, self.config.shared_dim
        q_BTHC = self.q_proj(x_BTD).unflatten(-1, (self.config.heads, N + P))
        q_BTHN, q_BTHP = q_BTHC.split([N, P], -1)
        c_BTR, p_BTP = self.kv_proj(x_BTD).split([R, P], -1)
        c_BTR = self.kv_norm(c_BTR.to(self.kv_norm.weight.dtype)).to(x_BTD.dtype)
        q_BTHK = torch.cat([_each(q_BTHN, self.key_HRN), q_BTHP], -1)
        k_B1TK = torch.cat([c_BTR, p_BTP], -1)[:, None]
        if self.config.cache == "bfloat16":
            k_B1TK = k_B1TK.bfloat16()
        at = attention.places(state.length_B, x_BTD.shape[1], reset_BT, pad_BT)
        o_BHTR, after = cache.attend(
            q_BTHK.transpose(1, 2), k_B1TK, k_B1TK[..., :R], state, at, scale=(N + P) ** -0.5,
            consume_state=consume_state, drop=self.dropout if self.training else None,
        )  # fmt: skip
        return self.o_proj(_each(o_BHTR.transpose(1, 2), self.value_HVR).flatten(2)), after, {}


def _each(x_BTHK: Tensor, weight_HNK: Tensor) -> Tensor:
    """W x [B,T,H,N] of each head, by its matrix."""
    B, T = x_BTHK.shape[:2]
    x_HMK = x_BTHK.permute(2, 0, 1, 3).flatten(1, 2)
    y_HMN = x_HMK @ weight_HNK.mT.to(x_BTHK.dtype)
    return y_HMN.unflatten(1, (B, T)).permute(1, 2, 0, 3)
