"""What was trained of a memory lives in the state: in every design that has a matrix memory, row by row, and every bit
of it is kept wherever a state goes."""

import logging

import pytest
import torch

from perspectron import native, presets
from perspectron.decode.processors import Hook, Step
from perspectron.decode.reading import whole
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.model.block import of_mixer
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState, load_state, save_state
from perspectron.model.tuned import KINDS, kinds_of, memory_field, parts
from perspectron.util.errors import ConfigError, NonFiniteError, StateError
from perspectron.util.tensors import load_tensors, save_tensors
from perspectron.util.terms import Term
from tests.decode.test_rows import GREEDY, equal, prompt_of
from tests.decode.test_steps import go_on, near, recorded, tokens
from tests.decode.test_store import CHUNK
from tests.decode.test_store import small as initialised
from tests.refusals import refused
from tests.states import sealed


def small(design: str) -> LanguageModel:
    """One of which no parameter is what it begins with."""
    model, generator = initialised(design), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


DESIGNS = [
    design
    for design in presets.DESIGNS
    if "[" not in design and any(mixer.decays() for block in small(design).blocks for mixer in block.mixers)
]
OTHERS = [design for design in presets.DESIGNS if "[" not in design and design not in DESIGNS]
SAMPLED = SamplingConfig(temperature=1.0, seed=3)


def trained(model: LanguageModel, kinds=KINDS, seed: int = 0, size: float = 0.5) -> LMState:
    """A state before any token whose parts are random."""
    state = model.init_state(1, tuned=kinds)
    generator = torch.Generator().manual_seed(seed)
    for part in parts(state):
        for kind in kinds:
            getattr(part, kind).normal_(0, size, generator=generator)
    return model.begun(state)


def test_the_designs_with_a_matrix_memory_are_those_that_are_known() -> None:
    known = ("perspective", "perspective2", "gla", "gdn", "gdn2", "kda", "rwkv7", "ssd", "hgrn2", "mamba3")
    assert set(known) <= set(DESIGNS)
    assert {"transformer", "adr", "lens2"} <= set(OTHERS)


@pytest.mark.parametrize("design", OTHERS)
def test_a_design_without_one_is_refused_by_name(design) -> None:
    model = small(design)
    with refused(ConfigError, model.config.name, "offset"):
        model.init_state(1, tuned=("offset",))


@pytest.mark.parametrize("design", DESIGNS)
def test_zeros_change_no_number_and_every_part_changes_what_is_read(design) -> None:
    model, ids = small(design), torch.tensor([prompt_of(19, 1)])
    with torch.inference_mode():
        plain = model(ids).logits
        assert torch.equal(model(ids, model.init_state(1, tuned=KINDS)).logits, plain)
        for kind in KINDS:
            assert not torch.equal(model(ids, trained(model, (kind,))).logits, plain), kind


@pytest.mark.parametrize("design", DESIGNS)
def test_an_offset_is_read_and_never_written(design) -> None:
    """The first layer, which nothing stands below, writes what it would have."""
    model, ids = small(design), torch.tensor([prompt_of(19, 1)])
    with torch.inference_mode():
        plain, state = (model(ids, start).state for start in (None, trained(model, ("offset",))))
    assert kinds_of(state) == ("offset",)
    at = next(i for i, layer in enumerate(state.layers) if parts(layer))
    own, other = of_mixer(state.layers[at]), of_mixer(plain.layers[at])
    assert at or torch.equal(getattr(own, memory_field(own)), getattr(other, memory_field(other)))


