"""What a batch would do to an index, worked out before: what no publisher sends is refused while nothing has changed."""

from __future__ import annotations

import numpy as np

from kvpagoda.arrays import NO_TOKEN
from kvpagoda.errors import BadInput, shown
from kvpagoda.events.event_log import TEXT
from kvpagoda.events.index import PrefixIndex
from kvpagoda.events.wire import BlockRemoved, BlockStored, Name
from kvpagoda.namespace import checked_media
from kvpagoda.tiers.keys import KEY_NBYTES

_PADDING = np.int32(NO_TOKEN).tobytes()


def group_of(index: PrefixIndex, event: BlockStored | BlockRemoved) -> int:
    """Return the number of the group that ``event`` is about. Raises BadInput if the cache has none of this number and
    name."""
    number, groups = event.group_idx, index.followed.groups
    if number is None and index.followed.full == TEXT and event.group_name is None:
        return TEXT
    if number is None or number >= len(groups) or event.group_name != groups[number][0]:
        known = [name for name, _ in groups]
        raise BadInput(
            f"group {number} named {event.group_name!r} is not in this cache, which has {known}",
            needed=number, available=known,
        )  # fmt: skip
    return number


class EventTrial:
    """The blocks that ``index`` would have after the events given to ``keys``. Changes nothing but the numbers of media."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._stored: dict[Name, tuple[Name, bytes]] = {}  # name -> the block or namespace before it, its key
        self._places = set[tuple[Name, bytes]]()  # the values of ``_stored``
        self._removed = set[Name]()  # blocks of the index, also if they were stored again
        self._children: dict[Name, int] = {}  # how many blocks follow a block, where that changed

    def keys(self, event: BlockStored | BlockRemoved) -> list[bytes]:
        """Take ``event``. Returns the keys of the blocks that it stores in the group of texts, int32 ``[block size]`` each,
        otherwise ``[]``. O(tokens). Raises BadInput."""
        if isinstance(event, BlockStored):
            return self._store(event)
        self._remove(event)
        return []

    def _store(self, event: BlockStored) -> list[bytes]:
        names, above, size = event.block_hashes, event.parent_block_hash, self._index.followed.block_size
        num_tokens = len(event.token_ids)
        if event.block_size != size or not (len(names) - 1) * size < num_tokens <= len(names) * size:
            raise BadInput(
                f"{num_tokens} tokens in {len(names)} blocks of {event.block_size}; this cache has blocks of {size}",
                needed=event.block_size, available=size,
            )  # fmt: skip
        if len(event.namespace) != (KEY_NBYTES if above is None else 0):
            raise BadInput(f"an event after block {shown(above)} has a namespace of {len(event.namespace)} bytes")
        if group_of(self._index, event) != self._index.followed.full:
            self._check_known(names)
            return []
        keys = self._keys(event, size)
        if above is None:
            above, root = event.namespace, self._index.roots.get(event.namespace)
            siblings = None if root is None else root.children
        else:
            self._check_known([above])
            is_new = above in self._stored
            siblings = None if is_new else self._index.blocks[above].children
            if (self._stored[above][1] if is_new else self._index.blocks[above].key).endswith(_PADDING):
                raise BadInput(f"block {shown(above)} is partial, so no block follows it", needed=above)
        sibling = None if siblings is None else siblings.get(keys[0])
        is_taken = sibling is not None and sibling.name not in self._removed
        if is_taken or (above, keys[0]) in self._places:
            raise BadInput(f"the text of block {shown(names[0])} has a block of another name already", needed=names[0])
        if len({*names}) < len(names) or any(map(self._is_known, names)):
            raise BadInput(f"of blocks {shown(names)} one is stored already, or twice", needed=names)
        self._children[above] = self._num_children(above) + 1
        self._children.update(dict.fromkeys(names, 1))
        self._children[names[-1]] = 0
        places = [*zip([above, *names], keys)]
        self._stored.update(zip(names, places))
        self._places.update(places)
        return keys

    def _remove(self, event: BlockRemoved) -> None:
        """Check that all blocks of ``event`` are known; of the group of texts the deepest come first."""
        is_text = group_of(self._index, event) == self._index.followed.full
        if not is_text:
            self._check_known(event.block_hashes)
            return
        for name in event.block_hashes:
            self._check_known([name])
            if count := self._num_children(name):
                raise BadInput(f"block {shown(name)} is removed before {count} blocks that follow it", needed=name)
            if name in self._stored:
                above, key = self._stored.pop(name)
                self._places.remove((above, key))
            else:
                self._removed.add(name)
                parent = self._index.blocks[name].parent
                assert parent is not None
                above = parent.name
            self._children[above] = self._num_children(above) - 1

    def _is_known(self, name: Name) -> bool:
        return name in self._stored or (name in self._index.blocks and name not in self._removed)

    def _check_known(self, names: list[Name]) -> None:
        """Raise BadInput unless all of ``names`` are blocks that are there."""
        for name in names:
            if not self._is_known(name):
                raise BadInput(f"block {shown(name)} is not known", needed=name)

    def _num_children(self, name: Name) -> int:
        """Return how many blocks follow block or namespace ``name``; of namespaces, since the trial began."""
        if name in self._children:
            return self._children[name]
        block = self._index.blocks.get(name)
        return 0 if block is None else len(block.children)

    def _keys(self, event: BlockStored, size: int) -> list[bytes]:
        """Return the keys of the blocks of ``event``: their tokens, with media ids. Raises BadInput."""
        keys = np.full(size * len(event.block_hashes), NO_TOKEN, np.int32)
        keys[: len(event.token_ids)] = event.token_ids
        extras, media = event.extra_keys or [], dict[int, bytes]()
        if extras and len(extras) != len(event.block_hashes):
            raise BadInput(
                f"extra_keys of {len(extras)} blocks for {len(event.block_hashes)}; give one for each, or None"
            )
        for number, extra in enumerate(extras):
            for place in extra or ():
                if isinstance(place, str):
                    continue  # the salt is in the namespace
                try:
                    digest, at = place
                    media[number * size + range(size).index(at)] = bytes.fromhex(digest)
                except (TypeError, ValueError):
                    raise BadInput(
                        f"{shown(place)} in extra_keys is no digest in hexadecimal with an offset below {size}"
                    ) from None
        for at, digest in checked_media(media, len(event.token_ids)).items():
            keys[at] = self._index.media_id(digest)
        text, step = keys.tobytes(), 4 * size
        return [text[begin : begin + step] for begin in range(0, len(text), step)]
