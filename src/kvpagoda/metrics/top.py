"""The figures that ``kvpagoda top`` shows, read from a metrics address or from a file with the same text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPException
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.metrics.names import METRICS, STATES, VLLM
from kvpagoda.tiers.latency import Histogram

with MissingExtra.unless("prometheus_client", "'top' needs prometheus_client; pip install 'kvpagoda[metrics]'"):
    from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT = 5.0  # seconds
_SERIES = frozenset(name for metric in METRICS for name in metric.series)


@dataclass(frozen=True)
class GroupFigures:
    """One group: its blocks by state (``STATES``), bytes of a block, blocks evicted so far, prompt tokens that it had
    cached."""

    name: str
    blocks: dict[str, int]
    block_nbytes: int
    evicted: int
    found_tokens: int


@dataclass(frozen=True)
class TierFigures:
    """One kind of call to a tier: records asked for, records that succeeded, bytes, and the median and the 99 %
    quantile of the seconds of a call (None without any call)."""

    level: int
    name: str
    call: str
    is_available: bool
    records: int
    ok: int
    nbytes: int
    median: float | None
    slowest: float | None


@dataclass(frozen=True)
class Figures:
    """The figures of all caches of a source at one moment; tokens and requests are counted since the caches were made.
    ``waiting`` and ``preempted`` are None if no queue is known."""

    engines: int
    running: int
    requests_max: int
    suspended: int
    waiting: int | None
    preempted: int | None
    nbytes: int
    usage: float
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    computed_tokens: int
    checkpoints: int
    pins: int
    groups: tuple[GroupFigures, ...]
    short_hits: dict[str, tuple[int, int]]
    """Reason -> requests, tokens."""
    namespaces: dict[str, tuple[int, int, int]]
    """Namespace -> requests, prompt tokens, saved ones."""
    tiers: tuple[TierFigures, ...]

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were cached, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the hit rate as plain data."""
        short = {reason: {"requests": n, "tokens": tokens} for reason, (n, tokens) in self.short_hits.items()}
        names = {
            name: {"requests": n, "prompt_tokens": prompt, "cached_tokens": cached}
            for name, (n, prompt, cached) in self.namespaces.items()
        }
        return {**asdict(self), "short_hits": short, "namespaces": names, "hit_rate": self.hit_rate}


class _Samples:
    """Samples by metric name. Reading them adds up over the engines and over all labels that the reader does not
    name."""

    def __init__(self, text: str, vllm: str) -> None:
        self._of: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name
                if name.startswith(vllm):
                    name = VLLM + name.removeprefix(vllm)
                elif name.startswith(VLLM):  # a metric of vLLM itself
                    continue
                if name in _SERIES:
                    self._of[name].append((sample.labels, sample.value))

    def by(self, name: str, *labels: str, of: Callable[[Iterable[float]], float] = sum) -> dict[tuple[str, ...], float]:
        """Return the values of ``name`` by the values of ``labels``; ``of`` combines samples with the same label
        values."""
        found: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for own, value in self._of[name]:
            found[tuple(own.get(label, "") for label in labels)].append(value)
        return {key: of(values) for key, values in found.items()}

    def total(self, name: str) -> int:
        """Return the sum of all samples of ``name``; 0 if there are none."""
        return int(self.by(name).get((), 0))

    def some(self, name: str) -> int | None:
        """Return ``total(name)``, or None if there are no samples."""
        return self.total(name) if self._of[name] else None

    def histogram(self, name: str, labels: Mapping[str, str]) -> Histogram:
        """Return the sum of the histograms ``name`` that have ``labels``."""
        below: dict[float, float] = defaultdict(float)
        for own, value in self._of[f"{name}_bucket"]:
            if labels.items() <= own.items():
                below[float(own["le"])] += value
        ends = sorted(below)
        counts = (int(after - before) for before, after in pairwise([0.0, *(below[end] for end in ends)]))
        return Histogram(tuple(end for end in ends if end < inf), tuple(counts), 0.0)


