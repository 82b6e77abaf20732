"""A store that machines share, used by a real engine. Prompts that one engine computes are hits in the next engine,
which starts empty. Values are damaged or forged, and processes are killed. Every answer is right, except that a forged
value changes it.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.engine_process import SEPARATE_CORE
from flexkv.remote.base import Outcome, Store, StoreOptions
from flexkv.remote.stores import open_store
from flexkv.remote.values import ValueFormat
from tests.servers.mooncake import mooncake
from tests.servers.namespace import network_namespace
from tests.servers.redis import RedisServer, redis_server

from .conftest import BLOCKS_OF_ALL_GROUPS, GROUPS, PACKAGE, PACKAGE_ROOT, Engines, connector
from .remote_ops import HELPER
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_disk import SLAB_BYTES, wait_durable
from .test_hybrid import WINDOW_PAGES
from .test_parallel import TWO_RANKS

HITS = "vllm:flexkv_hit_blocks_total{tier=remote}"
HOST_HITS = "vllm:flexkv_hit_blocks_total{tier=host}"
DISK_HITS = "vllm:flexkv_hit_blocks_total{tier=disk}"
READ = "vllm:flexkv_remote_pages_total{direction=read}"
WRITTEN = "vllm:flexkv_remote_pages_total{direction=write}"
MISSED = "vllm:flexkv_remote_missed_pages_total"
DAMAGED = "vllm:flexkv_remote_missed_pages_total{reason=content}"
RESTARTS = "vllm:flexkv_remote_restarts_total"
UP = "vllm:flexkv_remote_up"
ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0
STORE_CALL_S = 10.0
CHILD_S = 280.0
TOKENS, HALF = 581, 321
"""Lengths, in tokens, at which a prompt is stored part by part. With these lengths, the answer does not fill another
block.
"""

TICK = Prompt.of(5, 7, max_tokens=1, extra={"kv_transfer_params": {"skip_save": True}})
"""A prompt that makes the engine step once more. In each step the engine updates its metrics, and flexkv polls the
remote tier."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def client(redis: RedisServer) -> Iterator[Store]:
    """A client of the store that belongs to the test, and not to an engine."""
    store = open_store(StoreOptions((redis.url,)))
    yield store
    store.close()


def settings(redis: RedisServer, **more: Any) -> dict[str, Any]:
    """Makes settings with generous time limits, because the tests check which pages the store serves, not how fast."""
    patient: dict[str, Any] = {"remote__probe_s": 10.0, "remote__wait_s": 30.0, "remote__get_s": 4.0}
    # The tiny model computes faster than any store can be read. This setting keeps flexkv from computing instead of
    # reading.
    return {"remote__urls": redis.url, "disk__compute_if_faster": False} | patient | more


@pytest.fixture
def session(engines: Engines, redis: RedisServer) -> EngineSession:
    """The engine that several tests with Redis share."""
    return engines.get(connector(**settings(redis)))


def until(session: EngineSession, done: Callable[[], bool], late: str) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < ends_s, late
        time.sleep(0.05)
        session.ask(TICK)


def wait_written(session: EngineSession) -> None:
    """Waits until the engine writes no more values to the store."""
    session.settle()

    def is_still() -> bool:
        before = session.metric(WRITTEN)
        session.ask(TICK)
        time.sleep(0.3)
        session.ask(TICK)
        return before == session.metric(WRITTEN)

    until(session, is_still, "writes do not end")


def lose_host(session: EngineSession, seed: int = 1) -> None:
    """Drops the engine's own cache and all pages in host memory."""
    session.forget(seed)
    assert session.call("drop_host")["left"] == 0


class Grown:
    """Measures by how much some metrics of an engine have increased since the object was made."""

    def __init__(self, session: EngineSession, *names: str) -> None:
        self._session, self._names = session, names
        self._before = self._now()

    def _now(self) -> list[float]:
        self._session.ask(TICK)
        return [self._session.metric(name) for name in self._names]

    def by(self) -> tuple[float, ...]:
        return tuple(now - before for now, before in zip(self._now(), self._before, strict=True))


def names_in(redis: RedisServer) -> set[str]:
    """Returns the names of all values in the store."""
    with (
        socket.create_connection(("127.0.0.1", redis.port), STORE_CALL_S) as other,
        other.makefile("rb") as said,
    ):
        other.sendall(b"*2\r\n$4\r\nKEYS\r\n$1\r\n*\r\n")
        count = int(said.readline()[1:])
        return {said.read(int(said.readline()[1:]) + 2)[:-2].decode() for _ in range(count)}


