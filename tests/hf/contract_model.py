"""What transformers' tests of models (ModelTesterMixin, which no wheel has either) ask, under the names that they have
there, and generation beyond the one text of `contract`."""

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, TextStreamer

from perspectron import build
from perspectron.interop import foreign
from perspectron.interop.hf import PerspectronConfig, PerspectronForCausalLM, StateCache
from tests.hf.subject import PROMPTS, N, Subject
from tests.refusals import refused

IDS = torch.arange(1, 13).view(2, 6)
WEIGHTS = "model.safetensors"


def fresh(s: Subject) -> Any:
    """A copy whose gradients and weights may change."""
    return copy.deepcopy(s.model)


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


# Generation


def test_inherits_generation_mixin(s: Subject) -> None:
    assert isinstance(s.model, GenerationMixin) and s.model.can_generate()


def test_prompt_lookup_decoding_stops_at_eos(s: Subject) -> None:
    end = s.greedy[3]
    (out,) = s.generate(prompt_lookup_num_tokens=4, eos_token_id=end)
    assert out == s.greedy[: s.greedy.index(end) + 1]


def test_generate_from_random_inputs_embeds(s: Subject) -> None:
    draw = torch.Generator().manual_seed(1)
    shape = (2, 1, 5, s.model.get_input_embeddings().embedding_dim)
    one, other = 4 * torch.randn(shape, generator=draw)
    outs = [
        s.model.generate(inputs_embeds=x, do_sample=False, max_new_tokens=N, eos_token_id=None, output_logits=True,
                         return_dict_in_generate=True)
        for x in (one, other)
    ]  # fmt: skip
    assert all(out.sequences.shape == (1, N) for out in outs)
    assert not torch.equal(outs[0].logits[0], outs[1].logits[0])


def test_generate_continue_from_inputs_embeds(s: Subject) -> None:
    embed = s.model.get_input_embeddings()
    start = embed(s.tokenizer(PROMPTS[0], return_tensors="pt").input_ids)
    options = {"do_sample": False, "eos_token_id": None}
    first = s.model.generate(
        inputs_embeds=start, max_new_tokens=3, cache=StateCache(), return_dict_in_generate=True, **options
    )
    more = torch.cat([start, embed(first.sequences)], 1)
    rest = s.model.generate(inputs_embeds=more, max_new_tokens=N - 3, cache=first.cache, **options)
    assert first.sequences[0].tolist() + rest[0].tolist() == s.greedy


def test_generate_methods_with_logits_to_keep(s: Subject) -> None:
    assert s.generate(logits_to_keep=0) == [s.greedy]
    with torch.no_grad():
        whole = s.model(IDS).logits
        torch.testing.assert_close(s.model(IDS, logits_to_keep=2).logits, whole[:, -2:])
        torch.testing.assert_close(s.model(IDS, logits_to_keep=torch.tensor([0, 3])).logits, whole[:, [0, 3]])


def an_older_name_of_the_cache(s: Subject) -> None:
    cache = StateCache()
    with torch.no_grad(), pytest.warns(FutureWarning, match="Use `cache` instead"):
        assert s.model(IDS, past_key_values=cache).cache is cache
    assert cache.get_seq_length() == IDS.shape[1]


def test_prepare_inputs_for_generation_kwargs_forwards(s: Subject) -> None:
    cache = StateCache()
    made = s.model.prepare_inputs_for_generation(IDS, cache=cache, use_cache=True, later="given")
    assert made["cache"] is cache and made["later"] == "given"


def test_offloaded_cache_implementation(s: Subject) -> None:
    for kind in ("offloaded", "static", "quantized"):
        with refused(ValueError, "cache_implementation", kind):
            s.generate(cache_implementation=kind)


