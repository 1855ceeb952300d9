"""Workers of a simulation with the caches of other engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_worker
from test_worker import COSTS, FULL, requests

from kvpagoda import Schema, simulate
from kvpagoda.errors import BadInput
from kvpagoda.replay import Group, Trace, replay_engine
from kvpagoda.replay.batching import cache_for
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import EngineRun, Schedule, serve_with
from kvpagoda.replay.engines.pool import EnginePool, pool_of
from kvpagoda.replay.engines.run import manager_of
from kvpagoda.replay.fleet.costs import Ticks
from kvpagoda.replay.fleet.routing import RULES
from kvpagoda.replay.fleet.simulation import Simulation
from kvpagoda.replay.setup import Fleet, Setup
from kvpagoda.schema import Layer, Recurrent, Rows
from raises import raises

BIG = Layer(1, "state", (Recurrent((Rows("r", (32, 32), "float32"),)),))
SCHEMAS = {**test_worker.SCHEMAS, "big states": Schema((FULL, BIG), "big states")}
ENGINES = ("vllm-0.33", "sglang-0.5.23", "dynamo-1.6.1")
SMALL = {"full": "14KiB", "window": "40KiB", "states": "48KiB", "big states": "200KiB"}
STEP = {"full": 64, "window": 64, "states": 64, "big states": 256}
CASES = [
    *((engine, "full") for engine in ENGINES),
    ("vllm-0.33", "window"),
    ("sglang-0.5.23", "window"),
    ("vllm-0.33", "states"),
    ("sglang-0.5.23", "big states"),
]


def run(trace: Trace, engine: str, name: str, budget: str | None = None, **settings: Any) -> Any:
    given = {
        "costs": COSTS,
        "tokens_per_id": trace.block_size,
        "step_tokens": STEP[name],
        "max_requests": 6,
        **settings,
    }
    return simulate(trace, SCHEMAS[name], budget or SMALL[name], engine=engine, **given)


def traffic(seed: int, count: int, name: str) -> Trace:
    """Requests for the layers ``name``: with big states four times as long, since SGLang keeps one after 64 tokens or more."""
    trace = requests(seed, count)
    return replace(trace, block_size=64, input_lengths=4 * trace.input_lengths) if name == "big states" else trace


def apart(trace: Trace) -> Trace:
    """The requests of ``trace``, each arriving after all before it have ended."""
    return replace(trace, arrivals=np.arange(len(trace)) * 10.0)


def alone(engine: str, trace: Trace, pool: EnginePool, step_tokens: int | None) -> list[int]:
    """What requests find one at a time. SGLang's blocks and what it sets apart do not follow from one number."""
    schedule = Schedule(1, step_tokens, True)
    if pool.num_apart:
        chains = Chains(trace, pool.block_size)
        return serve_with(manager_of(engine, chains, pool, schedule), chains, schedule).hits.tolist()
    settings = {"block_size": pool.block_size, "step_tokens": step_tokens, "shared": True, "groups": pool.groups}
    return replay_engine(trace, engine, pool.num_blocks, **settings).per_request.tolist()


@pytest.mark.parametrize("budget", [None, "64KiB", "1MiB"])
@pytest.mark.parametrize(("engine", "name"), CASES)
def test_one_at_a_time_hits_are_those_of_a_replay(engine: str, name: str, budget: str | None) -> None:
    trace, schema = traffic(4, 150, name), SCHEMAS[name]
    found = run(apart(trace), engine, name, budget)
    pool = pool_of(engine, schema, cache_for(None, schema, "1MiB", 64).plan, budget or SMALL[name])
    hits = alone(engine, trace, pool, STEP[name])
    assert pool.block_size == 16 and found.each.cached.tolist() == hits and found.nbytes == pool.nbytes
    assert found.finished + found.never_fit == len(trace) and (found.never_fit == 0 or budget != "1MiB")
    assert found.hit_rate > 0.02 and (budget == "1MiB" or found.workers[0].evicted_blocks > 50)
    if engine != "sglang-0.5.23":  # its tree is cut where chunks end
        whole = alone(engine, trace, pool, None)
        same = (np.array(whole) == hits).mean()
        assert same == 1 if name == "full" else same > 0.9


