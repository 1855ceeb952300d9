"""Which versions and options the scheduler for vLLM accepts, and what the package has without vLLM."""

from __future__ import annotations

import pytest

import kvpagoda.adapters.vllm
from kvpagoda import BadInput
from kvpagoda.adapters.vllm.options import SUPPORTED, Options, check_version


@pytest.mark.parametrize("found", ["0.32.0", "0.33.1+cpu", "0.32.1.dev3"])
def test_supported_versions(found: str) -> None:
    check_version(found)


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "0.3.2", "1.32.0", "0.320.0"])
def test_another_version_is_an_error_that_names_the_supported_ones(found: str) -> None:
    with pytest.raises(BadInput, match=rf"vLLM {found} is installed.*0\.32 and 0\.33") as error:
        check_version(found)
    assert error.value.available == found and error.value.needed == SUPPORTED


def test_options_of_additional_config() -> None:
    assert Options.of({}) == Options.of(None) == Options()
    said = {"kvpagoda": {"policy": "s3fifo", "checkpoint_every": 512}, "another": 1}
    assert Options.of(said) == Options("s3fifo", 512)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"polcy": "lru"}, "polcy.*policy"),
        ({"policy": "lur"}, "did you mean 'lru'"),
        ({"policy": 3}, "unknown eviction policy 3"),
        ({"policy": "priority"}, "needs a priority"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"checkpoint_every": 1.5}, "checkpoint_every"),
        ({"tiers": ["disk"]}, "--kv-transfer-config"),
        ("lru", "takes an object"),
    ],
)
def test_a_wrong_option_is_an_error_with_its_name(said: object, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Options.of({"kvpagoda": said})


def test_the_package_names_what_it_has() -> None:
    assert kvpagoda.adapters.vllm.Options is Options
    with pytest.raises(AttributeError, match="Scheduller"):
        kvpagoda.adapters.vllm.Scheduller  # noqa: B018
