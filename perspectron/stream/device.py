"""Experts on a device that cannot hold them all: each is copied from host memory into one of two buffers while the
device computes the previous layer (docs/designs/perspective.md#streaming).

On a GPU copies run on a stream of their own, and events keep it in order with the streams that compute. Where the cache
holds all experts, its memory, which then never changes, is pinned and copied from. Else a thread brings each expert by
way of one of two pinned buffers: from the disk if need be, into the one while the other is on the bus; the cache may
give its memory to another expert as soon as it is read. On the CPU, for tests, it just copies.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from perspectron.experts.fetched import Shard
from perspectron.stream.cache import ShardCache

BUFFERS = 2  # experts on a GPU, and pinned ones: one is used while the other arrives
_log = logging.getLogger("perspectron")


class Pinned:
    """Host memory that the driver has pinned, until `release`; kept alive as long. runtime: torch.cuda.cudart()."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._kept: dict[int, Tensor] = {}
        self.refused = False

    def pin(self, host: Tensor) -> bool:
        """Pin the memory of a tensor, whole pages, once for each place. False where the driver refuses; then it is not
        asked again, the log says so, and copies out of what is not pinned are slower."""
        place = host.data_ptr()
        if self.refused or place in self._kept or host.is_pinned():  # by another model over the same cache
            return True
        if (code := int(self._runtime.cudaHostRegister(place, host.nbytes, 0))) == 0:
            self._kept[place] = host
            return True
        self.refused = True
        told = "the driver does not pin %s bytes of memory (CUDA error %s): experts are copied more slowly"
        _log.warning(told, host.nbytes, code)
        return False

    def release(self) -> None:
        """Unpin everything, once no copy is under way. Twice is fine."""
        while self._kept:
            self._runtime.cudaHostUnregister(self._kept.popitem()[0])


