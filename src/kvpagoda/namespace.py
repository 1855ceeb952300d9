"""Which requests may share blocks: namespaces of tenants, adapters and weights, and ids for images in a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from os import urandom
from typing import Any

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.errors import BadInput, shown
from kvpagoda.units import utf8, whole_number

__all__ = ["Media", "Namespace", "Namespaces", "checked_media", "namespace_key", "with_media"]

MOST_MEDIA = 2**31 - 1
"""Numbers of media: a media id is int32, below 0, and not ``NO_TOKEN``."""
LEAST_MEDIA, LEAST_RENEWED = 4096, 1024
"""So many digests of media, and numbers of namespaces, are kept whether or not anything has them."""
_NEVER = (-1, b"")


@dataclass(frozen=True)
class Namespace:
    """Which requests may share blocks: only requests of equal namespaces share anything.

    Each of ``salt``, ``adapter`` and ``weights`` is bytes, text or None; values of different types or in different
    fields never count as equal.

    Args:
        salt: a secret of the tenant; the trusted side sets it.
        adapter: the adapter that the rows were computed with.
        weights: which weights, for caches that serve several.
        epoch: compute the request with the weights of this ``KVCache.epoch`` to its end; None: with the newest. A
            request with the newest epoch and one with None share.
    """

    salt: str | bytes | None = None
    adapter: str | bytes | None = None
    weights: str | bytes | None = None
    epoch: int | None = None


def namespace_key(namespace: Namespace | str | bytes | None) -> bytes:
    """Return a namespace as bytes: different for different namespaces, and independent of the epoch.

    Args:
        namespace: text or bytes alone are a salt.

    Raises:
        BadInput: it is none.
    """
    if not isinstance(namespace, Namespace):
        namespace = Namespace(salt=namespace)
    return b"".join(_field(part) for part in (namespace.salt, namespace.adapter, namespace.weights))


def _field(part: Any) -> bytes:
    """Encode ``part`` as kind, length, content, so that different sequences of fields have different bytes."""
    if part is None:
        return b"n"
    if not isinstance(part, str | bytes):
        raise BadInput(f"a namespace is made of text, bytes and None, got {shown(part)}", needed=part)
    content = utf8(part, "a namespace") if isinstance(part, str) else part
    return (b"s" if isinstance(part, str) else b"b") + len(content).to_bytes(8, "little") + content


def fields_of(key: bytes) -> list[bytes | None]:
    """Return the contents of the fields that ``key`` is made of."""
    found, at = list[bytes | None](), 0
    while at < len(key):
        begin = at + 9
        if key[at : at + 1] == b"n":
            found.append(None)
            at += 1
        else:
            at = begin + int.from_bytes(key[at + 1 : begin], "little")
            found.append(key[begin:at])
    return found


def owner_of(key: bytes) -> bytes:
    """Return the ``namespace_key`` from which ``Namespaces.key`` made ``key``: what follows the first three fields.
    O(1)."""
    at = 0
    for _ in range(3):
        at += 1 if key[at : at + 1] == b"n" else 9 + int.from_bytes(key[at + 1 : at + 9], "little")
    return key[at:]


class Namespaces:
    """The keys of namespaces in the prefix tree.

    A key holds the fingerprint, the name of the epoch, a random number if the namespace was invalidated, and the
    ``namespace_key``. The random numbers keep other processes from finding records stored after an invalidation. The
    names of all epochs are kept, 16 bytes each.

    The numbers of namespaces in which nothing is cached and no request runs are forgotten in the end. For each, one of
    4,096 shares of all namespaces gets a new number: what was invalidated is never found again, nor is what tiers have
    of the others in that share in which nothing is cached and no request runs.

    Args:
        fingerprint: of the cache's schema and layout.
        name: of the first epoch.
    """

    def __init__(self, fingerprint: str = "", name: bytes = b"") -> None:
        self._fingerprint, self._epochs = _field(fingerprint), [name]
        self._renewed: dict[bytes, tuple[int, bytes]] = {}  # namespace_key -> last epoch, number
        self._shares: dict[bytes, tuple[int, bytes]] = {}  # the same, of all others in a share
        self._most_renewed = LEAST_RENEWED
        self._known: dict[Namespace | str | bytes | None, bytes] = {}  # recent results of key()

    @property
    def epoch(self) -> int:
        """How many times all namespaces were renewed."""
        return len(self._epochs) - 1

    def name_of(self, epoch: int) -> bytes:
        """Return the name of an epoch: equal names in two processes mean equal weights.

        Args:
            epoch: its number.
        """
        return self._epochs[epoch]

    def key(self, namespace: Namespace | str | bytes | None) -> bytes:
        """Return the key under which a namespace is cached now.

        Args:
            namespace: text or bytes alone are a salt.

        Raises:
            BadInput: it is none, or names an epoch that does not exist yet.
        """
        try:
            known = self._known.get(namespace)
        except TypeError:  # a list, say
            text = f"a namespace is made of text, bytes and None, got {shown(namespace)}"
            raise BadInput(text, needed=namespace) from None
        if known is not None:
            return known
        epoch = namespace.epoch if isinstance(namespace, Namespace) else None
        epoch = self.epoch if epoch is None else whole_number(epoch, "the epoch of a namespace")
        if epoch > self.epoch:
            raise BadInput(
                f"epoch {epoch} does not exist yet, the newest is {self.epoch}", needed=epoch, available=self.epoch
            )
        key = self._key_of(namespace_key(namespace), epoch)
        if len(self._known) > 1024:
            self._known.clear()
        self._known[namespace] = key
        return key

    def is_current(self, key: bytes) -> bool:
        """Return whether a key is still the key of its namespace.

        Args:
            key: made by this object.
        """
        return key == self._key_of(owner_of(key), self.epoch)

    def is_renewed(self, key: bytes, epoch: int) -> bool:
        """Return whether the namespace of a key got another key by ``renew`` since. O(epochs) if so.

        Args:
            key: made by this object.
            epoch: it was made in this one, or before.
        """
        own = owner_of(key)
        return all(key != self._key_of(own, one) for one in range(epoch, -1, -1))

    def _key_of(self, own: bytes, epoch: int) -> bytes:
        last, number = self._number_of(own)
        return self._fingerprint + _field(self._epochs[epoch]) + _field(number if epoch <= last else None) + own

    def _number_of(self, own: bytes) -> tuple[int, bytes]:
        return self._renewed.get(own) or self._shares.get(_share_of(own), _NEVER)

    def renew(self, namespaces: Iterable[Namespace | str | bytes | None], keys: Iterable[bytes]) -> set[bytes]:
        """Give namespaces new keys in all epochs so far.

        Args:
            namespaces: which ones.
            keys: the keys in use.

        Returns:
            Those of ``keys`` that belonged to them.

        Raises:
            BadInput: one of ``namespaces`` is none.
        """
        owners, in_use = {namespace_key(namespace) for namespace in namespaces}, {*keys}
        self._known.clear()
        for own in owners:
            self._renewed[own] = self.epoch, urandom(16)
        if len(self._renewed) > self._most_renewed:
            self._forget({*map(owner_of, in_use)})
        return {key for key in in_use if owner_of(key) in owners}

    def _forget(self, live: set[bytes]) -> None:
        """Forget the numbers of all namespaces but those ``live``, whose keys stay as they are. O(namespaces)."""
        renewed = {own: self._number_of(own) for own in live}
        shares = dict(self._shares)
        for own, (last, _) in self._renewed.items():
            if own not in live:
                share = _share_of(own)
                shares[share] = max(last, shares.get(share, _NEVER)[0]), urandom(16)
        self._renewed = {own: number for own, number in renewed.items() if number != shares.get(_share_of(own), _NEVER)}
        self._shares, self._most_renewed = shares, 2 * len(self._renewed) + LEAST_RENEWED

    def renew_all(self, keys: Iterable[bytes], epoch: bytes | None = None) -> set[bytes]:
        """Give every namespace a new key, in a new epoch.

        Args:
            keys: the keys in use.
            epoch: a name for the new epoch that other processes know too; None: drawn at random.

        Returns:
            ``keys`` as a set.
        """
        self._epochs.append(urandom(16) if epoch is None else epoch)
        self._known.clear()
        return set(keys)


def with_media(tokens: Ids, first: int, media_ids: Mapping[int, int]) -> Ids:
    """Return tokens with media ids where media begin.

    Args:
        tokens: int32 ``[n]``.
        first: their offset in the text.
        media_ids: offset in the text -> media id.

    Returns:
        A copy, or ``tokens`` itself if no media begin in it.
    """
    inside = [at for at in media_ids if first <= at < first + len(tokens)]
    if inside:
        tokens = tokens.copy()
        tokens[np.array(inside) - first] = [media_ids[at] for at in inside]
    return tokens


def checked_media(media: Mapping[int, bytes] | None, num_tokens: int) -> dict[int, bytes]:
    """Return ``media`` as a dictionary.

    Args:
        media: offset -> digest; None: none.
        num_tokens: of the prompt.

    Raises:
        BadInput: an offset is no position in the prompt, or a digest has fewer than 16 bytes.
    """
    if media is None:
        return {}
    if not isinstance(media, Mapping):
        raise BadInput(f"media are a mapping from offset to digest, got {type(media).__name__}")
    placed = {}
    for offset, digest in media.items():
        at = whole_number(offset, "an offset of media")
        if at >= num_tokens:
            text = f"an offset of media is a position in the prompt, 0..{num_tokens - 1}, got {at}"
            raise BadInput(text, needed=at, available=num_tokens - 1)
        if not isinstance(digest, bytes) or len(digest) < 16:
            text = f"a digest of media is at least 16 bytes, got {shown(digest)} at token {at}"
            raise BadInput(text, needed=digest, available=16)
        placed[at] = digest
    return placed


def _share_of(own: bytes) -> bytes:
    """Return which of 4,096 shares of all namespaces the one with this ``namespace_key`` is in."""
    first, second = blake2b(own, digest_size=2).digest()
    return bytes((first, second & 15))


class Media:
    """Ids for images and sounds in a text: each digest gets a number below 0, which no token has.

    To compare texts, the media id replaces the token at which the image (or sound) begins: two texts share the blocks
    before it, and those from it on only if both have the same digest there. Digests are kept whole, as long as anything
    has their ids. No id that is in use is another's.

    Args:
        in_use: returns the ids that anything has; called once there are twice as many digests as the last time, and
            ``least()`` more.
        least: returns a number such as that of the cached blocks, so that a new digest costs O(1).
    """

    def __init__(self, in_use: Callable[[], set[int]] = set, least: Callable[[], int] = int) -> None:
        self._in_use, self._least, self._most = in_use, least, LEAST_MEDIA
        self._numbers: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._digests)

    def ids(self, media: Mapping[int, bytes] | None, num_tokens: int) -> dict[int, int]:
        """Return offset -> media id.

        Args:
            media: offset -> digest of at least 16 bytes; None: none.
            num_tokens: of the prompt.

        Raises:
            BadInput: an offset is no position in the prompt, or a digest is shorter.
        """
        placed = checked_media(media, num_tokens)
        if not self._numbers.keys() >= {*placed.values()}:
            self._add(placed.values())
        return {at: -1 - self._numbers[digest] for at, digest in placed.items()}

    def digests(self, media_ids: Mapping[int, int], block_size: int) -> dict[int, bytes]:
        """Return, by block number, where in that block media begin and their digests.

        Args:
            media_ids: offset -> media id.
            block_size: tokens of a block.

        Returns:
            Block number -> bytes that do not depend on this process.
        """
        found: dict[int, bytes] = {}
        for at in sorted(media_ids):
            block, offset = divmod(at, block_size)
            place = offset.to_bytes(8, "little") + _field(self.digest(media_ids[at]))
            found[block] = found.get(block, b"") + place
        return found

    def digest(self, media_id: int) -> bytes:
        """Return the digest of a media id.

        Args:
            media_id: which ``ids`` made.
        """
        return self._digests[-1 - media_id]

    def clear(self) -> None:
        """Forget all digests. Only when nothing is cached."""
        self._numbers.clear()
        self._digests.clear()
        self._most = LEAST_MEDIA

    def _add(self, digests: Collection[bytes]) -> None:
        """Give numbers to those of ``digests`` that have none, after what nobody has any more is forgotten if that is
        due. An interrupt leaves at most a number without its digest's."""
        if len(self._digests) >= self._most:
            live, new = self._in_use(), {*digests}
            numbers = self._numbers.items()
            self._numbers = {one: number for one, number in numbers if one in new or -1 - number in live}
            self._digests = {number: one for one, number in self._numbers.items()}
            self._most = 2 * len(self._digests) + max(LEAST_MEDIA, self._least())
        for digest in digests:
            if digest in self._numbers:
                continue
            while self._next in self._digests:
                self._next = (self._next + 1) % MOST_MEDIA
            self._digests[self._next] = digest
            self._numbers[digest] = self._next
            self._next = (self._next + 1) % MOST_MEDIA
