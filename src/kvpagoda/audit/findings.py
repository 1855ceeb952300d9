"""Findings: what was seen, in plain words, with the smallest case that shows it and lines for a shell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvpagoda.audit.judge import Audit
from kvpagoda.audit.probes import KINDS, PLAIN
from kvpagoda.audit.prompts import Case, Draw
from kvpagoda.audit.prompts import one as steps
from kvpagoda.audit.results import Miscount, Results, Trial
from kvpagoda.audit.server import Answers, OutOfRequests, ServerProfile, Unanswered
from kvpagoda.audit.verdict import distance
from kvpagoda.errors import BadInput, shown

REPLAY_VERSION = 1
_RUNS = 20  # of a case that is replayed, at most
_TRIES = 6  # of the smallest case of a finding, at most
_UNSEEN = 0.05  # the chance that a case is not seen in as many runs as are said to be enough
WHO = {
    "prompt": "a prompt that was never sent",
    "salt": "a prompt under a cache_salt under which it was never sent",
    "adapter": "a prompt that was never sent for this adapter",
    "picture": "a picture that was never sent",
    "longer": "a prompt with fewer tokens",
}


OF_WHO = {
    "prompt": tuple(KINDS), "salt": ("other salt",), "adapter": ("other adapter",), "picture": ("other picture",),
    "longer": (),
}  # fmt: skip
"""What of a counter -> kinds of requests whose wrong answers have the same cause."""
_BESIDE = ("at once", "after at once", "beside abort", "after abort", "under load", "after load")
_EVICTED = ("repeat after churn", "extend after churn", "other picture", "repeat after wait", "extend after wait")
COVERS = {
    **dict.fromkeys(PLAIN, tuple(KINDS)),  # a fault of plain hits shows wherever there are hits
    **dict.fromkeys(_EVICTED[:2], (*_EVICTED, *_BESIDE)),
    **dict.fromkeys(_BESIDE[:2], _BESIDE),
    "chat turn": ("tool turn",), "under load": _BESIDE, "repeat after wait": _EVICTED,
}  # fmt: skip
"""Kind -> other kinds that are not findings of their own beside it."""


@dataclass
class Finding:
    """A finding.

    Args:
        sort: "rows" (answers are wrong) or "counter" (more tokens were said to be cached than can be).
        kind: of the requests, a key of ``KINDS``, or of ``WHO`` for counters.
        text: what was seen, in plain words.
        wrong: how many answers were wrong.
        judged: how many answers were judged.
        largest: the largest distance from a cold twin in nats; None for counters.
        seen: in how many runs of the smallest case, with new prompts each time, it was seen again.
        runs: how many these were.
        case: the smallest case; its last request is the wrong one.
        also: what else was seen that has probably the same cause.
        lines: lines for a shell that send it, with what is to be seen.
        file: where the case is saved; empty: nowhere.
    """

    sort: str
    kind: str
    text: str
    wrong: int
    judged: int
    largest: float | None
    case: Case
    also: list[str]
    seen: int = field(init=False, default=0)
    runs: int = field(init=False, default=0)
    lines: list[str] = field(init=False, default_factory=list)
    file: str = field(init=False, default="")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, without the case, which a replay file has."""
        return {name: value for name, value in self.__dict__.items() if name != "case"}

    def replay(self, profile: ServerProfile) -> dict[str, Any]:
        """Return what a replay file says.

        Args:
            profile: what the server has.
        """
        return {
            "version": REPLAY_VERSION, "sort": self.sort, "kind": self.kind, "text": self.text,
            "profile": profile.to_dict(), "case": self.case.to_dict(),
        }  # fmt: skip


