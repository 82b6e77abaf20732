"""Tests which graphs `submit` accepts, and which it refuses. A refused graph leaves no op, id or queue entry behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import (
    BlockRangeError,
    ClosedError,
    ConfigError,
    ContractError,
    FlexKVError,
    GeometryError,
)
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import (
    Edge,
    EdgeKind,
    OpId,
    OpKind,
    OpStatus,
    Priority,
    TransferGraph,
    TransferOp,
)
from flexkv.transfer.host_pool import HostPool
from tests import testing_ext
from tests.unit.transfer.transfer_world import GENEROUS_S, STALL, World, ids


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_pages_come_back_as_they_were(
    make_world: Callable[..., World], layerwise: bool, shared: bool
) -> None:
    world = make_world(shared=shared)
    before = world.scribble()
    blocks, slots = [3, 0, 31, 7], [5, 31, 0, 9]
    assert [r.status for r in world.run(world.op(OpKind.D2H, blocks, slots)).values()] == [OpStatus.OK]
    for block, slot in zip(blocks, slots, strict=True):
        assert (world.stored(slot) == before[:, block, :].reshape(-1)).all()
    world.memory[:] = 0
    world.run(world.op(OpKind.H2D, [1, 2, 4, 6], slots, layerwise=layerwise))
    for target, source in zip([1, 2, 4, 6], blocks, strict=True):
        assert (world.memory[:, target] == before[:, source]).all()
    untouched = [block for block in range(world.blocks) if block not in (1, 2, 4, 6)]
    assert (world.memory[:, untouched] == 0).all()
    moves, failed, moved_bytes, busy_s = world.counter.count(OpKind.H2D)
    assert (moves, failed) == (4 * (world.layers if layerwise else 1), 0)
    assert moved_bytes == 4 * world.layers * world.run_bytes
    assert busy_s > 0


def bad_op(world: World, **changes: object) -> TransferOp:
    good: dict[str, object] = {
        "op_id": OpId(77),
        "kind": OpKind.H2D,
        "group": 0,
        "priority": Priority.LOAD,
        "blocks": ids([1, 2]),
        "slots": ids([1, 2]),
    }
    return TransferOp(**{**good, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"blocks": ids([1, 32])}, BlockRangeError, r"block 32 at page 1 of op 77 .*allowed are \[0, 32\)"),
        ({"blocks": ids([-1, 2])}, BlockRangeError, r"block -1 at page 0"),
        ({"slots": ids([1, 32])}, BlockRangeError, r"slot 32 at page 1 of op 77 .*allowed are \[0, 32\)"),
        ({"slots": ids([-5, 2])}, BlockRangeError, r"slot -5 at page 0"),
        ({"blocks": ids([1])}, ContractError, r"1 blocks for 2 slots"),
        ({"blocks": ids([])}, ContractError, r"0 blocks for 2 slots; H2D needs 2"),
        ({"group": 3}, ContractError, r"group 3 has no view"),
        ({"kind": OpKind.DISK_READ}, ContractError, r"no lane for DISK_READ .*this engine has H2D, D2H"),
        ({"kind": OpKind.GDS_WRITE}, ContractError, r"no lane for GDS_WRITE"),
        ({"kind": 99}, ContractError, r"no lane for unknown \(99\)"),
        ({"kind": -1}, ContractError, r"no lane for unknown"),
        ({"priority": 2}, ContractError, r"priority 2: must be in \[0, 2\)"),
        ({"blocks": np.array([1, 2])}, ContractError, r"blocks of op 77 must be an int32 .*int64"),
        ({"slots": np.array([1.0, 2.0])}, ContractError, r"slots of op 77 must be an int32"),
        ({"slots": [1, 2]}, ContractError, r"given a list"),
        ({"blocks": ids([1, 0, 2, 0])[::2]}, ContractError, r"C-contiguous"),
        ({"blocks": ids([1, 2]).reshape(1, 2)}, ContractError, r"shape \[pages\]"),
        ({"blocks": ids([2, 2])}, ContractError, r"block 2 is a target of two pages of op 77"),
        (
            {"blocks": ids([9, 3, 9]), "slots": ids([1, 2, 3])},
            ContractError,
            r"block 9 is a target of two pages",
        ),
        (
            {"kind": OpKind.D2H, "blocks": ids([1, 2, 3]), "slots": ids([5, 1, 5])},
            ContractError,
            r"slot 5 is a target of two pages of op 77",
        ),
        ({"places": ids([1, 2])}, ContractError, r"2 places and 0 bytes of tags for 2 slots; H2D needs 0"),
        ({"tags": np.zeros((2, 40), np.uint8)}, ContractError, r"0 places and 80 bytes of tags"),
        ({"tags": np.zeros((2, 39), np.uint8)}, ContractError, r"tags of op 77 must be a uint8"),
        ({"tags": np.zeros((2, 40), np.int8)}, ContractError, r"tags of op 77 must be a uint8"),
        ({"places": np.array([1, 2])}, ContractError, r"places of op 77 must be an int32"),
        ({"op_id": OpId(1 << 63)}, ContractError, r"must be an integer of (32|64) bits"),
        ({"kind": 1 << 32}, ContractError, r"must be an integer of (32|64) bits"),
        ({"group": "0"}, ContractError, r"must be an integer of (32|64) bits"),
    ],
)
def test_a_bad_op_is_refused_and_nothing_of_its_graph_is_queued(
    world: World, changes: dict[str, object], error: type[FlexKVError], text: str
) -> None:
    good = world.op(OpKind.D2H, [0], [0])
    with pytest.raises(error, match=text):
        world.engine.submit(TransferGraph((good, bad_op(world, **changes))))
    assert all(lane.open_ops == lane.held_places == 0 for lane in world.engine.lanes())
    assert world.engine.poll() == []
    assert world.mover.calls == 0
    world.run(good)  # the refused graph has not used up the op's id


def test_what_is_only_read_may_be_named_twice(world: World) -> None:
    before = world.scribble()
    world.run(world.op(OpKind.D2H, [4, 4, 2], [9, 8, 7]))
    world.run(world.op(OpKind.H2D, [20, 10, 11], [9, 9, 7]))
    for block, source in ((20, 4), (10, 4), (11, 2)):
        assert (world.memory[:, block] == before[:, source]).all()


def test_ids_may_lie_at_any_address(world: World) -> None:
    odd = np.frombuffer(b"-" + ids([3, 1]).tobytes(), dtype=np.int32, offset=1)
    assert not odd.flags.aligned
    before = world.scribble()
    world.run(world.op(OpKind.D2H, [3, 1], [0, 1]))
    world.submit(bad_op(world, kind=OpKind.D2H, blocks=odd, slots=ids([5, 6])))
    world.results(1)
    assert (world.stored(5) == before[:, 3].reshape(-1)).all()


def test_a_slot_whose_memory_is_not_up_is_refused(make_world: Callable[..., World]) -> None:
    world = make_world()
    growing = HostPool(64 * 1024, 8192)
    world.engine.attach_view(1, world.view, growing)
    with pytest.raises(BlockRangeError, match=r"slot 8191 at page 0 .*\(ready\), of 8192"):
        world.engine.submit(TransferGraph((bad_op(world, group=1, blocks=ids([0]), slots=ids([8191])),)))
    growing.close()
    with pytest.raises(ClosedError, match="group 1 was closed"):
        world.engine.submit(TransferGraph((bad_op(world, group=1, blocks=ids([0]), slots=ids([0])),)))


@pytest.mark.parametrize(
    ("edges", "text"),
    [
        ([(1, 0, EdgeKind.BARRIER)], "edge 1 -> 0: must lead forward"),
        ([(0, 0, EdgeKind.BARRIER)], "edge 0 -> 0"),
        ([(0, 2, EdgeKind.BARRIER)], "edge 0 -> 2"),
        ([(-1, 1, EdgeKind.BARRIER)], "edge -1 -> 1"),
        ([(0, 1, 7)], "kind 7"),
        ([(0, 1, EdgeKind.STREAM)], "as many pages on both sides, given 2 and 1"),
    ],
)
def test_bad_edges_are_refused(world: World, edges: Sequence[tuple[int, int, EdgeKind]], text: str) -> None:
    ops = (world.op(OpKind.D2H, [0, 1]), world.op(OpKind.H2D, [2], [0]))
    with pytest.raises(ContractError, match=text):
        world.engine.submit(TransferGraph(ops, tuple(Edge(*edge) for edge in edges)))
    assert all(lane.held_places == 0 for lane in world.engine.lanes())


def test_an_op_id_in_flight_is_refused_until_its_result_is_polled(world: World) -> None:
    op = world.op(OpKind.D2H, [0])
    ticket = world.submit(op)
    with pytest.raises(ContractError, match=f"op id {op.op_id} is in flight"):
        world.submit(op)
    with pytest.raises(ContractError, match="is in flight"):
        world.submit(bad_op(world), bad_op(world))
    assert world.engine.wait(ticket, GENEROUS_S)
    world.results(1)
    world.run(op)


def test_empty_ops_and_empty_graphs_end_ok(world: World) -> None:
    empty, after = world.op(OpKind.H2D, []), world.op(OpKind.D2H, [1])
    results = world.run(empty, after, edges=[(0, 1, EdgeKind.BARRIER)])
    assert [result.status for result in results.values()] == [OpStatus.OK, OpStatus.OK]
    assert world.engine.wait(world.submit(), 0.0)


def test_a_full_queue_is_busy_for_the_whole_graph_and_loads_have_places_of_their_own(
    make_world: Callable[..., World],
) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H)], queue_ops=4)
    stores = [world.op(OpKind.D2H, [i]) for i in range(3)]
    world.submit(*stores)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    two = TransferGraph((world.op(OpKind.D2H, [4]), world.op(OpKind.D2H, [5])))
    assert world.engine.submit(two) is None
    (before,) = [lane.held_places for lane in world.engine.lanes() if lane.kind is OpKind.D2H]
    assert before == 3, "a BUSY graph holds no place"
    one = world.submit(world.op(OpKind.D2H, [4]))
    assert world.engine.submit(TransferGraph((world.op(OpKind.D2H, [5]),))) is None
    loads = [world.op(OpKind.H2D, [10 + i], [20 + i]) for i in range(4)]
    world.submit(*loads)  # stores do not use queue entries of loads
    world.mover.release()
    assert world.engine.wait(one, GENEROUS_S)
    # The op has finished, but its result was not polled. It still uses a queue entry, so that the number of results is
    # limited, too.
    assert world.engine.submit(two) is None
    assert len(world.results(8)) == 8
    assert world.engine.submit(two) is not None
    world.results(2)
    with pytest.raises(ContractError, match="more than 4 H2D ops of one priority never fits"):
        world.submit(*[world.op(OpKind.H2D, [i]) for i in range(5)])


def test_a_stripe_must_fit_the_slot_and_a_group_has_one_view(world: World) -> None:
    with pytest.raises(GeometryError, match="a stripe of 4096 bytes at offset 4096 must lie in"):
        world.engine.attach_view(1, world.view, world.pool, 4096)
    with pytest.raises(GeometryError, match="multiple of 4096"):
        world.engine.attach_view(1, world.view, world.pool, 8)
    for offset in (-8, 4, 4096, 2**63 - 8):
        with pytest.raises(GeometryError, match="bytes of digests at offset"):
            world.engine.attach_view(1, world.view, world.pool, 0, digest_offset=offset)
    with pytest.raises(ContractError, match="group 0 has a view already"):
        world.engine.attach_view(0, world.view, world.pool)
    with pytest.raises(ContractError, match="group 5 has no view"):
        world.engine.detach_view(5)
    world.engine.detach_view(0)
    world.engine.attach_view(0, world.view, world.pool, owners=[world.memory])
    world.run(world.op(OpKind.D2H, [1]))


@pytest.mark.parametrize(
    ("options", "text"), [({"queue_ops": 0}, "queue_ops=0"), ({"copy_threads": 65}, "copy_threads=65")]
)
def test_options_out_of_range_are_named(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TransferEngine(**options)  # type: ignore[arg-type]


def test_an_op_keeps_view_and_pool_alive(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H)])
    before = world.scribble()
    ticket = world.submit(world.op(OpKind.D2H, [3]))
    assert world.mover.wait_stalled(1, GENEROUS_S)
    kept = world.pool.slot(3)
    world.engine.detach_view(0)
    world.pool.close()
    world.mover.release()
    assert world.engine.wait(ticket, GENEROUS_S)
    assert (kept == before[:, 3].reshape(-1)).all()
    assert world.results(1).popitem()[1].status is OpStatus.OK


def test_views_of_two_groups_may_share_memory_only_block_by_block(world: World) -> None:
    rows = world.view.runs
    world.engine.attach_view(
        1, world.view, world.pool, owners=[world.memory]
    )  # allowed, because hybrid groups have views of the same blocks
    shifted = rows.copy()
    shifted[:, 0] += world.run_bytes  # with this shift, block i is where group 0 has block i + 1
    view = c_ext.KvView(shifted, world.blocks - 1, world.layers * world.run_bytes)
    with pytest.raises(GeometryError, match=r"groups 2 and 0: block 0 .* and block 1 .* share bytes"):
        world.engine.attach_view(2, view, world.pool)
    wider = rows[:1].copy()
    wider[0, 1] = 2 * world.run_bytes  # with this stride, block 1 starts where group 0 has block 2
    view = c_ext.KvView(wider, world.blocks // 2, world.run_bytes)
    with pytest.raises(GeometryError, match="share bytes"):
        world.engine.attach_view(2, view, world.pool)
