"""The language model: embedding, blocks, final norm and head.

Shapes: B batch, T time, D model width, V vocabulary.
"""

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from perspectron.experts.router import Views
from perspectron.model import heads, marks
from perspectron.model.block import NORMS, Block
from perspectron.model.config import ModelConfig
from perspectron.model.ffn import TiedConfig
from perspectron.model.heads import TokenEmbedding, tied
from perspectron.model.parts import Dropout, SameZeros, Shared, ValueResidual
from perspectron.model.seen import Seen
from perspectron.model.state import LMState, fingerprint
from perspectron.model.tuned import carried, has_first
from perspectron.ops import fused
from perspectron.ops.attention import places
from perspectron.ops.dispatch import captured, check_consumed, gradients_off, recorder
from perspectron.ops.fused import batch_invariant
from perspectron.util import ranks
from perspectron.util.config import one_of, require, require_choices
from perspectron.util.errors import ConfigError, StateError
from perspectron.util.machine import memory
from perspectron.util.streams import stream
from perspectron.util.terms import Term, merged

_numbers = itertools.count()


@dataclass(frozen=True)
class Output:
    """The result of a forward pass.

    logits: [B,T,V]. state: after the last token. loss: mean in nats, None without targets. aux: terms that blocks
    and head report, summed by name.

    hidden_states, one entry more than there are blocks: the input of the first block (embeddings, with learned
    positions, if there are any), then the output of each block [B,T,D], except that the last entry is the input of the
    head: the last block's output after the final norm. attentions: the attention weights of each block [B,H,T,P+T]
    after the softmax, or None where it has no attention. Their last T columns are the tokens given, the P before them
    those that the layer's state holds, the newest at the right; padding and tokens outside the window or in another
    document have 0. Both are None unless asked for, as in transformers.

        >>> model = perspectron.build("perspective2-tiny")
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> output = model(ids[:, :-1], targets=ids[:, 1:], output_hidden_states=True, output_attentions=True)
        >>> tuple(output.logits.shape), len(output.hidden_states), output.attentions[0] is None
        ((1, 3, 2048), 5, True)
        >>> output.objective().backward()
    """

    logits: Tensor
    state: LMState
    loss: Tensor | None
    aux: dict[str, Term]
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor | None, ...] | None = None

    def objective(self) -> Tensor:
        """The training objective: the loss plus every term times its weight."""
        if self.loss is None:
            raise ValueError("objective: targets = None, must be given to the forward")
        return self.loss + sum(term.penalty() for term in self.aux.values())


