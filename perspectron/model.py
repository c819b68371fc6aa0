"""The language model: embedding, blocks, final norm, and a head tied to the embedding.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from perspectron.config import BlockConfig, ModelConfig, one_of
from perspectron.ffn import FFNS, TiedConfig
from perspectron.mixers import MIXERS
from perspectron.state import LMState, fingerprint


@dataclass(frozen=True)
class Output:
    """logits [B,T,V]; the state after the last token; the mean loss (None without targets); terms by name
    that blocks want added to it."""

    logits: Tensor
    state: LMState
    loss: Tensor | None
    aux: dict[str, Tensor]


class Block(nn.Module):
    """h = x + mixer(norm(x)); y = h + ffn(norm(h)) (seeds/topology.md §2, decisions.md §2)."""

    def __init__(self, d_model: int, norm_eps: float, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.mixer_norm = nn.RMSNorm(d_model, norm_eps)
        self.mixer = MIXERS[config.mixer.kind].module(d_model, norm_eps, config.mixer)
        self.ffn_norm = nn.RMSNorm(d_model, norm_eps)
        if not isinstance(config.ffn, TiedConfig):
            self.ffn = FFNS[config.ffn.kind](d_model, config.ffn)

    def forward(
        self, x_BTD: Tensor, state: object, ffn: nn.Module, reset_BT: Tensor | None, pad_BT: Tensor | None
    ) -> tuple[Tensor, object, dict[str, Tensor]]:
        mixed, state, aux = self.mixer(self.mixer_norm(x_BTD), state, reset_BT=reset_BT, pad_BT=pad_BT)
        x_BTD = x_BTD + mixed
        y_BTD, more = ffn(self.ffn_norm(x_BTD))
        return x_BTD + y_BTD, state, aux | more


class LanguageModel(nn.Module):
    """Token ids in, logits and state out. `recompute` trades time for memory in training: activations inside
    a block are computed again in the backward pass."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        for index, block in enumerate(config.blocks):
            if isinstance(block.ffn, TiedConfig):
                own = [i for i, other in enumerate(config.blocks) if not isinstance(other.ffn, TiedConfig)]
                one_of(block.ffn.block, own, f"blocks[{index}].ffn.block")
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config.d_model, config.norm_eps, block) for block in config.blocks)
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LMState:
        """The state before any token. `capacity`: make room for that many tokens at once (caches only)."""
        weight = self.embedding.weight
        blocks = cast("list[Block]", self.blocks)
        states = (b.mixer.init_state(batch_size, weight.device, weight.dtype, capacity) for b in blocks)
        return LMState(tuple(states))

    def forward(
        self,
        ids: Tensor,
        state: LMState | None = None,
        targets: Tensor | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> Output:
        """Read T ≥ 1 tokens after `state`.

        ids, targets: [B,T]; a target is the token that follows (-100: not counted). reset_BT: True where a
        document starts; nothing before it is remembered. pad_BT: True where there is no token; the state
        passes unchanged. Under `torch.inference_mode()` the state handed in is used up.
        """
        hidden_BTD, state, aux = self.hidden(ids, state, reset_BT=reset_BT, pad_BT=pad_BT)
        logits_BTV = self.head(hidden_BTD)
        loss = None
        if targets is not None:
            full = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
            total = F.cross_entropy(full.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = total / (targets != -100).sum().clamp_min(1)
        return Output(logits_BTV, state, loss, aux)

    def hidden(
        self,
        ids_BT: Tensor,
        state: LMState | None = None,
        *,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, LMState, dict[str, Tensor]]:
        """What the head reads [B,T,D], the new state, and auxiliary terms summed over blocks."""
        if ids_BT.ndim != 2 or ids_BT.shape[1] == 0:
            raise ValueError(f"ids have shape {tuple(ids_BT.shape)}, want [B, T] with T ≥ 1")
        state = self.init_state(ids_BT.shape[0]) if state is None else state
        if state.batch_size != ids_BT.shape[0]:
            raise ValueError(f"ids have {ids_BT.shape[0]} rows, the state has {state.batch_size}")
        x_BTD = self.embedding(ids_BT)
        layers, aux = [], dict[str, Tensor]()
        for block, layer in zip(cast("list[Block]", self.blocks), state.layers, strict=True):
            if self.recompute and torch.is_grad_enabled():
                x_BTD, layer, terms = torch.utils.checkpoint.checkpoint(
                    block, x_BTD, layer, self.ffn_of(block), reset_BT, pad_BT, use_reentrant=False
                )
            else:
                x_BTD, layer, terms = block(x_BTD, layer, self.ffn_of(block), reset_BT, pad_BT)
            layers.append(layer)
            aux.update({name: aux.get(name, 0) + term for name, term in terms.items()})
        return self.norm(x_BTD), LMState(tuple(layers)), aux

    def ffn_of(self, block: Block) -> nn.Module:
        """The feed-forward network of a block: its own, or the one it is tied to."""
        tied = block.config.ffn
        return cast(Block, self.blocks[tied.block] if isinstance(tied, TiedConfig) else block).ffn

    def head(self, hidden_BTD: Tensor) -> Tensor:
        """Logits [B,T,V]."""
        return F.linear(hidden_BTD, self.embedding.weight)

    def fingerprint(self) -> str:
        """Hex digest of config and weights; a saved state carries it."""
        return fingerprint(self.config, self.state_dict())


@torch.no_grad()
def init(model: LanguageModel, seed: int) -> None:
    """All initialisation there is, from one generator on the CPU, so that a seed means the same everywhere.

    Embedding N(0, 0.02²); every linear weight N(0, 1/fan_in), those that write into the residual stream
    (`o_proj`, `down_proj`) divided by √(2·blocks); biases 0; norms 1. A module with an `init_weights` then
    sets its own (a mixer's near-identity, a router's spread).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0, 0.02, generator=generator)
        elif isinstance(module, nn.Linear):
            writes = name.endswith(("o_proj", "down_proj"))
            scale = (2 * len(model.blocks)) ** -0.5 if writes else 1.0
            module.weight.normal_(0, scale * module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(1)
    for module in model.modules():
        own = getattr(module, "init_weights", None)
        if callable(own):
            own(generator)


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model on the current default device, initialised from `seed` (on the meta device: shapes alone)."""
    device = torch.get_default_device()
    with torch.device("meta"):  # where torch's own initialisation draws nothing from the global generator
        model = LanguageModel(config)
    if device.type == "meta":
        return model
    init(model.to_empty(device="cpu"), seed)
    return model.to(device)
