"""GGUF files as runs: the weights of the folder that they were made from, and what cannot be read named."""

import copy
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

gguf = pytest.importorskip("gguf", reason="pip install 'perspectron[gguf]'")

from perspectron.cli.main import main  # noqa: E402
from perspectron.data import origin  # noqa: E402
from perspectron.decode.sampling import SamplingConfig  # noqa: E402
from perspectron.decode.steps import stepped, steps_of  # noqa: E402
from perspectron.decode.suggested import suggested  # noqa: E402
from perspectron.interop import foreign  # noqa: E402
from perspectron.interop.hf.back import put_back  # noqa: E402
from perspectron.model import half  # noqa: E402
from perspectron.opening import open_model  # noqa: E402
from perspectron.util.errors import CheckpointError, DataError  # noqa: E402
from tests.gguf_models import ARCHES, KINDS, arch_of, folder_of, rounded, stacked, write  # noqa: E402
from tests.interop import families  # noqa: E402
from tests.refusals import names, refused  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


QUANTISED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ2_0")
"""Beside Q8_0; gguf itself does not quantise to the K-quants."""


def made(folder: Path, name: str, quantised=KINDS.F32) -> tuple[Path, Path]:
    """A folder of transformers, and a GGUF of the weights that it had before they were rounded."""
    whole, there = folder_of(name, folder / "whole"), folder / "hf"
    shutil.copytree(whole, there)
    weights = load_file(whole / "model.safetensors")
    save_file({key: rounded(x, quantised) for key, x in weights.items()}, there / "model.safetensors")
    write(folder / "model.gguf", whole, arch_of(name), quantised)
    return there, folder / "model.gguf"


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        *((name, KINDS.Q8_0) for name in ARCHES if name != "kimi-linear"),  # it has others; as a model, below
        *(("llama", kind) for kind in KINDS if kind.name in QUANTISED),
    ],
)
def test_a_gguf_has_the_tensors_of_its_folder_by_their_names(name, quantised, tmp_path):
    folder, file = made(tmp_path, name, quantised)
    layer = "backbone.layers.{}.mixer" if name == "nemotron_h_moe" else "model.layers.{}.mlp"
    theirs = stacked(load_file(folder / "model.safetensors"), f"{layer}.experts.{{}}_proj.weight")
    with foreign.gguf.unpacked(file) as source:
        source.open_weights()
        ours = {key: tensor.float() for key, tensor in source.all().items()}
    if name == "qwen3next":  # which has what is made of one matrix apart
        parts = ("in_proj_qkv.", "in_proj_z.", "in_proj_qkvz.")
        ours, theirs = (
            {k: x for k, x in all.items() if not any(p in k for p in parts)} for all in (ours, theirs)
        )
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        if key.endswith("A_log"):  # kept as −e^A_log
            torch.testing.assert_close(ours[key], tensor, rtol=2e-7, atol=2e-7)
        elif arch_of(name) in ("gemma3", "qwen35", "qwen3next") and key.endswith(
            "norm.weight"
        ):  # kept with 1 added
            assert torch.equal(ours[key] + 1, tensor + 1), key
        else:
            assert torch.equal(ours[key], tensor), key


@pytest.mark.parametrize("name", ARCHES)
def test_a_gguf_has_the_config_of_its_folder(name, tmp_path):
    folder, file = made(tmp_path, name)
    theirs = transformers.AutoConfig.from_pretrained(folder).to_dict()
    with foreign.gguf.unpacked(file) as source:
        kind = {"mistral": "llama"}.get(theirs["model_type"], theirs["model_type"])
        ours = transformers.AutoConfig.for_model(**source.values | {"model_type": kind}).to_dict()
    passed = {"architectures", "dtype", "transformers_version", "model_type", "_name_or_path"}
    if name in ("granite", "granitemoe"):  # without such layers
        passed |= {key for key in theirs if key.startswith("mamba_")}
    if name == "nemotron_h_moe":  # without a layer of that width
        passed.add("intermediate_size")
    if name == "kimi-linear":  # says nothing of the model
        passed.add("head_dim")
    kept = theirs.keys() - passed
    assert {key: ours.get(key) for key in kept} == {key: theirs[key] for key in kept}


