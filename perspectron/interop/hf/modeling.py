"""Our language models behind the interface of transformers.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from perspectron.interop.hf.cache import Before, Inputs, StateCache, StateLayer, layer_of
from perspectron.interop.hf.configuration import PerspectronConfig
from perspectron.model.heads import LinearHead, LinearHeadConfig, TokenEmbedding
from perspectron.model.model import LanguageModel, build
from perspectron.model.seen import Seen
from perspectron.ops.dispatch import gradients_off
from perspectron.util.terms import Term


class PerspectronForCausalLM(PreTrainedModel, GenerationMixin):
    """A LanguageModel, `model`, behind the interface of transformers. Weights are drawn from torch's generator."""

    config_class = PerspectronConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)

    def __init__(self, config: PerspectronConfig) -> None:
        super().__init__(config)
        there = torch.get_default_device().type != "meta"
        seed = int(torch.randint(2**31, (), device="cpu")) if there else 0
        self.model: LanguageModel = build(config.model_config(), seed)
        self._drawn = there
        self.post_init()

    # ------------------------------------------------------------ weights

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Fill tensors that a file lacked with those of a model built from seed 0; a model that was not read from a
        file has its weights already. (transformers would call `_init_weights`, but not for a module whose tensors are
        all in its children.)"""
        if self._drawn:
            return
        missing = {
            name: tensor
            for name, tensor in _tensors(self.model).items()
            if not getattr(tensor, "_is_hf_initialized", False)
        }
        if missing:
            with torch.device("cpu"):
                drawn = _tensors(build(self.model.config, 0))
            for name, tensor in missing.items():
                tensor.copy_(drawn[name])

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding. The number of rows may change, as when tokens are added."""
        assert isinstance(value, nn.Embedding)
        with torch.device("meta"):
            rows = TokenEmbedding(value.num_embeddings, value.embedding_dim)
        rows.weight = value.weight
        self.model.embedding = rows
        self.model.config = replace(self.model.config, vocab_size=value.num_embeddings)

    def get_output_embeddings(self) -> nn.Module | None:
        """The module whose matrix gives the logits; None if that is the embedding."""
        head = getattr(self.model, "lm_head", None)
        return getattr(head, "out_proj", head)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output matrix. The number of rows may change."""
        assert isinstance(new_embeddings, nn.Linear)
        if isinstance(self.model.lm_head, LinearHead):
            V, D = new_embeddings.weight.shape
            with torch.device("meta"):
                head = LinearHead(D, V, LinearHeadConfig())
            head.weight = new_embeddings.weight
            self.model.lm_head = head
        else:
            self.model.lm_head.out_proj = new_embeddings

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.recompute

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        self.model.recompute = enable

    def set_step(self, step: int) -> None:
        """Tell modules that follow a schedule how many updates were made (`Schedules` does it for Trainer)."""
        self.model.set_step(step)

    # ------------------------------------------------------------ generation

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        """Add a StateCache unless one is given or none is wanted. ValueError for a cache of another kind by name."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation = {kind!r}, must be left out: the state of this model has one form, and is small"
            )
        given = model_kwargs.get("cache")
        if given is not None:
            layer_of(given)
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["cache"] = StateCache()
            if generation_config.is_assistant:
                model_kwargs["cache"].activate_past_recording()

    # transformers' own models accept the old name until 5.40, too.
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Read tokens [B,T] (or their embeddings [B,T,·]) after `cache`.

        attention_mask: [B,T] or longer, of which the last T count; where it is 0 there is no token, on any side, and
        the state is unchanged. labels: [B,T], the ids themselves, as transformers shifts them; -100 is ignored. In
        training the loss includes the model's own terms, of routers for example. Hidden states and attentions are as
        `perspectron.Output` has them, None for a layer without attention. ConfigError for neither or both of
        ids and embeddings, ValueError for a mask of another shape, and positions with gaps.
        """
        tokens = inputs_embeds if input_ids is None else input_ids
        self.model.check_tokens(input_ids, inputs_embeds)
        assert tokens is not None
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if cache is None and use_cache:
            cache = StateCache()
        layer = None if cache is None else layer_of(cache)
        now, skip = self._inputs(tokens, attention_mask, layer), 0
        _refuse(more, now.pad_BT)
        if layer is not None and layer.unread is not None:
            skip = layer.unread.tokens.shape[1]
            now, layer.unread = self._joined(layer.unread, now), None
        state = None if layer is None else layer.state
        asked = (
            (output_hidden_states, self.config.output_hidden_states),
            (output_attentions, self.config.output_attentions),
        )
        keeps, maps = (given if given is not None else by_default for given, by_default in asked)
        seen = Seen([] if keeps else None, [] if maps else None)
        recording = layer is not None and layer.record_past
        ids, embeds = (None, now.tokens) if now.tokens.is_floating_point() else (now.tokens, None)
        hidden_BTD, after, aux = self.model.hidden(
            ids,
            state,
            inputs_embeds=embeds,
            reset_BT=now.reset_BT,
            pad_BT=now.pad_BT,
            consume_state=state is not None and not recording and gradients_off(),
            seen=seen if keeps or maps else None,
        )
        if layer is not None:
            if recording:
                layer.log.append(Before(state, layer.seen - skip, now))
            layer.state, layer.seen = after, layer.seen + tokens.shape[1]
        hidden_BTD = hidden_BTD[:, skip:]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.model.head(hidden_BTD[:, kept])
        loss = None if labels is None else self._loss(logits_BTV, labels, now, aux, more)
        states, weights = seen.result(hidden_BTD, skip)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits_BTV, cache=cache, hidden_states=states, attentions=weights
        )

    def _loss(
        self, logits_BTV: Tensor, labels: Tensor, now: Inputs, aux: dict[str, Term], more: dict[str, Any]
    ) -> Tensor:
        """transformers' cross entropy; in training the model's own loss terms are added."""
        loss: Tensor = self.loss_function(logits_BTV, labels, self.config.vocab_size, **more)
        if not self.training:
            return loss
        aux = aux | self.model.terms(logits_BTV, now.reset_BT, now.pad_BT)
        return loss + _share(labels, more.get("num_items_in_batch")) * _penalty(aux)

    def _inputs(self, tokens: Tensor, mask: Tensor | None, layer: StateLayer | None) -> Inputs:
        """The model's input. A document begins at each separator, except at the very first token that is read."""
        (B, T), pad_BT, reset_BT = tokens.shape[:2], None, None
        if mask is not None:
            if mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] < T:
                raise ValueError(
                    f"attention_mask has shape {tuple(mask.shape)}, must be [{B}, T] with T ≥ {T}"
                )
            pad_BT = mask[:, -T:] == 0
            pad_BT = pad_BT if bool(pad_BT.any()) else None
        if not tokens.is_floating_point() and self.config.end_of_text is not None:
            reset_BT = tokens == self.config.end_of_text
            if pad_BT is not None:
                reset_BT = reset_BT & ~pad_BT
            if layer is None or layer.seen == 0:
                reset_BT[:, 0] = False
            reset_BT = reset_BT if bool(reset_BT.any()) else None
        return Inputs(tokens, reset_BT, pad_BT)

    def _joined(self, first: Inputs, second: Inputs) -> Inputs:
        """Two inputs joined along time; as embeddings if either is."""
        a, b = first.tokens, second.tokens
        if a.is_floating_point() != b.is_floating_point():
            a, b = (x if x.is_floating_point() else self.model.embedding(x) for x in (a, b))
        masks = []
        for x, y in ((first.reset_BT, second.reset_BT), (first.pad_BT, second.pad_BT)):
            parts = [
                torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
                if mask is None
                else mask
                for mask, tokens in ((x, a), (y, b))
            ]
            masks.append(None if x is None and y is None else torch.cat(parts, 1))
        return Inputs(torch.cat([a, b], 1), *masks)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _refuse(more: dict[str, Any], pad_BT: Tensor | None) -> None:
    """ValueError for what would otherwise be ignored in silence: positions that restart where texts share a row."""
    if (at_BT := more.get("position_ids")) is not None:
        odd_BT = at_BT.diff(dim=-1) != 1
        if pad_BT is not None:
            odd_BT = odd_BT & ~pad_BT[:, 1:] & ~pad_BT[:, :-1]
        if bool(odd_BT.any()):
            raise ValueError("position_ids have gaps, must rise by one: a text begins at the separator, id 0")


def _penalty(aux: dict[str, Term]) -> Tensor | float:
    return sum(term.penalty() for term in aux.values())


def _share(labels: Tensor, items: Tensor | int | None) -> Tensor | float:
    """Weight of this batch's own terms: its share of the targets over which Trainer accumulates gradients, or 1 if
    Trainer does not say how many those are."""
    return 1.0 if items is None else (labels[:, 1:] != -100).sum() / items


class Schedules(TrainerCallback):
    """Tells the model how many updates were made, which the schedules of routers and gates follow."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        getattr(model, "module", model).set_step(state.global_step)
