"""Stand-ins for heavy modules that a peer imports but its host path never calls: GPU kernels, images, grammars."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _AnyMeta(type):
    """The metaclass of ``Anything``: every attribute is a stand-in, and ``|`` with any type works in an annotation."""

    def __getattr__(cls, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return Anything

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_AnyMeta):
    """A stand-in for any name that a module uses while it is imported: base class, decorator, constant, annotation."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __init_subclass__(cls, **options: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args: Any, **options: Any) -> Any:
        is_decorating = len(args) == 1 and callable(args[0]) and not options
        return args[0] if is_decorating else Anything()

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, item: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (Anything,)


class _StubModule(ModuleType):
    """A module in which every name is a stand-in: a class if the name looks like one, otherwise an instance."""

    __path__: Sequence[str] = ()
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return Anything if name[:1].isupper() and not name.isupper() else Anything()


class _Stubs(MetaPathFinder, Loader):
    """The importer of stand-ins for ``names`` and all modules below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install(*names: str) -> None:
    """Make imports of ``names``, and of any module below them, return stand-ins from now on."""
    sys.meta_path.insert(0, _Stubs(names))
