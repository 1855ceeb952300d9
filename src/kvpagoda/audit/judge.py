"""An audit: runs cases on a server, compares each judged answer with cold twins, and decides what is a finding."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from time import monotonic

from kvpagoda.audit.discover import find_cold, find_interface, find_sizes, num_preempted, page, prompt
from kvpagoda.audit.probes import CROWDS, KINDS, Probe, ProbeTexts, probes
from kvpagoda.audit.prompts import Ask, Case, Draw, PromptPart, PromptStep
from kvpagoda.audit.server import OutOfRequests, Server, ServerAnswer, Unanswered
from kvpagoda.audit.verdict import Noise, distance, evidence, is_sure, rounding_step

_RESERVE = 8
"""A part of the requests, 1 of so many, that is left for the smallest cases of findings, once an answer was wrong."""
_AGAIN = 6  # how often a suspicious case is tried again at once
_PENDING = 60  # answers that wait for twins, where these cost churn
_SPARE = 5
"""They wait while more than so many times their cost is left: some need more churn, and those that differ a second twin."""
_LEAST_JUDGED, _LEAST_PAIRS = 12, 3
_HALF = 6  # tokens of an answer of which two halves are compared
_LOUD = 1.0
"""Noise in nats over which nothing can be judged."""


@dataclass(eq=False)
class Trial:
    """A judged request.

    Args:
        case: the case it belongs to.
        number: which of its requests it is.
        ask: the request.
        answers: those of the steps before it.
        answer: its own.
        key: names its prompt.
        twins: the answers of cold runs.
        distance: how far it is from the nearer of the two twins, or from the one.
        at: at which token.
        is_wrong: whether both twins say that it is wrong; None: there is no cold twin.
        whose: of which other prompt the answer is, if it is known.
    """

    case: Case
    number: int
    ask: Ask
    answers: list[ServerAnswer | None]
    answer: ServerAnswer
    key: str
    twins: list[ServerAnswer] = field(init=False, default_factory=list)
    distance: float = field(init=False, default=0.0)
    at: int = field(init=False, default=0)
    is_wrong: bool | None = field(init=False, default=None)
    whose: str = field(init=False, default="")


@dataclass(eq=False)
class Miscount:
    """A request for which more tokens were said to be cached than can be. ``who``: a key of ``findings.WHO``."""

    who: str
    case: Case
    number: int
    ask: Ask
    answers: list[ServerAnswer | None]
    answer: ServerAnswer

    @property
    def most(self) -> int:
        """The most tokens that can be cached."""
        return self.answer.num_prompt if self.who == "longer" else self.answer.common or 0


@dataclass
class Results:
    """What an audit has seen.

    Attributes:
        noise: of cold runs.
        trials: the judged requests.
        miscounts: those whose counter cannot be right.
        notes: what could not be known or tried, and why.
        skipped: probe -> why it was not made.
        num_counted: requests whose counter was looked at.
        is_partial: whether it was interrupted, or the server went away.
        lost: why the server does not answer any more; empty: it does.
    """

    noise: Noise = field(init=False, default_factory=Noise)
    trials: list[Trial] = field(init=False, default_factory=list)
    miscounts: list[Miscount] = field(init=False, default_factory=list)
    notes: list[str] = field(init=False, default_factory=list)
    skipped: dict[str, str] = field(init=False, default_factory=dict)
    num_counted: int = field(init=False, default=0)
    seconds: float = field(init=False, default=0.0)
    is_partial: bool = field(init=False, default=False)
    lost: str = field(init=False, default="")

    def of_kind(self, *kinds: str) -> list[Trial]:
        """Return the trials of ``kinds`` that have a verdict."""
        return [trial for trial in self.trials if trial.is_wrong is not None and trial.ask.kind in kinds]

    def counts(self, *kinds: str) -> tuple[list[float], int]:
        """Return the distances of independent trials of ``kinds`` that were wrong, and how many were right. All that are wrong
        for one prompt count as one, the least, unless others of the same prompt were right."""
        by_prompt = defaultdict[str, list[Trial]](list)
        for trial in self.of_kind(*kinds):
            by_prompt[trial.key].append(trial)
        wrong, num_right = list[float](), 0
        for each in by_prompt.values():
            bad = [trial.distance for trial in each if trial.is_wrong]
            wrong += bad if len(bad) < len(each) else [min(bad)]
            num_right += len(each) - len(bad)
        return wrong, num_right

    def noise_of(self, *kinds: str) -> Noise:
        """Return the noise of answers to requests of ``kinds``."""
        return self.noise.of_crowds if set(kinds) <= CROWDS else self.noise

    def is_sure(self, *kinds: str) -> bool:
        """Return whether the trials of ``kinds`` mean a fault."""
        return is_sure(*self.counts(*kinds), self.noise_of(*kinds))

    def evidence(self, *kinds: str) -> float:
        """Return how many times likelier the trials of ``kinds`` are with a fault than without."""
        return evidence(*self.counts(*kinds), self.noise_of(*kinds))

    def why_not(self) -> str:
        """Return why nothing can be said; empty if something can."""
        if self.lost:
            return self.lost
        judged = len(self.of_kind(*KINDS))
        hits = sum(bool(trial.answer.cached) for trial in self.of_kind(*KINDS))
        if judged and self.noise.by_tokens and not any(trial.answer.text for trial in self.of_kind(*KINDS)):
            return "its answers have neither text nor log-probabilities"
        if len(self.noise.same) < _LEAST_PAIRS or judged < _LEAST_JUDGED:
            what = f"only {judged} answers could be compared with a cold run, and {len(self.noise.same)} pairs of cold runs"
            return what if self.is_partial else f"{what}; raise --max-requests"
        if self.noise.by_tokens and self.noise.chance > 0.3:
            return "there are no log-probabilities, and cold runs of one prompt give different tokens"
        if not self.noise.by_tokens and self.noise.limit > _LOUD:
            return f"cold runs of one prompt differ by up to {self.noise.most:.2g} nats, as much as wrong rows would"
        if self.num_counted and not hits:
            return "nothing was found cached; is prefix caching on?"
        return ""


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
        self._model, self._way, self._after, self._wait = model, cold, after, wait
        self._say = say
        self._twins, self._num_refused, self._num_noise = dict[str, ServerAnswer](), 0, 0
        self._pending, self._took = list[Trial](), 0.0
        self._case, self._answers = Case("what the server has"), list[ServerAnswer | None]()
        self.draw = Draw(seed)

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
        self.draw = Draw(self.seed, draw.as_ids)
        self.results.noise.by_tokens = not self.server.profile.top
        if not self.server.profile.top:
            self.results.notes.append("the server gives no log-probabilities, so that only tokens are compared")
        self.results.notes += find_sizes(self.server, self.draw, self._ask)
        self.results.notes += find_cold(self.server, self.draw, self._ask, self._way)

    # -- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, ask: Ask, answers: list[ServerAnswer | None] | None = None) -> ServerAnswer:
        """Return the answer to ``ask``, and look at its counter."""
        answers = self._answers if answers is None else answers
        begin = monotonic()
        answer = self.server.ask(ask, answers)
        self._took = monotonic() - begin
        return self._count(ask, answers, len(answers), answer)

    def _count(
        self, ask: Ask, answers: list[ServerAnswer | None], number: int, answer: ServerAnswer
    ) -> ServerAnswer:  # fmt: skip
        """Look at the counter of ``answer``, and return it."""
        if answer.cached is not None:
            self.results.num_counted += 1
            kind = "chat" if ask.chat else "completion"
            is_known = kind in self.server.profile.shared  # with how many tokens all prompts begin
            too_many = is_known and answer.common is not None and answer.cached > answer.common
            is_longer = answer.cached > answer.num_prompt > 0
            if too_many or is_longer:
                who = "longer" if is_longer else self._who(ask)
                self.results.miscounts.append(Miscount(who, self._case, number, ask, [*answers], answer))
        return answer

    def _who(self, ask: Ask) -> str:
        if any(part.image is not None for part in ask.parts):
            return "picture"
        if ask.kind == "other adapter":
            return "adapter"
        return "salt" if ask.salt is not None else "prompt"

    def churn(self, share: float = 1.0) -> None:
        """Ask so many other prompts that they fill ``share`` of the cache. Raises OutOfRequests, Unanswered."""
        profile = self.server.profile
        for _ in range(max(1, round(profile.churn * share))):
            self._ask(
                Ask(prompt(self.draw, profile, profile.churn_length or profile.longest), most=1, chat=profile.is_chat)
            )

    def run_case(self, case: Case) -> list[Trial]:
        """Run ``case`` and return its judged requests, without verdicts. Raises OutOfRequests, Unanswered."""
        answers, trials = list[ServerAnswer | None](), list[Trial]()
        self._case = case
        for step in case.steps:
            if step.do == "churn":
                self.churn(step.churn)
            elif step.do == "wait" and self._wait is not None:
                self._wait(self._after or "")
                self._twins.clear()  # what is right may be another answer now, of other weights
            first, got = len(answers), self._do(step, answers)
            for number, (ask, answer) in enumerate(zip(step.asks, got), first):
                if answer is not None and ask.kind:
                    trials.append(Trial(case, number, ask, answers[:first], answer, self._key(ask, answers)))
                elif answer is not None and step.do == "ask" and self._is_cold(ask, answer) and ask.salt is None:
                    self._twins.setdefault(self._key(ask, answers), answer)
            answers += got
        return trials

    def _do(self, step: PromptStep, answers: list[ServerAnswer | None]) -> list[ServerAnswer | None]:
        if step.do in ("abort", "together"):
            gone, asks = (step.asks[:1], step.asks[1:]) if step.do == "abort" else ((), step.asks)
            after = step.after * self._took if step.after else None
            with ThreadPoolExecutor(1) as pool:
                aborts = [pool.submit(self.server.abort, ask, answers, after) for ask in gone]
                got = self.server.together(asks, answers)
                for abort in aborts:
                    abort.result()
            for number, (ask, answer) in enumerate(zip(asks, got), len(answers) + len(gone)):
                if answer is not None:
                    self._count(ask, answers, number, answer)
            return [None] * len(gone) + got
        return [self._ask(ask, answers) for ask in step.asks]

    def _key(self, ask: Ask, answers: Sequence[ServerAnswer | None]) -> str:
        return json.dumps(self.server.body(ask.key, answers)[1])

    def _is_cold(self, ask: Ask, answer: ServerAnswer) -> bool:
        return answer.cached is None or answer.cached <= self.server.profile.shared_by(ask)

    # -- cold twins --------------------------------------------------------------------------------------------------

    def cold(self, wanted: Sequence[tuple[Ask, list[ServerAnswer | None]]]) -> list[ServerAnswer | None]:
        """Return the answers of cold runs; None for one that used what is cached, and, where each batch of them costs churn,
        for those that came after the last request. Raises OutOfRequests, Unanswered."""
        way = self.server.profile.cold
        if way != "churn":
            return [self._cold(ask, answers, way) for ask, answers in wanted]
        found: dict[int, ServerAnswer | None] = {}
        with suppress(OutOfRequests):  # what has been found until then is of use
            while left := [number for number in range(len(wanted)) if number not in found]:
                self._cold_batch(wanted, left, found)
        return [found.get(number) for number in range(len(wanted))]

    def _cold_batch(
        self,
        wanted: Sequence[tuple[Ask, list[ServerAnswer | None]]],
        left: Sequence[int],
        found: dict[int, ServerAnswer | None],
    ) -> None:
        """Fill the cache and ask those of ``left`` that have nothing in common, so that none makes another one warm."""
        self.churn()
        batch = list[int]()
        for number in left:
            if all(wanted[number][0].parts[0] != wanted[other][0].parts[0] for other in batch) and not any(
                self._overlap(wanted[number][0], wanted[other][0]) for other in batch
            ):
                batch.append(number)
        again = list[int]()
        for number in batch:
            if (answer := self._cold(*wanted[number], "churn")) is None:
                again.append(number)  # more is needed, for a longer prompt perhaps
            else:
                found[number] = answer
        if again:
            self.churn(2.0)
            for number in again:
                found[number] = self._cold(*wanted[number], "churn")

    @staticmethod
    def _overlap(one: Ask, other: Ask) -> bool:
        a, b = one.parts[0].symbols, other.parts[0].symbols
        return one.chat != other.chat or a[:1] == b[:1]

    def _cold(self, ask: Ask, answers: list[ServerAnswer | None], way: str) -> ServerAnswer | None:
        twin = replace(ask.key, salt=self.draw.salt() if way == "salt" else None, cold=way == "off")
        answer = self._ask(twin, answers)
        return answer if self._is_cold(ask, answer) else None

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
        texts, noise, firsts = (
            ProbeTexts(self.draw, self.server.profile),
            self.results.noise,
            list[tuple[Ask, ServerAnswer]](),
        )
        for n in islice(cycle(texts.noise_lengths()), self._num_noise, self._num_noise + pairs):
            ask = texts.ask(texts.new(n), most=2 * _HALF)
            answer = self._ask(ask)
            if self._is_cold(ask, answer):
                firsts.append((ask, answer))
                noise.steps.append(rounding_step(answer))
        self._num_noise += pairs
        more = list[tuple[Ask, ServerAnswer, ServerAnswer]]()
        fronts = self.cold([(replace(ask, most=_HALF), []) for ask, _ in firsts])
        for (ask, answer), front in zip(firsts, fronts):
            if front is not None:
                noise.same.append(distance(replace(answer, text=answer.text[: len(front.text)]), front)[0])
                if self._can_go_on(front) and answer.text.startswith(front.text):
                    more.append((replace(ask, parts=(*ask.parts, PromptPart(answer=0)), most=_HALF), front, answer))
        for (_, front, answer), twin in zip(more, self.cold([(ask, [front]) for ask, front, _ in more])):
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
        both = [(ask, answer) for ask, answer in both if self._is_cold(ask, answer)]
        for (_, answer), twin in zip(both, self.cold([(ask, []) for ask, _ in both])):
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
        missing = list({trial.key: trial for trial in trials if trial.key not in self._twins}.values())
        for trial, twin in zip(missing, self.cold([(trial.ask, trial.answers) for trial in missing])):
            if twin is not None:
                self._twins[trial.key] = twin
        noise = self.results.noise
        suspects = list[Trial]()
        for trial in trials:
            if (first := self._twins.get(trial.key)) is None:
                continue
            trial.twins = [first]
            trial.distance, trial.at = distance(trial.answer, first)
            trial.is_wrong = False
            if trial.distance > self.results.noise_of(trial.ask.kind).limit:
                suspects.append(trial)
        again = list({trial.key: trial for trial in suspects}.values())
        seconds = dict(zip((trial.key for trial in again), self.cold([(trial.ask, trial.answers) for trial in again])))
        for key, second in seconds.items():
            if second is not None and self._is_noise(self._twins[key], second):
                noise.same.append(distance(self._twins[key], second)[0])
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
            for key, twin in self._twins.items()
            if key != trial.key and twin.tokens[:2] == trial.answer.tokens[:2] and twin.tops
            if distance(trial.answer, twin)[0] <= min(limit, trial.distance / 10)
        )
        return next(near, "")

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        """Make each probe in turn, with new prompts of other lengths each time, until the requests are spent."""
        profile, results = self.server.profile, self.results
        texts = ProbeTexts(self.draw, profile)
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
        missing = {trial.key: trial for trial in self._pending if trial.key not in self._twins}.values()
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
            case = case.fresh(self.draw)

    def _run(self, case: Case) -> bool:
        """Run ``case`` and judge it. Return False if a request of it was refused. Raises OutOfRequests, Unanswered."""
        try:
            self._pending += self.run_case(case)
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
        case = until(trial.case, trial.number)
        for number in reversed(range(len(case.steps) - 1)):
            shorter = _without(case, number)
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
        self._pending += self.run_case(case.fresh(self.draw))[-1:]
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
        answer, limit = self._ask(trial.ask, trial.answers), self.results.noise_of(trial.ask.kind).limit
        return min(distance(answer, twin)[0] for twin in trial.twins) > limit


def until(case: Case, number: int) -> Case:
    """Return ``case`` up to its request ``number``."""
    steps, seen = list[PromptStep](), 0
    for step in case.steps:
        steps.append(step)
        seen += len(step.asks)
        if seen > number:
            break
    return replace(case, steps=tuple(steps))


def _without(case: Case, number: int) -> Case | None:
    """Return ``case`` without a step; None if later ones repeat an answer, so that numbers would change."""
    if any(ask.answers for ask in case.asks()):
        return None
    return replace(case, steps=case.steps[:number] + case.steps[number + 1 :])