class LanguageModel(nn.Module):
    """A language model: it maps token ids [B,T] to logits [B,T,V] and a state. `recompute` trades time for memory in
    training by computing activations inside a block again in the backward pass.

        >>> model = perspectron.build("perspective2-tiny").eval()
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> with torch.inference_mode():
        ...     whole, half = model(ids), model(ids[:, :2])
        ...     rest = model(ids[:, 2:], half.state)
        >>> torch.allclose(whole.logits[:, -1], rest.logits[:, -1], atol=1e-4)
        True
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        require_choices(config)
        self.config = config
        self.number = next(_numbers)
        """Number of this model in this process; its states carry it."""
        self.recompute = False
        for index, block in enumerate(config.blocks):
            if isinstance(block.ffn, TiedConfig):
                own = [
                    i for i, other in enumerate(config.blocks) if not isinstance(other.ffn, TiedConfig | None)
                ]
                one_of(block.ffn.block, own, f"blocks[{index}].ffn.block")
        self.embedding = TokenEmbedding(config.vocab_size, config.d_token)
        if config.positions > 0:
            self.positions = TokenEmbedding(config.positions, config.d_token)
        if config.first_norm:
            self.first_norm = NORMS[config.norm](config.d_token, config.norm_eps)
        self.blocks = nn.ModuleList(
            Block(
                config.d_model, config.norm, config.norm_eps, block, config.dropout,
                shift=config.shift, input_conv=config.input_conv, input_swish=config.input_swish,
            )
            for block in config.blocks
        )  # fmt: skip
        for each in cast("list[Block]", self.blocks):
            reads = getattr(getattr(self.ffn_of(each), "config", None), "reads", "stream")
            mixed = reads == "stream" or each.config.mixer is not None
            require(mixed, "reads", reads, "stream in a layer without a mixer")
        known = {name for each in cast("list[Block]", self.blocks) for name in each.inputs}
        for part, names in (("shift", config.shift), ("input_conv", config.input_conv)):
            if not isinstance(names, bool):
                for name in names:
                    one_of(name, sorted(known), part)
                alone = "x" not in names or set(names) <= {"x", "network"}
                require(alone, part, "+".join(names), "x, or single inputs of the mixers")
        if config.first_values:
            self._lean()
        self.norm = NORMS[config.norm](config.d_model, config.norm_eps)
        if config.head is not None:
            self.lm_head = heads.build(config.d_model, config.vocab_size, config.head)
        factor = torch.tensor(config.embedding_factor, dtype=torch.float64, device="cpu")
        self._factors = {dtype: factor.to(dtype).item() for dtype in (torch.bfloat16, torch.float16)}
        self.dropout = Dropout(config.dropout) if config.dropout else None
        self._drops = list[Dropout]()
        for name, module in self.named_modules():
            if isinstance(module, Dropout):
                module.name = name
                self._drops.append(module)

    def _lean(self) -> None:
        """Give each mixer a value residual: its values are mixed with those of the first with as many channels."""
        seen = set[int]()
        for block in cast("list[Block]", self.blocks):
            width = 0 if block.config.mixer is None else block.mixer.value_channels
            if width:
                block.first_values = ValueResidual(self.config.d_model, width, first=width not in seen)
                seen.add(width)

    @property
    def device(self) -> torch.device:
        return self._norm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type it computes in, outside of autocast."""
        return self._norm_weight.dtype

    @property
    def _norm_weight(self) -> Tensor:
        """The final norm's weight, which every model has, packed or not."""
        return cast(Tensor, self.norm.weight)

    def init_state(
        self,
        batch_size: int,
        *,
        capacity: int = 0,
        device: torch.device | str | None = None,
        tuned: Sequence[str] = (),
    ) -> LMState:
        """The state before any token. capacity: allocate room for that many tokens at once (caches only). device:
        "meta" for shapes only; None for the model's device. tuned: kinds of trained parts (`model.tuned`) that matrix
        memories get, as zeros. ConfigError: tuned is given, and the model has no matrix memory."""
        blocks, place = cast("list[Block]", self.blocks), torch.device(device or self.device)
        if tuned and not any(mixer.decays() for block in blocks for mixer in block.mixers):
            kinds = ", ".join(sorted({mixer.config.kind for block in blocks for mixer in block.mixers}))
            raise ConfigError(
                f"{tuned[0]}: {self.config.name} has layers of {kinds or 'no mixer'}, must have a matrix memory"
            )
        states = (b.init_state(batch_size, place, self.dtype, capacity, tuned) for b in blocks)
        length_B = None
        if self.config.positions > 0:
            length_B = torch.zeros(batch_size, dtype=torch.int64, device=place)
        return LMState(tuple(states), length_B, self.number)

    def begun(self, like: LMState) -> LMState:
        """The state before any token, for rows with the trained parts of `like`."""
        empty = self.init_state(like.batch_size)
        layers = map(carried, empty.layers, like.layers)
        return dataclasses.replace(empty, layers=tuple(layers))

    def set_step(self, step: int) -> None:
        """Set the number of completed updates in every module that follows a schedule."""
        for module in self.modules():
            if module is not self and callable(own := getattr(module, "set_step", None)):
                own(step)

    def forward(
        self,
        ids: Tensor | None = None,
        state: LMState | None = None,
        targets: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
        consume_state: bool = False,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Output:
        """Read T ≥ 1 tokens in B ≥ 1 rows after `state`.

        ids, targets: [B,T]. A target is the next token, shifted by the caller; -100 is ignored. inputs_embeds: [B,T,·]
        instead of ids, as `embedding` would return them. reset_BT: True at the first token of a document; nothing
        before it is remembered. pad_BT: True where there is no token; the state is unchanged there. consume_state:
        allow `state` to be overwritten, which saves a copy; it must not be used again. Results are the same.
        output_hidden_states, output_attentions: return them, as `Output` says, with gradients where those are enabled;
        attention maps are without dropout. Raises ConfigError for neither or both of ids and inputs_embeds, a wrong
        shape or, on a CPU, an id outside the vocabulary, and for attention maps of several documents that begin with a
        trained memory; ValueError for consume_state with gradients enabled.
        """
        seen = None
        if output_hidden_states or output_attentions:
            seen = Seen([] if output_hidden_states else None, [] if output_attentions else None)
        hidden_BTD, state, aux = self.hidden(
            ids,
            state,
            inputs_embeds=inputs_embeds,
            reset_BT=reset_BT,
            pad_BT=pad_BT,
            consume_state=consume_state,
            seen=seen,
        )
        logits_BTV = self.head(hidden_BTD)
        aux |= self.terms(logits_BTV, reset_BT, pad_BT)
        loss = None
        if targets is not None:
            wanted = tuple(logits_BTV.shape[:2])
            bound = f"{wanted}, as the tokens have"
            require(tuple(targets.shape) == wanted, "shape of targets", tuple(targets.shape), bound)
            total = fused.entropy(logits_BTV.flatten(0, 1), targets.flatten().long())
            loss = ranks.all_reduce_sum(total) / ranks.all_reduce_sum((targets != -100).sum()).clamp_min(1)
        return Output(logits_BTV, state, loss, aux, *(() if seen is None else seen.result(hidden_BTD)))

    def hidden(
        self,
        ids_BT: Tensor | None = None,
        state: LMState | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
        consume_state: bool = False,
        views: Views | None = None,
        seen: Seen | None = None,
    ) -> tuple[Tensor, LMState, dict[str, Term]]:
        """The input of the head [B,T,D], the new state, and the terms that blocks report, summed by name. views: from
        which the rows choose their experts. seen: collects what it asks for from each block."""
        check_consumed(consume_state)
        self.check_tokens(ids_BT, inputs_embeds)
        x_BTD = self._embedded(cast(Tensor, ids_BT)) if inputs_embeds is None else inputs_embeds
        for name, mask in (("reset_BT", reset_BT), ("pad_BT", pad_BT)):
            if mask is not None:
                whole = tuple(x_BTD.shape[:2])
                require(
                    mask.shape == whole, f"shape of {name}", tuple(mask.shape), f"{whole}, as the tokens have"
                )
                require(mask.dtype is torch.bool, f"dtype of {name}", mask.dtype, "torch.bool")
        if state is None:
            state, consume_state = self.init_state(x_BTD.shape[0]), gradients_off()
        self.own(state)
        if state.batch_size != x_BTD.shape[0]:
            raise ConfigError(f"ids have {x_BTD.shape[0]} rows, the state has {state.batch_size}")
        if reset_BT is not None and has_first(state) and reset_BT[:, 1:].any():
            masks = {"inputs_embeds": x_BTD, "reset_BT": reset_BT, "pad_BT": pad_BT}
            return self._by_documents(state, masks, consume_state=consume_state, views=views, seen=seen)
        x_BTD, length_B = self.placed(x_BTD, state.length_B, reset_BT, pad_BT)
        if self.dropout is not None:
            for drop in self._drops if self.training and torch.is_grad_enabled() else ():
                drop.passes += 1
            x_BTD = self.dropout(x_BTD)
        layers, aux, shared = [], dict[str, Term](), Shared()
        for index, (block, layer) in enumerate(
            zip(cast("list[Block]", self.blocks), state.layers, strict=True)
        ):
            at = None if views is None else views.at(index)
            again = self.recompute and torch.is_grad_enabled() and (seen is None or seen.maps is None)
            given = (
                x_BTD, layer, self.ffn_of(block), reset_BT, pad_BT, consume_state and not again, shared, at,
            )  # fmt: skip
            with nullcontext() if seen is None else seen.block(x_BTD):
                if again:
                    x_BTD, layer, terms = torch.utils.checkpoint.checkpoint(
                        block,
                        *given,
                        use_reentrant=False,
                        context_fn=lambda: (nullcontext(), SameZeros(self._drops)),
                    )
                else:
                    x_BTD, layer, terms = block(*given)
            layers.append(layer)
            aux = merged(aux, terms)
        if seen is not None and seen.states is not None:
            seen.states.append(x_BTD)
        return self.norm(x_BTD), LMState(tuple(layers), length_B, self.number), aux

    def _by_documents(
        self,
        state: LMState,
        texts: dict[str, Tensor | None],
        *,
        consume_state: bool,
        views: Views | None,
        seen: Seen | None,
    ) -> tuple[Tensor, LMState, dict[str, Term]]:
        """`hidden` piece by piece, cut where a document of any row begins: it starts with the trained first memory."""
        reset_BT = cast(Tensor, texts["reset_BT"])
        cuts = [0, *(1 + reset_BT[:, 1:].any(0).nonzero()[:, 0]).tolist(), reset_BT.shape[1]]
        hidden, aux, parts = list[Tensor](), dict[str, Term](), list[Seen]()
        pad_BT = texts["pad_BT"]
        tokens_T = (torch.ones_like(reset_BT) if pad_BT is None else ~pad_BT).sum(0).tolist()
        if seen is not None:
            alone = "false where documents begin with a trained memory; read each alone"
            require(seen.maps is None, "output_attentions", True, alone)
        for start, stop in itertools.pairwise(cuts):
            piece = {name: None if x is None else x[:, start:stop] for name, x in texts.items()}
            at = views and dataclasses.replace(views, position_BT=views.position_BT[:, start:stop])
            own = None if seen is None else Seen([])
            x_BTD, state, terms = self.hidden(
                None, state, consume_state=consume_state, views=at, seen=own, **piece
            )
            hidden.append(x_BTD)
            parts += [] if own is None else [own]
            consume_state = gradients_off()
            share = sum(tokens_T[start:stop]) / max(sum(tokens_T), 1)
            for name, term in terms.items():  # each is a mean over tokens
                part = term.times(share)
                aux[name] = aux[name].plus(part)._replace(blocks=term.blocks) if name in aux else part
        if seen is not None:
            seen.states = [
                torch.cat(list(xs), 1) for xs in zip(*(part.states or [] for part in parts), strict=True)
            ]
        return torch.cat(hidden, 1), state, aux

    def own(self, state: LMState) -> None:
        """Raise StateError for a state of another model."""
        if state.model not in (None, self.number):
            raise StateError("the state belongs to another model; use the model that made it")

    def __deepcopy__(self, memo: dict[int, Any]) -> "LanguageModel":
        """An independent model, which does not accept states of the original."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo), number=next(_numbers))
        return copied

    def check_tokens(self, ids_BT: Tensor | None, inputs_embeds: Tensor | None) -> None:
        """Raise ConfigError unless exactly one of them is given, with at least one row and one token."""
        if (ids_BT is None) == (inputs_embeds is None):
            both = "both are given" if ids_BT is not None else "neither is given"
            raise ConfigError(f"ids, inputs_embeds: {both}, must be exactly one of them")
        width = (self.config.d_token,) if ids_BT is None else ()
        given = inputs_embeds if ids_BT is None else ids_BT
        if not isinstance(given, Tensor):
            raise ConfigError(f"ids, inputs_embeds: {type(given).__name__}, must be a tensor")
        if ids_BT is not None and ids_BT.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"ids are {ids_BT.dtype}, must be int64 or int32")
        shape = tuple(given.shape)
        if len(shape) != 2 + len(width) or 0 in shape or shape[2:] != width:
            name = "inputs_embeds has" if width else "ids have"
            wanted = ", ".join(map(str, ("B", "T", *width)))
            raise ConfigError(f"{name} shape {shape}, must be [{wanted}] with B ≥ 1 and T ≥ 1")

    def _embedded(self, ids_BT: Tensor) -> Tensor:
        """Embeddings of ids [B,T,·]. ConfigError: one is outside the vocabulary, as a CPU finds; to ask a GPU first
        would keep it waiting."""
        try:
            x_BTD: Tensor = self.embedding(ids_BT)
        except IndexError:
            V = self.config.vocab_size
            beyond = [id for id in ids_BT.flatten().tolist() if not 0 <= id < V]
            if not beyond:
                raise
            raise ConfigError(f"ids = {beyond[0]}, must be ≥ 0 and < vocab_size = {V}") from None
        return x_BTD

    def placed(
        self,
        x_BTD: Tensor,
        length_B: Tensor | None,
        reset_BT: Tensor | None = None,
        pad_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The input of the first block from token embeddings [B,T,·], and the length of each document after them.
        Embeddings are normed, to a mean square of 1 or with weights, and multiplied if the config says so, and learned
        positions are added if there are any."""
        if self.config.embedding_norm:
            x_BTD = F.rms_norm(x_BTD, x_BTD.shape[-1:], eps=self.config.norm_eps)
        if self.config.first_norm:
            x_BTD = self.first_norm(x_BTD)
        if self.config.embedding_factor != 1:
            x_BTD = x_BTD * self._factors.get(x_BTD.dtype, self.config.embedding_factor)
        if length_B is None:
            return x_BTD, None
        P, at = self.config.positions, places(length_B, x_BTD.shape[1], reset_BT, pad_BT)
        if not (x_BTD.is_meta or torch.compiler.is_exporting() or recorder() is not None or captured()):
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
        config = self.config
        logits_BTV: Tensor
        if config.head is None:
            logits_BTV = tied(self.embedding, hidden_BTD, config.vocab_size)
        else:
            logits_BTV = self.lm_head(hidden_BTD)
        if config.logits_factor != 1:
            logits_BTV = logits_BTV * config.logits_factor
        if config.logits_cap:
            logits_BTV = config.logits_cap * batch_invariant(torch.tanh, logits_BTV / config.logits_cap)
        return logits_BTV

    def terms(self, logits_BTV: Tensor, reset_BT: Tensor | None, pad_BT: Tensor | None) -> dict[str, Term]:
        """Terms of the loss from the head; none for a plain matrix."""
        asks = getattr(getattr(self, "lm_head", None), "terms", None)
        return {} if asks is None else cast("dict[str, Term]", asks(logits_BTV, reset_BT, pad_BT))

    def disk_reads(self) -> tuple[float, float]:
        """Bytes of weights read from disk so far, and seconds spent waiting for them. Zero here: all weights are in
        memory."""
        return 0.0, 0.0

    def fingerprint(self) -> str:
        """Hex digest of config and weights, stored in saved states. Training counters do not affect it."""
        weights = {name: w for name, w in self.state_dict().items() if not name.endswith("load_E")}
        return fingerprint(self.config, weights)


OUTPUTS = ("o_proj", "down_proj")
"""Linear layers that write into the residual stream."""


@torch.no_grad()
def init(model: LanguageModel, seed: int) -> None:
    """Initialise all weights. Numbers are drawn on the CPU, so that a seed gives the same weights everywhere.

    Embedding N(0, embedding_std²), positions N(0, 0.02²); every linear weight N(0, 1/fan_in); biases 0; norms 1. A
    module with an `init_weights` then sets its own (a near-identity matrix, a router's spread, a gate's bias). The
    maps into the residual stream (`o_proj`, `down_proj`, the experts' `down_EDF`) are divided by √(2·blocks), or 0 with
    `zero_outputs`.

    Each weight, each module's `init_weights` and each expert has its own stream of random numbers, derived from seed
    and name. A process can therefore build only a part of a model: modules on the meta device are skipped and change
    nothing elsewhere. Raises ConfigError for a parameter or buffer that nothing filled, and for a module with
    `init_weights` of which only a part is present.
    """
    whole = {name: module for name, module in model.named_modules() if not marks.is_meta(module)}
    for name, module in model.named_modules():
        draws = hasattr(module, "init_weights") or next(module.parameters(recurse=False), None) is not None
        if draws and name not in whole and not all(tensor.is_meta for tensor in marks.tensors(module)):
            raise ConfigError(f"{name} is partly on the meta device: make all of it, or none")
    for module in whole.values():
        marks.mark(module)
    outputs = 0.0 if model.config.zero_outputs else (2 * len(model.blocks)) ** -0.5
    for name, module in whole.items():
        if isinstance(module, nn.Embedding):
            std = model.config.embedding_std if name == "embedding" else 0.02
            module.weight.normal_(0, std, generator=stream(seed, f"{name}.weight"))
        elif isinstance(module, nn.Linear):
            scale = outputs if name.endswith(OUTPUTS) else 1.0
            std = scale * module.in_features**-0.5
            module.weight.normal_(0, std, generator=stream(seed, f"{name}.weight"))
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.weight.fill_(1)
            if isinstance(module, nn.LayerNorm):
                module.bias.zero_()
    for name, module in whole.items():
        own = getattr(module, "init_weights", None)
        if callable(own):
            own(stream(seed, name))
    for name, weight in model.named_parameters():
        if name.endswith(("down_EDF", "down_DF")):
            weight.mul_(outputs)
    for name, module in whole.items():
        marks.refuse_marked(name, module)


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """Build a model on the current default device, initialised from `seed` (on the meta device: shapes only)."""
    device, model = torch.get_default_device(), shape_of(config)
    if device.type == "meta":
        return model
    init(allocated(model), seed)
    return model.to(device)


def shape_of(config: ModelConfig) -> LanguageModel:
    """A model on the meta device: shapes and no numbers. torch's own initialisation draws nothing there from the global
    generator."""
    with torch.device("meta"):
        return LanguageModel(config)


def allocated(model: LanguageModel) -> LanguageModel:
    """The model, moved from the meta device to uninitialised CPU memory. ConfigError as in `require_memory`."""
    require_memory(model)
    # to_empty() would do, but loads sympy for it
    return model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))


def require_memory(model: LanguageModel, itemsize: int = 0) -> None:
    """Raise ConfigError if a model's weights do not fit into the memory of this machine. The model may be on the meta
    device. itemsize: bytes of each number, if they will not be the model's."""
    tensors = (*model.parameters(), *model.buffers())
    size = sum(tensor.numel() * (itemsize or tensor.itemsize) for tensor in tensors)
    bound = f"≤ {memory() / 1e9:,.1f} GB, the memory of this machine"
    require(size <= memory(), f"weights of {model.config.name}", f"{size / 1e9:,.1f} GB", bound)
