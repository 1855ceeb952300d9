"""The import graph: a file imports only rooms below its own, and files of one room never import each other in a circle.

Imports inside functions and under TYPE_CHECKING count. But packages that only a type checker reads need not be installed.
"""

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import kvpagoda
from sources import FILES, nodes, tree

LEVELS = [
    "errors", "units", "text", "loading", "version", "upstream", "arrays", "free_list", "pages", "threads", "namespace",
    "abc", "id_tensors", "formats", "layouts", "schema", "core.blocks", "policies", "retention", "core.prefix",
    "core.lanes", "core.kernels", "core.memory", "tiers", "core.groups", "core.cache", "recording", "core.offload",
    "handover", "core.handover", "core.batch", "core.sleeping", "core.sanitizer", "hints", "events", "core.kv_cache",
    "core.worker", "core.scheduling", "core.probe", "kernels", "memory", "pools", "prefix", "probe", "scheduling",
    "compat", "console", "audit", "metrics", "bench_gpu", "doctor", "testing", "replay", "adapters", "hf", "cli",
    "__main__",
]  # fmt: skip
OPTIONAL = {
    "hf": {"transformers", "safetensors"}, "console": {"rich"}, "replay": {"matplotlib", "plotly"}, "cli": {"typer"},
    "audit": {"httpx"},
    "metrics": {"prometheus_client", "opentelemetry", "rich"},
    "core.kernels": {"triton"}, "core.memory": {"cuda"}, "core.lanes": {"numba", "llvmlite"},
    "tiers": {"xxhash", "redis", "mooncake"},
    "events": {"msgspec", "zmq"},
    "handover": {"mooncake", "nixl", "xxhash"},
    "adapters": {"vllm"},
}  # fmt: skip
PLAIN = {"errors", "units", "schema"}
NEEDS_TORCH = {
    "kernels", "memory.virtual", "pools", "id_tensors",
    "formats.codec", "formats.quantise", "formats.small_floats", "formats.tensor_scale", "core.kernels",
    "layouts.packed", "bench_gpu", "doctor", "hf",
    "core.memory.arena", "core.memory.backing", "core.memory.block_rows",
    "core.memory.device_blocks", "core.memory.device_memory", "core.memory.host_copy",
    "core.memory.pool", "core.memory.staging", "core.memory.virtual", "adapters.mini_sglang",
    "adapters.connector.layer_rows", "adapters.connector.worker", "adapters.vllm_connector", "compat.block_allocator",
    "compat.cache_engine", "compat.compressed_pools", "compat.gdn_pool", "compat.kv_cache_manager",
    "compat.kv_pool", "compat.layer_handle", "compat.req_pool", "compat.token_allocator",
}  # fmt: skip
"""Rooms and files that import torch. Everything else works where torch is not installed."""
NEVER_TORCH = {
    "abc",
    "arrays",
    "audit",
    "errors",
    "free_list",
    "namespace",
    "pages",
    "units",
    "schema",
    "core.blocks",
    "policies",
    "core.prefix",
    "core.groups",
    "tiers",
    "core.cache",
    "core.offload",
    "core.handover",
    "core.probe",
    "core.scheduling",
    "handover",
    "prefix",
    "scheduling",
    "replay",
}


THIN = {
    "kvpagoda.kernels",
    "kvpagoda.memory.virtual",
    "kvpagoda.pools",
    "kvpagoda.prefix",
    "kvpagoda.probe",
    "kvpagoda.scheduling",
}
"""Public modules that hold names of the core, and nothing of their own. Nobody else outside of the core imports from it."""
LATER = {"kvpagoda", "kvpagoda.handover"}
"""Packages that load names from above when they are first used."""
INSIDE = {
    "kvpagoda.events.index", "kvpagoda.hints", "kvpagoda.hints.hints", "kvpagoda.hints.keep", "kvpagoda.hints.promises",
    "kvpagoda.metrics.prometheus", "kvpagoda.metrics.spans", "kvpagoda.recording",
}  # fmt: skip
"""Modules that still reach into the core."""


HOME = {name: module for module, names in kvpagoda._PUBLIC.items() for name in names}
"""Public name of ``kvpagoda`` -> the module that defines it."""


