"""The synthetic workload: the same seed gives the same requests, chains are prefixes, arrivals ascend."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from kvpagoda.errors import BadInput
from kvpagoda.replay import Reuse, Trace, lru_hits, synthetic, workload


def test_a_seed_gives_the_same_requests_and_a_shorter_trace_is_the_beginning_of_a_longer_one() -> None:
    a, b, other = synthetic(300, seed=3), synthetic(500, seed=3), synthetic(300, seed=4)
    assert (len(a), len(b)) == (300, 500)
    assert np.array_equal(a.ids, b.ids[: a.num_refs]) and np.array_equal(a.arrivals, b.arrivals[:300])
    assert np.array_equal(a.output_lengths, b.output_lengths[:300])
    assert not np.array_equal(a.input_lengths, other.input_lengths)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_requests_are_well_formed(block_size: int) -> None:
    trace = synthetic(200, block_size=block_size)
    assert (np.diff(trace.arrivals) >= 0).all()
    assert np.array_equal(np.diff(trace.starts), trace.input_lengths // block_size)
    assert trace.blocks is trace.ids, "an id always stands behind the same chain"
    assert trace.output_lengths.min() >= 1 and trace.input_lengths.max() < 250_000


@pytest.mark.parametrize("kind", range(3))
def test_every_kind_alone_has_something_to_reuse(kind: int) -> None:
    trace = Trace.read(workload(shares=np.eye(3)[kind]), limit=600)
    reuse = lru_hits(Reuse.of(trace), [trace.num_distinct])[0] / trace.num_refs
    assert 0.5 < reuse < 0.999


def test_default_workload_is_a_mix() -> None:
    lengths = synthetic(2_000).input_lengths
    assert lengths.min() < 1_000 and lengths.max() > 50_000


@pytest.mark.parametrize(
    "arguments",
    [{"seed": -1}, {"block_size": 0}, {"shares": (1, 1)}, {"shares": (0, 0, 0)}, {"shares": (-1, 1, 1)},
     {"shares": (float("nan"), 1, 1)}],
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        list(islice(workload(**arguments), 1))  # type: ignore[arg-type]
