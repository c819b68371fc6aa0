"""Caches that are shared until they are written, beside copies."""

import dataclasses
import random

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import forward_ad

import perspectron
from perspectron.decode.held import caches
from perspectron.decode.kept import bytes_of
from perspectron.decode.steps import stepped, steps_of
from perspectron.designs.adr.mixer import ADRConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model.cache import LEAST_PIECE, Cache, with_caches
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState, save_state
from perspectron.util.errors import StateError

V = 67


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    """Texts of a few tokens are cut, as long ones are."""
    monkeypatch.setattr("perspectron.model.cache.LEAST_CUT", 0)
    monkeypatch.setattr("perspectron.model.cache.LEAST_JOINED", 0)


MIXERS = {
    "groups": (AttentionConfig(4, kv_heads=2, head_dim=10), AttentionConfig(2, head_dim=24)),
    "window": (AttentionConfig(2, window=40), AttentionConfig(2, cap=20.0)),
    "brief": (AttentionConfig(4, kv_heads=2, cache="bfloat16"),),
    "adr": (ADRConfig(2, gamma=0.9), AttentionConfig(2)),
}


def made(name: str) -> LanguageModel:
    blocks = tuple(BlockConfig(mixer, SwiGLUConfig(16)) for mixer in MIXERS[name])
    model = perspectron.build(ModelConfig(name, V, 32, blocks), 3).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn(x.shape, generator=draw))
    return model


@pytest.fixture(params=MIXERS, scope="module")
def model(request) -> LanguageModel:
    return made(request.param)


@pytest.fixture(scope="module")
def groups() -> LanguageModel:
    return made("groups")


def ids(count: int, seed: int, rows: int = 1) -> Tensor:
    return torch.randint(V, (rows, count), generator=torch.Generator().manual_seed(seed))


def copied(state: LMState) -> LMState:
    """A state that has all its memory for itself."""
    whole = with_caches(state, lambda cache: cache.whole().with_slots(cache.whole().slots))
    return pytree.tree_map_only(Tensor, Tensor.clone, whole)


def read(model: LanguageModel, state: LMState, part: Tensor, **how: bool) -> tuple[Tensor, LMState]:
    """Logits after a chunk, or a token by a recording, and the state."""
    if part.shape[1] == 1 and not how:
        _, logits, state = stepped(model, steps_of(model), part, state)
        return logits.clone(), state
    hidden, state, _ = model.hidden(part, state, **{"consume_state": True, **how})
    return model.head(hidden[:, -1]), state


