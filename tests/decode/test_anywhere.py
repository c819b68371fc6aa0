"""Prompts that are cut anywhere: the same bits, and what texts share is read once."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode.anywhere import measured
from perspectron.decode.known import Known
from perspectron.decode.places import Path
from perspectron.decode.reading import CHUNK, read_all, whole
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.model.ffn import MLPConfig, SwiGLUConfig
from perspectron.model.model import LanguageModel, build
from perspectron.native import wanted
from perspectron.quant.convert import convert
from tests.decode.conftest import VOCAB
from tests.decode.test_rows import equal, prompt_of
from tests.refusals import names

DESIGNS = [design for design in presets.DESIGNS if "[" not in design]
GREEDY = SamplingConfig(temperature=0)
CUT = {"mamba3", "lens", "lens2", "perspective-experts"}
"""Designs that promise nothing."""
needs_native = pytest.mark.skipif(not wanted(), reason="only native kernels promise it")


def drawn(design: str, *, layers: int = 2, seq_len: int = 512, vocab_size: int = VOCAB) -> LanguageModel:
    """A design with every parameter drawn."""
    sizes = {"vocab_size": vocab_size, "d_model": 32, "layers": layers, "seq_len": seq_len}
    model, draw = build(presets.small(design, **sizes), seed=5), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn(x.shape, generator=draw) * (x.shape[-1] ** -0.5 if x.ndim > 1 else 0.05))
    return model.eval()


def said(rows: Rows, prompts: list[list[int]]) -> list[tuple]:
    """What rows that are read and drawn from together draw, with the log-probabilities of all tokens; their states."""
    handles = [
        rows.add(ids, max_tokens=3, sampling=GREEDY, stream=0, logprobs=VOCAB, whole=True) for ids in prompts
    ]
    pieces = []
    while rows.active:
        pieces += rows.step()
    drawn = [[(p.id, p.logprob, p.likely) for p in pieces if p.row == handle] for handle in handles]
    spared = [rows.spared(handle) for handle in handles]
    return list(zip(drawn, [rows.remove(handle).state.filled() for handle in handles], spared, strict=True))


@needs_native
@pytest.mark.parametrize("design", DESIGNS)
def test_a_design_keeps_its_promise(design: str, caplog) -> None:
    """Anywhere in a long text, in float32 and bfloat16; one that gives none says so."""
    model = drawn(design, layers=4 if design == "perspective" else 2)
    assert (whole(model) > 0) == (design not in CUT)
    if not whole(model):
        assert not measured(model, CHUNK)
        [line] = caplog.messages
        assert names(line, model.config.name, CHUNK)
    for kind in (model, model.to(torch.bfloat16)) if whole(model) else ():
        assert measured(kind, CHUNK)
        ids, draw = prompt_of(300, 1), random.Random(design)
        cuts = [sorted({0, 128, 256, *draw.sample(range(1, 300), count), 300}) for count in (0, 9)]
        with torch.inference_mode():
            first, other = [read(kind, ids, cut) for cut in cuts]
        assert torch.equal(first, other)


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("hidden", [64, 99])
@pytest.mark.parametrize("network", ["swiglu", "mlp"])
@pytest.mark.parametrize("format", ["2bit", "int8", "4bit32", "8bit32"])
def test_packed_matrices_need_no_padding(format: str, network: str, hidden: int, threads: int) -> None:
    """But a single token, which mixers would take for a step."""
    model = drawn("transformer")
    ffn = SwiGLUConfig(hidden) if network == "swiglu" else MLPConfig(hidden)
    blocks = tuple(replace(block, ffn=ffn) for block in model.config.blocks)
    model = build(replace(model.config, blocks=blocks), seed=1).eval()
    assert whole(model) == 8
    convert(model, format)
    assert whole(model) == 1
    ids, draw = prompt_of(150, 1), random.Random(hidden)
    cuts = [[0, 128, 150], [0, *range(100, 131), 150], sorted({0, 128, *draw.sample(range(1, 150), 9), 150})]
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            first, *others = [read(model, ids, cut) for cut in cuts]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(first, other) for other in others)


def read(model: LanguageModel, ids: list[int], cuts: list[int]) -> torch.Tensor:
    """What the head reads after each token."""
    state, found = model.init_state(1), []
    for start, stop in pairwise(cuts):
        hidden, state = read_all(model, [ids[start:stop]], state, fresh=[start == 0], reset=None)
        found.append(hidden)
    return torch.cat(found, 1)


@pytest.mark.parametrize("design", DESIGNS)
def test_no_tree_of_texts_changes_a_bit(design: str, tokenizer: Tokenizer, tmp_path) -> None:
    """Texts that part anywhere, several at once, from memory, from the disk, and with room for few states."""
    model, draw, chunk = drawn(design), random.Random(design), 16
    texts = [prompt_of(50, 1)]
    for number in range(6):
        stem = draw.choice(texts)
        cut = draw.randint(1, len(stem))
        texts.append(stem[:cut] + prompt_of(50, 2 + number)[: draw.randint(0, 50 - cut)])
    expected = [said(Rows(model, tokenizer, chunk=chunk), [ids])[0] for ids in texts]
    size = model.init_state(1, capacity=64).nbytes + 400
    stores = [
        PrefixStore(model, chunk=chunk, folder=tmp_path),
        PrefixStore(model, chunk=chunk, folder=tmp_path, memory_bytes=0),
        PrefixStore(model, chunk=chunk, memory_bytes=3 * size),
    ]
    for store in stores:
        order = draw.sample(range(len(texts)), len(texts)) + draw.sample(range(len(texts)), 3)
        while order:
            batch = [order.pop() for _ in range(min(len(order), draw.randint(1, 3)))]
            rows = Rows(model, tokenizer, chunk=chunk, store=store)
            for at, got in zip(batch, said(rows, [texts[number] for number in batch]), strict=True):
                assert got[0] == expected[at][0]
                equal(got[1], expected[at][1])
        assert store.counters.tokens_saved > 0 and store.used_bytes <= store.memory_bytes
        assert store.counters.damaged == store.counters.failed == 0


@pytest.fixture(scope="module")
def gla() -> LanguageModel:
    return drawn("gla")


@needs_native
@pytest.mark.parametrize(("shared", "own"), [(1500, 700), (100, 20)])
def test_the_third_text_reads_nothing_of_what_it_shares(shared: int, own: int, gla, tokenizer) -> None:
    """The second learns where they part."""
    store, begin = PrefixStore(gla), prompt_of(shared, 1)
    spared = []
    for number in range(4):
        ids = [*begin, 1 + number, *prompt_of(own, 2 + number)[1:]]
        spared.append(said(Rows(gla, tokenizer, store=store), [ids])[0][2])
    assert spared == [0, shared // CHUNK * CHUNK, shared, shared]
    assert store.counters.tokens_saved == sum(spared)


@needs_native
def test_a_text_that_goes_on_reads_nothing_again(gla, tokenizer) -> None:
    """Whether it was asked as a prompt or read by a session."""
    store, text = PrefixStore(gla), [*tokenizer.specials.prefix, *prompt_of(1000, 1)]
    said(Rows(gla, tokenizer, store=store), [text[:77]])
    for start, end in ((77, 300), (300, 301), (301, 1000)):
        assert said(Rows(gla, tokenizer, store=store), [text[:end]])[0][2] == start
    session = Session(gla, tokenizer, store=store)
    before = store.counters.tokens_saved
    session.append(text[:301] + text[1:500], whole=True)
    for _ in session.remembering():
        pass
    assert store.counters.tokens_saved - before == 301
    assert said(Rows(gla, tokenizer, store=store), [session._ids[:]])[0][2] == 800 == len(session._ids)


@needs_native
def test_a_session_that_begins_inside_a_cell_goes_on_as_one_that_has_read_all(gla, tokenizer) -> None:
    store, text = PrefixStore(gla), prompt_of(420, 1)
    for end in (100, 200):
        said(Rows(gla, tokenizer, store=store), [[*tokenizer.specials.prefix, *text[:end]]])
    sessions = [Session(gla, tokenizer, store=which) for which in (store, None)]
    before = store.counters.tokens_saved
    for session in sessions:
        session.read(text[:300]).say(1, sampling=GREEDY)
        session.read(text[300:]).say(5, sampling=GREEDY)
    assert store.counters.tokens_saved - before == 200 + len(tokenizer.specials.prefix)
    assert sessions[0].tokens == sessions[1].tokens
    for token in (50, 190, 201, 299, 301, 425):
        pair = [session.at(token) for session in sessions]
        for session in pair:
            session.read([5]).say(2, sampling=GREEDY)
        assert pair[0].tokens == pair[1].tokens
        equal(pair[0]._state, pair[1]._state)


def test_known_texts_are_within_their_bytes_and_tell_partings_from_ends() -> None:
    def path(ids: list[int]) -> Path:
        return Path(b"", ids, 8, anywhere=True)

    known, text = Known(), list(range(30))
    assert known.add(path(text)) == 0
    assert known.add(path(text)) == known.add(path([*text, 40])) == 0, "one begins with the other"
    assert known.add(path([*text[:21], 50, 51])) == 21
    assert known.add(path([*text[:21], 50, 60])) == 22
    small = Known(most_bytes=3000)
    for number in range(100):
        small.add(path([number, *text]))
        assert 0 < small._used <= 3000


def test_a_place_in_a_cell_where_a_document_begins_serves_nobody() -> None:
    ids = [0, *range(1, 20), 0, *range(1, 30)]
    path = Path(b"", ids, 8, anywhere=True, reset=0)
    assert path.exact == 16
    assert [at for at in range(len(ids)) if path.serves(at)] == [*range(17), 24, 32, 40, 48]
    assert path.serves(len(ids))
