from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from perspectron.data import Shards, Tokenizer
from perspectron.data.loader import IGNORE, Batch, Loader, windows
from perspectron.data.shuffle import shuffle
from perspectron.util.errors import DataError
from tests.refusals import refused


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)


def assert_equal(ours: Batch, theirs: Batch) -> None:
    for field in ("ids_BT", "targets_BT", "reset_BT"):
        assert same(getattr(ours, field), getattr(theirs, field)), field


def rows(loader: Loader, count: int) -> list[bytes]:
    """The next `count` windows, each as its ids and last target."""
    found: list[bytes] = []
    while len(found) < count:
        batch = loader.next_batch()
        ids = torch.cat([batch.ids_BT, batch.targets_BT[:, -1:]], dim=1)
        found += [row.numpy().tobytes() for row in ids]
    assert len(found) == count, "ask for a multiple of the batch size"
    return found


def all_windows(shards: Shards, seq_len: int) -> list[bytes]:
    split = shards.split("train")
    whole = split.read(0, split.tokens)
    return [whole[i : i + seq_len + 1].tobytes() for i in range(0, split.tokens - seq_len, seq_len)]


@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_every_window_once_per_epoch_and_batches_straddle(shards: Shards, seq_len: int) -> None:
    expected = all_windows(shards, seq_len)
    loader = Loader(shards.split("train"), batch_size=3, seq_len=seq_len, seed=5)
    assert loader.windows == len(expected) == (shards.split("train").tokens - 1) // seq_len
    seen = rows(loader, 3 * len(expected))  # three epochs, and 3 need not divide one
    epochs = [seen[i : i + len(expected)] for i in range(0, len(seen), len(expected))]
    for epoch in epochs:
        assert Counter(epoch) == Counter(expected)
    assert epochs[0] != epochs[1] != epochs[2] != expected


