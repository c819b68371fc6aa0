"""RWKV-7 of fla and of its author as models of ours: the numbers of a loop of its formulas in float64."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perspectron.data import world
from perspectron.interop import foreign, onnx
from perspectron.model.model import LanguageModel
from perspectron.util.errors import CheckpointError, DataError, PerspectronError
from tests import rwkv_models
from tests.interop import families, tools
from tests.refusals import refused
from tests.rwkv_models import EPS, FLA, LAYERS, D, K, V, fla_folder, logits, vocabulary_file, weights

FLA_EPS = {"group_eps": K * EPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fla_folder(tmp_path_factory.mktemp("rwkv7") / "fla", weights())


@pytest.fixture(scope="module")
def ours(folder: Path) -> LanguageModel:
    return families.read(folder)


def pth(folder: Path, tensors: object, name: str = "model.pth") -> Path:
    """A file of the author's, with the vocabulary beside it."""
    torch.save(tensors, folder / name)
    vocabulary_file(folder)
    return folder / name


@torch.no_grad()
def test_its_logits_are_those_of_the_formulas(folder, ours):
    ids = families.text()
    expected = logits(ids, weights(), **FLA_EPS)
    families.near(ours(ids).logits.double(), expected)
    families.near(families.read(folder).double()(ids).logits, expected, families.DOUBLE)
    pad = torch.zeros_like(ids, dtype=torch.bool)
    pad[1, :7] = True
    alone = logits(ids[1:, 7:], weights(), **FLA_EPS)[0]
    families.near(ours(ids, pad_BT=pad).logits[~pad].double(), torch.cat([expected[0], alone]))


@torch.no_grad()
def test_its_greedy_tokens_are_those_of_the_formulas(ours):
    reference = rwkv_models.Reference(weights(), **FLA_EPS)
    ids, state, drawn = families.text(rows=1), None, list[int]()
    wanted = torch.stack([reference.step(id) for id in ids[0].tolist()])[-1]
    for _ in range(families.NEW):
        out = ours(ids, state)
        state, mine = out.state, out.logits[0, -1].double()
        families.near(mine, wanted)
        drawn.append(int(mine.argmax()))
        assert drawn[-1] == int(wanted.argmax())
        ids, wanted = torch.tensor([drawn[-1:]]), reference.step(drawn[-1])
    assert len(set(drawn)) > 1


def test_it_has_the_bits_of_one_reading(ours, tmp_path):
    families.bits_are_those_of_one_reading(ours, tmp_path)


def test_every_tensor_is_asked_for(tmp_path):
    families.weights_are_all_asked_for(fla_folder(tmp_path / "fla", weights()))


@torch.no_grad()
def test_a_pth_of_the_author_is_the_same_model(ours, tmp_path):
    """But for the epsilon of the norm of heads, which does not follow from their width; and with or without numbers for
    first values in the first layer, which has none before it."""
    ids, expected = families.text(), logits(families.text(), weights())
    for tensors in (
        weights(),
        {n: x for n, x in weights().items() if "blocks.0.att.v" not in n or "value" in n},
    ):
        imported = foreign.read(pth(tmp_path, tensors))
        families.near(imported.model(ids).logits.double(), expected)
        assert imported.tokenizer.specials.stops == {0} and imported.tokenizer.specials.reset is None
        assert imported.tokenizer.specials.start == (0,)
    half = {name: x.bfloat16() for name, x in weights().items()}
    kept = foreign.read(pth(tmp_path, half)).model
    assert kept.embedding.weight.dtype == torch.bfloat16
    families.near(kept(ids).logits.double(), expected)


@torch.no_grad()
def test_weights_of_16_bits_in_two_files_are_the_same_model(ours, tmp_path):
    ids = families.text()
    half = families.read(fla_folder(tmp_path / "fla", weights(), shards=True))
    families.near(half(ids).logits, ours(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"fuse_norm": True}, {"unit_eps": 1e-6}),
        ({"fuse_norm": ...}, {"unit_eps": 1e-6}),
        ({"norm_first": False}, {"first": False}),
        ({"head_dim": None, "num_heads": D // K}, {}),
        ({"num_heads": 32}, {}),  # of fla's default width, as in published files
        ({"intermediate_size": ..., "hidden_ratio": 50 / D}, None),
    ],
)
def test_options_of_fla_are_honoured(values, options, tmp_path):
    own = {n: x for n, x in weights().items() if ".ln0." not in n or values.get("norm_first", True)}
    path = fla_folder(tmp_path / "fla", own, **values)
    if options is None:  # a multiple of 32, which these weights are not
        with refused(CheckpointError, "key.weight", 64, 24):
            families.read(path)
        return
    found = families.read(path).double()(families.text()).logits
    families.near(found, logits(families.text(), weights(), **FLA_EPS, **options), families.DOUBLE)


