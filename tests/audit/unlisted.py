"""Ten more faults, of kinds that no list of the audit names: whether it finds what it was not written for."""

from __future__ import annotations

from collections import Counter as Counts

import numpy as np
from fake_engine import Engine, Fault, Job, common_tokens, rows_of, states_of
from hybrid_model import Array
from planted import Foreign

from kvpagoda import Batch, Namespace


class LastDecodedRow(Fault):
    """A block that an answer fills is cached before the row of its last token is written."""

    def ended(self, engine: Engine, job: Job, how: str) -> None:
        whole = job.sequence.length // engine.block
        if how == "done" and whole * engine.block > len(job.prompt) and self.strikes():
            for layer in engine.attending:
                for name in ("k", "v"):
                    engine.cache.layer(layer)[name].numpy()[int(job.tables[layer][whole - 1]), -1] = 0


class Roles(Fault):
    """The key of a chat does not depend on who says what."""

    def keyed(self, engine: Engine, job: Job) -> None:
        self.told += 1
        job.keys = np.where((job.keys >= 259) & (job.keys < 263), 259, job.keys).astype(np.int32)


class NotYetWritten(Fault):
    """A request that begins while another computes the same text takes its blocks as cached, before they are written."""

    def opened(self, engine: Engine, job: Job) -> None:
        for other in engine.running:
            if other.is_first and other.namespace == job.namespace and other is not job:
                common = common_tokens(other.keys, job.keys[:-1]) // engine.block * engine.block
                if common > job.hit and self.strikes():
                    job.hidden = range(job.hit, common)


class WholeBlocks(Fault):
    """A text that was cached to its end, with no token beyond a whole block, is computed from its last token alone."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.seen: set[tuple[Namespace, bytes]] = set()

    def opened(self, engine: Engine, job: Job) -> None:
        n = len(job.keys)
        key = job.namespace, job.keys.tobytes()
        if n % engine.block == 0 and job.hit == n - engine.block and key in self.seen and self.strikes():
            job.hidden = range(job.hit, n - 1)
        self.seen.add(key)


class NinthBlock(Fault):
    """The ninth block of a hit is read at the place of the first."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        layer = engine.attending[0]
        for row, job in enumerate(jobs):
            if job.is_first and job.hit and job.hit >= 9 * engine.block and self.strikes():
                table = batch.layer(layer).block_table[row]
                for side in rows_of(batch, layer):
                    side[int(table[8])] = side[int(table[0])]


class RoundedTier(Fault):
    """What comes back from a tier has lost all but some bits."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            loaded = job.sequence.match.loaded // engine.block
            if job.is_first and loaded and self.strikes():
                end = job.hit // engine.block
                for layer in engine.attending[-1:]:
                    blocks = batch.layer(layer).block_table[row].numpy()[end - loaded : end]
                    for side in rows_of(batch, layer):
                        side[blocks] = np.round(side[blocks] * 2) / 2


class StateOfBase(Fault):
    """The state of a hit with an adapter is that of the text without it."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.kept: dict[bytes, dict[int, Array]] = {}

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            key = job.keys[: job.sequence.length].tobytes()
            if job.is_first and job.hit and job.adapter and key in self.kept and self.strikes():
                for layer, records in states_of(batch, engine.model).items():
                    records[int(batch.state_indices[row])] = self.kept[key][layer]

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        inside, starts = batch.checkpoints, batch.qo_indptr.tolist()
        for row, token, place in zip(inside.rows.tolist(), inside.tokens.tolist(), inside.places.tolist()):
            if jobs[row].adapter is None:
                end = jobs[row].sequence.length + token - starts[row] + 1
                key = np.array(jobs[row].text[:end], np.int32).tobytes()
                self.kept[key] = {i: pool[place].copy() for i, pool in states_of(batch, engine.model).items()}


class WindowSlidOut(Foreign):
    """A hit that ends far before the end of a text that was computed finds rows of its window that others wrote since."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.longest: dict[bytes, int] = {}

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        layer = engine.model.kinds.index("window")
        for row, job in enumerate(jobs):
            end, size = job.sequence.length, engine.block
            if job.is_first and job.hit:
                longest = self.longest.get(job.keys[:end].tobytes(), 0)
                if longest > end + engine.model.window and self.strikes():
                    self.spoil(engine, layer, int(batch.layer(layer).block_table[row, end // size - 1]))
            if job.is_first:
                for n in range(size, len(job.keys), size):
                    key = job.keys[:n].tobytes()
                    self.longest[key] = max(self.longest.get(key, 0), len(job.keys))
        self.keep(batch, jobs, [layer])


class ThirdHit(Foreign):
    """A block is freed when it was hit twice, though its key stays."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.hits: Counts[tuple[Namespace, bytes]] = Counts()

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        for row, job in enumerate(jobs):
            if job.is_first and job.hit:
                key = job.namespace, job.keys[: job.sequence.length].tobytes()
                self.hits[key] += 1
                if self.hits[key] == 3 and self.strikes():
                    for layer in engine.attending:
                        column = job.hit // engine.block - 1
                        self.spoil(engine, layer, int(batch.layer(layer).block_table[row, column]))
        self.keep(batch, jobs, engine.attending)


class OwnTokens(Fault):
    """The key of a block is its own tokens and its place, whatever stands before it."""

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        super().__init__(seed, rate)
        self.seen: set[tuple[Namespace, int, bytes]] = set()

    def opened(self, engine: Engine, job: Job) -> None:
        size, most = engine.block, (len(job.keys) - 1) // engine.block
        blocks = [(job.namespace, n, job.keys[n * size : (n + 1) * size].tobytes()) for n in range(most)]
        found = next((n for n, block in enumerate(blocks) if block not in self.seen), most) * size
        if job.lookup and job.num_begun == 1 and found > job.hit and self.strikes():
            job.hidden, job.counted = range(job.hit, found), found
        self.seen.update(blocks)


UNLISTED: dict[str, type[Fault]] = {
    "last row of an answer's block": LastDecodedRow,
    "key without the roles": Roles,
    "not yet written by a twin": NotYetWritten,
    "a text of whole blocks": WholeBlocks,
    "the ninth block": NinthBlock,
    "rounded by a tier": RoundedTier,
    "state without the adapter": StateOfBase,
    "a window that slid out": WindowSlidOut,
    "the third hit": ThirdHit,
    "key of a block alone": OwnTokens,
}
