"""If a request's own loads fail for some pages, the manager does not promise these pages to the request again, even if
the tiers still have them.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec, ManagerLimits
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.promise.load_tries import MAX_REQUESTS, LoadTries
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.errors import ConfigError
from flexkv.transfer.graph import OpKind, OpStatus
from tests.unit.cache.disk_world import BLOCK_TOKENS, chain, traffic, written
from tests.unit.cache.host_world import end, hit, ids, keys, make, store

GDS = traffic(gds_loads=GdsUse.ALWAYS)


def fail_a_load(
    manager: LocalCacheManager,
    chain: np.ndarray,
    failed: list[int],
    request: str = "r",
    start: int = 0,
    status: OpStatus = OpStatus.FAILED,
) -> int:
    """Looks up `chain`, begins a load of all promised blocks, and reports the pages `failed` as failed. Returns how
    many blocks were promised.
    """
    blocks = manager.match(request, [chain], start * BLOCK_TOKENS).blocks
    if blocks:
        graph = manager.begin_load(request, [np.arange(blocks, dtype=np.int32)])
        assert graph is not None
        pages = failed if status is OpStatus.FAILED else list(range(blocks))
        end(manager, graph.ops[0].op_id, status, ids(*pages))
    return blocks


def test_a_cancelled_load_is_not_promised_again() -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    promised = [fail_a_load(manager, chain, [], status=OpStatus.CANCELLED) for _ in range(3)]
    assert promised == [4, 0, 0]
    assert hit(manager, chain) == 4, "nothing is wrong with the pages: others are promised them"


def test_what_came_before_the_failed_page_is_promised_once_more_and_then_nothing() -> None:
    manager, chain = make(), keys(6)
    store(manager, chain)
    promised = []
    for failed in ([4], [1]):
        promised.append(fail_a_load(manager, chain, failed))
        # Another request has computed and stored the failed page, so the page is in host memory again.
        store(manager, chain, "other")
    assert promised == [6, 4]
    assert manager.match("r", [chain], 0).blocks == 0
    assert hit(manager, chain) == 6


def test_blocks_that_the_engine_has_itself_are_counted_too() -> None:
    manager, chain = make(), keys(6)
    store(manager, chain)
    assert fail_a_load(manager, chain, [1], start=2) == 4
    store(manager, chain[3:4], "other", 3)
    assert fail_a_load(manager, chain, [], start=0) == 3


def test_the_memory_ends_with_the_request() -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    fail_a_load(manager, chain, [], status=OpStatus.CANCELLED)
    manager.release("r")
    assert manager.match("r", [chain], 0).blocks == 0, "a lease that ends is not the request's end"
    manager.end_request("r")
    assert manager.match("r", [chain], 0).blocks == 4


def test_a_load_that_outlives_its_request_leaves_no_memory() -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    manager.match("r", [chain], 0)
    graph = manager.begin_load("r", [ids(0, 1, 2, 3)])
    assert graph is not None
    manager.end_request("r")
    end(manager, graph.ops[0].op_id, OpStatus.CANCELLED)
    assert len(manager.promises.load_tries) == 0
    assert manager.match("r", [chain], 0).blocks == 4


def test_one_load_that_fails_on_both_ranks_and_by_both_ways_is_one_failure() -> None:
    keys = chain(6)
    world = written(keys, slots=8, limits=GDS, manager_limits=ManagerLimits(ranks=2))
    world.store(keys[:2])
    assert world.look(keys).blocks == 6
    ops = world.begin(list(range(6))).ops
    assert [op.kind for op in ops] == [OpKind.H2D, OpKind.GDS_READ]
    for op in ops:
        for rank in range(2):
            end(world.manager, op.op_id, OpStatus.CANCELLED, rank=rank)
    skip = world.manager.promises.load_tries.of_request("r")
    assert skip is not None
    assert (skip.failures, skip.first_token, skip.straight) == (1, 0, True)


def test_a_reset_is_no_failure_of_the_load() -> None:
    manager, chain = make(), keys(4)
    store(manager, chain)
    manager.match("r", [chain], 0)
    graph = manager.begin_load("r", [ids(0, 1, 2, 3)])
    assert graph is not None
    manager.reset()
    end(manager, graph.ops[0].op_id, OpStatus.FAILED, ids(1))
    store(manager, chain)
    assert manager.match("r", [chain], 0).blocks == 4


def test_a_load_that_fails_from_disk_is_tried_through_host_memory_and_then_not_at_all() -> None:
    keys = chain(4)
    world = written(keys, limits=GDS)
    assert world.look(keys).blocks == 4
    op = world.load(4)
    assert op.kind is OpKind.GDS_READ
    world.end_load(op, status=OpStatus.CANCELLED)
    result = world.look(keys)
    assert (result.blocks, result.reads) == (0, 1), "another way is another source"
    assert world.look(keys, "other").blocks == 4, "others go the way that failed this one"
    world.manager.end_request("other")
    world.run()
    assert world.match(keys).blocks == 4
    op = world.load(4)
    assert op.kind is OpKind.H2D
    world.end_load(op, status=OpStatus.CANCELLED)
    result = world.look(keys)
    assert (result.blocks, result.reads) == (0, 0)
    assert world.take() == [], "what the request will not be promised is not read for it"


def test_streamed_pages_that_did_not_come_are_not_waited_for_again() -> None:
    keys = chain(4)
    world = written(keys, limits=traffic(streams=True))
    assert world.look(keys).blocks == 4
    reads = world.take()
    op = world.load(4)
    world.end_load(op, status=OpStatus.CANCELLED)
    result = world.look(keys)
    assert (result.blocks, result.reads) == (0, 0)
    for read in reads:
        world.end(read)
    assert world.look(keys).blocks == 0
    assert world.match(keys, "other").blocks == 4


def test_requests_whose_end_nobody_tells_are_bounded() -> None:
    manager, chain = make(), keys(1)
    store(manager, chain)
    for number in range(MAX_REQUESTS + 5):
        fail_a_load(manager, chain, [], f"r{number}", status=OpStatus.CANCELLED)
    assert len(manager.promises.load_tries) == MAX_REQUESTS
    assert manager.promises.load_tries.of_request("r0") is None
    assert manager.promises.load_tries.of_request(f"r{MAX_REQUESTS + 4}") is not None


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_engine_that_ends_requests_whose_load_fails_is_promised_nothing_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If an engine ends requests whose loads fail, the manager promises it nothing for some time after a failed load. A
    client sends an ended request again under a new id, so remembering failed loads by request would not help.
    """
    clock, chain = Clock(), keys(4)
    manager = LocalCacheManager(
        (GroupSpec(4, 16),), ManagerLimits(rest_s=30.0), tiers=unit_tiers(), clock=clock
    )
    manager.grow(0, 16)
    store(manager, chain)
    assert manager.match("promised before", [chain], 0).blocks == 4
    assert fail_a_load(manager, chain, [], status=OpStatus.CANCELLED) == 4
    manager.end_request("r")
    assert hit(manager, chain) == 0
    assert manager.match("promised before", [chain], 0).blocks == 4, "what was promised is kept"
    fail_a_load(manager, chain, [], "promised before", status=OpStatus.CANCELLED)
    assert len([r for r in caplog.records if "nothing is promised for the next 30 s" in r.message]) == 1
    clock.now_s += 29
    assert hit(manager, chain) == 0
    clock.now_s += 2
    assert hit(manager, chain) == 4


def test_pages_that_are_forgotten_are_no_reason_to_rest() -> None:
    manager, chain = make(rest_s=30.0), keys(4)
    store(manager, chain)
    fail_a_load(manager, chain, [2])
    assert hit(manager, chain) == 2


def test_a_rest_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rest_s=-1\.0; allowed are 0 and more"):
        make(rest_s=-1.0)


@pytest.mark.parametrize("first", [0, 3])
def test_an_empty_table_promises_as_ever(first: int) -> None:
    failed = LoadTries()
    assert failed.of_request("r") is None
    failed.end_request("r")
    manager, chain = make(), keys(5)
    store(manager, chain)
    assert manager.match("r", [chain], first * BLOCK_TOKENS).blocks == 5 - first