def value_format(session: EngineSession) -> ValueFormat:
    owner, groups = pickle.loads(base64.b64decode(session.call("value_parts")["pickled"]))
    return ValueFormat(owner, groups[0], 0)


def read(client: Store, name: str, size: int) -> np.ndarray:
    value = np.empty(size, np.uint8)
    assert client.get([name], [[value]], STORE_CALL_S) == [Outcome.OK]
    return value


def write(client: Store, name: str, value: np.ndarray) -> None:
    assert client.put([name], [[value]], STORE_CALL_S) == [Outcome.OK]


def forge(form: ValueFormat, client: Store, name: str, other: str) -> None:
    """Writes the page of the value `other` under `name`, with a valid digest. Anybody who may write to the store can do
    the same.
    """
    value = read(client, other, form.value_bytes)
    slot, trailer = np.zeros(4 * form.value_bytes, np.uint8), np.zeros(form.trailer_bytes, np.uint8)
    first = 0
    for part in form.parts(slot, trailer)[:-1]:
        part[:] = value[first : first + len(part)]
        first += len(part)
    key = np.frombuffer(bytes.fromhex(name.rpartition("/")[2]), np.uint8)
    form.seal(slot, trailer, key, BLOCK_TOKENS, 0, int(time.time()))
    value[first:] = trailer
    write(client, name, value)


