"""``KVCache``: a schema, a budget, and the requests that live off it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any, SupportsIndex

import numpy as np

from kvpagoda.batch.batch import Batch, LayerView, batch_of
from kvpagoda.batch.persistent import PersistentBatch
from kvpagoda.batch.step_buffers import StepBuffers
from kvpagoda.cache.admission import Admission
from kvpagoda.cache.core import Core, Settings
from kvpagoda.cache.event_log import EventLog
from kvpagoda.cache.guard import either_way, exclusive
from kvpagoda.cache.invariants import check
from kvpagoda.cache.lifecycle import Lifecycle
from kvpagoda.cache.lookup import look_up, prefetch
from kvpagoda.cache.namespace import Namespace, with_media
from kvpagoda.cache.options import Identity, Limits, Retention
from kvpagoda.cache.prefix_cache import Pin
from kvpagoda.cache.publishing import Publisher
from kvpagoda.cache.request import Request, State, buffer_of
from kvpagoda.cache.reuse import AnyNamespace, Reuse
from kvpagoda.cache.sequence import Fence, Sequence, requests_of
from kvpagoda.cache.stats import CacheStats, stats_of
from kvpagoda.cache.tier_hit import Prefetch
from kvpagoda.errors import BadInput, MissingExtra, StaleHandle
from kvpagoda.memory.no_memory import NoMemory
from kvpagoda.prefix import EvictionPolicy
from kvpagoda.prefix.tokens import as_tokens
from kvpagoda.schema import Plan, Schema
from kvpagoda.schema.kernel_fit import KernelNames
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.units import whole_number

NO_DEVICE = "none"


class KVCache:
    """The cache of one model on one device, or with no memory behind it.

    ``schema``: what each layer keeps (``Schema.from_hf_config``). ``budget``: bytes of memory, as a number or as text such as
    ``"2GiB"``; or ``num_blocks``, of a schema with one kind of layers or of all. Every byte is allocated here and none later.
    ``device``: a torch device; None: CUDA when a GPU is there, else the CPU; ``"none"``: no memory, for simulators and for
    schedulers in a process of their own, also where torch is not installed: batches then give numpy arrays.
    ``max_requests`` may run at once. ``block_size``: tokens in a block (default: what the schema's layers ask for).
    ``policy``: which cached block goes first, by name (``kvpagoda.prefix.POLICY_NAMES``) or as an ``EvictionPolicy``.
    ``tiers``: where blocks and checkpoints go below the device, the fastest first (``kvpagoda.tiers.host_tier`` and others).
    ``dtype``: of what the schema keeps, in place of the model's own. ``retention``, ``identity``, ``limits``: what is kept for
    reuse, who this process is to others, how far requests may go. ``order``, ``kernels``, ``kernel_page``: see
    ``Schema.plan``; several groups share one block-major memory unless ``order`` is ``"layer"``. ``poison``: fill what nobody
    holds with NaN, to find stale reads. ``events``: a log of what changes of what is cached, for routers
    (``kvpagoda.events.EventLog``).

    One owner at a time: a cache and its sequences are used by one thread, or by several under one lock of theirs; a call
    while another thread is inside raises ConcurrentUse. An interrupt (Ctrl-C) between calls, or in one that is not yet
    changing anything, does no harm; one that falls into the few assignments of a change makes every further call raise
    NeedsReset, until ``reset``. Raises BadInput, NeverFits.

    >>> from kvpagoda import Schema
    >>> config = dict(model_type="llama", num_hidden_layers=1, hidden_size=8, num_attention_heads=1)
    >>> cache = KVCache(Schema.from_hf_config(config), "64KiB", device="none")
    >>> with cache.open(range(40)) as sequence:
    ...     sequence.commit(range(40))
    >>> cache.open(range(50)).cached_tokens
    40
    """

    def __init__(
        self,
        schema: Schema,
        budget: int | str | None = None,
        device: Any = None,
        max_requests: int = 64,
        block_size: int | None = None,
        policy: str | EvictionPolicy = "lru",
        tiers: Many[TierSpec] = (),
        dtype: str | None = None,
        *,
        num_blocks: int | None = None,
        retention: Retention | None = None,
        identity: Identity | None = None,
        limits: Limits | None = None,
        order: str | None = None,
        kernels: KernelNames = (),
        kernel_page: int | None = None,
        poison: bool = False,
        events: EventLog | None = None,
    ) -> None:
        retention, identity, limits = retention or Retention(), identity or Identity(), limits or Limits()
        for value, kind in ((schema, Schema), (retention, Retention), (identity, Identity), (limits, Limits)):
            if not isinstance(value, kind):
                raise BadInput(f"{kind.__name__.lower()} is a kvpagoda.{kind.__name__}, got {type(value).__name__}")
        self.schema = schema if dtype is None else schema.cast(str(dtype).removeprefix("torch."))
        plan = self.schema.plan(
            budget, max_requests, block_size, num_blocks=num_blocks, step_tokens=limits.step_tokens,
            checkpoints=retention.checkpoints, kernels=kernels, kernel_page=kernel_page, order=order,
        )  # fmt: skip
        memory = _memory(plan, device, poison, bool(tiers))
        fingerprint = f"{self.schema.fingerprint} {plan.record_layout}"
        settings = Settings(schema.vocab_size, fingerprint, policy, retention, identity, limits, tuple(tiers), events)
        self._core = core = Core(plan, memory, settings)
        self._guard, self._publisher = core.guard, Publisher(core)
        self._admission = Admission(core, self._publisher)
        self._lifecycle = Lifecycle(core, self._publisher, self._admission)
        self._reuse = Reuse(core, self._lifecycle)
        self._step_buffers = StepBuffers(memory.arrays)

    @property
    def plan(self) -> Plan:
        """What its bytes are for."""
        return self._core.plan

    @property
    def device(self) -> Any:
        """The torch device of the memory; None without memory."""
        return self._core.memory.arrays.device

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._core.block_size

    @property
    def max_context(self) -> int:
        """The longest request, in tokens."""
        return self._core.max_context

    @property
    def epoch(self) -> int:
        """How often ``invalidate`` was told of new weights of everything: of the newest weights, the number."""
        return self._core.namespaces.epoch

    @property
    def core(self) -> Core:
        """The parts of this cache, for what is built on top of it in this library: no part of the public interface."""
        return self._core

    # -- the life of a request ---------------------------------------------------------------------------------------

    @exclusive
    def open(
        self,
        token_ids: Any,
        namespace: AnyNamespace = None,
        priority: SupportsIndex = 0,
        *,
        capacity: SupportsIndex | None = None,
        reserve: SupportsIndex | None = None,
        media: Mapping[int, bytes] | None = None,
        prefetch: Prefetch | None = None,
        layerwise: bool = False,
        lookup: bool = True,
        publish: bool = True,
    ) -> Sequence:
        """Admit a request with this prompt: a slot, everything cached that it can start from, and room to go on.

        ``token_ids``: at least one int, or an int32 array. ``namespace``: only requests of one namespace share anything.
        ``priority``: of what it leaves in the cache, for the policies ``priority`` and ``ttl``; a whole number of 64 bits.
        ``capacity``: make room for so many first tokens (default the whole prompt; give 0 or a chunk when the prompt is
        computed in chunks). ``reserve``: tokens that the request may come to hold (default the prompt): blocks for them are
        reserved, so that it never waits for others once admitted. ``media``: offset -> digest (at least 16 bytes) of each
        image that begins there. What tiers have is loaded, if that is expected to be faster than computing it; ``prefetch``,
        of the same text, is used up. ``layerwise``: blocks of a layer may come in when ``batch.layer`` asks for them, as far
        as staging memory goes. Without ``lookup`` it starts from nothing, and publishes; without ``publish`` it starts from
        what is cached, and leaves nothing. Raises BadInput, NeverFits (larger than the whole cache), RetryLater (not now).
        Nothing is kept then.
        """
        core = self._core
        if not core.is_open:
            raise StaleHandle("this cache is closed")
        prompt = as_tokens(token_ids, core.vocab_size)
        length = len(prompt)
        if not length:
            raise BadInput("a request needs at least one token, got none")
        first = length if capacity is None else whole_number(capacity, "capacity")
        most = max(length, first if reserve is None else whole_number(reserve, "reserve"))
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            priority = whole_number(priority, "priority", -(2**63), below=2**63)
        if prefetch is not None and not isinstance(prefetch, Prefetch):
            raise BadInput(f"prefetch is what KVCache.prefetch returned, got {type(prefetch).__name__}")
        key, media_ids = core.namespaces.key(namespace), core.media.ids(media, length) if media else {}
        tokens = buffer_of(prompt, most if most <= 2 * length else length, core.block_size)
        request = Request(tokens, length, key, priority, media_ids, publishes=bool(publish))
        core.set_epoch(request, namespace.epoch if isinstance(namespace, Namespace) else None)
        sequence = Sequence(self._lifecycle, request)  # made before there is anything to lose
        self._admission.open(request, first, most, prefetch, layerwise=bool(layerwise), lookup=bool(lookup))
        return sequence

    @exclusive
    def prefetch(
        self, token_ids: Any, namespace: AnyNamespace = None, *, media: Mapping[int, bytes] | None = None
    ) -> Prefetch:
        """Begin to look for this prompt in the tiers, and to read what is there into host memory, while the request waits: for
        ``open(..., prefetch=...)``. At most half the staging memory of a tier is used for it; close what is not used.

        Raises BadInput, also where there are no tiers."""
        return prefetch(self._core, token_ids, namespace, media)

    @exclusive
    def lookup(self, token_ids: Any, namespace: Any = None, *, media: Any = None) -> Any:
        """The ``Lookup`` of this prompt: what ``open`` would find of it, and what running requests are about to publish of it.
        Admits nothing, needs no slot, holds nothing, and counts as no use.

        For a list or tuple of prompts a list, in their order: of each what it would find alone, since they are not compared
        with one another; ``namespace`` and ``media`` are those of all, or lists. ``[]`` is one prompt. Raises BadInput."""
        self._publisher.settle_waiting()
        return look_up(self._core, token_ids, namespace, media)

    @exclusive
    def step_limit(self, sequences: Sequence | Iterable[Sequence]) -> Any:
        """The most tokens that the next step of a sequence should compute: up to where its states should be copied for others,
        or, where nothing is due, to the longest context. For several sequences int64 ``[n]``. A longer step is right too, but
        nobody resumes there then, and ``stats().passed_boundaries`` counts it. Only models with states have such places.
        Raises StaleHandle for one that is closed or suspended."""
        most = [self._publisher.step_limit(one) for one in requests_of(sequences, self._core)]
        return most[0] if isinstance(sequences, Sequence) else np.array(most, np.int64)

    def fence(self, sequences: Iterable[Sequence]) -> Fence:
        """A context; inside, nothing that ``sequences`` hold is freed, published or moved, whatever is committed or closed: a
        step or a copy on another stream may still read and write it. What waits is done at the end. Raises StaleHandle,
        fencing none, if one is closed or suspended."""
        return Fence(self._lifecycle, requests_of(sequences, self._core))

    # -- steps -------------------------------------------------------------------------------------------------------

    @exclusive
    def batch(
        self, sequences: Many[Sequence], new_tokens: Many[SupportsIndex], pad_to: SupportsIndex | None = None
    ) -> Batch:
        """Index arrays for a step that computes ``new_tokens[i]`` tokens of ``sequences[i]``, for which there is room.

        ``pad_to`` rows in all (CUDA graphs): padded rows have one token, slot -1, length 0 and write to block 0. The
        arrays, which ``help(Batch)`` lists, lie in static buffers: they are valid until the next ``batch``. Raises BadInput,
        StaleHandle.
        """
        requests = requests_of(sequences, self._core)
        self._publisher.settle_alone()
        return batch_of(self._lifecycle, self._step_buffers, self.schema, requests, new_tokens, pad_to)

    @exclusive
    def persistent_batch(
        self,
        sequences: Iterable[Sequence] = (),
        num_rows: SupportsIndex | None = None,
        *,
        tokens_per_row: SupportsIndex | None = None,
    ) -> PersistentBatch:
        """Run ``sequences``, whose prompts are committed but for the last token at most, step by step: each step costs what
        changed. ``num_rows`` rows in all (default: as many as there are sequences, at least one), padded as ``batch`` does.
        ``tokens_per_row``: every step computes so many tokens of each row, padded ones too, and all its arrays have the same
        shape in every step, as graphs need. Raises BadInput, StaleHandle."""
        members = tuple(sequences)
        rows = max(1, len(members)) if num_rows is None else whole_number(num_rows, "num_rows", 1)
        width = None if tokens_per_row is None else whole_number(tokens_per_row, "tokens_per_row", 1)
        running = PersistentBatch(self._lifecycle, self.schema, rows, width)
        running.add(*members)
        return running

    @exclusive
    def layer(self, index: SupportsIndex) -> LayerView:
        """The memory of layer ``index`` (of its owner, if it shares one) without a step: to bind kernels to it, and to warm up
        graphs. It stays where it is as long as the cache lives. Raises BadInput."""
        return LayerView(self._core, self.schema.owner_of(whole_number(index, "a layer's index")))

    # -- what is kept ------------------------------------------------------------------------------------------------

    @exclusive
    def pin(self, token_ids: Any, namespace: AnyNamespace = None, *, media: Mapping[int, bytes] | None = None) -> Pin:
        """Keep what is cached of this text, and its last checkpoint: it goes last, when a request could not run otherwise.

        Raises OutOfBlocks beyond the share of the cache that pins may have (``Retention.pin_share``), and where running
        requests have reserved it. ``unpin`` ends it; ``pin.is_held`` tells.
        """
        core = self._core
        tokens = as_tokens(token_ids, core.vocab_size)
        media_ids = core.media.ids(media, len(tokens))
        self._publisher.settle_waiting()
        return self._reuse.pin(with_media(tokens, 0, media_ids), core.namespaces.key(namespace))

    @exclusive
    def unpin(self, pin: Pin) -> None:
        """End a pin; nothing happens if it was given up already. Raises BadInput for what is no pin."""
        self._reuse.unpin(pin)

    @exclusive
    def invalidate(self, *namespaces: AnyNamespace, weights: str | None = None) -> None:
        """From now on nothing is found of what was cached in ``namespaces`` (none given: in all): after an adapter or the
        weights were loaded anew. Requests that run go on with the new ones, as ``Sequence.epochs`` says, and leave nothing.
        Those whose ``Namespace`` has an epoch stay on it, and share with others on it until the last of them ends.

        What is kept below the device from then on is found by this process alone; with ``weights``, a digest of the new
        weights of all namespaces, by all that have the same. A name that outlives the process must not mean two adapters.
        """
        self._reuse.invalidate(namespaces, weights)

    @either_way
    def reset(self) -> None:
        """Forget everything that is kept for reuse: after new weights, say. Raises RetryLater while a request runs or is
        suspended. After NeedsReset it forgets every request too, whose sequences are closed then."""
        self._reuse.reset()

    @exclusive
    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until what was to be stored in tiers is stored, at most ``timeout`` seconds; whether it is."""
        return self._core.offloader is None or self._core.offloader.flush(timeout)

    # -- proof and figures -------------------------------------------------------------------------------------------

    @exclusive
    def stats(self) -> CacheStats:
        """Counters; cheap enough for every step."""
        self._publisher.settle_alone()
        return stats_of(self._core)

    @exclusive
    def check(self) -> None:
        """Prove from scratch that every block, slot and row is in exactly one place. Raises CheckFailed with the ids."""
        check(self._core)

    @either_way
    def close(self, timeout: float = 10.0) -> None:
        """Close every sequence, running or suspended; the cache takes no more requests. The memory goes with the object. Tiers
        get at most ``timeout`` seconds for what they were to store."""
        core = self._core
        if core.guard.is_torn:
            core.clear()
        for request in [*core.running.values(), *core.suspended]:
            if request.state is not State.CLOSING:
                self._lifecycle.close(request)
        if core.is_open and core.offloader is not None:
            core.offloader.close(timeout)
        core.is_open = False


def _memory(plan: Plan, device: Any, poison: bool, has_tiers: bool) -> NoMemory:
    """Memory for ``plan`` on ``device``; none for ``"none"``. Raises MissingExtra without torch."""
    if device == NO_DEVICE:
        return NoMemory()
    lacking = "a KVCache with memory needs torch; pip install 'kvpagoda[torch]', or give device='none'"
    with MissingExtra.unless("torch", lacking):
        from kvpagoda.memory.device_memory import DeviceMemory
    return DeviceMemory(plan, device, poison=poison, copies_aside=has_tiers)