def find(audit: Audit) -> list[Finding]:
    """Return the findings of an audit that has run. The smallest cases are looked for with the requests that are left."""
    counters = [*_of_counters(audit)]
    shown = {kind for finding in counters for kind in OF_WHO[finding.kind]}
    for finding in counters:
        wrong = [kind for kind in KINDS if kind in OF_WHO[finding.kind] and audit.results.counts(kind)[0]]
        finding.also += [_briefly(audit.results, kind) for kind in wrong]
    return [*counters, *_of_rows(audit, shown)]


def _of_rows(audit: Audit, shown: Collection[str]) -> Iterator[Finding]:
    results = audit.results
    wrong = [kind for kind in KINDS if results.counts(kind)[0]]
    left = [kind for kind in wrong if kind not in shown and results.is_sure(kind)]
    if not left and not shown and results.is_sure(*KINDS):
        yield _rows(audit, tuple(wrong), [])
    while left:
        first, others = left[0], COVERS.get(left[0], ())
        yield _rows(audit, (first,), [kind for kind in wrong if kind in others and kind != first])
        left = [kind for kind in left if kind != first and kind not in others]


def _rows(audit: Audit, kinds: tuple[str, ...], others: list[str]) -> Finding:
    results = audit.results
    trials = list(results.of_kind(*kinds))
    bad = [trial for trial in trials if trial.is_wrong]
    text, also = _said(results, kinds, trials, bad), [_briefly(results, kind) for kind in others]
    chosen = min(bad, key=lambda trial: (trial.number, sum(len(part.symbols) for part in trial.ask.parts)))
    is_steady = 2 * len(bad) > len(trials) and chosen.case.name != "wait"
    case = audit.smallest(chosen) if is_steady else chosen.case.until(chosen.number)
    largest = max(trial.distance for trial in bad)
    found = Finding("rows", kinds[0], text, len(bad), len(trials), largest, case, also)
    again = _seen_again(audit, found) if case.name != "wait" else None
    if again is not None:  # what was sent last is what is shown
        case, chosen = again.case.until(again.number), again
    found.lines = _lines(audit, case, chosen.answers, "compare .choices[0].logprobs with that of its cold twin")
    found.lines[-3:-3] = _how_often(found)  # before the wrong request, and the comment and request of its twin
    found.lines += _values(chosen)
    return found


def _seen_again(audit: Audit, found: Finding) -> Trial | None:
    """Run the case of ``found`` until it was seen twice, and note how often it was. Return the last that was seen."""
    last, still = None, list[bool]()
    with suppress(OutOfRequests, Unanswered):
        while found.runs < _TRIES and found.seen < 2:
            trial = audit.run_again(found.case)
            if trial is None:
                break
            found.runs += 1
            if trial.is_wrong:
                found.seen, last = found.seen + 1, trial
                still += [audit.is_still_wrong(trial) for _ in range(2)]
    if still:
        said = f"a wrong answer, asked again at once, was wrong again in {sum(still)} of {len(still)}"
        if not all(still):
            said += ": what is cached is right, and is read wrongly now and then"
        elif 2 * found.seen <= found.runs:
            said += ": what is cached was spoiled, and stays so"
        found.also.insert(0, said)
    return last


def _values(trial: Trial) -> list[str]:
    """Return a line with what the server said in ``trial`` and in its cold twin, where they part."""
    wrong, right = trial.answer, min(trial.twins, key=lambda twin: distance(trial.answer, twin)[0])
    if not (wrong.tops and right.tops):
        return [f"# seen: {shown(wrong.text)}; cold: {shown(right.text)}"]
    at = distance(wrong, right)[1] - 1  # of the nearer twin: the other one may be shorter
    values = [f"{one.tokens[at]!r} {one.tops[at].get(one.tokens[at], math.nan):.4g}" for one in (wrong, right)]
    return [f"# seen, at token {at + 1}: {values[0]}; cold: {values[1]}"]


