"""Fixtures: a store host per test module. A test may stop the host's process; it is resumed before the next test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.store_hosts import StoreHost, store_host


@pytest.fixture(scope="module")
def started_host() -> Iterator[StoreHost]:
    with store_host() as started:
        yield started


@pytest.fixture
def host(started_host: StoreHost) -> Iterator[StoreHost]:
    yield started_host
    started_host.resume()