def read(source: str, vllm: str = VLLM) -> Figures:
    """Return the figures at ``source``: an http address (``host:port`` is enough), or a file. ``vllm``: see
    ``CacheCollector``. Raises BadInput, and OSError for a file that cannot be read."""
    address = source
    if "://" not in source and not Path(source).exists() and ":" in source:
        address = f"http://{source}"
    if "://" not in address:
        return figures(Path(source).read_text(), source, vllm)
    if not address.startswith(("http://", "https://")):
        raise BadInput(f"{source!r} is neither an http address of metrics, such as localhost:9100, nor a file")
    if address.count("/") < 3:
        address += "/metrics"
    try:
        with urlopen(address, timeout=_TIMEOUT) as answer:
            text = answer.read().decode()
    except (HTTPException, OSError, OverflowError, ValueError) as error:
        raise BadInput(f"{address} gives no metrics: {getattr(error, 'reason', error)}") from None
    return figures(text, source, vllm)


def figures(text: str, source: str = "the text", vllm: str = VLLM) -> Figures:
    """Parse ``text``, metrics in the text form of Prometheus. ``source`` names it in errors. Raises BadInput for other
    text."""
    try:
        samples = _Samples(text, vllm)
    except (ValueError, KeyError, IndexError):
        raise BadInput(f"{source} does not hold metrics in the text form of Prometheus") from None
    if not samples.by("kvpagoda:cache_bytes"):
        raise BadInput(
            f"{source} has no metrics of kvpagoda: register a kvpagoda.metrics.CacheCollector where it is served"
        )
    blocks = samples.by("kvpagoda:blocks", "group", "state")
    nbytes = samples.by("kvpagoda:cache_bytes", "model_name", "engine")
    sizes = samples.by("kvpagoda:block_bytes", "group", of=max)
    evicted, found = (samples.by(f"kvpagoda:{name}_total", "group") for name in ("blocks_evicted", "found_tokens"))
    groups = tuple(
        GroupFigures(
            name, {state: int(blocks.get((name, state), 0)) for state in STATES}, int(sizes.get((name,), 0)),
            int(evicted.get((name,), 0)), int(found.get((name,), 0)),
        )
        for name in dict.fromkeys(name for name, _ in blocks)
    )  # fmt: skip
    usage = samples.by("vllm:kv_cache_usage_perc", "model_name", "engine")
    return Figures(
        engines=len(nbytes),
        running=samples.total("vllm:num_requests_running"),
        requests_max=samples.total("kvpagoda:requests_max"),
        suspended=samples.total("kvpagoda:requests_suspended"),
        waiting=samples.some("vllm:num_requests_waiting"),
        preempted=samples.some("vllm:num_preemptions_total"),
        nbytes=int(sum(nbytes.values())),
        usage=sum(usage.get(engine, 0.0) * size for engine, size in nbytes.items()) / max(1.0, sum(nbytes.values())),
        prompt_tokens=samples.total("vllm:prefix_cache_queries_total"),
        cached_tokens=samples.total("kvpagoda:cached_tokens_total"),
        loaded_tokens=samples.total("kvpagoda:loaded_tokens_total"),
        computed_tokens=samples.total("kvpagoda:computed_tokens_total"),
        checkpoints=samples.total("kvpagoda:checkpoints"),
        pins=samples.total("kvpagoda:pins"),
        groups=groups,
        short_hits=_columns(samples, "reason", "short_hits", "short_hit_tokens"),
        namespaces=_columns(samples, "namespace", "requests", "prompt_tokens", "cached_tokens"),
        tiers=_tiers(samples),
    )


def _columns(samples: _Samples, label: str, *names: str) -> dict[str, Any]:
    """Return the value of ``label`` -> the totals of the counters ``names``."""
    columns = [samples.by(f"kvpagoda:{name}_total", label) for name in names]
    return {key: tuple(int(column.get((key,), 0)) for column in columns) for (key,) in sorted(columns[0])}


def _tiers(samples: _Samples) -> tuple[TierFigures, ...]:
    keys = ("level", "tier", "call")
    records = samples.by("kvpagoda:tier_outcomes_total", *keys, "outcome")
    moved = samples.by("kvpagoda:tier_moved_bytes_total", *keys)
    available, made = samples.by("kvpagoda:tier_available", "level", "tier", of=min), list[TierFigures]()
    for level, tier, call in sorted(moved):
        mine = {outcome: int(n) for (*key, outcome), n in records.items() if key == [level, tier, call]}
        seconds = samples.histogram("kvpagoda:tier_call_seconds", dict(zip(keys, (level, tier, call))))
        made.append(
            TierFigures(
                int(level), tier, call, bool(available.get((level, tier), 0)), sum(mine.values()), mine.get("ok", 0),
                int(moved[level, tier, call]), seconds.quantile(0.5), seconds.quantile(0.99),
            )
        )  # fmt: skip
    return tuple(made)
