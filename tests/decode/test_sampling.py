import dataclasses
import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from perspectron.decode.sampling import SamplingConfig, filtered, sample
from perspectron.util.config import dump, load
from perspectron.util.errors import ConfigError, NonFiniteError
from perspectron.util.streams import gumbel
from tests.refusals import refused

PLAIN = SamplingConfig(temperature=1.0)
LOGITS = torch.tensor([1, 8, 2, 4, 1]).log()[None]  # probabilities 1/16, 8/16, 2/16, 4/16, 1/16


def kept(logits_BV: Tensor, **fields: float) -> list[list[int]]:
    config = dataclasses.replace(PLAIN, **fields)
    return [row.isfinite().nonzero()[:, 0].tolist() for row in filtered(logits_BV, config)]


@pytest.mark.parametrize(
    ("top_k", "ids"),
    [(0, [0, 1, 2, 3, 4]), (1, [1]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4])],
)
def test_top_k_keeps_k_and_of_equals_the_lower_id(top_k: int, ids: list[int]) -> None:
    assert kept(LOGITS, top_k=top_k) == [ids]


def test_ties_go_by_id_in_every_filter() -> None:
    equal = torch.zeros(2, 1000)
    assert kept(equal, top_k=3) == [[0, 1, 2]] * 2
    assert kept(equal, temperature=0.0) == [[0]] * 2
    assert kept(equal, top_p=0.0035) == [[0, 1, 2, 3]] * 2
    assert kept(equal, min_p=1.0) == [list(range(1000))] * 2


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [
        (1e-9, [1]),
        (0.5, [1]),
        (0.51, [1, 3]),
        (0.75, [1, 3]),
        (0.76, [1, 2, 3]),
        (0.9, [0, 1, 2, 3]),
        (0.95, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, ids: list[int]) -> None:
    assert kept(LOGITS.double(), top_p=top_p) == [ids]


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 3000])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0])
def test_top_p_is_that_of_sorting_every_token(vocabulary: int, spread: float) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    logits_BV = torch.randn(6, vocabulary, generator=draw, dtype=torch.float64) * spread
    logits_BV[1] = logits_BV[1].round()  # many are equal
    logits_BV[2, 1::2] = -math.inf
    for top_p in (1e-9, 0.1, 0.9, 0.999, 1 - 1e-9):
        for row, ids in zip(logits_BV.tolist(), kept(logits_BV, top_p=top_p), strict=True):
            order = sorted(range(vocabulary), key=lambda id: (-row[id], id))
            weight = [math.exp(row[id] - max(row)) for id in order]
            reached, least = itertools.accumulate(weight, initial=0.0), (top_p - 1e-12) * math.fsum(weight)
            wanted = [id for id, before in zip(order, reached, strict=False) if before < least]
            assert ids == sorted(wanted or order[:1])


def test_noise_at_some_places_is_that_of_all() -> None:
    whole, at = gumbel(7 | 3 << 64, 5, 1000), np.array([0, 1, 17, 998, 999])
    assert (gumbel(7 | 3 << 64, 5, 1000, at) == whole[at]).all()


