"""Bytes of states that are kept, those of all marks and stores of a process: memory that several of them see counts
once."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.model.cache import Cache, storage_of
from perspectron.model.state import LMState

_LOCK = threading.RLock()


@dataclass(eq=False)
class Account:
    """Who keeps states. bytes: of the memory that they hold, but for what an earlier account (a lower `order`) holds
    too: all accounts together have the bytes that are really there."""

    order: int
    bytes: int = 0


@dataclass
class _Memory:
    bytes: int
    holds: Counter[Account] = field(default_factory=Counter)

    def payer(self) -> Account:
        return min(self.holds, key=lambda account: account.order)


_memories = dict[int, _Memory]()


class Hold:
    """What an account holds of a state, and of other tensors, until it is let go."""

    def __init__(self, account: Account, state: LMState, *tensors: Tensor) -> None:
        self._account, self._storages = account, dict(_storages(state, tensors))
        with _LOCK:
            for number, size in self._storages.items():
                memory = _memories.setdefault(number, _Memory(size))
                if memory.holds:
                    memory.payer().bytes -= memory.bytes
                memory.holds[account] += 1
                memory.payer().bytes += memory.bytes

    def let_go(self) -> None:
        """Count it no more; a second time nothing happens."""
        with _LOCK:
            storages, self._storages = self._storages, {}
            for number in storages:
                memory = _memories[number]
                memory.payer().bytes -= memory.bytes
                memory.holds[self._account] -= 1
                if memory.holds[self._account] == 0:
                    del memory.holds[self._account]
                if memory.holds:
                    memory.payer().bytes += memory.bytes
                else:
                    del _memories[number]

    __del__ = let_go


def bytes_of(*states: LMState) -> int:
    """Bytes of the memory of these states, what they share once."""
    return sum(dict(pair for state in states for pair in _storages(state, ())).values())


def _storages(state: LMState, tensors: tuple[Tensor, ...]) -> Iterator[tuple[int, int]]:
    """The number and the bytes of each memory; some several times."""
    for part in (*pytree.tree_leaves(state, is_leaf=_is_cache), *tensors):
        if isinstance(part, Cache):
            for row in part.shared:
                for piece in row:
                    yield from piece.storages
            for x in (part.k_BHSK, part.v_BHSV, part.length_B):
                yield storage_of(x)
        elif isinstance(part, Tensor):
            yield storage_of(part)


def _is_cache(part: object) -> bool:
    return isinstance(part, Cache)
