"""``KVCache``: the KV cache of one model, made from a schema and a budget. Requests are opened here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any, SupportsIndex, cast, overload

import numpy as np
import numpy.typing as npt

from kvpagoda.abc import CacheObserver
from kvpagoda.arrays import TokenIds, as_tokens
from kvpagoda.core.batch.batch import ROW_BITS, Batch, LayerView, batch_of
from kvpagoda.core.batch.persistent import PersistentBatch
from kvpagoda.core.batch.step_buffers import StepBuffers
from kvpagoda.core.cache.admission import Admission
from kvpagoda.core.cache.below import NoTiers
from kvpagoda.core.cache.core import Core, Settings
from kvpagoda.core.cache.guard import either_way, even_asleep, exclusive
from kvpagoda.core.cache.invariants import check
from kvpagoda.core.cache.lifecycle import Lifecycle
from kvpagoda.core.cache.lookup import AnyNamespace, Lookup, PrefixReuse, look_up, prefetch, should_wait
from kvpagoda.core.cache.options import Identity, Limits, Retention
from kvpagoda.core.cache.prefix_cache import Pin, PrefixCache
from kvpagoda.core.cache.request import RequestState, breakpoints_of, buffer_of
from kvpagoda.core.cache.sequence import Fence, Sequence, requests_of
from kvpagoda.core.cache.settling import Settler
from kvpagoda.core.cache.stats import CacheStats, stats_of
from kvpagoda.core.memory.no_memory import NoMemory
from kvpagoda.core.memory.remote_memory import RemoteMemory
from kvpagoda.core.prefix import EvictionPolicy
from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.namespace import Media, Namespace, with_media
from kvpagoda.schema import Plan, Schema
from kvpagoda.schema.kernel_fit import KernelNames
from kvpagoda.text import in_brackets
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.units import MOST, all_of, format_bytes, instance_of, items_of, option, real_number, truth, whole_number

if TYPE_CHECKING:
    import torch

    from kvpagoda.abc import Backing, Transfer
    from kvpagoda.core.handover.receiver import Receiver
    from kvpagoda.core.handover.sender import Sender
    from kvpagoda.core.offload.reader import Prefetch
    from kvpagoda.core.sleeping import Keep, Slept
    from kvpagoda.events.event_log import EventLog
    from kvpagoda.handover.ticket import Ticket
    from kvpagoda.hints import Hints, Outcome
    from kvpagoda.recording import Recording

NO_DEVICE = "none"
TIERS = "tiers are made by host_tier, disk_tier and others, or are a TierSpec"


class KVCache:
    """The KV cache of one model on one device; or its block accounting alone, without memory.

    Use a cache and its sequences from one thread, or from several that take one lock around every call: a call while
    another thread is inside raises ConcurrentUse. An interrupt (Ctrl-C) between calls, or in a call that has not begun
    to change anything, does no harm. If it comes within the few assignments of a change, every further call but
    ``close`` raises NeedsReset, until ``reset``.

    Args:
        schema: what each layer keeps (``Schema.from_hf_config``).
        budget: bytes of memory, as a number or as text such as ``"2GiB"``; all of it is allocated here, none later.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:0"`` or another of torch's; None: CUDA if a GPU is present, else the CPU;
            ``"none"``: no memory, for simulators and for schedulers in a process of their own. It works without torch,
            and batches give numpy arrays; a ``kvpagoda.Worker`` then has the memory, and must apply ``batch.copies``
            before each step.
        max_requests: requests that run at once.
        block_size: tokens in a block; None: what suits the schema's layers.
        policy: the eviction policy, by name (``kvpagoda.policies.POLICY_NAMES``) or as an ``EvictionPolicy``.
        tiers: where blocks and checkpoints are stored below the device, the fastest first (``kvpagoda.tiers.host_tier``
            and others).
        dtype: of what the schema keeps, instead of the model's own.
        num_blocks: instead of ``budget``, the number of blocks of every group.
        retention: what is kept for reuse.
        identity: which records in shared tiers this process may use.
        limits: how large requests and steps may be.
        order: see ``Schema.plan``; several groups share one block-major memory unless it is ``"layer"``.
        kernels: see ``Schema.plan``.
        kernel_page: see ``Schema.plan``.
        poison: fill free memory with NaN, to detect stale reads.
        events: a log of the changes of the prefix cache, for routers (``kvpagoda.events.EventLog``).
        record: the path of a file for trace events, which Perfetto shows: the life of every request, blocks, evictions
            (``docs/looking.md``); or a ``kvpagoda.recording.Recording`` with a clock of its own. ``close`` ends it.
        memory: provides the memory and takes it back while the cache sleeps, with the three calls of a
            ``kvpagoda.abc.Backing``.
        hints: a ``kvpagoda.hints.Hints`` with a clock or limits of its own; None: one is made when the first hint
            comes.
        observers: are told what happens in the cache, each a ``kvpagoda.abc.CacheObserver`` (``docs/own-parts.md``).
        sanitize: keep beside each row and state where it comes from, and raise CheckFailed before a step reads
            another's, or what nobody wrote: to find faults of this library, of an engine's calls and of its kernels
            (``docs/audit.md``). Implies ``poison``. Each step then costs O(tokens), and its rows are read once more: one
            comparison on the device and a byte for each row to the host, for each group of each request. If a scheduler
            and its ``Worker`` both sanitize, the worker finds copies that it was not sent.

    Raises:
        BadInput: an argument is of a wrong type or out of range, or arguments exclude each other; the message names it.
        NeverFits: the budget is too small for one request.
        SchemaError: the schema cannot be planned with these arguments.
        Exhausted: the system or device has no such memory.

    Examples:
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
        device: str | torch.device | None = None,
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
        record: str | os.PathLike[str] | Recording | None = None,
        memory: Backing | None = None,
        hints: Hints | None = None,
        observers: Iterable[CacheObserver] = (),
        sanitize: bool = False,
    ) -> None:
        retention, identity, limits = option(retention, Retention), option(identity, Identity), option(limits, Limits)
        if events is not None:
            from kvpagoda.events.event_log import EventLog as Log

            events = instance_of(events, Log, "events")
        schema, tiers = instance_of(schema, Schema, "schema"), all_of(tiers, TierSpec, TIERS)
        self.schema = schema if dtype is None else schema.cast(dtype)
        self._recording = None if record is None else _recording(record)
        plan = self.schema.plan(
            budget, max_requests, block_size, num_blocks=num_blocks, step_tokens=limits.step_tokens,
            checkpoints=retention.checkpoints, kernels=kernels, kernel_page=kernel_page, order=order,
            checkpoint_format=retention.checkpoint_format,
        )  # fmt: skip
        sanitize, sanitizer = truth(sanitize, "sanitize"), None
        own = _memory(plan, device, truth(poison, "poison") or sanitize, bool(tiers), memory, limits.page_locked)
        if sanitize:
            from kvpagoda.core.sanitizer import FollowedSettler, Sanitizer

            sanitizer = Sanitizer(plan, own)
            own = cast(NoMemory, sanitizer.memory)
        fingerprint = f"{self.schema.fingerprint} {plan.record_layout}"
        if plan.checkpoint_format is not None:
            fingerprint += f" {plan.checkpoint_format}"
        below, is_followed = _tiers(tiers, plan, identity, fingerprint), events is not None
        settings = Settings(schema.vocab_size, fingerprint, policy, retention, identity, limits, below, is_followed)
        self._core = core = Core(plan, own, settings)
        if events is not None:
            _follow(core, events)
        for observer in items_of(observers):
            core.observers.add(observer)
        self._guard, self._settler = core.guard, Settler(core)
        if sanitizer is not None:
            sanitizer.attach(core)
            self._settler = FollowedSettler(core, sanitizer)
        self._admission = Admission(core, self._settler)
        self._lifecycle = Lifecycle(core, self._settler, self._admission)
        self._reuse = PrefixReuse(core, self._lifecycle)
        self._step_buffers = StepBuffers(own.arrays)
        self._receiver: Receiver | None = None
        self._hints: Hints | None = None
        if hints is not None:
            self._hear(hints)
        if self._recording is not None:
            self._recording.follow(core)

    @in_brackets
    def __repr__(self) -> str:
        core, plan, guard = self._core, self._core.plan, self._core.guard
        state = "open" if core.is_open else "closed"
        if core.is_open and (guard.is_torn or guard.aside is not None):
            state = "needs reset" if guard.is_torn else "asleep"
        where = "without memory" if self.device is None else f"on {self.device}"
        blocks = (
            f"{group.growth.name} {group.free.num_free:,} + {group.num_evictable:,} of {group.plan.num_blocks:,}"
            for group in core.groups
        )
        return (
            f"of {plan.schema_name}, {format_bytes(plan.nbytes)} {where}, {state}: {len(core.running)} of "
            f"{plan.max_requests} requests, blocks free + cached: {', '.join(blocks)}"
        )

    @property
    def plan(self) -> Plan:
        """The ``Plan``: how the memory is divided among groups, checkpoints and requests."""
        return self._core.plan

    @property
    def device(self) -> torch.device | None:
        """The torch device of the memory; None without memory."""
        return self._core.memory.arrays.device

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._core.block_size

    @property
    def max_context(self) -> int:
        """The most tokens that one request may have."""
        return self._core.max_context

    @property
    def epoch(self) -> int:
        """The number of the newest weights: how often ``invalidate`` was called for all namespaces."""
        return self._core.namespaces.epoch

    @property
    def core(self) -> Core:
        """The parts of this cache, for modules of this library that build on it; not part of the public interface."""
        return self._core

    def _hear(self, hints: Hints) -> None:
        """Attach ``hints``. Raises BadInput."""
        from kvpagoda.hints import Hints as Made

        instance_of(hints, Made, "hints").attach(self._core, self._reuse)
        self._hints = hints

    # -- the life of a request ---------------------------------------------------------------------------------------

    @exclusive
    def open(
        self,
        token_ids: TokenIds,
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
        checkpoints: TokenIds | None = None,
        hints: object = None,
    ) -> Sequence:
        """Admit a request with this prompt: take a slot, share its cached prefix, and allocate blocks for the rest.

        What only a tier has is loaded if that is expected to be faster than computing it. If it raises, the request
        holds nothing.

        Args:
            token_ids: at least one int, or an int32 array, within the model's vocabulary.
            namespace: only requests of equal namespaces share blocks.
            priority: of the blocks that it publishes, for the policies ``priority`` and ``ttl``; a 64-bit integer.
            capacity: allocate blocks for this many first tokens; None: the whole prompt. Give 0 or a chunk if the
                prompt is computed in chunks.
            reserve: the most tokens that the request may have; None: the prompt. Blocks for them are reserved, so that
                an admitted request never waits for others.
            media: offset -> digest (at least 16 bytes) of each image that begins there.
            prefetch: what ``KVCache.prefetch`` returned for the same prompt; it is used up.
            layerwise: blocks from tiers may arrive layer by layer, when ``batch.layer`` asks for them, as far as
                staging memory suffices.
            lookup: if False, reuse nothing, but publish.
            publish: if False, reuse what is cached, but publish nothing.
            checkpoints: positions of the prompt, in tokens, at which others should be able to resume: the ends of a
                system prompt, of a tool's result. They are rounded down to whole blocks; ``Sequence.checkpoints`` says
                what became of each. With full attention alone nothing must be kept for them.
            hints: an envelope of hints about this request; ``sequence.hints`` has their outcomes, and none makes this
                call fail.

        Returns:
            The running request, with ``cached_tokens`` tokens that need not be computed.

        Raises:
            BadInput: an argument is of a wrong type or out of range, such as a token id outside of the vocabulary.
            NeverFits: the request is larger than the whole cache.
            RetryLater: no slot or no room is free now.
            StaleHandle: the cache is closed.
        """
        core = self._core
        if not core.is_open:
            core.check_open()  # raises
        prompt = as_tokens(token_ids, core.vocab_size)
        length = len(prompt)
        if not length:
            raise BadInput("a request needs at least one token, got none", needed=1, available=0)
        first = length if capacity is None else capacity
        if type(first) is not int or not 0 <= first < MOST:
            first = whole_number(first, "capacity")
        wanted = first if reserve is None else reserve
        if type(wanted) is not int or not 0 <= wanted < MOST:
            wanted = whole_number(wanted, "reserve")
        most = max(length, wanted)
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            priority = whole_number(priority, "priority", -(2**63), below=2**63)
        if prefetch is not None:
            from kvpagoda.core.offload.reader import Prefetch as Made

            instance_of(prefetch, Made, "prefetch, what KVCache.prefetch returned,")
        if {type(layerwise), type(lookup), type(publish)} != {bool}:
            layerwise, lookup, publish = map(truth, (layerwise, lookup, publish), ("layerwise", "lookup", "publish"))
        key, media_ids = core.namespaces.key(namespace), {} if media is None else core.media.ids(media, length)
        tokens = buffer_of(prompt, most if most <= 2 * length else length, core.block_size)
        request = RequestState(tokens, length, key, priority, media_ids, publishes=publish)
        if checkpoints is not None:
            request.checkpoints.asked = breakpoints_of(checkpoints, core.max_context)
        if hints is not None:
            self.hints.ask_checkpoints(request, hints)
        core.set_epoch(request, namespace.epoch if isinstance(namespace, Namespace) else None)
        sequence = Sequence(self._lifecycle, request)  # made first: if this fails, nothing is allocated yet
        if self._hints is not None:
            self._hints.before_open()
            if prefetch is None and lookup:
                prefetch = self._hints.prefetched(tokens[:length], key)
        self._admission.open(request, first, most, prefetch, layerwise=layerwise, lookup=lookup)
        if hints is not None:
            sequence.hints = self.hints.opened(request, hints, namespace)
        return sequence

    @property
    def hints(self) -> Hints:
        """The hints of this cache: ``hints.ended()`` tells what became of promises."""
        if self._hints is None:
            from kvpagoda.hints import Hints

            self._hear(Hints())
        assert self._hints is not None
        return self._hints

    @exclusive
    def apply(self, envelope: object, namespace: AnyNamespace = None) -> list[Outcome]:
        """Do what the actions of an envelope of hints ask for. ``docs/hints.md`` defines the actions.

        Args:
            envelope: as vLLM's and SGLang's ``KvHintsEnvelope``: an object of theirs, a mapping, or JSON.
            namespace: of the texts that it speaks of.

        Returns:
            One ``Outcome`` for each action; a hint is never an error.

        Raises:
            StaleHandle: the cache is closed.
        """
        self._core.check_open()
        self._settler.settle_waiting()
        return self.hints.apply(envelope, namespace)

    @exclusive
    def sender(
        self, transfer: Transfer, *, key: bytes = b"", clock: Callable[[], float] = time, skew: float = 2.0
    ) -> Sender:
        """Return a ``Sender``, which lets ``Sequence.hand_over`` export blocks.

        Args:
            transfer: how their bytes get to other processes (``kvpagoda.handover.SharedMemory`` and others).
            key: signs its tickets; without one let only trusted programs pass them on.
            clock: seconds since 1970.
            skew: by how many seconds the clocks of the machines may differ.

        Raises:
            BadInput: an argument is of a wrong type or out of range, or the cache has a sender already.
        """
        from kvpagoda.core.handover.sender import Sender as Made

        return Made(self._lifecycle, self.schema, transfer, key=key, clock=clock, skew=skew)

    @exclusive
    def receive(
        self,
        ticket: Ticket | str | bytes,
        transfer: Transfer,
        namespace: AnyNamespace = None,
        priority: SupportsIndex = 0,
        *,
        reserve: SupportsIndex | None = None,
        key: bytes = b"",
        clock: Callable[[], float] = time,
    ) -> Sequence:
        """Continue the request of ``ticket``, which ``Sequence.hand_over`` of another cache made: nothing is computed
        again.

        Its committed tokens are read through ``transfer`` into blocks of this cache, and become shareable here; what is
        cached already is shared, and ``length`` is what it was there; ``match.lacking_from`` says which rows of
        optional groups neither side has. The number of ranks, the block size and the layout may differ; this rank is
        ``Identity.rank`` of ``num_ranks``. The cache is locked while it reads.

        A ticket of ``hand_over(upto=..)`` is for tokens that are still computed there: every call reads the layers that
        are done, and raises RetryLater until all are. If it raises, the request holds nothing here.

        Args:
            ticket: of the other cache, as an object or as its text.
            transfer: how the bytes get here.
            namespace: see ``open``.
            priority: see ``open``.
            reserve: see ``open``.
            key: with which the text of a ticket must be signed; ``b""``: any ticket is trusted.
            clock: seconds since 1970.

        Returns:
            The running request.

        Raises:
            TicketRefused: the ticket is malformed, forged, was taken before, or is of another model or other weights.
            HandoverMiss: it expired, or the bytes cannot be had intact: ``open`` the request, which computes it.
            RetryLater: no room now, or more layers to come; the ticket stays good.
            NeverFits: the request is larger than the whole cache.
            BadInput: an argument is of a wrong type or out of range.
            StaleHandle: the cache is closed.
        """
        from kvpagoda.core.handover.receiver import Receiver as Made

        self._core.check_open()
        if self._receiver is None:
            self._receiver = Made(self._lifecycle, self.schema)
        return self._receiver.receive(ticket, transfer, namespace, priority, reserve, key, clock)

    @exclusive
    def prefetch(
        self, token_ids: TokenIds, namespace: AnyNamespace = None, *, media: Mapping[int, bytes] | None = None
    ) -> Prefetch:
        """Begin to look up this prompt in the tiers, and to read their records into host memory, before ``open``.

        At most half the staging memory of a tier is used for it.

        Args:
            token_ids: see ``open``.
            namespace: see ``open``.
            media: see ``open``.

        Returns:
            What ``open(..., prefetch=...)`` takes when the request is opened; close it if it is not.

        Raises:
            BadInput: an argument is of a wrong type or out of range, or the cache has no tiers.
        """
        begun: Prefetch = prefetch(self._core, token_ids, namespace, media)
        return begun

    @overload
    @even_asleep
    def lookup(
        self,
        token_ids: Many[TokenIds],
        namespace: AnyNamespace | Many[AnyNamespace] = None,
        *,
        media: Mapping[int, bytes] | Many[Mapping[int, bytes] | None] | None = None,
    ) -> list[Lookup]: ...
    @overload
    @even_asleep
    def lookup(
        self, token_ids: TokenIds, namespace: AnyNamespace = None, *, media: Mapping[int, bytes] | None = None
    ) -> Lookup: ...
    @even_asleep
    def lookup(self, token_ids: Any, namespace: Any = None, *, media: Any = None) -> Lookup | list[Lookup]:
        """Return the ``Lookup`` of this prompt: what ``open`` would find, and what running requests will soon publish.

        Admits nothing, takes no slot, pins nothing, and does not count as a use.

        Args:
            token_ids: one prompt, see ``open``, or a list or tuple of prompts, which are not compared with one another;
                ``[]`` is one prompt.
            namespace: see ``open``; of several prompts one for all, or a list.
            media: see ``open``; of several prompts one for all, or a list.

        Returns:
            One ``Lookup``; of several prompts a list in the same order.

        Raises:
            BadInput: an argument is of a wrong type or out of range, or a list has another length than the prompts.
            StaleHandle: the cache is closed.
        """
        self._lifecycle.ending.leave_dropped_fences()
        self._settler.settle_waiting()
        return look_up(self._core, token_ids, namespace, media)

    @exclusive
    def should_wait(
        self, token_ids: TokenIds, namespace: AnyNamespace = None, *, media: Mapping[int, bytes] | None = None
    ) -> bool:
        """Return whether this prompt should be opened in a later step, since a running request is about to compute a part of
        it. Ask again in each step, before the pieces of the step are cut.

        In a model with states the running request then keeps a checkpoint where the two texts part (``step_limit``).
        O(n) for a prompt of n tokens, and for each running request that computes a prompt with the same first block;
        O(requests) if none does.

        Args:
            token_ids: the prompt, see ``open``.
            namespace: see ``open``.
            media: see ``open``.

        Returns:
            True at most until each running request has computed its prompt.

        Raises:
            BadInput: an argument is of a wrong type or out of range; said only while a request computes its prompt.
            StaleHandle: the cache is closed.
        """
        self._lifecycle.ending.leave_dropped_fences()
        self._settler.settle_waiting()
        return should_wait(self._core, self._settler.checkpoints, token_ids, namespace, media)

    @overload
    @exclusive
    def step_limit(self, sequences: Sequence) -> int: ...
    @overload
    @exclusive
    def step_limit(self, sequences: Iterable[Sequence]) -> npt.NDArray[np.int64]: ...
    @exclusive
    def step_limit(self, sequences: Sequence | Iterable[Sequence]) -> int | npt.NDArray[np.int64]:
        """Return the most tokens that the next step of a sequence should compute.

        The step should end where a checkpoint of the states is due; if none is due, the limit is the longest context. A
        longer step is correct, but no request can resume at that position; ``stats().passed_boundaries`` counts these.
        With ``Retention.rounds_states`` it also ends at multiples of the hit grid. Only models with states have such
        positions.

        Args:
            sequences: one running sequence, or several.

        Returns:
            A number of tokens; for several sequences int64 ``[n]``.

        Raises:
            StaleHandle: a sequence is closed or suspended.
        """
        limits = [self._settler.checkpoints.step_limit(request) for request in requests_of(sequences, self._core)]
        return limits[0] if isinstance(sequences, Sequence) else np.array(limits, np.int64)

    def fence(self, sequences: Iterable[Sequence]) -> Fence:
        """Return a context manager that protects the memory of ``sequences`` while a step or copy is in flight.

        Inside it nothing that they hold is freed, published or moved, even if they commit or close: another stream may
        still read and write there. That is done at its end. It can be entered again, also inside itself.

        Args:
            sequences: running sequences of this cache.

        Raises:
            StaleHandle: on entering, if a sequence is closed or suspended; none is fenced then.
        """
        return Fence(self._lifecycle, requests_of(sequences, self._core))

    # -- steps -------------------------------------------------------------------------------------------------------

    @exclusive
    def batch(
        self,
        sequences: Many[Sequence],
        new_tokens: Many[SupportsIndex],
        pad_to: SupportsIndex | None = None,
        *,
        firsts: Many[SupportsIndex] | None = None,
    ) -> Batch:
        """Return the index arrays of a step that computes ``new_tokens[i]`` tokens of ``sequences[i]``.

        The arrays (see ``help(Batch)``) lie in static buffers: they are valid until the next ``batch``.

        Args:
            sequences: running sequences that have room for these tokens, none twice.
            new_tokens: of each sequence, at least 1.
            pad_to: rows in all (CUDA graphs); a padded row has one token, length 0 and -1 in ``request_slots``, and
                writes to block 0 (``slot_mapping`` 0). None: no padded rows.
            firsts: the position of each sequence's first token in the step (None: its length), for steps of a draft:
                before that it computes rows of committed tokens that its own group lacks (``seq.match.lacking_from``;
                rows of other groups are shared and must not be written), behind it those of the tokens that it
                proposes.

        Raises:
            BadInput: a count, ``pad_to`` or a position is out of range, or a sequence has no room for its tokens.
            StaleHandle: a sequence is closed or suspended.
        """
        requests = requests_of(sequences, self._core)
        return batch_of(self._lifecycle, self._step_buffers, self.schema, requests, new_tokens, pad_to, firsts)

    @exclusive
    def persistent_batch(
        self,
        sequences: Iterable[Sequence] = (),
        num_rows: SupportsIndex | None = None,
        *,
        tokens_per_row: SupportsIndex | None = None,
    ) -> PersistentBatch:
        """Return a batch that runs ``sequences`` step by step, where the cost of a step depends on what changed.

        Args:
            sequences: running sequences; of each prompt at most the last token may be uncommitted.
            num_rows: rows in all, padded as in ``batch``; None: one for each sequence, at least 1.
            tokens_per_row: every step computes this many tokens in each row, padded rows too, and all arrays keep their
                shapes, as CUDA graphs need. None: ``PersistentBatch.extend`` says how many.

        Raises:
            BadInput: there are too few rows, a number is out of range, or more of a prompt is uncommitted.
            StaleHandle: a sequence is closed or suspended.
        """
        members = all_of(sequences, Sequence, "expected sequences that this cache opened")
        rows = max(1, len(members)) if num_rows is None else whole_number(num_rows, "num_rows", 1, bits=ROW_BITS)
        width = None if tokens_per_row is None else whole_number(tokens_per_row, "tokens_per_row", 1, bits=31)
        batch = PersistentBatch(self._lifecycle, self.schema, rows, width)
        batch.add(*members)
        return batch

    @exclusive
    def layer(self, index: SupportsIndex) -> LayerView:
        """Return the memory of a layer without a step: to bind kernels, and to warm up CUDA graphs.

        The memory does not move as long as the cache lives.

        Args:
            index: of the layer; of one that shares its rows, the view is that of their owner.

        Raises:
            BadInput: the model has no such layer.
        """
        return LayerView(self._core, self.schema.owner_of(index))

    @exclusive
    def warm_up(self) -> None:
        """Compile the Triton kernels that steps of this cache launch, so that none is compiled while requests wait.

        They are those that write and read its rows, for few rows and for many, and those of index arrays; nothing is
        written. Triton keeps them on disk: it takes seconds where it never ran before. Without a GPU, nothing is done.
        To be called once, before the first step and before CUDA graphs are captured.

        Raises:
            Asleep: the cache sleeps.
        """
        self._core.memory.warm_up()

    # -- what is kept ------------------------------------------------------------------------------------------------

    @exclusive
    def pin(
        self, token_ids: TokenIds, namespace: AnyNamespace = None, *, media: Mapping[int, bytes] | None = None
    ) -> Pin:
        """Pin what is cached of this text, and its last checkpoint: evicted only if a request could not run otherwise.

        Args:
            token_ids: see ``open``.
            namespace: see ``open``.
            media: see ``open``.

        Returns:
            The pin, for ``unpin``; ``pin.is_held`` is False once it has ended.

        Raises:
            BadInput: an argument is of a wrong type or out of range.
            OutOfBlocks: pins would exceed their share of the cache (``Retention.pin_share``), or running requests have
                reserved the blocks.
        """
        core = self._core
        tokens = as_tokens(token_ids, core.vocab_size)
        media_ids = core.media.ids(media, len(tokens))
        self._settler.settle_waiting()
        return self._reuse.pin(with_media(tokens, 0, media_ids), core.namespaces.key(namespace))

    @even_asleep
    def unpin(self, pin: Pin) -> None:
        """End ``pin``. Does nothing if it has ended already.

        Args:
            pin: what ``KVCache.pin`` returned.

        Raises:
            BadInput: ``pin`` is no pin.
        """
        self._reuse.unpin(pin)

    @even_asleep
    def invalidate(self, *namespaces: AnyNamespace, weights: str | None = None) -> None:
        """Stop reuse of all that is cached in ``namespaces``, for example after new weights.

        Running requests continue with the new weights, as ``Sequence.epochs`` says, and publish nothing more. Requests
        whose ``Namespace`` has an epoch stay on it, and share with others on it until the last of them ends.

        A namespace that outlives the process must not mean two adapters. A server may invalidate ever new namespaces:
        from 1,024 on of which nothing is left here, each costs one in 4,096 of the others of which nothing is cached
        here what tiers have of them.

        Args:
            *namespaces: none given: all.
            weights: a digest of the new weights of all namespaces: records stored in tiers from now on are found by all
                processes with the same one. None: by this process alone.

        Raises:
            BadInput: a namespace, or ``weights``, is of a wrong type.
        """
        if self._hints is not None:
            self._hints.before_open()
        self._reuse.invalidate(namespaces, weights)
        if self._hints is not None:
            self._hints.invalidated()

    @either_way
    def reset(self) -> None:
        """Forget everything that is kept for reuse in memory. What tiers have stays, and is found again: after new weights,
        ``invalidate``.

        After NeedsReset it forgets every request too; their sequences are closed then.

        Raises:
            RetryLater: a request runs or is suspended.
        """
        self._reuse.reset()
        if self._hints is not None:
            self._hints.forget()

    @exclusive
    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all records due for tiers are stored.

        Args:
            timeout: the most seconds to wait.

        Returns:
            Whether they are.
        """
        return self._core.tiers.flush(timeout)

    # -- sleep -------------------------------------------------------------------------------------------------------

    @exclusive
    def sleep(self, keep: Keep = "nothing", *, nbytes: int | str | None = None, timeout: float = 10.0) -> Slept:
        """Give the physical memory back until ``wake``; addresses stay.

        What running requests and pins use waits in host memory, and ``wake`` brings it back to the same places:
        persistent batches and captured graphs step on. While it sleeps, calls that need memory raise Asleep.
        ``lookup``, ``stats``, ``check``, ``unpin``, ``invalidate``, ``reset`` and ``close`` work; a sequence that is
        closed ends at ``wake``. Waits for copies in flight.

        Args:
            keep: of what else is cached, ``"nothing"``, or the ``"tree"``: a cache with tiers moves it there, as what
                is evicted, and requests find it there again; without tiers it waits in host memory too.
            nbytes: the most bytes of it that are kept; the coldest is dropped first. None: all.
            timeout: seconds that tiers get.

        Returns:
            What was kept, dropped and given back.

        Raises:
            RetryLater: a sequence is fenced.
            BadInput: an unknown ``keep``, or a negative ``nbytes`` or ``timeout``.
            OutOfBlocks: the host lacks memory: the cache is awake then, and no request lost anything, but blocks that
                were dropped stay dropped.
        """
        from kvpagoda.core.sleeping import sleep

        slept = sleep(self._lifecycle, keep, nbytes, timeout)
        if self._recording is not None:
            self._recording.slept(slept)
        return slept

    @even_asleep
    def wake(self) -> None:
        """Get the memory again after ``sleep``, at the same addresses, with what waited in host memory at its places.

        Does nothing if the cache is awake. If there is no memory, or this is interrupted, the cache sleeps on
        (``stats().is_asleep``), and it may be called again; nothing is lost. Raises what ``memory`` raises, Exhausted for
        example, and StaleHandle if the cache is closed."""
        from kvpagoda.core.sleeping import wake

        self._core.check_open()
        self._woke(partial(wake, self._core))

    def _woke(self, call: Callable[[], None]) -> None:
        """Record that ``call`` wakes the cache, if it sleeps."""
        is_asleep = self._core.guard.aside is not None
        call()
        if self._recording is not None and is_asleep:
            self._recording.woke()

    # -- proof and counters ------------------------------------------------------------------------------------------

    @even_asleep
    def stats(self) -> CacheStats:
        """Return the counters of this cache; cheap enough for every step. Blocks that a running request completed and
        nobody has asked for yet count as its own, not as shared."""
        self._lifecycle.ending.leave_dropped_fences()
        return stats_of(self._core)

    @even_asleep
    def check(self) -> None:
        """Prove from scratch that every block, slot and row is in exactly one place.

        Raises:
            CheckFailed: one is not; the message names ids.
        """
        check(self._core)

    @either_way
    def close(self, timeout: float = 10.0) -> None:
        """Close every sequence, running or suspended, and the cache: it admits no more requests.

        The memory is freed with the object.

        Args:
            timeout: the most seconds that tiers get to store what is due; if the cache sleeps, only what is on the way
                to them.
        """
        core, timeout = self._core, real_number(timeout, "the timeout, in seconds,")
        if core.guard.is_torn or core.guard.aside is not None:
            core.clear()
            self._woke(core.guard.open)
        self._lifecycle.ending.close_all()
        if self._hints is not None:
            self._hints.forget()
        if core.is_open:
            core.tiers.close(timeout)
            core.memory.close()
        core.is_open = False
        if self._recording is not None:
            self._recording.close()


def _recording(record: str | os.PathLike[str] | Recording) -> Recording:
    """Return ``record``, or the recording in the file of that path. Raises BadInput."""
    from kvpagoda.recording import Recording

    return record if isinstance(record, Recording) else Recording(record)


def _follow(core: Core, events: EventLog) -> None:
    """Make ``events`` the log of ``core``, and of its tiers. Raises BadInput."""
    from kvpagoda.events.event_log import Followed
    from kvpagoda.events.tier_watch import watches_of

    wanted = {group.plan.name for group in core.groups if group is core.full or group in core.bounded}
    grid, secret = core.settings.limits.hit_grid, core.settings.identity.secret
    events.attach(core.observers, Followed.of(core.plan, grid, secret, wanted))
    core.tiers.watches = watches_of(core.tiers.levels, events)
    core.observers.add(events)


def _tiers(
    specs: Many[TierSpec], plan: Plan, identity: Identity, fingerprint: str
) -> Callable[[PrefixCache, Media, NoMemory], NoTiers]:
    """Return what makes the tiers ``specs`` for the parts of a cache."""
    if not specs:
        return lambda *_: NoTiers()
    from kvpagoda.core.offload.offloader import Offloader
    from kvpagoda.tiers.level import RecordIdentity

    records = RecordIdentity(identity.weights, fingerprint, plan.block_size, identity.rank, identity.num_ranks)
    return lambda prefix, media, memory: Offloader(specs, records, prefix, media, memory, identity.secret)


def _memory(
    plan: Plan, device: str | torch.device | None, poison: bool, has_tiers: bool, backing: Backing | None,
    page_locked: int | str | None,
) -> NoMemory:  # fmt: skip
    """Return memory for ``plan`` on ``device``, provided by ``backing``; for ``"none"`` that of a worker, or with tiers, which
    need the bytes, none. Raises BadInput, and MissingExtra without torch."""
    if isinstance(device, str) and device == NO_DEVICE:
        if backing is not None:
            text = "device='none' is a cache without memory; give it no memory="
            raise BadInput(text, field="memory", needed="memory")
        return NoMemory([group.layout.nbytes for group in plan.groups]) if has_tiers else RemoteMemory(plan, poison)
    lacking = "a KVCache with memory needs torch; pip install 'kvpagoda[torch]', or give device='none'"
    with MissingExtra.unless("torch", lacking):
        from kvpagoda.core.memory.device_memory import DeviceMemory
    locked = None if page_locked is None else int(page_locked)
    return DeviceMemory(plan, device, poison=poison, page_locked=locked, backing=backing)
