"""KvpagodaConnector in the whole engine of the installed vLLM, on a CPU: what it finds, and that no fault changes a token.

Run it where vLLM is: ``.venv-vllm/bin/python -m pytest tests/adapters/test_vllm_connector.py -q``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

if find_spec("vllm") is None:
    pytest.skip("no vLLM here; make vllm installs it", allow_module_level=True)

import tiny_vllm
from servers import Server, ask, has_redis, mooncake_server, redis_server, why_no_mooncake
from tiny_vllm import BLOCK, Engine, Run

from kvpagoda.errors import BadInput
from raises import raises

pytestmark = pytest.mark.filterwarnings("ignore")
needs_redis = pytest.mark.skipif(not has_redis(), reason="no redis-server: apt-get install redis-server")
HYBRIDS = ("gemma3_text", "gpt_oss", "qwen3_next")
Models = Callable[..., str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A function that returns the folder of a model: its kind, a seed, changes of its config."""
    root = tmp_path_factory.mktemp("models")
    return lambda kind, seed=0, **changes: tiny_vllm.save(root, kind, seed, **changes)


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 500, length).tolist()
    return tokens


@cache
def prompts_of(kind: str) -> tuple[tuple[int, ...], ...]:
    """Prompts of several blocks; the last one begins as the first does."""
    length = {"qwen3_next": 2600}.get(kind, 900)
    made = [text(seed, length) for seed in range(3)]
    made.append(made[0][: length // 2] + text(9, length // 2))
    return tuple(map(tuple, made))


_PLAIN: dict[str, Run] = {}


def plain(models: Models, kind: str) -> Run:
    """What the model answers without the connector."""
    if kind not in _PLAIN:
        with Engine(models(kind)) as engine:
            _PLAIN[kind] = engine.run(prompts_of(kind))
    return _PLAIN[kind]


def disk(folder: Path, size: str = "256MiB", **settings: Any) -> list[dict[str, Any]]:
    return [{"tier": f"disk:{folder}:{size}", **settings}]


def filled(models: Models, kind: str, folder: Path) -> list[dict[str, Any]]:
    """The tiers of a folder in which one engine has stored the prompts."""
    expected = plain(models, kind).tokens
    with Engine(models(kind), disk(folder)) as engine:
        assert engine.run(prompts_of(kind)).tokens == expected
    return disk(folder)


# -- what is found -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", *HYBRIDS])
def test_an_engine_that_is_started_again_finds_its_prompts_on_the_disk(
    kind: str, models: Models, tmp_path: Path
) -> None:
    tiers = filled(models, kind, tmp_path)
    with Engine(models(kind), tiers) as engine:
        again = engine.run(prompts_of(kind))
        assert again.tokens == plain(models, kind).tokens
        whole = (len(prompts_of(kind)[0]) - 1) // BLOCK[kind] * BLOCK[kind]
        assert again.cached == [whole] * 4
        assert engine.tier.loaded_tokens == 4 * whole and not engine.tier.failed and not engine.tier.dropped
        stored = engine.tier.num_records
        more = engine.run([prompt + tuple(text(7, 300)) for prompt in prompts_of(kind)])  # goes on where it ended
        assert min(more.cached) >= whole
        assert engine.tier.num_records > stored or kind == "qwen3_next", "whose blocks are longer"


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_it_serves_our_scheduler_too(kind: str, models: Models, tmp_path: Path) -> None:
    name = "kvpagoda.adapters.vllm.Scheduler"
    tiers, prompts = filled(models, kind, tmp_path), prompts_of(kind)
    with Engine(models(kind), tiers, scheduler_cls=name) as engine:
        from kvpagoda.adapters.vllm import KVCacheManager

        manager = engine.core.scheduler.kv_cache_manager
        assert type(engine.core.scheduler).__module__ == "kvpagoda.adapters.vllm.scheduler"
        assert isinstance(manager, KVCacheManager)
        again = engine.run(prompts)
        assert again.tokens == plain(models, kind).tokens
        assert again.cached == [(len(prompts[0]) - 1) // BLOCK[kind] * BLOCK[kind]] * 4
        manager.check()
        assert engine.run([prompt + tuple(text(7, 300)) for prompt in prompts]).cached >= again.cached
        manager.check()


def test_the_loaded_bytes_are_what_the_answers_come_from(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpagoda.pools import BlockRows

    tiers = filled(models, "llama", tmp_path)
    monkeypatch.setattr(BlockRows, "from_records", lambda *_: None)
    with Engine(models("llama"), tiers) as engine:
        found = engine.run(prompts_of("llama"))
    assert found.cached[0] and found.tokens != plain(models, "llama").tokens


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_layers_are_copied_when_they_are_waited_for(
    kind: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpagoda.adapters.connector.worker import WorkerSide

    tiers, copied = filled(models, kind, tmp_path), list[str]()
    original = WorkerSide._copy_layer

    def copy(self: Any, load: Any, found: Any, name: str) -> None:
        copied.append(name)
        original(self, load, found, name)

    monkeypatch.setattr(WorkerSide, "_copy_layer", copy)
    with Engine(models(kind), tiers, options={"load": "layerwise"}) as engine:
        again = engine.run(prompts_of(kind)[:1])
        assert again.tokens == plain(models, kind).tokens[:1] and again.cached == [896]
        assert copied == list(dict.fromkeys(copied)) and [*copied] == sorted(copied), "each layer once, in its order"
        assert len(copied) == tiny_vllm.MODELS[kind]["num_hidden_layers"]
        assert engine.run(prompts_of(kind)).tokens == plain(models, kind).tokens


def test_a_window_is_kept_at_checkpoints_and_at_the_end_of_prompts(models: Models, tmp_path: Path) -> None:
    first, other = text(0, 1500), text(0, 1500)[:1100] + text(5, 300)
    with Engine(models("gemma3_text")) as engine:
        expected = engine.run([other])
    for every, found in ((512, 1024), (0, 0), (128, 1024)):
        folder = tmp_path / str(every)
        with Engine(models("gemma3_text"), disk(folder), options={"checkpoint_tokens": every}) as engine:
            engine.run([first])
            sizes = engine.tier.num_records
        with Engine(models("gemma3_text"), disk(folder), options={"checkpoint_tokens": every}) as engine:
            again = engine.run([other])
            assert again.tokens == expected.tokens and again.cached == [found], (every, sizes)


def test_a_state_is_found_where_a_step_ended(models: Models, tmp_path: Path) -> None:
    size = BLOCK["qwen3_next"]
    first, other = text(0, 3 * size + 100), text(0, 3 * size + 100)[: 2 * size + 50] + text(5, 700)
    with Engine(models("qwen3_next"), batched=size) as engine:
        expected = engine.run([other])
    with Engine(models("qwen3_next"), disk(tmp_path), batched=size) as engine:
        engine.run([first])
    with Engine(models("qwen3_next"), disk(tmp_path), batched=size) as engine:
        again = engine.run([other])
        assert again.tokens == expected.tokens and again.cached == [2 * size]


def test_requests_with_the_same_beginning_share_one_load(models: Models, tmp_path: Path) -> None:
    tiers = filled(models, "llama", tmp_path)
    same = [prompts_of("llama")[0]] * 4
    with Engine(models("llama"), tiers) as engine:
        again = engine.run(same)
        assert again.tokens == plain(models, "llama").tokens[:1] * 4
        assert engine.tier.loaded_tokens == again.cached[0] and len({*again.cached}) == 1


def test_host_memory_is_asked_before_the_disk(models: Models, tmp_path: Path) -> None:
    tiers = filled(models, "llama", tmp_path)
    with Engine(models("llama"), ["host:64MiB", *tiers]) as engine:
        for _ in range(2):
            assert engine.run(prompts_of("llama")).tokens == plain(models, "llama").tokens
            assert engine.llm.reset_prefix_cache()
        host, file = engine.connector.tier_stats()
        assert host.name == "host" and host.loaded_tokens == file.loaded_tokens > 0


def test_tenants_and_weights_share_nothing(models: Models, tmp_path: Path) -> None:
    one, prompts = models("llama"), prompts_of("llama")[:2]
    with Engine(one, disk(tmp_path)) as engine:
        engine.run(prompts, salt="a")
    with Engine(one, disk(tmp_path)) as engine:
        assert engine.run(prompts, salt="b").cached == [0, 0] and engine.run(prompts).cached == [0, 0]
        assert min(engine.run(prompts, salt="a").cached) > 0
    with Engine(one, disk(tmp_path)) as engine:
        engine.run(prompts)
    for other in (models("llama", 1), models("llama", 0, rope_theta=5e5), models("llama", 0, num_key_value_heads=4)):
        with Engine(other) as engine:
            expected = engine.run(prompts)
        with Engine(other, disk(tmp_path)) as engine:
            found = engine.run(prompts)
            assert found == expected and engine.tier.loaded == 0
    with Engine(one, disk(tmp_path)) as engine:
        assert engine.core.scheduler.reset_prefix_cache(reset_connector=True)
        assert engine.run(prompts).cached == [0, 0], "after a reset nothing that was stored before is found"


# -- faults ------------------------------------------------------------------------------------------------------------


def flip(folder: Path, share: float) -> int:
    """Flip a bit in the payload of ``share`` of the records in ``folder``; return how many."""
    path = folder / "records.slab"
    data = np.fromfile(path, np.uint8)
    slot = int.from_bytes(data[16:24].tobytes(), "little")
    starts = [at for at in range(4096, len(data) - slot + 1, slot) if data[at : at + 8].tobytes() == b"KVPAGODA"]
    chosen = starts[:: round(1 / share)]
    for at in chosen:
        data[at + 128 + 1000] ^= 1
    data.tofile(path)
    return len(chosen)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_a_flipped_bit_is_a_miss(kind: str, load: str, models: Models, tmp_path: Path) -> None:
    tiers = filled(models, kind, tmp_path)
    assert flip(tmp_path, 0.34) > 2
    with Engine(models(kind), tiers, options={"load": load}) as engine:
        for _ in range(2):
            assert engine.run(prompts_of(kind)).tokens == plain(models, kind).tokens
            assert engine.llm.reset_prefix_cache()
        assert engine.tier.failed > 0


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_disk_that_hangs_or_fails_is_a_miss(
    kind: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpagoda.tiers.disk import SlabFile

    filled(models, kind, tmp_path)
    read = SlabFile.read

    def hang(self: Any, slot: int, row: int) -> bool:
        sleep(0.4 if slot % 3 == 1 else 0)
        return read(self, slot, row)

    def fail(self: Any, slot: int, row: int) -> bool:
        if slot % 3 == 1:
            raise OSError(5, "input/output error")
        return read(self, slot, row)

    for fault in (hang, fail):
        monkeypatch.setattr(SlabFile, "read", fault)
        with Engine(models(kind), disk(tmp_path, timeout=0.2)) as engine:
            began = monotonic()
            assert engine.run(prompts_of(kind)).tokens == plain(models, kind).tokens
            assert engine.tier.failed and monotonic() - began < 20


def test_a_disk_that_is_full_stores_less_and_nothing_else(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpagoda.tiers.disk import SlabFile

    expected = plain(models, "llama").tokens
    with Engine(models("llama"), disk(tmp_path / "small", "1MiB")) as engine:  # seven records
        assert engine.run(prompts_of("llama")).tokens == expected
    with Engine(models("llama"), disk(tmp_path / "small", "1MiB")) as engine:
        again = engine.run(prompts_of("llama"))
        assert again.tokens == expected and 0 < sum(again.cached) < sum([896] * 4)
        assert engine.tier.nbytes <= 1 << 20

    def full(self: Any, slot: int, row: int) -> bool:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(SlabFile, "write", full)
    with Engine(models("llama"), disk(tmp_path / "full")) as engine:
        assert engine.run(prompts_of("llama")).tokens == expected
        assert engine.tier.failed and not engine.tier.num_records
    with pytest.raises(BadInput):  # before vLLM serves
        Engine(models("llama"), [f"disk:{tmp_path}/none:900TiB"])


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_little_memory_everywhere(kind: str, models: Models, tmp_path: Path) -> None:
    """Requests are preempted, and two staging records serve all of them."""
    staging = {"llama": "560KiB", "gemma3_text": "280KiB"}[kind]
    many = [*prompts_of(kind), *[text(seed, 400) for seed in range(20, 26)]]
    with Engine(models(kind)) as engine:
        expected = engine.run(many, 40)
    for _ in range(2):
        with Engine(
            models(kind), disk(tmp_path, staging=staging), blocks=26 if kind == "llama" else 60, max_model_len=1024
        ) as engine:
            assert engine.run(many, 40).tokens == expected.tokens
            assert engine.run(many, 40).tokens == expected.tokens
            manager = engine.core.scheduler.kv_cache_manager
            engine.llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
            assert manager.usage < 0.2, "all blocks are given back"
            for level in engine.connector._worker.levels:
                level.check()


def test_requests_that_are_aborted_while_they_are_loaded(models: Models, tmp_path: Path) -> None:
    from vllm import SamplingParams

    tiers = filled(models, "llama", tmp_path)
    with Engine(models("llama"), tiers) as engine:
        front = engine.llm.llm_engine
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
        for steps in range(4):
            for number, prompt in enumerate(prompts_of("llama")):
                front.add_request(f"{steps}-{number}", {"prompt_token_ids": [*prompt]}, greedy)
            for _ in range(steps):
                front.step()
            front.abort_request([f"{steps}-{number}" for number in range(4)])
            while front.has_unfinished_requests():
                front.step()
        assert engine.run(prompts_of("llama")).tokens == plain(models, "llama").tokens
        for level in engine.connector._worker.levels:
            level.settle(monotonic() + 5)
            level.check()


@needs_redis
def test_a_server_that_is_killed_in_the_middle_is_a_miss(models: Models, tmp_path: Path) -> None:
    prompts, expected = prompts_of("gemma3_text"), plain(models, "gemma3_text").tokens
    with redis_server(tmp_path, memory="256mb") as server:
        tiers = [{"tier": f"redis://127.0.0.1:{port_of(server)}", "timeout": 0.5}]
        options = {"record_nbytes": "100KiB"}
        with Engine(models("gemma3_text"), tiers, options=options) as engine:
            assert engine.run(prompts).tokens == expected
        with Engine(models("gemma3_text"), tiers, options=options) as engine:
            again = engine.run(prompts[:2])
            assert again.tokens == expected[:2] and min(again.cached) > 0
            server.kill()
            assert engine.run(prompts).tokens == expected
            assert engine.llm.reset_prefix_cache()
            assert engine.run(prompts).tokens == expected
            assert engine.tier.failed


@pytest.mark.skipif(bool(why_no_mooncake()), reason=why_no_mooncake())
def test_mooncake_store_well_and_killed(models: Models, tmp_path: Path) -> None:
    prompts, expected = prompts_of("gemma3_text"), plain(models, "gemma3_text").tokens
    with mooncake_server(tmp_path, "256MiB") as server:
        for cached in ([0] * 4, [896] * 4, [0] * 4):
            with Engine(models("gemma3_text"), [server.address], options={"record_nbytes": 1}) as engine:
                again = engine.run(prompts)
                assert again.tokens == expected and again.cached == cached
                if cached[0]:
                    assert engine.tier.loaded
                    server.kill()


def port_of(server: Server) -> int:
    return int(ask(server.folder / "socket", "CONFIG", "GET", "port", lines=5).split(b"\r\n")[4])


@contextmanager
def process(folder: str, **options: Any) -> Iterator[Callable[..., Run]]:
    """An engine in a process of its own; yields what ``Engine.run`` is there."""
    words = [sys.executable, tiny_vllm.__file__, folder, json.dumps(options)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None and started.stdout is not None

        def told() -> Any:
            assert started.stdout is not None
            for line in started.stdout:
                if line.startswith(("[", '"')):
                    return json.loads(line)
            raise AssertionError(f"the engine ended with {started.wait()}")

        def run(prompts: Any, **more: Any) -> Run:
            assert started.stdin is not None
            started.stdin.write(json.dumps({"prompts": prompts, **more}) + "\n")
            started.stdin.flush()
            return Run(*told())

        try:
            assert told() == "ready"
            yield run
        finally:
            started.stdin.close()
            started.wait(30)


@needs_redis
def test_two_engines_share_by_redis(models: Models, tmp_path: Path) -> None:
    prompts, expected = prompts_of("llama"), plain(models, "llama").tokens
    with redis_server(tmp_path, memory="256mb") as server:
        shared = {"tiers": [f"redis://127.0.0.1:{port_of(server)}"], "options": {"record_nbytes": 1}}
        with process(models("llama"), **shared) as first, process(models("llama"), **shared) as second:
            assert first(prompts[:2]) == Run(expected[:2], [0, 0])
            again = second(prompts)
            assert again.tokens == expected and again.cached[:2] == [896, 896]
            back = first(prompts)
            assert back.tokens == expected and min(back.cached) > 0


def test_two_engines_on_one_folder(models: Models, tmp_path: Path) -> None:
    with Engine(models("llama"), disk(tmp_path)):
        from kvpagoda.tiers import RecordBuffer, disk_driver

        with pytest.raises(BadInput):
            disk_driver(tmp_path, RecordBuffer(1, 1000), "64MiB")
        words = [sys.executable, tiny_vllm.__file__, models("llama"), json.dumps({"tiers": disk(tmp_path)})]
        second = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert second.returncode and "ready" not in second.stdout
    assert f"no disk tier of 256.0 MiB in {tmp_path}" in second.stderr
    assert "give it a folder that no other process uses" in second.stderr


# -- options and figures -----------------------------------------------------------------------------------------------


def test_a_wrong_option_is_an_error_before_vllm_serves(models: Models, tmp_path: Path) -> None:
    wrong: list[tuple[list[Any], dict[str, Any], dict[str, Any]]] = [
        (["host:64MiB"], {"teirs": []}, {"needed": "teirs", "available": ANY}),
        ([], {}, {"field": "tiers", "needed": 1, "available": 0}),
        (["dsk:/tmp:1GiB"], {}, {"needed": ANY, "available": ANY}),
        (["host:64MiB"], {"load": "lazy"}, {"needed": "lazy", "available": ANY}),
    ]
    for tiers, options, told in wrong:
        with raises(BadInput, **told):
            Engine(models("llama"), tiers, options=options)


def test_a_version_that_is_not_supported_says_what_to_do() -> None:
    from kvpagoda.adapters.vllm.options import check_version

    check_version("0.32.0", "--kv-transfer-config")
    check_version("0.33.1rc2", "--kv-transfer-config")
    with raises(BadInput, needed=("0.32", "0.33"), available="0.40.1"):
        check_version("0.40.1", "--kv-transfer-config")


def test_figures_for_vllms_log_and_for_prometheus(models: Models, tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvpagoda.adapters.vllm_connector import KvpagodaConnector

    with Engine(models("llama"), disk(tmp_path), disable_log_stats=False) as engine:
        engine.run(prompts_of("llama")[:1])
        engine.connector._worker.levels[0].settle(monotonic() + 5)
        last = engine.connector.get_kv_connector_stats()
        total = engine.connector.build_kv_connector_stats({"disk": {"stored": 1.0, "num_records": 3.0}})
        assert not total.is_empty() and engine.connector.get_kv_connector_stats() is None
        total = total if last is None else total.aggregate(last)
        assert total.reduce()["disk.num_records"] in (3, 7) and total.reduce()["disk.stored"] <= 8
        config = engine.llm.llm_engine.vllm_config
    registry, types = CollectorRegistry(), (Counter, Gauge, Histogram)
    kinds = {kind: partial(kind, registry=registry) for kind in types}
    metrics = KvpagodaConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["tiny", "0"]})
    metrics.observe({"disk": {"stored": 5.0, "nbytes": 70.0}}, 0)
    metrics.observe({"disk": {"stored": 2.0, "nbytes": 60.0}}, 0)
    named = {"model_name": "tiny", "engine": "0", "tier": "disk"}
    assert registry.get_sample_value("vllm:kvpagoda_tier_stored_total", named) == 7
    assert registry.get_sample_value("vllm:kvpagoda_tier_nbytes", named) == 60