@pytest.mark.parametrize("design", ["perspective", "perspective2", "gla", "hgrn2"])
def test_an_offset_is_a_memory_that_decays_toward_it(design) -> None:
    """Where nothing fades, S + C read at each step is a memory that began as C."""
    model, ids = small(design), torch.tensor([prompt_of(19, 1)])
    offset, first = (trained(model, (kind, "gates")) for kind in ("offset", "first"))
    for state in (offset, first):
        for part in parts(state):
            part.gates.fill_(40.0)
    with torch.inference_mode():
        wanted = model(ids, model.begun(first)).logits
        torch.testing.assert_close(model(ids, offset).logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("design", DESIGNS)
def test_training_reads_what_decoding_reads_and_reaches_every_part(design) -> None:
    model, ids = small(design).requires_grad_(False), torch.tensor([prompt_of(40, 1), prompt_of(40, 2)])
    start = trained(model)
    for part in parts(start):
        for kind in KINDS:
            getattr(part, kind).requires_grad_()
    rows = start._map(lambda x: x.expand(2, *x.shape[1:]) if isinstance(x, torch.Tensor) else x)
    output = model(ids, model.begun(rows), targets=ids)
    output.loss.backward()
    for part in parts(start):
        for kind in KINDS:
            gradient = getattr(part, kind).grad
            assert gradient is not None and gradient.isfinite().all() and gradient.any(), kind
    with torch.inference_mode():
        state, said = model.begun(start.detach().select([0, 0])), []
        for t in range(ids.shape[1]):
            step = model(ids[:, t : t + 1], state, consume_state=True)
            state, said = step.state, [*said, step.logits]
    torch.testing.assert_close(torch.cat(said, 1), output.logits.detach(), rtol=1e-3, atol=1e-3)


def test_terms_of_the_loss_are_means_over_all_documents() -> None:
    model = initialised("perspective-experts")
    ids, reset, pad = torch.tensor([prompt_of(30, 1)]), *torch.zeros(2, 1, 30, dtype=torch.bool)
    reset[0, 7] = reset[0, 20] = pad[0, 26:] = True
    _, _, found = model.hidden(ids, model.init_state(1, tuned=("first",)), reset_BT=reset, pad_BT=pad)
    pieces = [model.hidden(ids[:, a:b])[2] for a, b in ((0, 7), (7, 20), (20, 26))]
    for name, term in found.items():
        alone = [piece[name] for piece in pieces]
        for get in (Term.mean, Term.penalty):
            wanted = sum(n / 26 * get(one) for n, one in zip((7, 13, 6), alone, strict=True))
            torch.testing.assert_close(get(term), wanted)


@pytest.mark.skipif(not native.available(), reason=str(native.reason()))
@pytest.mark.cpu_only("recordings are steps on the CPU")
@pytest.mark.parametrize("design", DESIGNS)
def test_a_recording_takes_it_as_a_part_of_the_state(design, caplog) -> None:
    model, ids = small(design), tokens(8, 12)
    rows = LMState.stack([trained(model, KINDS, seed) for seed in range(8)])
    with torch.inference_mode(), caplog.at_level(logging.WARNING, "perspectron"):
        before = model.hidden(torch.tensor([prompt_of(9, row) for row in range(8)]), rows)[1]
        found, after = go_on(recorded(model), model, ids, before.fork())
        wanted, modules = go_on(None, model, ids, before.fork())
    assert not caplog.records
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    near(after, modules)


@pytest.mark.parametrize("design", DESIGNS)
def test_rows_with_their_own_and_without_have_the_bits_they_have_alone(design, tokenizer, tmp_path) -> None:
    model = small(design)
    kinds = [
        KINDS,
        ("offset",),
        (),
        ("gates", "offset"),
        ("first",),
        (),
        ("offset",),
        ("gates",),
        ("offset",),
    ]
    starts = [trained(model, own, seed) if own else None for seed, own in enumerate(kinds)]

    def answers(together: bool, which: list[int]) -> list[list]:
        rows, handles = Rows(model, tokenizer, chunk=CHUNK, together=together), []
        for i in which:
            session = Session(model, tokenizer, chunk=CHUNK, start=starts[i])
            session.append(prompt_of(5 + 3 * (i % 3), i))
            handles.append(session.enter(rows, max_tokens=7 + i % 4, sampling=SAMPLED, stream=i, logprobs=3))
        pieces = []
        while rows.active:
            pieces += rows.step()
        return [
            [[(p.id, p.logprob, p.likely) for p in pieces if p.row == handle], rows.remove(handle).state]
            for handle in handles
        ]

    experts = (
        design == "perspective-experts"
    )  # which are computed for a batch in another order than for one row
    batch, alone = answers(True, [*range(len(kinds))]), [answers(experts, [i])[0] for i in range(len(kinds))]
    for (said, state), (own, state_alone), start in zip(batch, alone, starts, strict=True):
        assert said == own
        assert kinds_of(state) == (() if start is None else kinds_of(start))
        equal(state, state_alone)


@pytest.mark.parametrize("design", DESIGNS)
def test_no_way_there_changes_a_bit(design, tokenizer, tmp_path) -> None:
    """Read in pieces, forked, saved, loaded, gone back to any token; the text has a reset in it."""
    model, text = small(design), [*prompt_of(21, 1), 0, *prompt_of(9, 2)]
    start = trained(model)
    straight = Session(model, tokenizer, chunk=CHUNK, start=start).read(text)
    straight.say(6, sampling=SAMPLED)
    session = Session(model, tokenizer, chunk=CHUNK, start=start)
    session.save(tmp_path / "one")
    session = Session.load(tmp_path / "one", model, tokenizer, chunk=CHUNK)
    for piece in (text[:8], text[8:16], text[16:]):
        session.read(piece)
        session.save(tmp_path / "one")
        session = Session.load(tmp_path / "one", model, tokenizer, chunk=CHUNK).fork()
    session.say(6, sampling=SAMPLED)
    session = session.at(len(text)).at(3)
    session.read(text[3:])
    assert session.say(6, sampling=SAMPLED) and session.tokens == straight.tokens
    equal(session._state, straight._state)
    if whole(model):
        other = Session(model, tokenizer, chunk=CHUNK, start=start)
        for id in text:
            other.read([id])
            other.likely([1], 1)
        other.say(6, sampling=SAMPLED)
        assert other.tokens == straight.tokens


@pytest.mark.parametrize("design", DESIGNS)
def test_a_document_that_begins_has_the_offset_and_the_first_memory_again(design) -> None:
    model, text = small(design), prompt_of(11, 1)
    start = trained(model)
    with torch.inference_mode():
        wanted = model(torch.tensor([text]), start.fork())
        ids = torch.tensor([[*prompt_of(6, 3), *text], [*text, *prompt_of(6, 4)]])
        reset = torch.zeros_like(ids, dtype=torch.bool)
        reset[0, 6] = reset[1, 11] = True
        found = model(ids, start.select([0, 0]), reset_BT=reset)
    torch.testing.assert_close(found.logits[0, 6:], wanted.logits[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logits[1, :11], wanted.logits[0], rtol=1e-4, atol=1e-5)
    near(found.state.take(0), wanted.state)


@pytest.mark.parametrize("design", DESIGNS)
def test_a_first_memory_is_never_written_into(design) -> None:
    model = small(design)
    start = trained(model, ("first",))
    before = [part.first.clone() for part in parts(start)]
    with torch.inference_mode():
        for T in (8, 1):
            model(torch.tensor([prompt_of(T, 1)]), model.begun(start), consume_state=True)
    for part, first in zip(parts(start), before, strict=True):
        assert torch.equal(part.first, first)


def saved(model: LanguageModel, tokenizer, path, kinds=("offset",)):
    Session(model, tokenizer, start=trained(model, kinds)).save(path)
    return path


def changed(path, change) -> None:
    """The file with other tensors or metadata, sealed again."""
    header, tensors = load_tensors(path, StateError, "a state")
    change(header, tensors)
    save_tensors(path, tensors, sealed(header, tensors))


def test_a_file_of_a_stranger_is_refused_by_name(tokenizer, tmp_path) -> None:
    model, path = small("gla"), tmp_path / "one.state"
    name = "layers[0].mixer.offset" if hasattr(model.init_state(1).layers[0], "mixer") else "layers[0].offset"

    def wrong(change, *named) -> None:
        saved(model, tokenizer, path)
        changed(path, change)
        with refused(StateError, path, *named):
            load_state(path, model)

    wrong(lambda _, tensors: tensors[name].view(-1)[:1].fill_(torch.nan), "offset")
    wrong(lambda _, tensors: tensors[name].view(-1)[:1].fill_(torch.inf), "offset")
    wrong(lambda _, tensors: tensors.update({name: tensors[name][..., 1:].contiguous()}), name)
    wrong(lambda _, tensors: tensors.update({name: tensors[name].double()}), name)
    wrong(lambda header, _: header.update(tuned="offset,first"))
    wrong(lambda header, _: header.update(tuned="prefix"), "tuned", "prefix")
    wrong(lambda header, _: header.update(tuned="offset,offset"), "tuned")
    wrong(lambda header, _: header.pop("tuned"))
    saved(model, tokenizer, path)
    with refused(StateError, path):
        load_state(path, small("ssd"))
    other = small("transformer")
    changed(path, lambda header, _: header.update(model=other.fingerprint()))
    with refused(StateError, path, "offset"):
        load_state(path, other)


def test_an_offset_that_makes_logits_what_is_no_number_ends_its_row_alone(tokenizer) -> None:
    model = small("perspective2")
    starts = [trained(model, ("offset",), 1), trained(model, ("offset",), 2, size=1e38), None]

    def drawn(which) -> list:
        rows = Rows(model, tokenizer, chunk=CHUNK)
        for i in which:
            session = Session(model, tokenizer, chunk=CHUNK, start=starts[i])
            session.append(prompt_of(9, i))
            session.enter(rows, max_tokens=5, sampling=GREEDY, stream=i)
        pieces = []
        while rows.active:
            pieces += rows.step()
        return [[p for p in pieces if p.row == row] for row in range(len(which))]

    good, bad, plain = drawn([0, 1, 2])
    assert [piece.finished for piece in bad] == ["error"]
    assert isinstance(bad[0].error, NonFiniteError)
    assert [piece.id for piece in good] == [piece.id for piece in drawn([0])[0]]
    assert [piece.id for piece in plain] == [piece.id for piece in drawn([2])[0]]


def test_a_fork_shares_what_was_trained(tokenizer) -> None:
    model = small("gla")
    start = trained(model)
    for mine, other in zip(parts(start), parts(start.fork()), strict=True):
        assert mine.offset.data_ptr() == other.offset.data_ptr()
        assert mine.mixer.memory_BHKV.data_ptr() != other.mixer.memory_BHKV.data_ptr()


@pytest.mark.parametrize("design", ["perspective2", "gla"])
def test_a_fork_into_a_state_with_other_parts_is_a_copy(design) -> None:
    model = small(design)
    plain, own = model.init_state(2), LMState.stack([trained(model, seed=seed) for seed in (1, 2)])
    for state, into in ((own, plain), (plain, own)):
        equal(state.fork(into.fork()), state)


@pytest.mark.parametrize("together", [True, False])
def test_states_before_a_token_are_kept_while_rows_with_a_trained_memory_come_and_go(
    together, tokenizer
) -> None:
    model = small("perspective2")
    starts = [None, trained(model, ("offset",))]

    class Looking(Hook):
        keeps_before = True

        def logits(self, logits_NV: torch.Tensor, step: Step) -> torch.Tensor:
            assert not step.row.drawn or step.before.batch_size == 1
            return logits_NV

    def said(which: list[int]) -> list[list[int]]:
        rows, pieces = Rows(model, tokenizer, chunk=CHUNK, together=together, hooks=[Looking()]), []
        handles = []
        for i in which:
            session = Session(model, tokenizer, chunk=CHUNK, start=starts[i])
            session.append(prompt_of(9, i))
            handles.append(session.enter(rows, max_tokens=4, sampling=GREEDY, stream=i))
            pieces += [piece for _ in range(3) for piece in rows.step()]
        while rows.active:
            pieces += rows.step()
        assert not [piece.error for piece in pieces if piece.error is not None]
        return [[piece.id for piece in pieces if piece.row == handle] for handle in handles]

    (plain,), (own,) = said([0]), said([1])
    assert said([0, 1]) == [plain, own] and said([1, 0]) == [own, plain]


def test_a_penalty_counts_the_prompt_after_a_start_too(tokenizer) -> None:
    """However it was cut, and as without a start where that is zeros."""
    model, prompt = small("gla"), prompt_of(20, 1)
    penal = SamplingConfig(temperature=0, repetition_penalty=5.0)

    def said(start: LMState | None, chunk: int) -> list[int]:
        session = Session(model, tokenizer, chunk=chunk, start=start)
        session.append(prompt)
        session.say(8, sampling=penal)
        return session.tokens[len(prompt) :]

    zeros = model.init_state(1, tuned=("offset",))
    assert said(zeros, 32) == said(None, 32) == said(None, 8)
    start = trained(model, ("offset",))
    assert said(start, 32) == said(start, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_whose_part_is_zeros_keeps_it_in_a_file(kind, tmp_path) -> None:
    model = small("gla")
    state = trained(model, (kind,))
    getattr(parts(state)[0], kind).zero_()
    save_state(tmp_path / "a", state.take(0), model)
    equal(load_state(tmp_path / "a", model), state)
    assert kinds_of(model.init_state(2, tuned=(kind,)).take(0)) == ()
