"""A router that follows ``docs/events.md``, and a ``Follower``, find what ``lookup`` finds: every schema and way to keep its
checkpoints, over one budget for all groups and over one each, alone and with a draft."""

from __future__ import annotations

import pytest

from random_driver.schemas import SCHEMA_NAMES

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

from router import Router
from traffic import Traffic

from kvpagoda.errors import SchemaError
from kvpagoda.events import EventStream, Follower, namespace_name
from kvpagoda.schema.at_rest import FORMATS

STEPS = 150
ORDERS = ("block", "layer")  # groups share one budget, or do not


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_drafted", [False, True], ids=["alone", "drafted"])
@pytest.mark.parametrize("checkpoint_format", [None, *FORMATS])
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_every_group_that_is_named_has_blocks(
    schema: str, checkpoint_format: str | None, is_drafted: bool, order: str
) -> None:
    try:
        traffic = Traffic(schema, 1, checkpoint_format=checkpoint_format, is_drafted=is_drafted, order=order)
    except SchemaError as error:
        assert is_drafted and "draft layers already" in str(error)
        return
    stream, router, follower = EventStream(traffic.log), Router(), Follower(b"s")
    messages, hits = [*stream.replay(0)], 0
    for _ in range(STEPS):
        traffic.step()
        messages += filter(None, [stream.drain()])
        for message in messages:
            router.hear(*message)
            follower.feed(*message)
        messages.clear()
        texts = [(tokens.tolist(), media) for tokens, media in (traffic.text(), traffic.text())]
        for text, media in texts:
            found = traffic.cache.lookup(text, media=media)
            expected = found.cached, found.resumable
            assert router.resumable(text, namespace_name(None, b"s"), media) == expected, (text, media)
            assert follower.resumable(text, media=media) == expected, (text, media)
            hits += found.resumable > 0
    ours, its = traffic.cache.plan.groups, router.info["groups"]
    drafts = [group for group in ours if group.growth.is_optional]
    assert len(its) == len(ours) - len(drafts) - any(group.growth.is_at_rest for group in ours)
    assert hits > 5
