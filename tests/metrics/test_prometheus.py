"""What Prometheus scrapes is what ``stats`` says, under the names of the table, also while somebody else works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from threading import Event, Thread

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvpagoda import BadInput, KVCache, MissingExtra, Namespace, Schema
from kvpagoda.metrics import METRICS, CacheCollector, dashboard
from kvpagoda.metrics.names import COMMON
from kvpagoda.metrics.residency import Residency
from kvpagoda.scheduling import Job, RunQueue, Youngest
from kvpagoda.schema import Attention, Layer
from kvpagoda.tiers import host_tier
from raises import raises

FULL = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
VLLM = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits", "vllm:request_queue_time_seconds",
}  # fmt: skip
"""Names of vLLM 0.30 that mean the same here."""


def made(**settings: object) -> KVCache:
    return KVCache(FULL, num_blocks=32, block_size=4, device="none", max_requests=3, **settings)  # type: ignore[arg-type]


def serve(cache: KVCache, tokens: list[int], namespace: Namespace | str | None = None) -> None:
    with cache.open(tokens, namespace) as sequence:
        sequence.commit(tokens[sequence.length :])


def scraped(*collectors: CacheCollector) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry()
    for one in collectors:
        registry.register(one)
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len({(one.name, frozenset(one.labels.items())) for one in samples}) == len(samples)
    return {(one.name, frozenset(one.labels.items())): one.value for one in samples}


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[name, frozenset({"model_name": "m", "engine": "0", **labels}.items())]


def test_figures_are_those_of_stats() -> None:
    cache = made(tiers=[host_tier("1MiB")])
    for first in range(8):
        serve(cache, [first % 3, *range(40)], "ab"[first % 2])
    cache.flush()
    for first in range(3):
        serve(cache, [first, *range(40)], "a")
    running = cache.open([2, *range(30), 5, 6], "a")
    stats, found = cache.stats(), scraped(CacheCollector(cache, model_name="m"))
    assert value(found, "vllm:num_requests_running") == 1 == stats.running
    assert value(found, "vllm:kv_cache_usage_perc") == stats.usage > 0
    assert value(found, "vllm:prefix_cache_queries_total") == stats.prompt_tokens
    assert value(found, "vllm:prefix_cache_hits_total") == stats.cached_tokens - stats.loaded_tokens
    assert value(found, "vllm:external_prefix_cache_hits_total") == stats.loaded_tokens > 0
    assert value(found, "kvpagoda_blocks", group="full", state="free") == stats.groups[0].free
    assert value(found, "kvpagoda_blocks_evicted_total", group="full") == stats.evicted_blocks > 0
    assert value(found, "kvpagoda_blocks_per_run", group="full") == stats.groups[0].blocks_per_run >= 1
    for one in stats.namespaces:
        assert value(found, "kvpagoda_cached_tokens_total", namespace=one.name) == one.cached_tokens
        assert value(found, "kvpagoda_computed_tokens_total", namespace=one.name) == one.computed_tokens
    load = next(one for one in stats.tiers[0].calls if one.call == "load")
    labels = {"level": "1", "tier": "host", "call": "load"}
    assert value(found, "kvpagoda_tier_call_seconds_count", **labels) == load.seconds.count > 0
    assert value(found, "kvpagoda_tier_call_seconds_bucket", **labels, le="+Inf") == load.seconds.count
    assert value(found, "kvpagoda_tier_moved_bytes_total", **labels) == load.nbytes > 0
    assert ("vllm:num_requests_waiting", frozenset({"model_name": "m", "engine": "0"}.items())) not in found
    running.close()


def test_every_sample_is_in_the_table_with_its_labels() -> None:
    cache = made(tiers=[host_tier("1MiB"), host_tier("2MiB")])
    serve(cache, [*range(20)])
    series = {name: metric for metric in METRICS for name in metric.series}
    seen = set()
    for name, labels in scraped(CacheCollector(RunQueue(cache), sample=1)):
        metric = series[name]
        seen.add(metric.name)
        assert {key for key, _ in labels} - {"le"} == {*COMMON, *metric.labels}
    assert {metric.name for metric in METRICS} - seen == {"kvpagoda_short_hits", "kvpagoda_short_hit_tokens"}
    assert {metric.name for metric in METRICS if metric.name.startswith("vllm:")} == VLLM


def test_a_queue_tells_who_waits_and_who_was_preempted() -> None:
    cache = KVCache(FULL, num_blocks=5, block_size=2, max_requests=2, device="none")
    queue: RunQueue[Job] = RunQueue(cache, Youngest())
    jobs = Job(np.arange(4, dtype=np.int32), 8), Job(np.arange(10, 13, dtype=np.int32), 4)
    for job in jobs:
        queue.enter(job)
    queue.admit()
    queue.make_room(jobs[0], 4)
    assert jobs[0].sequence is not None and len(queue.running) == 2
    jobs[0].sequence.commit(jobs[0].text)
    queue.make_room(jobs[0], 4)
    found = scraped(CacheCollector(queue, model_name="m"))
    assert value(found, "vllm:num_requests_waiting") == 1 == queue.stats().waiting
    assert value(found, "vllm:num_preemptions_total") == 1


def test_several_caches_and_names_for_namespaces() -> None:
    one, two = made(), made()
    serve(one, [*range(9)], "tenant secret")
    serve(two, [*range(9)], Namespace("tenant secret", "adapter"))
    names = {"tenant secret": "tenant 7", Namespace("tenant secret", "adapter"): "tenant 7"}
    found = scraped(CacheCollector(one, two, model_name="m", namespaces=names))
    for engine in "01":
        assert value(found, "kvpagoda_requests_total", engine=engine, namespace="tenant 7") == 1
    assert "secret" not in str(found) and "secret" not in str(scraped(CacheCollector(one)))


def test_the_names_of_vllm_can_be_others() -> None:
    found = scraped(CacheCollector(made(), model_name="m", vllm="cache:"))
    assert value(found, "cache:num_requests_running") == 0
    assert not [name for name, _ in found if name.startswith("vllm:")]


def test_counters_never_go_back() -> None:
    cache = made()
    collector = CacheCollector(cache, model_name="m")
    sequence = cache.open([*range(8)])
    sequence.commit([*range(8)])
    seen = []
    for rewound in (0, 6, 0):
        sequence.rewind(rewound)
        seen.append(value(scraped(collector), "kvpagoda_computed_tokens_total", namespace="default"))
    assert seen == [8, 8, 8] and cache.stats().computed_tokens == 2


def test_a_request_that_ends_while_it_is_scraped_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = made()
    collector = CacheCollector(cache, model_name="m")
    sequence, counters = cache.open([*range(8)]), cache.core.counters
    sequence.commit([*range(8)])
    tallies = counters.tallies

    def and_then_it_ends() -> object:
        monkeypatch.undo()
        found = tallies()
        sequence.close()
        return found

    for _ in range(2):
        assert value(scraped(collector), "kvpagoda_computed_tokens_total", namespace="default") == 8
        monkeypatch.setattr(counters, "tallies", and_then_it_ends)
    monkeypatch.undo()
    assert cache.stats().computed_tokens == 8


def test_a_request_that_is_suspended_while_it_is_scraped_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment it is among the running and the suspended ones."""
    cache = made()
    sequence = cache.open([*range(8)])
    sequence.commit([*range(8)])
    monkeypatch.setattr(cache.core, "suspended", dict.fromkeys(cache.core.running.values()))
    assert cache.stats().computed_tokens == 8


