"""Families of transformers as random models, and what is asked of each that `import` reads.

Every parameter and every buffer that is saved is drawn anew, as norms and biases start at 1 and 0, where a tensor that
is lost would not be missed. Sizes are odd, keys are in groups, and the vocabulary has more rows than ids.
"""

import contextlib
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from perspectron.data.specials import Specials
from perspectron.decode import verify
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.interop import foreign
from perspectron.interop.foreign.source import HARMLESS, Source
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.util.errors import CheckpointError, ConfigError
from tests.refusals import refused

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
V, IDS, LENGTH, NEW = 67, 61, 40, 30
"""Rows of the vocabulary, ids that there are, tokens of a text and tokens drawn after it."""
SINGLE, DOUBLE = 2e-5, 1e-10
"""What logits may differ by, as a share of the largest, in float32 and in float64."""
OUTER: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SIZES = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
"""Keys whose silent values are of models of billions of weights."""
HEADS: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 48,
}  # fmt: skip


class Ids:
    """A vocabulary without a text: fewer ids than the model has rows."""

    vocab_size, specials = IDS, Specials()

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) % (IDS - 3) for character in text]

    def token_bytes(self, id: int) -> bytes:
        return b"%d " % id

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()


@dataclass(frozen=True)
class Family:
    """A kind of model. values: its config. seed: of the weights. name: of the case, where a kind has several."""

    kind: str
    values: dict[str, Any]
    seed: int = 0
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.kind


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """transformers computes in float64 what it computes in float32, also where its code says so."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def made(family: Family, values: dict[str, Any] | None = None) -> Any:
    """A model of transformers with all its numbers drawn."""
    config = AutoConfig.for_model(family.kind, **(family.values if values is None else values))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(family.seed)  # some vectors begin at random numbers
        model = AutoModelForCausalLM.from_config(config, **EAGER).eval()
    redraw(model, family.seed)
    return model


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter and every buffer that is saved: matrices for outputs as large as their inputs; what starts
    at one number goes around it."""
    generator, saved = torch.Generator().manual_seed(seed), model.state_dict()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in saved or not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if tensor.ndim > 1:
            width = tensor.shape[-1] if tensor.shape[-1] > 8 else tensor[0].numel()
            tensor.copy_(noise * width**-0.5)
        else:
            tensor.add_((0.3 * noise * 256).round().to(tensor.dtype) / 256)  # w + 1 is exact


