"""Models of transformers as runs: the same logits, tokens that have changed places, and what cannot be read named."""

import json
import math

import pytest
import tokenizers
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM

import perspectron
from perspectron.cli.main import main
from perspectron.interop import foreign
from perspectron.model.block import states_of
from perspectron.util.errors import CheckpointError, ConfigError, DataError
from tests.foreign_models import HEADS, MODELS, SMALL, TEXT, V, saved
from tests.foreign_models import tokenizer as made_tokenizer
from tests.refusals import in_a_line, names, refused

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def bpe() -> ByteLevelBPETokenizer:
    return made_tokenizer()


@pytest.mark.parametrize("kind", MODELS)
def test_its_logits_are_those_of_transformers(kind, bpe, tmp_path):
    theirs = saved(tmp_path / "hf", kind, bpe)
    ours, tokenizer, *_ = foreign.read(tmp_path / "hf")
    ids = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours(ids).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * max(1, float(expected.abs().max())))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode(TEXT) == bpe.encode(TEXT).ids


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("sd", [0.02, 0.2, 0.5])
def test_its_logits_are_as_exact_as_those_of_transformers(kind, layers, sd, bpe, tmp_path, monkeypatch):
    """Both round in float32; neither is further from float64, whatever the size of the weights."""
    monkeypatch.setitem(SMALL, "num_hidden_layers", layers)
    theirs = saved(tmp_path / "hf", kind, bpe, sd)
    ours, *_ = foreign.read(tmp_path / "hf")
    ids = torch.randint(1, V - 1, (3, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits, exact = theirs(ids).logits, ours(ids).logits, ours.double()(ids).logits
    largest = max(1, float(exact.abs().max()))
    error, other = (float((x - exact).abs().max()) / largest for x in (logits, expected))
    assert error <= 2 * other + 2e-7
    assert other <= (1e-5 if sd <= 0.2 else 2e-4), "in float64 it is the same function"


def test_gpt2_with_lenses_at_rest_is_the_same_function_and_can_be_trained(bpe, tmp_path, capsys):
    saved(tmp_path / "hf", "gpt2", bpe)
    for name, flags in (("plain", []), ("lens", ["--lens"])):
        assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / name), *flags]) == 0
    (plain, _), (lens, _) = perspectron.load(tmp_path / "plain"), perspectron.load(tmp_path / "lens")
    ids = torch.randint(1, V - 1, (2, 40), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(lens(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
    lens(ids, targets=ids).loss.backward()
    gate = lens.blocks[0].route.raw_1.grad
    assert math.isfinite(gate) and gate != 0


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (
            "bamba",
            ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "mamba_d_head", "time_step_limit"),
        ),
        ("mistral", ("rms_norm_eps", "rope_parameters", "num_key_value_heads")),
        ("mamba2", ("layer_norm_epsilon", "time_step_limit", "conv_kernel", "expand")),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind, keys, bpe, tmp_path, monkeypatch):
    monkeypatch.setitem(HEADS, "num_attention_heads", 8)
    monkeypatch.setitem(HEADS, "num_key_value_heads", 8)
    saved(tmp_path, kind, bpe)
    values = json.loads((tmp_path / "config.json").read_text())
    for key in keys:
        del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        expected, logits = theirs(ids).logits, foreign.read(tmp_path)[0](ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * max(1, float(expected.abs().max())))


def test_what_cannot_be_read_is_named(bpe, tmp_path):
    saved(tmp_path, "llama", bpe)
    whole = json.loads((tmp_path / "config.json").read_text())
    for change, named in (
        ({"model_type": "xlstm"}, ["model_type", "xlstm", "perspectron", "gpt2", "llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"head_dim": 16}, ["q_proj.weight", 64]),
        ({"head_dim": 7}, ["head_dim", 7]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", 3, "num_attention_heads", 4]),
        ({"sliding_window": 8}, ["sliding_window", 8]),
        ({"rope_parameters": {"rope_type": "dynamic"}}, ["rope", "dynamic"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"rope_parameters": {"long_factor": [1.0]}}, ["rope_parameters.long_factor"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"intermediate_size": 64}, ["layers.0.mlp.gate_proj.weight", 48, 64]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", 0.5, 1.0]),
        ({"num_hidden_layers": 1}, ["model.layers.1.input_layernorm.weight"]),
        ({"num_hidden_layers": 3}, ["model.layers.2.input_layernorm.weight"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole | change))
        with refused(CheckpointError, *named):
            foreign.read(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(value, bpe, tmp_path, capsys):
    theirs = saved(tmp_path / "hf", "llama", bpe)
    theirs.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], tmp_path / "hf", "blocks.1.ffn.up_proj.weight")
    assert not (tmp_path / "run").exists()


def test_a_special_token_without_a_row_is_text_and_others_are_refused(bpe, tmp_path, capsys):
    """Gemma 3 of text alone has one for images, which no model of text reads."""
    saved(tmp_path, "llama", bpe)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<image>")
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_tokens([f"<unused{id}>" for id in range(inner.get_vocab_size(), V)])
    inner.add_special_tokens(["<image>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert inner.token_to_id("<image>") == V
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "run")]) == 0
    model, tokenizer = perspectron.load(tmp_path / "run")
    assert tokenizer.vocab_size == V == model.config.vocab_size
    ids = tokenizer.encode(tokenizer.marked("a<image><|endoftext|>"))
    assert ids == [*tokenizer.encode("a<image>"), 299] and max(ids) < V
    assert ids[:-1] != inner.encode("a<image>").ids
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<image>"}))
    with refused(DataError, tmp_path / "tokenizer.json", V):
        foreign.read(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    inner.add_tokens(["<more>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    with refused(DataError, tmp_path / "tokenizer.json", V + 2, V):
        foreign.read(tmp_path)


def test_a_run_that_was_imported_knows_no_text(bpe, tmp_path, monkeypatch, capsys):
    """And does not take what lies about for one."""
    saved(tmp_path / "hf", "llama", bpe)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("the fox " * 50)
    assert main(["import", "hf", "--out", "run"]) == 0
    for line in ("eval run", "train --init run --steps 2 --out tuned"):
        assert main(line.split()) == 2, line
        said = capsys.readouterr().err
        assert names(said, "--data") or names(said, "run")
    assert main(["eval", "run", "--data", "letter.txt", "--tokens", "64"]) == 0


CONFIGS = [
    ("gpt2", {"model_type": ["gpt2"]}, ["model_type"]),
    ("gpt2", {"layer_norm_epsilon": [1]}, ["layer_norm_epsilon"]),
    ("gpt2", {"layer_norm_epsilon": math.inf}, ["layer_norm_epsilon", "inf"]),
    ("gpt2", {"layer_norm_epsilon": math.nan}, ["NaN"]),
    ("gpt2", {"n_layer": 2**45}, ["n_layer", 2**45]),
    ("gpt2", {"n_embd": 2**20}, []),
    ("llama", {"rope_parameters": [1]}, ["rope_parameters"]),
    ("llama", {"rope_parameters": None, "rope_theta": "x"}, ["rope_theta", "'x'"]),
    ("llama", {"rms_norm_eps": "x"}, ["rms_norm_eps", "'x'"]),
    ("llama", {"rms_norm_eps": []}, ["rms_norm_eps", "[]"]),
    ("bamba", {"attn_layer_indices": 3}, ["attn_layer_indices", 3]),
    ("bamba", {"time_step_limit": 3}, ["time_step_limit", 3]),
    ("mamba2", {"time_step_limit": []}, ["time_step_limit", "[]"]),
    ("mamba2", {"head_dim": "x"}, ["head_dim", "'x'"]),
]
TOKENIZERS = [
    ({"added_tokens": 5}, ["added_tokens", "int"]),
    ({"added_tokens": [1]}, ["added_tokens[0]", "int"]),
    ({"added_tokens": {"id": 3}}, ["added_tokens", "object"]),
    ({"added_tokens": [{"id": 3, "content": [], "special": True}]}, ["added_tokens[0].content"]),
    ({"normalizer": [1]}, ["tokenizer.json"]),
    ({"pre_tokenizer": {"pretokenizers": 5}}, ["tokenizer.json"]),
]


@pytest.mark.parametrize(
    ("file", "kind", "change", "named"),
    [("config.json", *row) for row in CONFIGS] + [("tokenizer.json", "gpt2", *row) for row in TOKENIZERS],
)
def test_what_a_stranger_wrote_is_refused_in_a_line(file, kind, change, named, bpe, tmp_path, capsys):
    MODELS[kind]().config.save_pretrained(tmp_path)
    bpe.save(str(tmp_path / "tokenizer.json"))
    values = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(values | change))
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    in_a_line(capsys.readouterr().err, *named)
    assert not (tmp_path / "run").exists()


def test_infinity_may_stand_in_a_config(bpe, tmp_path):
    saved(tmp_path, "mamba2", bpe)
    values = json.loads((tmp_path / "config.json").read_text())
    text = json.dumps(values | {"time_step_limit": [0.0, math.inf]})
    assert "[0.0, Infinity]" in text
    (tmp_path / "config.json").write_text(text)
    foreign.read(tmp_path)


def test_weights_are_those_of_one_file_or_of_an_index(bpe, tmp_path, monkeypatch):
    model = saved(tmp_path, "gpt2", bpe)
    expected = foreign.read(tmp_path)[0].fingerprint()
    (tmp_path / "other.safetensors").write_bytes(b"of nobody")
    assert foreign.read(tmp_path)[0].fingerprint() == expected
    whole = (tmp_path / "model.safetensors").stat().st_size
    (tmp_path / "model.safetensors").unlink()
    with refused(CheckpointError, tmp_path):
        foreign.read(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    index = tmp_path / "model.safetensors.index.json"
    assert foreign.read(tmp_path)[0].fingerprint() == expected
    with monkeypatch.context() as patch:
        patch.setattr("perspectron.model.model.memory", lambda: whole - 8192)
        with refused(ConfigError, "gpt2"):
            foreign.read(tmp_path)
    for places in (
        [1],
        {},
        {"wte.weight": "../model.safetensors"},
        {"wte.weight": [1]},
        {"wte.weight": "x.bin"},
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with refused(CheckpointError, index):
            foreign.read(tmp_path)


def test_training_goes_on_in_windows_that_the_positions_hold(bpe, tmp_path, capsys):
    saved(tmp_path / "hf", "gpt2", bpe)
    (tmp_path / "text.txt").write_text(TEXT * 200)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run")]) == 0
    line = ["train", "--init", str(tmp_path / "run"), "--data", str(tmp_path / "text.txt"), "--steps", "1"]
    assert main([*line, "--dtype", "float32", "--out", str(tmp_path / "tuned")]) == 0
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["train"]["seq_len"] == 64
    capsys.readouterr()
    assert main([*line, "--seq-len", "128", "--out", str(tmp_path / "other")]) == 2
    in_a_line(capsys.readouterr().err, "seq_len", 128, "positions", 64)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon_h1"])
def test_a_brief_cache_is_half_the_state_and_near(kind, bpe, tmp_path):
    saved(tmp_path / "hf", kind, bpe)
    states, logits = [], []
    for cache in ("full", "bfloat16"):
        run = tmp_path / cache
        assert main(["import", str(tmp_path / "hf"), "--out", str(run), "--cache", cache]) == 0
        model, _ = perspectron.load(run)
        with torch.inference_mode():
            done = model(torch.arange(1, 31)[None], model.init_state(1))
        states.append(done.state)
        logits.append(done.logits)
    caches = [states_of(state.layers[0])[-1] for state in states]
    sizes = [sum(x.nbytes for x in (cache.k_BHSK, cache.v_BHSV)) for cache in caches]
    assert sizes[0] == 2 * sizes[1]
    apart = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    assert 0 < apart < 0.02


def test_a_run_that_was_exported_keeps_its_brief_cache(bpe, tmp_path):
    saved(tmp_path / "hf", "llama", bpe)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "--cache", "bfloat16"]) == 0
    assert main(["export", str(tmp_path / "run"), "--hf", str(tmp_path / "out")]) == 0
    models = []
    for name, asked in (("again", []), ("full", ["--cache", "full"])):
        assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / name), *asked]) == 0
        models.append(perspectron.load(tmp_path / name)[0])
    assert [{m.cache for b in one.config.blocks for m in b.mixers} for one in models] == [
        {"bfloat16"},
        {"full"},
    ]
    assert models[0].fingerprint() == perspectron.load(tmp_path / "run")[0].fingerprint()


def test_a_cache_of_no_attention_is_refused(bpe, tmp_path, capsys):
    saved(tmp_path / "hf", "mamba2", bpe)
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "run"), "--cache", "bfloat16"]) == 2
    in_a_line(capsys.readouterr().err, "cache", "bfloat16", "attention")
    assert not (tmp_path / "run").exists()


def test_a_file_of_another_kind_is_named(tmp_path, capsys):
    (tmp_path / "model.bin").touch()
    assert main(["import", str(tmp_path / "model.bin"), "--out", str(tmp_path / "run")]) == 2
    in_a_line(capsys.readouterr().err, tmp_path / "model.bin", ".gguf", ".pth")