def test_two_scrapes_at_once_do_not_let_a_counter_go_back() -> None:
    """One has read what was told before when the other one tells more."""
    cache = made()
    collector = CacheCollector(cache, model_name="m")
    sequence, other, told = cache.open([*range(4)]), list[Thread](), list[float]()
    sequence.commit([*range(4)])

    class Most(dict[tuple[str, tuple[str, ...]], float]):
        def get(self, key: tuple[str, tuple[str, ...]], default: float = 0) -> float:  # type: ignore[override]
            found = super().get(key, default)
            if key[0] == "kvpagoda_computed_tokens" and not other:
                other.append(Thread(target=lambda: told.append(computed())))
                sequence.extend(6)
                sequence.commit([*range(6)])
                other[0].start()
                other[0].join(0.2)  # for ever, if it has to wait for this scrape, as it should
            return found

    def computed() -> float:
        return value(scraped(collector), "kvpagoda_computed_tokens_total", namespace="default")

    collector._most = Most()
    assert computed() == 4
    other[0].join()
    sequence.rewind(3)
    assert told == [10] and computed() == 10


def test_a_scrape_does_not_disturb_the_owner() -> None:
    """The owner works and is scraped without a pause: no call of either fails, and counters only grow."""
    cache, ended, errors = made(), Event(), list[BaseException]()
    collector, told = CacheCollector(cache, model_name="m"), Counter[str]()

    def scrape() -> None:
        last: dict[object, float] = {}
        try:
            while not ended.is_set():
                found = scraped(collector)
                for key, now in found.items():
                    assert not key[0].endswith("_total") or now >= last.get(key, 0)
                last = found
                told["scrapes"] += 1
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=scrape)
    thread.start()
    for first in range(400):
        sequences = [cache.open([first % 17, *range(12 + i)]) for i in range(3)]
        for number, one in enumerate(sequences):
            one.commit([first % 17, *range(12 + number)][one.length :])
        running = cache.persistent_batch(sequences)
        for token in range(5):
            running.extend()
            running.commit(np.full(3, token, np.int32))
        for one in sequences:
            one.close()
    ended.set()
    thread.join()
    assert not errors and told["scrapes"] > 3