def same(one: LMState, other: LMState) -> bool:
    pairs = zip(pytree.tree_leaves(one.filled()), pytree.tree_leaves(other.filled()), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_programs_of_forks_have_the_bits_of_copies(model, seed) -> None:
    """Texts are forked, read, drawn, taken together and dropped in any order; beside each is one that was copied."""
    draw = random.Random(seed)
    texts = [(model.init_state(1), model.init_state(1))]
    for turn in range(40):
        at = draw.randrange(len(texts))
        shared, plain = texts[at]
        deed = draw.choice(["fork", "fork", "read", "read", "draw", "draw", "alone", "keep", "drop", "batch"])
        if deed == "fork":
            texts.append((shared.fork(), copied(plain)))
        elif deed == "drop" and len(texts) > 1:
            del texts[at]
        elif deed in ("read", "draw", "alone", "keep"):
            parts = (
                ids(draw.choice([2, 20, 64, 130]), turn).split(1, 1) if deed == "draw" else [ids(70, turn)]
            )
            how = {"keep": {"consume_state": False}, "alone": {"consume_state": False}}.get(deed, {})
            parts = [ids(1, turn)] if deed == "alone" else parts
            for part in parts[:40]:
                (found, shared), (wanted, plain) = (
                    read(model, shared, part, **how),
                    read(model, plain, part, **how),
                )
                assert torch.equal(found, wanted), (turn, deed)
            texts[at] = shared, plain
        elif deed == "batch":
            rows = [draw.choice(texts) for _ in range(8)]
            rows = [row for row in rows if row[0].document_length_B.item() > 0]
            if len(rows) < 8:
                continue
            together = LMState.stack([row[0] for row in rows])
            beside = copied(LMState.stack([copied(row[1]) for row in rows]))
            for step in range(3):
                part = ids(1, step, 8)
                (found, together), (wanted, beside) = read(model, together, part), read(model, beside, part)
                assert torch.equal(found, wanted), (turn, deed)
            texts[0] = together.take(3), copied(beside.take(3))
        assert all(same(one, other) for one, other in texts), (turn, deed)
        del texts[6:]


@torch.inference_mode()
def test_short_texts_are_copied_as_they_grow(groups, monkeypatch) -> None:
    monkeypatch.undo()
    texts = [read(groups, groups.init_state(1), ids(count, 0))[1] for count in (300, 600, 2100)]
    grown = [read(groups, text.fork(), ids(70, 1))[1] for text in texts]
    assert [len(caches(text)[0].shared) for text in grown] == [0, 1, 1]
    batch = LMState.stack(grown)
    assert [len(row) > 0 for row in caches(batch)[0].shared] == [False, False, True]
    assert all(same(batch.take(n), text) for n, text in enumerate(grown))


@torch.inference_mode()
def test_a_fork_costs_no_memory_and_branches_what_they_add(groups) -> None:
    state = read(groups, groups.init_state(1), ids(640, 0))[1]
    alone = bytes_of(state)
    forks = [state.fork() for _ in range(50)]
    counts = sum(cache.length_B.nbytes for cache in caches(state))
    assert bytes_of(state, *forks) == alone + 50 * counts
    tails = [read(groups, fork, ids(32, n))[1] for n, fork in enumerate(forks)]
    token = alone // 640
    assert bytes_of(state, *tails) <= 1.1 * token * (640 + 50 * 32)
    drawn = [read(groups, state.fork(), ids(1, n))[1] for n in range(50)]
    assert bytes_of(state, *drawn) <= alone + 50 * 33 * token


@torch.inference_mode()
def test_a_fork_stays_when_the_original_starts_a_document(groups) -> None:
    """One token that starts a document is written over the first."""
    state = read(groups, groups.init_state(1), ids(100, 0))[1]
    fork, before = state.fork(), copied(state)
    groups.hidden(ids(1, 1), state, reset_BT=torch.tensor([[True]]), consume_state=True)
    assert same(fork, before)
    after = groups.hidden(ids(5, 1), fork.fork(), reset_BT=torch.eye(5, dtype=torch.bool)[2:3])[1]
    again = groups.hidden(ids(5, 1), before, reset_BT=torch.eye(5, dtype=torch.bool)[2:3])[1]
    assert same(after, again) and same(fork, before)


@torch.inference_mode()
def test_padding_behind_pieces_is_no_token(groups) -> None:
    state = read(groups, groups.init_state(1), ids(100, 0))[1]
    pad = torch.arange(20)[None] >= 13
    branch = read(groups, read(groups, state.fork(), ids(70, 1))[1].fork(), ids(90, 2))[1]
    plain, parts = copied(branch), (ids(20, 3), ids(1, 4), ids(80, 5))
    for part, hidden in zip(parts, (pad, None, None), strict=True):
        branch = groups.hidden(part, branch.fork(), pad_BT=hidden, consume_state=True)[1]
        plain = groups.hidden(part, plain, pad_BT=hidden, consume_state=True)[1]
        assert same(branch, plain)


@torch.inference_mode()
def test_rows_of_pieces_are_selected_stacked_and_put(groups) -> None:
    begun = read(groups, groups.init_state(1), ids(130, 0))[1]
    rows = [read(groups, begun.fork(), ids(10 * n + 70, n))[1] for n in range(3)]
    rows.append(read(groups, groups.init_state(1), ids(9, 9))[1])
    wanted = [copied(row) for row in rows]
    batch = LMState.stack(rows)
    assert bytes_of(batch, *rows) < bytes_of(*wanted)
    assert all(same(batch.take(n), row) for n, row in enumerate(wanted))
    assert same(batch.select([3, 1, 1]), copied(LMState.stack([wanted[3], wanted[1], wanted[1]])))
    assert same(batch.put(1, rows[3]).take(1), wanted[3]) and same(batch.take(1), wanted[1])
    pad = torch.arange(12)[None] >= torch.tensor([[12], [3], [1], [7]])
    found = groups.hidden(ids(12, 1, 4), batch.fork(), pad_BT=pad)[:2]
    plain = groups.hidden(ids(12, 1, 4), copied(batch), pad_BT=pad)[:2]
    assert torch.equal(found[0], plain[0]) and same(found[1], plain[1])
    assert all(same(batch.take(n), row) for n, row in enumerate(wanted))


@torch.inference_mode()
def test_a_state_of_pieces_is_saved_and_gives_its_spans(groups, tmp_path) -> None:
    state = read(groups, groups.init_state(1), ids(100, 0))[1]
    for n in range(4):
        state = read(groups, state.fork(), ids(70, n))[1]
    cache = caches(state)[0]
    assert len(cache.shared[0]) >= 3
    perspectron.save_state(tmp_path / "pieces", state, groups)
    perspectron.save_state(tmp_path / "whole", copied(state), groups)
    assert (tmp_path / "pieces").stat().st_size == (tmp_path / "whole").stat().st_size
    assert same(perspectron.load_state(tmp_path / "pieces", groups), state)
    whole = cache.whole()
    for start, stop in ((0, 380), (0, 100), (90, 110), (150, 151), (370, 380), (5, 5)):
        pairs = zip(cache.span(start, stop), (whole.k_BHSK, whole.v_BHSV), strict=True)
        assert all(torch.equal(found, x[:, :, start:stop]) for found, x in pairs)
    moved = state.to("cpu")
    assert same(moved, state) and bytes_of(moved, state) == bytes_of(state)


@torch.inference_mode()
def test_short_pieces_are_copied_rather_than_strung_together(groups) -> None:
    state = read(groups, groups.init_state(1), ids(200, 0))[1]
    kept = list[LMState]()
    for n in range(60):
        kept.append(state)
        state = read(groups, state.fork(), ids(5, n))[1]
    pieces = caches(state)[0].shared[0]
    assert len(pieces) <= 1 + 300 // LEAST_PIECE
    assert all(piece.tokens >= LEAST_PIECE for piece in pieces)


def test_gradients_go_through_forks(groups) -> None:
    """A fork of a state that a graph made is part of the graph, and what goes on elsewhere does not disturb it."""
    groups.requires_grad_(True)
    state = groups.hidden(ids(100, 0), groups.init_state(1))[1]
    grads = []
    for forked in (state.fork(), state):
        loss = groups.head(groups.hidden(ids(6, 1), forked)[0]).square().sum()
        grads.append(torch.autograd.grad(loss, [*groups.parameters()], allow_unused=True, retain_graph=True))
    assert all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(*grads, strict=True)
    )
    with torch.no_grad():
        begun = groups.hidden(ids(100, 0), groups.init_state(1))[1]
        fork = begun.fork()
    loss = groups.head(groups.hidden(ids(6, 1), fork)[0]).square().sum()
    with torch.no_grad():
        groups.hidden(ids(30, 2), begun, consume_state=True)
    loss.backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in groups.parameters())
    groups.zero_grad()


