"""What reuses take, and what running requests hold, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from mixes import trace_of

from kvpagoda import BadInput, Schema
from kvpagoda.replay import Trace
from kvpagoda.replay.offline.demand import Needs, Texts, demand_of, held_by_running
from kvpagoda.replay.offline.lives import Lives
from kvpagoda.schema import FULL, Attention, Compressed, Growth, Layer, Recurrent, Rows
from kvpagoda.schema.kinds import LayerKind
from raises import raises


def test_running_requests_hold_what_they_share_once() -> None:
    """Requests 0 and 1 run after 5 and 4 tokens, of which they have 2 in common; request 2 is just admitted."""
    trace = trace_of([[1, 2, 3], [1, 2, 4, 5], [7]], [2, 1, 1])
    texts, needs = Texts(trace, 1), Needs(100.0, ((3, 10.0),), 1.0)
    columns = np.array([(1, 0, 5), (2, 0, 5), (2, 1, 4)], np.int64).T
    lives = Lives(3, np.array([0, 1, 2]), np.array([2, 2, 2]), *columns, np.zeros(3, np.int64))
    assert held_by_running(texts, lives, needs).tolist() == [
        0,
        5 * 100 + 3 * 10 + 1,
        (3 + 2 + 2) * 100 + (3 + 2) * 10 + 2,
    ]


def test_what_a_reuse_takes() -> None:
    """Request 0 runs longest. Request 2 has 2 tokens in common with 0 and 1 and one more with 0: all of them have to lie there
    from the step after the end of request 0 on. Request 3 has nothing in common with others."""
    trace = trace_of([[1, 2, 3], [1, 2], [1, 2, 3], [9]], [1, 1, 1, 1])
    texts, needs = Texts(trace, 1), Needs(100.0, ((2, 10.0),), 1.0)
    columns = np.array([(1, 0, 3), (1, 1, 2), (2, 0, 3), (3, 0, 4)], np.int64).T
    admitted, ended = np.array([0, 0, 5, 5]), np.array([3, 1, 5, 5])
    demand = demand_of(texts, Lives(6, admitted, ended, *columns, np.zeros(4, np.int64)), needs)
    assert [demand.request.tolist(), demand.first.tolist(), demand.last.tolist()] == [[2], [4], [5]]
    assert demand.end.tolist() == [3] and demand.nbytes.tolist() == [3 * 100 + 2 * 10 + 1]


def layers(*kinds: LayerKind) -> Schema:
    return Schema(tuple(Layer(i, kind.__class__.__name__, (kind,)) for i, kind in enumerate(kinds)))


def test_the_needs_of_a_schema() -> None:
    """Of a window the oldest row is not read, be it in blocks or in a ring. Chunks, sinks and what is optional count
    nothing, and compressed entries by the token."""

    def attention(law: Growth, **more: int) -> Attention:
        return Attention(2, 16, 16, "bfloat16", law, **more)  # 128 bytes a token

    states = Recurrent((Rows("conv", (3, 8), "float32"), Rows("matrix", (4, 4), "float32", count=2)), verify_width=2)
    compressed = Compressed(64, 32, "bfloat16", ratio=4)  # 128 bytes for an entry and for a row of the ring
    for kinds, needs in (
        ([attention(FULL)] * 3, Needs(3 * 128)),
        ([attention(FULL), attention(Growth(window=32))], Needs(128, ((31, 128),))),
        (
            [attention(Growth(window=32)), attention(Growth(window=8)), attention(Growth(window=32))],
            Needs(0, ((31, 256), (7, 128))),
        ),
        ([attention(FULL), states, states], Needs(128, (), 2 * (96 + 128))),
        ([compressed, replace(compressed, ratio=0)], Needs(32, ((31, 256),))),
        ([attention(Growth(window=32), num_sinks=4)], Needs(0, ((31, 128),))),
        ([attention(Growth(chunk=32)), attention(FULL), attention(Growth(is_optional=True))], Needs(128)),
        ([attention(FULL), attention(Growth(window=8, is_optional=True))], Needs(128)),
    ):
        assert Needs.of(layers(*kinds)) == needs


def test_ids_of_several_sizes_are_refused() -> None:
    request = {"timestamp": 0, "input_length": 5, "output_length": 1}
    trace = Trace.read([{**request, "hash_ids": [1, 2], "block_tokens": [2, 3]}])
    with raises(BadInput, needed=2, available=3) as error:
        Texts(trace, 512)
    assert (error.value.needed, error.value.available) == (2, 3) and error.value.hint