def test_rounding_of_the_sum_admits_no_further_token() -> None:
    for count in range(2, 200):
        for reach in (1, count // 2, count - 1):
            got = kept(torch.zeros(1, count), top_p=max(1, reach) / count)
            assert got == [list(range(max(1, reach)))]


@pytest.mark.parametrize(
    ("min_p", "ids"),
    [(0.125, [0, 1, 2, 3, 4]), (0.126, [1, 2, 3]), (0.25, [1, 2, 3]), (0.5, [1, 3]), (1.0, [1])],
)
def test_min_p_keeps_those_near_the_most_likely(min_p: float, ids: list[int]) -> None:
    assert kept(torch.tensor([[1, 8, 2, 4, 1]], dtype=torch.float64).log(), min_p=min_p) == [ids]


def test_filters_apply_in_order() -> None:
    # Temperature before top_p: flatter, so more tokens are needed.
    assert kept(LOGITS, temperature=4.0, top_p=0.5) == [[1, 2, 3]]
    # top_k before top_p: of the two that stay, the first has 2/3.
    assert kept(LOGITS, top_k=2, top_p=0.6) == [[1]]
    # Temperature before min_p: 4/8 becomes (4/8)² = 1/4.
    assert kept(LOGITS, temperature=0.5, min_p=0.3) == [[1]]


def test_kept_logits_are_divided_by_the_temperature() -> None:
    softmax = filtered(LOGITS.double(), SamplingConfig(temperature=0.5)).softmax(1)
    squares = torch.tensor([[1, 64, 4, 16, 1]], dtype=torch.float64)
    torch.testing.assert_close(softmax, squares / squares.sum(), rtol=0, atol=1e-6)


def test_penalty_divides_positive_and_multiplies_negative_logits_of_the_window() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0, 0.0, 4.0]]).expand(2, 5)
    config = dataclasses.replace(PLAIN, repetition_penalty=2.0, repetition_window=3)
    # Token 4 fell out of row 0's window; row 1 has seen nothing; a repeated token counts once.
    got = filtered(logits, config, [[4, 0, 2, 2], []])
    assert (got - got[:, 4:]).tolist() == [[-2.5, -2.0, -6.0, -4.0, 0.0], [-1.0, -2.0, -5.0, -4.0, 0.0]]
    assert sample(logits, [[4, 4, 4], []], 0, dataclasses.replace(config, temperature=0.0)).tolist() == [0, 4]


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_a_penalty_beyond_all_numbers_leaves_a_token_to_draw(filters: dict[str, float]) -> None:
    config = SamplingConfig(**{"temperature": 1.0} | filters, repetition_penalty=1e-310)  # type: ignore[arg-type]
    assert sample(torch.tensor([[1.0, 3.0, 2.0, -math.inf]]), [[2, 3]], 0, config).tolist() == [2]
    config = dataclasses.replace(config, repetition_penalty=1e308)
    assert sample(torch.tensor([[-20.0, -30.0, -math.inf]]), [[0, 1, 2]], 0, config).item() in (0, 1)
    filtered(torch.tensor([[0.0, math.nan]]), config)  # has none to draw


def test_greedy_and_top_1_are_argmax() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    recent = [[]] * 7
    expected = logits.argmax(1).tolist()
    assert sample(logits, recent, 0, SamplingConfig(temperature=0.0)).tolist() == expected
    assert sample(logits, recent, 5, SamplingConfig(temperature=3.0, top_k=1)).tolist() == expected
    assert sample(logits, recent, 5, SamplingConfig(temperature=1e-300)).tolist() == expected
    assert sample(logits, recent, 5, SamplingConfig(temperature=3.0)).tolist() != expected


def chi_square(counts: Counter[int], probability: Tensor) -> float:
    total = sum(counts.values())
    assert all(probability[id] > 0 for id in counts)
    expected = {id: float(p) * total for id, p in enumerate(probability) if p > 0}
    return sum((counts[id] - e) ** 2 / e for id, e in expected.items())


def test_draws_have_the_distribution_over_counts_and_over_rows() -> None:
    logits = torch.tensor([[1.0, 0.3, -0.5, 2.0, 0.0, -9.0, 1.5, 0.9]])
    config = SamplingConfig(temperature=0.7, top_k=6, seed=11)
    probability = filtered(logits, config).softmax(1)[0]
    assert (probability > 0).sum() == 6
    by_count = [sample(logits, [[]], n, config).item() for n in range(4000)]
    by_row = sample(logits.expand(20_000, -1), [[]] * 20_000, 0, config).tolist()
    bound = 25.7  # 5 degrees of freedom, p = 1e-4
    assert chi_square(Counter(by_count), probability) < bound
    assert chi_square(Counter(by_row), probability) < bound
    pairs = Counter(8 * a + b for a, b in itertools.pairwise(by_count))
    joint = (probability[:, None] * probability).flatten()
    assert chi_square(pairs, joint) < 76.8  # one draw tells nothing of the next: 35 degrees of freedom, 6e-5


def test_draw_depends_on_seed_stream_and_count_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, config = torch.randn(5, 200, generator=generator), SamplingConfig(temperature=1.5, seed=40)
    drawn = [3, 0, 900, 3, 2**40]
    torch.manual_seed(0)
    whole = sample(logits, [[]] * 5, drawn, config)
    torch.manual_seed(1)
    torch.rand(3)
    for row in range(5):
        alone = sample(logits[row : row + 1], [[]], drawn[row], config, [row])
        assert alone.item() == whole[row]
    flat = torch.zeros(1, 2**16)
    seeds, counts, streams = (0, 1, 2, 2**64 - 1), (0, 1, 2), (0, 1, 2, 2**64 - 1)
    draws = {
        sample(flat, [[]], count, SamplingConfig(seed=seed), [stream]).item()
        for seed, count, stream in itertools.product(seeds, counts, streams)
    }
    assert len(draws) == 48, "no stream of one seed is a stream of another"


