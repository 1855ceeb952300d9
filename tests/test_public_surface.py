"""The public names, pinned: adding or removing one is a decision, not an accident."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvpagoda
from kvpagoda import compat

SRC = Path(kvpagoda.__file__).parent

NAMES = [
    "Asleep",
    "BadInput",
    "BadLine",
    "Batch",
    "Breakpoint",
    "CacheStats",
    "CheckFailed",
    "ConcurrentUse",
    "EvictionPolicy",
    "Exhausted",
    "HandoverMiss",
    "Identity",
    "KVCache",
    "KVPagodaError",
    "LayerView",
    "LayoutError",
    "Limits",
    "MissingExtra",
    "Namespace",
    "NeedsReset",
    "NeverFits",
    "NotOwned",
    "OutOfBlocks",
    "PersistentBatch",
    "Plan",
    "PreemptionPolicy",
    "PrefixMatch",
    "Retention",
    "RetryLater",
    "Schema",
    "SchemaError",
    "Sequence",
    "StaleHandle",
    "TicketRefused",
    "Worker",
    "simulate",
]
COMPAT = [
    "AttentionType",
    "BLOCK_SIZE_ORIGINAL_TOKENS",
    "BlockAllocator",
    "CacheEngine",
    "ClassicalView",
    "DSV4Config",
    "FFNType",
    "GDNPool",
    "IndexerView",
    "KVCacheManager",
    "KVPool",
    "LayerCacheHandle",
    "LayerSchema",
    "LayerSpec",
    "PagedKVPool",
    "PrefixCacheManager",
    "ReqToTokenPool",
    "RouterMode",
    "SWAView",
    "SlotAllocator",
    "StateCachePool",
    "TokenToKVPoolAllocator",
    "append_swa",
    "build_schedule",
    "build_schema",
    "compute_block_budget",
    "dequantize_entries",
    "dequantize_swa",
    "make_full_attention_net_mem_pool",
    "make_req_to_token_pool",
]
"""Names of the four designs: importable from ``kvpagoda`` and from ``kvpagoda.compat``, and listed by the latter alone."""


THIN = {
    "abc": "Backing BlockIds CacheObserver CacheView CachedText Driver DriverStats EvictionPolicy Lease RequestView Status "
    "Transfer wrap_calls",
    "arrays": "AnyIds Ids Int64s NO_TOKEN TokenIds Tokens are_media as_tokens grown",
    "free_list": "FreeList FreeStack IdPool IdSet",
    "id_tensors": "Device IdsLike default_device ids_from integers",
    "kernels": "append_parts append_rows append_scaled append_swa conv_steps copy_rows delta_steps gather_parts gather_rows "
    "gather_scaled ssd_steps warm_up_swa",
    "memory.virtual": "VirtualMemory",
    "namespace": "Media Namespace Namespaces checked_media namespace_key with_media",
    "pages": "Bytes PAGE give_back pages",
    "pools": "Arena BlockRows DeviceBlocks Pool Staging Step dtype_name page_locks",
    "prefix": "Entry Evicted Inserted Lease Match PrefixTree",
    "probe": "Probe",
    "scheduling": "Costs Job LeastComputed PreemptionMode PreemptionPolicy QueueStats RunQueue Youngest cheapest",
}
"""Public modules below and beside the core, and their names."""


SAME_NAME = {
    **dict.fromkeys(
        ("ARC", "Auto", "FIFO", "LFU", "LFUDA", "S3FIFO", "SIEVE"),
        "a policy, in ``kvpagoda.policies``; the same for vLLM's CPU tier, whose options name the class",
    ),
    "Costs": "of preemption, in ``kvpagoda.scheduling``; of a simulated step, in ``kvpagoda.replay``",
    "Encoding": "of rows, in ``kvpagoda.schema``; of events, in ``kvpagoda.events``",
    "Group": "of a schema, in ``kvpagoda.schema``; of a replayed engine, in ``kvpagoda.replay``",
    "KVCacheManager": "of the compressed-attention design, in ``kvpagoda.compat``; vLLM's, in ``kvpagoda.adapters.vllm``",
    "Lease": "on records of a driver, in ``kvpagoda.abc``; on blocks of a tree, in ``kvpagoda.prefix``",
    "PrefixCache": "of a ``KVCache``, in its core; mini-sglang's, in ``kvpagoda.adapters.mini_sglang``",
    "Request": "of a generator, in ``kvpagoda.hf``; of a trace, in ``kvpagoda.replay``",
}
"""Class names that stand twice, and for what: documented names, or names that other projects chose."""


def test_a_class_name_stands_once() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1 + (name in SAME_NAME)} == {}
    assert {name for name in SAME_NAME if len(found.get(name, [])) == 1} == set(), (
        "no longer twice: remove it from the list"
    )


@pytest.mark.parametrize("name", THIN)
def test_the_names_of_public_modules_are_these(name: str) -> None:
    module = import_module(f"kvpagoda.{name}")
    assert sorted(module.__all__) == THIN[name].split()
    assert all(hasattr(module, one) for one in module.__all__)


def test_the_public_names_are_these() -> None:
    assert sorted(kvpagoda.__all__) == dir(kvpagoda) == sorted(NAMES)
    assert sorted(compat.__all__) == dir(compat) == sorted(COMPAT)
    for name in (*NAMES, *COMPAT):
        assert getattr(kvpagoda, name).__doc__, name
    for name in COMPAT:
        assert getattr(compat, name) is getattr(kvpagoda, name), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pagoda'"):
        _ = kvpagoda.Pagoda


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("from kvpagoda import Schema; Schema.from_hf_config", "torch"),
        ("from kvpagoda import KVCache, Schema; KVCache", "torch"),
        ("from kvpagoda import SlotAllocator; SlotAllocator(3).alloc()", "torch"),
        ("from kvpagoda import KVCache, KVCacheManager, GDNPool", "transformers"),
        ("from kvpagoda import KVCache", "typer"),
    ],
)
def test_an_entry_level_imports_no_more_than_it_needs(program: str, absent: str) -> None:
    code = f"import sys; {program}; assert {absent!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def lazy_packages() -> list[str]:
    """Return the packages that import their names when they are first used."""
    return [
        ".".join(("kvpagoda", *path.parent.relative_to(SRC).parts))
        for path in sorted(SRC.rglob("__init__.py"))
        if "__getattr__" in path.read_text()
    ]


def imports_for_type_checkers(package: str) -> dict[str, str]:
    """Return what ``package`` imports under TYPE_CHECKING: name -> module. A star stands for the ``__all__`` of its module."""
    tree = ast.parse(Path(import_module(package).__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    modules: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            modules |= imports_for_type_checkers(node.module) if alias.name == "*" else {alias.name: node.module}
    return modules


@pytest.mark.parametrize("package", lazy_packages())
def test_a_type_checker_sees_the_names_that_are_imported_when_used(package: str) -> None:
    """The imports under TYPE_CHECKING and the table of ``load_when_used`` name the same objects, and no type checker sees
    ``__getattr__``, which would give it Any for each of them, and for each name that does not exist."""
    room = import_module(package)
    modules = imports_for_type_checkers(package)
    assert {*room.__all__} <= {*modules, *vars(room)}
    if package == "kvpagoda":
        table = {name: module for names in (room._PUBLIC, compat.NAMES) for module in names for name in names[module]}
    elif package == "kvpagoda.adapters.vllm":
        table = {name: f"{package}.{module}" for name, module in room._MODULES.items()}
    else:
        table = inspect.getclosurevars(room.__getattr__).nonlocals["module_of"]
    assert modules == table
    tree = ast.parse(Path(room.__file__).read_text())
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"]
    assert ast.unparse(tree).count("__getattr__") == sum(ast.unparse(node).count("__getattr__") for node in hidden) > 0


def test_there_are_packages_that_import_when_used() -> None:
    assert {"kvpagoda", "kvpagoda.compat", "kvpagoda.metrics", "kvpagoda.replay"} <= {*lazy_packages()}