def test_lives_of_blocks_hits_and_waits_are_histograms() -> None:
    cache = made()
    queue = RunQueue(cache, Youngest())
    collector = CacheCollector(queue, model_name="m", sample=1)
    assert cache.core.residency is not None
    CacheCollector(cache, sample=7)
    assert cache.core.observers.find(Residency).every == 1, "a second collector reads the same sample"
    for first in range(8):
        serve(cache, [first % 3, *range(40)])
    for first in range(2):
        queue.enter(Job(np.full(9, first, np.int32), 12))
        queue.admit()
    found, stats = scraped(collector), cache.stats()
    assert value(found, "kvpagoda_kv_block_lifetime_seconds_count") == stats.evicted_blocks > 0
    assert value(found, "kvpagoda_kv_block_idle_before_evict_seconds_count") == stats.evicted_blocks
    assert value(found, "kvpagoda_kv_block_reuse_gap_seconds_count") > 0
    assert value(found, "kvpagoda_hit_tokens_count") == stats.opened == 10
    assert value(found, "kvpagoda_hit_tokens_sum") == stats.cached_tokens > 0
    misses = sum(1 for _ in range(10)) - sum(stats.hit_tokens.counts[1:])
    assert value(found, "kvpagoda_hit_tokens_bucket", le="0") == misses == stats.hit_tokens.counts[0]
    assert value(found, "vllm:request_queue_time_seconds_count") == 2
    assert 0 <= value(found, "vllm:request_queue_time_seconds_sum") < 5


def test_no_sample_follows_nothing() -> None:
    cache = made()
    found = scraped(CacheCollector(cache, sample=0))
    assert cache.core.residency is None and not [name for name, _ in found if "kv_block_" in name]
    with raises(BadInput, field="sample", needed=-1, available=0):
        CacheCollector(cache, sample=-1)


