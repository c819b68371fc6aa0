"""What transformers' own generation tests (GenerationTesterMixin, which no wheel has) ask of a model, under the names
that they have there, and what else its tools do with one."""

import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, Trainer, TrainingArguments, pipeline
from transformers.trainer_callback import PrinterCallback

from perspectron.interop.hf import PerspectronForCausalLM, Schedules, StateCache
from tests.hf.subject import PROMPTS, N, Subject
from tests.refusals import refused


def same_as_our_own(s: Subject) -> None:
    from perspectron.decode.generate import generate
    from perspectron.decode.sampling import SamplingConfig

    ids = [s.own.encode(PROMPTS[0])]
    (own,) = generate(s.model.model, s.own, ids, max_tokens=N, sampling=SamplingConfig(temperature=0)).ids
    assert list(own) == s.greedy[: len(own)]


def test_greedy_generate_dict_outputs_use_cache(s: Subject) -> None:
    out = s.generate(
        return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True
    )
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == N
    assert out.sequences[0, -N:].tolist() == s.greedy
    assert len(out.hidden_states[0]) == s.model.config.num_hidden_layers + 1
    assert s.generate(use_cache=False) == [s.greedy]


def test_sample_generate_dict_output(s: Subject) -> None:
    torch.manual_seed(0)
    out = s.generate(do_sample=True, num_return_sequences=3, top_k=20, return_dict_in_generate=True)
    assert out.sequences.shape[0] == 3
    torch.manual_seed(0)
    again = s.generate(do_sample=True, num_return_sequences=3, top_k=20, use_cache=False)
    assert out.sequences[:, -N:].tolist() == again


def test_beam_search_generate_dict_outputs_use_cache(s: Subject) -> None:
    beams = {"num_beams": 4, "num_return_sequences": 2}
    assert s.generate(PROMPTS, **beams) == s.generate(PROMPTS, use_cache=False, **beams)


def test_beam_sample_generate(s: Subject) -> None:
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        more = {"return_dict_in_generate": True, "output_scores": True}
        found.append(s.generate(do_sample=True, num_beams=2, use_cache=use_cache, **more))
    assert found[0].sequences.equal(found[1].sequences)
    torch.testing.assert_close(found[0].sequences_scores, found[1].sequences_scores, atol=1e-4, rtol=1e-4)


def test_generate_without_input_ids(s: Subject) -> None:
    assert s.model.generate(max_new_tokens=2, do_sample=False, eos_token_id=None).shape == (1, 3)


def test_left_padding_compatibility(s: Subject) -> None:
    alone = [s.generate(prompt)[0] for prompt in PROMPTS]
    assert s.generate(PROMPTS) == alone
    assert s.generate(PROMPTS, prefill_chunk_size=3) == alone


def test_past_key_values_format(s: Subject) -> None:
    out = s.generate(return_dict_in_generate=True)
    assert isinstance(out.cache, StateCache)
    assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
    assert out.cache.batch_size == 1


def test_generate_continue_from_past_key_values(s: Subject) -> None:
    for cache in (StateCache(), DynamicCache()):
        first = s.model.generate(
            **s.tokenizer(PROMPTS[0], return_tensors="pt"), cache=cache, do_sample=False, max_new_tokens=3,
            eos_token_id=None,
        )  # fmt: skip
        whole = s.model.generate(
            first, attention_mask=torch.ones_like(first), cache=cache, do_sample=False,
            max_new_tokens=N - 3, eos_token_id=None,
        )  # fmt: skip
        assert whole[0, -N:].tolist() == s.greedy


def test_assisted_decoding_matches_greedy_search(s: Subject) -> None:
    """By a copy of itself, all of whose tokens are accepted, and by one of other weights, whose are not."""
    torch.manual_seed(9)
    other = PerspectronForCausalLM(s.model.config).eval()
    for assistant in (s.model, other):
        assert s.generate(assistant_model=assistant) == [s.greedy]
    assert len(s.generate(assistant_model=other, do_sample=True)[0]) == N


def test_prompt_lookup_decoding_matches_greedy_search(s: Subject) -> None:
    assert s.generate(prompt_lookup_num_tokens=4) == [s.greedy]


def test_generate_from_inputs_embeds(s: Subject) -> None:
    ids = s.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    embeds = s.model.get_input_embeddings()(ids)
    for beams in (1, 2):
        out = s.model.generate(
            inputs_embeds=embeds, do_sample=False, max_new_tokens=N, num_beams=beams, eos_token_id=None
        )
        assert out.tolist() == s.generate(num_beams=beams)


