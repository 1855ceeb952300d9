"""More faults, planted after the audit was written: of kinds that neither ``planted`` nor ``unlisted`` has."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque

import numpy as np
from fake_engine import Engine, Fault, Job, common_tokens, rows_of, states_of
from hybrid_model import Array
from planted import Corrupted, OneTokenTooLong

from kvpagoda import Batch, Namespace

Key = tuple[Namespace, bytes]


def key_of(job: Job, end: int) -> Key:
    """What names the text of ``job`` up to ``end``."""
    assert job.keys is not None
    return job.namespace, job.keys[:end].tobytes()


class Passing(Fault):
    """A fault that reads rows wrongly for a step, and leaves them as they are."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.kept: list[tuple[Array, int, Array]] = []

    def scale(self, batch: Batch, layer: int, blocks: Array, by: float) -> None:
        """Multiply the rows of ``blocks`` for this step."""
        for side in rows_of(batch, layer):
            for block in blocks.tolist():
                self.kept.append((side, block, side[block].copy()))
                side[block] *= by

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        while self.kept:
            side, block, rows = self.kept.pop()
            side[block] = rows


class StateOfTheEnd(Fault):
    """A text that is asked again begins with the state of its end: its last tokens count twice."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.ends: dict[Key, dict[int, Array]] = {}

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            if job.is_first and job.hit and (end := self.ends.get(key_of(job, len(job.keys)))) and self.strikes():
                for layer, records in states_of(batch, engine.model).items():
                    records[int(batch.state_indices[row])] = end[layer]

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        starts = batch.qo_indptr.tolist()
        for row, job in enumerate(jobs):
            if job.sequence.length + starts[row + 1] - starts[row] == len(job.prompt):
                place = int(batch.state_writes[row, 0])
                states = {i: pool[place].copy() for i, pool in states_of(batch, engine.model).items()}
                self.ends[key_of(job, len(job.keys))] = states


class PlacesAfterPicture(Fault):
    """After a hit beyond a picture, positions are one too low: how many the picture takes was not kept."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.images and job.hit and job.hit > job.images[0][0] and self.strikes():
            job.shift = -1


class PrefixForgotten(Passing):
    """A hit is seen by the first chunk after it alone: those that follow do not attend to it, in one layer."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        layer = engine.attending[-1]
        for row, job in enumerate(jobs):
            if job.hit and not job.is_first and job.sequence.length < len(job.prompt) and self.strikes():
                table = batch.layer(layer).block_table[row].numpy()
                self.scale(batch, layer, table[: job.hit // engine.block], 0.0)


class AbortInPrefill(Corrupted):
    """A request that is aborted before its first token leaves a block that was not written."""

    how = "aborted"

    def ended(self, engine: Engine, job: Job, how: str) -> None:
        if not job.samples:
            super().ended(engine, job, how)


class FreedByAbort(Corrupted):
    """A request that is aborted frees a block that another one reads."""

    def ended(self, engine: Engine, job: Job, how: str) -> None:
        for other in engine.running:
            if how == "aborted" and other is not job and job.tables and other.namespace == job.namespace:
                held = min(job.sequence.length, other.sequence.length)
                whole = min(held, common_tokens(other.keys, job.keys)) // engine.block
                if whole and self.strikes():
                    for layer in engine.attending:
                        self.spoil(engine, layer, int(job.tables[layer][whole - 1]))


class ChunkState(Fault):
    """In a prompt of several chunks, the states that are kept are those with which the chunk began."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.begun: list[dict[int, Array]] = []

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        states = states_of(batch, engine.model)
        self.begun = [{i: pool[place].copy() for i, pool in states.items()} for place in batch.state_indices.tolist()]

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        inside = batch.checkpoints
        for row, place in zip(inside.rows.tolist(), inside.places.tolist()):
            job = jobs[row]
            if not job.is_first and job.sequence.length < len(job.prompt) and self.strikes():
                for layer, records in states_of(batch, engine.model).items():
                    records[place] = self.begun[row][layer]