def test_what_an_engine_computed_serves_the_next_one(
    engines: Engines, redis: RedisServer, client: Store, stream: int
) -> None:
    """Prompts that one engine computed are hits in the next engine, which reads them from the store. This engine also
    reads a damaged value and a forged one. This is one test because engines start slowly."""
    prompt, other = Prompt.of(TOKENS, stream), Prompt.of(500, stream + 1)
    pages = prompt.whole_blocks // BLOCK_TOKENS
    assert redis.ask("FLUSHALL") == b"+OK\r\n"
    first = engines.another(connector(**settings(redis)))
    first.check_one(prompt.first(HALF))
    wait_written(first)
    half = names_in(redis)
    assert len(half) == HALF // BLOCK_TOKENS
    first.check_one(prompt.first(HALF + BLOCK_TOKENS))
    wait_written(first)
    [page_10] = names_in(redis) - half
    assert first.check_one(prompt).cached == HALF + BLOCK_TOKENS - 1
    wait_written(first)
    assert len(names_in(redis)) == pages
    assert first.check_one(other).cached == 0
    wait_written(first)
    assert first.metric(READ) == 0
    engines.close_others()

    session = engines.get(connector(**settings(redis)))
    grown = Grown(session, HITS, HOST_HITS, READ, MISSED)
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert grown.by() == (pages, 0, pages, 0)
    # The second time the pages come from host memory.
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert grown.by() == (pages, pages, pages, 0)

    # A bit is flipped in one value. Its page is a miss. The engine recomputes it and the pages after it, and they are
    # written again.
    form = value_format(session)
    value = read(client, page_10, form.value_bytes)
    damaged = value.copy()
    damaged[5000] ^= 4
    write(client, page_10, damaged)
    lose_host(session)
    grown = Grown(session, HITS, DAMAGED, WRITTEN)
    assert session.check_one(prompt).cached == HALF - 1
    wait_written(session)
    assert grown.by() == (HALF // BLOCK_TOKENS, 1, 1)
    # Numbers that are recomputed in a different batch may differ in their last bits.
    again = read(client, page_10, form.value_bytes)
    assert not np.array_equal(again, damaged)
    kv, kv_again = (one[: -form.trailer_bytes].view(np.float32) for one in (value, again))
    assert np.allclose(kv_again, kv, atol=1e-4)
    lose_host(session)

    # In the control, a wrong value has a valid digest. flexkv does not detect it, and the answer changes.
    forge(form, client, page_10, min(half))
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks
    assert answer.tokens != session.reference.tokens(prompt)
    write(client, page_10, value)
    lose_host(session, 2)
    answers = session.check(prompt, other)
    assert [answer.cached for answer in answers] == [prompt.whole_blocks, other.whole_blocks]


def in_the_store_alone(session: EngineSession, stream: int) -> list[Prompt]:
    """Makes two prompts whose pages are in the store, and neither in the engine nor in host memory."""
    prompts = [Prompt.of(601, stream), Prompt.of(500, stream + 1)]
    session.check(*prompts)
    wait_written(session)
    lose_host(session)
    return prompts


def right(session: EngineSession, prompts: list[Prompt], reply: dict[str, Any]) -> None:
    assert [tuple(result["tokens"]) for result in reply["requests"]] == [
        session.reference.tokens(prompt) for prompt in prompts
    ]


def serves_again(session: EngineSession, stream: int) -> None:
    until(session, lambda: session.metric(UP) == 1, "the tier does not heal")
    prompts = in_the_store_alone(session, stream)
    grown = Grown(session, HITS)
    answers = session.check(*prompts)
    whole = [prompt.whole_blocks for prompt in prompts]
    assert [answer.cached for answer in answers] == whole
    assert grown.by() == (sum(whole) // BLOCK_TOKENS,)


def test_the_server_is_killed_under_gets_and_starts_again(
    session: EngineSession, redis: RedisServer, stream: int
) -> None:
    prompts = in_the_store_alone(session, stream)
    asked = [prompt.wire() for prompt in prompts]
    started_s = time.monotonic()
    reply = session.call("signal_while_reading", requests=asked, before=[(redis.pid, signal.SIGKILL)])
    assert reply["reads"] > 0
    right(session, prompts, reply)
    assert time.monotonic() - started_s < WITHIN_S
    redis.stop()
    until(session, lambda: session.metric(UP) == 0, "the lost server was not noticed")
    lose_host(session)
    assert [answer.cached for answer in session.check(*prompts)] == [0, 0]
    session.forget()
    assert session.check_one(prompts[0]).cached == prompts[0].whole_blocks, "host memory serves all the same"
    redis.start()
    serves_again(session, stream + 2)


def test_the_process_with_the_client_is_killed_under_gets(session: EngineSession, stream: int) -> None:
    prompts = in_the_store_alone(session, stream)
    grown = Grown(session, RESTARTS)
    reply = session.call(
        "signal_while_reading",
        requests=[prompt.wire() for prompt in prompts],
        before=[(HELPER, signal.SIGSTOP)],
        later=[(HELPER, signal.SIGKILL)],
    )
    assert reply["moving"] > 0
    right(session, prompts, reply)
    serves_again(session, stream + 2)
    assert grown.by() == (1,)


def test_a_reset_with_gets_in_flight_takes_nothing_from_the_store(
    engines: Engines, session: EngineSession, redis: RedisServer, stream: int
) -> None:
    prompts = in_the_store_alone(session, stream)
    grown = Grown(session, HITS, WRITTEN)
    reply = session.call(
        "signal_while_reading",
        requests=[prompt.wire() for prompt in prompts],
        before=[(redis.pid, signal.SIGSTOP)],
        later=[(redis.pid, signal.SIGCONT)],
        reset=True,
    )
    assert reply["moving"] > 0
    assert reply["reset"]
    right(session, prompts, reply)
    session.settle()
    lose_host(session)
    # After the reset, flexkv treats the engine's weights as new ones. All values in the store belong to the old
    # weights.
    assert [answer.cached for answer in session.check(*prompts)] == [0, 0]
    session.forget()
    assert session.check_one(prompts[0]).cached == prompts[0].whole_blocks
    assert grown.by() == (0, 0)
    assert session.metric(UP) == 0
    engines.close()


def test_a_disk_has_the_beginning_and_the_store_the_rest(
    engines: Engines, redis: RedisServer, tmp_path: Path, stream: int
) -> None:
    """A prompt can have its first pages on disk and its later pages in the store. The engine that fills the disk
    belongs to another tenant, so it finds nothing in the store. This is also the control for the tests in which an
    engine gets hits from the store.
    """
    prompt = Prompt.of(TOKENS, stream)
    on_disk = {"disk__folders": str(tmp_path / "disk"), "disk__bytes_per_folder": SLAB_BYTES}
    others = settings(redis, remote__tenant="another", **on_disk)
    ours = settings(redis, **on_disk)
    writer = engines.get(connector(**settings(redis)))
    writer.check_one(prompt)
    wait_written(writer)
    engines.close()

    session = engines.another(connector(**others))
    assert session.check_one(prompt.first(HALF)).cached == 0
    session.settle()
    wait_durable(session)
    assert session.metric(HITS) == session.metric(READ) == 0
    engines.close_others()

    session = engines.another(connector(**ours))
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.settle()
    half = HALF // BLOCK_TOKENS
    rest = prompt.whole_blocks // BLOCK_TOKENS - half
    assert (session.metric(DISK_HITS), session.metric(HITS), session.metric(READ)) == (half, rest, rest)


def test_pages_of_all_groups_come_from_the_store(
    engines: Engines, redis: RedisServer, gemma_3: Path, gemma_3_alone: Reference, stream: int
) -> None:
    assert redis.ask("FLUSHALL") == b"+OK\r\n"
    more: dict[str, Any] = {"model": str(gemma_3), "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS}
    started = engines.get(connector(**settings(redis, store__tokens="prompt")), **more)
    session = EngineSession(started.process, gemma_3_alone)
    prompt = Prompt.of(405, stream)
    assert session.check_one(prompt).cached == 0
    wait_written(session)
    values = prompt.whole_blocks // BLOCK_TOKENS + (GROUPS - 1) * WINDOW_PAGES
    assert redis.ask("DBSIZE") == b":%d\r\n" % values
    lose_host(session)
    grown = Grown(session, READ, MISSED)
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert grown.by() == (values, 0)


def test_a_tail_comes_from_the_store(engines: Engines, redis: RedisServer, stream: int) -> None:
    assert redis.ask("FLUSHALL") == b"+OK\r\n"
    session = engines.get(connector(**settings(redis, store__partial_blocks=True, store__tokens="prompt")))
    prompt = Prompt.of(170, stream)
    session.check_one(prompt)
    wait_written(session)
    values = prompt.whole_blocks // BLOCK_TOKENS + 1
    assert redis.ask("DBSIZE") == b":%d\r\n" % values
    lose_host(session)
    grown = Grown(session, READ, MISSED)
    assert session.check_one(prompt.then(Prompt.of(40, stream + 1).ids)).cached == 170
    assert grown.by() == (values, 0)
    # The same prompt is a hit except for its last token. The engine computes this token to sample the next one.
    lose_host(session)
    assert session.check_one(prompt).cached == 169


@pytest.mark.long
def test_two_ranks_read_what_two_ranks_have_written(
    engines: Engines, redis: RedisServer, stream: int
) -> None:
    """Two ranks read pages from the store that two ranks have written. As in service, the scheduler is in its own
    process. Its helper reads into memory that the two ranks share."""
    assert redis.ask("FLUSHALL") == b"+OK\r\n"
    prompt = Prompt.of(TOKENS, stream)
    pages = prompt.whole_blocks // BLOCK_TOKENS
    for cached in (0, prompt.whole_blocks):
        session = engines.another(
            connector(**settings(redis)), {**SEPARATE_CORE, **TWO_RANKS}, tensor_parallel_size=2
        )
        assert session.check_one(prompt).cached == cached
        until(session, lambda: redis.ask("DBSIZE") == b":%d\r\n" % pages, "not all pages were written")
        engines.close_others()


def test_an_engine_over_mooncake_serves_the_next_one(
    model: Path, reference: Reference, tmp_path: Path, stream: int
) -> None:
    prompts = [Prompt.of(TOKENS, stream), Prompt.of(500, stream + 1)]
    pages = sum(prompt.whole_blocks for prompt in prompts) // BLOCK_TOKENS
    asked = json.dumps([prompt.wire() for prompt in prompts])
    with network_namespace() as namespace, mooncake(namespace, tmp_path) as (master, _):
        child = [sys.executable, "-W", "ignore", "-m", f"{PACKAGE}.mooncake_engines"]
        arguments = [str(model), master.url, str(tmp_path), str(pages), asked]
        done = subprocess.run(
            namespace.command([*child, *arguments]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    assert done.returncode == 0
    cold, served = map(json.loads, done.stdout.splitlines())
    for found in (cold, served):
        for prompt, answer in zip(prompts, found["answers"], strict=True):
            assert tuple(answer["tokens"]) == reference.tokens(prompt)
    assert [answer["cached"] or 0 for answer in cold["answers"]] == [0, 0]
    assert [answer["cached"] for answer in served["answers"]] == [prompt.whole_blocks for prompt in prompts]
    assert (cold["read"], cold["written"]) == (0, pages)
    assert (served["hits"], served["read"], served["written"]) == (pages, pages, 0)
