"""The table-free permutation: exactly a bijection, the same everywhere, and well mixed."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perspectron.data.shuffle import shuffle


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return shuffle(n, seed, epoch)(np.arange(n))


@given(n=st.integers(1, 10000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
@settings(deadline=None, max_examples=100)
def test_it_is_a_bijection(n, seed, epoch):
    assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [*range(1, 130), 1023, 1024, 1025, 9999, 10000])
def test_it_is_a_bijection_of_small_and_square_sizes(n):
    assert np.array_equal(np.sort(whole(n, 3, 1)), np.arange(n))


@given(n=st.integers(1, 5000), data=st.data())
@settings(deadline=None, max_examples=50)
def test_any_part_of_it_is_that_of_the_whole(n, data):
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    assert np.array_equal(shuffle(n, 7, 2)(index), whole(n, 7, 2)[index])


@pytest.mark.parametrize("n", [10**9, 10**9 + 7, 2**40])
def test_a_large_one_takes_no_memory_and_repeats_nothing(n):
    """200,000 places of the permutation, all different and inside, as a bijection's are; uniform in 64 boxes."""
    tracemalloc.start()
    permute = shuffle(n, 5, 0)
    index = np.concatenate([np.arange(100_000), np.arange(n - 100_000, n)])
    image = permute(index)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**28  # the table would be 8 GB
    assert image.min() >= 0
    assert image.max() < n
    assert len(np.unique(image)) == len(index)
    counts = np.bincount((image * 64 // n).astype(int), minlength=64)
    assert chi_square(counts) < 63 + 5 * (2 * 63) ** 0.5


def chi_square(counts: np.ndarray) -> float:
    mean = counts.mean()
    return float(((counts - mean) ** 2 / mean).sum())


@pytest.mark.parametrize("n", [1000, 4096, 10007])
def test_neighbours_are_torn_apart(n):
    """Adjacent numbers land as far apart as in a random permutation: adjacent again 2 times in expectation, with the
    difference's distribution that of two draws, and no correlation between place and number."""
    adjacent = []
    for seed in range(20):
        image = whole(n, seed)
        apart = np.abs(np.diff(image))
        adjacent.append((apart == 1).sum())
        assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < 5 / n**0.5
        assert apart.mean() == pytest.approx(n / 3, rel=8 / n**0.5)
        assert (image == np.arange(n)).sum() < 10  # fixed points: 1 in expectation
    assert np.mean(adjacent) == pytest.approx(2, abs=1.6)  # of 20 numbers, each with variance 2: σ = 0.32


@pytest.mark.parametrize("n", [2, 3, 5, 7, 12, 16])
def test_every_number_is_as_likely_at_every_place(n):
    draws = 1000
    counts = np.zeros((n, n))
    for seed in range(draws):
        counts[np.arange(n), whole(n, seed)] += 1
    free = (n - 1) ** 2
    assert chi_square(counts.ravel()) < free + 6 * (2 * free) ** 0.5


def test_seeds_and_epochs_are_unlike():
    n = 5000
    images = [whole(n, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, one in enumerate(images):
        for other in images[:i]:
            assert (one == other).sum() < 12
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / n**0.5


def test_the_order_is_the_same_on_every_machine():
    assert whole(10, 1, 2).tolist() == [6, 0, 4, 9, 3, 2, 7, 1, 5, 8]
    assert shuffle(10**12, 2**63 - 1, 10**6)(np.arange(3)).tolist() == [
        185987047185,
        119507783791,
        828607760648,
    ]
