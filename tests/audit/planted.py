"""Twenty faults of prefix caches, planted in the results of a cache that is right: one for each kind in public threads."""

from __future__ import annotations

import numpy as np
from fake_engine import Engine, Fault, Job, rows_of, states_of
from hybrid_model import Array, Tokens

from kvpagoda import Batch, Namespace


class Foreign(Fault):
    """A fault that puts rows of another text in place of those of a block."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.kept: dict[int, list[tuple[Array, Array]]] = {}

    def keep(self, batch: Batch, jobs: list[Job], layers: list[int]) -> None:
        """Keep the rows of a whole block of a job, of each of ``layers``."""
        for row, job in enumerate(jobs):
            if job.sequence.length >= batch.block_size:
                for layer in layers:
                    block = batch.layer(layer).block_table[row, job.sequence.length // batch.block_size - 1]
                    kept = self.kept.setdefault(layer, [])
                    kept.append(tuple(side[int(block)].copy() for side in rows_of(batch, layer)))
                    del kept[:-40]

    def spoil(self, engine: Engine, layer: int, block: int) -> bool:
        """Write rows of another text over ``block`` of ``layer``. Return whether there were any."""
        sides = [engine.cache.layer(layer)[name].numpy() for name in ("k", "v")]
        others = [rows for rows in self.kept.get(layer, []) if not np.array_equal(rows[0], sides[0][block])]
        if not others:
            return False
        for side, rows in zip(sides, others[self.random.integers(len(others))]):
            side[block] = rows
        return True


class OneTokenTooLong(Fault):
    """A hit is one token longer than what is cached: the row of the first token after it is never written."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.hit and self.strikes():
            job.hidden = range(job.hit, job.hit + 1)


