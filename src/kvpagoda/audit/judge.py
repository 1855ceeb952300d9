"""An audit: runs cases on a server, compares each judged answer with cold twins, and decides what is a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, cycle, islice
from time import monotonic

from kvpagoda.audit.discover import find_cold, find_interface, find_sizes, num_preempted, page
from kvpagoda.audit.probes import Probe, ProbeTexts, probes
from kvpagoda.audit.prompts import Ask, Case, Draw, PromptPart
from kvpagoda.audit.results import Results, Trial
from kvpagoda.audit.runner import CaseRunner
from kvpagoda.audit.server import OutOfRequests, Server, ServerAnswer, Unanswered
from kvpagoda.audit.verdict import distance, rounding_step

_RESERVE = 8
"""A part of the requests, 1 of so many, that is left for the smallest cases of findings, once an answer was wrong."""
_AGAIN = 6  # how often a suspicious case is tried again at once
_PENDING = 60  # answers that wait for twins, where these cost churn
_SPARE = 5
"""They wait while more than so many times their cost is left: some need more churn, and those that differ a second twin."""
_HALF = 6  # tokens of an answer of which two halves are compared


class Audit:
    """An audit of a server.

    Args:
        server: the server.
        seed: of the random prompts. Another one each time, so that nothing of an earlier audit is cached.
        model: the name of the model; None: the first that the server lists.
        cold: how a cold twin is made: "salt", "off" or "churn"; None: the first that works.
        after: what the user does in the middle, e.g. "restart"; None: nothing.
        wait: is called with ``after``, and returns when it is done.
        say: is called with a line about what begins, before the cache is filled.
    """

    def __init__(
        self,
        server: Server,
        seed: int,
        *,
        model: str | None = None,
        cold: str | None = None,
        after: str | None = None,
        wait: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.server, self.seed, self.results = server, seed, Results()
        self.runner = CaseRunner(server, Draw(seed), self.results, wait and partial(wait, after or ""))
        self._model, self._way, self._after, self._say = model, cold, after, say
        self._pending, self._num_refused, self._num_noise = list[Trial](), 0, 0

    def run(self) -> Results:
        """Audit, and return what was seen, also after Ctrl-C and when the server goes away.

        Raises:
            BadInput: there is no such server, model, or interface.
        """
        begin, results = monotonic(), self.results
        try:
            self.prepare()
            self.measure_noise(6)
            self._rounds()
        except KeyboardInterrupt:
            results.is_partial = True
            self.server.stop()
        except Unanswered as error:
            results.is_partial = True
            results.lost = f"the server does not answer any more: {error}"
        except OutOfRequests:
            pass
        with suppress(OutOfRequests, Unanswered, KeyboardInterrupt):
            self.judge(flush=True)
        results.seconds = monotonic() - begin
        return results

    def prepare(self) -> None:
        """Find what the server has. Raises BadInput, Unanswered, OutOfRequests."""
        draw = find_interface(self.server, self._model)
        if self._say is not None and self.server.num_left:
            name = self.server.profile.model or "the model"
            self._say(f"Auditing {name}: up to {self.server.num_left:,} more requests, which fill the server's cache.")
        self.runner.draw = Draw(self.seed, draw.as_ids)
        self.results.noise.by_tokens = not self.server.profile.top
        if not self.server.profile.top:
            self.results.notes.append("the server gives no log-probabilities, so that only tokens are compared")
        self.results.notes += find_sizes(self.server, self.runner.draw, self.runner.ask)
        self.results.notes += find_cold(self.server, self.runner.draw, self.runner.ask, self._way)

    # -- noise -------------------------------------------------------------------------------------------------------

    def measure_noise(self, pairs: int) -> None:
        """Measure what cold runs differ by: of the same prompt, of the prompt with the beginning of its answer, and, where the
        answer cannot be appended, of the prompt beside another one. Answers that were wrong and are within it are right.

        Args:
            pairs: how many prompts.

        Raises:
            OutOfRequests: no more may be sent.
            Unanswered: the server does not answer.
        """
        texts, noise = ProbeTexts(self.runner.draw, self.server.profile), self.results.noise
        firsts = list[tuple[Ask, ServerAnswer]]()
        for n in islice(cycle(texts.noise_lengths()), self._num_noise, self._num_noise + pairs):
            ask = texts.ask(texts.new(n), most=2 * _HALF)
            answer = self.runner.ask(ask)
            if self.runner.is_cold(ask, answer):
                firsts.append((ask, answer))
                noise.steps.append(rounding_step(answer))
        self._num_noise += pairs
        more = list[tuple[Ask, ServerAnswer, ServerAnswer]]()
        fronts = self.runner.cold([(replace(ask, most=_HALF), []) for ask, _ in firsts])
        for (ask, answer), front in zip(firsts, fronts):
            if front is not None:
                noise.same.append(distance(replace(answer, text=answer.text[: len(front.text)]), front)[0])
                if self._can_go_on(front) and answer.text.startswith(front.text):
                    more.append((replace(ask, parts=(*ask.parts, PromptPart(answer=0)), most=_HALF), front, answer))
        for (_, front, answer), twin in zip(more, self.runner.cold([(ask, [front]) for ask, front, _ in more])):
            if twin is not None and twin.num_prompt == front.num_prompt + _HALF:
                rest = replace(answer, tokens=answer.tokens[_HALF:], tops=answer.tops[_HALF:])
                noise.pieces.append(distance(replace(rest, text=answer.text[len(front.text) :]), twin)[0])
        if not noise.pieces:
            self._noise_beside(texts, max(1, pairs // 2))
        for trial in self.results.trials:
            if trial.is_wrong and trial.distance <= self.results.noise_of(trial.ask.kind).limit:
                trial.is_wrong, trial.whose = False, ""

    def _can_go_on(self, front: ServerAnswer) -> bool:
        """Return whether ``front`` can be a part of a prompt, token by token."""
        return not self.server.profile.is_chat and bool(front.ids if self.server.profile.as_ids else front.text)

    def _noise_beside(self, texts: ProbeTexts, pairs: int) -> None:
        both = list[tuple[Ask, ServerAnswer]]()
        for n in islice(cycle(texts.lengths()), pairs):
            asks = [texts.ask(texts.new(n), most=12), texts.ask(texts.new(n + 7), most=12)]
            both += [(ask, answer) for ask, answer in zip(asks, self.server.together(asks)) if answer is not None]
        both = [(ask, answer) for ask, answer in both if self.runner.is_cold(ask, answer)]
        for (_, answer), twin in zip(both, self.runner.cold([(ask, []) for ask, _ in both])):
            if twin is not None:
                self.results.noise.beside.append(distance(answer, twin)[0])

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def judge(self, flush: bool = False) -> None:
        """Give the trials that wait their verdicts. Where twins cost churn, wait until there are enough, unless ``flush``.

        Raises:
            OutOfRequests: too few requests are left.
            Unanswered: the server does not answer.
        """
        may_wait = self.server.profile.cold == "churn" and not flush and len(self._pending) < _PENDING
        if may_wait and self.server.num_left > _SPARE * self._cost_of_pending():
            return
        trials, self._pending = self._pending, []
        missing = list({trial.key: trial for trial in trials if trial.key not in self.runner.twins}.values())
        for trial, twin in zip(missing, self.runner.cold([(trial.ask, trial.answers) for trial in missing])):
            if twin is not None:
                self.runner.twins[trial.key] = twin
        noise = self.results.noise
        suspects = list[Trial]()
        for trial in trials:
            if (first := self.runner.twins.get(trial.key)) is None:
                continue
            trial.twins = [first]
            trial.distance, trial.at = distance(trial.answer, first)
            trial.is_wrong = False
            if trial.distance > self.results.noise_of(trial.ask.kind).limit:
                suspects.append(trial)
        again = list({trial.key: trial for trial in suspects}.values())
        seconds = dict(
            zip((trial.key for trial in again), self.runner.cold([(trial.ask, trial.answers) for trial in again]))
        )
        for key, second in seconds.items():
            if second is not None and self._is_noise(self.runner.twins[key], second):
                noise.same.append(distance(self.runner.twins[key], second)[0])
        for trial in suspects:
            second = seconds[trial.key]
            if second is None:
                trial.is_wrong = None
                continue
            trial.twins.append(second)
            trial.distance, trial.at = min((trial.distance, trial.at), distance(trial.answer, second))
            trial.is_wrong = trial.distance > self.results.noise_of(trial.ask.kind).limit
            trial.whose = self._whose(trial) if trial.is_wrong else ""
        self.results.trials += trials

    def _is_noise(self, *twins: ServerAnswer) -> bool:
        """Return whether what twins differ by is noise. Those that found what all chats begin with differ if that is wrong."""
        return self.server.profile.is_chat or not any(twin.cached for twin in twins)

    def _whose(self, trial: Trial) -> str:
        """Return the key of another prompt that has this wrong answer; empty if none is known."""
        limit = self.results.noise.limit
        near = (
            key
            for key, twin in self.runner.twins.items()
            if key != trial.key and twin.tokens[:2] == trial.answer.tokens[:2] and twin.tops
            if distance(trial.answer, twin)[0] <= min(limit, trial.distance / 10)
        )
        return next(near, "")

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        """Make each probe in turn, with new prompts of other lengths each time, until the requests are spent."""
        profile, results = self.server.profile, self.results
        texts = ProbeTexts(self.runner.draw, profile)
        found = [*probes(profile, self._after, profile.takes_salts)]
        results.skipped = {name: why for name, probe, why in found if probe is None}
        made = {name: probe for name, probe, _ in found if probe is not None}
        lengths = cycle(texts.lengths())
        waiting = made.pop("wait", None)
        for number in count():
            for name, probe in [*made.items()]:
                keep = self._kept(waiting is not None)
                if self.server.num_left <= keep + self._cost_of_pending():
                    break
                if number and name in ("salts", "roles", "pictures", "two pictures", "tools") and number % 2:
                    continue
                before, preempted = len(results.trials), self._preempted() if name == "load" else 0
                self._try(probe, texts, next(lengths), keep)
                if name == "load" and self._preempted() == preempted:
                    texts.beyond += 8
                    if self._preempted() == 0 and number == 1:
                        results.skipped[name] = "four long prompts at once did not make the server preempt any"
                        del made[name]
                        continue
                if any(results.is_sure(trial.ask.kind) for trial in results.trials[before:] if trial.is_wrong):
                    del made[name]  # nothing more is to be learned from it
            if self.server.num_left <= self._kept(waiting is not None) + self._cost_of_pending() or not made:
                break
            self.measure_noise(1)
        self.judge(flush=True)
        if waiting is not None:
            self._try(waiting, texts, next(lengths), 0)
            self.judge(flush=True)

    def _kept(self, is_waiting: bool) -> int:
        """Return how many requests are kept for what comes after the rounds."""
        wrong = self.results.miscounts or any(trial.is_wrong for trial in self.results.trials)
        return (self.server.max_requests // _RESERVE if wrong or is_waiting else 0) + 40 * is_waiting

    def _preempted(self) -> float:
        return num_preempted(page(self.server, "/metrics")) or 0

    def _cost_of_pending(self) -> int:
        """Return how many requests the twins of the trials that wait will take, about."""
        missing = {trial.key: trial for trial in self._pending if trial.key not in self.runner.twins}.values()
        if not missing:
            return 0
        numbers = Counter((trial.ask.chat, trial.ask.parts[0].symbols[:1]) for trial in missing)
        batches = sum(max((n for (chat, _), n in numbers.items() if chat is kind), default=0) for kind in (False, True))
        return len(missing) + batches * self.server.profile.churn

    def _try(self, probe: Probe, texts: ProbeTexts, n: int, keep: int) -> None:
        """Make a probe; if something was wrong, but it is not sure, make the same case again with other prompts."""
        case, counted = probe(texts, n), len(self.results.miscounts)
        for number in range(_AGAIN):
            if number and self.server.num_left <= keep:
                return
            before = len(self.results.trials)
            if not self._run(case):
                return
            wrong = {trial.ask.kind for trial in self.results.trials[before:] if trial.is_wrong}
            counters = {one.ask.parts for one in self.results.miscounts}
            is_odd = len(counters) == 1 and len(self.results.miscounts) > counted
            if not (wrong or is_odd) or any(self.results.is_sure(kind) for kind in wrong) or case.name == "wait":
                return
            case = case.fresh(self.runner.draw)

    def _run(self, case: Case) -> bool:
        """Run ``case`` and judge it. Return False if a request of it was refused. Raises OutOfRequests, Unanswered."""
        try:
            self._pending += self.runner.run(case)
            self.judge()
        except Unanswered as error:
            self._num_refused += 1
            if self.server.get("/v1/models") is None and self._num_refused > 3:
                raise
            self.results.skipped[case.name] = str(error)
            return False
        self._num_refused = 0
        return True

    # -- smallest cases ----------------------------------------------------------------------------------------------

    def smallest(self, trial: Trial) -> Case:
        """Return the smallest case that still shows what ``trial`` showed; its last request is the wrong one."""
        case = trial.case.until(trial.number)
        for number in reversed(range(len(case.steps) - 1)):
            shorter = case.without(number)
            if shorter is None or case.steps[number].do == "wait":
                continue
            with suppress(OutOfRequests, Unanswered):
                if self.shows(shorter):
                    case = shorter
        return case

    def shows(self, case: Case) -> bool:
        """Return whether the last request of ``case`` is answered wrongly; see ``run_again``."""
        trial = self.run_again(case)
        return trial is not None and bool(trial.is_wrong)

    def run_again(self, case: Case) -> Trial | None:
        """Run ``case`` with other prompts, and return its last request; None without an answer or a cold twin.

        Args:
            case: the case; what is seen does not count for the results.

        Raises:
            OutOfRequests: too few requests are left.
            Unanswered: the server does not answer.
        """
        if self.server.num_left < case.num_requests + 3:
            raise OutOfRequests("too few requests are left")
        before = len(self.results.trials)
        self._pending += self.runner.run(case.fresh(self.runner.draw))[-1:]
        self.judge(flush=True)
        judged = self.results.trials[before:]
        del self.results.trials[before:]
        return judged[-1] if judged else None

    def is_still_wrong(self, trial: Trial) -> bool:
        """Ask the wrong request of ``trial`` once more, alone, and return whether its answer is wrong again.

        Raises:
            OutOfRequests: no more may be sent.
            Unanswered: the server does not answer.
        """
        answer, limit = self.runner.ask(trial.ask, trial.answers), self.results.noise_of(trial.ask.kind).limit
        return min(distance(answer, twin)[0] for twin in trial.twins) > limit
