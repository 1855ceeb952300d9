"""The caches of an engine in one process for all files that ask them: to start it takes longer than to ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judges import Process, judge


@pytest.fixture(scope="session")
def sglang() -> Iterator[Process]:
    yield from judge("sglang_oracle")


@pytest.fixture(scope="session")
def vllm() -> Iterator[Process]:
    yield from judge("vllm_oracle")


@pytest.fixture(scope="session")
def dynamo() -> Iterator[Process]:
    yield from judge("dynamo_oracle")