def test_batching_and_determinism(s: Subject) -> None:
    ids = s.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = s.model(**ids).logits
        torch.testing.assert_close(s.model(**ids).logits, logits, rtol=0, atol=0)
        last = s.model(**ids, logits_to_keep=1).logits
        torch.testing.assert_close(last, logits[:, -1:])
        alone = s.model(**s.tokenizer(PROMPTS[1], return_tensors="pt")).logits
        torch.testing.assert_close(logits[1, -1], alone[0, -1], rtol=1e-4, atol=1e-4)
    assert isinstance(s.model(**ids, return_dict=False), tuple)


def cache_crop_select_repeat(s: Subject) -> None:
    ids = torch.randint(1, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    read = torch.no_grad()(s.model)
    whole = read(ids).logits[:, -1]
    cache = StateCache()
    read(ids[:, :4], cache=cache)
    cache.activate_past_recording()
    read(torch.cat([ids[:, 4:7], ids[:, :2]], 1), cache=cache)
    cache.crop(-2)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0, 3, 2]))
    out = read(ids[[0, 0, 1, 1], 7:], cache=cache).logits[:, -1]
    torch.testing.assert_close(out, whole[[0, 0, 1, 1]], rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.batch_size == 1 and cache.get_seq_length() == 9


def refused_with_a_line(s: Subject) -> None:
    ids = torch.ones(1, 3, dtype=torch.int64)
    for options, *named in (
        ({"cache": StaticCache(config=s.model.config, max_cache_len=9)}, "StaticCache"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask"),
    ):
        with refused((TypeError, ValueError), *named):
            s.model(ids, **options)


def save_load_and_bfloat16(s: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert again.model.fingerprint() == s.model.model.fingerprint()
        half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert len(s._replace(model=half).generate(PROMPTS)[2]) == N


def test_resize_tokens_embeddings(s: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        V = model.config.vocab_size
        model.resize_token_embeddings(V + 3)
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.ones(1, 3, dtype=torch.int64)
        assert again(ids).logits.shape[-1] == V + 3
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


def pipelines(s: Subject) -> None:
    write = pipeline("text-generation", model=s.model, tokenizer=s.tokenizer)
    out = write(PROMPTS, max_new_tokens=4, do_sample=False, batch_size=3)
    assert [text[0]["generated_text"].startswith(p) for text, p in zip(out, PROMPTS, strict=True)] == [
        True
    ] * 3


def trainer_resumes(s: Subject) -> None:
    """With gradient accumulation, recomputation and the terms in the loss; stopped and resumed it is the same."""
    g = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, 200, (12,), generator=g) for _ in range(2)]
    data = [{"input_ids": row, "labels": row} for row in rows * 8]
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(f"{folder}/start")

        def train(**more: Any) -> Any:
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/start")
            trainer = Trainer(
                model=model,
                args=TrainingArguments(
                    f"{folder}/out", max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-3,
                    gradient_accumulation_steps=2, gradient_checkpointing=True, report_to=[], use_cpu=True,
                    disable_tqdm=True, logging_steps=1, optim="adamw_torch", log_level="error",
                ),
                train_dataset=data, callbacks=[Schedules()],
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
            trainer.train(**more)
            return model, [line["loss"] for line in trainer.state.log_history if "loss" in line]

        model, losses = train()
        again, _ = train(resume_from_checkpoint=f"{folder}/out/checkpoint-2")
        assert losses[-1] < losses[0]
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
            assert torch.equal(a, b)


CHECKS = [
    same_as_our_own,
    test_greedy_generate_dict_outputs_use_cache,
    test_sample_generate_dict_output,
    test_beam_search_generate_dict_outputs_use_cache,
    test_beam_sample_generate,
    test_generate_without_input_ids,
    test_left_padding_compatibility,
    test_past_key_values_format,
    test_generate_continue_from_past_key_values,
    test_assisted_decoding_matches_greedy_search,
    test_prompt_lookup_decoding_matches_greedy_search,
    test_generate_from_inputs_embeds,
    test_batching_and_determinism,
    cache_crop_select_repeat,
    refused_with_a_line,
    save_load_and_bfloat16,
    test_resize_tokens_embeddings,
    pipelines,
    trainer_resumes,
]