def test_a_batch_larger_than_the_text_repeats_epochs(shards: Shards) -> None:
    split = shards.split("heldout")
    loader = Loader(split, batch_size=7, seq_len=split.tokens // 3 - 1, seed=0)
    assert loader.windows == 3
    counts = Counter(rows(loader, 21))
    assert set(counts.values()) == {7}


def test_order_follows_seed_and_epoch_alone(shards: Shards) -> None:
    split = shards.split("train")
    first = rows(Loader(split, batch_size=4, seq_len=16, seed=1), 40)
    torch.manual_seed(3)
    np.random.seed(3)
    assert rows(Loader(split, batch_size=8, seq_len=16, seed=1), 40) == first
    assert rows(Loader(split, batch_size=4, seq_len=16, seed=2), 40) != first


def test_using_the_loader_leaves_global_randomness_alone(shards: Shards) -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    Loader(shards.split("train"), batch_size=4, seq_len=16, seed=1).next_batch()
    assert (torch.rand(1), np.random.rand()) == expected


def test_batches_have_shape_type_and_next_tokens(shards: Shards) -> None:
    batch = Loader(shards.split("train"), batch_size=5, seq_len=32, seed=0).next_batch()
    assert batch.ids_BT.shape == batch.targets_BT.shape == (5, 32)
    assert batch.ids_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.ids_BT.is_contiguous() and batch.targets_BT.is_contiguous()
    assert torch.equal(batch.ids_BT[:, 1:], batch.targets_BT[:, :-1])
    assert batch.targets == 160


@pytest.mark.parametrize("taken", [0, 1, 20, 57])
def test_resuming_gives_the_same_batches(shards: Shards, taken: int) -> None:
    split = shards.split("train")
    loader = Loader(split, batch_size=4, seq_len=16, seed=9)
    for _ in range(taken):
        loader.next_batch()
    state = loader.state_dict()
    resumed = Loader(split, batch_size=4, seq_len=16, seed=9)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for _ in range(2 * loader.windows // 4):  # across at least one epoch's border
        assert_equal(resumed.next_batch(), loader.next_batch())
    assert loader.state_dict() == resumed.state_dict() != state


def test_resuming_at_an_epochs_end(shards: Shards) -> None:
    split = shards.split("train")
    loader = Loader(split, batch_size=1, seq_len=64, seed=9)
    rows(loader, loader.windows)
    resumed = Loader(split, batch_size=1, seq_len=64, seed=9)
    resumed.load_state_dict(loader.state_dict())
    assert_equal(resumed.next_batch(), loader.next_batch())
    assert (loader.epoch, loader.cursor) == (1, 1)


def test_a_state_of_other_data_is_refused(shards: Shards) -> None:
    loader = Loader(shards.split("train"), batch_size=4, seq_len=16, seed=9)
    loader.next_batch()
    state = loader.state_dict()
    for name, here in (("seed", 9), ("seq_len", 16), ("order", 2), ("windows", loader.windows)):
        with refused(DataError, name, state[name] + 1, here):
            loader.load_state_dict(state | {name: state[name] + 1})
    for change, named in [
        ({"epoch": -1}, ["epoch", -1]),
        ({"cursor": loader.windows + 1}, ["cursor", loader.windows + 1]),
        ({"cursor": -1}, ["cursor", -1]),
        ({"extra": 1}, ["extra"]),
    ]:
        with refused(DataError, *named):
            loader.load_state_dict(state | change)
    with refused(DataError):  # as many tokens of another text
        loader.load_state_dict(state | {"text": state["text"] + 1})
    loader.load_state_dict({name: value for name, value in state.items() if name != "text"})  # of before
    with refused(DataError, "cursor", "epoch"):
        loader.load_state_dict({})
    assert loader.state_dict() == state


def test_another_order_is_refused(shards: Shards) -> None:
    loader = Loader(shards.split("train"), batch_size=4, seq_len=16, seed=9)
    with refused(DataError, "order", 1, 2):
        loader.load_state_dict(loader.state_dict() | {"order": 1})


# Ranks


def together(
    split, world_size: int, state: dict[str, int] | None, batches: int
) -> tuple[list, dict[str, int]]:
    """The rows that all ranks read in order, and where each of them stands then."""
    loaders = [
        Loader(split, batch_size=12, seq_len=16, seed=9, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    found = []
    for loader in loaders if state else ():
        loader.load_state_dict(state)
    for _ in range(batches):
        parts = [loader.next_batch() for loader in loaders]
        assert all(part.ids_BT.shape == (12 // world_size, 16) for part in parts)
        assert all(part.targets == 12 // world_size * 16 for part in parts)
        found.append(
            [torch.cat([getattr(part, name) for part in parts]) for name in ("ids_BT", "targets_BT")]
        )
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return found, states[0]


@pytest.mark.parametrize("ranks", [(2, 2), (4, 3), (3, 4), (12, 1), (1, 12)], ids=str)
def test_ranks_read_together_what_one_reads_and_others_go_on(shards: Shards, ranks: tuple[int, int]) -> None:
    split = shards.split("train")
    half = Loader(split, batch_size=12, seq_len=16, seed=9).windows // 12 + 2  # over an epoch's end
    expected, end = together(split, 1, None, 2 * half)
    first, state = together(split, ranks[0], None, half)
    second, last = together(split, ranks[1], state, half)
    assert last == end
    for ours, theirs in zip(first + second, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_ranks_that_do_not_fit_are_refused(shards: Shards) -> None:
    split = shards.split("train")
    with refused(DataError, "batch_size", 8, 3):
        Loader(split, batch_size=8, seq_len=16, seed=0, rank=1, world_size=3)
    for rank in (-1, 2):
        with refused(DataError, "rank", rank, 2):
            Loader(split, batch_size=8, seq_len=16, seed=0, rank=rank, world_size=2)


# Resets


def expected_reset(shards: Shards, first: int, shape: tuple[int, ...], real: int) -> Tensor | None:
    """From the start positions: True where a document starts among the `real` ids from `first` on."""
    reset = np.zeros(shape, dtype=bool)
    starts = shards.split("train").starts
    reset.flat[starts[(starts >= first) & (starts < first + real)] - first] = True
    return torch.from_numpy(reset) if reset[:, 1:].any() else None


@pytest.mark.parametrize(("seq_len", "batch_size"), [(1, 4), (7, 1), (16, 2), (64, 3)])
def test_resets_mark_exactly_the_document_starts(shards: Shards, seq_len: int, batch_size: int) -> None:
    split = shards.split("train")
    first, kinds = 0, set()
    for batch in windows(split, seq_len=seq_len, batch_size=batch_size):
        reset = expected_reset(shards, first, batch.ids_BT.shape, batch.targets)
        assert same(batch.reset_BT, reset)
        kinds.add(reset is None)
        first += batch.targets
    assert kinds == ({True} if seq_len == 1 else {True, False})


def test_loader_marks_resets_too(shards: Shards) -> None:
    split = shards.split("train")
    loader = Loader(split, batch_size=1, seq_len=16, seed=0)
    seen = 0
    for window in shuffle(loader.windows, 0, 0)(np.arange(loader.windows)):
        reset = expected_reset(shards, int(window) * 16, (1, 16), 16)
        assert same(loader.next_batch().reset_BT, reset)
        seen += reset is not None
    assert seen > 10


# Windows in order


@pytest.mark.parametrize("limit", [None, 2, 3, 65, 1000, 10**9])
@pytest.mark.parametrize(("seq_len", "batch_size"), [(1, 1), (7, 3), (64, 4), (10**5, 2)])
def test_windows_hold_every_target_once(
    shards: Shards, tokenizer: Tokenizer, limit: int | None, seq_len: int, batch_size: int
) -> None:
    split = shards.split("train")
    whole = torch.from_numpy(split.read(0, min(limit or split.tokens, split.tokens)))
    batches = list(windows(split, seq_len=seq_len, batch_size=batch_size, limit_tokens=limit))
    assert all(batch.ids_BT.shape[1] == seq_len and batch.ids_BT.shape[0] <= batch_size for batch in batches)
    targets = torch.cat([batch.targets_BT.flatten() for batch in batches])
    ids = torch.cat([batch.ids_BT.flatten() for batch in batches])
    real = targets != IGNORE
    assert torch.equal(targets[real], whole[1:])
    assert torch.equal(ids[real], whole[:-1])
    assert real[: len(whole) - 1].all() and not ids[~real].any()
    assert len(targets) - len(whole) + 1 < seq_len, "padding fills one row at most"
    assert sum(batch.targets for batch in batches) == len(whole) - 1
    assert sum(batch.padding for batch in batches) == len(targets) - len(whole) + 1
    for batch in batches:
        pad_BT = batch.targets_BT == IGNORE
        assert torch.equal(batch.pad_BT, pad_BT) if pad_BT.any() else batch.pad_BT is None
    if len(whole) == split.tokens:
        assert tokenizer.byte_counts()[targets[real].numpy()].sum() == split.text_bytes


def test_a_spread_part_is_whole_windows_from_end_to_end(shards: Shards) -> None:
    split = shards.split("train")
    every = list(windows(split, seq_len=16, batch_size=1))
    limit = split.tokens // 3
    found = list(windows(split, seq_len=16, batch_size=3, limit_tokens=limit, spread=True))
    rows = torch.cat([batch.ids_BT for batch in found])
    assert len(rows) == limit // 16
    at = [-1]
    for row in rows:  # texts repeat: the next window that is this one
        at.append(next(i for i in range(at[-1] + 1, len(every)) if torch.equal(every[i].ids_BT[0], row)))
    at.pop(0)
    assert at[0] <= 2
    assert at[-1] > 0.8 * len(every)
    targets = torch.cat([batch.targets_BT for batch in found])
    assert torch.equal(targets, torch.cat([every[i].targets_BT for i in at]))
    whole = list(windows(split, seq_len=16, batch_size=1, limit_tokens=10**9, spread=True))
    assert [batch.targets for batch in whole] == [batch.targets for batch in every]


# Refusals


@pytest.mark.parametrize("field", ["batch_size", "seq_len"])
def test_numbers_out_of_bounds_are_refused_by_name(shards: Shards, field: str) -> None:
    numbers = {"batch_size": 2, "seq_len": 2} | {field: 0}
    with refused(DataError, field, 0):
        Loader(shards.split("train"), seed=0, **numbers)
    with refused(DataError, field, 0):
        windows(shards.split("train"), **numbers)


def test_a_seed_a_limit_and_a_length_out_of_bounds_are_refused_by_name(shards: Shards) -> None:
    split = shards.split("heldout")
    with refused(DataError, "seed", -1):
        Loader(split, batch_size=1, seq_len=1, seed=-1)
    with refused(DataError, "limit_tokens", 1):
        windows(split, seq_len=1, batch_size=1, limit_tokens=1)
    with refused(DataError, "heldout", split.tokens, split.tokens + 1):
        Loader(split, batch_size=1, seq_len=split.tokens, seed=0)
    assert Loader(split, batch_size=1, seq_len=split.tokens - 1, seed=0).windows == 1
