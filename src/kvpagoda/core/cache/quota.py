"""How many bytes of each namespace are cached, where ``Retention.quota`` limits them.

A cached block, or copy of states, is of one namespace: that of its text. So each group has one number for each id: the
account of its namespace. Blocks are counted when the prefix cache takes them, and no more when they are freed: the same two
places for every kind of layers. What follows from an account that is over its quota, ``Capacity.evict_over`` does at the end
of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from math import inf

import numpy as np

from kvpagoda.core.blocks.group import BlockNames
from kvpagoda.core.groups.base import CacheGroup, Freed
from kvpagoda.errors import CheckFailed
from kvpagoda.free_list import IdPool
from kvpagoda.namespace import owner_of

_AHEAD = 32
"""Eviction frees 1/32 of a quota more than is needed, since it walks all texts of a namespace."""


@dataclass(eq=False)
class Account:
    """What is cached of a namespace ``own``, a ``namespace_key``, in all its epochs: ``nbytes``, of at most ``most``.

    ``keys``: its keys in the prefix tree so far. ``stuck_at``: its bytes, and ``PrefixCache.unused``, when all of it was in
    use."""

    own: bytes
    most: float
    number: int
    nbytes: int = 0
    keys: dict[bytes, None] = field(default_factory=dict)
    stuck_at: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether it is over its quota."""
        return self.nbytes > self.most

    @property
    def excess(self) -> float:
        """How many bytes to evict once it is over its quota, some ahead included."""
        return self.nbytes - self.most + self.most // _AHEAD


class Quota:
    """The accounts of all namespaces in which something is cached. ``most_of``: namespace_key -> the bytes that it may have,
    None for no limit. ``over``: the accounts that have more, as keys: in the order in which they did."""

    def __init__(self, most_of: Callable[[bytes], int | None], groups: Many[CacheGroup]) -> None:
        self._most_of, self._groups = most_of, groups
        self.over: dict[Account, None] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all accounts: nothing is cached."""
        self._numbers = IdPool(first=1)
        self._accounts: dict[int, Account] = {}
        self._by_own: dict[bytes, Account] = {}
        self._by_key: dict[bytes, Account] = {}
        self._of_id = [np.zeros(group.plan.num_rows, np.int32) for group in self._groups]
        self.over.clear()

    def nbytes(self) -> dict[bytes, int]:
        """Return namespace_key -> cached bytes, for all namespaces that have any."""
        return {account.own: account.nbytes for account in self._accounts.values()}

    def ids(self, group: CacheGroup, account: Account) -> BlockNames:
        """Return the cached blocks of ``group`` in ``account``. O(blocks of the group)."""
        return BlockNames(np.flatnonzero(self._of_id[group.index] == account.number))

    def add(self, group: CacheGroup, ids: BlockNames, key: bytes) -> None:
        """Count those of ``ids``, cached blocks of ``group``, that are not counted yet, for the namespace with ``key`` in the
        tree. O(n)."""
        of_id = self._of_id[group.index]
        fresh = ids[of_id[ids] == 0]
        if len(fresh):
            account = self._by_key.get(key) or self._open(key)
            of_id[fresh] = account.number
            account.nbytes += len(fresh) * group.plan.row_nbytes
            if account.is_over:
                self.over[account] = None

    def freed(self, freed: Freed) -> None:
        """Count what is ``freed`` no more. O(n)."""
        for number, ids in freed.blocks:
            if len(ids):
                of_id, nbytes = self._of_id[number], self._groups[number].plan.row_nbytes
                found, counts = np.unique(of_id[ids], return_counts=True)
                of_id[ids] = 0
                for one, count in zip(found.tolist(), counts.tolist()):
                    self._subtract(self._accounts[one], count * nbytes)

    def check(self, keys_of: dict[int, dict[bytes, BlockNames]]) -> None:
        """Prove the accounts. ``keys_of``: index of a group -> key in the tree -> its cached ids. Raises CheckFailed."""
        nbytes: dict[bytes, int] = {}
        for number, by_key in keys_of.items():
            for key, ids in by_key.items():
                if len(ids):
                    own = owner_of(key)
                    nbytes[own] = nbytes.get(own, 0) + len(ids) * self._groups[number].plan.row_nbytes
        if nbytes != self.nbytes():
            odd = {own for own in {*nbytes, *self._by_own} if nbytes.get(own) != self.nbytes().get(own)}
            text = f"quota: {len(odd)} namespaces have other bytes than are counted"
            raise CheckFailed(text, needed=[nbytes.get(own, 0) for own in odd], available=[*self.nbytes().values()])
        if self.over.keys() != {account for account in self._accounts.values() if account.is_over}:
            raise CheckFailed("quota: namespaces that are over it are not listed")

    def _open(self, key: bytes) -> Account:
        """Return the account of the namespace with ``key``, which has none by this key."""
        own = owner_of(key)
        account = self._by_own.get(own)
        if account is None:
            most, number = self._most_of(own), int(self._numbers.take(1)[0])
            account = self._accounts[number] = self._by_own[own] = Account(own, inf if most is None else most, number)
        account.keys[key] = None
        self._by_key[key] = account
        return account

    def _subtract(self, account: Account, nbytes: int) -> None:
        account.nbytes -= nbytes
        if not account.is_over:
            self.over.pop(account, None)
        if not account.nbytes:
            del self._accounts[account.number], self._by_own[account.own]
            for key in account.keys:
                del self._by_key[key]
            self._numbers.give([account.number])