def test_forward_derivatives_go_through_forks(groups) -> None:
    state = groups.hidden(ids(100, 0), groups.init_state(1))[1].detach()
    with forward_ad.dual_level():

        def dual(cache: Cache) -> Cache:
            return dataclasses.replace(
                cache, k_BHSK=forward_ad.make_dual(cache.k_BHSK, torch.ones_like(cache.k_BHSK))
            )

        state = with_caches(state, dual)
        found = [
            forward_ad.unpack_dual(groups.hidden(ids(1, 1), text)[0]).tangent
            for text in (state, state.fork())
        ]
        assert found[0] is not None and found[1] is not None and torch.equal(*found)


@torch.inference_mode()
def test_what_is_not_finite_ends_at_a_reset_of_rows_in_pieces(groups) -> None:
    rows = [read(groups, groups.init_state(1), ids(130, n))[1].fork() for n in range(2)]
    rows = [read(groups, row, ids(70, 2))[1] for row in rows]
    together = LMState.stack(rows)
    pieces = caches(together)[0].shared
    assert all(len(row) == 2 for row in pieces)
    pieces[1][0].k_1HNK[0, 0, 3] = torch.nan
    beside, reset_BT = copied(together), torch.tensor([[False, False, True, False]] * 2)
    found, wanted = (groups(ids(4, 3, 2), state, reset_BT=reset_BT) for state in (together, beside))
    assert found.logits.isfinite().all(2).tolist() == [[True] * 4, [False, False, True, True]]
    assert torch.equal(found.logits.nan_to_num(), wanted.logits.nan_to_num())
    assert same(found.state, wanted.state)


@torch.inference_mode()
def test_a_batch_of_pieces_is_saved_without_a_copy_of_the_whole(groups, tmp_path, monkeypatch) -> None:
    rows = [read(groups, groups.init_state(1), ids(count, count))[1] for count in (2100, 2300)]
    together = LMState.stack([read(groups, row.fork(), ids(70, 1))[1] for row in rows])
    assert all(len(row) == 2 for cache in caches(together) for row in cache.shared)
    save_state(tmp_path / "whole", together.filled(), groups)
    monkeypatch.setattr(Cache, "whole", None)
    save_state(tmp_path / "pieces", together, groups)
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


@torch.inference_mode()
def test_memory_that_others_see_is_not_taken_for_a_fork(groups) -> None:
    old = read(groups, groups.init_state(1), ids(100, 0))[1]
    seen, before = old.fork(), copied(old)
    empty = groups.init_state(1, capacity=100).fork(into=old)
    assert same(seen, before) and caches(empty)[0].used == 0


@torch.inference_mode()
def test_counts_of_a_cache_must_fit_its_slots() -> None:
    cache = Cache(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), torch.tensor([4]), 4)
    cache.room()
    with pytest.raises(StateError):
        dataclasses.replace(cache, used=3).room()
