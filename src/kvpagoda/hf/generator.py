"""Continuous batching over a transformers model whose whole cache lives in a ``KVCache``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvpagoda import Breakpoint, CacheStats, Sequence
from kvpagoda.arrays import TokenIds, Tokens, as_tokens
from kvpagoda.errors import BadInput, OutOfBlocks
from kvpagoda.hf.drafter import Drafter
from kvpagoda.hf.encoder_decoder import EncoderDecoderRunner, EncoderInput, check_length, encoder_input_of
from kvpagoda.hf.model_cache import commit_step, next_piece, runner_of
from kvpagoda.hf.rope_switch import media_past
from kvpagoda.hf.runner import Tensor
from kvpagoda.hf.sampling import GREEDY, Change, Sampling, changes_of
from kvpagoda.hf.weights import WeightsWatch
from kvpagoda.scheduling import Costs, Job, PreemptionMode, PreemptionPolicy, RunQueue, cheapest
from kvpagoda.schema.kv_format import KVFormatNames
from kvpagoda.schema.layout_choice import LayoutNames
from kvpagoda.units import positive_numbers

DRAFTED = 4
"""The number of tokens that a draft model proposes for a step, unless ``lookup`` says another."""

NOT_YET = -1
"""In place of a token that the draft has still to propose."""

LOOKUP_LENGTHS = (3, 2)
"""The numbers of last tokens of a text that prompt lookup searches for, in this order."""


class Answer(Job):
    """One answer of a request: a job of the run queue."""

    def __init__(
        self, request: Request, number: int, namespace: str | bytes | None, checkpoints: TokenIds | None
    ) -> None:
        super().__init__(request.prompt, len(request.prompt) + request.max_new_tokens, namespace, checkpoints)
        self.request, self.done = request, False
        self.media = {} if request.encoder_input is None else request.encoder_input.media
        self.passed = 0
        """The switch of position encodings that the text has passed, 0 for none: see ``rope_switch``."""
        self.stream = request.sampling.stream(number)

    def pass_switch(self, passed: int) -> None:
        """Note that the text has passed switch ``passed``: from now on it shares rows only with texts that passed it
        too."""
        self.passed, self.media = passed, media_past(passed, int(self.text[0]))


class Request:
    """A prompt and its ``n`` answers. Made by ``Generator.submit``."""

    def __init__(
        self,
        prompt: Tokens,
        max_new_tokens: int,
        n: int,
        sampling: Sampling,
        namespace: str | bytes | None,
        change: Change | None = None,
        checkpoints: TokenIds | None = None,
        encoder_input: EncoderInput | None = None,
    ) -> None:
        self.encoder_input, self.begin = encoder_input, 0 if encoder_input is None else encoder_input.num_tokens
        """``begin``: how many tokens at the beginning of the prompt stand for the input of an encoder."""
        self.prompt, self.max_new_tokens, self.sampling, self.change = prompt, max_new_tokens, sampling, change
        self.answers = tuple(Answer(self, number, namespace, checkpoints) for number in range(n))
        self.unforked = list(self.answers[1:])
        """Answers that start when the first answer has computed the prompt."""
        self.aborted = False

    @property
    def done(self) -> bool:
        """Whether all answers are finished, or the request was aborted."""
        return self.aborted or all(answer.done for answer in self.answers)

    @property
    def outputs(self) -> list[list[int]]:
        """The new tokens of each answer so far; the last token is the end-of-text token if the model stopped by
        itself."""
        return [answer.text[len(self.prompt) :].tolist() for answer in self.answers]

    @property
    def output(self) -> list[int]:
        """The new tokens of the first answer so far."""
        return self.outputs[0]

    @property
    def checkpoints(self) -> tuple[Breakpoint, ...]:
        """What became of each position that ``submit(checkpoints=..)`` asked for; () before the request started."""
        return self.answers[0].checkpoints


class AnswerPiece(NamedTuple):
    """The tokens of one answer that a step computes."""

    answer: Answer
    sequence: Sequence
    tokens: Tokens
    """Known tokens of the text, followed by the proposed tokens."""
    proposed: list[int]


class Generator:
    """Continuous batching over a transformers model, with the model's whole cache in kvpagoda.

    Before a step admits requests, it checks whether the model's weights changed. If they did, it invalidates what is
    cached, so that no request starts from rows of older weights. ``kvpagoda.hf.weights.WeightsWatch`` says which
    changes it notices; after others call ``invalidate``. Requests that run meanwhile keep the rows that they have.

    ``num_preempted`` counts preempted requests, ``num_swapped`` those of them that were suspended. A text that grows
    past a switch of the model's position encodings (``rope_switch``) is computed again and counts as preempted too.

    Args:
        model: a transformers causal language model, or an encoder-decoder such as Whisper, T5 or BART. It is put in eval
            mode and otherwise not changed between steps. Where an answer ends, and what changes its logits
            (``repetition_penalty`` and others), is read from its ``generation_config``, as its own ``generate`` does.
        budget: memory of the cache, bytes or text; ignored if ``cache_arguments`` have ``num_blocks``.
        prefill_chunk: the most prompt tokens of one request in one step.
        lookup: propose up to this many next tokens from the text so far (prompt lookup) and verify them in one pass;
            the output stays the same, and rejected tokens are never committed. With recurrent or convolution states a
            request has ``lookup`` more of them, and a pass runs the modules that update them once for each token; where
            these are not known (RWKV, xLSTM, Inkling, Qwen4-Exp) none are proposed. ``num_proposed`` and
            ``num_accepted`` count tokens.
        draft: a small transformers model with the same vocabulary, which proposes the tokens instead: ``lookup`` at a
            time, or ``DRAFTED`` if that is 0. The output tokens are the same. Its layers are draft layers of the same
            cache (``Schema.drafted_by``), so what is found of a text is found of both.
        preemption: admit requests with room for their prompt only; when memory runs out, this policy chooses the
            request to preempt. It starts again later, and its tokens stay the same. None: a request starts only when
            there is room for all of it.
        preemption_mode: maps expected costs to the way to preempt: compute again, suspend in part, or suspend as a
            whole. The default takes the cheapest, from measured times of steps and copies.
        kv_format: see ``Schema.from_hf_config``.
        kv_scales: see ``Schema.from_hf_config``; ``kvpagoda.hf.checkpoint_scales`` and ``calibrated_scales`` return
            them.
        layout: see ``Schema.from_hf_config``.
        **cache_arguments: all other arguments of ``KVCache``. Of these ``limits.step_checkpoints`` is 16 by default
            where the modules of a model that update states can run in pieces; other models with states, and those with
            a ``draft``, take 0 or None. If other processes can read ``tiers``, ``identity.weights`` is by default a
            digest of the whole model, which takes seconds for a large one.

    Raises:
        BadInput: ``prefill_chunk`` is below 1 or ``lookup`` below 0, ``model`` is no transformers model, or an argument
            that ``KVCache`` refuses.
        SchemaError: a model with unknown layers, or a ``draft`` that does not suit it.
        NeverFits: a budget too small for one request.

    Examples:
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
        draft: Any = None,
        preemption: PreemptionPolicy | None = None,
        preemption_mode: Callable[[Costs], PreemptionMode] = cheapest,
        kv_format: KVFormatNames = "raw",
        kv_scales: Mapping[int, tuple[float, float]] | None = None,
        layout: LayoutNames | None = None,
        **cache_arguments: Any,
    ) -> None:
        if prefill_chunk < 1 or lookup < 0:
            text = f"need prefill_chunk >= 1 and lookup >= 0 tokens, got {prefill_chunk} and {lookup}"
            raise BadInput(text, needed=(prefill_chunk, lookup))
        if draft is not None:
            lookup = lookup or DRAFTED
        sizes = cache_arguments if "num_blocks" in cache_arguments else {"budget": budget, **cache_arguments}
        self._runner, self._drafter = runner_of(
            model, prefill_chunk, lookup, kv_format, sizes, layout, kv_scales, draft
        )
        self.cache = self._runner.cache
        self._model, self._chunk = model, prefill_chunk
        self._weights = WeightsWatch(model, self.cache)
        self._lookup = min((lookup, *(n for _, _, n in self.cache.plan.rewinds)))
        self._ends = _end_tokens(model)
        self._queue: RunQueue[Answer] = RunQueue(self.cache, preemption, preemption_mode)
        self.num_proposed = self.num_accepted = 0

    @property
    def queue(self) -> RunQueue[Answer]:
        """The queue of jobs. ``kvpagoda.metrics.CacheCollector(generator.queue)`` exports its counters and those of the
        cache."""
        return self._queue

    @property
    def num_preempted(self) -> int:
        return self._queue.num_preempted

    @property
    def num_swapped(self) -> int:
        return self._queue.num_swapped

    def submit(
        self,
        prompt: TokenIds,
        max_new_tokens: int = 64,
        *,
        n: int = 1,
        sampling: Sampling = GREEDY,
        namespace: str | bytes | None = None,
        checkpoints: TokenIds | None = None,
        encoder_input: Any = None,
    ) -> Request:
        """Queue a prompt. It starts in a later ``step``, when there is room.

        The prompt is computed once. Then the other answers are forked from the first; without room for a fork, an
        answer starts later from the cached prompt.

        Args:
            prompt: ints, at least one.
            max_new_tokens: the most tokens of an answer.
            n: answers.
            sampling: how tokens are chosen.
            namespace: see ``KVCache.open``.
            checkpoints: positions of the prompt, in tokens, at which other texts should be able to resume, such as the
                end of a system prompt; ``Request.checkpoints`` says what became of each.
            encoder_input: for a model with an encoder, what that reads: token ids without padding, or the features of
                one sound ``[bins, frames]``. ``prompt`` has the first tokens of the decoder then, from its start token
                on. Equal inputs share rows.

        Raises:
            BadInput: a prompt without tokens or with ids outside of the vocabulary, ``n`` or ``max_new_tokens`` below
                1, a checkpoint outside of the prompt, or an ``encoder_input`` that does not suit the model.
            NeverFits: the prompt and its answer do not fit into the empty cache, or pass the positions of the model.
        """
        ids = as_tokens(prompt, self.cache.schema.vocab_size)
        if len(ids) == 0:
            raise BadInput("a request needs at least one token, got none", needed=1, available=0)
        max_new_tokens, n = positive_numbers(max_new_tokens=max_new_tokens, n=n)
        given, total = encoder_input_of(self._model, self.cache, encoder_input), len(ids) + max_new_tokens
        if given is None:
            changes, room = changes_of(self._model, ids, total), min(self._chunk, len(ids))
        else:
            check_length(self.cache, total - 1)
            changes, room = changes_of(self._model, ids, total, given.ids), given.num_tokens
            ids, total = given.text(ids), given.num_tokens + total
        self.cache.plan.blocks_wanted(total - 1, room, self.cache.max_context)
        request = Request(ids, max_new_tokens, n, sampling, namespace, changes, checkpoints, given)
        if given is None:
            for answer in request.answers:
                answer.pass_switch(self._runner.switch.passed(len(ids)))
        self._queue.enter(*request.answers)
        return request

    def step(self) -> list[Request]:
        """Admit requests that fit, compute one step of all running answers, and return the requests that finished in
        it.

        On an error all running answers are preempted, so that the cache holds committed tokens only; a later step
        continues from there.
        """
        if self._queue.waiting:
            self._weights.follow()
        self._queue.admit()
        pieces = [piece for answer in list(self._queue.running) if (piece := self._next_piece(answer)) is not None]
        if not pieces:
            return []
        try:
            if self._drafter is not None:
                pieces = self._drafted(self._drafter, pieces)
            kept, started = [1 + len(piece.proposed) for piece in pieces], perf_counter()
            lengths = [len(piece.answer.text) for piece in pieces]
            work = [(piece.sequence, piece.tokens) for piece in pieces]
            if isinstance(self._runner, EncoderDecoderRunner):
                inputs = [piece.answer.request.encoder_input for piece in pieces]
                logits = self._runner.step(work, kept, encoder_inputs=[one for one in inputs if one is not None])
            else:
                logits = self._runner.step(work, kept, lengths)
            best, end = logits.argmax(dim=-1).tolist(), 0
            count = sum(len(piece.tokens) for piece in pieces)
            if count > len(pieces):  # only such steps measure what computing a text again costs
                self._queue.took(perf_counter() - started, count)
            for piece, count in zip(pieces, kept):
                begin, end = end, end + count
                self._take(piece, logits[begin:end], best[begin:end])
        except BaseException:
            for answer in self._queue.running[::-1]:
                self._queue.preempt(answer, PreemptionMode.RECOMPUTE)  # its windows and states may be partly written
            raise
        return [request for request in dict.fromkeys(piece.answer.request for piece in pieces) if request.done]

    def generate(
        self,
        prompts: Iterable[TokenIds],
        max_new_tokens: int = 64,
        on_step: Callable[[CacheStats], None] | None = None,
        *,
        n: int = 1,
        sampling: Sampling = GREEDY,
        namespace: str | bytes | None = None,
        encoder_inputs: Iterable[Any] | None = None,
    ) -> list[list[int]]:
        """Return the new tokens for every prompt, in the order given. Prompts that do not fit wait.

        The ``n`` answers of a prompt are neighbours: answer ``i`` of prompt ``j`` is item ``j * n + i``. On an error
        these requests are aborted.

        Args:
            prompts: ints, at least one each.
            max_new_tokens: see ``submit``.
            on_step: called with the cache's counters after each step.
            n: see ``submit``.
            sampling: see ``submit``.
            namespace: see ``submit``.
            encoder_inputs: ``encoder_input`` of ``submit`` for each prompt.

        Raises:
            BadInput: as ``submit``; or there are more or fewer ``encoder_inputs`` than prompts.
            NeverFits: as ``submit``.
        """
        if not isinstance(prompts, Iterable):
            raise BadInput(
                f"prompts are several lists of token ids, got {type(prompts).__name__}", needed=type(prompts).__name__
            )
        requests: list[Request] = []
        try:
            prompts = list(prompts)
            inputs = [None] * len(prompts) if encoder_inputs is None else list(encoder_inputs)
            if len(inputs) != len(prompts):
                text = f"{len(prompts)} prompts need as many encoder_inputs, got {len(inputs)}"
                raise BadInput(text, needed=len(prompts), available=len(inputs))
            for prompt, given in zip(prompts, inputs):
                requests.append(
                    self.submit(
                        prompt, max_new_tokens, n=n, sampling=sampling, namespace=namespace, encoder_input=given
                    )
                )
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
        """Abort a request, whether it waits, runs or was preempted.

        Its blocks are freed, and its tokens so far stay in ``outputs``. Does nothing for a request that is done.

        Args:
            request: None: all requests.
        """
        requests = {answer.request for answer in (*self._queue.waiting, *self._queue.running)}
        for aborted in requests if request is None else requests & {request}:
            aborted.aborted = True
            for answer in aborted.answers:
                self._queue.remove(answer)

    def invalidate(self, weights: str | None = None) -> None:
        """Stop reuse of all that is cached, as the model computes other rows than before; requests that run continue.

        Needed only after changes that are not noticed, see the class.

        Args:
            weights: see ``KVCache.invalidate``.
        """
        self._weights.invalidate(weights)

    def stats(self) -> CacheStats:
        """The cache's counters."""
        return self.cache.stats()

    def _next_piece(self, answer: Answer) -> AnswerPiece | None:
        """Return the piece that ``answer`` computes next, with its blocks allocated; None if ``answer`` was
        preempted."""
        sequence, text = answer.sequence, answer.text
        if sequence is None:
            return None
        begin, switch = sequence.length, self._runner.switch
        if (passed := switch.passed(len(text))) != answer.passed:
            answer.pass_switch(passed)
            self._queue.preempt(answer, PreemptionMode.RECOMPUTE)  # all its rows were rotated for a shorter text
            return None
        if self._lookup and begin == len(text) - 1 and not answer.request.unforked:
            room = switch.room(len(text))
            most = min(self._lookup, answer.total - len(text) - 1)
            most = most if room is None else min(most, room)
            own = text[answer.request.begin :]
            proposed = propose(own, most) if self._drafter is None else np.full(max(0, most), NOT_YET, np.int32)
            try:
                sequence.extend(1 + len(proposed))
                return AnswerPiece(answer, sequence, np.concatenate((text[begin:], proposed)), proposed.tolist())
            except OutOfBlocks:
                pass  # do not preempt another request for tokens that may be rejected
        if begin < answer.request.begin:
            tokens = text[begin : answer.request.begin]
        else:
            tokens = next_piece(self._runner, sequence, text, self._chunk)
        return AnswerPiece(answer, sequence, tokens, []) if self._queue.make_room(answer, len(tokens)) else None

    def _drafted(self, drafter: Drafter, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        """Return ``pieces`` with the tokens that the draft proposes, where there is room for any. Afterwards the draft has
        the rows of all their tokens."""
        drafter.begin([(piece.sequence, piece.answer.text) for piece in pieces])
        drafter.compute([(piece.sequence, piece.tokens) for piece in pieces if not piece.proposed])
        asking = [i for i, piece in enumerate(pieces) if piece.proposed]
        texts = [(pieces[i].sequence, pieces[i].answer.text) for i in asking]
        found = drafter.propose(texts, [len(pieces[i].proposed) for i in asking])
        for i, new in zip(asking, found):
            known = pieces[i].tokens[: len(pieces[i].tokens) - len(new)]
            pieces[i] = pieces[i]._replace(tokens=np.concatenate((known, new)), proposed=new.tolist())
        return pieces

    def _take(self, piece: AnswerPiece, logits: Tensor, best: list[int]) -> None:
        """Commit the computed tokens, without rejected proposals. If the whole text is computed, append the new tokens
        to it.

        ``logits`` ``[1 + len(proposed), vocab]``; ``best``: the most likely token of each row.
        """
        answer, sequence, tokens, proposed = piece
        request, known = answer.request, len(tokens) - len(proposed)
        if sequence.length + known < len(answer.text):
            commit_step(sequence, tokens)
            return
        new = self._choose(answer, proposed, logits, best)
        self.num_proposed += len(proposed)
        self.num_accepted += len(new) - 1
        commit_step(sequence, tokens[: known + len(new) - 1])
        while request.unforked:
            fork = request.unforked.pop(0)
            self._grow(fork, self._choose(fork, [], logits, best))
            if not fork.done:
                self._queue.fork(answer, fork)
        self._grow(answer, new)

    def _choose(self, answer: Answer, proposed: list[int], logits: Tensor, best: list[int]) -> list[int]:
        """Return the next tokens of ``answer``: the proposed tokens up to the first one that it would not choose, then
        its own choice."""
        sampling, change, new = answer.request.sampling, answer.request.change, []
        for row, token in enumerate(best):
            scores = logits[row]
            if change is not None:
                scores = change(np.concatenate((answer.text[answer.request.begin :], proposed[:row])), scores)
                token = int(scores.argmax())
            if sampling.temperature:
                token = sampling.draw(scores.cpu().numpy(), answer.stream)
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
    """Return the model's end-of-text tokens, as its own ``generate`` uses them. Configs of multimodal models may have
    none."""
    ends = getattr(getattr(model, "generation_config", model.config), "eos_token_id", None)
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)


def propose(text: Tokens, most: int) -> Tokens:
    """Prompt lookup: propose ``most`` tokens to follow ``text``.

    It searches for the latest earlier occurrence of the last three tokens (else of the last two), and returns the
    tokens that followed it. Returns no tokens if there is no occurrence. Where fewer than ``most`` tokens follow, they
    are repeated. O(len(text)), a few numpy compares.
    """
    for n in LOOKUP_LENGTHS:
        if len(text) <= n or most < 1:
            continue
        found = text[n - 1 : -1] == text[-1]
        for back in range(1, n):
            found &= text[n - 1 - back : -1 - back] == text[-1 - back]
        ends = np.flatnonzero(found)
        if len(ends):
            return np.resize(text[ends[-1] + n :], most)
    return text[:0]