def save(model: Any, folder: Path, *, shards: bool = False) -> Path:
    """The folder that transformers writes, in two shards with an index or in one file, and a tokenizer."""
    size = sum(x.nbytes for x in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=size * 2 // 3 if shards else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == shards
    return folder


def change(folder: Path, **values: Any) -> None:
    """Change keys of config.json; ... leaves one out."""
    path = folder / "config.json"
    old = json.loads(path.read_text())
    new = {name: value for name, value in (old | values).items() if value is not ...}
    path.write_text(json.dumps(new))


def read(folder: Path) -> LanguageModel:
    return foreign.model(foreign.opened(folder)).eval()


def text(seed: int = 1, rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, IDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, wanted: Tensor, share: float = SINGLE) -> None:
    """Equal up to a share of the largest."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=share * max(1.0, float(wanted.abs().max())))


# ---------------------------------------------------------------- the questions


@torch.no_grad()
def logits_are_the_same(theirs: Any, ours: LanguageModel) -> None:
    """Of a whole text, and of one that is padded on the left."""
    ids = text()
    expected = theirs(ids).logits
    near(ours(ids).logits, expected)
    pad = torch.zeros_like(ids, dtype=torch.bool)
    pad[1, :7] = True
    near(ours(ids, pad_BT=pad).logits[~pad], torch.cat([expected[0], theirs(ids[1:, 7:]).logits[0]]))


@torch.no_grad()
def logits_are_the_same_in_double(family: Family, theirs: Any, ours: LanguageModel) -> None:
    weights = {name: x.double() for name, x in theirs.state_dict().items()}
    with in_double():
        exact = made(family)
        exact.load_state_dict(weights)
        expected = exact(text()).logits
    assert expected.dtype is torch.float64
    near(ours.double()(text()).logits, expected, DOUBLE)


@torch.no_grad()
def greedy_tokens_are_the_same(theirs: Any, ours: LanguageModel) -> None:
    """By steps of both, each with its own memory."""
    ids, state, cache, drawn = text(rows=1), None, None, list[int]()
    for _ in range(NEW):
        out, other = ours(ids, state), theirs(ids, cache=cache, use_cache=True)
        state, cache = out.state, other.cache
        mine, wanted = out.logits[0, -1, :IDS], other.logits[0, -1, :IDS]
        near(mine, wanted)
        best = wanted.topk(2).values
        assert float(best[0] - best[1]) > 1e-4, "a tie: take another seed"
        drawn.append(int(mine.argmax()))
        assert drawn[-1] == int(wanted.argmax())
        ids = torch.tensor([[drawn[-1]]])
    assert len(set(drawn)) > 1


def bits_are_those_of_one_reading(ours: LanguageModel, folder: Path) -> None:
    """In batches, in pieces, after a fork, from a file, and back at an earlier token."""
    found = verify.ways(ours, Ids(), batches=(1, 9), pieces=(5,), threads=(1,))  # type: ignore[arg-type]
    for together in (False, True):
        assert len({way.digest for way in found if way.together == together}) == 1, found
    session, ids = Session(ours, Ids()), text(rows=1)[0].tolist()  # type: ignore[arg-type]
    session.read(ids)
    fork = session.fork()
    session.save(folder / "state")
    session.say(4, sampling=SamplingConfig(temperature=0))
    wanted = _likely(session.at(len(ids)))
    fork.read([7, 8, 9]).say(2)
    loaded = Session.load(folder / "state", ours, Ids())  # type: ignore[arg-type]
    assert _likely(loaded) == wanted and _likely(fork.at(len(ids))) == wanted
    assert loaded.say(4, sampling=SamplingConfig(temperature=0)) == session.text.split(" ", len(ids))[-1]


def _likely(session: Session) -> Any:
    """The log-probabilities of a few tokens to come, and of all others in their place."""
    steps = session.likely([5, 6, 7], IDS)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def silence_means_what_it_means_there(family: Family, folder: Path) -> set[str]:
    """Leave out each key of config.json once, and each of positions: where transformers then has the same tensors, its
    logits are ours; elsewhere we refuse, and for what belongs to a type of positions that is left out, which it
    ignores. The keys for which both have a model."""
    save(made(family), folder)
    whole, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    known, tables = set[str](), {"rope_parameters": whole.get("rope_parameters") or {}}
    less = {key: {key: ...} for key in whole if key not in HARMLESS}
    for key in tables["rope_parameters"]:
        rest = {name: value for name, value in tables["rope_parameters"].items() if name != key}
        less[f"rope_parameters.{key}"] = {"rope_parameters": rest}
    for key, values in less.items():
        change(folder, **values)
        expected = None if key in SIZES else _of_config(family.kind, folder, tensors)
        ignored = key == "rope_parameters.rope_type" and tables["rope_parameters"]["rope_type"] != "default"
        if expected is None or ignored:
            with pytest.raises(CheckpointError):
                read(folder)
        else:
            with torch.no_grad():
                near(read(folder).double()(text()).logits, expected, DOUBLE)
            known.add(key)
        change(folder, **whole)
    return known


@torch.no_grad()
def _of_config(kind: str, folder: Path, tensors: dict[str, Tensor]) -> Tensor | None:
    """The logits in float64 of transformers' model of a folder's config; None where it has other tensors."""
    values = json.loads((folder / "config.json").read_text())
    with in_double():
        try:
            config = AutoConfig.for_model(**values | {"model_type": kind})
            model = AutoModelForCausalLM.from_config(config, **EAGER).eval()
            shapes = {name: x.shape for name, x in model.state_dict().items()}
            tied = {"lm_head.weight"} if config.get_text_config().tie_word_embeddings else set()
            if {n: s for n, s in shapes.items() if n not in tied} != {n: x.shape for n, x in tensors.items()}:
                return None
            model.load_state_dict({name: x.double() for name, x in tensors.items()}, strict=False)
            model.tie_weights()
            logits: Tensor = model(text()).logits
        except Exception:  # whatever it does not take
            return None
        return logits


def weights_are_all_asked_for(folder: Path) -> None:
    """A tensor that is lost, left over or of another shape is named."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if name != "lm_head.weight"]
    for name in names:
        less = {n: x for n, x in tensors.items() if n != name}
        wrong = tensors | {name: torch.zeros(*tensors[name].shape, 2)}
        for changed in (less, wrong):
            save_file(changed, path, {"format": "pt"})
            with refused(CheckpointError, name):
                read(folder)
    save_file(tensors | {"model.more.weight": torch.zeros(3)}, path, {"format": "pt"})
    with refused(CheckpointError, "model.more.weight"):
        read(folder)
    save_file(tensors, path, {"format": "pt"})


# ---------------------------------------------------------------- the cases of a file


class Case(NamedTuple):
    """A family's model there and here, and the folder between them."""

    family: Family
    theirs: Any
    ours: LanguageModel
    folder: Path

    @classmethod
    def of(cls, family: Family, folder: Path) -> "Case":
        theirs = made(family)
        save(theirs, folder)
        return cls(family, theirs, read(folder), folder)


def cases(families: Sequence[Family]) -> Any:
    """A fixture that is each of them in turn, made once for a file."""

    @pytest.fixture(params=families, ids=str, scope="module")
    def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
        return Case.of(request.param, tmp_path_factory.mktemp(str(request.param)))

    return case


def loops_of_torch(*modules: Any) -> Any:
    """A fixture for a file: transformers takes kernels for a GPU where a package has them, also on a CPU."""

    @pytest.fixture(autouse=True, scope="module")
    def loops() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module in modules:
                for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
                    patch.setattr(module, name, inspect.unwrap(getattr(module, name)))
            yield

    return loops


class Questions:
    """What is asked of every case of a file, which has the fixture `case`."""

    def test_its_logits_are_those_of_transformers(self, case: Case) -> None:
        logits_are_the_same(case.theirs, case.ours)

    def test_its_logits_in_float64_are_those_of_transformers(self, case: Case) -> None:
        logits_are_the_same_in_double(case.family, case.theirs, read(case.folder))

    def test_its_greedy_tokens_are_those_of_transformers(self, case: Case) -> None:
        if case.family.kind == "bamba":
            pytest.skip("steps of transformers' own are not its whole forward")
        greedy_tokens_are_the_same(case.theirs, case.ours)

    def test_it_has_the_bits_of_one_reading(self, case: Case, tmp_path: Path) -> None:
        bits_are_those_of_one_reading(case.ours, tmp_path)

    def test_every_tensor_is_asked_for(self, case: Case) -> None:
        weights_are_all_asked_for(case.folder)


def config_of(family: Family, values: dict[str, Any]) -> ModelConfig | str:
    """Ours, or why there is none."""
    try:
        return foreign.kind(family.kind).config(Source(Path(), values))
    except (CheckpointError, ConfigError) as error:
        return str(error)


def configs_are_those_of_the_rest(family: Family, folder: Path) -> None:
    """Leave out each key once: the config, or what is wrong with it, is that of all that transformers makes of the
    rest; or the key is a size that must be there."""
    for name in family.values:
        less = {key: value for key, value in family.values.items() if key != name}
        try:
            AutoConfig.for_model(family.kind, **less).save_pretrained(folder)
        except StrictDataclassError:
            assert isinstance(config_of(family, less), str)
            continue
        found = config_of(family, less)
        if not (isinstance(found, str) and f" {name} is None, must be" in found):
            assert found == config_of(family, json.loads((folder / "config.json").read_text())), name