@cache
def imports(path: Path, *, when_loaded: bool = False, for_types: bool = True, at_home: bool = True) -> frozenset[str]:
    """Return the names that a file imports anywhere. ``when_loaded``: without those inside functions or under
    TYPE_CHECKING. ``for_types`` False: without those under TYPE_CHECKING. ``at_home``: names of ``kvpagoda`` as those of the
    modules that define them."""
    found, nodes = set[str](), [tree(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                is_public = at_home and node.module == "kvpagoda" and alias.name in HOME
                module = HOME[alias.name] if is_public else str(node.module)
                found |= {f"{module}.{alias.name}", module}
        elif when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif (when_loaded or not for_types) and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)
    return frozenset(found)


def room(module: str) -> str:
    """Return the room of a module: the name after ``kvpagoda``; in the core, the name after ``kvpagoda.core`` too."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[0] == "core" else parts[:1])


def test_every_room_is_on_the_list() -> None:
    assert {room(module) for module in FILES if module not in ("kvpagoda", "kvpagoda.core")} <= set(LEVELS)


def test_imports_point_down() -> None:
    upward = [
        f"{module} -> {target}"
        for module, path in FILES.items()
        if module not in LATER
        for target in imports(path)
        if target.startswith("kvpagoda.") and room(target) != room(module)
        if LEVELS.index(room(target)) >= LEVELS.index(room(module))
    ]
    assert upward == []


def test_files_of_a_room_do_not_import_in_a_circle() -> None:
    graph = {module: imports(path) & FILES.keys() - {module} for module, path in FILES.items()}
    for module, targets in graph.items():  # a package's __init__ re-exports its files; that is not an edge back
        graph[module] = {target for target in targets if not module.startswith(target + ".")}
    TopologicalSorter(graph).prepare()


def test_neighbours_knock_at_the_door() -> None:
    """What is not of the core takes the core's names from the public modules, and no cache's ``core``."""
    inside = [
        f"{module}: {name}"
        for module, path in FILES.items()
        if not module.startswith("kvpagoda.core") and module not in {*THIN, *LATER, *INSIDE}
        for name in sorted(imports(path, at_home=False) | texts(path) | attributes(path))
        if name == ".core" or name.startswith("kvpagoda.core")
    ]
    assert inside == []
    assert {
        module for module in INSIDE if any(one.startswith("kvpagoda.core") for one in imports(FILES[module]))
    } == INSIDE


def attributes(path: Path) -> set[str]:
    """Return the names of attributes in a file, each with its dot."""
    return {f".{node.attr}" for node in nodes(path) if isinstance(node, ast.Attribute)}


def texts(path: Path) -> set[str]:
    """Return the texts in a file, names of modules that it loads later among them."""
    return {str(node.value) for node in nodes(path) if isinstance(node, ast.Constant)}


def test_a_thin_module_has_nothing_of_its_own() -> None:
    for name in THIN:
        begin, *statements = tree(FILES[name]).body
        assert isinstance(begin, ast.Expr), name
        assert all(isinstance(one, ast.ImportFrom | ast.Assign) for one in statements), name
        module = import_module(name)
        taken = {alias.name for one in statements if isinstance(one, ast.ImportFrom) for alias in one.names}
        assert taken == {*module.__all__}, name


def needs_torch(module: str) -> bool:
    return not NEEDS_TORCH.isdisjoint({room(module), module.removeprefix("kvpagoda.")})


def test_the_core_needs_numpy_alone() -> None:
    import sys

    for module, path in FILES.items():
        if module == "kvpagoda":
            continue
        outside = {name.split(".")[0] for name in imports(path)} - {"kvpagoda"} - sys.stdlib_module_names
        allowed = OPTIONAL.get(room(module), set()) | (set() if room(module) in PLAIN else {"numpy"})
        allowed |= {"torch", "typing_extensions"} - {name.split(".")[0] for name in imports(path, for_types=False)}
        assert outside <= allowed | ({"torch"} if needs_torch(module) else set()), module


def test_what_needs_no_torch_loads_nothing_that_does() -> None:
    heavy = {module for module in FILES if module != "kvpagoda" and needs_torch(module)}
    for module in FILES.keys() - heavy:
        assert not imports(FILES[module], when_loaded=True) & heavy, module


def test_the_list_of_what_needs_torch_is_short() -> None:
    assert not {room(f"kvpagoda.{entry}") for entry in NEEDS_TORCH} & NEVER_TORCH
    torch = {"torch", *(module for module in FILES if module.startswith("kvpagoda.core.") and needs_torch(module))}
    using = {
        module.removeprefix("kvpagoda.") for module, path in FILES.items() if torch & imports(path, for_types=False)
    }
    assert {entry for entry in NEEDS_TORCH if any(f"{name}.".startswith(f"{entry}.") for name in using)} == NEEDS_TORCH
