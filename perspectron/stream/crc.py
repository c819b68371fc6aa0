"""CRC-32C (Castagnoli, the one that processors have an instruction for), also where there is no native library.

With message words w_0 … w_{n−1} of 32 bits, the CRC is linear: Σ w_i · x^(32·(n−i)) mod P over GF(2). So L lanes can
run side by side: row j of L words is added to the lanes after these were multiplied by x^(32·L), which is a look-up
for each half of a word. What the lanes hold at the end is a message of L words with the same CRC, for a narrower pass.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perspectron import native

_P = 0x82F63B78  # bit i is the coefficient of x^(31−i)
_ONE = 0x80000000
_LANES = (16384, 1024, 64)

Words = NDArray[np.uint32]


def crc32c(buffer: Any, value: int = 0) -> int:
    """CRC-32C of a contiguous buffer; `value` is that of what came before it."""
    data = np.frombuffer(buffer, np.uint8)
    if not native.wanted():
        return _portable(data, value)
    return native.crc32c(torch.from_numpy(data if data.flags.writeable else data.copy()), value)


class Sums:
    """CRCs of the parts of a buffer that fills from its start."""

    def __init__(self, buffer: NDArray[np.uint8], parts: Sequence[slice]) -> None:
        self.buffer, self.parts = buffer, parts
        self.values = [0] * len(parts)
        self._at = 0

    def go_on(self, end: int) -> None:
        """The buffer is filled up to `end`."""
        for i, part in enumerate(self.parts):
            start, stop = max(self._at, part.start), min(end, part.stop)
            if start < stop:
                self.values[i] = crc32c(self.buffer[start:stop], self.values[i])
        self._at = end


def _portable(data: NDArray[np.uint8], value: int) -> int:
    crc = value ^ 0xFFFFFFFF
    whole = len(data) & ~3
    if whole:
        words: Words = data[:whole].view("<u4")
        first = int(words[0]) ^ crc  # what came before is added to the first word
        for lanes in _LANES:
            if len(words) > 2 * lanes:
                words, first = _fold(words, first, lanes), -1
        low, high = _word_table()
        crc = 0
        for word in words.tolist():
            if first >= 0:
                word, first = first, -1
            crc ^= word
            crc = low[crc & 0xFFFF] ^ high[crc >> 16]
    for byte in data[whole:].tolist():
        crc = _times_x8(crc ^ byte)
    return crc ^ 0xFFFFFFFF


def _fold(words: Words, first: int, lanes: int) -> Words:
    """`lanes` words with the CRC of all; `first`, if not −1, stands in the place of the first."""
    table = _table(lanes)
    low, high = table
    head = len(words) % lanes or lanes
    state = np.zeros(lanes, np.uint32)  # zeros before a message change nothing
    state[lanes - head :] = words[:head]
    if first >= 0:
        state[lanes - head] = first
    index, part = np.empty(lanes, np.uint32), np.empty(lanes, np.uint32)
    for start in range(head, len(words), lanes):
        np.right_shift(state, 16, out=index)
        np.take(high, index, out=part, mode="clip")
        np.bitwise_and(state, 0xFFFF, out=index)
        np.take(low, index, out=state, mode="clip")
        state ^= part
        state ^= words[start : start + lanes]
    return state


@cache
def _table(words: int) -> NDArray[np.uint32]:
    """v · x^(32·words) mod P [2, 65536], for each low and each high half of a word v."""
    power, factor, bits = _ONE, _ONE >> 1, 32 * words  # x^0 and x^1
    while bits:
        if bits & 1:
            power = _times(power, factor)
        factor = _times(factor, factor)
        bits >>= 1
    table = np.zeros((2, 65536), np.uint32)
    for bit in range(32):
        half, place = divmod(bit, 16)
        table[half, 1 << place : 2 << place] = table[half, : 1 << place] ^ np.uint32(_times(1 << bit, power))
    return table


@cache
def _word_table() -> list[list[int]]:
    return _table(1).tolist()


def _times(a: int, b: int) -> int:
    """a · b mod P."""
    product = 0
    for bit in range(32):  # from the highest coefficient of a, x^31, down
        product = (product >> 1) ^ (_P if product & 1 else 0)
        if a >> bit & 1:
            product ^= b
    return product


def _times_x8(crc: int) -> int:
    for _ in range(8):
        crc = (crc >> 1) ^ (_P if crc & 1 else 0)
    return crc
