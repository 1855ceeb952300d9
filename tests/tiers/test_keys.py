"""Keys: the same in every process, different as soon as anything differs."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from kvpagoda.errors import BadInput
from kvpagoda.tiers import layout_fingerprint, prefix_hashes, prefix_root, record_key
from raises import raises

LAYOUT = dict(weights="w", schema="s", formats="f", layout=1, block_size=16, rank=0, num_ranks=1)


def test_every_part_of_a_layout_counts() -> None:
    changed = [
        dict(weights="w2"), dict(schema="s2"), dict(formats="f2"), dict(layout=2), dict(block_size=32), dict(rank=1),
        dict(num_ranks=2), dict(weights="w\",\"s", schema=""), dict(weights="", schema="ws"), dict(layout=11, block_size=6),
    ]  # fmt: skip
    made = {layout_fingerprint(**{**LAYOUT, **change}) for change in ({}, *changed)}  # type: ignore[arg-type]
    assert len(made) == len(changed) + 1 and {len(one) for one in made} == {32}


def test_hashes_are_those_of_the_whole_prefix() -> None:
    root, tokens = prefix_root(b"tenant"), np.arange(67, dtype=np.int32)
    hashes = prefix_hashes(root, tokens, 16)
    assert len(hashes) == 4 and len(set(hashes)) == 4
    assert prefix_hashes(root, tokens[:40], 16) == hashes[:2]
    assert prefix_hashes(hashes[1], tokens[32:], 16) == hashes[2:]  # goes on from the block above
    other = tokens.copy()
    other[20] += 1
    assert [a == b for a, b in zip(hashes, prefix_hashes(root, other, 16))] == [True, False, False, False]
    shown = prefix_hashes(root, tokens, 16, {2: b"digest of an image"})
    assert [a == b for a, b in zip(hashes, shown)] == [True, True, False, False]
    assert prefix_hashes(root, np.empty(0, np.int32), 16) == []


def test_roots_keep_tenants_and_secrets_apart() -> None:
    roots = {prefix_root(*one) for one in [(b"a",), (b"b",), (b"",), (b"a", b"s"), (b"as",), (b"a", b"t")]}
    assert len(roots) == 6


def test_kinds_of_one_prefix_have_keys_of_their_own() -> None:
    a, b = bytes(32), bytes([1]) * 32
    keys = [record_key(*one) for one in [(a, a), (a, b), (b, a), (a, a, b"state"), (a, a, b"full")]]
    assert all(x != y for x, y in combinations(keys, 2)) and {len(key) for key in keys} == {32}


def test_another_process_makes_the_same_keys() -> None:
    code = (
        "import numpy as np; from kvpagoda.tiers import *;"
        "print(record_key(bytes(32), prefix_hashes(prefix_root(b'n', b's'), np.arange(8, dtype=np.int32), 4)[1]).hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    here = record_key(bytes(32), prefix_hashes(prefix_root(b"n", b"s"), np.arange(8, dtype=np.int32), 4)[1])
    assert run.stdout.strip() == here.hex() == ("a4137e1d8749540295a0d101cea36ce224300922b7094a0b3a4f8fe39521369c")


@pytest.mark.parametrize(
    "tokens",
    [np.zeros(4, np.int64), np.zeros((2, 2), np.int32), np.zeros(4, np.float32)],
    ids=["int64", "2-D", "float"],
)
def test_tokens_of_another_kind_are_refused(tokens: np.ndarray) -> None:  # type: ignore[type-arg]
    with raises(BadInput, needed=tokens.dtype, available=2):
        prefix_hashes(bytes(32), tokens, 2)


def test_a_long_secret_is_refused() -> None:
    with raises(BadInput, field="secret", needed=65, available=64):
        prefix_root(b"", bytes(65))
