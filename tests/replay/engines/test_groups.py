"""Which blocks groups of layers need, free and keep: worked out by hand, in blocks of 4 tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvpagoda.errors import BadInput
from kvpagoda.replay import Group


def marks(text: str) -> np.ndarray:
    return np.array([letter == "x" for letter in text], np.bool_)


@pytest.mark.parametrize(
    ("group", "cached", "num_tokens", "found"),
    [
        (Group(), "xx.x", 16, (0, 2)),
        (Group(), "xxxx", 14, (0, 3)),
        (Group("window", 8), "x.xx.x", 24, (2, 4)),  # the last two in a row: 7 tokens before the next one
        (Group("window", 8), "x.xx.x", 15, (0, 1)),  # the beginning is as good as a window
        (Group("window", 8), ".x.x", 16, (0, 0)),
        (Group("window", 5), "x..x", 16, (3, 4)),
        (Group("chunk", 8), "....x.", 22, (4, 5)),  # all before the chunk of token 22 is not read
        (Group("chunk", 8), "......", 22, (4, 4)),
        (Group("chunk", 8), "", 0, (0, 0)),
        (Group("state"), "x.x.", 16, (2, 3)),
        (Group("state"), "....", 16, (0, 0)),
    ],
)
def test_where_a_text_is_resumed(group: Group, cached: str, num_tokens: int, found: tuple[int, int]) -> None:
    assert group.find(marks(cached), num_tokens, 4) == found


@pytest.mark.parametrize(
    ("group", "skipped"),
    [(Group(), 0), (Group("window", 8), 3), (Group("chunk", 8), 8), (Group("state"), 9), (Group("window", 99), 0)],
)
def test_what_is_not_read_any_more_after_ten_tokens(group: Group, skipped: int) -> None:
    assert group.skipped(10) == skipped


@pytest.mark.parametrize(
    ("group", "retention", "kept"),
    [
        (Group("window", 8), 0, ".xx..xx."),
        (Group("window", 8), 16, ".xxx.xxx"),  # two blocks before tokens 16 and 32, and before 12 and 28
        (Group("window", 8), 8, "xxxxxxxx"),
        (Group("window", 8), None, "xxxxxxxx"),
        (Group("state"), 0, "..x...x."),
        (Group("state"), 16, "..xx..xx"),
        (Group("chunk", 8), 0, "xxxxxxxx"),
        (Group(), 0, "xxxxxxxx"),
    ],
)
def test_what_is_kept_for_others(group: Group, retention: int | None, kept: str) -> None:
    places = (13, 28, 0)
    assert group.kept(0, 8, 4, retention, places).tolist() == marks(kept).tolist()
    assert group.kept(3, 7, 4, retention, places).tolist() == marks(kept)[3:7].tolist()


def test_how_much_one_request_holds() -> None:
    kinds = Group("window", 8), Group("chunk", 8), Group("state"), Group()
    assert [kind.most(4, in_flight=16, longest=100) for kind in kinds] == [7, 6, 25, 25]
    assert [kind.most(4, in_flight=16, longest=10) for kind in kinds] == [4, 3, 3, 3]


def test_groups_in_words() -> None:
    assert Group.from_text("full+2*window:1024") == (Group(), Group("window", 1024), Group("window", 1024))
    for wrong in ("", "fill", "2*", "x*full", "window", "window:1", "chunk:x", "state:4"):
        with pytest.raises(BadInput):
            Group.from_text(wrong)
