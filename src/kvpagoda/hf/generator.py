"""Continuous batching over a transformers model whose whole cache lives in a ``KVCache``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvpagoda.blocks.ids import positive_numbers
from kvpagoda.cache.request import Tokens
from kvpagoda.cache.sequence import Sequence
from kvpagoda.cache.stats import CacheStats
from kvpagoda.errors import BadInput, OutOfBlocks
from kvpagoda.hf.lookup import propose
from kvpagoda.hf.model_cache import next_piece, runner_of
from kvpagoda.hf.rope_switch import media_past
from kvpagoda.hf.runner import Tensor
from kvpagoda.hf.sampling import GREEDY, Sampling
from kvpagoda.prefix.tokens import as_tokens
from kvpagoda.scheduling import Costs, Job, PreemptionMode, PreemptionPolicy, RunQueue, cheapest
from kvpagoda.schema.layout_choice import LayoutNames


class Answer(Job):
    """One of a request's answers while it is computed."""

    def __init__(self, request: Request, number: int, namespace: str | bytes | None) -> None:
        super().__init__(request.prompt, len(request.prompt) + request.max_new_tokens, namespace)
        self.request, self.done = request, False
        self.passed = 0
        """The switch of position encodings that its text is past: see ``rope_switch``."""
        self.stream = request.sampling.stream(number)

    def pass_switch(self, passed: int) -> None:
        """Its text is past switch ``passed`` now: it shares rows with others of that side alone."""
        self.passed, self.media = passed, media_past(passed, int(self.text[0]))


class Request:
    """A prompt on its way to being ``n`` answers. Made by ``Generator.submit``."""

    def __init__(
        self, prompt: Tokens, max_new_tokens: int, n: int, sampling: Sampling, namespace: str | bytes | None
    ) -> None:
        self.prompt, self.max_new_tokens, self.sampling = prompt, max_new_tokens, sampling
        self.answers = tuple(Answer(self, number, namespace) for number in range(n))
        self.unforked = list(self.answers[1:])
        """Answers that begin when the first one has computed the prompt."""
        self.aborted = False

    @property
    def done(self) -> bool:
        """Whether no more tokens will come."""
        return self.aborted or all(answer.done for answer in self.answers)

    @property
    def outputs(self) -> list[list[int]]:
        """New tokens of each answer so far; the last one is the end-of-text token if the model stopped by itself."""
        return [answer.text[len(self.prompt) :].tolist() for answer in self.answers]

    @property
    def output(self) -> list[int]:
        """The first answer's new tokens so far."""
        return self.outputs[0]


class Piece(NamedTuple):
    """What one answer computes in a step."""

    answer: Answer
    sequence: Sequence
    tokens: Tokens
    """Known tokens of the text, then the proposed ones."""
    proposed: list[int]