def options_with_the_cache_as_without(s: Subject) -> None:
    for options in (
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[s.greedy[0]]]},
        {"guidance_scale": 1.5},
        {"min_new_tokens": N, "suppress_tokens": [s.greedy[1]], "num_beams": 2, "length_penalty": 0.5},
    ):
        assert s.generate(**options) == s.generate(use_cache=False, **options), options
    said = list[str]()

    class Kept(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            said.append(text)

    s.generate(streamer=Kept(s.tokenizer, skip_prompt=True))
    assert "".join(said) == s.tokenizer.decode(s.greedy)
    end = s.tokenizer.decode(s.greedy[:2])[-1]
    (out,) = s.generate(stop_strings=[end], tokenizer=s.tokenizer)
    assert out == s.greedy[: len(out)] and end in s.tokenizer.decode(out)


def a_prefix_is_read_once(s: Subject) -> None:
    """A copy of its cache for each text that goes on from it."""
    prefix, cache = s.tokenizer(PROMPTS[0], return_tensors="pt").input_ids, StateCache()
    with torch.no_grad():
        s.model(prefix, cache=cache)
    for tail in ([5, 6], [7, 8, 9]):
        ids = torch.cat([prefix, torch.tensor([tail])], 1)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4}
        out = s.model.generate(ids, cache=copy.deepcopy(cache), **options)
        assert out.equal(s.model.generate(ids, **options))


# Outputs


def test_model_outputs_equivalence(s: Subject) -> None:
    with torch.no_grad():
        one = s.model(IDS, output_hidden_states=True)
        other = s.model(IDS, output_hidden_states=True, return_dict=False)
    torch.testing.assert_close(one.logits, other[0], rtol=0, atol=0)
    torch.testing.assert_close(one.hidden_states, other[-1], rtol=0, atol=0)


def test_hidden_states_output(s: Subject) -> None:
    config = s.model.config
    with torch.no_grad():
        states = s.model(IDS, output_hidden_states=True).hidden_states
        assert s.model(IDS).hidden_states is None
    assert len(states) == config.num_hidden_layers + 1
    assert {tuple(x.shape) for x in states[1:]} == {(*IDS.shape, config.hidden_size)}
    # What enters the first block; DRM's are a token's factors, wider than its blocks.
    assert states[0].shape == (*IDS.shape, s.model.get_input_embeddings().embedding_dim)


def test_retain_grad_hidden_states_attentions(s: Subject) -> None:
    model = fresh(s)
    out = model(IDS, output_hidden_states=True)
    for x in out.hidden_states:
        x.retain_grad()
    out.logits.flatten()[0].backward()
    assert all(x.grad is not None for x in out.hidden_states)


def test_attention_outputs(s: Subject) -> None:
    with torch.no_grad():
        out = s.model(IDS, output_attentions=True)
        assert s.model(IDS).attentions is None
        own = s.model.model(IDS, output_attentions=True).attentions
    assert len(out.attentions) == s.model.config.num_hidden_layers
    for one, other in zip(out.attentions, own, strict=True):
        if one is not None:
            assert one.equal(other) and one.shape[0] == len(IDS) and one.shape[2:] == (IDS.shape[1],) * 2
            torch.testing.assert_close(one.sum(-1), torch.ones_like(one[..., 0]))


def test_inputs_embeds_matches_input_ids(s: Subject) -> None:
    with torch.no_grad():
        embeds = s.model.get_input_embeddings()(IDS)
        torch.testing.assert_close(s.model(inputs_embeds=embeds).logits, s.model(IDS).logits)