class DraftState(Fault):
    """A state that is kept while an answer is written has taken in a token that was rejected."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.written: set[Key] = set()

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            if job.is_first and job.hit and key_of(job, job.hit) in self.written and self.strikes():
                for records in states_of(batch, engine.model).values():
                    records[int(batch.state_indices[row])] *= 1.2

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        for job in jobs:
            length = job.sequence.length + 1
            if length > len(job.prompt) and length % engine.block == 0 and job.lookup:
                self.written.add((job.namespace, np.array(job.text[:length], np.int32).tobytes()))


class BlockScale(Passing):
    """Rows of a hit are read with the scale of another text that had the block before, in one layer."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.owners: dict[int, tuple[Key, int]] = {}

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        layer = engine.attending[-1]
        for row, job in enumerate(jobs):
            if job.is_first and job.hit:
                table = batch.layer(layer).block_table[row].numpy()[: job.hit // engine.block]
                second = [block for block in table.tolist() if self.owners.get(block, (None, 0))[1] > 0]
                if second and self.strikes():
                    self.scale(batch, layer, np.array(second), 1.05)

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        super().after(engine, batch, jobs, logits)
        layer = engine.attending[-1]
        for row, job in enumerate(jobs):
            table = batch.layer(layer).block_table[row].tolist()
            for column, block in enumerate(table[: len(job.keys) // engine.block]):
                key = key_of(job, (column + 1) * engine.block)
                owner, life = self.owners.get(block, (key, 0))
                self.owners[block] = key, life + (owner != key)


class PartialCopy(Fault):
    """A text that leaves an earlier one inside a block takes half of what they have in common there, and counts all."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.nexts: dict[Key, list[Array]] = defaultdict(list)

    def opened(self, engine: Engine, job: Job) -> None:
        if not job.lookup or job.num_begun > 1:
            return
        rest = job.keys[job.hit : len(job.keys) - 1][: engine.block]
        common = max((common_tokens(rest, other) for other in self.nexts[key_of(job, job.hit)]), default=0)
        if common > 3 and self.strikes():
            job.hidden, job.counted = range(job.hit + common // 2, job.hit + common), job.hit + common
        for begin in range(0, len(job.keys), engine.block):
            self.nexts[key_of(job, begin)].append(job.keys[begin : begin + engine.block])


class ShortHash(Fault):
    """Blocks are found by 12 bits of the hash of their text."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.known: deque[int] = deque(maxlen=200)

    def opened(self, engine: Engine, job: Job) -> None:
        most = (len(job.keys) - 1) // engine.block
        hashes = []
        for n in range(1, most + 1):
            named = repr(job.namespace).encode() + job.keys[: n * engine.block].tobytes()
            hashes.append(int.from_bytes(hashlib.sha256(named).digest()[:2], "big") >> 4)
        first = job.hit // engine.block
        found = next((n for n in range(first, most) if hashes[n] not in self.known), most) * engine.block
        if job.lookup and job.num_begun == 1 and found > job.hit and self.strikes():
            job.hidden, job.counted = range(job.hit, found), found
        self.known.extend(one for one in hashes if one not in self.known)


class EveryOtherToken(Fault):
    """The key of a text depends on every other token of it."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += 1
        job.keys = job.keys.copy()
        job.keys[1 : len(job.keys) // engine.block * engine.block : 2] = 0


class AnyOrder(Fault):
    """The key of a block is the same for its tokens in any order."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += 1
        whole = len(job.keys) // engine.block * engine.block
        job.keys = job.keys.copy()
        job.keys[:whole] = np.sort(job.keys[:whole].reshape(-1, engine.block)).ravel()


class PicturesInAnyOrder(Fault):
    """The key of a text depends on which pictures it has, not on where each stands."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += len(job.media) > 1
        job.media = dict(zip(sorted(job.media), sorted(job.media.values())))


class OldWeights(Fault):
    """The weights are others after a restart; what is on the disk is of those before."""

    def restarted(self, engine: Engine) -> None:
        model = engine.model
        model.inward = model.inward + np.random.default_rng(5).normal(size=model.inward.shape) / 10
        model._adapters = {None: model.inward}
        self.told += 1


class NewWeights(OldWeights):
    """The weights are others after a restart, and nothing of before is found: no fault."""

    def restarted(self, engine: Engine) -> None:
        super().restarted(engine)
        engine.cache.invalidate(weights="others")


class Junction(Fault):
    """Where a hit ends with blocks of a tier, the row of the first token after it is not written."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.sequence.match.loaded and self.strikes():
            job.hidden = range(job.hit, job.hit + 1)


class BesideLonger(Fault):
    """A hit that is computed beside a longer text gets positions that are one too low."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        longest = max(len(job.text) for job in jobs)
        for job in jobs:
            job.shift = -1 if job.is_first and job.hit and len(job.text) < longest and self.strikes() else 0


class Resumed(Fault):
    """A request that was preempted goes on at positions that are one too low."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.num_begun > 1 and self.strikes():
            job.shift = -1


class OwnChunks(Fault):
    """The chunks of a prompt but its last are counted as cached; the rows are right."""

    def opened(self, engine: Engine, job: Job) -> None:
        if (own := (len(job.keys) - job.hit - 1) // engine.chunk * engine.chunk) and self.strikes():
            job.counted = job.hit + own


class OneMore(Fault):
    """A hit is said to be one token longer than it is; the rows are right."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.hit and self.strikes():
            job.counted = job.hit + 1


class RoundedUp(Fault):
    """A hit is counted with the block in which it ends; the rows are right."""

    def opened(self, engine: Engine, job: Job) -> None:
        if job.hit and self.strikes():
            job.counted = min(job.hit + engine.block, len(job.keys))


class CounterOfNeighbour(Fault):
    """A request that begins beside others is said to have cached the most that one of these had; the rows are right."""

    def opened(self, engine: Engine, job: Job) -> None:
        if engine.running and self.strikes():
            job.counted = max(other.hit for other in engine.running)


class Uncounted(OneTokenTooLong):
    """A hit is one token too long, and nothing is said to be cached."""

    def opened(self, engine: Engine, job: Job) -> None:
        super().opened(engine, job)
        job.counted = 0


FURTHER: dict[str, type[Fault]] = {
    "state of the end": StateOfTheEnd,
    "places after a picture": PlacesAfterPicture,
    "a hit forgotten by the second chunk": PrefixForgotten,
    "aborted in prefill": AbortInPrefill,
    "freed by an abort": FreedByAbort,
    "state of the chunk": ChunkState,
    "state with a rejected token": DraftState,
    "scale of another block": BlockScale,
    "half of a block copied": PartialCopy,
    "a short hash": ShortHash,
    "key of every other token": EveryOtherToken,
    "key in any order": AnyOrder,
    "pictures in any order": PicturesInAnyOrder,
    "weights of before": OldWeights,
    "junction with a tier": Junction,
    "beside a longer one": BesideLonger,
    "resumed at another place": Resumed,
    "own chunks counted": OwnChunks,
    "one more counted": OneMore,
    "counter rounded up": RoundedUp,
    "counter of the neighbour": CounterOfNeighbour,
    "too long and not counted": Uncounted,
}