class Generator:
    """Generation for many requests at once, with the model's whole cache in kvpagoda.

    ``model``: a transformers causal language model. It is put in eval mode and otherwise left as it was between steps.
    ``budget``: memory of the cache, bytes or text; not used where ``cache_arguments`` have ``num_blocks``.
    ``prefill_chunk``: the most prompt tokens of one request in one step.
    ``lookup``: propose up to so many next tokens from the text so far (prompt lookup) and verify them in one pass. The tokens
    that come out are the same. Refused tokens are never committed. Models with states that can take back fewer tokens get
    fewer proposed, and none where a state takes in every token for good. ``num_proposed`` and ``num_accepted`` count tokens.
    ``preemption``: admit requests with room for their prompt only; when memory runs out, this policy chooses which one is
    preempted. It starts again later, and its tokens stay the same. None: a request starts only when all of it has room.
    ``preemption_mode``: maps expected costs to how a request is preempted: computed again, or suspended in part or whole. By
    default what costs least, from the time that steps and copies took. ``num_preempted`` counts requests that were preempted,
    ``num_swapped`` those of them that were suspended. A text that grows past a switch of the model's position encodings
    (``rope_switch``) is computed again and counts as preempted too.
    ``kv_format`` and ``layout``: see ``Schema.from_hf_config``.
    ``cache_arguments``: all other arguments of ``KVCache``. Where ``tiers`` can be read by others, ``identity.weights`` is by
    default a digest of the whole model, which takes seconds for a large one.

    Raises BadInput, SchemaError for a model whose layers are not known, NeverFits for a budget too small for one request.

    >>> from kvpagoda.hf.embedded import embedded_model
    >>> generator = Generator(embedded_model(), "16MiB", max_requests=2)
    >>> prompt = list(b"a prompt that is the same " * 10)
    >>> [len(output) for output in generator.generate([prompt, prompt, [1, 2, 3]], max_new_tokens=2)]
    [2, 2, 2]
    >>> generator.generate([prompt], max_new_tokens=1)[0] == generator.generate([prompt], max_new_tokens=2)[0][:1]
    True
    >>> generator.stats().cached_tokens >= 128  # found, not computed
    True
    """

    def __init__(
        self,
        model: Any,
        budget: int | str = "512MiB",
        *,
        prefill_chunk: int = 512,
        lookup: int = 0,
        preemption: PreemptionPolicy | None = None,
        preemption_mode: Callable[[Costs], PreemptionMode] = cheapest,
        kv_format: str = "raw",
        layout: LayoutNames | None = None,
        **cache_arguments: Any,
    ) -> None:
        if prefill_chunk < 1 or lookup < 0:
            raise BadInput(f"need prefill_chunk >= 1 and lookup >= 0 tokens, got {prefill_chunk} and {lookup}")
        sizes = cache_arguments if "num_blocks" in cache_arguments else {"budget": budget, **cache_arguments}
        self._runner = runner_of(model, prefill_chunk, lookup, kv_format, sizes, layout)
        self.cache = self._runner.cache
        self._chunk, self._lookup = prefill_chunk, min((lookup, *(n for _, _, n in self.cache.plan.rewinds)))
        self._ends = _end_tokens(model)
        self._queue: RunQueue[Answer] = RunQueue(self.cache, preemption, preemption_mode)
        self.num_proposed = self.num_accepted = 0

    @property
    def queue(self) -> RunQueue[Answer]:
        """Its jobs; ``kvpagoda.metrics.CacheCollector(generator.queue)`` reads who waits and what the cache counts."""
        return self._queue

    @property
    def num_preempted(self) -> int:
        return self._queue.num_preempted

    @property
    def num_swapped(self) -> int:
        return self._queue.num_swapped

    def submit(
        self,
        prompt: Any,
        max_new_tokens: int = 64,
        *,
        n: int = 1,
        sampling: Sampling = GREEDY,
        namespace: str | bytes | None = None,
    ) -> Request:
        """Queue a prompt (ints, at least one) for ``n`` answers; it starts when there is room.

        The prompt is computed once; then the other answers are forked from the first, or, where there is no room, start
        later from what is cached. ``namespace``: see ``KVCache.open``. Raises BadInput and NeverFits at once.
        """
        ids = as_tokens(prompt, self.cache.schema.vocab_size)
        if len(ids) == 0:
            raise BadInput("a request needs at least one token, got none")
        max_new_tokens, n = positive_numbers(max_new_tokens=max_new_tokens, n=n)
        self.cache.plan.blocks_wanted(len(ids) + max_new_tokens, min(self._chunk, len(ids)), self.cache.max_context)
        request = Request(ids, max_new_tokens, n, sampling, namespace)
        for answer in request.answers:
            answer.pass_switch(self._runner.switch.passed(len(ids)))
        self._queue.enter(*request.answers)
        return request

    def step(self) -> list[Request]:
        """Admit what fits, compute one step of everything that runs, and return the requests that it finished.

        On an error while computing everything that runs is preempted, so that the cache holds committed tokens only; a later
        step goes on from there.
        """
        self._queue.admit()
        pieces = [piece for answer in list(self._queue.running) if (piece := self._next_piece(answer)) is not None]
        if not pieces:
            return []
        try:
            kept, started = [1 + len(piece.proposed) for piece in pieces], perf_counter()
            lengths = [len(piece.answer.text) for piece in pieces]
            logits = self._runner.step([(piece.sequence, piece.tokens) for piece in pieces], kept, lengths)
            best, end = logits.argmax(dim=-1).tolist(), 0
            count = sum(len(piece.tokens) for piece in pieces)
            if count > len(pieces):  # as when a text is computed again: more than one token of each
                self._queue.took(perf_counter() - started, count)
            for piece, count in zip(pieces, kept):
                begin, end = end, end + count
                self._take(piece, logits[begin:end], best[begin:end])
        except BaseException:
            for answer in self._queue.running[::-1]:
                self._queue.preempt(answer, PreemptionMode.RECOMPUTE)  # its windows and states may be half written
            raise
        return [request for request in dict.fromkeys(piece.answer.request for piece in pieces) if request.done]

    def generate(
        self,
        prompts: Iterable[Any],
        max_new_tokens: int = 64,
        on_step: Callable[[CacheStats], None] | None = None,
        *,
        n: int = 1,
        sampling: Sampling = GREEDY,
        namespace: str | bytes | None = None,
    ) -> list[list[int]]:
        """New tokens for every prompt, in the order given; more prompts than rows wait their turn.

        The ``n`` answers of a prompt lie together: answer ``i`` of prompt ``j`` is item ``j * n + i``.
        ``on_step`` is called with the cache's counters after each step. On an error these requests are aborted.
        """
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, max_new_tokens, n=n, sampling=sampling, namespace=namespace))
            while not all(request.done for request in requests):
                self.step()
                if on_step is not None:
                    on_step(self.stats())
        except BaseException:
            for request in requests:
                self.abort(request)
            raise
        return [output for request in requests for output in request.outputs]

    def abort(self, request: Request | None = None) -> None:
        """Drop ``request`` (None: all of them), whether it waits, runs or was preempted; what it holds is given back, and
        its tokens so far stay in ``outputs``. Does nothing for a request that is done."""
        requests = {answer.request for answer in (*self._queue.waiting, *self._queue.running)}
        for one in requests if request is None else requests & {request}:
            one.aborted = True
            for answer in one.answers:
                self._queue.remove(answer)

    def stats(self) -> CacheStats:
        """The cache's counters."""
        return self.cache.stats()

    def _next_piece(self, answer: Answer) -> Piece | None:
        """What ``answer`` computes next, with room made for it; None if it was preempted."""
        sequence, text = answer.sequence, answer.text
        if sequence is None:
            return None
        begin, switch = sequence.length, self._runner.switch
        if (passed := switch.passed(len(text))) != answer.passed:
            answer.pass_switch(passed)
            self._queue.preempt(answer, PreemptionMode.RECOMPUTE)  # every row so far was rotated for a shorter text
            return None
        if self._lookup and begin == len(text) - 1 and not answer.request.unforked:
            room = switch.room(len(text))
            most = min(self._lookup, answer.total - len(text) - 1)
            proposed = propose(text, most if room is None else min(most, room))
            try:
                sequence.extend(1 + len(proposed))
                return Piece(answer, sequence, np.concatenate((text[begin:], proposed)), proposed.tolist())
            except OutOfBlocks:
                pass  # nobody is preempted for tokens that may be refused
        tokens = next_piece(self._runner, sequence, text, self._chunk)
        return Piece(answer, sequence, tokens, []) if self._queue.make_room(answer, len(tokens)) else None

    def _take(self, piece: Piece, logits: Tensor, best: list[int]) -> None:
        """Commit what was computed, as far as it is the text; where that was all of it, let the text grow.

        ``logits`` ``[1 + len(proposed), vocab]``, and the ``best`` token of each row.
        """
        answer, sequence, tokens, proposed = piece
        request, known = answer.request, len(tokens) - len(proposed)
        if sequence.length + known < len(answer.text):
            sequence.commit(tokens)
            return
        new = self._choose(answer, proposed, logits, best)
        self.num_proposed += len(proposed)
        self.num_accepted += len(new) - 1
        sequence.commit(tokens[: known + len(new) - 1])
        while request.unforked:
            fork = request.unforked.pop(0)
            self._grow(fork, self._choose(fork, [], logits, best))
            if not fork.done:
                self._queue.fork(answer, fork)
        self._grow(answer, new)

    def _choose(self, answer: Answer, proposed: list[int], logits: Tensor, best: list[int]) -> list[int]:
        """The next tokens of ``answer``: proposed ones as far as they are what it would have chosen, then one more."""
        sampling, new = answer.request.sampling, []
        for row, token in enumerate(best):
            if sampling.temperature:
                token = sampling.draw(logits[row].cpu().numpy(), answer.stream)
            new.append(token)
            if token in self._ends or proposed[row : row + 1] != [token]:
                break
        return new

    def _grow(self, answer: Answer, new: list[int]) -> None:
        answer.extend(new)
        answer.done = new[-1] in self._ends or len(answer.text) == answer.total
        if answer.done:
            self._queue.remove(answer)


def _end_tokens(model: Any) -> frozenset[int]:
    """The model's end-of-text tokens, as its own ``generate`` uses them. Configs of multimodal models may have none."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = getattr(model.config, "eos_token_id", None) if ends is None else ends
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
