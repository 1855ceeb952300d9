"""The calls that can be observed are those that ``observing`` lists, and without an observer they are unchanged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvpagoda import BadInput, KVCache, Limits, Schema
from kvpagoda.cache import observing
from kvpagoda.cache.observing import observe
from kvpagoda.schema import Attention, Layer
from kvpagoda.tiers import host_tier

TINY = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")


def test_each_call_of_the_list_is_seen_and_no_other() -> None:
    pytest.importorskip("xxhash")
    tiers, limits = [host_tier("1MiB")], Limits(swap="1MiB")
    cache = KVCache(TINY, num_blocks=16, block_size=4, max_requests=2, device="none", tiers=tiers, limits=limits)
    seen = Counter[str]()

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            seen[name] += 1
            return call(*given, **named)

        return counted

    end = observe(cache.core.parts, around)
    for first in (*range(8), 0):
        with cache.open([first] * 40) as sequence:
            sequence.commit([first] * (40 - sequence.length))
            cache.flush()
            sequence.suspend()
            sequence.resume()
    listed = set(re.findall(r"^    (\w+) +\w+\.\w+  ", str(observing.__doc__), re.MULTILINE))
    assert set(seen) == listed and seen["open"] == seen["suspend"] == seen["resume"] == 9
    end()
    end()
    before = Counter(seen)
    cache.open([1]).close()
    assert seen == before and not any(listed & vars(part).keys() for part in cache.core.parts)
    cache.close()


def test_a_second_or_failing_observer_changes_nothing() -> None:
    cache = KVCache(TINY, num_blocks=16, block_size=4, max_requests=2, device="none")

    def broken(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        raise ValueError(name)

    with pytest.raises(ValueError):
        observe(cache.core.parts, broken)
    end = observe(cache.core.parts, lambda name, call: call)
    with pytest.raises(BadInput, match="observed already"):
        observe(cache.core.parts, lambda name, call: call)
    cache.open([1]).close()
    end()
    observe(cache.core.parts, lambda name, call: call)()