def test_rows_may_have_settings_of_their_own() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    configs = [
        SamplingConfig(temperature=temperature, top_k=top_k, repetition_penalty=penalty, seed=seed)
        for temperature, top_k, penalty, seed in [
            (0, 0, 1, 1), (1, 0, 1, 1), (1, 0, 1, 2), (2, 5, 1, 1), (0, 0, 9, 1), (1, 0, 1, 1),
        ]
    ]  # fmt: skip
    recent, streams = [[row, int(logits[row].argmax())] for row in range(6)], [0, 3, 3, 3, 0, 9]
    whole = sample(logits, recent, [4] * 6, configs, streams)
    for row in range(6):
        alone = sample(logits[row : row + 1], [recent[row]], 4, configs[row], [streams[row]])
        assert alone.item() == whole[row]
    assert whole[0] == logits[0].argmax() and whole[4] != logits[4].argmax()
    with refused(ConfigError, "config", 5):
        sample(logits, recent, 0, configs[:5])
    with refused(ConfigError, "streams", 1):
        sample(logits, recent, 0, PLAIN, [0])


def test_draws_stay_the_same_in_every_version() -> None:
    config = SamplingConfig(temperature=1.0, seed=7)
    assert [sample(torch.zeros(1, 1000), [[]], n, config).item() for n in range(6)] == GOLDEN


GOLDEN = [896, 370, 195, 345, 165, 60]


def test_rounding_of_logits_does_not_show() -> None:
    logits = torch.randn(200, 1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noisy = logits + 1e-9 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    recent: list[list[int]] = [[]] * 200
    assert torch.equal(sample(logits, recent, 0, PLAIN), sample(noisy, recent, 0, PLAIN))


def test_bfloat16_logits_and_excluded_tokens() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.bfloat16)
    for config in (PLAIN, SamplingConfig(temperature=0.0), dataclasses.replace(PLAIN, top_k=2, top_p=0.99)):
        got = filtered(logits, config)
        assert got.dtype == torch.float64
        assert got[0, 1] == -math.inf and got[0, 2] == 0
    assert {sample(logits, [[]], n, PLAIN).item() for n in range(50)} == {0, 2}


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], [0.0, math.nan]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused_with_their_row(row: list[float], temperature: float) -> None:
    with refused(NonFiniteError, 1):
        sample(torch.tensor([[1.0, 2.0], row]), [[], []], 0, SamplingConfig(temperature=temperature))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_window", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("top_k", 2.5),
        ("top_k", None),
        ("repetition_window", 1.5),
        ("temperature", None),
        ("min_p", None),
        ("repetition_penalty", None),
        ("top_p", "1"),
    ],
)
def test_config_errors_name_field_and_value(field: str, value: float) -> None:
    with refused(ConfigError, field, value):
        SamplingConfig(**{field: value})


def test_whole_numbers_of_numpy_draw_as_those_of_python() -> None:
    logits_BV, counts = torch.zeros(2, 50), {"recent": [[], []], "drawn": 0}
    ours, theirs = (SamplingConfig(seed=kind(3), top_k=kind(40)) for kind in (int, np.int64))
    expected = sample(logits_BV, config=ours, streams=[0, 1], **counts)
    assert torch.equal(sample(logits_BV, config=theirs, streams=[0, 1], **counts), expected)


def test_config_round_trip_and_wrong_rows() -> None:
    config = SamplingConfig(0.5, 3, 0.9, 0.1, 1.1, 64, 5)
    assert load(SamplingConfig, dump(config)) == config
    with refused(ConfigError, "recent", 1):
        sample(torch.zeros(2, 3), [[]], 0, config)
    with refused(ConfigError, "drawn", 3):
        sample(torch.zeros(2, 3), [[], []], [0, 0, 0], config)


@pytest.mark.parametrize("id", [5, -1, -5, 10**9])
def test_the_penalty_takes_no_token_that_there_is_not(id) -> None:
    with refused(ConfigError, "recent"):
        sample(torch.zeros(1, 5), [[id]], 0, SamplingConfig(repetition_penalty=1.2))
