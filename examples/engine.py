"""An engine on kvpagoda: continuous batching, chunked prefill, preemption, n > 1 by fork, speculative decoding, static arrays.

    submit ──► waiting ──open──► prefill, a chunk a step ──► decode, all rows in one step of fixed shape ──► done
                  ▲                      │ fork: n answers          │
                  └────── preempt: close, and come again with the text so far ─────┘

The memory is small on purpose: the requests below need several times as much, so that some are preempted and what is cached
is evicted. At the end every token is compared with a computation without any cache.

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
    """One text that grows: a prompt, and up to ``max_new_tokens`` that the model writes."""

    number: int
    text: list[int]
    prompt_length: int
    max_new_tokens: int
    seed: int | None
    forks: list[Answer] = field(default_factory=list)
    """Answers to the same prompt that begin when it is computed."""
    sequence: Sequence | None = None

    @property
    def is_done(self) -> bool:
        return len(self.text) - self.prompt_length >= self.max_new_tokens

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed, without the last one, which a decode step computes."""
        assert self.sequence is not None
        return len(self.text) - 1 - self.sequence.length


class Engine:
    """``max_rows`` requests at once; prompts in pieces of ``chunk`` tokens; ``drafts`` tokens proposed to every row."""

    def __init__(
        self, model: TinyModel, budget: str, *, max_rows: int = 10, chunk: int = 32, drafts: int = 3, longest: int = 256
    ) -> None:
        self.model, self.chunk, self.width = model, chunk, 1 + drafts
        limits = Limits(max_context=longest + drafts, step_tokens=max(chunk, self.width))
        self.cache = KVCache(
            model.schema, budget, device="cpu", max_requests=max_rows, block_size=8, limits=limits, poison=True
        )
        # Arrays of one shape at one address: max_rows x (1 + drafts) tokens in every step, so that a graph can be captured
        # once. The memory of a layer can be bound before there is a step: cache.layer(i)["k"].
        self.decoding = self.cache.persistent_batch(num_rows=max_rows, tokens_per_row=self.width)
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []  # oldest first
        self.counts: Counter[str] = Counter()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, prompt: list[int], max_new_tokens: int, n: int = 1, seed: int | None = None) -> list[Answer]:
        """``n`` answers to ``prompt``: greedy without a ``seed``, else each drawn with a seed of its own."""
        answers = []
        for i in range(n):
            own = None if seed is None else seed + i
            answers.append(Answer(self.counts["answers"], [*prompt], len(prompt), max_new_tokens, own))
            self.counts["answers"] += 1
        answers[0].forks = answers[1:]
        self.waiting.append(answers[0])
        return answers

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admit what fits, compute one piece of every prompt, then one step of everything that decodes."""
        self.counts["steps"] += 1
        self._admit()
        for answer in [*self.running]:
            if answer.sequence is not None and answer.num_missing:
                self._prefill(answer)
        self._start_decoding()
        if self.decoding.sequences:
            self._decode()

    def _admit(self) -> None:
        """Oldest first, with room promised for the text so far; what it writes beyond that may lack room later."""
        self.waiting.sort(key=lambda answer: answer.number)
        while self.waiting:
            answer = self.waiting[0]
            if sum(1 + len(one.forks) for one in (*self.running, answer)) > self.decoding.num_rows:
                return  # its forks would have no rows
            try:
                answer.sequence = self.cache.open(answer.text, capacity=0, reserve=len(answer.text) + self.width)
            except RetryLater:
                return
            self.running.append(self.waiting.pop(0))
            self.running.sort(key=lambda one: one.number)

    # -- prompts, in pieces ------------------------------------------------------------------------------------------

    def _prefill(self, answer: Answer) -> None:
        """Compute the next piece of a text that is known, up to its last token but one."""
        sequence = answer.sequence
        assert sequence is not None
        # A model with states says where a step should end, so that others can resume there.
        n = min(answer.num_missing, self.chunk, int(self.cache.step_limit(sequence)))
        if not self._make_room(answer, lambda: sequence.extend(n)):
            return
        tokens = np.array(answer.text[sequence.length : sequence.length + n], np.int32)
        self.model.forward(self.cache.batch([sequence], [n]), tokens)
        sequence.commit(tokens)

    def _start_decoding(self) -> None:
        """What has one token left to compute joins the batch, also a text of which all the rest was cached; its forks, too."""
        for answer in [*self.running]:
            if answer.sequence is None or answer.num_missing or answer.sequence in self.decoding.sequences:
                continue
            while answer.forks:
                fork = answer.forks.pop()
                try:
                    fork.sequence = answer.sequence.fork(reserve=len(fork.text) + self.width)
                except RetryLater:  # no room: it waits, and finds the prompt in the cache later
                    self.waiting.append(fork)
                else:
                    self.counts["forked"] += 1
                    self.running.append(fork)
                    self.decoding.add(fork.sequence)
            self.decoding.add(answer.sequence)
        self.running.sort(key=lambda one: one.number)

    # -- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One step of all rows: the last token of each and some drafts; as many are committed as turn out to be right."""
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
            kept.append(
                tokens[row, : len(new)]
            )  # the rows of these are right; those of refused drafts are written over
            counts.append(len(new))
        self.decoding.commit(np.concatenate(kept), counts)
        for answer in answers:
            if answer.is_done:
                self._stop(answer)

    def _verify(self, answer: Answer, tokens: np.ndarray, logits) -> list[int]:
        """What follows: drafts as far as they are what would have been chosen, then one token more."""
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
        """Call ``extend``; while it lacks blocks, preempt the youngest. False if that was ``answer`` itself."""
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
        """Its blocks stay in the cache until somebody needs them. It waits, with the text so far as its prompt."""
        self._stop(answer)
        self.waiting.append(answer)
        self.counts["preempted"] += 1

    def _stop(self, answer: Answer) -> None:
        sequence, answer.sequence = answer.sequence, None
        assert sequence is not None
        if sequence in self.decoding.sequences:
            self.decoding.remove(sequence)
        sequence.close()
        self.running.remove(answer)


def propose(text: list[int], n: int) -> list[int]:
    """``n`` tokens that followed the last two tokens where these stood before; prompt lookup, the simplest draft model."""
    for at in range(len(text) - 3, -1, -1):
        if text[at : at + 2] == text[-2:]:
            found = text[at + 2 : at + 2 + n]
            return found + [0] * (n - len(found))
    return [0] * n


def traffic(random: np.random.Generator) -> list[tuple[list[int], int, int, int | None]]:
    """(prompt, new tokens, answers, seed): prompts share a beginning, some are long, some want several answers."""
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
        if number % 3 == 2:  # they arrive while others run
            engine.step()
    engine.run()
    engine.cache.check()
    exact = sum(is_exact(model, np.array(one.text, np.int32), one.prompt_length, one.seed) for one in answers)
    stats = engine.cache.stats()
    told = {
        **engine.counts, "exact": exact, "evicted blocks": stats.evicted_blocks, "cached prompt tokens": stats.cached_tokens,
        "written tokens": sum(len(one.text) - one.prompt_length for one in answers),
    }  # fmt: skip
    for name, value in told.items():
        print(f"{name:>20}  {value}")
    return told


if __name__ == "__main__":
    main()
