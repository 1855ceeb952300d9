"""The scheduler's side of the connector: which requests could begin further on, and which of their blocks are stored.

get_num_new_matched_tokens   ──► Find ─► workers ─► MatchAnswer ──► None until all workers have answered
update_state_after_alloc     ──► Load ─► workers ─► finished, or failed: then the request computes its tokens itself
build_connector_meta         ──► Store, as soon as all blocks of a record are computed, or will be in this step
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf
from os import urandom
from time import monotonic
from typing import Any

import numpy as np

from kvpagoda.adapters.connector.groups import LayerGroup, RecordGrid
from kvpagoda.adapters.connector.messages import Answers, Find, Load, MatchAnswer, Orders, Store
from kvpagoda.adapters.connector.options import ConnectorOptions
from kvpagoda.namespace import Namespace, namespace_key
from kvpagoda.tiers import prefix_hashes, prefix_root

_AGAIN_SECONDS, _MOST_LATELY = 60.0, 1 << 16
"""Seconds after which a record is stored again when another request has it, and how many records are remembered."""
_UNREPORTED = 3
"""Steps after which the workers have told whether they copied what they were to store."""


class Tracked:
    """What is known of one ``request`` of vLLM. ``root``: with which the hashes of its text begin."""

    def __init__(self, request: Any, root: bytes) -> None:
        self.request, self.preemptions = request, request.num_preemptions
        self.hashes = [root]  #: the root of its text, then the hash of each whole record
        self.num_stored = 0  #: records that workers have, or were told to store
        self.ordered = 0  #: the last step in which something of it was to be stored
        self.attempt = 0
        self.asked: tuple[int, int] | None = None  #: cached tokens and records in the last question; None: not asked
        self.answers: list[MatchAnswer] = []
        self.target = 0  #: the record after which it resumes, as vLLM was told; 0: none
        self.loading: bytes | None = None  #: the hash of the first record that is being loaded; None: nothing is
        self.is_hopeless = False  #: whether a load failed: it is not tried again
        self.repeats = False  #: whether it stores also what was stored lately, because some of that was lost
        self.is_stale = False  #: whether it may have begun with other weights: nothing of it is loaded or stored


class SchedulerSide:
    """See the top of this file. ``num_workers`` answer each question. ``adapter(lora_request)`` names an adapter by its
    content. ``reads``, ``writes``: whether this engine loads, and stores."""

    def __init__(
        self,
        options: ConnectorOptions,
        grid: RecordGrid,
        num_workers: int,
        adapter: Callable[[Any], str],
        *,
        reads: bool = True,
        writes: bool = True,
        has_drafts: bool = False,
    ) -> None:
        self._options, self._grid, self._num_workers, self._adapter = options, grid, num_workers, adapter
        self._reads, self._writes, self._has_drafts = reads, writes, has_drafts
        self._epoch: bytes | None = None
        self._tracked: dict[str, Tracked] = {}
        self._storing: dict[str, Tracked] = {}  # those of which something was stored
        self._lately: OrderedDict[tuple[int, bytes], float] = OrderedDict()  # record -> when it was to be stored
        self._waiting: frozenset[str] = frozenset()  # those of which workers have not copied everything
        self._step, self._orders = 0, Orders()
        self._loading = Counter[bytes]()  # first records that are being loaded, by hash

    def reset(self) -> None:
        """Find nothing that was stored before: the weights may have changed."""
        self._epoch = urandom(16)
        for one in self._tracked.values():
            one.is_stale = True

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked | None:
        """Return what is known of ``request``; None if its text is not only tokens and media."""
        known = self._tracked.get(request.request_id)
        if known is None:
            if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
                return None
            lora = request.lora_request
            name = Namespace(salt=request.cache_salt, adapter=None if lora is None else self._adapter(lora))
            root = prefix_root(namespace_key(name) + (self._epoch or b""), self._options.secret.encode())
            known = Tracked(request, root)
            self._tracked[request.request_id] = known
        return known

    def _extend(self, one: Tracked, num_records: int) -> None:
        """Compute the hashes of the first ``num_records`` records of a text. O(new tokens)."""
        have, size = len(one.hashes) - 1, self._grid.tokens
        if num_records > have:
            tokens = np.array(one.request.all_token_ids[have * size : num_records * size], np.int32)
            media = self._media(one.request, have)
            one.hashes += prefix_hashes(one.hashes[-1], tokens, size, media)

    def _media(self, request: Any, first: int) -> dict[int, bytes]:
        """Return, by record from ``first`` on, where media begin in it and their digests."""
        found: dict[int, bytes] = {}
        for feature in request.mm_features or ():
            record, offset = divmod(feature.mm_position.offset, self._grid.tokens)
            if record >= first:
                name = feature.identifier.encode()
                place = offset.to_bytes(8, "little") + len(name).to_bytes(8, "little") + name
                found[record - first] = found.get(record - first, b"") + place
        return found

    # -- loading -------------------------------------------------------------------------------------------------------

    def find(self, request: Any, num_cached: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first ``num_cached`` can be loaded, None if that is not known yet, and
        whether the request waits for them outside of the batch."""
        one = self._track(request) if self._reads and not request.skip_reading_prefix_cache else None
        last = (request.num_tokens - 1) // self._grid.tokens  # at least one token is computed
        if one is None or one.is_hopeless or one.is_stale or last * self._grid.tokens <= num_cached:
            return 0, False
        if one.loading is not None:
            return None, False
        if one.asked is None or num_cached < one.asked[0] or last > one.asked[1]:
            self._ask(one, num_cached, last)
        if len(one.answers) < self._num_workers:
            return None, False
        common = set(one.answers[0].ends).intersection(*(answer.ends for answer in one.answers[1:]))
        one.target = max((end for end in common if end <= last), default=0)
        gain = one.target * self._grid.tokens - num_cached
        if gain <= 0:
            return 0, False
        if one.hashes[num_cached // self._grid.tokens + 1] in self._loading:
            return None, False  # another request is loading the same text, and will share it
        return gain, not self._is_layerwise(one)

    def _ask(self, one: Tracked, num_cached: int, last: int) -> None:
        self._extend(one, last)
        one.attempt, one.asked, one.answers = one.attempt + 1, (num_cached, last), []
        hashes = tuple(one.hashes[1 : last + 1])
        self._orders.finds.append(Find(one.request.request_id, one.attempt, hashes, num_cached))

    @staticmethod
    def _is_layerwise(one: Tracked) -> bool:
        """Whether all workers have all records of the target in staging memory."""
        return all(answer.is_held and answer.ends[-1] == one.target for answer in one.answers)

    def allocated(self, request: Any, ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Load the ``num_external`` tokens that were promised into ``ids``, the request's blocks of each group."""
        one = self._tracked.get(request.request_id)
        if one is None:
            return
        if not num_external:
            self._let_go(one)
            return
        size, target = self._grid.tokens, one.target
        begin, is_layerwise = target * size - num_external, self._is_layerwise(one)
        blocks = tuple(tuple(ids[g.index][: target * size // g.block_size]) for g in self._grid.groups)
        load = Load(request.request_id, one.attempt, begin, target, blocks, is_layerwise)
        self._orders.loads.append(load)
        if not is_layerwise:
            one.loading = one.hashes[begin // size + 1]
            self._loading[one.loading] += 1
        one.asked, one.answers = None, []
        # a tier may lack what another one had, so with several tiers what was loaded is stored too
        one.num_stored = max(one.num_stored, target if len(self._options.tiers) == 1 else begin // size)

    def _let_go(self, one: Tracked) -> None:
        """Give up what workers keep of an answer that is not used."""
        if one.asked is not None:
            self._orders.forget.append(one.request.request_id)
            one.asked, one.answers = None, []

    def answered(self, answers: Answers, received: Iterable[str]) -> None:
        """Take what the workers report, and the requests whose loads are over."""
        self._waiting = frozenset(answers.waiting)
        for answer in answers.found:
            one = self._tracked.get(answer.request_id)
            if one is not None and one.attempt == answer.attempt and one.asked is not None:
                one.answers.append(answer)
        for name in answers.failed:
            if name in self._tracked:
                self._tracked[name].is_hopeless = self._tracked[name].repeats = True
                self._tracked[name].num_stored = 0
        for name in received:
            if name in self._tracked:
                self._loaded(self._tracked[name])

    def _loaded(self, one: Tracked) -> None:
        if one.loading is not None:
            self._loading[one.loading] -= 1
            self._loading += Counter()  # drops what is 0
            one.loading = None

    # -- storing -------------------------------------------------------------------------------------------------------

    def orders(self, scheduled: Any) -> Orders:
        """Return what the workers do in the step ``scheduled``, a SchedulerOutput of vLLM."""
        orders, self._orders, self._step = self._orders, Orders(), self._step + 1
        orders.is_idle = not scheduled.total_num_scheduled_tokens
        for name, one in self._storing.items():
            if one.request.num_preemptions != one.preemptions:  # its blocks are others' now
                one.preemptions, one.num_stored, one.repeats = one.request.num_preemptions, 0, True
                orders.forget.append(name)
        state = getattr(scheduled, "kv_connector_block_state", None)
        if self._writes and state is not None:
            for name, count in scheduled.num_scheduled_tokens.items():
                if name in self._tracked and not self._tracked[name].is_stale:
                    self._store(orders, self._tracked[name], count, state)
        return orders

    def track(self, request: Any) -> None:
        """Take note of a new request, whose blocks are stored from now on."""
        if self._writes:
            self._track(request)

    def _store(self, orders: Orders, one: Tracked, count: int, state: Any) -> None:
        """Order the records that are complete when ``count`` more tokens of a request are computed."""
        request, size, before = one.request, self._grid.tokens, len(orders.stores)
        at = request.num_computed_tokens + count
        end = min(at, request.num_tokens) // size  # drafts are not stored
        handed = state.boundary_state_offloads.get(request.request_id, ())
        states = {(index, token): block for index, block, token in handed if self._is_settled(request, token)}
        first, one.num_stored = one.num_stored, max(one.num_stored, end)
        if end <= first and not states:
            return
        ids = state.get_block_ids(request.request_id) if end > first else None
        self._extend(one, max([end, *(token // size for _, token in states)]))
        for group in self._grid.groups:
            found: list[tuple[int, tuple[int, ...]]] = []
            if group.is_handed:
                if ids is not None and self._is_settled(request, at):  # the state with which the step ends
                    states.setdefault((group.index, at), ids[group.index][at // group.block_size - 1])
                found = [
                    (token // size - 1, (block,)) for (index, token), block in states.items() if index == group.index
                ]
            elif ids is not None:
                numbers = [n for n in range(first, end) if self._is_wanted(group, n, request.num_prompt_tokens)]
                found = [(n, tuple(ids[group.index][i] for i in self._grid.blocks(group, n))) for n in numbers]
            for number, blocks in found:
                if blocks and all(blocks):
                    store = Store(request.request_id, group.index, number, one.hashes[number + 1], blocks)
                    if self._is_due(store) or one.repeats:
                        orders.stores.append(store)
        if len(orders.stores) > before:
            self._storing[request.request_id] = one
            one.ordered = self._step

    def _is_due(self, store: Store) -> bool:
        """Return whether the record was not stored lately; if so, it is from now on."""
        key, now, lately = (store.group, store.block_hash), monotonic(), self._lately
        if now - lately.get(key, -inf) < _AGAIN_SECONDS:
            return False
        lately[key] = now
        lately.move_to_end(key)
        if len(lately) > _MOST_LATELY:
            lately.popitem(last=False)
        return True

    def _is_settled(self, request: Any, at: int) -> bool:
        """Whether the state after ``at`` tokens ends a record, and no draft that is rejected later has changed it."""
        most: int = request.num_prompt_tokens if self._has_drafts else request.num_tokens
        return at % self._grid.tokens == 0 and 0 < at <= most

    def _is_wanted(self, group: LayerGroup, number: int, num_prompt: int) -> bool:
        """Whether a request could go on from record ``number`` of ``group`` at one of the places that are kept: the end
        of the prompt, multiples of ``checkpoint_tokens``, and every record after the prompt."""
        size, end = self._grid.tokens, number + 1
        last, every = (num_prompt - 1) // size, self._options.checkpoint_tokens
        if group.keeps_all or end > last:
            return True
        nearest = last
        if every:
            step = -(-every // size)  # in whole records
            nearest = min(last, -(-end // step) * step)
        return number in self._grid.needed(group, nearest)

    # -- the end of a request ------------------------------------------------------------------------------------------

    def finished(self, request: Any) -> bool:
        """Forget ``request``. Return whether vLLM keeps its blocks until the workers report them as sent."""
        one = self._tracked.pop(request.request_id, None)
        is_stored = self._storing.pop(request.request_id, None) is not None
        if one is None:
            return False
        self._let_go(one)
        if one.loading is not None:  # vLLM itself waits for the load
            self._loaded(one)
            self._orders.forget.append(request.request_id)
            return False
        is_waiting = is_stored and (request.request_id in self._waiting or self._step - one.ordered < _UNREPORTED)
        if is_waiting:
            self._orders.closing.append(request.request_id)
        return is_waiting
