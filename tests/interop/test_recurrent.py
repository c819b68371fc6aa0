"""Mamba, Falcon Mamba and RecurrentGemma as models of ours: the same function, whatever their config leaves out, and
what the library does with them."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from perspectron.data.tokenizer import Tokenizer
from perspectron.interop import foreign, onnx
from perspectron.interop.foreign.source import Source
from perspectron.model.census import census
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build
from perspectron.util.errors import CheckpointError
from tests.interop import families, tools
from tests.interop.families import OUTER, Family

SMALL = {name: x for name, x in OUTER.items() if name != "max_position_embeddings"}
MAMBA = SMALL | {
    "state_size": 7, "conv_kernel": 3, "layer_norm_epsilon": 1e-3, "time_step_rank": 5, "use_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = SMALL | {"num_attention_heads": 4, "intermediate_size": 101, "attention_window_size": 5}
CASES = [
    Family("mamba", MAMBA),
    Family("mamba", MAMBA | {"use_bias": False, "use_conv_bias": False, "tie_word_embeddings": True, "expand": 3,
                             "time_step_rank": "auto", "conv_kernel": 4}, name="mamba-tied"),
    Family("falcon_mamba", MAMBA | {"mixer_rms_eps": 1e-2, "use_bias": False}),
    Family("recurrent_gemma", GEMMA | {"num_key_value_heads": 2, "lru_width": 40, "conv1d_width": 3,
                                       "logits_soft_cap": 3.0, "attention_bias": True, "rms_norm_eps": 1e-3,
                                       "block_types": ["recurrent", "attention"]}),
    Family("recurrent_gemma", GEMMA | {"tie_word_embeddings": False}, name="recurrent_gemma-untied"),
]  # fmt: skip
every_case = pytest.mark.parametrize("index", range(len(CASES)), ids=[str(family) for family in CASES])


@cache
def case(family: int, root: Path) -> tuple[Any, LanguageModel, Path]:
    theirs = families.made(CASES[family])
    folder = families.save(theirs, root / str(family))
    return theirs, families.read(folder), folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


@pytest.fixture
def its_scan_in_double() -> Iterator[None]:
    """RecurrentGemma's loop sums in float32, whatever it is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,))
        yield


@every_case
def test_its_logits_are_those_of_transformers(index, root):
    theirs, ours, _ = case(index, root)
    families.logits_are_the_same(theirs, ours)


@every_case
def test_its_logits_in_float64_are_those_of_transformers(index, root, its_scan_in_double):
    theirs, _, folder = case(index, root)
    families.logits_are_the_same_in_double(CASES[index], theirs, families.read(folder))


@torch.no_grad()
@every_case
def test_its_greedy_tokens_are_those_of_transformers(index, root):
    """RecurrentGemma's of whole texts, as its own memory of a text is that of another."""
    theirs, ours, _ = case(index, root)
    if CASES[index].kind != "recurrent_gemma":
        families.greedy_tokens_are_the_same(theirs, ours)
        return
    ids, state, new = families.text(rows=1), None, families.text(rows=1)
    for _ in range(families.NEW):
        out = ours(new, state)
        state, wanted = out.state, theirs(ids, use_cache=False).logits[0, -1, : families.IDS]
        mine = out.logits[0, -1, : families.IDS]
        families.near(mine, wanted)
        assert int(mine.argmax()) == int(wanted.argmax())
        new = mine.argmax().view(1, 1)
        ids = torch.cat([ids, new], 1)


@every_case
def test_it_has_the_bits_of_one_reading(index, root, tmp_path):
    families.bits_are_those_of_one_reading(case(index, root)[1], tmp_path)


@pytest.mark.parametrize("index", [0, 2, 3], ids=["mamba", "falcon_mamba", "recurrent_gemma"])
def test_every_tensor_is_asked_for(index, tmp_path):
    small = replace(CASES[index], values=CASES[index].values | {"num_hidden_layers": 2})
    families.weights_are_all_asked_for(families.save(families.made(small), tmp_path / "small"))


@torch.no_grad()
@pytest.mark.parametrize("index", [2, 3], ids=["falcon_mamba", "recurrent_gemma"])
def test_weights_of_16_bits_in_two_files_are_read(index, tmp_path):
    theirs = families.made(CASES[index]).bfloat16()
    ours = families.read(families.save(theirs, tmp_path / "half", shards=True))
    families.near(ours(families.text()).logits, theirs.float()(families.text()).logits)


