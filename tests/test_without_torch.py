"""What works without torch, in processes where its import fails; all the rest raises an error that asks for torch."""

import json
import subprocess
import sys

import pytest

import kvpagoda
import kvpagoda.compat
from kvpagoda.errors import KVPagodaError, MissingExtra

NEEDS_TORCH = {
    "BlockAllocator", "CacheEngine", "ClassicalView", "GDNPool", "IndexerView", "KVCacheManager", "KVPool",
    "LayerCacheHandle", "PagedKVPool", "ReqToTokenPool", "SWAView", "StateCachePool", "TokenToKVPoolAllocator",
    "append_swa", "dequantize_entries", "dequantize_swa", "make_full_attention_net_mem_pool", "make_req_to_token_pool",
}  # fmt: skip
CACHE = {"Batch", "KVCache", "LayerView", "PersistentBatch"}
"""Names of the cache, which may or may not need torch here. (With ``device="none"`` the cache works without torch.)"""
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "vocab_size": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in a process in which an import of torch fails."""
    code = f"import sys; sys.modules['torch'] = None\n{program}\nassert sys.modules['torch'] is None"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvpagoda`` in a process in which an import of torch fails."""
    pytest.importorskip("typer")
    return run("from kvpagoda.cli import main; sys.argv[0] = 'kvpagoda'; main()", *arguments)


PROGRAMS = {
    "schema and plan": f"""
from kvpagoda import Schema
schema = Schema.from_hf_config({LLAMA})
plan = schema.plan(budget="1MiB", max_requests=4)
assert "block" in str(plan)
""",
    "blocks and prefix": """
import numpy as np
from kvpagoda.core.blocks import BlockTable
from kvpagoda.free_list import FreeList
from kvpagoda.core.prefix.tree import PrefixTree
ids = FreeList(4, first=1).acquire(2)
tree = PrefixTree(block_size=2)
match = tree.match(np.arange(4, dtype=np.int32))
tree.insert(match, match.tokens, ids[None])
assert tree.match(np.arange(4, dtype=np.int32)).num_tokens == 4
""",
    "tiers": "import kvpagoda.tiers",
    "SlotAllocator": """
from kvpagoda import SlotAllocator
slots = SlotAllocator(2)
assert (slots.alloc(), slots.alloc(), slots.alloc(), slots.version(1)) == (0, 1, -1, 1)
""",
    "PrefixCacheManager": """
import numpy as np
from kvpagoda import PrefixCacheManager
cache = PrefixCacheManager(max_capacity=8)
cache.insert([1, 2, 3], slot=1, slot_ver=4)
assert cache.find([1, 2, 9]) == (2, 1, 4)
keys = np.zeros((2, 4, 1))
keys[1] = 5
cache.copy_kv([1, 2], 0, (keys, keys.copy()), 1)
assert keys[0, :2].min() == 5
cache.release([1, 2, 3])
""",
    "DeepSeek-V4": """
from kvpagoda import DSV4Config, build_schedule, build_schema, compute_block_budget
config = DSV4Config.flash()
schedule = build_schedule(config)
assert [build_schema(config, spec).entries_per_block for spec in schedule[1:4]] == [0, 32, 1]
assert compute_block_budget(config, schedule, 1000, 4)["csa"] > 0
""",
    "replay": """
from kvpagoda.replay import replay
trace = [{"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, i % 3]} for i in range(9)]
result = replay(trace, capacity_blocks=4)
assert (result.requests, result.block_refs, result.block_hits) == (9, 18, 14)
""",
    "errors": "from kvpagoda import OutOfBlocks, NeverFits, RetryLater, StaleHandle, Namespace, CacheStats, Sequence",
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_this_works_without_torch(name: str) -> None:
    done = run(PROGRAMS[name])
    assert done.returncode == 0, done.stderr


def test_every_other_public_name_says_what_it_needs() -> None:
    done = run("""
import json, kvpagoda, kvpagoda.compat
said = {}
for name in (*kvpagoda.__all__, *kvpagoda.compat.__all__):
    try:
        getattr(kvpagoda, name)
    except ImportError as error:
        assert isinstance(error, kvpagoda.MissingExtra) and error.name == "torch"
        said[name] = str(error)
print(json.dumps(said))
""")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.keys() - CACHE == NEEDS_TORCH <= {*kvpagoda.__all__, *kvpagoda.compat.__all__}
    for name, text in said.items():
        assert text == f"kvpagoda.{name} needs torch; pip install 'kvpagoda[torch]'"


def test_it_is_an_import_error_of_this_library() -> None:
    assert issubclass(MissingExtra, ImportError) and issubclass(MissingExtra, KVPagodaError)
    done = run("from kvpagoda import KVPool")
    assert done.returncode == 1 and done.stderr.strip().endswith(
        "kvpagoda.errors.MissingExtra: kvpagoda.KVPool needs torch; pip install 'kvpagoda[torch]'"
    )


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_the_generator_says_which_extra_it_needs(absent: str) -> None:
    pytest.importorskip("transformers")
    program = f"import sys; sys.modules[{absent!r}] = None\nimport kvpagoda.hf"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.strip().endswith(
        "kvpagoda.errors.MissingExtra: kvpagoda.hf needs torch and transformers (tested with 5.23 and 5.24); "
        "pip install 'kvpagoda[hf]'"
    )


@pytest.mark.parametrize(
    ("absent", "call", "told"),
    [
        ("xxhash", "tiers.records.xxh3_128(b'')", "tiers need the package xxhash; pip install 'kvpagoda[disk]'"),
        ("redis", "redis.redis_driver(RecordBuffer(1, 4096), 'redis://h')", "pip install 'kvpagoda[redis]'"),
        (
            "mooncake",
            "mooncake.mooncake_driver(RecordBuffer(1, 4096), 'h:1', host='h:2')",
            "pip install 'kvpagoda[mooncake]'",
        ),
    ],
)
def test_a_tier_says_which_extra_it_needs(absent: str, call: str, told: str) -> None:
    program = f"""
sys.modules[{absent!r}] = None
from kvpagoda import MissingExtra, tiers
from kvpagoda.tiers import RecordBuffer, mooncake, redis
try:
    {call}
except MissingExtra as error:
    print(error.name, error)
"""
    done = run(program)
    assert done.returncode == 0 and done.stdout.startswith(absent) and told in done.stdout, done.stderr


def test_another_missing_module_is_not_taken_for_torch() -> None:
    done = run("sys.modules['numpy'] = None; import kvpagoda; kvpagoda.PrefixCacheManager")
    assert done.returncode == 1 and "MissingExtra" not in done.stderr and "import of numpy" in done.stderr


def test_commands_that_need_no_memory_run(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plan = command("plan", str(tmp_path), "--budget", "1MiB", "--max-requests", "4", "--json")
    assert plan.returncode == 0 and json.loads(plan.stdout), plan.stderr
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, i % 3]} for i in range(9)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    replay = command("replay", str(trace), "--capacity", "4", "--policy", "lru", "--json")
    assert replay.returncode == 0 and json.loads(replay.stdout), replay.stderr


def test_commands_that_need_torch_say_so_in_one_line() -> None:
    for name in ("doctor", "generate"):
        done = command(name)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "pip install 'kvpagoda[" in done.stderr and "Traceback" not in done.stderr
