"""Sends the requests of cases and of their cold twins, and looks at the counter of each answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from kvpagoda.audit.discover import prompt
from kvpagoda.audit.prompts import Ask, Case, Draw, PromptStep
from kvpagoda.audit.results import Miscount, Results, Trial
from kvpagoda.audit.server import Answers, OutOfRequests, Server, ServerAnswer


class CaseRunner:
    """Runs cases on a server.

    Args:
        server: the server.
        draw: where symbols come from.
        results: what is seen of counters is put there.
        wait: what a step that waits calls; None: such a step does nothing.

    Attributes:
        twins: answers of cold runs, by the key of their prompts.
    """

    def __init__(self, server: Server, draw: Draw, results: Results, wait: Callable[[], None] | None = None) -> None:
        self.server, self.draw, self.wait = server, draw, wait
        self.twins = dict[str, ServerAnswer]()
        self._results, self._took = results, 0.0
        self._case = Case("what the server has")

    def ask(self, ask: Ask, answers: Answers = ()) -> ServerAnswer:
        """Return the answer to ``ask``, and look at its counter. Raises OutOfRequests, Unanswered.

        Args:
            ask: the request.
            answers: those that it may repeat.
        """
        begin = monotonic()
        answer = self.server.ask(ask, answers)
        self._took = monotonic() - begin
        self.count(ask, answers, len(answers), answer)
        return answer

    def count(self, ask: Ask, answers: Answers, number: int, answer: ServerAnswer) -> None:
        """Look at the counter of ``answer``.

        Args:
            ask: the request.
            answers: those that it may repeat.
            number: which request of its case it is.
            answer: its answer.
        """
        if answer.cached is None:
            return
        self._results.num_counted += 1
        kind = "chat" if ask.chat else "completion"
        is_known = kind in self.server.profile.shared  # with how many tokens all prompts begin
        too_many = is_known and answer.common is not None and answer.cached > answer.common
        is_longer = answer.cached > answer.num_prompt > 0
        if too_many or is_longer:
            who = "longer" if is_longer else _who(ask)
            self._results.miscounts.append(Miscount(who, self._case, number, ask, [*answers], answer))

    def churn(self, share: float = 1.0) -> None:
        """Ask so many other prompts that they fill ``share`` of the cache. Raises OutOfRequests, Unanswered."""
        profile = self.server.profile
        for _ in range(max(1, round(profile.churn * share))):
            other = prompt(self.draw, profile, profile.churn_length or profile.longest)
            self.ask(Ask(other, most=1, chat=profile.is_chat))

    def run(self, case: Case) -> list[Trial]:
        """Run ``case`` and return its judged requests, without verdicts. Raises OutOfRequests, Unanswered."""
        answers, trials = list[ServerAnswer | None](), list[Trial]()
        self._case = case
        for step in case.steps:
            if step.do == "churn":
                self.churn(step.churn)
            elif step.do == "wait" and self.wait is not None:
                self.wait()
                self.twins.clear()  # what is right may be another answer now, of other weights
            first, got = len(answers), self._do(step, answers)
            for number, (ask, answer) in enumerate(zip(step.asks, got), first):
                if answer is not None and ask.kind:
                    trials.append(Trial(case, number, ask, answers[:first], answer, self._key(ask, answers)))
                elif answer is not None and step.do == "ask" and self.is_cold(ask, answer) and ask.salt is None:
                    self.twins.setdefault(self._key(ask, answers), answer)
            answers += got
        return trials

    def _do(self, step: PromptStep, answers: Answers) -> list[ServerAnswer | None]:
        if step.do not in ("abort", "together"):
            return [self.ask(ask, answers) for ask in step.asks]
        gone, asks = (step.asks[:1], step.asks[1:]) if step.do == "abort" else ((), step.asks)
        after = step.after * self._took if step.after else None
        with ThreadPoolExecutor(1) as pool:
            aborts = [pool.submit(self.server.abort, ask, answers, after) for ask in gone]
            got = self.server.together(asks, answers)
            for abort in aborts:
                abort.result()
        for number, (ask, answer) in enumerate(zip(asks, got), len(answers) + len(gone)):
            if answer is not None:
                self.count(ask, answers, number, answer)
        return [None] * len(gone) + got

    def _key(self, ask: Ask, answers: Answers) -> str:
        return json.dumps(self.server.body(ask.key, answers)[1])

    def is_cold(self, ask: Ask, answer: ServerAnswer) -> bool:
        """Return whether nothing was cached of ``ask`` but what all prompts begin with, as far as the server says so."""
        return answer.cached is None or answer.cached <= self.server.profile.shared_by(ask)

    # -- cold twins --------------------------------------------------------------------------------------------------

    def cold(self, wanted: Sequence[tuple[Ask, Answers]]) -> list[ServerAnswer | None]:
        """Return the answers of cold runs; None for one that used what is cached, and, where each batch of them costs churn,
        for those that came after the last request.

        Args:
            wanted: requests, each with the answers that it may repeat.

        Raises:
            OutOfRequests: no more may be sent.
            Unanswered: the server does not answer.
        """
        if self.server.profile.cold != "churn":
            return [self._cold(ask, answers) for ask, answers in wanted]
        found: dict[int, ServerAnswer | None] = {}
        with suppress(OutOfRequests):  # what has been found until then is of use
            while left := [number for number in range(len(wanted)) if number not in found]:
                self._cold_batch(wanted, left, found)
        return [found.get(number) for number in range(len(wanted))]

    def _cold_batch(
        self, wanted: Sequence[tuple[Ask, Answers]], left: Sequence[int], found: dict[int, ServerAnswer | None]
    ) -> None:  # fmt: skip
        """Fill the cache and ask those of ``left`` that have nothing in common, so that none makes another one warm."""
        self.churn()
        batch = list[int]()
        for number in left:
            ask = wanted[number][0]
            if not any(_overlap(ask, wanted[other][0]) for other in batch):
                batch.append(number)
        again = list[int]()
        for number in batch:
            if (answer := self._cold(*wanted[number])) is None:
                again.append(number)  # more is needed, for a longer prompt perhaps
            else:
                found[number] = answer
        if again:
            self.churn(2.0)
            for number in again:
                found[number] = self._cold(*wanted[number])

    def twin(self, ask: Ask) -> Ask:
        """Return ``ask`` as it is asked so that nothing cached is used; where that takes churn, the cache is filled before."""
        way = self.server.profile.cold
        return replace(ask.key, salt=self.draw.salt() if way == "salt" else None, cold=way == "off")

    def _cold(self, ask: Ask, answers: Answers) -> ServerAnswer | None:
        answer = self.ask(self.twin(ask), answers)
        return answer if self.is_cold(ask, answer) else None


def _who(ask: Ask) -> str:
    """Return the key of ``findings.WHO`` for a counter of ``ask`` that is too high."""
    if any(part.image is not None for part in ask.parts):
        return "picture"
    if ask.kind == "other adapter":
        return "adapter"
    return "salt" if ask.salt is not None else "prompt"


def _overlap(one: Ask, other: Ask) -> bool:
    """Return whether one prompt may make the other one warm: they begin alike, or one alone is a chat, whose template may
    begin like the other."""
    return one.chat != other.chat or one.parts[0].symbols[:1] == other.parts[0].symbols[:1]
