"""A router that joins late or loses batches of events rebuilds its view from the replay of vLLM's own publisher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from tests.unit.adapters.router_world import Router, World

WITHIN_S = 60.0
END = ZmqEventPublisher.END_SEQ
_decode = msgspec.msgpack.Decoder(KVEventBatch).decode

Batches = dict[int, list[Any]]


class Wire:
    """A publisher of KV events that can replay batches, like an engine's publisher, and a subscriber.

    Args:
        buffer_steps: number of batches that the publisher keeps for the replay.
    """

    def __init__(self, name: str, buffer_steps: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._events, self._replay = f"inproc://{name}-events", f"inproc://{name}-replay"
        self.publisher = ZmqEventPublisher(0, self._events, self._replay, buffer_steps)
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.connect(self._events)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self.published = 0

    def publish(self, events: list[Any]) -> None:
        """Publishes the events as one batch, as vLLM's scheduler does after each step with events."""
        if events:
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))
            self.published += 1

    def heard(self) -> Batches:
        """Receives batches up to the last published one. Returns them by number."""
        batches: Batches = {}
        while self.published - 1 not in batches:
            assert self._subscriber.poll(WITHIN_S * 1000), (
                f"the last batch did not come after {sorted(batches)}"
            )
            _, number, payload = self._subscriber.recv_multipart()
            batches[int.from_bytes(number, "big")] = _decode(payload).events
        return batches

    def replay(self, first: int) -> Batches:
        """Returns all batches from `first` on that the publisher still keeps, by number."""
        batches: Batches = {}
        with self._context.socket(zmq.DEALER) as asks:
            asks.connect(self._replay)
            asks.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                assert asks.poll(WITHIN_S * 1000), "the replay has no end"
                *_, number, payload = asks.recv_multipart()
                if number == END:
                    return batches
                batches[int.from_bytes(number, "big")] = _decode(payload).events

    def close(self) -> None:
        self._subscriber.close()
        self.publisher.shutdown()


Make = Callable[..., tuple[World, Wire]]


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Returns a function that makes an engine and a wire. The engine's folder contains pages of an earlier engine."""
    made: list[tuple[World, Wire]] = []

    def make(buffer_steps: int = 10_000) -> tuple[World, Wire]:
        first = World(tmp_path, Router())
        for _ in range(20):
            first.serve_one()
        first.engine.close()
        made.append((World(tmp_path, Router(), 1), Wire(request.node.name, buffer_steps)))
        return made[-1]

    yield make
    for world, wire in made:
        world.engine.close()
        wire.close()


def serve(world: World, wire: Wire, requests: int = 30) -> None:
    """Serves requests. After each request, publishes the engine's events as one batch, and also passes them to the
    world's own router.
    """
    for left in reversed(range(requests + 1)):
        world.engine.drain()
        world.engine.until(lambda: not world.engine.unit.driver.busy)
        events = world.engine.take_events()
        world.router.hear(events)
        wire.publish(events)
        if left:
            world.engine.run(world.request())
            world.engine.forget()


def heard_in_order(batches: Batches) -> Router:
    router = Router()
    for number in sorted(batches):
        router.hear(batches[number])
    return router


def test_a_router_that_joins_late_learns_all_by_the_replay(make: Make) -> None:
    world, wire = make()
    serve(world, wire)
    wire.heard()
    late = heard_in_order(wire.replay(0))
    assert late.has == world.router.has
    assert late.has["STORAGE"]


def test_a_router_that_lost_batches_asks_for_them(make: Make) -> None:
    world, wire = make()
    serve(world, wire)
    batches = wire.heard()
    lost = {number: batches.pop(number) for number in (0, 4, 5)}
    again = wire.replay(0)
    assert {number: again[number] for number in lost} == lost
    assert heard_in_order(batches | {number: again[number] for number in lost}).has == world.router.has


def test_control_without_the_lost_batches_its_view_is_another(make: Make) -> None:
    world, wire = make()
    serve(world, wire)
    batches = wire.heard()
    del batches[0]
    with pytest.raises(AssertionError, match="never announced"):
        heard_in_order(batches)


def test_a_replay_that_has_lost_its_first_batches_says_so_by_their_numbers(make: Make) -> None:
    world, wire = make(buffer_steps=5)
    serve(world, wire)
    wire.heard()
    assert min(wire.replay(0)) == wire.published - 5 > 0
