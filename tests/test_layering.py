"""The import graph: a file imports only rooms below its own, and files of one room never import each other in a circle.

Imports inside functions and under TYPE_CHECKING count. But packages that only a type checker reads need not be installed.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvpagoda

SRC = Path(kvpagoda.__file__).parent
LEVELS = [
    "errors", "units", "text", "loading", "version", "upstream", "formats", "layouts", "schema",
    "core.blocks", "policies", "core.prefix", "core.lanes", "core.kernels", "core.memory", "tiers",
    "core.cache", "recording", "core.offload", "handover", "core.batch", "core.sleeping", "hints",
    "core.sanitizer", "core.kv_cache", "core.worker", "events", "scheduling", "kernels", "memory", "compat", "console",
    "metrics", "bench_gpu", "doctor", "testing", "replay", "adapters", "hf", "cli", "__main__",
]  # fmt: skip
OPTIONAL = {
    "hf": {"transformers", "safetensors"}, "console": {"rich"}, "replay": {"matplotlib", "plotly"}, "cli": {"typer"},
    "metrics": {"prometheus_client", "opentelemetry", "rich"},
    "core.kernels": {"triton"}, "core.memory": {"cuda"}, "core.lanes": {"numba", "llvmlite"},
    "tiers": {"xxhash", "redis", "mooncake"},
    "events": {"msgspec", "zmq"},
    "handover": {"mooncake", "nixl", "xxhash"},
    "adapters": {"vllm"},
}  # fmt: skip
PLAIN = {"errors", "units", "schema"}
NEEDS_TORCH = {
    "kernels", "memory.virtual",
    "formats.codec", "formats.quantise", "formats.small_floats", "formats.tensor_scale", "core.kernels",
    "layouts.packed", "bench_gpu", "doctor", "hf",
    "core.memory.arena", "core.memory.backing", "core.memory.device_memory", "core.memory.host_copy",
    "core.memory.id_tensors", "core.memory.pool", "core.memory.staging", "core.memory.virtual", "adapters.mini_sglang",
    "adapters.connector.block_rows", "adapters.connector.worker", "adapters.vllm_connector", "compat.block_allocator",
    "compat.cache_engine", "compat.compressed_pools", "compat.gdn_pool", "compat.kv_cache_manager",
    "compat.kv_pool", "compat.layer_handle", "compat.req_pool", "compat.token_allocator",
}  # fmt: skip
"""Rooms and files that import torch. Everything else works where torch is not installed."""
NEVER_TORCH = {
    "errors",
    "units",
    "schema",
    "core.blocks",
    "policies",
    "core.prefix",
    "tiers",
    "core.cache",
    "core.offload",
    "handover",
    "scheduling",
    "replay",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(("kvpagoda", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(path: Path, *, when_loaded: bool = False, for_types: bool = True) -> set[str]:
    """Return the names that a file imports anywhere. ``when_loaded``: without those inside functions or under
    TYPE_CHECKING. ``for_types`` False: without those under TYPE_CHECKING."""
    found, nodes = set(), [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif when_loaded and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif (when_loaded or not for_types) and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)
    return found


FILES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}


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
        if module != "kvpagoda"
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
