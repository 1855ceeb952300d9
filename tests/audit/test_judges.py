"""Whether the audit finds the faults that are planted in a server, and finds none where none is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Array, Batch, Engine, Fault, Job
from fake_server import DIALECTS, FakeServer
from further import FURTHER, NewWeights
from judging import audited, clean_server
from planted import PLANTED, OneTokenTooLong
from unlisted import UNLISTED

pytest.importorskip("httpx")

from kvpagoda.audit.judge import Audit
from kvpagoda.audit.probes import one
from kvpagoda.audit.prompts import Ask, Case, PromptPart
from kvpagoda.audit.results import Trial
from kvpagoda.audit.server import Server, ServerAnswer

SERVERS: dict[str, dict[str, Any]] = {
    "one page of a tier": {"host": "2MiB"},
    "wrong after a restart": {"after": "restart"},
    **dict.fromkeys(
        ("block freed while in use", "answers of others under load", "stale after abort"), {"pause": 0.003}
    ),
}
"""Fault -> what its server has besides: a tier, a restart, steps that take so long that two requests meet in one."""
RARE = {
    **dict.fromkeys(
        ("hit one token too long", "a layer of another text", "state not copied", "the answer before"), 1200
    ),
    "stale after churn": 2400,
}
"""Fault of one hit in twenty -> how many requests find it. A hit after churn takes many: 1,200 have some 40 of them."""
NUM_CLEAN, NUM_LONG = 100, 24
"""Clean servers; those of them that ``make long`` audits, ``make slow`` the others."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    """In one of three audits: which requests meet in a step is not in the hands of who asks, and some faults need it."""
    options = dict(SERVERS.get(name, {}))
    for seed in (1, 2, 3):
        if "after" in options:
            options["disk"] = str(tmp_path / str(seed))
        fault = PLANTED[name](seed=seed)
        report = audited(fault, seed=seed, **options)
        if report.code == 1 and report.findings:
            return
    pytest.fail(f"not found: {fault.told}, {[*report.lines()][:8]}")


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "vllm"])
def test_rows_of_another_text_are_found_whatever_a_server_shows(dialect: str) -> None:
    fault = PLANTED["a layer of another text"](seed=2)
    report = audited(fault, dialect, seed=2)
    assert report.code == 1, (fault.told, [*report.lines()][:8])


@pytest.mark.parametrize("name", RARE)
def test_a_fault_of_one_hit_in_twenty_is_found(name: str) -> None:
    fault = PLANTED[name](seed=3, rate=1 / 20)
    report = audited(fault, seed=3, max_requests=RARE[name])
    assert report.code == 1, (fault.told, [*report.lines()][:8])


@pytest.mark.parametrize("noise", [{"noise": 0.003}, {"shape_noise": 0.003}], ids=["noise", "shapes"])
@pytest.mark.parametrize(
    "name", ["hit one token too long", "state of an earlier boundary", "answers of others under load"]
)
def test_a_fault_is_found_above_noise(name: str, noise: dict[str, float]) -> None:
    fault = PLANTED[name](seed=4)
    report = audited(fault, seed=4, **noise, **SERVERS.get(name, {}))
    assert report.code == 1 and report.audit.results.noise.most > 0, (fault.told, [*report.lines()][:8])


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= NUM_LONG)) for seed in range(NUM_CLEAN)]
)
def test_a_clean_server_has_no_findings(seed: int) -> None:
    options = clean_server(seed)
    report = audited(seed=seed, max_requests=250, **options)
    assert not report.findings and report.code != 1, (options, [*report.lines()][:8])


def test_faults_that_no_list_names_are_found() -> None:
    """What needs two requests in one step, or a tier that is read, is missed by chance."""
    found = [
        name
        for name, make in UNLISTED.items()
        if any(audited(make(seed=seed), seed=seed, host="2MiB").code == 1 for seed in (1, 2))
    ]
    assert len(found) >= 7, sorted({*UNLISTED} - {*found})


AMONG = {
    "weights of before": {"after": "restart"},
    "aborted in prefill": {"chunk": 32, "pause": 0.003},
    **dict.fromkeys(("freed by an abort", "beside a longer one", "counter of the neighbour"), {"pause": 0.003}),
    "junction with a tier": {"host": "2MiB"},
}
"""Fault of ``further`` -> what its server has besides."""


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_fault_is_found(name: str, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        options: dict[str, Any] = dict(AMONG.get(name, {}))
        if "after" in options:
            options["disk"] = str(tmp_path / str(seed))
        fault = FURTHER[name](seed=seed)
        report = audited(fault, seed=seed, **options)
        if report.code == 1 and report.findings:
            return
    pytest.fail(f"not found: {fault.told}, {[*report.lines()][:8]}")


def test_other_weights_after_a_wait_are_no_fault(tmp_path: Path) -> None:
    report = audited(NewWeights(), seed=1, after="restart", disk=str(tmp_path))
    assert report.code == 0, [*report.lines()][:8]


def test_what_is_within_the_noise_that_is_measured_later_is_not_wrong() -> None:
    with FakeServer(seed=1, noise=0.02) as fake, Server(fake.url) as server:
        audit = Audit(server, 1)
        audit.prepare()
        ask = Ask((PromptPart((1, 2)),), "repeat")
        for distance in (1e-3, 9.0):
            trial = Trial(Case("hits", one(ask)), 0, ask, [], ServerAnswer("a"), str(distance))
            trial.distance, trial.is_wrong, trial.whose = distance, True, "another"
            audit.results.trials.append(trial)
        audit.measure_noise(2)
        assert 1e-3 < audit.results.noise.limit < 9.0
        assert [(trial.is_wrong, trial.whose) for trial in audit.results.trials] == [(False, ""), (True, "another")]


class RoundedHits(Fault):
    """No fault: logits have the steps of ``grid``, and after a hit of a long text one of them, now and then, is another."""

    grid = 1 / 32

    def after(self, engine: Engine, batch: Batch, jobs: list[Job], logits: list[Array]) -> None:
        for row, job in enumerate(jobs):
            logits[row] = np.round(logits[row] / self.grid) * self.grid
            if job.hit and len(job.text) > 300 and self.strikes():
                logits[row][self.random.integers(len(logits[row]))] += self.grid
                logits[row][int(np.argmax(logits[row]))] -= self.grid


class WrongHits(RoundedHits, OneTokenTooLong):
    """The same on a server on which hits are wrong."""


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_rounding_is_no_finding(seed: int) -> None:
    """vLLM 0.32 in bfloat16 on a CPU: hits of more than about a thousand tokens round otherwise than any cold run does."""
    fault = RoundedHits(seed)
    report = audited(fault, seed=seed)
    assert (report.code, report.findings) == (0, []) and fault.told > 10, [*report.lines()][:8]
    wrong = audited(WrongHits(seed), seed=seed)
    assert wrong.code == 1 and wrong.findings[0].sort == "rows"
