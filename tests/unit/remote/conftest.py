"""Fixture: one Redis server that all tests share which leave its configuration unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexkv.remote.base import Store, StoreOptions
from flexkv.remote.stores import open_store
from tests.servers.redis import RedisServer, redis_server


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(shared_redis: RedisServer) -> RedisServer:
    """The shared Redis server, after all its values were deleted."""
    assert shared_redis.ask("FLUSHALL") == b"+OK\r\n"
    return shared_redis


@pytest.fixture
def redis_store(redis: RedisServer) -> Iterator[Store]:
    store = open_store(StoreOptions((redis.url,)))
    yield store
    store.close()
