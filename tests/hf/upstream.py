"""Tests of transformers' GenerationTesterMixin and ModelTesterMixin (version 5), each with the check here that asks the
same, or the reason why none does. The wheel of transformers has neither class, so the names are kept here."""

from tests.hf import contract, contract_model

CHECKS = [*contract.CHECKS, *contract_model.CHECKS]
"""Each takes a Subject."""

ONE_FORM = "the state has one form, which is not compiled, quantised, offloaded or laid out in advance"
ATTENTION = "attention has one implementation here, and most designs have none"
GPU = "needs several GPUs, or memory that is moved between devices"
MOVED = "transformers 5 moved this search out of its package, into code that is downloaded"
GENERATION = {
    "test_greedy_generate": "same_as_our_own",
    "test_greedy_generate_dict_outputs": "test_greedy_generate_dict_outputs_use_cache",
    "test_greedy_generate_dict_outputs_use_cache": "",
    "test_sample_generate": "test_sample_generate_dict_output",
    "test_sample_generate_dict_output": "",
    "test_beam_search_generate": "test_beam_search_generate_dict_outputs_use_cache",
    "test_beam_search_generate_dict_output": "test_beam_search_generate_dict_outputs_use_cache",
    "test_beam_search_generate_dict_outputs_use_cache": "",
    "test_beam_sample_generate": "",
    "test_beam_sample_generate_dict_output": "test_beam_sample_generate",
    "test_model_parallel_beam_search": GPU,
    "test_generate_without_input_ids": "",
    "test_group_beam_search_generate": MOVED,
    "test_constrained_beam_search_generate": MOVED,
    "test_contrastive_generate": MOVED,
    "test_dola_decoding_sample": MOVED,
    "test_assisted_decoding_matches_greedy_search": "",
    "test_assisted_decoding_sample": "test_assisted_decoding_matches_greedy_search",
    "test_prompt_lookup_decoding_matches_greedy_search": "",
    "test_prompt_lookup_decoding_stops_at_eos": "",
    "test_left_padding_compatibility": "",
    "test_past_key_values_format": "",
    "test_generate_from_random_inputs_embeds": "",
    "test_generate_from_inputs_embeds": "",
    "test_generate_from_inputs_embeds_with_static_cache": ONE_FORM,
    "test_generate_continue_from_past_key_values": "",
    "test_generate_continue_from_inputs_embeds": "",
    "test_generate_with_static_cache": ONE_FORM,
    "test_generate_with_quant_cache": ONE_FORM,
    "test_generate_compile_model_forward_fullgraph": ONE_FORM,
    "test_generate_compilation_all_outputs": ONE_FORM,
    "test_offloaded_cache_implementation": "",
    "test_generate_methods_with_logits_to_keep": "",
    "test_generate_with_and_without_position_ids": "",
    "test_prepare_inputs_for_generation_kwargs_forwards": "",
    "test_inherits_generation_mixin": "",
    "test_eager_matches_sdpa_generate": ATTENTION,
    "test_eager_matches_fa2_generate": ATTENTION,
    "test_eager_matches_fa3_generate": ATTENTION,
    "test_flash_attention_2_continue_generate_with_position_ids": ATTENTION,
}
MODEL = {
    "test_save_load": "save_load_and_bfloat16",
    "test_from_pretrained_no_checkpoint": "",
    "test_torch_save_load": "",
    "test_can_use_safetensors": "save_load_and_bfloat16",
    "test_load_save_without_tied_weights": "test_tied_weights_keys",
    "test_tied_weights_keys": "",
    "test_tie_model_weights": "test_tied_weights_keys",
    "test_model_weights_reload_no_missing_tied_weights": "test_tied_weights_keys",
    "test_correct_missing_keys": "test_can_init_all_missing_weights",
    "test_can_init_all_missing_weights": "",
    "test_initialization": "test_can_init_all_missing_weights",
    "test_load_with_mismatched_shapes": "",
    "test_can_be_initialized_on_meta": "",
    "test_can_load_with_device_context_manager": "",
    "test_can_load_with_global_device_set": "test_can_load_with_device_context_manager",
    "test_cannot_load_with_meta_device_context_manager": "test_can_load_with_device_context_manager",
    "test_bc_torch_dtype": "",
    "test_keep_in_fp32_modules": "no module of ours asks for it",
    "test_config": "",
    "test_determinism": "test_batching_and_determinism",
    "test_batching_equivalence": "test_batching_and_determinism",
    "test_model_outputs_equivalence": "",
    "test_hidden_states_output": "",
    "test_attention_outputs": "",
    "test_retain_grad_hidden_states_attentions": "",
    "test_forward_with_logits_to_keep": "test_generate_methods_with_logits_to_keep",
    "test_inputs_embeds": "test_inputs_embeds_matches_input_ids",
    "test_inputs_embeds_matches_input_ids": "",
    "test_model_get_set_embeddings": "",
    "test_resize_tokens_embeddings": "",
    "test_resize_embeddings_untied": "test_resize_tokens_embeddings",
    "test_resize_position_vector_embeddings": "a table of positions keeps its length",
    "test_training": "trainer_resumes",
    "test_training_gradient_checkpointing": "",
    "test_training_gradient_checkpointing_use_reentrant": "test_training_gradient_checkpointing",
    "test_gradient_checkpointing_enable_disable": "test_training_gradient_checkpointing",
    "test_gradient_checkpointing_backward_compatibility": "test_training_gradient_checkpointing",
    "test_peft_gradient_checkpointing_enable_disable": "PEFT is asked in tests/train/test_tuning.py",
    "test_enable_input_require_grads": "",
    "test_feed_forward_chunking": "no network of ours is computed in chunks",
    "test_problem_types": "there is a head for language alone",
    "test_custom_4d_attention_mask": "refused_with_a_line",
    "test_sdpa_*, test_flash_attn_*, test_flex_attention_*": ATTENTION,
    "test_eager_padding_matches_padding_free_with_position_ids": "positions with gaps are refused",
    "test_torch_compile_for_training": "steps run native kernels on a CPU; needs a GPU there",
    "test_disk_offload_*, test_cpu_offload, test_model_parallelism": GPU,
    "test_multi_gpu_data_parallel_forward, test_tp_plan_*": GPU,
}
BESIDE = (
    "the_same_as_a_run_again",
    "cache_crop_select_repeat",
    "pipelines",
    "options_with_the_cache_as_without",
    "a_prefix_is_read_once",
    "an_older_name_of_the_cache",
)
"""Checks of what no test there asks in one place."""


def check_of(name: str, said: str) -> str:
    """The check here that asks what a test there does; "" where there is none."""
    names = {check.__name__ for check in CHECKS}
    return next((found for found in (said or name,) if found in names), "")


def table() -> str:
    """All of it, as Markdown."""
    lines = ["| test | check here, or why there is none |", "|---|---|"]
    for there, tests in (("GenerationTesterMixin", GENERATION), ("ModelTesterMixin", MODEL)):
        lines.append(f"| **{there}** | |")
        for name, said in tests.items():
            found = check_of(name, said)
            shown = ", ".join(f"`{part}`" for part in name.split(", "))
            lines.append(f"| {shown} | {f'`{found}`' if found else said} |")
    return "\n".join(lines) + "\n"