def test_sglang_with_states_hits_what_a_replay_of_so_many_blocks_hits() -> None:
    """With states of as many bytes as a block, 90 states and one that holds nothing leave memory for 101 blocks: what SGLang
    makes of 192 blocks for both."""
    trace = traffic(4, 150, "big states")
    one = Schema((FULL, Layer(1, "state", (Recurrent((Rows("r", (16, 8), "float32"),)),))), "one")
    found = simulate(
        apart(trace), one, 192 * 512 + 200, costs=COSTS, engine="sglang-0.5.23", tokens_per_id=64, step_tokens=256
    )
    both = Group.from_text("full+state")
    blocks = replay_engine(trace, "sglang-0.5.23", 192, step_tokens=256, shared=True, groups=both)
    assert found.each.cached.tolist() == blocks.per_request.tolist() and found.hit_rate > 0.05
    assert found.never_fit == blocks.never_fit and found.nbytes == 192 * 512 and found.workers[0].evicted_blocks > 50


@pytest.mark.parametrize(("name", "budget"), [("big states", "128KiB"), ("window", "40KiB")])
def test_sglangs_one_memory_reaches_the_cache_of_a_worker(name: str, budget: str) -> None:
    plan, trace = cache_for(None, SCHEMAS[name], "1MiB", 64).plan, apart(traffic(4, 60, name))
    pools = [pool_of("sglang-0.5.23", SCHEMAS[name], plan, budget, unified=one) for one in (False, True)]
    found = [run(trace, "sglang-0.5.23", name, budget, unified_memory=one) for one in (False, True)]
    hits = [alone("sglang-0.5.23", trace, pool, STEP[name]) for pool in pools]
    assert [one.each.cached.tolist() for one in found] == hits and hits[0] != hits[1]
    assert [one.nbytes for one in found] == [pool.nbytes for pool in pools]


def test_vllms_admission_reaches_the_cache_of_a_worker() -> None:
    busy = traffic(4, 60, "full")
    plain, careful = (run(busy, "vllm-0.33", "full", watermark=share) for share in (0.0, 0.5))
    assert plain.each.cached.tolist() != careful.each.cached.tolist()


@pytest.mark.parametrize("budget", ["14KiB", "60KiB"])
def test_our_own_profile_is_our_own_cache(budget: str) -> None:
    trace = apart(replace(requests(5, 150), output_lengths=np.zeros(150, np.int64)))
    found = run(trace, "kvpagoda", "full", budget, block_size=16)
    blocks = found.nbytes // 512 - 1
    alone = replay_engine(trace, "kvpagoda", blocks, block_size=16, step_tokens=64, shared=True)
    assert found.each.cached.tolist() == alone.per_request.tolist() and found.hit_rate > 0.05


class Plain:
    """A worker with the cache of an engine in the plain way: every step by itself, all of it in picoseconds."""

    def __init__(self, trace: Trace, engine: str, name: str) -> None:
        schema = SCHEMAS[name]
        plan = cache_for(None, schema, SMALL[name], STEP[name]).plan
        pool, ticks = pool_of(engine, schema, plan, SMALL[name]), Ticks(COSTS, plan)
        chains, schedule = Chains(trace, 16), Schedule(6, STEP[name], True)
        run = EngineRun(chains, manager_of(engine, chains, pool, schedule), schedule)
        coming, now = [*enumerate(np.round(trace.arrivals * 1e12).astype(np.int64).tolist())][::-1], 0
        self.admitted, self.first, self.last = (np.full(len(trace), -1, np.int64) for _ in range(3))
        self.run = run
        while coming or run.num_left:
            while coming and coming[-1][1] <= now:
                run.waiting.append(coming.pop()[0])
            if not run.num_left:
                now = coming[-1][1]
                continue
            began, step = now, run.step()
            now += ticks.of(int(step.prefilled + step.decoding > 0), step.prefilled, step.decoding, step.context)
            self.admitted[step.admitted] = began
            self.last[step.ended] = now
            for one in {*run.running, *step.ended}:
                whole = one in step.ended or (one in run.running and run.running[one][0] >= chains.prompts[one])
                if whole and self.first[one] < 0:
                    self.first[one] = now


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_times_are_those_of_single_steps(engine: str, name: str) -> None:
    trace = traffic(2, 100, name)
    plain, found = Plain(trace, engine, name), run(trace, engine, name)
    each = found.each
    for column, times in ((each.admitted, plain.admitted), (each.first, plain.first), (each.last, plain.last)):
        assert column.tolist() == times.tolist()
    assert each.cached.tolist() == plain.run.served.hits.tolist() and found.waited["max"] > 0.1
    served = each.last >= 0
    assert served.sum() == found.finished > 50 and found.finished + found.never_fit == len(trace)
    assert (each.admitted[served] < each.first[served]).all() and (each.first[served] <= each.last[served]).all()
    assert 0 < found.workers[0].busy <= 1 and found.workers[0].requests == found.finished


