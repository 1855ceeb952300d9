"""The server that audits are tried on: right without a fault, and wrong with each of the planted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import Engine, Fault, Job
from further import FURTHER
from hybrid_model import IMAGE, IMAGE_LENGTH, HybridModel
from planted import PLANTED
from unlisted import UNLISTED

MODELS = {
    "full": ("full", "full"),
    "window": ("full", "window", "full"),
    "state": ("state", "full"),
    "all": ("full", "window", "state", "full"),
}


def traffic(engine: Engine, seed: int) -> list[Job]:
    """Ask all that an audit may ask, and return the requests in their order."""
    random = np.random.default_rng(seed)

    def text(n: int) -> np.ndarray:
        return random.integers(0, 256, n).astype(np.int32)

    done: list[Job] = []

    def ask(*prompts: np.ndarray, most: int = 3, **options: Any) -> None:
        jobs = [engine.submit(Job(prompt, most, **options)) for prompt in prompts]
        for job in jobs:
            while job.out.get() is not None:
                pass
        done.extend(jobs)

    base = text(100)
    family = [
        base,
        np.append(base, text(30)),
        base[:70],
        np.append(base[:70], text(40)),
        np.append(text(16), base[16:]),
    ]
    for prompt in (*family, *family):
        ask(prompt)
    for options in ({"salt": "a"}, {"salt": "b"}, {"adapter": "x"}):
        ask(base, **options)
    for digest in (b"1" * 16, b"2" * 16):
        ask(np.concatenate([base[:9], np.full(IMAGE_LENGTH, IMAGE, np.int32), base[:40]]), images=((9, digest),))
    for _ in range(14):
        ask(text(90))
    for prompt in family:
        ask(prompt)
    for _ in range(4):
        ask(text(60), text(70), most=6)
    for _ in range(2):
        gone = text(80)
        job = engine.submit(Job(gone, 200))
        job.out.get()
        engine.abort(job)
        while job.out.get() is not None:
            pass
        ask(np.append(gone, text(9)))
    ask(*(text(235) for _ in range(4)), most=40)
    for job in done[-4:]:
        ask(job.prompt)
    ask(*(text(70) for _ in range(6)))
    engine.restart()
    for prompt in (*family, *family):
        ask(prompt)
    return done


def worst(jobs: list[Job], others: list[Job]) -> float:
    """Return the largest difference of a log-probability, as long as the tokens are the same."""
    most = 0.0
    for job, other in zip(jobs, others):
        for mine, theirs in zip(job.samples, other.samples):
            most = max(most, float(np.abs(mine.logprobs - theirs.logprobs).max()))
            if mine.token != theirs.token:
                break
    return most


@pytest.mark.parametrize("layers", MODELS)
def test_what_is_cached_gives_the_numbers_of_what_is_computed(layers: str, tmp_path: Path) -> None:
    model = HybridModel(1, MODELS[layers])
    cached = Engine(model, disk=str(tmp_path), host="300KiB")
    computed = Engine(model, caches=False)
    jobs, others = traffic(cached, 5), traffic(computed, 5)
    cached.close()
    computed.close()
    assert worst(jobs, others) < 1e-9
    assert sum(job.hit for job in jobs) > 1000 and not any(job.hit for job in others)
    assert cached.num_preempted


def served(fault: Fault, folder: Path) -> list[Job]:
    engine = Engine(HybridModel(2), fault, disk=str(folder), host="300KiB")
    jobs = traffic(engine, 3)
    engine.close()
    return jobs


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """What an engine without a fault answers."""
    return served(Fault(), tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_changes_answers_or_counters(name: str, right: list[Job], tmp_path: Path) -> None:
    fault = PLANTED[name](rate=1.0 if name == "the answer before" else None)
    runs = served(fault, tmp_path), right
    assert fault.told
    if name == "counter wrong":
        assert worst(*runs) < 1e-9 and [job.counted for job in runs[0]] != [job.counted for job in runs[1]]
    elif name == "key without the salt":  # the rows are the same; whose they are is not
        assert worst(*runs) < 1e-9 and any(job.salt == "b" and job.hit for job in runs[0])
    else:
        assert worst(*runs) > 0.01


@pytest.mark.parametrize("name", [*PLANTED, *FURTHER, *UNLISTED])
def test_no_fault_breaks_the_engine(name: str) -> None:
    """Requests with a common prefix, of many lengths, run beside each other, and some are aborted at any place."""
    fault = {**PLANTED, **FURTHER, **UNLISTED}[name](seed=1)
    engine = Engine(HybridModel(2), fault)
    random = np.random.default_rng(6)
    base = random.integers(0, 256, 120).astype(np.int32)
    for _ in range(10):
        jobs = []
        for _ in range(4):
            rest = random.integers(0, 256, random.integers(1, 40)).astype(np.int32)
            jobs.append(
                engine.submit(Job(np.append(base[: random.integers(10, 120)], rest), int(random.integers(2, 40))))
            )
        for job in jobs[:2]:
            for _ in range(random.integers(1, 12)):
                if job.out.get() is None:
                    break
            else:
                engine.abort(job)
                while job.out.get() is not None:
                    pass
        for job in jobs[2:]:
            while job.out.get() is not None:
                pass
    engine.close()
