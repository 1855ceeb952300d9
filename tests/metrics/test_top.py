"""``kvpagoda top``: from a file and from an address, in every width."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("rich")

from unittest.mock import ANY

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from rich.console import Console

from json_schema import schema_of, violations
from kvpagoda import BadInput, KVCache, Schema
from kvpagoda.metrics import CacheCollector
from kvpagoda.metrics.top import Figures, figures, read, run, view
from kvpagoda.scheduling import RunQueue
from kvpagoda.tiers import host_tier
from raises import raises

GEMMA = Schema.from_hf_config(
    dict(
        model_type="gemma3_text", vocab_size=1000, hidden_size=48, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, max_position_embeddings=4096, sliding_window=8,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    dtype="float32",
)  # fmt: skip


def served(**settings: object) -> KVCache:
    cache = KVCache(GEMMA, "256KiB", device="none", max_requests=3, block_size=4, **settings)  # type: ignore[arg-type]
    for first in range(20):
        tokens = [first % 7, *range(60 + first)]
        with cache.open(tokens, f"tenant {first % 2}") as sequence:
            sequence.commit(tokens[sequence.length :])
    return cache


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    registry, caches = CollectorRegistry(), [served(tiers=[host_tier("1MiB")]), served()]
    caches[0].open([1, 2, 3])
    caches[0].flush()
    registry.register(CacheCollector(RunQueue(caches[0]), caches[1], model_name="gemma"))
    registry.stats = [cache.stats() for cache in caches]  # type: ignore[attr-defined]
    return registry


@pytest.fixture(scope="module")
def file(registry: CollectorRegistry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("top") / "metrics.prom"
    path.write_bytes(generate_latest(registry))
    return path


def test_figures_are_the_sums_of_the_caches(registry: CollectorRegistry, file: Path) -> None:
    found, all_stats = read(str(file)), registry.stats  # type: ignore[attr-defined]
    assert found.engines == 2 and found.running == 1 and found.waiting == 0 and found.requests_max == 6
    for name in ("prompt_tokens", "cached_tokens", "loaded_tokens", "computed_tokens", "checkpoints", "nbytes"):
        assert getattr(found, name) == sum(getattr(stats, name) for stats in all_stats), name
    assert found.usage == pytest.approx(sum(one.usage * one.nbytes for one in all_stats) / found.nbytes)
    for number, group in enumerate(found.groups):
        of_all = [stats.groups[number] for stats in all_stats]
        assert group.blocks == {state: sum(getattr(one, state) for one in of_all) for state in group.blocks}
        assert (group.name, group.evicted) == (of_all[0].name, sum(one.evicted for one in of_all))
    (tier,) = all_stats[0].tiers
    for told, call in zip(found.tiers, sorted(tier.calls, key=lambda one: one.call)):
        assert (told.call, told.ok, told.nbytes) == (call.call, call.outcomes.get("ok", 0), call.nbytes)
        assert told.median == pytest.approx(call.seconds.quantile(0.5))
        assert told.slowest == pytest.approx(call.seconds.quantile(0.99))


@pytest.mark.parametrize("width", [40, 80, 160])
def test_it_fits_every_terminal(file: Path, width: int) -> None:
    found = read(str(file))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(view(found, (1e6, 1e6), width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in out.getvalue()
    for what in ("running", "memory", "hits", "full", "window(8)", "host", "lookup", "saved"):
        assert any(what in line for line in lines), what
    assert ("evicted" in out.getvalue()) == (width > 70)
    group = next(line for line in lines if line.startswith("full"))
    assert f" {found.groups[0].blocks['private']:,}" in group


def test_an_address_and_a_file_say_the_same(registry: CollectorRegistry, file: Path) -> None:
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        at = f"127.0.0.1:{server.server_port}"
        for source in (at, f"http://{at}", f"http://{at}/metrics"):
            assert read(source).groups == read(str(file)).groups
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    for source in (at, "http://127.0.0.1:99999/metrics", "http://[/metrics"):
        with raises(BadInput, needed=ANY):
            read(source)


def test_names_before_which_something_else_stands() -> None:
    """Where vLLM itself is in the same registry, its figures are not ours."""
    cache, registry = KVCache(GEMMA, "256KiB", device="none", max_requests=3), CollectorRegistry()
    cache.open([1, 2])
    registry.register(CacheCollector(cache, vllm="cache:"))
    text = generate_latest(registry).decode() + "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n"
    assert figures(text, vllm="cache:").running == 1 and figures(text, vllm="cache:").engines == 1


def test_json_is_as_described(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([str(file)], 2.0, once=True, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert violations(printed, schema_of("top")) == [] and printed["groups"][0]["blocks"]["free"] >= 0


def test_it_goes_on_until_it_is_stopped(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that fails is left out, the rate of the next is shown, and Ctrl-C ends it."""
    from kvpagoda.metrics import top

    looks = [read, read, lambda _: read("/nowhere"), read, lambda _: (_ for _ in ()).throw(KeyboardInterrupt)]
    monkeypatch.setattr(top, "read", lambda source, vllm: looks.pop(0)(source))
    with pytest.raises(KeyboardInterrupt):
        run([str(file)], 0.1, once=False, as_json=False)
    assert not looks and "0/s computed" in capsys.readouterr().out