def test_matrices_of_16_bits_stay_so(tmp_path):
    _, file = made(tmp_path, "llama", KINDS.BF16)
    weights = foreign.read(file).model.state_dict()
    assert {name.split(".")[-2] for name, weight in weights.items() if weight.dtype == torch.bfloat16} == {
        "embedding", "lm_head", "qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_matrices_of_float16_are_stepped_by_the_modules_which_is_said_once(tmp_path, caplog):
    _, file = made(tmp_path, "llama", KINDS.F16)
    model = foreign.read(file).model.eval()
    state, wide, ids = model.init_state(1), copy.deepcopy(model), torch.tensor([[7]])
    half.widen(wide)
    other = wide.init_state(1)
    with torch.inference_mode():
        for _ in range(3):
            _, said, state = stepped(model, steps_of(model), ids, state)
            _, same, other = stepped(wide, None, ids, other)
            torch.testing.assert_close(said, same, rtol=0, atol=1e-5)
    lines = [line for line in caplog.messages if "recording" in line]
    assert len(lines) == 1 and names(lines[0], "torch.float16")


def test_how_its_authors_suggest_to_draw_is_kept(tmp_path):
    folder = folder_of("llama", tmp_path / "hf")
    drawn = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.1, "mirostat": 2}
    values = {f"general__sampling__{name}": value for name, value in drawn.items()}
    write(tmp_path / "model.gguf", folder, "llama", **values)
    with foreign.gguf.unpacked(tmp_path / "model.gguf") as source:
        config, line = suggested(source.folder, {})
    assert config == SamplingConfig(0.6, 20, repetition_penalty=1.1)
    assert names(line, "temperature", "0.6", "mirostat")


KNOWN = [name for name, (kind, _) in ARCHES.items() if kind in foreign.KINDS]


@pytest.mark.parametrize("name", KNOWN)
def test_a_gguf_is_the_model_of_its_folder(name, tmp_path):
    folder, file = made(tmp_path, name, KINDS.Q8_0)
    theirs, ours = foreign.read(folder).model, foreign.read(file).model
    assert ours.config == theirs.config
    for key, weight in theirs.state_dict().items():
        close = 2e-7 if "log" in key else 0
        torch.testing.assert_close(ours.state_dict()[key], weight, rtol=close, atol=close)


@torch.no_grad()
@pytest.mark.parametrize("name", ["olmoe", "qwen3moe", "nemotron_h_moe", "qwen3next", "kimi-linear"])
def test_experts_of_a_gguf_are_exported_as_transformers_has_them(name, tmp_path):
    folder, file = made(tmp_path, name)
    run, out, ids = tmp_path / "run", tmp_path / "out", families.text()
    assert main(["import", str(file), "--out", str(run)]) == 0 == main(["export", str(run), "--hf", str(out)])
    of = transformers.AutoModelForCausalLM.from_pretrained
    theirs, told = of(out, output_loading_info=True, **families.EAGER)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    expected = of(folder, **families.EAGER).state_dict()
    for key, weight in theirs.state_dict().items():
        torch.testing.assert_close(weight, expected[key], rtol=2e-7, atol=2e-7)
    families.near(open_model(run).model(ids).logits, theirs.eval()(ids).logits, 1e-4)


def test_experts_that_an_earlier_version_noted_by_names_of_a_gguf_are_not_exported_so(tmp_path):
    _, file = made(tmp_path, "olmoe")
    assert main(["import", str(file), "--out", str(tmp_path / "run")]) == 0
    came = tmp_path / "run" / origin.FOLDER
    known = json.loads((came / origin.WEIGHTS).read_text())
    before = {name: each for name, each in known.items() if ".experts." not in name}
    for i in range(4):
        for part, shape in (("gate", [6, 64, 32]), ("up", [6, 64, 32]), ("down", [6, 32, 64])):
            before[f"model.layers.{i}.mlp.experts.{part}_proj.weight"] = ["float32", shape]
    (came / origin.WEIGHTS).write_text(json.dumps(before))
    told = put_back(open_model(tmp_path / "run").model, came)
    assert isinstance(told, str) and names(told, "model.layers.0.mlp.experts.down_proj.weight")


def test_an_exported_tokenizer_splits_as_the_gguf_says_not_as_its_family(tmp_path):
    _, file = made(tmp_path, "qwen3")  # a tokenizer of GPT-2's, which keeps digits together
    run, out, text = tmp_path / "run", tmp_path / "out", " x  12 y"
    assert main(["import", str(file), "--out", str(run)]) == 0 == main(["export", str(run), "--hf", str(out)])
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(text).input_ids == open_model(run).tokenizer.encode(text)


def test_a_gguf_of_a_mistral_has_its_window(tmp_path):
    folder = folder_of("mistral", tmp_path / "hf", sliding_window=7)
    write(tmp_path / "model.gguf", folder, "llama")
    ours = foreign.read(tmp_path / "model.gguf").model
    assert ours.config == foreign.read(folder).model.config and ours.config.blocks[0].mixer.window == 7


def test_a_factor_of_scaled_positions_that_is_1_is_none(tmp_path):
    folder = folder_of("olmo2-windows", tmp_path / "hf")
    assert foreign.read(folder).model.config.blocks[-1].mixer.rope_scaling.attention_factor == 1.25
    write(tmp_path / "model.gguf", folder, "olmo2", rope__scaling__attn_factor=1.0)
    config = foreign.read(tmp_path / "model.gguf").model.config
    assert config.blocks[-1].mixer.rope_scaling.attention_factor is None


