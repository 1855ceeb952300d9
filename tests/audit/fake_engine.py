"""A small engine over a ``KVCache``: batches, chunks, preemption, aborts, tiers, restarts. Faults are planted in it.

A ``Fault`` has a method for each place in the life of a request at which a cache may go wrong; those of a ``Fault`` do
nothing. The engine itself is right: without a fault, what is cached gives the numbers of what is computed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from time import sleep
from typing import Any, NamedTuple

import numpy as np
from hybrid_model import Array, HybridModel, Piece, Tokens

from kvpagoda import Batch, Identity, KVCache, Limits, Namespace, OutOfBlocks, Retention, RetryLater, Sequence
from kvpagoda.tiers import disk_tier, host_tier

END = 257


class Sampled(NamedTuple):
    """A token of an answer, and the log-probabilities of all tokens there, ``[VOCAB]``."""

    token: int
    logprobs: Array


@dataclass(eq=False)
class Job:
    """A request. ``prompt``: int32. ``images``: (offset, digest). ``lookup``: whether it may use what is cached."""

    prompt: Tokens
    most: int = 8
    adapter: str | None = None
    salt: str | None = None
    images: tuple[tuple[int, bytes], ...] = ()
    lookup: bool = True
    seed: int | None = None
    ends: bool = False
    text: list[int] = field(default_factory=list)
    samples: list[Sampled] = field(default_factory=list)
    out: queue.SimpleQueue[Sampled | None] = field(default_factory=queue.SimpleQueue)
    """What a client reads: each sample, then None."""
    is_aborted: bool = False
    sequence: Sequence | None = None
    keys: Tokens | None = None
    """The tokens by which the cache knows the text: those of the prompt, unless a fault says otherwise."""
    namespace: Namespace = field(default_factory=Namespace)
    media: dict[int, bytes] = field(default_factory=dict)
    hit: int | None = None
    """How many tokens were cached when it began; None while it waits."""
    counted: int | None = None
    """How many the server says were cached."""
    hidden: range = range(0)
    """The positions whose rows are not written."""
    shift: int = 0
    narrower: int = 0
    num_begun: int = 0
    is_first: bool = True
    """Whether the next step is the first since it began."""
    tables: dict[int, Tokens] = field(default_factory=dict)
    """Layer -> its blocks in the newest step."""

    @property
    def is_done(self) -> bool:
        return len(self.samples) >= self.most or bool(self.ends and self.samples and self.samples[-1].token == END)


class Fault:
    """Nothing is wrong. ``rate``: of how many chances it takes one, drawn with ``seed``. ``told``: how often it did."""

    rate = 1.0

    def __init__(self, seed: int = 0, rate: float | None = None) -> None:
        self.random, self.told = np.random.default_rng((seed, 17)), 0
        if rate is not None:
            self.rate = rate

    def strikes(self) -> bool:
        """Return whether the fault takes this chance."""
        is_it = bool(self.random.random() < self.rate)
        self.told += is_it
        return is_it

    def keyed(self, engine: Engine, job: Job) -> None:
        """``job`` is about to look up ``keys`` in ``namespace`` with ``media``."""

    def opened(self, engine: Engine, job: Job) -> None:
        """``job`` has found ``hit`` tokens."""

    def before(self, engine: Engine, batch: Batch, jobs: list[Job]) -> None:
        """The step of ``jobs`` is about to be computed."""

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        """It is computed; ``logits`` may be changed."""

    def ended(self, engine: Engine, job: Job, how: str) -> None:
        """``job`` is about to be closed: "done", "aborted" or "preempted"."""

    def answered(self, engine: Engine, job: Job) -> None:
        """``job`` is done; nothing of it is sent yet, unless it is a stream."""

    def restarted(self, engine: Engine) -> None:
        """The engine began again, with nothing but what is on the disk."""


class Engine:
    """``blocks`` of 16 tokens in each group of layers; ``host`` and ``disk``: tiers (bytes; a folder). ``noise``: the
    standard deviation of what is added to log-probabilities, another at every request. ``shape_noise``: the same, but a
    function of the text and of how many tokens are computed at once, as kernels round. ``pause``: seconds of a step."""

    def __init__(
        self, model: HybridModel, fault: Fault | None = None, *, blocks: int = 64, block: int = 16, rows: int = 4,
        chunk: int = 128, host: str | None = None, disk: str | None = None, noise: float = 0.0, shape_noise: float = 0.0,
        pause: float = 0.0, caches: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model, self.fault, self.block, self.rows, self.chunk = model, fault or Fault(), block, rows, chunk
        self.num_blocks = blocks
        self.noise, self.shape_noise, self.pause, self.caches = noise, shape_noise, pause, caches
        self.random, self.seed, self.num_preempted = np.random.default_rng((seed, 3)), seed, 0
        tiers = [] if host is None else [host_tier(host)]
        if disk is not None:
            tiers.append(disk_tier(disk, "32MiB", admit_all=True))
        self._options: dict[str, Any] = dict(
            num_blocks=blocks, block_size=block, max_requests=rows, device="cpu", tiers=tiers,
            limits=Limits(step_checkpoints=64, max_context=model.longest, hit_grid=block),
            retention=Retention(checkpoint_every=1, checkpoints=blocks), identity=Identity(weights="fake"),
        )  # fmt: skip
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self._asked, self._changed, self._is_over = list[Any](), threading.Condition(), False
        self.cache = KVCache(model.schema, **self._options)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake engine", daemon=True)
        self._thread.start()

    # -- from other threads ------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Job:
        """Queue ``job``; its samples come in ``job.out``."""
        self._ask(job)
        return job

    def answer(self, job: Job) -> Job:
        """Run ``job`` to its end."""
        self.submit(job)
        while job.out.get() is not None:
            pass
        return job

    def abort(self, job: Job) -> None:
        """End ``job`` before the next step."""
        job.is_aborted = True

    def restart(self) -> None:
        """Begin again: what is cached is lost, but for the disk."""
        self._at_rest(self._restart)

    def reset(self) -> None:
        """Forget what is cached."""
        self._at_rest(lambda: self.cache.reset())

    def close(self) -> None:
        """Stop. Raises what went wrong."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        self.cache.close()
        if self.error is not None:
            raise self.error

    def _at_rest(self, act: Any) -> None:
        done = threading.Event()
        self._ask((act, done))
        done.wait()

    def _ask(self, thing: Any) -> None:
        with self._changed:
            if self.error is not None:
                raise RuntimeError("the engine is down") from self.error
            self._asked.append(thing)
            self._changed.notify()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        acts = []
        try:
            while True:
                with self._changed:
                    while not (self._asked or self.waiting or self.running or acts or self._is_over):
                        self._changed.wait()
                    if self._is_over:
                        return
                    asked, self._asked = self._asked, []
                self.waiting += [thing for thing in asked if isinstance(thing, Job)]
                acts += [thing for thing in asked if not isinstance(thing, Job)]
                if acts and not self.running and not self.waiting:
                    for act, done in acts:
                        act()
                        done.set()
                    acts = []
                if self.waiting or self.running:
                    self.step()
        except BaseException as error:
            self.error = error
            for job in (*self.waiting, *self.running):
                job.out.put(None)

    def _restart(self) -> None:
        self.cache.flush()
        self.cache.close()
        self.cache = KVCache(self.model.schema, **self._options)
        self.fault.restarted(self)

    def step(self) -> None:
        """Drop what was aborted, begin what fits, and compute a step."""
        for job in [job for job in (*self.waiting, *self.running) if job.is_aborted]:
            self._end(job, "aborted")
        while self.waiting and len(self.running) < self.rows and self._begin(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        counts: dict[Job, int] = {}
        for job in [*self.running]:
            if job in self.running and (n := self._room(job)):
                counts[job] = n
        jobs = [job for job in self.running if job in counts]
        if not jobs:
            return
        if self.pause:
            sleep(self.pause)
        batch = self.cache.batch([job.sequence for job in jobs], [counts[job] for job in jobs])
        self.fault.before(self, batch, jobs)
        pieces = []
        for job in jobs:
            first = job.sequence.length
            hidden = range(max(0, job.hidden.start - first), max(0, job.hidden.stop - first))
            tokens = np.array(job.text[first : first + counts[job]], np.int32)
            pieces.append(
                Piece(tokens, job.adapter, job.images, job.shift, hidden, job.narrower if job.is_first else 0)
            )
        logits = self.model.forward(batch, pieces)
        for row, job in enumerate(jobs):
            job.tables = {i: batch.layer(i).block_table[row].numpy().copy() for i in self.attending}
        self.fault.after(self, batch, jobs, logits)
        for job, row in zip(jobs, logits):
            first, n, sequence = job.sequence.length, counts[job], job.sequence
            keys = np.concatenate([job.keys[first : first + n], job.text[max(first, len(job.keys)) : first + n]])
            sequence.commit(keys.astype(np.int32), sequence.step_checkpoints)
            job.is_first = False
            if sequence.length == len(job.text):
                self._sample(job, row, n)
                if job.is_done:
                    self.fault.answered(self, job)
                    self._end(job, "done")

    @property
    def attending(self) -> list[int]:
        """The layers that keep rows of tokens."""
        return [i for i, kind in enumerate(self.model.kinds) if kind != "state"]

    def _begin(self, job: Job) -> bool:
        text = np.array([*job.prompt, *(one.token for one in job.samples)], np.int32)
        job.text, job.keys, job.media = text.tolist(), text, dict(job.images)
        job.namespace = Namespace(salt=job.salt, adapter=job.adapter)
        self.fault.keyed(self, job)
        try:
            job.sequence = self.cache.open(
                job.keys, job.namespace, capacity=0, reserve=min(len(text) + self.block, self.model.longest),
                media=job.media, lookup=job.lookup and self.caches, publish=job.lookup and self.caches,
            )  # fmt: skip
        except RetryLater:
            return False
        found = job.sequence.cached_tokens
        job.is_first, job.hidden, job.shift, job.narrower = True, range(0), 0, 0
        job.num_begun += 1
        if job.hit is None:
            job.hit = job.counted = found
        self.fault.opened(self, job)
        return True

    def _room(self, job: Job) -> int:
        """Return how many tokens of ``job`` the next step computes; 0 if it was preempted."""
        sequence = job.sequence
        n = min(len(job.text) - sequence.length, self.chunk, self.cache.step_limit(sequence))
        while True:
            try:
                sequence.extend(n)
                return n
            except OutOfBlocks:
                youngest = self.running[-1]
                self._end(youngest, "preempted")
                if youngest is job:
                    return 0

    def _end(self, job: Job, how: str) -> None:
        if job.sequence is not None:
            self.fault.ended(self, job, how)
            job.sequence.close()
            job.sequence = None
            self.running.remove(job)
        else:
            self.waiting.remove(job)
        if how == "preempted":
            self.num_preempted += 1
            self.waiting.insert(0, job)
        else:
            job.out.put(None)

    def _sample(self, job: Job, logits: Array, n: int) -> None:
        if self.noise:
            logits = logits + self.noise * self.random.normal(size=len(logits))
        if self.shape_noise:
            key = (self.seed, n, sum(job.text), len(job.text))
            logits = logits + self.shape_noise * np.random.default_rng(key).normal(size=len(logits))
        logits = logits[: END + 1]  # the others stand in prompts alone
        logprobs = logits - logits.max()
        logprobs = logprobs - np.log(np.exp(logprobs).sum())
        chosen = logprobs
        if job.seed is not None:
            chosen = logprobs + np.random.default_rng((job.seed, len(job.text))).gumbel(size=len(logprobs))
        sample = Sampled(int(chosen[: END + job.ends].argmax()), logprobs)
        job.samples.append(sample)
        job.text.append(sample.token)
        job.out.put(sample)


def rows_of(batch: Batch, layer: int) -> tuple[Array, Array]:
    """Return the keys and values of ``layer``, ``[blocks, tokens, heads, dim]``, which may be written."""
    view = batch.layer(layer)
    return view["k"].numpy(), view["v"].numpy()


def common_tokens(first: Tokens, second: Tokens) -> int:
    """Return how many tokens two texts begin with alike."""
    n = min(len(first), len(second))
    same = first[:n] == second[:n]
    return n if same.all() else int(same.argmin())


def states_of(batch: Batch, model: HybridModel) -> dict[int, Array]:
    """Return the records of the states of each layer that has some, which may be written."""
    return {i: batch.layer(i)["recurrent"].numpy() for i, kind in enumerate(model.kinds) if kind == "state"}


def ask(engine: Engine, prompt: Many[int] | Tokens, most: int = 4, **options: Any) -> Job:
    """Answer ``prompt``."""
    return engine.answer(Job(np.array(prompt, np.int32), most, **options))
