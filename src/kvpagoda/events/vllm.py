"""A router's view of a vLLM engine that publishes its own events, without anything of kvpagoda in it."""

from __future__ import annotations

from collections.abc import Mapping

from kvpagoda.arrays import TokenIds, as_tokens
from kvpagoda.errors import BadInput
from kvpagoda.events.vllm_index import NextHit, VllmIndex
from kvpagoda.events.wire import MEDIUM, AllBlocksCleared, BlockRemoved, EventBatch, Name, decode
from kvpagoda.namespace import Namespace, checked_media
from kvpagoda.units import whole_number

_MOST_WAITING = 4096
"""The most batches after a gap that are kept until the gap is closed."""


class VllmFollower:
    """Knows which blocks a vLLM engine has on its device, from what ``--kv-events-config`` publishes, and its next hit.

    Used as a ``Follower``. What vLLM's publisher has dropped from its buffer is lost, and blocks that were stored before
    are then unknown: ``is_complete`` is False until the engine clears its cache or starts again, and answers are no
    bound. Not for use from several threads at once.

    Args:
        drafts: the engine speculates with EAGLE or MTP, which computes the last block of a hit again, in groups that
            events do not name: every answer is then "at most".
    """

    has_heartbeat = False  #: an idle engine sends nothing

    def __init__(self, *, drafts: bool = False) -> None:
        self._drafts = drafts
        self._restart()

    def _restart(self) -> None:
        """Forget everything: the engine starts."""
        self._index = VllmIndex()
        self._next = 0  # number of the next batch to apply
        self._time = 0.0  # of the last batch applied
        self._asked = -1  # the number from which a replay was had in vain
        self._waiting: dict[int, EventBatch | None] = {}  # batches after a gap, by number; None: one that was refused
        self.num_lost = 0  #: batches that cannot be had, and removals of blocks that were never told

    @property
    def wanted(self) -> int | None:
        """The sequence number from which messages are missing; None if none are known to be missing."""
        return self._next if self._waiting else None

    @property
    def is_complete(self) -> bool:
        """Whether all that the engine published since it started is known here."""
        return self.wanted is None and not self.num_lost

    @property
    def num_blocks(self) -> int:
        """The number of names of blocks that the engine has; groups share them."""
        return len(self._index)

    def feed(self, sequence: int, payload: bytes) -> list[Name]:
        """Take a batch, live or replayed. A number that came before, in a batch that is newer, is that of an engine that has
        started again.

        Args:
            sequence: its number.
            payload: as vLLM's publisher sent it.

        Returns:
            ``[]``: vLLM does not tell which positions are lost with a block.

        Raises:
            BadInput: bytes that are not a batch, or those of a publisher of kvpagoda. The batch counts as lost.
        """
        number, refused = whole_number(sequence, "the number of a batch"), None
        try:
            batch: EventBatch | None = _read(payload)
        except BadInput as error:
            batch, refused = None, error
        if number < self._next and batch is not None and batch.ts > self._time:
            self._restart()
        if number == self._next or (number > self._next and len(self._waiting) < _MOST_WAITING):
            self._waiting[number] = batch
        self._advance()
        if refused is not None:
            raise refused
        return []

    def replay_ended(self, start: int) -> None:
        """Take note that a replay has ended: all batches that the publisher has were fed. Those that are missing when this
        comes twice are lost.

        Args:
            start: the number from which on was replayed.
        """
        if self.wanted != start:
            return
        if self._asked == start:
            first = min(self._waiting)
            self.num_lost += first - self._next
            self._next = first
            self._advance()
        self._asked = start

    def resumable(
        self,
        token_ids: TokenIds,
        namespace: Namespace | str | bytes | None = None,
        *,
        media: Mapping[int, bytes] | None = None,
    ) -> NextHit:
        """Return how many tokens of this prompt the engine has, and how many of these a new request need not compute.

        Args:
            token_ids: as the engine takes them: with all placeholders of media.
            namespace: its salt is the ``cache_salt`` of the request, its adapter the ``lora_name``; both text.
            media: offset of the first placeholder -> the hash by which vLLM identifies it, bytes of its hexadecimal.

        Raises:
            BadInput: ``token_ids`` are no vector of integers, ``media`` lie outside of the text, or vLLM has no such
                namespace: one with weights or an epoch, or whose parts are no text.
        """
        tokens = as_tokens(token_ids)
        places = {at: digest.hex() for at, digest in checked_media(media, len(tokens)).items()}
        space = namespace if isinstance(namespace, Namespace) else Namespace(salt=namespace)
        for what, part in (("salt", space.salt), ("adapter", space.adapter)):
            if part is not None and not isinstance(part, str):
                raise BadInput(f"the {what} of a request to vLLM is text, got {type(part).__name__}", needed=part)
        if space.weights is not None or space.epoch is not None:
            raise BadInput("events of vLLM name no weights; ask without them", needed=space.weights or space.epoch)
        hit = self._index.look_up(tokens, space.salt, space.adapter, places)  # type: ignore[arg-type]
        return hit._replace(at_most=hit.at_most or (self._drafts and hit.resumable > 0))

    def _advance(self) -> None:
        """Apply the batches that come next."""
        while self._next in self._waiting:
            batch = self._waiting.pop(self._next)
            self._next += 1
            if batch is None:
                self.num_lost += 1
                continue
            self._time = batch.ts
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    self._index.clear()
                    self.num_lost = 0
                elif event.medium != MEDIUM:
                    continue
                elif isinstance(event, BlockRemoved):
                    self.num_lost += not self._index.remove(event)
                else:
                    self._index.store(event)


def _read(payload: bytes) -> EventBatch:
    """Return the batch in ``payload``. Raises BadInput if it is none of vLLM."""
    batch = decode(payload)
    if batch.events and batch.events[0].instance is not None:
        raise BadInput("this batch is from a publisher of kvpagoda; a Follower reads it", needed="vLLM")
    return batch
