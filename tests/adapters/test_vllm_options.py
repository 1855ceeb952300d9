"""Which versions and options the scheduler for vLLM accepts, and what the package has without vLLM."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

import kvpagoda.adapters.vllm
from kvpagoda import BadInput
from kvpagoda.adapters.connector import options as connector
from kvpagoda.adapters.vllm.log import announce, groups_text
from kvpagoda.adapters.vllm.options import OF_THE_CONNECTOR, SUPPORTED, Options, check_version
from raises import raises

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


@pytest.mark.parametrize("found", ["0.32.0", "0.33.1+cpu", "0.32.1.dev3"])
def test_supported_versions(found: str) -> None:
    check_version(found)


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "0.3.2", "1.32.0", "0.320.0"])
def test_another_version_is_an_error_that_names_the_supported_ones(found: str) -> None:
    with raises(BadInput, needed=("0.32", "0.33"), available=found) as error:
        check_version(found)
    assert error.value.available == found and error.value.needed == SUPPORTED


VLLM = {
    "vllm/__init__.py": "__version__ = '0.34.1'",
    "vllm/v1/__init__.py": "",
    "vllm/distributed/__init__.py": "",
}
"""A vLLM of a later version, in which nothing is where it was."""


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("from kvpagoda.adapters.vllm import Scheduler", "--scheduler-cls"),
        ("from kvpagoda.adapters.vllm import KVCacheManager", "--scheduler-cls"),
        ("from kvpagoda.adapters.vllm_connector import KvpagodaConnector", "--kv-transfer-config"),
    ],
)
def test_another_version_is_named_before_what_it_lacks_is_imported(name: str, option: str, tmp_path: Path) -> None:
    if "connector" in name:
        pytest.importorskip("torch")
    for path, text in VLLM.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = f"kvpagoda.errors.BadInput: vLLM 0.34.1 is installed; {option} of kvpagoda supports 0.32 and 0.33; "
    assert done.returncode == 1 and said in done.stderr


def test_options_of_additional_config() -> None:
    assert Options.of({}) == Options.of(None) == Options()
    said = {"kvpagoda": {"policy": "s3fifo", "checkpoint_every": 512}, "another": 1}
    assert Options.of(said) == Options("s3fifo", 512)


@pytest.mark.parametrize(
    ("said", "figures"),
    [
        ({"polcy": "lru"}, {"needed": "polcy", "available": ("policy", "checkpoint_every", "promised", "memory")}),
        (
            {"policy": "lur"},
            {"needed": "lur", "available": ("lru", "fifo", "lfu", "lfuda", "sieve", "s3fifo", "arc", "auto")},
        ),
        ({"policy": 3}, {"needed": 3, "available": ("lru", "fifo", "lfu", "lfuda", "sieve", "s3fifo", "arc", "auto")}),
        ({"policy": "priority"}, {"field": "policy", "needed": "priority"}),
        ({"checkpoint_every": 0}, {"field": "checkpoint_every", "needed": ANY, "available": 1}),
        ({"checkpoint_every": 1.5}, {"field": "checkpoint_every", "needed": ANY, "available": 1}),
        ({"tiers": ["disk"]}, {"needed": ANY, "available": "connector"}),
        ({"checkpoint_tokens": 512}, {"needed": ANY, "available": "connector"}),
        ({"promised": 1.5}, {"field": "promised", "needed": 1.5, "available": 1}),
        ({"promise": 0.5}, {"needed": "promise", "available": ("policy", "checkpoint_every", "promised", "memory")}),
        ({"memory": "group"}, {"needed": "group", "available": ("groups", "exact")}),
        ({"memory": True}, {"needed": True, "available": ("groups", "exact")}),
        ({"memory": ["groups"]}, {"needed": ANY, "available": ("groups", "exact")}),
        ("lru", {"needed": "str"}),
    ],
)
def test_a_wrong_option_is_an_error_with_its_name(said: object, figures: dict[str, Any]) -> None:
    with raises(BadInput, **figures):
        Options.of({"kvpagoda": said})


@pytest.mark.parametrize("name", [field.name for field in fields(Options)])
def test_an_option_beside_ours_is_an_error_that_names_its_place(name: str) -> None:
    with raises(BadInput, needed=name, available=("kvpagoda",)) as error:
        Options.of({name: 1, "kvpagoda": {}})
    assert (error.value.needed, error.value.available) == (name, ("kvpagoda",))


@pytest.mark.parametrize("key", ["kvpagado", "KVPagoda", "kv-pagoda"])
def test_a_key_that_is_nearly_ours_is_an_error(key: str) -> None:
    with raises(BadInput, needed=key, available=("kvpagoda",)):
        Options.of({key: {"policy": "lru"}})


def test_scheduler_and_connector_send_each_others_options_to_the_other() -> None:
    assert tuple(field.name for field in fields(connector.ConnectorOptions)) == OF_THE_CONNECTOR
    assert tuple(field.name for field in fields(Options)) == connector.OF_THE_SCHEDULER
    for name in connector.OF_THE_SCHEDULER:
        with raises(BadInput, needed=name, available="scheduler"):
            connector.options_of({"tiers": ["host:1MiB"], name: 1})


def test_the_page_lists_every_option_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    for kind in (Options, connector.ConnectorOptions):
        assert {field.name for field in fields(kind)} <= {*rows}
    for field in fields(Options):
        assert (field.default is None or f"`{field.default}`" in rows[field.name]) and "default" in rows[field.name]


def test_the_options_on_the_page_are_accepted() -> None:
    schedulers = re.findall(r"--additional-config '(.*?)'", PAGE, re.DOTALL)
    found = [json.loads(text) for text in re.findall(r"--kv-transfer-config '(.*?)'", PAGE, re.DOTALL)]
    connectors = [one for one in found if one["kv_connector"] == "KvpagodaConnector"]
    assert schedulers and connectors and len(found) == len(connectors) + 1
    assert all(Options.of(json.loads(text)) != Options() for text in schedulers)
    assert all(connector.options_of(one["kv_connector_extra_config"]).tiers for one in connectors)


# -- vLLM's log --------------------------------------------------------------------------------------------------------


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch, root: logging.Handler | None = None) -> Iterator[StringIO]:
    """What vLLM's own logger is told, in a process that configured no other one but ``root``. (pytest listens to all
    loggers, from when a test begins.)"""
    written, announced = StringIO(), logging.getLogger("kvpagoda")
    with monkeypatch.context() as patch:
        patch.setattr(logging.root, "handlers", [root] if root else [])
        patch.setattr(announced, "handlers", [logging.NullHandler()])
        patch.setattr(announced, "propagate", True)
        patch.setattr(logging.getLogger("vllm"), "handlers", [logging.StreamHandler(written)])
        patch.setattr(logging.getLogger("vllm"), "level", logging.INFO)
        patch.setattr(logging.getLogger("vllm"), "propagate", False)
        announce.cache_clear()
        try:
            yield written
        finally:
            announce.cache_clear()
            announced.setLevel(logging.NOTSET)


def test_vllms_log_says_once_that_kvpagoda_is_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(block_size=16)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])] * 2)
    group = "2 of SimpleNamespace in blocks of 16 tokens"
    with listening(monkeypatch) as log:
        for _ in range(2):
            announce(f"does it; {groups_text(config)}")
            logging.root.addHandler(logging.StreamHandler(log))  # as packages do that log to the root
        assert log.getvalue() == f"kvpagoda {kvpagoda.__version__} does it; groups of layers: {group}, {group}\n"
        logging.getLogger("kvpagoda.tiers.health").warning("tier redis: no reads for a while")
        assert log.getvalue().splitlines()[1:] == ["tier redis: no reads for a while"]


def test_a_program_that_hears_kvpagoda_already_hears_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = StringIO()
    with listening(monkeypatch, logging.StreamHandler(heard)) as log:
        announce("does it")
        logging.getLogger("kvpagoda").warning("a fault")
        assert heard.getvalue() == "a fault\n" and not log.getvalue()


def test_the_package_names_what_it_has() -> None:
    assert kvpagoda.adapters.vllm.Options is Options
    with pytest.raises(AttributeError, match="Scheduller"):
        kvpagoda.adapters.vllm.Scheduller  # noqa: B018