@torch.no_grad()
def test_a_head_that_is_the_embedding_and_mixes_in_one_tensor_are_read(tmp_path):
    tied = weights() | {"head.weight": weights()["emb.weight"]}
    path = fla_folder(tmp_path / "fla", tied, tie_word_embeddings=True)
    tensors = families.load_file(path / "model.safetensors")
    for i in range(LAYERS):
        mixes = [tensors.pop(f"model.layers.{i}.attn.x_{name}").flatten() for name in "rwkvag"]
        tensors[f"model.layers.{i}.attn.x_x"] = torch.stack(mixes)
    families.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    found = families.read(path).double()(families.text()).logits
    families.near(found, logits(families.text(), tied, **FLA_EPS), families.DOUBLE)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"attn": {"layers": [1]}}, "attn"),
        ({"norm_bias": False}, "norm_bias"),
        ({"value_dim": 2 * D}, "value_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"decay_low_rank_dim": 0}, "decay_low_rank_dim"),
        ({"window": 3}, "window"),
    ],
)
def test_an_option_that_no_model_of_ours_has_is_named(values, field, tmp_path):
    with refused(CheckpointError, "config.json", field):
        families.read(fla_folder(tmp_path / "fla", weights(), **values))


def test_ranks_that_a_config_leaves_open_are_those_of_fla():
    silent = {
        "decay_low_rank_dim": ...,
        "a_low_rank_dim": None,
        "v_low_rank_dim": None,
        "gate_low_rank_dim": None,
    }
    values = FLA | {"hidden_size": 1024, "head_dim": 64} | silent
    del values["decay_low_rank_dim"]
    mixer = foreign.kind("rwkv7").config(foreign.Source(Path(), values)).blocks[0].mixer
    assert [getattr(mixer, f"{name}_rank") for name in "wavg"] == [64, 64, 64, 160]


class Other:
    """No tensor."""


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"emb.weight": Other()}, "Other"),
        ({"emb.weight": [1, 2]}, "emb.weight"),
        ({"emb.weight": torch.ones(3, 2, dtype=torch.int8)}, "emb.weight"),
        ({3: torch.ones(3, 2)}, "3"),
        ([torch.ones(3)], "list"),
        ({"emb.weight": torch.ones(3, 2)}, "blocks.0.att.w1"),
        ({n: x for n, x in weights().items() if n != "blocks.1.att.k_k"}, "blocks.1.att.k_k"),
        (weights() | {"blocks.2.ffn.value.weight": torch.ones(3, 2)}, "blocks.2.ffn.value.weight"),
        (weights() | {"blocks.1.att.time": torch.ones(3, 2)}, "blocks.1.att.time"),
        (weights() | {"emb.weight": torch.ones(3)}, "emb.weight"),
        (weights() | {"blocks.999999.att.k_k": torch.ones(3)}, "num_hidden_layers is 1000000"),  # at once
    ],
)
def test_a_pth_that_holds_anything_else_is_refused_by_name(tensors, named, tmp_path):
    path = pth(tmp_path, tensors)
    with pytest.raises(CheckpointError) as error:
        foreign.read(path)
    assert str(path) in str(error.value) and named in str(error.value)


@pytest.mark.parametrize("cut", [0, 10, 3000])
def test_a_pth_that_was_cut_short_is_refused(cut, tmp_path):
    path = pth(tmp_path, weights())
    path.write_bytes(path.read_bytes()[:cut])
    with refused(CheckpointError, path):
        foreign.read(path)


def test_a_pth_without_a_vocabulary_beside_it_names_the_file(tmp_path):
    path = pth(tmp_path, weights())
    (tmp_path / world.FILE).unlink()
    with refused(DataError, world.FILE):
        foreign.read(path)
    vocabulary_file(tmp_path).write_text("1 'a' 2\n")
    with refused(PerspectronError, tmp_path / world.FILE, 1):
        foreign.read(path)


def test_a_tensor_with_other_strides_is_the_same(tmp_path, ours):
    turned: dict[str, Tensor] = {n: x.T.contiguous().T if x.ndim == 2 else x for n, x in weights().items()}
    found = foreign.read(pth(tmp_path, turned)).model.state_dict()
    for name, tensor in foreign.read(pth(tmp_path, weights(), "other.pth")).model.state_dict().items():
        assert torch.equal(found[name], tensor)


def test_the_vocabulary_and_config_are_kept_as_they_came(folder, tmp_path):
    imported = foreign.read(folder)
    assert imported.files[world.FILE] == (folder / world.FILE).read_text()
    assert json.loads(imported.files["config.json"])["model_type"] == "rwkv7"
    assert imported.model.config.vocab_size == V


@tools.recorded
def test_its_steps_are_recorded(folder, format):
    tools.steps_are_recorded(families.read(folder), format)


def test_whole_texts_and_steps_have_the_same_gradients(folder):
    tools.whole_texts_and_steps_have_the_same_gradients(families.read(folder))


def test_an_adapter_learns_beside_its_layers(folder):
    tools.an_adapter_learns(families.read(folder))


@pytest.mark.slow
def test_its_steps_in_onnx_draw_the_same_tokens(folder, tmp_path):
    pytest.importorskip("onnxruntime")
    imported = foreign.read(folder)
    assert onnx.export(imported.model, imported.tokenizer, tmp_path / "model.onnx", context=24).tokens > 0