@every_case
def test_what_a_config_leaves_out_is_what_transformers_takes(index, tmp_path):
    """Each key once: the config, or what is wrong with it, is that of all that transformers makes of the rest; or the
    key is a size that must be there."""
    family = CASES[index]
    for name in family.values:
        less = {key: value for key, value in family.values.items() if key != name}
        try:
            AutoConfig.for_model(family.kind, **less).save_pretrained(tmp_path)
        except StrictDataclassError:
            assert isinstance(config_of(family, less), str)
            continue
        found = config_of(family, less)
        if not (isinstance(found, str) and f" {name} is None, must be" in found):
            assert found == config_of(family, json.loads((tmp_path / "config.json").read_text())), name


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba"])
def test_a_written_width_comes_before_a_factor_as_in_published_files(kind, tmp_path):
    """Falcon Mamba's has a factor of 16 beside a width of twice the model's."""
    family = Family(kind, MAMBA | {"expand": 16, "intermediate_size": 64, "use_bias": False})
    theirs = families.made(family)
    assert theirs.backbone.layers[0].mixer.out_proj.in_features == 64
    families.logits_are_the_same(theirs, families.read(families.save(theirs, tmp_path)))


@pytest.mark.parametrize("pattern", [["recurrent", "recurrent", "attention"], ["attention", "recurrent"]])
def test_the_pattern_of_published_files_has_a_name_of_its_own(pattern):
    rest = {name: x for name, x in CASES[3].values.items() if name != "block_types"}
    named = [config_of(CASES[3], rest | {name: pattern}) for name in ("block_types", "_block_types")]
    assert isinstance(named[0], ModelConfig)
    assert named[0] == named[1]


