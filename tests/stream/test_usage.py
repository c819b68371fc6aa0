"""What was used most is read first, and how often it was used is kept."""

import json

import numpy as np
import pytest

from perspectron.stream.cache import ShardCache
from perspectron.stream.usage import MEMORY, Usage


def test_shares_are_moving_averages_and_survive(tmp_path):
    usage = Usage(tmp_path / "usage.json", {0: 3, 4: 2})
    for expert in (1, 1, 2):
        usage.count(0, expert, ready=expert == 2)
    usage.count(4, 0, ready=True)
    assert usage.most() == [(0, 1), (0, 2), (4, 0)]
    assert (usage.asked, usage.served) == (4, 2)
    usage.save()
    again = Usage(tmp_path / "usage.json", {0: 3, 4: 2})
    assert again.most() == usage.most() and again.asked == 0
    np.testing.assert_allclose(again._share[0], [0, MEMORY * ((1 - MEMORY) + (1 - MEMORY) ** 2), MEMORY])


def test_only_the_first_tokens_are_told(tmp_path):
    usage = Usage(tmp_path / "usage.json", {0: 1})
    for _ in range(250):
        usage.count(0, 0, ready=True)
    assert (usage.asked, usage.served) == (100, 100)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "perspectron-usage-1", "machines": 3}']
)
def test_a_file_that_is_none_begins_anew(tmp_path, text):
    (tmp_path / "usage.json").write_text(text)
    assert Usage(tmp_path / "usage.json", {0: 2}).most() == []


@pytest.mark.parametrize("shares", [[0.1], [0.1, 2.0], [0.1, "a"], None])
def test_shares_of_another_layer_begin_anew(tmp_path, shares, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "here")
    machines = {"here": {"0": shares}, "elsewhere": {"0": [0.5, 0.5]}}
    (tmp_path / "usage.json").write_text(json.dumps({"format": "perspectron-usage-1", "machines": machines}))
    usage = Usage(tmp_path / "usage.json", {0: 2})
    assert usage.most() == []
    usage.count(0, 1, ready=True)
    usage.save()
    assert set(json.loads((tmp_path / "usage.json").read_text())["machines"]) == {"here", "elsewhere"}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    usage = Usage(tmp_path / "file" / "usage.json", {0: 2})
    (tmp_path / "file").write_text("")
    usage.count(0, 1, ready=True)
    usage.save()


def test_a_cache_begins_with_what_was_used_most(lab, tmp_path):
    lab.plain(tmp_path / "a", 0, 6)
    usage = Usage(tmp_path / "usage.json", {0: 6})
    for expert in (5, 5, 5, 2, 2, 4):
        usage.count(0, expert, ready=False)
    with ShardCache([lab.open(tmp_path / "a")], 2 * lab.layout.bytes) as cache:
        cache.warm(usage)
        assert [cache.holds(0, expert) for expert in range(6)] == [False, False, True, False, False, True]
        assert cache.counters.misses == 0 < cache.counters.bytes_read
        with cache.get(0, 4):
            pass
        assert cache.holds(0, 5) and not cache.holds(0, 2), "the most used stays longest"
        assert usage.most()[0] == (0, 5) and usage._share[0][4] > MEMORY * 1.5