def test_generate_with_and_without_position_ids(s: Subject) -> None:
    """Where they say nothing else; several texts in a row have their separators."""
    at = torch.arange(6).expand(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(s.model(IDS, position_ids=at).logits, s.model(IDS).logits, rtol=0, atol=0)
    with refused(ValueError, "position_ids"):
        s.model(IDS, position_ids=at % 3)


# Training


def test_training_gradient_checkpointing(s: Subject) -> None:
    model = fresh(s).train()
    loss, gradients = loss_and_gradients(model)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    again, others = loss_and_gradients(model)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    torch.testing.assert_close(again, loss)
    assert gradients and len(gradients) == len(others)
    torch.testing.assert_close(others, gradients)


def test_enable_input_require_grads(s: Subject) -> None:
    model = fresh(s).requires_grad_(False)
    assert not model(IDS).logits.requires_grad
    model.enable_input_require_grads()
    assert model(IDS).logits.requires_grad


# Weights


def test_config(s: Subject) -> None:
    config = s.model.config
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        assert AutoConfig.from_pretrained(folder).model_config() == config.model_config()


def test_model_get_set_embeddings(s: Subject) -> None:
    model = fresh(s)
    rows = torch.nn.Embedding(*model.get_input_embeddings().weight.shape)
    model.set_input_embeddings(rows)
    assert model.get_input_embeddings().weight is rows.weight


def test_tied_weights_keys(s: Subject) -> None:
    """Where the embedding is the matrix before the logits there is one of them, not two that are tied."""
    places = [tensor.data_ptr() for tensor in s.model.state_dict().values()]
    assert len(places) == len(set(places))
    assert s.model.config.tie_word_embeddings == (s.model.get_output_embeddings() is None)


def test_torch_save_load(s: Subject) -> None:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(s.model.state_dict(), file.name)
        model = PerspectronForCausalLM(s.model.config)
        model.load_state_dict(torch.load(file.name))
    assert model.model.fingerprint() == s.model.model.fingerprint()


def test_from_pretrained_no_checkpoint(s: Subject) -> None:
    weights = s.model.state_dict()
    model = PerspectronForCausalLM.from_pretrained(None, config=s.model.config, state_dict=weights)
    assert model.model.fingerprint() == s.model.model.fingerprint()


def test_can_init_all_missing_weights(s: Subject) -> None:
    """As a model that is built has them."""
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)
        weights = load_file(f"{folder}/{WEIGHTS}")
        gone = next(name for name in sorted(weights) if "blocks.0" in name)
        save_file({n: w for n, w in weights.items() if n != gone}, f"{folder}/{WEIGHTS}", {"format": "pt"})
        model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert set(told["missing_keys"]) == {gone} and not told["unexpected_keys"]
    drawn = build(s.model.config.model_config(), 0).state_dict()
    assert model.state_dict()[gone].equal(drawn[gone.removeprefix("model.")])


def test_load_with_mismatched_shapes(s: Subject) -> None:
    values = s.model.config.to_dict() | {"vocab_size": s.model.config.vocab_size + 2}
    config = PerspectronConfig.from_dict(values)
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)
        with pytest.raises(RuntimeError, match="mismatch"):
            AutoModelForCausalLM.from_pretrained(folder, config=config)
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
    assert model(IDS).logits.shape[-1] == config.vocab_size


def test_can_be_initialized_on_meta(s: Subject) -> None:
    with torch.device("meta"):
        model = PerspectronForCausalLM(s.model.config)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_can_load_with_device_context_manager(s: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_pretrained(folder)
        mapped = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
        with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
            AutoModelForCausalLM.from_pretrained(folder)
    assert {m.model.fingerprint() for m in (model, mapped)} == {s.model.model.fingerprint()}


def test_bc_torch_dtype(s: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fresh(s).to(torch.bfloat16).save_pretrained(folder)
        for options in ({"dtype": "auto"}, {"torch_dtype": torch.bfloat16}, {"dtype": "bfloat16"}):
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
            assert model.dtype == torch.bfloat16 and model(IDS).logits.isfinite().all()
        assert AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).dtype == torch.float32


def the_same_as_a_run_again(s: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)
        s.own.save(Path(folder) / "tokenizer.json")
        model, tokenizer, *_ = foreign.read(Path(folder))
    assert model.fingerprint() == s.model.model.fingerprint()
    assert tokenizer.fingerprint == s.own.fingerprint


CHECKS = [
    the_same_as_a_run_again,
    test_inherits_generation_mixin,
    test_prompt_lookup_decoding_stops_at_eos,
    test_generate_from_random_inputs_embeds,
    test_generate_continue_from_inputs_embeds,
    test_generate_methods_with_logits_to_keep,
    test_prepare_inputs_for_generation_kwargs_forwards,
    test_offloaded_cache_implementation,
    options_with_the_cache_as_without,
    a_prefix_is_read_once,
    an_older_name_of_the_cache,
    test_model_outputs_equivalence,
    test_hidden_states_output,
    test_retain_grad_hidden_states_attentions,
    test_attention_outputs,
    test_inputs_embeds_matches_input_ids,
    test_generate_with_and_without_position_ids,
    test_training_gradient_checkpointing,
    test_enable_input_require_grads,
    test_config,
    test_model_get_set_embeddings,
    test_tied_weights_keys,
    test_torch_save_load,
    test_from_pretrained_no_checkpoint,
    test_can_init_all_missing_weights,
    test_load_with_mismatched_shapes,
    test_can_be_initialized_on_meta,
    test_can_load_with_device_context_manager,
    test_bc_torch_dtype,
]