def test_what_is_no_source_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no metrics { here\n")
    (tmp_path / "other").write_text("# TYPE up gauge\nup 1\n")
    for source, of_error in (
        (str(tmp_path / "text"), {"needed": "metrics", "available": ANY}),
        (str(tmp_path / "other"), {"needed": "kvpagoda_cache_bytes", "available": ANY}),
        ("ftp://somewhere/metrics", {"needed": "ftp://somewhere/metrics"}),
    ):  # fmt: skip
        with raises(BadInput, **of_error):
            read(source)
    with pytest.raises(FileNotFoundError):
        read(str(tmp_path / "nothing"))
    with raises(BadInput, needed=0.0, available=0.1):
        run(["x"], 0.0, once=True, as_json=False)


@pytest.fixture
def sources(file: Path) -> list[str]:
    """Return two sources, the second with one running request less, and one that is not there."""
    other = file.with_name("other.prom")
    text = file.read_text()
    line = next(
        line for line in text.splitlines() if line.startswith("vllm:num_requests_running") and line.endswith("1.0")
    )
    other.write_text(text.replace(line, line.replace("1.0", "0.0")))
    return [str(file), str(other), str(file.with_name("nowhere.prom"))]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_several_engines_have_a_line_each(
    sources: list[str], width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(sources[0]).parent)
    monkeypatch.setenv("COLUMNS", str(width))
    names = [Path(source).name for source in sources]
    run([*names, names[0]], 2.0, once=True, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    engines = [line.split() for line in lines if " of 6 " in line]
    assert [line[:4] for line in engines] == [[names[0], "1", "of", "6"], [names[1], "0", "of", "6"]], "each once"
    groups = [line.split()[:2] for line in lines if " full " in line or " window(8) " in line]
    assert groups == [[name, group] for name in names[:2] for group in ("full", "window(8)")]
    assert any(line.startswith(f"{names[2]} (failing)  ") for line in lines)
    assert sum(line.startswith(f"{names[2]}: ") and "No such file" in " ".join(lines) for line in lines) == 1
    assert ("private" in lines[lines.index("") + 6] or width < 100) and "█ private" in lines[-3] + lines[-2] + lines[-1]


def test_json_of_several_engines_is_as_described(sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(sources, 2.0, once=True, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert violations(printed, schema_of("top_sources")) == []
    assert [one["source"] for one in printed["sources"]] == sources
    assert [one["figures"] and one["figures"]["running"] for one in printed["sources"]] == [1, 0, None]
    figures = {key: value for key, value in schema_of("top").items() if key not in ("$schema", "title")}
    many = schema_of("top_sources")["properties"]["sources"]["items"]["properties"]
    assert many["figures"]["anyOf"] == [{"type": "null"}, figures]
    with pytest.raises(FileNotFoundError):
        run(sources[2:] * 2, 2.0, once=True, as_json=True)


def test_an_engine_that_stops_answering_keeps_its_last_figures(
    sources: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpagoda.metrics import top

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            Path(sources[1]).unlink()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        run(sources[:2], 3.0, once=False, as_json=True)
    before, after = (json.loads(line)["sources"] for line in capsys.readouterr().out.splitlines())
    assert slept == [3.0, 3.0] and after[1]["figures"] == before[1]["figures"]
    assert [one["error"] is None for one in (*before, *after)] == [True, True, True, False]


def test_a_cache_without_traffic_has_no_rates() -> None:
    cache, registry = KVCache(GEMMA, "256KiB", device="none", max_requests=3), CollectorRegistry()
    registry.register(CacheCollector(cache))
    found: Figures = figures(generate_latest(registry).decode())
    assert found.hit_rate == 0.0 and found.tiers == () and found.waiting is None
