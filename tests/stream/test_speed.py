"""Disks probed, and files that are too small to tell."""

import threading
import time
from pathlib import Path

import pytest

from perspectron.stream import speed
from perspectron.stream.reader import ShardFile
from perspectron.stream.speed import probe
from perspectron.util.errors import ArtifactError
from tests.refusals import refused


def test_the_faster_method_is_taken(lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "layer-3"
    lab.mixed(path, 3)
    monkeypatch.setattr(ShardFile, "rate", lambda file, *_: {"direct": 2.0, "buffered": 3.0}[file.method])
    found = probe(path)
    assert found.method == "buffered" and found.bytes_per_second["buffered"] == 3.0
    assert str(found).startswith("buffered ") and str(found).count("buffered") == 1
    with pytest.raises(ArtifactError):
        probe(tmp_path)


@pytest.mark.parametrize("readers", [1, 2])
def test_two_readers_where_a_disk_serves_both_at_once(
    lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    """By a clock that moves while a disk reads, for two at a time or for one."""
    path = tmp_path / "layer-3"
    lab.mixed(path, 3)
    monkeypatch.setattr(speed, "PIECE", 4096)
    size = path.stat().st_size // 4096 * 4096

    now, lock, both = [0.0], threading.Lock(), threading.Barrier(2)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def rate(file: ShardFile, buffer: object, start: int, count: int) -> float:
        alone = count == size or readers == 1
        with lock:
            now[0] += 0.1 * count / size * (1 if alone else 0.5)
        if not alone:
            both.wait()
        return count / (0.1 * count / size)

    monkeypatch.setattr(ShardFile, "rate", rate)
    assert probe(path, ["buffered"]).readers == readers


def test_the_speed_of_a_disk(lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "layer-3"
    lab.mixed(path, 3)
    assert speed.disk(path) is None
    monkeypatch.setattr(speed, "LEAST", 1)
    rate = speed.disk(path)
    assert rate is not None and rate > 0
    with refused(ArtifactError, tmp_path / "none"):
        speed.disk(tmp_path / "none")
