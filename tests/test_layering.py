"""The graph of rooms: a file imports only rooms below its own, and files of one room never in a circle.

Imports inside functions and under TYPE_CHECKING count.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvpagoda

SRC = Path(kvpagoda.__file__).parent
LEVELS = [
    "errors", "units", "schema", "blocks", "prefix", "formats", "kernels", "memory", "tiers", "compat", "reuse",
    "sectors", "swap", "namespace", "sequence", "stats", "finding", "below", "admission", "books", "preemption", "batch",
    "persistent_batch", "manager", "console", "doctor", "replay", "hf", "cli",
]  # fmt: skip
OPTIONAL = {
    "hf": {"transformers"}, "console": {"rich"}, "replay": {"matplotlib"}, "cli": {"typer"}, "kernels": {"triton"},
    "tiers": {"xxhash", "mooncake"},
}  # fmt: skip
CORE = {"numpy", "torch"}
PLAIN = {"errors", "units", "schema"}
TORCH_FREE = {
    "tiers", "stats", "prefix", "blocks", "reuse", "sectors", "swap", "namespace", "sequence", "finding", "below",
    "admission", "books", "preemption",
}  # fmt: skip


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(("kvpagoda", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


FILES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_room_is_on_the_list() -> None:
    assert {room(module) for module in FILES if module != "kvpagoda"} <= set(LEVELS)


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


def test_the_core_needs_numpy_and_torch_alone() -> None:
    import sys

    for module, path in FILES.items():
        if module == "kvpagoda":
            continue
        outside = {name.split(".")[0] for name in imports(path)} - {"kvpagoda"} - sys.stdlib_module_names
        assert outside <= CORE | OPTIONAL.get(room(module), set()), module
        assert room(module) not in PLAIN or not outside, f"{module} must not need {outside}"
        assert room(module) not in TORCH_FREE or outside <= {"numpy"} | OPTIONAL.get(room(module), set()), (
            f"{module} must not need {outside}"
        )