def config_of(family: Family, values: dict[str, Any]) -> ModelConfig | str:
    """Ours, or why there is none."""
    try:
        return foreign.kind(family.kind).config(Source(Path(), values))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize(
    ("index", "change", "field"),
    [
        (0, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        (0, {"time_step_rank": 0}, "time_step_rank is 0"),
        (0, {"intermediate_size": 65}, "intermediate_size is 65"),
        (0, {"expand": 1.5}, "expand is 1.5"),
        (0, {"window": 3}, "window is 3"),
        (2, {"mixer_rms_eps": -1.0}, "mixer_rms_eps is -1.0"),
        (3, {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        (3, {"block_types": ["conv"]}, "block_types is ['conv']"),
        (3, {"lru_width": 42}, "must divide lru_width = 42"),
        (3, {"num_attention_heads": 5}, "must divide hidden_size = 32"),
        (3, {"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0"),
        (3, {"rope_parameters": {"rope_type": "dynamic"}}, "rope type is 'dynamic'"),
    ],
)
def test_an_option_that_no_model_of_ours_has_is_named(index, change, field, tmp_path):
    config = AutoConfig.for_model(CASES[index].kind, **CASES[index].values)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string()) | change))
    with pytest.raises(CheckpointError, match=re.escape(field)):
        families.read(tmp_path)


# ---------------------------------------------------------------- what the library does with them


def model_of(index: int, **changes: object) -> LanguageModel:
    return tools.model_of(CASES[index], **changes)


@tools.recorded
@every_case
def test_its_steps_are_recorded(index, format):
    tools.steps_are_recorded(model_of(index), format)


@every_case
def test_whole_texts_and_steps_have_the_same_gradients(index):
    tools.whole_texts_and_steps_have_the_same_gradients(model_of(index))


@every_case
def test_an_adapter_learns_beside_its_layers(index):
    tools.an_adapter_learns(model_of(index))


def test_their_steps_in_onnx_draw_the_same_tokens(tmp_path):
    """Of one model with a layer of each kind."""
    pytest.importorskip("onnxruntime")
    tokenizer = Tokenizer.train(["the quick brown fox jumps over the lazy dog. " * 9], 280)
    falcon, gemma = (model_of(index, vocab_size=280).config for index in (2, 3))
    model = build(replace(gemma, blocks=(falcon.blocks[0], *gemma.blocks[:2]))).eval()
    families.redraw(model, 3)
    assert onnx.export(model, tokenizer, tmp_path / "model.onnx", context=24).tokens == 23


def test_their_states_at_published_sizes_are_as_large_as_specified():
    """mamba-130m, and recurrentgemma-2b once its windows are full, in float32."""
    mamba = {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 24}
    gemma = {
        "vocab_size": 256_000, "hidden_size": 2560, "num_hidden_layers": 26, "num_attention_heads": 10,
        "num_key_value_heads": 1, "lru_width": 2560, "intermediate_size": 15_360,
    }  # fmt: skip
    for kind, values, expected in (("mamba", mamba, 2.8e6), ("recurrent_gemma", gemma, 34.4e6)):
        found = census(foreign.kind(kind).config(Source(Path(), values)), (4096, 32_768)).state_bytes
        assert found[4096] == found[32_768] and abs(found[4096] / expected - 1) < 0.05


# ---------------------------------------------------------------- GGUF


def written(path: Path, theirs: Any, **more: Any) -> Path:
    """A model of Mamba as llama.cpp's converter writes it."""
    pytest.importorskip("gguf", reason="pip install 'perspectron[gguf]'")
    from tests import gguf_models

    config, writer = theirs.config, gguf_models.Writer(path, "mamba")
    falcon = config.model_type == "falcon_mamba"
    writer.values(
        block_count=config.num_hidden_layers, context_length=1 << 20, embedding_length=config.hidden_size,
        feed_forward_length=0, attention__head_count=0, ssm__conv_kernel=config.conv_kernel,
        ssm__inner_size=config.intermediate_size, ssm__state_size=config.state_size,
        ssm__time_step_rank=config.time_step_rank, attention__layer_norm_rms_epsilon=config.layer_norm_epsilon,
        ssm__dt_b_c_rms=falcon,
    )  # fmt: skip
    writer.values(**more)
    tokens = ["a", "b", "end", "ab", *(f"<{id}>" for id in range(4, families.V))]
    writer.values(**{
        "tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "gpt-2", "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [1] * len(tokens), "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__merges": ["a b"],
    })  # fmt: skip
    outer = {"backbone.embeddings.weight": "token_embd.weight", "backbone.norm_f.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    inner = {"norm.weight": "attn_norm.weight", "mixer.A_log": "ssm_a", "mixer.D": "ssm_d"} | {
        f"mixer.{there}.{part}": f"{here}.{part}" for part in ("weight", "bias") for there, here in (
            ("in_proj", "ssm_in"), ("conv1d", "ssm_conv1d"), ("x_proj", "ssm_x"), ("dt_proj", "ssm_dt"),
            ("out_proj", "ssm_out"))
    }  # fmt: skip
    for name, x in theirs.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        x = -x.exp() if name.endswith("A_log") else x.squeeze(1) if "conv1d.weight" in name else x
        layer = re.fullmatch(r"backbone\.layers\.(\d+)\.(.+)", name)
        writer.tensor(f"blk.{layer[1]}.{inner[layer[2]]}" if layer else outer[name], x)
    writer.done()
    return path


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 1, 2], ids=["mamba", "mamba-tied", "falcon_mamba"])
def test_a_gguf_is_the_model_that_it_was_made_from(index, tmp_path):
    same = {"mixer_rms_eps": CASES[index].values["layer_norm_epsilon"]} if index == 2 else {}
    theirs = families.made(replace(CASES[index], values=CASES[index].values | same))
    imported = foreign.read(written(tmp_path / "model.gguf", theirs)).model
    families.near(imported(families.text()).logits, theirs(families.text()).logits)


def test_metadata_that_changes_a_mamba_is_named(tmp_path):
    path = written(tmp_path / "model.gguf", families.made(CASES[2]), ssm__inner_size=65)
    with pytest.raises(CheckpointError, match=r"mamba\.ssm\.inner_size is 65"):
        foreign.read(path)


@torch.no_grad()
@pytest.mark.parametrize("norms", [False, True])
def test_its_logits_are_those_of_llama_cpp(norms, tmp_path):
    """Which has no biases of projections, and steps of one rank."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    kind, same = ("falcon_mamba", {"mixer_rms_eps": 1e-3}) if norms else ("mamba", {})
    sizes = {"use_bias": False, "conv_kernel": 4, "state_size": 16, "time_step_rank": "auto"}
    path = written(tmp_path / "model.gguf", families.made(Family(kind, MAMBA | sizes | same)))
    options = {
        "n_ctx": 128,
        "n_threads": 1,
        "verbose": False,
        "logits_all": True,
        "n_batch": 1,
        "n_ubatch": 1,
    }
    ids = families.text(rows=1)
    model = llama_cpp.Llama(str(path), **options)
    with contextlib.closing(model):
        model.eval(ids[0].tolist())
        theirs = torch.from_numpy(model.scores[: ids.shape[1]].copy())
    families.near(foreign.read(path).model(ids).logits[0], theirs)
