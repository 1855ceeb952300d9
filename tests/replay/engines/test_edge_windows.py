"""SGLang's profile of models with windows: by hand, and beside the installed engine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from checked import Checked, serve_all
from judges import SGLANG, agreement
from letters import hits, trace

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import oracle
from benchmarks.peers import Process

from kvpagoda.errors import BadInput
from kvpagoda.replay import Group, Schedule, replay
from kvpagoda.replay.engines import edge_windows
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import serve_with
from kvpagoda.replay.engines.edge_windows import WindowLRU, WindowTree, pools
from kvpagoda.replay.engines.text_tree import Edge
from raises import raises

WINDOW = Group.from_text("full+window:5")  # one block of 4 tokens is read before the newest token


def test_both_kinds_of_layers_have_a_pool() -> None:
    assert pools(1_000, Group.from_text("full+5*window:1024")) == (200, 160, 1024)
    assert pools(1_000, Group.from_text("full")) == (1_000, 0, 0)
    for groups in ("full+state", "full+window:8+window:16", "window:8", "full+chunk:8"):
        with raises(BadInput, needed=tuple(one.kind for one in Group.from_text(groups))):
            pools(1_000, Group.from_text(groups))
    with raises(BadInput, needed="sglang-0.5.23", available=8):
        replay(trace("ab"), 20, engine=SGLANG, block_size=4, groups=WINDOW, retention=8)


def test_a_text_is_resumed_behind_its_windows_and_keeps_those_where_texts_part() -> None:
    """The first text frees the windows of "ab" while it runs, and so the second one finds nothing; it publishes "ab" with its
    windows, which the third one finds. An output of one token is over before windows are freed."""
    texts = "abcd", "abx", "aby", "abcdz"
    assert hits(SGLANG, 60, *texts, output=9, groups=WINDOW) == [0, 0, 2, 4]
    assert hits(SGLANG, 60, *texts, groups=WINDOW) == [0, 2, 2, 4]


def test_windows_leave_before_the_blocks_of_the_text() -> None:
    """17 blocks for both kinds are 9 in full attention and 7 with windows: "efg" leaves no room for the windows of "ab"."""
    assert pools(17, WINDOW)[:2] == (9, 7)
    assert hits(SGLANG, 17, "abc", "efg", "abx", groups=WINDOW) == [0, 0, 2]
    assert hits(SGLANG, 17, "abc", "efgh", "abx", groups=WINDOW) == [0, 0, 0]
    chains = Chains(trace("abc", "efgh"), 4)
    cache = WindowLRU(chains, *pools(17, WINDOW))
    serve_with(cache, chains, Schedule())
    assert (cache.tree.num_blocks, cache.tree.num_windows, cache.num_evicted) == (7, 5, 2)


def test_an_edge_that_is_cut_leaves_two_of_the_same_age() -> None:
    """ "ab" and "c" are as old as "abc" was, and "ab" the older; both are older than "d"."""
    tree, blocks = WindowTree(3), Chains(trace("abc", "d", "abd"), 4)
    tree.publish(blocks.keys(0), 0, 0)
    tree.publish(blocks.keys(1), 0, 0)
    assert tree.match(blocks.keys(2)[:2])[0] == 2
    tree.check()
    left = []
    for _ in range(3):
        left.append([(len(edge.blocks), edge.has_window) for edge in tree.match(blocks.keys(0))[1].path])
        tree.evict_windows(1)
    assert left == [[(2, True), (1, True)], [(2, False), (1, True)], [(2, False)]] and tree.num_windows == 0


class CheckedWindows(Checked, WindowLRU):
    """Counts all blocks in every step."""


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(4, 96), Schedule(8, 256, shared=True)])
@pytest.mark.parametrize("size", [40, 200])
def test_no_block_is_lost(size: int, schedule: Schedule) -> None:
    chains = Chains(oracle.branches(100, size), 16)
    cache = CheckedWindows(chains, 60, 45, size)
    serve_all(cache, chains, schedule)
    assert cache.free_apart + cache.tree.num_idle == 45


of_the_engine = partial(agreement, {"name": "branches", "limit": 150})
"""Random texts that part often, with little memory and with more."""


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
@pytest.mark.parametrize(
    ("size", "groups"),
    [(1, "full+window:100"), (4, "full+window:128"), (16, "full+3*window:200"), (16, "full+window:40")],
)
def test_the_engine_itself(sglang: Process, size: int, groups: str, mode: str) -> None:
    row = of_the_engine(sglang, size, mode, groups, size)
    assert row["unequal"] == 0 and row["requests"] == 300 and row["hit_percent"] > 1


def test_its_tree_in_python(sglang: Process) -> None:
    assert of_the_engine(sglang, 16, "16 at once", "full+window:128", 3, core="python")["unequal"] == 0


@pytest.mark.parametrize("wrong", ["use", "branch", "split", "leaf", "interval"])
def test_a_difference_would_be_seen(sglang: Process, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are unequal if a look-up does not use windows, if the windows where texts part are not published first, if what is
    cut off counts as used, if a leaf stays without windows, and if an output frees its windows earlier."""
    asked = sglang, 16, "16 share a budget" if wrong == "interval" else "one at a time", "full+3*window:200", 7
    assert of_the_engine(*asked)["unequal"] == 0
    split = WindowTree._split

    def used(self: WindowTree, edge: Edge, at: int) -> Edge:
        upper = split(self, edge, at)
        self._use_windows(edge)
        return upper

    change: dict[str, tuple[object, str, object]] = {
        "use": (WindowTree, "_use_windows", lambda self, edge: None),
        "split": (WindowTree, "_split", used),
        "branch": (WindowLRU, "_branch", property(lambda self: 0, lambda self, value: None)),
        "leaf": (WindowTree, "_is_leaf", lambda self, edge: False),
        "interval": (edge_windows, "INTERVAL", 16),
    }
    monkeypatch.setattr(*change[wrong], raising=False)
    assert of_the_engine(*asked)["unequal"] > 0