def _how_often(found: Finding) -> list[str]:
    """Return a line that says how often the lines have to be sent, if once may not be enough."""
    if found.seen == found.runs:
        return []
    if not found.seen:
        return [f"# not seen again in {found.runs} runs with new prompts: it is rare, and these lines may not show it"]
    enough = math.ceil(math.log(_UNSEEN) / math.log(1 - found.seen / found.runs))
    return [f"# seen in {found.seen} of {found.runs} runs with new prompts: send the next line up to {enough} times"]


def _said(results: Results, kinds: tuple[str, ...], trials: list[Trial], bad: list[Trial]) -> str:
    noise = results.noise
    what = KINDS[kinds[0]] if len(kinds) == 1 else "now and then, a prompt"
    if noise.by_tokens:
        text = f"{what} gave another answer in {_share(trials)}"
    else:
        (at, _), = Counter(trial.at for trial in bad).most_common(1)  # fmt: skip
        text = f"{what} gave other probabilities at its {_ordinal(at)} token in {_share(trials)}"
    text += f"; 0 of {len(noise.same)} cold repeats did"
    if not noise.by_tokens:
        most = max(trial.distance for trial in bad)
        text += f" (cold answers differ by up to {noise.most:.2g} nats, the wrong ones by up to {most:.2g})"
    if len(kinds) > 1:
        text += f"; seen with: {', '.join(kinds)}"
    if theirs := sum(bool(trial.whose) for trial in bad):
        text += f"; {theirs} of them began as the answer to another prompt"
    if not any(trial.answer.cached for trial in bad) and any(trial.answer.cached is not None for trial in bad):
        text += "; the server said that nothing was cached"
    return text[0].upper() + text[1:]


def _briefly(results: Results, kind: str) -> str:
    trials = results.of_kind(kind)
    said = f"{kind} ({KINDS[kind].rstrip(',')}): {_share(trials)}"
    if kind == "other salt" and all(trial.answer.cached for trial in trials if trial.is_wrong):
        said += ", of what was sent under its own salt" * (not results.miscounts)
    return said if results.is_sure(kind) else f"{said}, alone too few to be sure"


def _share(trials: list[Trial]) -> str:
    """Return how many of ``trials`` are wrong: of the hits, if all that are wrong are hits."""
    bad = [trial for trial in trials if trial.is_wrong]
    if bad and all(trial.answer.cached for trial in bad):
        return f"{len(bad)} of {sum(bool(trial.answer.cached) for trial in trials)} hits"
    return f"{len(bad)} of {len(trials)}"


