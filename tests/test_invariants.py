"""``check`` finds every disagreement of a request's lengths, its tokens, its row of a persistent batch, and what is
published of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda import KVCache, Limits, PersistentBatch
from kvpagoda.core.cache.request import DecodeRows, RequestState
from kvpagoda.errors import CheckFailed
from kvpagoda.schema import Attention, Layer, Schema
from raises import raises


class Broken(NamedTuple):
    """What a change by hand may change: a cache, and in it a request of 12 tokens, of which 8 are published.

    ``row``: of its persistent batch, which has 4 tokens more than the request itself."""

    cache: KVCache
    request: RequestState
    rows: DecodeRows
    row: int


def own_tokens(broken: Broken) -> None:
    broken.request.tokens = broken.request.tokens.copy()  # the tree may have a view of the old ones
    broken.request.tokens[5] += 1


def own_media(broken: Broken) -> None:
    broken.request.media_ids = {5: -7}


def namespace(broken: Broken) -> None:
    root = broken.request.lease.node
    while root.parent is not None:
        root = root.parent
    assert root.root is not None
    root.root = (root.root[0], b"of another tenant")


def blocks(broken: Broken) -> None:
    full, slot = broken.cache.core.full, broken.request.slot
    assert full is not None
    full.table.cells[slot, [0, 1]] = full.table.cells[slot, [1, 0]]


def own_length(broken: Broken) -> None:
    broken.request.own_length = 7


def length(broken: Broken) -> None:
    broken.rows.lengths[broken.row] = 7


def known(broken: Broken) -> None:
    broken.rows.known[broken.row] += 1


def columns(broken: Broken) -> None:
    broken.rows.newest = broken.rows.newest[:, :3]


def known_tokens(broken: Broken) -> None:
    """As if a flush had been interrupted after it appended other tokens than the row has."""
    broken.request.append(broken.rows.newest[broken.row, :2] + 1)


def prompt_tokens(broken: Broken) -> None:
    broken.request.prompt_length = 10
    broken.request.tokens = np.append(broken.request.tokens[:8], broken.rows.newest[broken.row, 1::-1])


def unread(broken: Broken) -> None:
    broken.rows.alone.add(broken.request)


def unknown(broken: Broken) -> None:
    del broken.rows.row_of[broken.request]


def broken_by(change: Callable[[Broken], None]) -> KVCache:
    """Return a cache in which ``change`` has changed a request, after ``check`` found nothing."""
    schema = Schema((Layer(0, "full", (Attention(1, 2, 2, "float32"),)),), "test", vocab_size=100)
    cache = KVCache(schema, num_blocks=20, max_requests=2, block_size=4, device="none", limits=Limits(40))
    other, sequence = cache.open([50, 51, 52]), cache.open(range(8), reserve=20)
    for one in (other, sequence):
        one.commit(one._request.tokens[: one.prompt_length])
    cache.lookup([1])  # publishes what was left for later
    running: PersistentBatch = cache.persistent_batch([other, sequence], num_rows=3)
    for token in range(20, 24):
        running.extend()
        running.commit(np.array([token, token + 10]))
    request = sequence._request
    assert request.rows is not None and (request.lease.num_blocks, request.own_length, request.length) == (2, 8, 12)
    cache.check()
    change(Broken(cache, request, request.rows, 1))
    return cache


@pytest.mark.parametrize(
    ("change", "needed", "available"),
    [
        (own_tokens, "published tokens", (0, 2)),
        (own_media, "published tokens", (0, 2)),
        (namespace, ANY, None),
        (blocks, [2, 3], [3, 2]),
        (own_length, 7, (8, 12)),
        (length, 8, (8, 7)),
        (known, 8, (9, 12)),
        (columns, 3, (3, 7)),
        (known_tokens, "newest tokens", 1),
        (prompt_tokens, "newest tokens", 1),
        (unread, "row", 1),
        (unknown, "row", 1),
    ],
)
def test_check_finds(change: Callable[[Broken], None], needed: object, available: object) -> None:
    with raises(CheckFailed, needed=needed, available=available):
        broken_by(change).check()


def test_a_lease_never_covers_more_than_the_request_has_itself() -> None:
    """The batch has the tokens of a third block, and the request does not have them yet: they cannot be published."""

    def third_block(broken: Broken) -> None:
        broken.request.lease.num_blocks = 3

    cache = broken_by(third_block)
    cache.core.prefix.tree.check = lambda: None  # type: ignore[method-assign]
    with raises(CheckFailed, needed=3, available=8):
        cache.check()
