"""The language model: embedding, blocks, final norm and head.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from perspectron.block import NORMS, Block
from perspectron.config import ModelConfig, one_of, require
from perspectron.ffn import TiedConfig
from perspectron.heads import HEADS, Emitter
from perspectron.ops.attention import places
from perspectron.state import LMState, fingerprint
from perspectron.terms import Term


@dataclass(frozen=True)
class Output:
    """logits [B,T,V]; the state after the last token; the mean loss in nats (None without targets); what blocks
    report, summed over them by name."""

    logits: Tensor
    state: LMState
    loss: Tensor | None
    aux: dict[str, Term]

    def objective(self) -> Tensor:
        """What training minimises: the loss and every term by its weight."""
        if self.loss is None:
            raise ValueError("objective: targets = None, must be given to the forward")
        return self.loss + sum(term.penalty() for term in self.aux.values())


class TokenEmbedding(nn.Embedding):
    """Rows to look up and, as a tied head, to multiply with."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of [..., D]: the product with every row."""
        return F.linear(hidden, self.weight)


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
        self.embedding = TokenEmbedding(config.vocab_size, config.d_token)
        if config.positions > 0:
            self.positions = nn.Embedding(config.positions, config.d_token)
        self.blocks = nn.ModuleList(
            Block(config.d_model, config.norm, config.norm_eps, block) for block in config.blocks
        )
        self.norm = NORMS[config.norm](config.d_model, config.norm_eps)
        if config.head is not None:
            self.lm_head = HEADS[config.head.kind](config.d_model, config.vocab_size, config.head)

    @property
    def device(self) -> torch.device:
        return self._norm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, outside of autocast."""
        return self._norm_weight.dtype

    @property
    def _norm_weight(self) -> Tensor:
        """Every model has it, packed or not."""
        return cast(Tensor, self.norm.weight)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LMState:
        """The state before any token. `capacity`: make room for that many tokens at once (caches only)."""
        blocks = cast("list[Block]", self.blocks)
        states = (b.init_state(batch_size, self.device, self.dtype, capacity) for b in blocks)
        length_B = None
        if self.config.positions > 0:
            length_B = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        return LMState(tuple(states), length_B)

    def set_step(self, step: int) -> None:
        """Tell every module that follows a schedule how many updates were done."""
        for module in self.modules():
            if module is not self and callable(own := getattr(module, "set_step", None)):
                own(step)

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
        if isinstance(getattr(self, "lm_head", None), Emitter):
            aux |= self.lm_head.terms(logits_BTV, reset_BT, pad_BT)
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
    ) -> tuple[Tensor, LMState, dict[str, Term]]:
        """What the head reads [B,T,D], the new state, and what blocks report, summed over them."""
        if ids_BT.ndim != 2 or ids_BT.shape[1] == 0:
            raise ValueError(f"ids have shape {tuple(ids_BT.shape)}, want [B, T] with T ≥ 1")
        state = self.init_state(ids_BT.shape[0]) if state is None else state
        if state.batch_size != ids_BT.shape[0]:
            raise ValueError(f"ids have {ids_BT.shape[0]} rows, the state has {state.batch_size}")
        x_BTD, length_B = self.embed(ids_BT, state.length_B, reset_BT, pad_BT)
        layers, aux = [], dict[str, Term]()
        for block, layer in zip(cast("list[Block]", self.blocks), state.layers, strict=True):
            if self.recompute and torch.is_grad_enabled():
                x_BTD, layer, terms = torch.utils.checkpoint.checkpoint(
                    block, x_BTD, layer, self.ffn_of(block), reset_BT, pad_BT, use_reentrant=False
                )
            else:
                x_BTD, layer, terms = block(x_BTD, layer, self.ffn_of(block), reset_BT, pad_BT)
            layers.append(layer)
            for name, term in terms.items():
                aux[name] = aux[name].plus(term) if name in aux else term
        return self.norm(x_BTD), LMState(tuple(layers), length_B), aux

    def embed(
        self,
        ids_BT: Tensor,
        length_B: Tensor | None,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings [B,T,·] with the learned positions, if any, and the tokens of the document after them."""
        x_BTD = self.embedding(ids_BT)
        if length_B is None:
            return x_BTD, None
        P, at = self.config.positions, places(length_B, ids_BT.shape[1], reset_BT, pad_BT)
        if not ids_BT.is_meta:
            last = int(at.position_BT.masked_fill(~at.valid_BT, 0).max())
            require(last < P, "position", last, f"< positions = {P}, the learned table of {self.config.name}")
        return x_BTD + self.positions(at.position_BT.clamp(0, P - 1)), at.length_B

    def ffn_of(self, block: Block) -> nn.Module | None:
        """The feed-forward network of a block: its own, the one it is tied to, or none."""
        if block.config.ffn is None:
            return None
        tied = block.config.ffn
        return cast(Block, self.blocks[tied.block] if isinstance(tied, TiedConfig) else block).ffn

    def head(self, hidden_BTD: Tensor) -> Tensor:
        """Logits [B,T,V]."""
        if self.config.head is None:
            return self.embedding.logits(hidden_BTD)
        logits_BTV: Tensor = self.lm_head(hidden_BTD)
        return logits_BTV

    def fingerprint(self) -> str:
        """Hex digest of config and weights; a saved state carries it. What training counts has no part in it."""
        weights = {name: w for name, w in self.state_dict().items() if not name.endswith("load_E")}
        return fingerprint(self.config, weights)


@torch.no_grad()
def init(model: LanguageModel, seed: int) -> None:
    """All initialisation there is, from one generator on the CPU, so that a seed means the same everywhere.

    Embedding N(0, embedding_std²), positions N(0, 0.02²); every linear weight N(0, 1/fan_in); biases 0; norms 1. A
    module with an `init_weights` then sets its own (a mixer's near-identity, a router's spread, a gate's start). What
    writes into the residual stream (`o_proj`, `down_proj`, the experts' `down_EDF`) is divided by √(2·blocks).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            std = model.config.embedding_std if name == "embedding" else 0.02
            module.weight.normal_(0, std, generator=generator)
        elif isinstance(module, nn.Linear):
            writes = name.endswith(("o_proj", "down_proj"))
            scale = (2 * len(model.blocks)) ** -0.5 if writes else 1.0
            module.weight.normal_(0, scale * module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.weight.fill_(1)
            if isinstance(module, nn.LayerNorm):
                module.bias.zero_()
    for module in model.modules():
        own = getattr(module, "init_weights", None)
        if callable(own):
            own(generator)
    for name, weight in model.named_parameters():
        if name.endswith(("down_EDF", "down_DF")):
            weight.mul_((2 * len(model.blocks)) ** -0.5)


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model on the current default device, initialised from `seed` (on the meta device: shapes alone)."""
    device = torch.get_default_device()
    with torch.device("meta"):  # where torch's own initialisation draws nothing from the global generator
        model = LanguageModel(config)
    if device.type == "meta":
        return model
    init(model.to_empty(device="cpu"), seed)
    return model.to(device)
