"""No tensor is made on the wrong device: models on one that is none (tests/places.py) say what they say on the CPU.

Shapes: B batch, T time, D model width.
"""

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import perspectron
from perspectron import presets
from perspectron.data.specials import OURS
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.designs.perspective.projection import faces, project
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import mixers
from perspectron.model.model import LanguageModel
from perspectron.presets.fit import small
from tests.places import AWAY, Away, OfAway

pytestmark = pytest.mark.cpu_only("the device that is none")
V, T = 40, 12
ONE_MIXER = {
    f"{name} alone": ModelConfig(name, V, 16, (BlockConfig(entry.small, SwiGLUConfig(8)),))
    for name, entry in mixers().items()
}
DESIGNS = {design: small(design, vocab_size=V, seq_len=32) for design in presets.DESIGNS}
every_model = pytest.mark.parametrize(
    "config", [*ONE_MIXER.values(), *DESIGNS.values()], ids=[*ONE_MIXER, *DESIGNS]
)


@pytest.fixture(autouse=True)
def away() -> Iterator[None]:
    with OfAway(AWAY):
        yield


def pair(config: ModelConfig) -> tuple[LanguageModel, LanguageModel]:
    """The same weights on the CPU and away."""
    here = perspectron.build(config, 3).cpu().double()
    there = copy.deepcopy(here).to(AWAY)
    for model in (here, there):
        assert {x.device for x in (*model.parameters(), *model.buffers())} == {model.device}
    return here, there


def ids(device: torch.device | str = "cpu") -> Tensor:
    return torch.randint(1, V, (2, T), generator=torch.Generator().manual_seed(0)).to(device)


def masks(device: torch.device | str) -> dict[str, Tensor]:
    """A document that begins in the middle, and padding at the end and between."""
    reset, pad = (torch.zeros(2, T, dtype=torch.bool) for _ in range(2))
    reset[0, 5] = pad[1, 3] = pad[1, -2:] = True
    return {"reset_BT": reset.to(device), "pad_BT": pad.to(device)}


def equal(found: Tensor, wanted: Tensor) -> None:
    assert found.device == AWAY != wanted.device
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-9, atol=1e-9)


def test_the_device_that_is_none_refuses_what_a_gpu_refuses():
    x, here = torch.ones(3), torch.ones(3, device="cpu")
    assert isinstance(x, Away) and x.device == AWAY and type(here) is Tensor
    for call in (lambda: x + here, lambda: torch.cat([here, x]), lambda: torch.where(here > 0, x, x)):
        with pytest.raises(RuntimeError, match="same device"):
            call()
    with pytest.raises(RuntimeError, match="generator"):
        torch.nn.init.normal_(x, generator=torch.Generator())
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    assert (x + here.sum()).sum() == 12 and x[here.long()].shape == (
        3,
    )  # a number, and an index, may be there
    assert type(x.cpu()) is Tensor and (x.to("cpu") + here).tolist() == [2, 2, 2]
    assert torch.zeros_like(x, requires_grad=True).to("cpu").requires_grad


@every_model
def test_a_model_says_and_learns_on_a_device_what_it_does_on_the_cpu(config):
    outputs = []
    for model in (pair_ := pair(config)):
        out = model(ids(model.device), targets=ids(model.device), **masks(model.device))
        out.loss.backward()
        outputs.append(out)
    here, there = outputs
    assert there.loss.device == AWAY
    equal(there.logits.detach(), here.logits.detach())
    wanted = dict(pair_[0].named_parameters())
    for name, weight in pair_[1].named_parameters():
        assert (weight.grad is None) == (wanted[name].grad is None), name
        if weight.grad is not None:
            equal(weight.grad, wanted[name].grad)