class Lane:
    """The copy stream of a GPU, the memory that it copies to and from, and its events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned = Pinned(torch.cuda.cudart())

    def memory(self, size: int) -> Tensor:
        """New memory on the device. Copies write to it only once its former user is done, and nothing else gets it
        before the copies are done."""
        with torch.inference_mode(False):
            made = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        made.record_stream(self._stream)
        return made

    def staging(self, size: int) -> Tensor:
        """New pinned memory of the host, which the bus reads at full speed."""
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pin(self, host: Tensor) -> None:
        """Pin memory that never changes, if the driver can."""
        if not self._pinned.pin(host):
            with contextlib.suppress(RuntimeError):  # the next launch reports the refusal: this one
                torch.zeros(1, device=self._device)

    def reader(self, memory: Tensor) -> Any:
        """The current stream, which computes; the memory is not given to anything else before its work is done."""
        stream = torch.cuda.current_stream(self._device)
        memory.record_stream(stream)
        return stream

    def copy(self, to: Tensor, host: Tensor, after: Iterable[Any]) -> Any:
        """Begin to copy after these events, and return the event of its end."""
        with torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            to.copy_(host, non_blocking=True)
            return self._stream.record_event()

    def close(self) -> None:
        """Wait for all copies, and unpin. Twice is fine."""
        self._stream.synchronize()
        self._pinned.release()


class _Slot:
    """Device memory of one expert. busy: contexts that hold it. hinted: it was copied for a layer that has not asked
    for an expert since. copied: the event of the last copy into it, or its future. used: by stream, the event of the
    last work that reads it."""

    def __init__(self, memory: Tensor, shard: Shard) -> None:
        self.memory, self.shard = memory, shard
        self.key: tuple[int, int] | None = None
        self.busy = 0
        self.hinted = False
        self.copied: Future[Any] | Any = None
        self.used: dict[Any, Any] = {}


class _Staging:
    """The thread that brings experts from the cache to the device, one after the other, and its pinned buffers, each
    with the event of the last copy out of it."""

    def __init__(self, cache: ShardCache, lane: Lane) -> None:
        self._cache, self._lane = cache, lane
        self._buffers = [(lane.staging(cache.layout.bytes), None) for _ in range(BUFFERS)]
        self._thread, self._own = ThreadPoolExecutor(1, "expert-copies"), 0

    def bring(self, key: tuple[int, int], to: Tensor, after: list[Any], *, asked: bool) -> Future[Any]:
        """Begin to bring an expert; a future of the event of the end of its copy. asked: as the cache has it."""
        return self._thread.submit(self._bring, key, to, after, asked)

    def _bring(self, key: tuple[int, int], to: Tensor, after: list[Any], asked: bool) -> Any:
        self._own = threading.get_ident()
        buffer, read = self._buffers.pop(0)
        try:
            with self._cache.get(*key, asked=asked) as shard:
                if read is not None:
                    read.synchronize()
                buffer.copy_(_whole(shard, len(to)))
            read = self._lane.copy(to, buffer, after)
            return read
        finally:
            self._buffers.append((buffer, read))

    def close(self) -> None:
        """End the thread. The garbage collector may call this on the thread itself."""
        self._thread.shutdown(wait=threading.get_ident() != self._own, cancel_futures=True)


class DeviceExperts:
    """An ExpertSource for a model on `device`, over a cache in the host's memory. For one thread. What a context gives
    is read on the stream that was current when it was opened."""

    def __init__(
        self, cache: ShardCache, device: torch.device, buffers: int = BUFFERS, lane: Lane | None = None
    ) -> None:
        self._cache, self.device, self._closed = cache, device, False
        self._lane = Lane(device) if lane is None and device.type == "cuda" else lane
        self._staging: _Staging | None = None
        size, layout = cache.layout.bytes, cache.layout
        if self._lane is None:
            memories = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(buffers)]
        else:
            memories = [self._lane.memory(size) for _ in range(buffers)]
            self._staging = None if cache.resident else _Staging(cache, self._lane)
            self._end = weakref.finalize(self, _close, self._staging, self._lane)
        self._slots = [
            _Slot(memory, layout.shard(memory)) for memory in memories
        ]  # least recently used first

    def close(self) -> None:
        """End all copies and unpin the host's memory; no expert may be requested any more. Twice is fine."""
        self._closed = True
        if self._lane is not None:
            self._end()

    @contextmanager
    def get(self, layer: int, expert: int) -> Iterator[Shard]:
        """The weights on the device, which stay as they are until the context ends. ShardError: they cannot be read."""
        assert not self._closed, "the model has moved to another device"
        key = layer, expert
        for hinted in self._slots:  # right or wrong, they have had their time
            hinted.hinted &= hinted.key is not None and hinted.key[0] != layer
        found = self._find(key)
        slot = found or self._fetch(key)
        assert slot is not None, "contexts of more experts are open than there are buffers"
        self._slots.sort(key=lambda other: other is slot)  # it is the one used last
        self._settle(slot)
        if found is not None:
            self._cache.served(layer, expert)
        stream = None if self._lane is None else self._lane.reader(slot.memory)
        if stream is not None:
            stream.wait_event(slot.copied)
        slot.busy += 1
        try:
            yield slot.shard
        finally:
            slot.busy -= 1
            if stream is not None:
                slot.used[stream] = stream.record_event()

    def ask(self, layer: int, experts: Sequence[int]) -> None:
        """Have the host read those that are not on the device."""
        self._cache.ask(layer, [expert for expert in experts if not self.holds(layer, expert)])

    def hint(self, layer: int, expert: int) -> None:
        """Copy an expert if the host has it and a buffer is free that no earlier hint filled, else have the host read
        it."""
        if (slot := self._find((layer, expert))) is not None:
            slot.hinted = True
        elif not self._cache.holds(layer, expert) or self._fetch((layer, expert), hint=True) is None:
            self._cache.hint(layer, expert)

    def holds(self, layer: int, expert: int) -> bool:
        """True if the expert is on the device, or on its way there."""
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
        if self._staging is not None:
            slot.copied = self._staging.bring(key, slot.memory, list(slot.used.values()), asked=not hint)
        else:
            with self._cache.get(*key, asked=not hint) as shard:
                host = _whole(shard, len(slot.memory))
                if self._lane is None:
                    slot.memory.copy_(host)
                else:
                    self._lane.pin(host)
                    slot.copied = self._lane.copy(slot.memory, host, slot.used.values())
                    slot.used.clear()  # the copy waits for them, and what reads it next for the copy
        slot.key, slot.hinted = key, hint
        return slot

    def _settle(self, slot: _Slot) -> None:
        """Wait until the copy into a buffer is queued on the device, whose streams know its end by an event."""
        if isinstance(slot.copied, Future):
            try:
                slot.copied = slot.copied.result()
                slot.used.clear()  # not before: a copy that failed has waited for nothing
            except BaseException:
                slot.key, slot.copied = None, None
                raise


def _close(staging: _Staging | None, lane: Lane) -> None:
    if staging is not None:
        staging.close()
    lane.close()


def _whole(shard: Shard, size: int) -> Tensor:
    """The bytes of which the matrices are views."""
    first = next(iter(shard)).codes
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(first.untyped_storage(), first.storage_offset(), (size,), (1,))