def _ordinal(n: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(n, f"{n}th")


# -- counters ---------------------------------------------------------------------------------------------------------


def _of_counters(audit: Audit) -> Iterator[Finding]:
    results = audit.results
    by_who = {who: [one for one in results.miscounts if one.who == who] for who in WHO}
    sure = [who for who, found in by_who.items() if len({one.ask.parts for one in found}) > 1]
    if not sure:
        return
    who, found = sure[0], by_who[sure[0]]
    rows = _answers_of(audit, found)
    plain = [one for one in found if not one.ask.answers] or found  # those that need no answer of a step before
    most = max(plain, key=lambda one: (one.answer.cached or 0) - one.most)
    text = (
        f"{WHO[who]} reports cached tokens in {len(found)} requests: {most.answer.cached:,} of {most.answer.num_prompt:,}, "
        f"where at most {most.most:,} can be"
    )
    text += f"; {rows}" if rows else ""
    also = [f"{WHO[other]}: {len(by_who[other])}" for other in sure[1:]]
    case = most.case.until(most.number) if most.case.steps else Case("never sent", ())
    is_last = any(ask.key == most.ask.key for step in case.steps[-1:] for ask in step.asks)
    if not is_last and not most.ask.answers:  # a cold twin, or what an audit begins with
        case = Case("never sent", steps(*[one.ask for one in plain[-3:-1]], most.ask))
    finding = Finding("counter", who, text[0].upper() + text[1:], len(found), results.num_counted, None, case, also)
    finding.lines = _lines(audit, case, most.answers, "see how many tokens are said to be cached")
    yield finding


def _answers_of(audit: Audit, found: list[Miscount]) -> str:
    """Return what is known of the answers whose counters are wrong, in words. Twins that take churn are not asked: what is
    left of the requests is for the smallest cases."""
    right = wrong = 0
    if audit.server.profile.cold == "churn":
        return ""
    with suppress(OutOfRequests, Unanswered):
        for one in found[:3]:
            if one.ask.parts[0].image is not None:
                continue
            answers = [audit.server.ask(audit.runner.twin(one.ask), one.answers) for _ in range(2)]
            if not all(audit.runner.is_cold(one.ask, answer) for answer in answers):
                continue
            differs = min(distance(one.answer, answer)[0] for answer in answers)
            if differs > audit.results.noise.limit:
                wrong += 1
            else:
                right += 1
    if wrong:
        return f"and {wrong} of {wrong + right} of their answers are wrong: keys collide"
    if not right or audit.results.noise.by_tokens:  # wrong rows may give the same token
        return ""
    return (
        f"their answers are right in {right} of {right}: what is wrong is the counter, or who may share what is cached"
    )


# -- the smallest case ------------------------------------------------------------------------------------------------


def _lines(audit: Audit, case: Case, answers: Answers, what: str) -> list[str]:
    """Return lines for a shell that send ``case``, and a cold twin of its last request."""
    server, lines, seen = audit.server, list[str](), 0
    for step in case.steps:
        if step.do == "churn":
            count = max(1, round(server.profile.churn * step.churn))
            lines.append(f"# fill the cache: {count} other prompts of {server.profile.churn_length:,} tokens")
        if step.do == "wait":
            lines.append("# wait, as with --after")
        for number, ask in enumerate(step.asks):
            known = [*answers[:seen], *[None] * (seen - len(answers))]
            line = server.curl(ask, known)
            is_gone = step.do == "abort" and not number
            is_beside = step.do == "together" or (is_gone and len(step.asks) > 1)
            lines.append("timeout 0.2 " * is_gone + line + " &" * is_beside)
            seen += 1
    if not lines or not [*case.asks()]:
        return lines
    last = [*case.asks()][-1]
    way = server.profile.cold
    twin = replace(last, salt="never-used-before" if way == "salt" else last.salt, cold=way == "off")
    lines.append(f"# {what}" + (" (after other prompts have filled the cache):" if way == "churn" else ":"))
    lines.append(server.curl(twin, answers[: seen - 1]))
    return lines


def replay(audit: Audit, data: Any) -> tuple[int, int, str]:
    """Run the case of a replay file again, with new prompts each time, until it has shown itself twice.

    Args:
        audit: an audit that has not run; its server gets the profile of the file.
        data: what the file says.

    Returns:
        how often it was seen, in how many runs, and what the finding said.

    Raises:
        BadInput: not a replay file.
        OutOfRequests, Unanswered: from the server.
    """
    try:
        is_known = data["version"] == REPLAY_VERSION
        profile, case, sort = ServerProfile(**data["profile"]), Case.of(data["case"]), data["sort"]
    except KeyError as error:
        raise BadInput(f"not a replay file of an audit: it has no {error}") from None
    except TypeError as error:
        raise BadInput(f"not a replay file of an audit: {error}") from None
    if not is_known:
        raise BadInput(f"a replay file of version {data['version']}; this one reads {REPLAY_VERSION}")
    audit.server.profile = profile
    audit.runner.draw = Draw(audit.seed, profile.as_ids)
    audit.results.noise.by_tokens = not profile.top
    audit.measure_noise(6)
    seen = runs = 0
    with suppress(OutOfRequests):
        for _ in range(_RUNS):
            before = len(audit.results.miscounts)
            is_wrong = audit.shows(case)
            runs += 1
            seen += len(audit.results.miscounts) > before if sort == "counter" else is_wrong
            if seen > 1:
                break
    return seen, runs, str(data.get("text", ""))