def test_what_is_no_cache_is_refused() -> None:
    with raises(BadInput, needed=[]):
        CacheCollector()
    with raises(BadInput, needed=["cache"]):
        CacheCollector("cache")  # type: ignore[arg-type]


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("prometheus_client", "prometheus_client.core", "prometheus_client.parser"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("prometheus", "top"):
        monkeypatch.delitem(sys.modules, f"kvpagoda.metrics.{name}", raising=False)
        with raises(MissingExtra, name="prometheus_client"):
            __import__(f"kvpagoda.metrics.{name}")


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: make consumers, or Debian's package prometheus"
)
def test_promtool_finds_fault_with_names_of_vllm_alone() -> None:
    """Its check is about names, help and units; colons are for rules, says it, and vLLM has them in its names."""
    cache = made(tiers=[host_tier("1MiB")])
    queue = RunQueue(cache, Youngest())
    for first in range(8):
        serve(cache, [first % 3, *range(40)], "ab"[first % 2])
    for prefix, faults in (("vllm:", r"vllm:\w+ metric names should not contain ':'"), ("vllm_", "none at all")):
        registry = CollectorRegistry()
        registry.register(CacheCollector(queue, model_name="m", vllm=prefix))
        text = generate_latest(registry)
        assert len(re.findall(r"^# TYPE kvpagoda_", text.decode(), re.MULTILINE)) > 30
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        said = (done.stdout + done.stderr).decode().splitlines()
        assert not [line for line in said if not re.fullmatch(faults, line)], said
        assert bool(said) == (prefix == "vllm:")


# -- the dashboard -------------------------------------------------------------------------------------------------------

NAME = r"(?:vllm:|kvpagoda_)[a-z_]+"
WORDS = {"sum", "rate", "by", "on", "topk", "histogram_quantile", "label_values"}


def expressions() -> list[tuple[str, str]]:
    """(expression, legend) of every query, those of variables included."""
    board = json.loads(dashboard())
    found = [(target["expr"], target["legendFormat"]) for panel in board["panels"] for target in panel["targets"]]
    return found + [(one["query"]["query"], "") for one in board["templating"]["list"] if one["type"] == "query"]


@pytest.mark.parametrize(("expression", "legend"), expressions())
def test_each_query_of_the_dashboard_names_what_is_served(expression: str, legend: str) -> None:
    series = {name: metric for metric in METRICS for name in metric.series}
    metrics = re.findall(NAME, expression)
    assert metrics and set(metrics) <= series.keys()
    labels = {*COMMON, *set.intersection(*({*series[name].labels} for name in metrics))}
    if all(name.endswith("_bucket") for name in metrics):
        labels.add("le")
    grouped = [label for some in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in some.split(", ")]
    selected = re.findall(r"(\w+)(?:=|!=|=~|!~)\"", expression)
    shown = re.findall(r"{{(\w+)}}", legend)
    assert {*grouped, *selected} <= labels and {*shown} <= {*grouped}
    variables = {one["name"] for one in json.loads(dashboard())["templating"]["list"]} | {"__rate_interval"}
    assert {*re.findall(r"\$(\w+)", expression)} <= variables
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\([a-z_, ]*\)(?= \()|" + NAME + r"|on \([^)]*\)", " ", expression)
    assert {*re.findall(r"[a-z_]{2,}", bare)} <= WORDS | {*labels}
    for counter in re.findall(NAME + r"_(?:total|bucket)", expression):
        assert re.search(rf"rate\({counter}{{", expression), "a counter is shown as a rate"


def test_panels_do_not_overlap_and_every_metric_of_trouble_is_shown() -> None:
    board = json.loads(dashboard())
    cells = Counter(
        (column, row)
        for at in (panel["gridPos"] for panel in board["panels"])
        for column in range(at["x"], at["x"] + at["w"])
        for row in range(at["y"], at["y"] + at["h"])
    )
    assert max(cells.values()) == 1 and max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    shown = " ".join(expression for expression, _ in expressions())
    for name in (
        "short_hit_tokens",
        "tier_outcomes",
        "tier_available",
        "checkpoints_passed",
        "num_preemptions",
        "kv_block_lifetime",
        "kv_block_idle_before_evict",
        "kv_block_reuse_gap",
        "hit_tokens",
    ):
        assert name in shown