@every_model
def test_chunks_steps_and_moved_rows_go_on_as_on_the_cpu(config):
    logits = []
    for model in pair(config):
        text, where = ids(model.device), model.device
        with torch.inference_mode():
            out = model(text[:, :5], **{name: mask[:, :5] for name, mask in masks(where).items()})
            parts, state = [out.logits], out.state
            for t in range(5, 8):
                out = model(text[:, t : t + 1], state, consume_state=t > 5)
                parts, state = [*parts, out.logits], out.state.select([1, 0])
            state = state.put(0, state.take(1)).to("cpu").to(where).fork()
            out = model(text[:, 8:], state, **{name: mask[:, 8:] for name, mask in masks(where).items()})
        logits.append(torch.cat([*parts, out.logits], 1))
    equal(logits[1], logits[0])


@pytest.mark.parametrize("design", ["perspective2", "transformer", "rwkv7", "drm"])
def test_a_state_saved_on_one_device_goes_on_on_the_other(design, tmp_path):
    models = pair(DESIGNS[design])
    for model, other in (models, models[::-1]):
        with torch.inference_mode():
            state = model(ids(model.device)).state
            wanted = model(ids(model.device), state.fork()).logits
            perspectron.save_state(tmp_path / "a.state", state, model)
            loaded = perspectron.load_state(tmp_path / "a.state", other)
            assert all(
                leaf.device.type == "cpu" for leaf in pytree.tree_leaves(loaded) if isinstance(leaf, Tensor)
            )
            found = other(ids(other.device), loaded.to(other.device)).logits
        torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=1e-9, atol=1e-9)


class Letters:
    """A tokenizer of one letter an id."""

    vocab_size, specials = V, OURS

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % (V - 1) + 1 for letter in text]

    def token_bytes(self, id: int) -> bytes:
        return chr(48 + id).encode()


PROMPTS = ["one", "a longer prompt than a chunk", "x"]


@pytest.mark.parametrize("design", ["perspective2", "transformer", "rwkv7", "gdn", "perspective-experts"])
def test_rows_draw_the_tokens_on_a_device_that_they_draw_on_the_cpu(design):
    sampling = SamplingConfig(temperature=1.1, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=2)
    asked = design == "perspective-experts"
    said = []
    for model in pair(DESIGNS[design]):
        hooks = [Perspectives(model, PerspectivesConfig(every=1))] if asked else []
        settings = {"max_tokens": 8, "sampling": sampling, "chunk": 8, "hooks": hooks}
        said.append(generate(model, Letters(), PROMPTS, **settings).ids)
    assert said[0] == said[1] and len(said[0]) == 3


@pytest.mark.parametrize("design", ["perspective2", "transformer"])
def test_a_session_is_kept_forked_and_goes_on_on_the_other_device(design, tmp_path):
    here, there = pair(DESIGNS[design])
    greedy = SamplingConfig(temperature=0)
    wanted = Session(here, Letters(), chunk=8).read(PROMPTS[1]).say(6, sampling=greedy)
    for model, other in ((here, there), (there, here), (there, there)):
        session = Session(model, Letters(), chunk=8).read(PROMPTS[1])
        assert session.fork().say(6, sampling=greedy) == wanted
        session.save(tmp_path / model.device.type)
        again = Session.load(tmp_path / model.device.type, other, Letters())
        assert again.say(6, sampling=greedy) == wanted


def test_a_safe_set_holds_states_on_a_device_as_on_the_cpu():
    draw = torch.Generator().manual_seed(0)
    normal_HD, h_ND = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (20, 30))
    found = []
    for where in ("cpu", AWAY):
        offset_H, at_D = torch.full((20,), 0.5, dtype=torch.float64), torch.zeros(8)
        made = faces(normal_HD.to(where), offset_H.to(where), at_D.to(where))
        found.append(project(2 * h_ND.to(where), made)[0])
    equal(found[1], found[0])


@pytest.mark.parametrize("design", ["perspective2", "transformer"])
def test_training_with_dropout_has_the_same_zeros_on_a_device(design):
    losses = []
    for model in pair(dataclasses.replace(DESIGNS[design], dropout=0.3)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model.set_step(step)
            loss = model(ids(model.device), targets=ids(model.device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    equal(losses[1], losses[0])