class OneTooShort(Fault):
    """After a hit, tokens are computed at a position that is one too low."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.hit and self.strikes():
            job.shift = -1


class LayerOfAnotherText(Foreign):
    """Of one layer of a hit, the rows of one block are another text's."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            if job.is_first and job.hit and self.strikes():
                column = self.random.integers(job.hit // engine.block)
                self.spoil(
                    engine, engine.attending[-1], int(batch.layer(engine.attending[-1]).block_table[row, column])
                )
        self.keep(batch, jobs, engine.attending[-1:])


class WindowEdge(Fault):
    """After a hit, the window of the tokens that are computed first ends one token too early."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.hit and "window" in engine.model.kinds and self.strikes():
            job.narrower = 1


class States(Fault):
    """A fault that knows the states of all texts at all boundaries of blocks."""

    ahead = 0

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.kept: dict[tuple[Namespace, bytes], dict[int, Array]] = {}
        self.longer: dict[tuple[Namespace, bytes], tuple[Namespace, bytes]] = {}

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            end = job.sequence.length + self.ahead * engine.block
            if not (job.is_first and job.hit and end > 0):
                continue
            key = job.namespace, job.keys[: job.sequence.length].tobytes()
            key = self.longer.get(key) if self.ahead > 0 else (job.namespace, job.keys[:end].tobytes())
            if key in self.kept and self.strikes():
                for layer, records in states_of(batch, engine.model).items():
                    records[int(batch.state_indices[row])] = self.kept[key][layer]

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        inside, starts = batch.checkpoints, batch.qo_indptr.tolist()
        for row, token, place in zip(inside.rows.tolist(), inside.tokens.tolist(), inside.places.tolist()):
            job = jobs[row]
            end = job.sequence.length + token - starts[row] + 1
            key = job.namespace, np.array(job.text[:end], np.int32).tobytes()
            self.kept[key] = {i: pool[place].copy() for i, pool in states_of(batch, engine.model).items()}
            self.longer[job.namespace, key[1][: -4 * engine.block]] = key


class LaterState(States):
    """A hit begins with the state of the boundary after the one where it ends."""

    ahead = 1


class EarlierState(States):
    """A hit begins with the state of the boundary before the one where it ends."""

    ahead = -1


class SharedState(Fault):
    """The state of a hit is not copied: the next request that begins there finds what the last one left."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.left: dict[tuple[Namespace, bytes], dict[int, Array]] = {}

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            if job.is_first and job.hit and (left := self.left.get(self._key(job))) and self.strikes():
                for layer, records in states_of(batch, engine.model).items():
                    records[int(batch.state_indices[row])] = left[layer]

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        for row, job in enumerate(jobs):
            if job.hit:
                place = int(batch.state_writes[row, 0])
                self.left[self._key(job)] = {
                    i: pool[place].copy() for i, pool in states_of(batch, engine.model).items()
                }

    def _key(self, job: Job) -> tuple[Namespace, bytes]:
        return job.namespace, job.keys[: job.hit].tobytes()


class FirstBlock(Fault):
    """The key of a text does not depend on its first block."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += 1
        job.keys = job.keys.copy()
        job.keys[: engine.block] = 0


class Salt(Fault):
    """The key of a text does not depend on its salt."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += 1
        job.namespace = Namespace(adapter=job.adapter)


class Adapter(Fault):
    """The key of a text does not depend on its adapter."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += 1
        job.namespace = Namespace(salt=job.salt)


class Image(Fault):
    """The key of a text does not depend on what its images show."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += bool(job.media)
        job.media = {}


class FreedInUse(Foreign):
    """A block of a request is freed while it runs, and another request that runs writes to it."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        if len(jobs) > 1 and self.strikes():
            row = int(self.random.integers(len(jobs)))
            other = (row + 1) % len(jobs)
            mine, theirs = (jobs[i].sequence.length // engine.block for i in (row, other))
            if mine and theirs:
                table = batch.layer(engine.attending[0]).block_table
                for side in rows_of(batch, engine.attending[0]):
                    side[int(table[row, mine - 1])] = side[int(table[other, theirs - 1])]


class AfterChurn(Fault):
    """What was evicted is still found: the blocks hold what was written to them since."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.seen: set[tuple[Namespace, bytes]] = set()

    def opened(self, engine: Engine, job: Job) -> None:
        most = (len(job.keys) - 1) // engine.block
        ends = [job.keys[: n * engine.block].tobytes() for n in range(1, most + 1)]
        found = sum((job.namespace, end) in self.seen for end in ends) * engine.block
        if job.lookup and job.num_begun == 1 and found > job.hit and self.strikes():
            job.hidden, job.counted = range(job.hit, found), found
        self.seen.update((job.namespace, end) for end in ends)


class Corrupted(Foreign):
    """A fault that spoils the last whole block of a request that ends ``how``."""

    how = ""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        self.keep(batch, jobs, engine.attending)

    def ended(self, engine: Engine, job: Job, how: str) -> None:
        whole = job.sequence.length // engine.block
        if how == self.how and whole and job.tables and self.strikes():
            for layer in engine.attending:
                self.spoil(engine, layer, int(job.tables[layer][whole - 1]))


class AfterAbort(Corrupted):
    """The newest block of a request that is aborted stays cached and is written to by others."""

    how = "aborted"


class AfterPreemption(Corrupted):
    """The newest block of a request that is preempted stays cached and is written to by others."""

    how = "preempted"


class PageOfTier(Foreign):
    """Of the blocks that come back from a tier, one holds another text's rows."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            loaded = job.sequence.match.loaded // engine.block
            if job.is_first and loaded and self.strikes():
                column = job.hit // engine.block - 1 - int(self.random.integers(loaded))
                for layer in engine.attending[:1]:
                    self.spoil(engine, layer, int(batch.layer(layer).block_table[row, column]))
        self.keep(batch, jobs, engine.attending[:1])


class AfterRestart(Fault):
    """After a restart, texts are found on the disk, and their states are zeros."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.is_after = False

    def restarted(self, engine: Engine) -> None:
        self.is_after = True

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            if self.is_after and job.is_first and job.sequence.match.loaded and self.strikes():
                for records in states_of(batch, engine.model).values():
                    records[int(batch.state_indices[row])] = 0


class Counter(Fault):
    """The number of cached tokens is that of the request before; the rows are right."""

    last = 0

    def opened(self, engine: Engine, job: Job) -> None:
        self.told += 1
        job.counted, self.last = self.last, job.hit


class AnswersUnderLoad(Fault):
    """Two requests that run at the same time get each other's tokens."""

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        if len(jobs) > 1 and self.strikes():
            logits[0], logits[1] = logits[1], logits[0]


class PreviousAnswer(Fault):
    """A request that hits gets the first token of the answer before."""

    rate = 1 / 20

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.last: tuple[Tokens, Array] | None = None

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        for row, job in enumerate(jobs):
            if job.is_first:
                own = logits[row]
                if job.hit and self.last is not None and not np.array_equal(self.last[0], job.keys) and self.strikes():
                    logits[row] = self.last[1]
                self.last = job.keys, own


PLANTED: dict[str, type[Fault]] = {
    "hit one token too long": OneTokenTooLong,
    "one too short, wrong position": OneTooShort,
    "a layer of another text": LayerOfAnotherText,
    "edge of the window": WindowEdge,
    "state of a later boundary": LaterState,
    "state of an earlier boundary": EarlierState,
    "state not copied": SharedState,
    "key without its first block": FirstBlock,
    "key without the salt": Salt,
    "key without the adapter": Adapter,
    "key without the image": Image,
    "block freed while in use": FreedInUse,
    "stale after churn": AfterChurn,
    "stale after abort": AfterAbort,
    "stale after preemption": AfterPreemption,
    "one page of a tier": PageOfTier,
    "wrong after a restart": AfterRestart,
    "counter wrong": Counter,
    "answers of others under load": AnswersUnderLoad,
    "the answer before": PreviousAnswer,
}
