"""The worker's side of the connector: looks texts up in the tiers, loads their blocks and stores new ones.

    engine's thread   begin(orders) ─► start_loads ─► wait_for_layer .. ─► save ─► finished, answers
    finder            FoundRecords.look_up
    loaders           tier ─► staging memory ─► the request's blocks
    the tiers' own    staging memory ─► tier

Whatever goes wrong below is a miss: ``failed`` names the requests whose blocks were not all filled.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Condition
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch

from kvpagoda.adapters.connector.found import FoundRecords, Record, batches, record_kind
from kvpagoda.adapters.connector.groups import RecordGrid
from kvpagoda.adapters.connector.layer_rows import rows_of
from kvpagoda.adapters.connector.messages import Answers, Find, Load, MatchAnswer, Orders, Store
from kvpagoda.errors import OutOfBlocks
from kvpagoda.pages import Bytes, pages
from kvpagoda.pools import BlockRows, page_locks
from kvpagoda.threads import submit
from kvpagoda.tiers import LevelStats, TierSpec
from kvpagoda.tiers.level import Level, Loading, RecordIdentity

_LOADERS = 2
_IDLE_SECONDS = 0.005  # that a step without tokens waits for a lookup or a load to end
_WAIT_SECONDS = 10.0  # that blocks of a running or closing request wait for staging memory
_log = logging.getLogger(__name__)


class WorkerSide:
    """See the top of this file. ``caches``: layer -> its memory, of ``num_blocks`` blocks. Raises BadInput and
    LayoutError, and whatever making a driver raises."""

    def __init__(
        self,
        specs: Sequence[TierSpec],
        identity: RecordIdentity,
        grid: RecordGrid,
        caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        *,
        is_layerwise: bool = False,
    ) -> None:
        self._grid, self._is_layerwise = grid, is_layerwise
        self._device = device = next(iter(caches.values())).device
        self._locks = page_locks(device)
        self._blocks = {
            group.index: BlockRows(
                {name: rows_of(name, caches[name], num_blocks) for name in group.layers}, self._locks
            )
            for group in grid.groups
        }
        counts = [1 if group.is_state else grid.tokens // group.block_size for group in grid.groups]
        payload = max(count * rows.nbytes for count, rows in zip(counts, self._blocks.values()))
        self._counted = next(
            (group.index for group in grid.groups if group.keeps_all), 0
        )  # its records count as tokens
        self.levels: tuple[Level, ...] = ()
        try:
            for spec in specs:
                self.levels += (Level(spec, identity, payload, (), self._host_memory),)
        except BaseException:
            for level in self.levels:
                level.tier.close()
            raise
        self._finder = ThreadPoolExecutor(1, "kvpagoda-find")
        self._loader = ThreadPoolExecutor(_LOADERS, "kvpagoda-load")
        self._saver = ThreadPoolExecutor(1, "kvpagoda-save") if self._device.type == "cuda" else None
        stream: type[torch.cuda.Stream] = torch.cuda.Stream
        self._stream = stream(device) if device.type == "cuda" else None
        self._changed = Condition()
        self._finding: dict[str, int] = {}  # request -> its last attempt
        self._found: dict[str, FoundRecords] = {}
        self._backlog: dict[Level, dict[bytes, tuple[Store, float]]] = {level: {} for level in self.levels}
        self._closing: set[str] = set()
        self._layers: deque[tuple[Load, FoundRecords, set[str]]] = deque()  # loads whose layers are not all copied
        # results for the scheduler, under the lock
        self._answers, self._received, self._failed, self._bad_ids = Answers(), set[str](), set[str](), set[int]()
        self._calls = set[Future[None]]()  # lookups and loads in progress

    def _host_memory(self, nbytes: int) -> Bytes:
        """Return page-aligned memory; if the engine computes on a GPU, page-locked as it is used."""
        memory = pages(nbytes, large=True)
        if self._locks is not None:
            self._locks.watch(memory)
        return memory

    # -- before a step -------------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Start the lookups of a step, and let go of blocks that others may write in it."""
        for name in orders.forget:
            self._forget(name)
        for find in orders.finds:
            with self._changed:
                self._finding[find.request_id] = find.attempt
            self._start(self._finder, self._find, find)

    def _forget(self, name: str) -> None:
        with self._changed:
            found = self._found.pop(name, None)
            self._finding.pop(name, None)
        if found is not None:
            found.release()
        for level, waiting in self._backlog.items():
            gone = [key for key, (store, _) in waiting.items() if store.request_id == name]
            level.dropped += len(gone)
            for key in gone:
                del waiting[key]

    def _start(self, pool: ThreadPoolExecutor, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except Exception:
                _log.exception("KvpagodaConnector: a fault that is treated as a miss")

        try:
            future = submit(pool, run)
        except RuntimeError:  # the system has no thread to start
            run()
            return
        with self._changed:
            self._calls.add(future)
        future.add_done_callback(self._over)

    def _over(self, future: Future[None]) -> None:
        with self._changed:
            self._calls.discard(future)
            self._changed.notify_all()

    def _find(self, find: Find) -> None:
        found, is_held, is_known = FoundRecords(find, self.levels, self._grid), False, False
        try:
            found.look_up()
            is_held = bool(self._is_layerwise and found.ends) and self._read_ahead(found)
            is_known = True
        finally:
            ends = found.ends if is_known else ()
            with self._changed:
                is_wanted = bool(ends) and self._finding.get(find.request_id) == find.attempt
                unused = self._found.pop(find.request_id, None) if is_wanted else found
                if is_wanted:
                    self._found[find.request_id] = found
                self._answers.found.append(MatchAnswer(find.request_id, find.attempt, ends, is_held))
            if unused is not None:
                unused.release()

    def _read_ahead(self, found: FoundRecords) -> bool:
        """Read what the last end needs, if staging memory has room for it beside stores. Return whether it is read."""
        records = found.needed(found.ends[-1])
        wanted = {level: [one for one in records if found.source[one] is level] for level in self.levels}
        if any(len(ones) > level.num_readable_ahead for level, ones in wanted.items()):
            return False
        for level, ones in wanted.items():
            try:
                rows = level.buffer.acquire(len(ones), owner=found)
            except OutOfBlocks:
                return False
            keys = [found.key(level, one) for one in ones]
            if keys and level.finish_load(level.start_load(keys, rows, monotonic() + level.spec.timeout)):
                level.buffer.release_all(found)
                found.ends = ()  # something is damaged or gone: the text is computed
                return False
            found.rows.update((one, (level, row)) for one, row in zip(ones, rows))
        return True

    # -- loading -------------------------------------------------------------------------------------------------------

    def start_loads(self, orders: Orders) -> None:
        """Start the loads of a step. Their blocks are zeroed before, if the engine does that."""
        for load in orders.loads:
            with self._changed:
                found = self._found.pop(load.request_id, None)
                self._finding.pop(load.request_id, None)
            event = torch.cuda.current_stream(self._device).record_event() if self._stream else None
            if load.is_layerwise and found is not None:
                self._start_layers(load, found)
            else:
                self._start(self._loader, self._load, load, found, event)

    def _load(self, load: Load, found: FoundRecords | None, event: Any) -> None:
        """Fill the blocks of ``load``, and report the request as received, and as failed if not all are filled."""
        bad: Record | None = (0, load.begin // self._grid.tokens)
        try:
            if found is not None and found.find.attempt == load.attempt:
                bad = self._fill(load, found, event)
        finally:
            if found is not None:
                found.release()
            with self._changed:
                self._received.add(load.request_id)
                if bad is not None:
                    self._answers.failed.append(load.request_id)
                    self._fail(load, bad)

    def _fail(self, load: Load, bad: Record) -> None:
        """Note which blocks are not filled: with one group all from record ``bad`` on, otherwise all of the request."""
        if len(self._grid.groups) > 1:
            self._failed.add(load.request_id)
            return
        size = self._grid.groups[0].block_size
        first = max(load.begin, bad[1] * self._grid.tokens) // size
        self._bad_ids.update(load.ids[0][first:])

    def _fill(self, load: Load, found: FoundRecords, event: Any) -> Record | None:
        """Load all records of ``load``. Return the first that could not be loaded, or None."""
        records = found.needed(load.end)
        missing = [one for one in records if one not in found.source]
        if missing:
            return missing[0]
        waiting, begun = deque(batches(records, found.source)), deque[tuple[Level, list[Record], Loading]]()
        while waiting or begun:
            while waiting and len(begun) < waiting[0][0].spec.workers:
                level, ones = waiting[0]
                rows = self._acquire(level, len(ones), found, 0.0 if begun else level.spec.timeout)
                if rows is None:
                    break
                waiting.popleft()
                keys = [found.key(level, one) for one in ones]
                begun.append((level, ones, level.start_load(keys, rows, monotonic() + level.spec.timeout)))
            if not begun:
                return waiting[0][1][0]
            level, ones, loading = begun.popleft()
            if level.finish_load(loading):
                for _, _, other in begun:
                    other.future.result()  # its rows are released by the caller
                return ones[0]
            with _copying(self._stream, event):
                self._copy_in(load, ones, level, loading.rows)
            level.buffer.release(loading.rows)
            if ones[0][0] == self._counted:
                with self._changed:  # loaders run beside each other
                    level.loaded_blocks += len(ones)
        return None

    @staticmethod
    def _acquire(level: Level, n: int, owner: FoundRecords, seconds: float) -> list[int] | None:
        """Take ``n`` staging rows, waiting at most ``seconds`` for stores and other loads."""
        deadline = monotonic() + seconds
        while (rows := level.acquire(n, owner, deadline)) is None and monotonic() < deadline:
            sleep(0.001)
        return rows

    def _copy_in(
        self, load: Load, ones: Sequence[Record], level: Level, rows: Sequence[int], layers: Sequence[str] | None = None
    ) -> None:
        """Copy records ``ones``, all of one group, from ``rows`` to the blocks of ``load``."""
        group = self._grid.groups[ones[0][0]]
        ids, begin = load.ids[group.index], load.begin // group.block_size
        for length in {len(self._grid.blocks(group, number)) for _, number in ones}:
            same = [i for i, (_, number) in enumerate(ones) if len(self._grid.blocks(group, number)) == length]
            blocks = [self._grid.blocks(group, ones[i][1]) for i in same]
            targets = np.array([[ids[b] if b >= begin else 0 for b in part] for part in blocks], np.int64)
            chosen = level.buffer.places_of([rows[i] for i in same])
            self._blocks[group.index].from_records(targets, level.buffer.payloads, chosen, layers)

    # -- layer by layer ------------------------------------------------------------------------------------------------

    def _start_layers(self, load: Load, found: FoundRecords) -> None:
        """Note that the layers of ``load``, whose records are in staging memory, are copied when they are waited for.

        Layers of states, for which nothing waits, are copied now.
        """
        names = {name for group in self._grid.groups for name in self._blocks[group.index].layers}
        self._layers.append((load, found, names))
        for group in self._grid.groups:
            if group.is_state:
                for name in self._blocks[group.index].layers:
                    self.wait_for_layer(name)

    def wait_for_layer(self, layer: str) -> None:
        """Make sure that later reads of ``layer`` in this step find it filled; for an unknown name, all layers."""
        known = any(layer in rows.layers for rows in self._blocks.values())
        for load, found, names in self._layers:
            for name in (layer,) if known else tuple(names):
                if name in names:
                    names.discard(name)
                    self._copy_layer(load, found, name)

    def _copy_layer(self, load: Load, found: FoundRecords, name: str) -> None:
        group = next(index for index, rows in self._blocks.items() if name in rows.layers)
        records = [one for one in found.needed(load.end) if one[0] == group]
        for level in self.levels:
            ones = [one for one in records if found.rows[one][0] is level]
            if ones:
                self._copy_in(load, ones, level, [found.rows[one][1] for one in ones], [name])

    def _finish_layers(self) -> None:
        """Copy what was not waited for, and give the staging memory back."""
        while self._layers:
            load, found, names = self._layers[0]
            for name in tuple(names):
                self._copy_layer(load, found, name)
            self._layers.popleft()
            for level in self.levels:
                num_blocks = sum(level is one for (group, _), (one, _) in found.rows.items() if group == self._counted)
                with self._changed:
                    level.loaded_blocks += num_blocks
            self._when_copied(found.release)

    # -- storing -------------------------------------------------------------------------------------------------------

    def save(self, orders: Orders) -> None:
        """Copy what is complete now to staging memory, and store it. Blocks of full attention wait for room there;
        those of windows and states, which their request gives up soon, are dropped if there is none."""
        self._finish_layers()
        self._closing.update(orders.closing)
        until = monotonic() + _WAIT_SECONDS
        for level, waiting in self._backlog.items():
            keyed = [(level.key(one.block_hash, record_kind(one.group)), one) for one in orders.stores]
            self._store(level, [item for item in keyed if not self._grid.groups[item[1].group].keeps_all])
            for key, one in keyed:
                if self._grid.groups[one.group].keeps_all:
                    waiting.setdefault(key, (one, until))
            self._drain(level)

    def _drain(self, level: Level) -> None:
        waiting, now = self._backlog[level], monotonic()
        while waiting and level.num_writable:
            keys = [*waiting][: min(level.num_writable, level.batch)]
            self._store(level, [(key, waiting.pop(key)[0]) for key in keys])
        for key in [key for key, (_, until) in waiting.items() if until <= now]:
            del waiting[key]
            level.dropped += 1

    def _store(self, level: Level, items: Sequence[tuple[bytes, Store]]) -> None:
        """Store as many ``items`` as there is room for; the others are dropped."""
        unique = [*dict(items).items()]
        for at in range(0, len(unique), level.batch):
            part = unique[at : at + level.batch]
            try:
                if level.num_writable < len(part):
                    raise OutOfBlocks("staging memory is in use")
                rows = level.buffer.acquire(len(part), owner=level)
            except OutOfBlocks:
                level.dropped += len(part)
                continue
            try:
                sizes = self._copy_out(level, [store for _, store in part], rows)
                level.store([key for key, _ in part], rows, sizes, None, self._when_copied)
            except Exception:
                level.release_when(rows, self._when_copied)  # some of them may be written by now, or soon
                level.dropped += len(part)
                _log.exception("KvpagodaConnector: %d records were not stored", len(part))

    def _copy_out(self, level: Level, stores: Sequence[Store], rows: Sequence[int]) -> list[int]:
        """Copy the blocks of ``stores`` to ``rows``, and return their bytes. One launch on a GPU for those that are alike."""
        places = level.buffer.places_of(rows)
        for group, count in {(one.group, len(one.ids)) for one in stores}:
            same = [i for i, one in enumerate(stores) if (one.group, len(one.ids)) == (group, count)]
            ids = np.array([stores[i].ids for i in same], np.int64)
            self._blocks[group].to_records(ids, level.buffer.payloads, [places[i] for i in same])
        return [len(one.ids) * self._blocks[one.group].nbytes for one in stores]

    def _when_copied(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the current stream has done what it was given until now: at once on a CPU, else in a thread; or
        here, after waiting, where the system starts no thread."""
        if self._saver is None:
            call()
            return
        event = torch.cuda.current_stream(self._device).record_event()

        def when_over() -> None:
            try:
                event.synchronize()
                call()
            except Exception:
                _log.exception("KvpagodaConnector: what follows a copy failed")

        try:
            submit(self._saver, when_over)
        except RuntimeError:
            event.synchronize()
            call()

    # -- after a step --------------------------------------------------------------------------------------------------

    def finished(self, orders: Orders) -> tuple[set[str], set[str], set[str]]:
        """Return the requests whose blocks may be freed, those whose loads are over, and those whose loads failed."""
        sent = self._closing - self._waiting()
        self._closing -= sent
        with self._changed:
            if orders.is_idle and not sent and self._calls:
                self._changed.wait_for(lambda: self._received or self._answers.found, _IDLE_SECONDS)
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return sent, received, failed

    def bad_ids(self) -> set[int]:
        """Return the blocks that were not filled, of models with one group."""
        with self._changed:
            bad, self._bad_ids = self._bad_ids, set()
        return bad

    def answers(self) -> Answers | None:
        """Return what is to be reported to the scheduler."""
        with self._changed:
            made, self._answers = self._answers, Answers()
        made.waiting += self._waiting()
        return made if made.found or made.failed or made.waiting else None

    def _waiting(self) -> set[str]:
        """Return the requests whose blocks wait for staging memory."""
        return {store.request_id for backlog in self._backlog.values() for store, _ in backlog.values()}

    def stats(self) -> tuple[LevelStats, ...]:
        """Return the counters of each tier, without I/O."""
        return tuple(level.stats() for level in self.levels)

    def close(self, timeout: float) -> bool:
        """Store what waits, and close the tiers, within ``timeout`` seconds. Return whether all of it is done."""
        deadline = monotonic() + timeout
        while any(self._backlog.values()) and monotonic() < deadline:
            for level in self.levels:
                self._drain(level)
            sleep(0.001)
        for pool in (self._finder, self._loader, self._saver):
            if pool is not None:
                pool.shutdown(wait=pool is self._saver)
        with self._changed:
            begun = [one for one in [*self._calls] if not one.cancel()]
        is_stored = all([level.settle(deadline) for level in self.levels])  # noqa: C419
        for level in self.levels:
            level.tier.close()  # so that what is being loaded ends soon
        loading = wait(begun, max(0.0, deadline - monotonic())).not_done
        is_closed = all([level.tier.close(deadline) for level in self.levels])  # noqa: C419
        if self._locks is not None and not loading:  # else its memory stays locked until it is collected
            torch.cuda.synchronize(self._device)
            self._locks.close()
        return is_closed and is_stored and not loading


@contextmanager
def _copying(stream: torch.cuda.Stream | None, event: Any) -> Iterator[None]:
    """The context of a loader's copies on ``stream``: they begin after ``event`` and are over at its end."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        try:
            yield
        finally:
            stream.synchronize()  # also where it fails: the engine gives the blocks of a part that has begun to others
