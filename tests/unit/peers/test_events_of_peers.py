"""KV events of units that share pages. A unit's events tell a router only about the unit's own pages. So the router
never predicts more hits than the unit serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.redis import RedisServer, redis_server
from tests.unit.adapters.router_world import Router, World
from tests.unit.peers.live_engines import live_tiers, settings_of

REQUESTS = 80


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def worlds(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[World, World]]:
    """Two units, each with its own router. Each gets its own sequence of requests for the same few prompts."""
    settings: dict[str, Any] = settings_of(tmp_path / "run", request.param[0])
    if request.param[1] == "remote":
        server = request.getfixturevalue("shared_redis")
        assert server.ask("FLUSHALL") == b"+OK\r\n"
        settings |= {"remote.urls": server.url, "remote.probe_s": 2.0}
    elif request.param[1]:
        settings["peers.store"] = request.param[1]
    made: list[World] = []
    try:
        for seed, name in enumerate(("a", "b")):
            made.append(World(tmp_path / name, Router(), seed, **settings))
        yield made[0], made[1]
    finally:
        for world in made:
            world.engine.close()


def served(worlds: tuple[World, World]) -> tuple[int, int]:
    """Serves requests with each of the two units. Returns the number of requests for which a router predicted more
    tokens than its unit served, and the number for which it predicted fewer."""
    over = under = 0
    for _ in range(REQUESTS):
        for world in worlds:
            for tier in live_tiers(world.engine):
                tier._share._follow()  # type: ignore[attr-defined]
            predicted, got = world.serve_one()
            over += predicted > got
            under += predicted < got
    return over, under


@pytest.mark.parametrize(
    "worlds",
    [("host+disk", ""), ("disk", ""), ("host+disk", "once"), ("host+disk", "remote"), ("disk", "remote")],
    indirect=True,
    ids=str,
)
def test_a_router_predicts_no_more_than_is_served(worlds: tuple[World, World]) -> None:
    over, under = served(worlds)
    assert over == 0
    assert under > 0, "peers serve what the router has not heard of"
    for world in worlds:
        for tier in world.engine.unit.manager.tiers:
            assert tier.facts.label != "remote" or tier.counts.written > 0


@pytest.mark.parametrize("worlds", [("off", "")], indirect=True, ids=str)
def test_control_without_sharing_it_predicts_exactly(worlds: tuple[World, World]) -> None:
    assert served(worlds) == (0, 0)
