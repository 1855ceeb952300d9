"""An engine on kvpagoda: continuous batching, chunked prefill, preemption, n > 1 by fork, speculation, static arrays.

    submit ──► waiting ──open──► prefill, one chunk per step ──► decode, all rows in one step of fixed shape ──► done
                  ▲                  │ fork: n answers                           │
                  └──── preempt: close, and queue again with the text so far ────┘

The memory is small on purpose: the requests below need several times as much, so that some requests are preempted and
cached blocks are evicted. At the end, every token is compared with a computation that uses no cache.

    python examples/engine.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from tiny_model import TinyModel, choose, is_exact

from kvpagoda import KVCache, Limits, OutOfBlocks, RetryLater, Sequence


@dataclass(eq=False)
class Answer:
    """One answer to one prompt: the prompt, and up to ``max_new_tokens`` tokens that the model writes after it."""

    number: int
    text: list[int]
    prompt_length: int
    max_new_tokens: int
    seed: int | None
    forks: list[Answer] = field(default_factory=list)
    """Further answers to the same prompt; they are forked from this one once the prompt is computed."""
    sequence: Sequence | None = None
    """The open sequence while this answer runs; None while it waits and after it is done."""

    @property
    def is_done(self) -> bool:
        """Whether all ``max_new_tokens`` are written."""
        return len(self.text) - self.prompt_length >= self.max_new_tokens

    @property
    def num_missing(self) -> int:
        """Tokens that prefill still has to compute; the last token of the text is left to a decode step."""
        assert self.sequence is not None
        return len(self.text) - 1 - self.sequence.length


class Engine:
    """An engine that runs up to ``max_rows`` answers at once.

    ``budget``: memory of the cache, such as "80KiB". ``chunk``: most prompt tokens of a request in one step.
    ``drafts``: tokens proposed for each row of a decode step. ``longest``: most tokens of one text."""

    def __init__(
        self, model: TinyModel, budget: str, *, max_rows: int = 10, chunk: int = 32, drafts: int = 3, longest: int = 256
    ) -> None:
        self.model, self.chunk, self.width = model, chunk, 1 + drafts
        limits = Limits(max_context=longest + drafts, step_tokens=max(chunk, self.width))
        self.cache = KVCache(
            model.schema, budget, device="cpu", max_requests=max_rows, block_size=8, limits=limits, poison=True
        )
        # Every decode step has arrays of the same shape at the same address, for max_rows x (1 + drafts) tokens, so
        # that a CUDA graph can be captured once. A layer's memory can be bound before the first step:
        # cache.layer(i)["k"].
        self.decoding = self.cache.persistent_batch(num_rows=max_rows, tokens_per_row=self.width)
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []  # oldest first
        self.counts: Counter[str] = Counter()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, prompt: list[int], max_new_tokens: int, n: int = 1, seed: int | None = None) -> list[Answer]:
        """Queue ``n`` answers to ``prompt`` and return them. Decoding is greedy without a ``seed``; otherwise answer
        ``i`` is sampled with ``seed + i``."""
        answers = []
        for i in range(n):
            answer_seed = None if seed is None else seed + i
            answers.append(Answer(self.counts["answers"], [*prompt], len(prompt), max_new_tokens, answer_seed))
            self.counts["answers"] += 1
        answers[0].forks = answers[1:]
        self.waiting.append(answers[0])
        return answers

    def run(self) -> None:
        """Run steps until every answer is done."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admit the requests that fit, prefill one chunk of every prompt, then run one decode step."""
        self.counts["steps"] += 1
        self._admit()
        for answer in [*self.running]:
            if answer.sequence is not None and answer.num_missing:
                self._prefill(answer)
        self._start_decoding()
        if self.decoding.sequences:
            self._decode()

    def _admit(self) -> None:
        """Open sequences for waiting answers, oldest first. Blocks are reserved for the text so far and one
        decode step only, so that a later ``extend`` may raise OutOfBlocks."""
        self.waiting.sort(key=lambda answer: answer.number)
        while self.waiting:
            answer = self.waiting[0]
            if sum(1 + len(each.forks) for each in (*self.running, answer)) > self.decoding.num_rows:
                return  # there would be no rows for the forks
            try:
                answer.sequence = self.cache.open(answer.text, capacity=0, reserve=len(answer.text) + self.width)
            except RetryLater:
                return
            self.running.append(self.waiting.pop(0))
            self.running.sort(key=lambda answer: answer.number)

    # -- chunked prefill ---------------------------------------------------------------------------------------------

    def _prefill(self, answer: Answer) -> None:
        """Compute the next chunk of the text of ``answer``; the last token of the text is left to a decode step."""
        sequence = answer.sequence
        assert sequence is not None
        # For a model with recurrent states, step_limit ends the chunk where a checkpoint is due: other requests can
        # resume there.
        n = min(answer.num_missing, self.chunk, int(self.cache.step_limit(sequence)))
        if not self._make_room(answer, lambda: sequence.extend(n)):
            return
        tokens = np.array(answer.text[sequence.length : sequence.length + n], np.int32)
        self.model.forward(self.cache.batch([sequence], [n]), tokens)
        sequence.commit(tokens)

    def _start_decoding(self) -> None:
        """Add every running answer with one token left to compute to the decode batch, and fork its further answers.

        This includes an answer whose other tokens were all cached, so that it needed no prefill."""
        for answer in [*self.running]:
            if answer.sequence is None or answer.num_missing or answer.sequence in self.decoding.sequences:
                continue
            while answer.forks:
                fork = answer.forks.pop()
                try:
                    fork.sequence = answer.sequence.fork(reserve=len(fork.text) + self.width)
                except RetryLater:  # no memory now: the fork waits, and finds the prompt in the cache later
                    self.waiting.append(fork)
                else:
                    self.counts["forked"] += 1
                    self.running.append(fork)
                    self.decoding.add(fork.sequence)
            self.decoding.add(answer.sequence)
        self.running.sort(key=lambda answer: answer.number)

    # -- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Run one decode step over the last token of each answer and its drafts, and commit the accepted tokens."""
        while self.decoding.sequences:
            try:
                batch = self.decoding.extend()
                break
            except OutOfBlocks:
                if len(self.running) == 1:
                    raise
                self._preempt(self.running[-1])
        else:
            return
        by_sequence = {answer.sequence: answer for answer in self.running}
        answers = [by_sequence[sequence] for sequence in self.decoding.sequences]
        tokens = np.zeros((self.decoding.num_rows, self.width), np.int32)
        for row, answer in enumerate(answers):
            tokens[row, 0], tokens[row, 1:] = answer.text[-1], propose(answer.text, self.width - 1)
        logits = self.model.forward(batch, tokens.ravel()).view(*tokens.shape, -1)
        kept, counts = [], []
        for row, answer in enumerate(answers):
            new = self._verify(answer, tokens[row], logits[row])
            answer.text += new
            kept.append(tokens[row, : len(new)])  # the next step overwrites the cache rows of rejected drafts
            counts.append(len(new))
        self.decoding.commit(np.concatenate(kept), counts)
        for answer in answers:
            if answer.is_done:
                self._stop(answer)

    def _verify(self, answer: Answer, tokens: np.ndarray, logits) -> list[int]:
        """Return the new tokens of ``answer``: the drafts up to the first that the model would not choose, and the
        token that the model chooses after them. ``tokens`` int ``[width]`` are the inputs, ``logits``
        ``[width, VOCAB]``."""
        new: list[int] = []
        room = answer.prompt_length + answer.max_new_tokens - len(answer.text)
        for i in range(min(self.width, room)):
            new.append(choose(logits[i], len(answer.text) + i, answer.seed))
            if i + 1 < self.width and tokens[i + 1] != new[-1]:
                break
        self.counts["drafts"] += self.width - 1
        self.counts["accepted"] += len(new) - 1
        return new

    # -- memory ------------------------------------------------------------------------------------------------------

    def _make_room(self, answer: Answer, extend) -> bool:
        """Call ``extend``; while it raises OutOfBlocks, preempt the youngest answer. False if that was ``answer``
        itself. Raises OutOfBlocks if no other answer runs."""
        while True:
            try:
                extend()
                return True
            except OutOfBlocks:
                if len(self.running) == 1:
                    raise
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is answer:
                return False

    def _preempt(self, answer: Answer) -> None:
        """Close the sequence of ``answer`` and queue the answer again, with the text so far as its prompt. Its blocks
        stay cached until they are evicted."""
        self._stop(answer)
        self.waiting.append(answer)
        self.counts["preempted"] += 1

    def _stop(self, answer: Answer) -> None:
        """Close the sequence of ``answer`` and take the answer out of the decode batch and of ``running``."""
        sequence, answer.sequence = answer.sequence, None
        assert sequence is not None
        if sequence in self.decoding.sequences:
            self.decoding.remove(sequence)
        sequence.close()
        self.running.remove(answer)


