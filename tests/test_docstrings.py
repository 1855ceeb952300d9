"""The docstrings of the public classes and functions have one form: what it is, ``Args``, ``Returns``, ``Raises``, examples.

Public is what has an entry in ``docs/api`` or stands in the ``__all__`` of a room. The sources are read, not imported: some
need packages that are not installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import kvpagoda

SRC = Path(kvpagoda.__file__).parent
API = Path(__file__).parents[1] / "docs" / "api"
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples):\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\S.*?): ", re.MULTILINE)
ELSEWHERE = re.compile(r"(?:See ``\w+``|As vLLM's\b)")
"""How the docstring of a method begins whose contract is that of another class."""
THEIRS = ("KvpagodaConnector", "PagedCache")
"""Classes some of whose methods are described by vLLM and by transformers alone."""
MADE = "Made by ``"
"""What the docstring says of a class that users do not make: its parameters are not theirs."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Public(NamedTuple):
    """A public class, function or method: where it is, its docstring, and the names of its parameters."""

    where: str
    doc: str
    parameters: list[str]

    @property
    def name(self) -> str:
        return self.where.rpartition(".")[2]

    def listed(self, section: str) -> list[str]:
        """Return the names that a section of the docstring describes."""
        return [
            name
            for title, text in SECTION.findall(f"{self.doc}\n\n")
            if title == section
            for name in ENTRY.findall(text)
        ]


@cache
def tree_of(module: str) -> ast.Module:
    path = SRC.parent / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def is_overload(node: Function | ast.ClassDef) -> bool:
    return any(ast.unparse(one) == "overload" for one in node.decorator_list)


@cache
def imports_of(module: str) -> tuple[tuple[str, str, str], ...]:
    """Return (name here, module, name there) of what a module imports from others of this library; "*": all names."""
    return tuple(
        (alias.asname or alias.name, node.module, alias.name)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvpagoda")
        for alias in node.names
    )


def defined(module: str, name: str) -> tuple[str, ast.ClassDef | Function] | None:
    """Return the module that defines what ``module`` calls ``name``, and its definition; None for a value."""
    for node in tree_of(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name and not is_overload(node):
            return module, node
    for here, origin, there in imports_of(module):
        if here in (name, "*") and (found := defined(origin, name if here == "*" else there)) is not None:
            return found
    return None


def definitions(body: list[ast.stmt], is_method: bool = False) -> Iterator[tuple[ast.ClassDef | Function, bool]]:
    """Yield the classes and functions of a module and of its classes, and whether each is a method."""
    for node in body:
        if isinstance(node, Function):
            yield node, is_method
        elif isinstance(node, ast.ClassDef):
            yield node, False
            yield from definitions(node.body, is_method=True)


def names_of(module: str) -> list[str]:
    """Return the ``__all__`` of a module, as far as it is written out."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
    return []


def parameters(function: Function, is_method: bool) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    if is_method and "staticmethod" not in map(ast.unparse, function.decorator_list):
        names = names[1:]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def fields(node: ast.ClassDef) -> list[str]:
    """Return the parameters of a class, but for the fields of a dataclass that have a docstring of their own."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__"):
            return parameters(one, is_method=True)
    if {ast.unparse(base) for base in node.bases} & {"Protocol", "Enum"}:
        return []
    after = [*node.body[1:], ast.Pass()]
    return [
        one.target.id
        for one, following in zip(node.body, after)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and not one.target.id.startswith("_")
        and not ast.unparse(one.annotation).startswith("ClassVar")
        and "init=False" not in ast.unparse(one)
        and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant))
    ]


@cache
def public() -> tuple[Public, ...]:
    return tuple(_public())


def _public() -> Iterator[Public]:
    entries = [re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE) for path in sorted(API.glob("*.md"))]
    asked = [one.rpartition(".")[::2] for page in entries for one in page]
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(("kvpagoda", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
        if not module.startswith("kvpagoda.core"):
            asked += [(module, name) for name in names_of(module)]
    for module, node in dict.fromkeys(filter(None, (defined(*one) for one in asked))):
        where = f"{module}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield Public(where, ast.get_docstring(node) or "", fields(node))
            for one in node.body:
                if (
                    isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
                    and one.name[0] != "_"
                    and not is_overload(one)
                ):
                    yield Public(f"{where}.{one.name}", ast.get_docstring(one) or "", parameters(one, is_method=True))
        else:
            yield Public(where, ast.get_docstring(node) or "", parameters(node, is_method=False))


def test_every_parameter_is_described_in_the_order_of_the_signature() -> None:
    contracts = {one.name for one in public() if one.doc}
    differ = {}
    for one in public():
        listed = one.listed("Args") or one.listed("Attributes")
        others = MADE in one.doc or bool(ELSEWHERE.match(one.doc))
        if not one.doc:  # a method of an interface, or of a class below
            others = one.name in contracts or one.where.split(".")[-2] in THEIRS
        if listed != one.parameters and (listed or not others):
            differ[one.where] = {"described": listed, "parameters": one.parameters}
    assert not differ


def test_what_is_not_public_describes_no_parameter_that_is_gone() -> None:
    """Where such a docstring has ``Args``, these are all parameters of the signature, and fields."""
    differ = {}
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(("kvpagoda", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__")
        for one, is_method in definitions(tree_of(module).body):
            wanted = fields(one) if isinstance(one, ast.ClassDef) else parameters(one, is_method)
            more = {ast.unparse(each.target) for each in one.body if isinstance(each, ast.AnnAssign)}
            listed = Public("", ast.get_docstring(one) or "", wanted).listed("Args")
            if listed and not {*wanted} <= {*listed} <= {*wanted, *more}:
                differ[f"{path.relative_to(SRC)}:{one.lineno}"] = {*listed} ^ {*wanted}
    assert not differ


def test_errors_stand_in_their_section() -> None:
    sentences = [one.where for one in public() if re.search(r"\bRaises [A-Z]\w", SECTION.sub("", f"{one.doc}\n\n"))]
    assert not sentences


def test_examples_stand_in_their_section() -> None:
    """Elsewhere the site shows them as text."""
    assert not [one.where for one in public() if ">>>" in SECTION.sub("", f"{one.doc}\n\n")]


def test_a_reason_says_which_argument() -> None:
    reasons = [one.where for one in public() if re.search(r"(?:a|an) (?:wrong|invalid|bad) argument\b", one.doc)]
    assert not reasons


@pytest.mark.parametrize(
    "name",
    ["core.kv_cache.KVCache.open", "abc.Driver.store", "replay.run.replay", "adapters.vllm.manager.KVCacheManager"],
)
def test_what_is_public_is_found(name: str) -> None:
    assert f"kvpagoda.{name}" in {one.where for one in public()}
    assert len(public()) > 700
