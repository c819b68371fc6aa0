"""Logs are lists whose copies share what they have."""

import random

import pytest

from perspectron.decode.log import Log


def test_logs_that_grow_and_fork_are_lists_that_do() -> None:
    draw = random.Random(0)
    pairs = [(Log[int]([]), list[int]())]
    for step in range(400):
        log, wanted = draw.choice(pairs)
        if draw.random() < 0.4:
            count = draw.randint(0, len(wanted))
            pairs.append((log.cut(count), wanted[:count]))
        else:
            log.extend([step] * (step % 3))
            wanted.extend([step] * (step % 3))
    for log, wanted in pairs:
        assert log == wanted and log == Log(wanted) and log != [*wanted, 0] and [*log] == wanted
        assert len(log) == len(wanted) and log[::-1] == wanted[::-1] and log[1:-1:3] == wanted[1:-1:3]
        assert [log[at] for at in range(-len(wanted), len(wanted))] == wanted * 2


@pytest.mark.parametrize("at", [2, -3])
def test_an_item_that_is_not_there_is_an_index_error(at: int) -> None:
    with pytest.raises(IndexError):
        Log([1, 2])[at]