def propose(text: list[int], n: int) -> list[int]:
    """Return ``n`` draft tokens: those that followed the last occurrence of the final two tokens of ``text``, padded
    with 0. This is prompt lookup, the simplest draft model."""
    for start in range(len(text) - 3, -1, -1):
        if text[start : start + 2] == text[-2:]:
            drafts = text[start + 2 : start + 2 + n]
            return drafts + [0] * (n - len(drafts))
    return [0] * n


def traffic(random: np.random.Generator) -> list[tuple[list[int], int, int, int | None]]:
    """Return requests as (prompt, new tokens, answers, seed). Most prompts share a prefix; some get three answers."""
    system = random.integers(0, 61, 40).tolist()
    requests = []
    for i in range(14):
        question = random.integers(0, 61, random.integers(3, 70)).tolist()
        n = 3 if i % 3 == 0 else 1
        requests.append(
            (system + question if i % 4 else question, int(random.integers(20, 60)), n, 100 * i if n > 1 else None)
        )
    return requests


def main(budget: str = "80KiB") -> dict[str, int]:
    model = TinyModel()
    engine, answers = Engine(model, budget), list[Answer]()
    for number, request in enumerate(traffic(np.random.default_rng(7))):
        answers += engine.submit(*request)
        if number % 3 == 2:  # requests arrive while others run
            engine.step()
    engine.run()
    engine.cache.check()
    exact = sum(
        is_exact(model, np.array(answer.text, np.int32), answer.prompt_length, answer.seed) for answer in answers
    )
    stats = engine.cache.stats()
    results = {
        **engine.counts, "exact": exact, "evicted blocks": stats.evicted_blocks, "cached prompt tokens": stats.cached_tokens,
        "written tokens": sum(len(answer.text) - answer.prompt_length for answer in answers),
    }  # fmt: skip
    for name, value in results.items():
        print(f"{name:>20}  {value}")
    return results


if __name__ == "__main__":
    main()
