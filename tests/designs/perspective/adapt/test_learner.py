"""Learning from a text: what is the same without it, the guard, what is saved, and bad input."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import perspectron.designs.perspective.adapt.learner
from perspectron.data.specials import Specials
from perspectron.decode.conversation import Conversation
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective.adapt import (
    AdaptConfig,
    Adapter,
    AdapterConfig,
    Adapting,
    Learner,
    merge,
)
from perspectron.designs.perspective.adapt.gradient import Piece, losses
from perspectron.designs.perspective.adapt.learner import PATIENCE
from perspectron.designs.perspective.commands.adapt import unadapted
from perspectron.designs.perspective.pdr import Adapted
from perspectron.model.block import of_mixer
from perspectron.model.model import LanguageModel
from perspectron.quant.convert import convert
from perspectron.train.weights import fill
from perspectron.util.errors import ConfigError, StateError
from tests.designs.perspective.adapt.conftest import make, text
from tests.refusals import refused


def learned(model, tokens=120, **options) -> tuple[Adapter, Learner]:
    adapter = Adapter(model, AdapterConfig(rank=2))
    learner = Learner(model, adapter, AdaptConfig(**{"every": 20, "lr": 0.02, "guard": 0} | options))
    learner.read(text(tokens))
    return adapter, learner


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


def test_an_adapter_of_zeros_changes_no_bit(model):
    ids = torch.tensor([text(30)])
    with torch.no_grad():
        plain = model(ids)
        under = model(ids, Adapter(model).attach(model.init_state(1)))
        traced = model(ids, Adapter(model).attach(model.init_state(1), traces=True))
    for out in (under, traced):
        assert torch.equal(out.logits, plain.logits)
        one, other = (of_mixer(each.state.layers[1]).memory_BDR for each in (out, plain))
        assert torch.equal(one, other)


def test_every_token_is_scored_before_it_is_learned_from_and_learning_helps(model):
    adapter, _ = learned(model, 400)
    assert adapter.counters.updates == 20 and adapter.counters.tokens == 400
    fresh = Learner(model, Adapter(model), AdaptConfig(every=20))
    first = fresh.read(text(20)).nats
    with torch.no_grad():
        plain, _ = losses(model, Piece([0, *text(20)], model.init_state(1), fresh=True))
    torch.testing.assert_close(first, plain[0], rtol=0, atol=1e-12)  # nothing was learned yet
    made, ids = merge(model, adapter), text(400)
    with torch.no_grad():
        before, after = (
            losses(each, Piece([0, *ids], each.init_state(1), fresh=True))[0].mean() for each in (model, made)
        )
    assert after < before


def test_a_merged_model_reads_as_under_the_adapter(model):
    adapter, _ = learned(model)
    ids = torch.tensor([text(40, 3)])
    with torch.no_grad():
        under = model(ids, adapter.attach(model.init_state(1))).logits
        torch.testing.assert_close(merge(model, adapter)(ids).logits, under, rtol=0, atol=1e-10)


def test_an_adapter_is_merged_into_matrices_of_16_bits(model):
    with torch.device("meta"):
        kept = LanguageModel(model.config).requires_grad_(False)
    fill(kept, {name: x.bfloat16() for name, x in model.state_dict().items()}, Path())
    adapter, _ = learned(kept)
    before, after = (x.state_dict() for x in (kept, merge(kept, adapter)))
    assert {name for name in before if not torch.equal(before[name], after[name])}
    assert all(before[name].dtype is after[name].dtype for name in before)


def test_saved_and_loaded_it_learns_on_as_if_nothing_had_been(model, tmp_path):
    _, whole = learned(model, 80)
    adapter, learner = learned(model, 40)
    talk = learner.conversation(traces=True)
    bare = Conversation(adapter.detach(talk.state), talk.pending, talk.recent, talk.drawn)
    assert not any(isinstance(of_mixer(layer), Adapted) for layer in bare.state.layers)
    adapter.save(tmp_path / "a")
    bare.save(tmp_path / "s", model)
    again = Adapter.load(tmp_path / "a", model)
    on = Learner(model, again, learner.config, Conversation.load(tmp_path / "s", model))
    on.read(text(80)[40:])
    for i, up in whole.adapter.up.items():
        torch.testing.assert_close(again.up[i], up, rtol=0, atol=1e-12)
        one, other = (of_mixer(each.state.layers[i]) for each in (on, whole))
        torch.testing.assert_close(one.trace_BrDR, other.trace_BrDR, rtol=0, atol=1e-12)
    assert again.counters == whole.adapter.counters


def test_of_a_long_text_the_newest_tokens_are_kept_and_a_conversation_keeps_its_own_number(model):
    _, learner = learned(model, 300, seconds=0.0)
    assert learner.talk.recent[0] == text(300)[-SamplingConfig.repetition_window :]
    talk = learner.conversation()
    begun = Conversation(Adapter(model).detach(talk.state), [[7]], [list(range(1, 300))], [0])
    again = Learner(model, Adapter(model), learner.config, begun)
    again.read([0, 5])
    assert again.talk.recent[0] == [*range(2, 300), 5]


def test_weights_that_are_worse_than_none_go_back_to_the_last_accepted_bits(model, monkeypatch):
    adapter, learner = learned(model, 60)
    learner.accepted = learner._weights()
    learner.read(text(40))
    wanted = learner.accepted

    def better(model, piece, state):
        """Without the adapter every token loses a tenth less than it was scored."""
        nats_T = torch.cat([nats_T for _, nats_T in learner.past])[-(len(piece.ids) - 1) :]
        return nats_T[None] - 0.1, state

    assert not same(adapter.up, wanted[0])
    with monkeypatch.context() as patch:
        patch.setattr(perspectron.designs.perspective.adapt.learner, "losses", better)
        for _ in range(PATIENCE):
            assert not learner.frozen
            assert not learner._stands()
    assert all(same(one, other) for one, other in zip(learner._weights(), wanted, strict=True))
    assert adapter.counters.rollbacks == PATIENCE and learner.frozen
    assert learner.read(text(60)).updates == 0
    assert learner.read([0, *text(60)]).updates > 0  # the next document
    assert learner._stands()
    assert learner.streak == 0  # learned weights are not worse
    assert same(adapter.up, learner.accepted[0])


def test_only_weights_under_which_tokens_were_scored_are_accepted(model):
    _, learner = learned(model, 20, guard=1)
    scored = learner._weights()
    learner.read(text(40)[20:])
    assert all(same(one, other) for one, other in zip(learner.accepted, scored, strict=True))
    assert not same(learner.adapter.up, scored[0])  # the step came after it


def test_a_guard_that_finds_weights_worse_makes_no_step(model, monkeypatch):
    adapter, learner = learned(model, 40, guard=3)
    with monkeypatch.context() as patch:
        patch.setattr(
            perspectron.designs.perspective.adapt.learner,
            "losses",
            lambda model, piece, state: (torch.zeros(1, len(piece.ids) - 1), state),
        )
        read, learner.past = learner.past.copy(), learner.past
        learner.since = 20
        learner.gradient = {i: torch.ones_like(up) for i, up in adapter.up.items()}
        learner._update(finite=True)
    assert len(read) == 2 and adapter.counters.rollbacks == 1 and adapter.counters.updates == 2
    assert all(same(one, other) for one, other in zip(learner._weights(), learner.accepted, strict=True))


@pytest.mark.parametrize("estimator", ["jvp", "backprop"])
def test_what_is_learned_does_not_depend_on_how_a_text_is_cut(model, estimator):
    options = {"estimator": estimator, "window": 20, "directions": 4, "subspace": 16, "guard": 2}
    whole, _ = learned(model, 80, **options)
    adapter = Adapter(model, AdapterConfig(rank=2))
    learner = Learner(model, adapter, AdaptConfig(every=20, lr=0.02, **options))
    for first, last in ((0, 7), (7, 8), (8, 39), (39, 40), (40, 73), (73, 80)):
        learner.read(text(80)[first:last])
    for i, up in whole.up.items():
        torch.testing.assert_close(adapter.up[i], up, rtol=0, atol=1e-9)
    assert adapter.counters == whole.counters


def test_under_autocast_traces_keep_their_precision(tmp_path):
    model = make(layers=2, mixers="pdr").float()
    with torch.autocast("cpu", torch.bfloat16):
        adapter, learner = learned(model, 60)
    adapter.detach(learner.state)
    assert all(trace.dtype == torch.float32 for trace in adapter.trace.values())
    adapter.save(tmp_path / "a")
    Adapter.load(tmp_path / "a", model)


@pytest.mark.parametrize("estimator", ["trace", "jvp", "backprop"])
def test_a_loss_that_is_not_finite_teaches_nothing_and_leaves_the_state(monkeypatch, estimator):
    model = make(layers=2, mixers="pdr")
    _, learner = learned(model, 40, estimator=estimator, directions=2, subspace=16)
    up, state = learner._weights(), learner.state
    with monkeypatch.context() as patch:
        patch.setattr(model, "head", lambda hidden: model.embedding.logits(hidden) * math.nan)
        assert learner.read(text(20)).skipped == 1
        assert learner.read(text(5)).skipped == 0  # its turn is not over
    assert torch.equal(learner.state.layers[0].memory_BDR, state.layers[0].memory_BDR)
    assert not learner.past  # the next tokens do not follow those before
    assert (report := learner.read(text(15))).updates == 0 and report.skipped == 1
    assert all(same(one, other) for one, other in zip(learner._weights(), up, strict=True))
    assert learner.read(text(20)).updates == 1


@pytest.mark.parametrize("estimator", ["jvp", "backprop"])
def test_other_estimators_learn_too(model, estimator):
    adapter, _ = learned(model, 60, estimator=estimator, window=40, directions=2, subspace=16)
    assert adapter.counters.updates == 3
    assert max(float(up.abs().max()) for up in adapter.up.values()) > 0


@pytest.mark.parametrize(
    ("special", "whole", "first"),
    [
        (Specials((0,), frozenset((0,)), None, 0), False, [0, 70]),
        (Specials((2, 3)), False, [2, 3, 70]),
        (Specials((2, 3)), True, [70, 80]),
        (Specials(stops=frozenset((1,)), end=1), False, [70, 80]),
        (Specials(), False, [70, 80]),
    ],
    ids=["ours", "prefix", "whole", "end", "none"],
)
@pytest.mark.parametrize("learns", [True, False])
def test_a_row_is_read_from_its_own_first_token(tokenizer, monkeypatch, special, whole, first, learns):
    model, read, foreign = make(2).float(), list[list[int]](), copy.copy(tokenizer)
    foreign.specials = special
    piece = Learner._piece

    def seen(self: Learner, ids: list[int]) -> Tensor:
        read.append(ids)
        return piece(self, ids)

    monkeypatch.setattr(Learner, "_piece", seen)
    rows, ids = Rows(model, foreign), [70, 80, 90, 100, 110]
    hook = Adapting(model, None, learns=learns, saves=False)
    row = rows.add(ids, whole=whole, max_tokens=2, hooks=[hook])
    whole_text = ids if whole else [*special.prefix, *ids]
    if learns:
        assert read[0][: len(first)] == first
        assert [*read[0], *(id for part in read[1:] for id in part[1:])] == whole_text
    assert rows.unread[row] == (1 if learns else len(whole_text))
    assert hook.adapter is not None and (hook.adapter.counters.updates > 0) == learns
    rows.step()
    length_1 = rows.conversation(row).state.document_length_B
    assert length_1 is not None and length_1.tolist() == [len(whole_text)]


def test_a_trained_memory_is_where_a_row_begins(tokenizer):
    """The token that begins a document does not reset what stands before it."""
    model = make(2).float()
    state = Learner(model, Adapter(model)).conversation().state
    memory = of_mixer(state.layers[0]).memory_BDR
    memory.fill_(1.0)
    begun, found = Conversation(Adapter(model).detach(state), [[0]], [[]], [0]), []
    for hooks in ([Adapting(model, None, learns=True, saves=False)], []):
        rows = Rows(model, tokenizer, hooks=hooks)
        row = rows.add([70, 80, 90], max_tokens=2, conversation=begun.fork(), fresh=True)
        rows.step()
        found.append(of_mixer(rows.conversation(row).state.layers[0]).memory_BDR)
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


def test_without_a_prefix_or_an_end_the_first_token_is_not_scored(model):
    ids, special = text(50), Specials()
    learner = Learner(model, Adapter(model), AdaptConfig(every=20, lr=0.02), special=special)
    nats = torch.cat([learner.read(ids[:1]).nats, learner.read(ids[1:]).nats])
    plain = unadapted(model, ids, special)
    assert len(nats) == len(plain) == 49 and learner.adapter.counters.updates == 2
    torch.testing.assert_close(nats[:20], plain[:20], rtol=0, atol=1e-9)


def test_no_time_is_no_learning(model):
    adapter, _ = learned(model, 60, seconds=0.0)
    assert adapter.counters.updates == 0


def test_what_cannot_be_adapted_is_told_in_one_line(model, tmp_path):
    packed = make(layers=2, mixers="pdr").float()
    convert(packed)
    with refused(ConfigError):
        Adapter(packed)
    with refused(ConfigError):
        Adapter(make(layers=1, mixers="attention"))
    other = make(layers=2)
    with refused(ConfigError, "layers", 3):
        Adapter(model, AdapterConfig(layers=(3,)))
    with refused(ConfigError, "rank", 0):
        AdapterConfig(rank=0)
    adapter, _ = learned(model, 40)
    adapter.save(tmp_path / "a")
    with refused(StateError, tmp_path / "a"):
        Adapter.load(tmp_path / "a", other)
    with refused(StateError, "merge"):
        merge(other, adapter)
    data = bytearray((tmp_path / "a").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a").write_bytes(data)
    with refused(StateError, tmp_path / "a"):
        Adapter.load(tmp_path / "a", model)


def test_saved_traces_are_not_put_on_another_memory(model, tmp_path):
    """A text that begins anew has an empty memory, which depends on no adapter."""
    adapter, learner = learned(model)
    adapter.detach(learner.state)
    adapter.save(tmp_path / "adapter")
    loaded = Adapter.load(tmp_path / "adapter", model)
    assert max(trace.abs().max() for trace in loaded.trace.values()) > 0
    begun = Learner(model, loaded, AdaptConfig(every=20))
    traces = [
        of_mixer(layer).trace_BrDR for layer in begun.state.layers if isinstance(of_mixer(layer), Adapted)
    ]
    assert all(trace.abs().max() == 0 for trace in traces)
    assert same(begun.adapter.up, adapter.up)


def test_a_reset_ends_what_is_not_finite_and_keeps_the_adapter(model):
    adapter, learner = learned(model)
    state = adapter.attach(learner.talk.state)
    of_mixer(state.layers[0]).memory_BDR[0, 0, 0] = torch.nan
    reset = torch.tensor([[True, False, False]])
    with torch.no_grad():
        after = model(torch.tensor([text(3)]), state, reset_BT=reset).state
    after = of_mixer(after.layers[0])
    assert after.memory_BDR.isfinite().all()
    assert torch.equal(after.down_BrD[0], adapter.down[0]) and torch.equal(after.up_BDr[0], adapter.up[0])
