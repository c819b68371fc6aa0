"""Experts on a device that cannot hold them all: each is copied from host memory into one of two buffers while the
device computes the previous layer (docs/designs/perspective.md#streaming).

On a GPU the copy runs on a stream of its own, out of pinned memory, and events keep the two streams in order; nothing
makes the host wait but a cache that is about to overwrite what is being copied. On the CPU, for tests, it just copies.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from perspectron.errors import BackendError
from perspectron.stream.cache import ShardCache
from perspectron.stream.expert_file import Shard

BUFFERS = 2  # experts on a GPU: one computes while the other arrives
ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class _Slot:
    """Device memory of one expert. busy: contexts that hold it. hinted: it was copied for a layer that has not asked
    for an expert since. copied, used: events after the last copy into it, and after the last work that reads it."""

    def __init__(self, memory: Tensor, shard: Shard) -> None:
        self.memory, self.shard = memory, shard
        self.key: tuple[int, int] | None = None
        self.busy = 0
        self.hinted = False
        self.copied: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None


class Pinned:
    """Host memory that the driver has pinned, until `release`; kept alive as long. runtime: torch.cuda.cudart()."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._kept: dict[int, Tensor] = {}

    def pin(self, host: Tensor) -> None:
        """Pin the memory of a tensor, once for each place. BackendError: the driver refuses."""
        place = host.data_ptr()
        if place in self._kept:
            return
        code = int(self._runtime.cudaHostRegister(place, host.nbytes, 0))
        if code == ALREADY:  # by another model over the same cache, which will release it
            return
        if code != 0:
            raise BackendError(
                f"pinning {host.nbytes} bytes of memory: CUDA error {code}; a smaller cache may do"
            )
        self._kept[place] = host

    def release(self) -> None:
        """Unpin everything, once no copy is under way. Twice is fine."""
        while self._kept:
            self._runtime.cudaHostUnregister(self._kept.popitem()[0])


class DeviceExperts:
    """An ExpertSource for a model on `device`, over a cache in the host's memory. For one thread."""

    def __init__(self, cache: ShardCache, device: torch.device, buffers: int = BUFFERS) -> None:
        self._cache, self.device = cache, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pinned = Pinned(torch.cuda.cudart())
            self._end = weakref.finalize(self, _release, self._stream, self._pinned)
        layout = cache.layout
        memories = (torch.empty(layout.bytes, dtype=torch.uint8, device=device) for _ in range(buffers))
        self._slots = [
            _Slot(memory, layout.shard(memory)) for memory in memories
        ]  # least recently used first

    def close(self) -> None:
        """Give the host's memory back to its other uses; nothing may be got any more. Twice is fine."""
        if self._stream is not None:
            self._end()

    @contextmanager
    def get(self, layer: int, expert: int) -> Iterator[Shard]:
        """The weights on the device, which stay as they are until the context ends."""
        key = layer, expert
        for hinted in self._slots:  # right or wrong, they have had their time
            hinted.hinted &= hinted.key is not None and hinted.key[0] != layer
        slot = self._find(key) or self._fetch(key)
        assert slot is not None, "contexts of more experts are open than there are buffers"
        slot.busy += 1
        self._slots.sort(key=lambda other: other is slot)  # it is the one used last
        if slot.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.copied)
        try:
            yield slot.shard
        finally:
            slot.busy -= 1
            if self._stream is not None:
                slot.used = torch.cuda.current_stream(self.device).record_event()

    def hint(self, layer: int, expert: int) -> None:
        """Copy an expert if the host has it and a buffer is free that no earlier hint filled, else have the host read
        it."""
        if (slot := self._find((layer, expert))) is not None:
            slot.hinted = True
        elif not self._cache.holds(layer, expert) or self._fetch((layer, expert), hint=True) is None:
            self._cache.hint(layer, expert)

    def holds(self, layer: int, expert: int) -> bool:
        """True if the expert is on the device."""
        return self._find((layer, expert)) is not None

    def _find(self, key: tuple[int, int]) -> _Slot | None:
        return next((slot for slot in self._slots if slot.key == key), None)

    def _fetch(self, key: tuple[int, int], *, hint: bool = False) -> _Slot | None:
        """Begin to copy an expert over the one used longest ago; None where all are in use, or, for a hint, hold what
        was hinted before."""
        slot = next((slot for slot in self._slots if slot.busy == 0 and not (hint and slot.hinted)), None)
        if slot is None:
            return None
        slot.key = None
        with self._cache.get(*key) as shard:
            host = _whole(shard, len(slot.memory))
            if self._stream is None:
                slot.memory.copy_(host)
            else:
                self._copy(host, slot)
        slot.key, slot.hinted = key, hint
        return slot

    def _copy(self, host: Tensor, slot: _Slot) -> None:
        assert self._stream is not None
        self._pinned.pin(host)
        with torch.cuda.stream(self._stream):
            if slot.used is not None:
                self._stream.wait_event(slot.used)
            slot.memory.copy_(host, non_blocking=True)
            slot.copied = self._stream.record_event()
        if not self._cache.resident:
            slot.copied.synchronize()  # the cache may give the memory to another expert


def _release(stream: torch.cuda.Stream, pinned: Pinned) -> None:
    stream.synchronize()
    pinned.release()


def _whole(shard: Shard, size: int) -> Tensor:
    """The bytes of which the matrices are views."""
    first = shard.gate.codes
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(first.untyped_storage(), first.storage_offset(), (size,), (1,))
