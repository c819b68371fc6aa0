"""Views of the experts on a streamed artifact: the base row's bits, few requests, and the same tokens."""

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode.generate import generate
from perspectron.decode.reading import read
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig
from perspectron.experts.router import Views
from perspectron.quant.convert import convert
from perspectron.stream.artifact import read_header, save_artifact
from perspectron.stream.engine import load_artifact

SIZES = {
    "d_model": 64, "hidden": 72, "rank": 32, "heads": 4, "kv_heads": 2, "window": 8, "torus": [3, 2],
    "vocab_size": 300, "ternary": True, "int8_activations": True,
}  # fmt: skip
ALWAYS = PerspectivesConfig(every=1, threshold=0.01)
GREEDY = SamplingConfig(temperature=0)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["the cat sat on the mat, and the dog sat on the log. " * 40], 300)


@pytest.fixture(scope="module", params=["straight_through", "soft"])
def folder(request, tmp_path_factory, tokenizer):
    model = perspectron.build(presets.get("perspective-tiny", **SIZES, gate=request.param))
    out = tmp_path_factory.mktemp("artifacts") / "tiny"
    convert(model, "2bit")
    save_artifact(model, tokenizer, out)
    return out


def test_the_base_row_has_the_bits_of_the_modules(folder):
    model, _ = load_artifact(folder)
    ids = [[0, 7, 80, 41, 7, 9]] * 4
    with torch.inference_mode():
        plain, _ = read(model, ids[:1], model.init_state(1), fresh=[True], reset=0)
        views = Views(("nearest", "second", "antipode", "random"), (3,) * 4, torch.empty(0))
        seen, _ = read(model, ids, model.init_state(4), fresh=[True] * 4, reset=0, views=views)
        one = [
            read(
                model,
                ids[:1],
                model.init_state(1),
                fresh=[True],
                reset=0,
                views=Views((view,), (3,), torch.empty(0)),
            )[0]
            for view in views.view_B
        ]
    assert torch.equal(seen[:1], plain) and torch.equal(seen, torch.cat(one))
    assert len(torch.unique(seen, dim=0)) == 4


def test_a_look_asks_for_at_most_three_more_experts_a_routed_layer(folder):
    model, _ = load_artifact(folder)
    looked, asked = Perspectives(model, ALWAYS), []
    for ffn in model.routed:
        visit = ffn.visit

        def counted(experts, guesses, visit=visit):
            asked.append(len({expert for expert in experts if expert >= 0}))
            return visit(experts, guesses)

        ffn.visit = counted
    state = model.init_state(1)
    before = model.cache.counters.hits
    with torch.inference_mode():
        looked.others([[5]], looked.copies(state), fresh=[True], reset=0)
    assert len(asked) == len(model.routed) and max(asked) <= 3
    assert model.cache.counters.hits - before == sum(asked)


def test_streamed_it_says_what_it_says_in_memory(folder, tokenizer):
    made = []
    header = read_header(folder)
    for cache in (None, 4 * header.experts.shard_bytes):
        model, _ = load_artifact(folder, cache_bytes=cache)
        made.append(
            generate(
                model,
                tokenizer,
                ["the cat"],
                max_tokens=8,
                sampling=GREEDY,
                hooks=[Perspectives(model, ALWAYS)],
            )
        )
    assert made[0].ids == made[1].ids and made[0].verdicts == made[1].verdicts
    plain = generate(model, tokenizer, ["the cat"], max_tokens=8, sampling=GREEDY)
    never = PerspectivesConfig(every=1, threshold=1.0)
    watched = generate(
        model, tokenizer, ["the cat"], max_tokens=8, sampling=GREEDY, hooks=[Perspectives(model, never)]
    )
    assert watched.ids == plain.ids
    leaves = [torch.utils._pytree.tree_leaves(one.conversation.state) for one in (plain, watched)]
    assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True) if isinstance(a, torch.Tensor))
