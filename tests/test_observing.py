"""The calls that can be wrapped are those that ``wrap_calls`` lists, and without an observer they are unchanged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvpagoda import BadInput, KVCache, Limits, Schema
from kvpagoda.abc import wrap_calls
from kvpagoda.handover import SharedMemory
from kvpagoda.schema import Attention, Layer
from kvpagoda.schema.fields import Growth
from kvpagoda.tiers import host_tier
from raises import raises

TINY = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
MIXED = Schema((*TINY.layers, Layer(1, "window", (Attention(1, 1, 1, "float16", Growth(window=8)),))), "mixed")


def test_each_call_of_the_list_is_seen_and_no_other() -> None:
    pytest.importorskip("xxhash")
    pytest.importorskip("torch")
    tiers, limits = [host_tier("1MiB")], Limits(swap="1MiB")
    cache = KVCache(MIXED, "1KiB", block_size=4, max_requests=2, device="cpu", tiers=tiers, limits=limits)
    sender = cache.sender(SharedMemory("1MiB"))
    seen = Counter[str]()

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            seen[name] += 1
            return call(*given, **named)

        return counted

    end = wrap_calls(cache.core.parts, around)
    for first in (*range(8), 0):
        with cache.open([first] * 40) as sequence:
            sequence.commit([first] * (40 - sequence.length))
            sequence.fork().close()
            cache.flush()
            sequence.suspend()
            sequence.resume()
    with cache.open([0] * 8) as sequence:
        sequence.commit([0] * (8 - sequence.length))
        cache.receive(sequence.hand_over(9.0, goes_on=True), SharedMemory()).close()
    sender.close()
    listed = set(re.findall(r"^ +(\w+) +\w+\.\w+  ", str(wrap_calls.__doc__), re.MULTILINE))
    assert set(seen) == listed and seen["suspend"] == seen["resume"] == 9
    assert (seen["open"], seen["receive"]) == (10, 1)
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
        wrap_calls(cache.core.parts, broken)
    end = wrap_calls(cache.core.parts, lambda name, call: call)
    with raises(BadInput, needed="an observer"):
        wrap_calls(cache.core.parts, lambda name, call: call)
    cache.open([1]).close()
    end()
    wrap_calls(cache.core.parts, lambda name, call: call)()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_kinds_of_observers_see_the_same_calls_and_end_in_any_order(order: tuple[int, int]) -> None:
    cache = KVCache(TINY, num_blocks=16, block_size=4, max_requests=2, device="none")
    seen = [Counter[str](), Counter[str]()]

    def counting(number: int) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
        def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*given: Any, **named: Any) -> Any:
                seen[number][name] += 1
                return call(*given, **named)

            return counted

        return around

    ends = [wrap_calls(cache.core.parts, counting(number), f"observer {number}") for number in range(2)]
    cache.open([1]).close()
    assert seen[0] == seen[1] == Counter(open=1, close=1)
    ends[order[0]]()
    cache.open([1]).close()
    assert seen[order[1]]["open"] == 2 and seen[order[0]]["open"] == 1
    again = wrap_calls(cache.core.parts, counting(order[0]), f"observer {order[0]}")
    ends[order[0]]()  # ended already: the new one of its kind stays
    ends[order[1]]()
    cache.open([1]).close()
    assert seen[order[1]]["open"] == 2 and seen[order[0]]["open"] == 2
    again()
    cache.open([1]).close()
    assert seen[order[0]]["open"] == 2 and not any("open" in vars(part) for part in cache.core.parts)