def test_positions_that_a_gguf_says_are_not_scaled_have_no_factor(llama, tmp_path):
    for kind, factor in (("none", None), ("linear", 4.0)):
        write(tmp_path / "m.gguf", llama[0], "llama", rope__scaling__type=kind, rope__scaling__factor=4.0)
        scaling = foreign.read(tmp_path / "m.gguf").model.config.blocks[0].mixer.rope_scaling
        assert (scaling and scaling.factor) == factor


@torch.no_grad()
def test_factors_of_falcon_h1_are_in_the_weights_of_a_gguf(tmp_path):
    factors = {
        "mlp_multipliers": [0.6, 1.3], "key_multiplier": 0.8, "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.7, 1.2, 0.9, 1.4, 0.5], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.7,
    }  # fmt: skip
    folder = folder_of("falcon-h1", tmp_path / "hf", **factors)
    write(tmp_path / "model.gguf", folder, "falcon-h1")
    ids = torch.arange(40)[None] * 7
    ours, theirs = (foreign.read(path).model(ids).logits for path in (tmp_path / "model.gguf", folder))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * max(1.0, float(theirs.abs().max())))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return made(tmp_path_factory.mktemp("gguf"), "mistral")


def unread(file: Path, *named: object) -> None:
    with refused((CheckpointError, DataError), file.name, *named):
        foreign.read(file)


def test_a_file_that_is_cut_short_anywhere_is_refused(llama, tmp_path):
    whole = llama[1].read_bytes()
    for size in [*range(0, 400, 7), *range(400, len(whole), 997), len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        unread(tmp_path / "cut.gguf")
    assert len(whole) > 40_000


def test_a_file_that_is_cut_short_names_what_is_missing(llama, tmp_path):
    whole = llama[1].read_bytes()
    for key, place in (("llama.block_count", whole.index(b"llama.block_count") + 20), ("token_embd", -9000)):
        (tmp_path / "cut.gguf").write_bytes(whole[:place])
        unread(tmp_path / "cut.gguf", *([key] if place > 0 else []))


def test_what_is_no_gguf_of_a_known_kind_is_named(llama, tmp_path):
    whole, file = llama[1].read_bytes(), tmp_path / "model.gguf"
    tensor = whole.index(b"output_norm.weight") + len("output_norm.weight")
    kind = tensor + 4 + 8  # after the number of axes and the only one
    rows = whole.index(b"blk.1.attn_q.weight") + len("blk.1.attn_q.weight") + 4 + 8
    for changed, named in (
        (b"GGML" + whole[4:], ["GGUF"]),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], ["version"]),
        (whole.replace(b"llama.rope.freq_base", b"llama.rope.frec_base"), ["llama.rope.frec_base"]),
        (whole.replace(b"general.architecture", b"general.architectura"), ["None", "qwen35", "lfm2"]),
        (whole[:kind] + struct.pack("<I", 99) + whole[kind + 4 :], ["output_norm.weight", 99]),
        (whole[:kind] + struct.pack("<I", 15) + whole[kind + 4 :], ["output_norm.weight", "Q8_K"]),
        (whole[:rows] + struct.pack("<Q", 39) + whole[rows + 8 :], ["blk.1.attn_q.weight", "[39,"]),
        (whole.replace(b"blk.1.attn_q", b"blk.1.attn_x"), ["model.layers.1.self_attn.q_proj"]),
    ):
        file.write_bytes(changed)
        unread(file, *named)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"expert_count": 8}, ["llama.expert_count", 8]),
        ({"block_count": 2**24}, ["llama.block_count", 2**24]),
        ({"attn_logit_softcapping": 50.0}, ["llama.attn_logit_softcapping", 50.0]),
        ({"attention__causal": False}, ["llama.attention.causal"]),
        ({"attention__value_length": 12}, ["llama.attention.value_length", 12]),
        ({"rope__scaling__type": "longrope"}, ["llama.rope.scaling.type", "longrope"]),
        ({"rope__scaling__attn_factor": 1.25}, ["llama.rope.scaling.attn_factor", 1.25]),
        ({"tokenizer__ggml__pre": "viking"}, ["tokenizer.ggml.pre", "viking"]),
        ({"tokenizer__ggml__model": "bert"}, ["tokenizer.ggml.model", "bert"]),
        ({"tokenizer__ggml__eos_token_id": 300}, ["tokenizer.ggml.eos_token_id", 300]),
        ({"tokenizer__ggml__add_eos_token": True}, ["tokenizer.ggml.add_eos_token", "true"]),
        ({"split__count": 3}, ["split.count"]),
        ({"split__count": [3]}, ["split.count"]),
        ({"nextn_predict_layers": [1, 2]}, ["llama.nextn_predict_layers"]),
        ({"nextn_predict_layers": "one"}, ["llama.nextn_predict_layers", "one"]),
        ({"tokenizer__ggml__pre": [1]}, ["tokenizer.ggml.pre"]),
    ],
)
def test_metadata_that_no_model_of_ours_has_is_named(values, named, llama, tmp_path):
    write(tmp_path / "model.gguf", llama[0], "llama", **values)
    unread(tmp_path / "model.gguf", *named)