@pytest.mark.parametrize("length", [160, 200, 240])
@pytest.mark.parametrize(("engine", "name"), [*CASES, ("dynamo-1.6.1-trtllm", "full")])
def test_a_request_that_outgrows_the_cache_is_refused(engine: str, name: str, length: int) -> None:
    """Some fit at first, are admitted, preempt all others and themselves, and fit no more."""
    lengths = [(64, 8), (length, 20_000), (length // 2, 20_000), (48, 40)]
    records = [
        {"timestamp": 0, "input_length": n, "output_length": out, "hash_ids": [*range(100 * i, 100 * i + -(-n // 16))]}
        for i, (n, out) in enumerate(lengths)
    ]
    trace = Trace.read(records, block_size=16)
    setup = Setup(SCHEMAS[name], SMALL[name], 16, max_requests=6, step_tokens=STEP[name])
    made = Simulation(trace, setup, Fleet(COSTS, engine=engine))
    made.run()
    found, (worker,) = made.result(), made.workers
    assert (found.finished, found.never_fit) == (2, 2), "the short ones end"
    assert (worker.backlog, worker.num_requests) == (0, 0)


def test_a_step_takes_what_its_tokens_cost() -> None:
    """One request of 40 prompt tokens and 3 of output: two pieces, then two decode steps of 40 and 41 tokens of context."""
    records = [{"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}]
    found = run(Trace.read(records, block_size=16), "vllm-0.33", "full", "1MiB", step_tokens=32)
    prefill, read = 2 * COSTS.step + 40 * COSTS.prefill_token, 32 * COSTS.read_byte
    assert found.first_token["max"] == pytest.approx(prefill)
    assert found.last_token["max"] == pytest.approx(prefill + 2 * (COSTS.step + COSTS.decode_token) + 81 * read)
    assert found.workers[0].steps == 4 and found.nbytes == (1 << 20)


@pytest.mark.parametrize("routing", RULES)
@pytest.mark.parametrize("engine", ENGINES)
def test_several_workers(engine: str, routing: str) -> None:
    found = run(requests(7, 120), engine, "full", workers=3, routing=routing, seed=1)
    assert (
        found.finished + found.never_fit == 120 and sum(one.requests for one in found.workers) == found.finished > 100
    )
    assert all(one.evicted_blocks > 20 for one in found.workers) and found.engine == engine
    if routing == "prefix-aware":
        assert found.hit_rate > run(requests(7, 120), engine, "full", workers=3).hit_rate


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_a_router_changes_nothing_by_asking(engine: str, name: str) -> None:
    """With one worker it is asked at every arrival; it expects what is then found, where requests come one at a time."""
    trace = traffic(8, 100, name)
    asked, told = (run(trace, engine, name, routing=rule) for rule in ("prefix-aware", "round-robin"))
    assert asked.each.cached.tolist() == told.each.cached.tolist() and asked.seconds == told.seconds
    setup = Setup(SCHEMAS[name], SMALL[name], trace.block_size, max_requests=6, step_tokens=STEP[name])
    made = Simulation(apart(trace), setup, Fleet(COSTS, routing="prefix-aware", engine=engine))
    expected, choose = np.zeros(100, np.int64), made._rule.choose

    def watched(number: int) -> tuple[int, int]:
        chosen, expected[number] = choose(number)
        return chosen, int(expected[number])

    made._rule.choose = watched  # type: ignore[method-assign]
    made.run()
    served = made.outcomes.admitted >= 0
    found = made.outcomes.prompt - made.outcomes.cached
    assert served.sum() > 60 and (expected[served] >= found[served]).all()
    assert (expected[served] == found[served]).mean() > 0.9  # the output of the last request is published a step later


def test_what_engines_do_not_have_is_refused() -> None:
    with raises(BadInput, needed=["policy", "checkpoints", "tiers"]):
        run(requests(1), "vllm-0.33", "full", policy="fifo", tiers={"host": "1MiB"}, checkpoints=3)
    with raises(BadInput, needed="dynamo-1.6.1", available=2):
        run(requests(1), "dynamo-1.6.1", "window")
    with raises(BadInput, needed=17, available=16):
        run(requests(1), "vllm-0.33", "window", retention=17)


def test_vllms_unit_of_matching_reaches_the_cache_of_a_worker() -> None:
    """A prompt of 193 tokens twice, in blocks of 128, which a state of this size has: 128 of it are found, or 192."""
    record = {"input_length": 193, "output_length": 2, "hash_ids": [1, 2, 3]}
    trace = Trace.read([record | {"timestamp": 1e6 * i} for i in range(2)], block_size=64)
    found = [run(trace, "vllm-0.33", "big states", "2MiB", match_unit=unit).each.cached.tolist() for unit in (None, 16)]
    assert found == [[0, 128], [0, 192]]
