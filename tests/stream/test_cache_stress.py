import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from perspectron.stream.cache import ShardCache

LAYERS, EXPERTS, THREADS, REQUESTS = 3, 8, 32, 2_000


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_32_threads_of_random_requests_get_what_they_asked_for(tmp_path: Path, lab) -> None:
    before = descriptors()
    expected = {}
    for layer in range(LAYERS):
        for expert, buffer in lab.plain(tmp_path / f"{layer}", layer, EXPERTS).items():
            expected[layer, expert] = lab.layout.shard(buffer)
    cache = ShardCache([lab.open(tmp_path / f"{layer}") for layer in range(LAYERS)], 12 * lab.layout.bytes)
    opened = descriptors()
    wrong: list[object] = []
    seen: dict[int, Any] = {}
    kept: list[Any] = []
    stamp = {key: shard.down.scales.numpy() for key, shard in expected.items()}

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        order = list(zip(*(rng.integers(0, n, REQUESTS).tolist() for n in (LAYERS, EXPERTS)), strict=True))
        for i, (layer, expert) in enumerate(order):
            if i % 16 == 0:
                cache.hint(*order[(i + 1) % REQUESTS])
            want = expected[layer, expert]
            with cache.get(layer, expert) as shard:
                stamps = seen.get(
                    id(shard)
                )  # views of a slot: making them costs more than looking at one number
                if stamps is None:
                    kept.append(shard)
                    stamps = seen[id(shard)] = shard.down.scales.numpy()
                same = stamps[i % 64] == stamp[layer, expert][i % 64]
                if i % 64 == 0:
                    pairs = zip(shard, want, strict=True)
                    same = all(a.codes.equal(b.codes) and a.scales.equal(b.scales) for a, b in pairs)
            if not same:
                wrong.append((layer, expert))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert descriptors() == opened
    assert cache.counters.hits + cache.counters.misses == THREADS * REQUESTS
    cache.close()
    assert descriptors() == before
