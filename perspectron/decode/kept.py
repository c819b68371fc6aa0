"""Accounting of the memory that all marks and stores of a process keep: what several states share counts once."""

import threading
from collections import Counter, deque
from collections.abc import Iterator

import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.model.cache import Cache, is_cache, storage_of
from perspectron.model.state import LMState

_LOCK = threading.RLock()


class Account:
    """An owner of kept states. Memory that several accounts keep is charged to the one of the lowest order, so that all
    accounts together have the bytes that are really there."""

    def __init__(self, order: int) -> None:
        self.order, self.charged = order, 0

    @property
    def bytes(self) -> int:
        """Bytes of the memory that this account keeps and no account of lower order does."""
        with _LOCK:
            _drain()
            return self.charged


LIVE = Account(1)
"""The account of sessions' caches, which take memory whether or not they are marked."""


class _Memory:
    def __init__(self, size: int) -> None:
        self._size, self._holds = size, Counter[Account]()
        self._payer: Account | None = None

    def resize(self, size: int) -> None:
        """Set the size: memory may be freed before its hold is released, and its number be reused for other memory."""
        if self._payer is not None:
            self._payer.charged += size - self._size
        self._size = size

    def hold(self, account: Account, times: int) -> bool:
        """Add `times` holds of an account, or remove them if negative; False if no account is left that holds it."""
        self._holds[account] += times
        if self._holds[account] == 0:
            del self._holds[account]
        payer = min(self._holds, key=lambda account: account.order, default=None)
        if payer is not self._payer:
            if self._payer is not None:
                self._payer.charged -= self._size
            if payer is not None:
                payer.charged += self._size
            self._payer = payer
        return payer is not None


_memories = dict[int, _Memory]()
_gone = deque[tuple[Account, tuple[int, ...]]]()
"""Released holds that still count: `let_go` only queues them, as a destructor may call it amid a change here."""


def _drain() -> None:
    while _gone:
        account, numbers = _gone.popleft()
        for number in numbers:
            if not _memories[number].hold(account, -1):
                del _memories[number]


class Hold:
    """The hold of an account on the memory of a state and of other tensors, until `let_go`; LIVE holds caches alone."""

    def __init__(self, account: Account, state: LMState, *tensors: Tensor) -> None:
        self._account = account
        storages = dict(_storages(state, tensors, caches=account is LIVE))
        self._numbers = (*storages,)
        with _LOCK:
            _drain()
            for number, size in storages.items():
                if number not in _memories:
                    _memories[number] = _Memory(size)
                _memories[number].resize(size)
                _memories[number].hold(account, 1)

    def let_go(self) -> None:
        """Release the memory; further calls do nothing."""
        numbers, self._numbers = self._numbers, ()
        if _gone is not None:  # None while the interpreter shuts down
            _gone.append((self._account, numbers))

    __del__ = let_go


def bytes_of(*states: LMState) -> int:
    """Bytes of the memory of these states; what they share counts once."""
    return sum(dict(pair for state in states for pair in _storages(state)).values())


def _storages(
    state: LMState, tensors: tuple[Tensor, ...] = (), *, caches: bool = False
) -> Iterator[tuple[int, int]]:
    """A number that identifies each storage, and its bytes; some come several times. caches: of caches alone."""
    for part in (*pytree.tree_leaves(state, is_leaf=is_cache), *tensors):
        if isinstance(part, Cache):
            for row in part.shared:
                for piece in row:
                    yield from piece.storages
            for x in (part.k_BHSK, part.v_BHSV, part.length_B):
                yield storage_of(x)
        elif isinstance(part, Tensor) and not caches:
            yield storage_of(part)
