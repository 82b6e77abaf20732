"""When ops are cancelled, the engine drops copies that have not been issued, and completes copies in flight. Each op
ends exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

from flexkv.transfer.graph import EdgeKind, OpKind, OpStatus
from tests import testing_ext
from tests.unit.transfer.transfer_world import GENEROUS_S, STALL, World


def test_cancel_before_anything_was_issued(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, nth_op=0)])
    world.submit(world.op(OpKind.D2H, [0]))
    assert world.mover.wait_stalled(1, GENEROUS_S)
    ops = [world.op(OpKind.D2H, [1, 2]), world.op(OpKind.H2D, [3, 4], [1, 2]), world.op(OpKind.D2H, [])]
    ticket = world.submit(*ops, edges=[(0, 1, EdgeKind.STREAM), (1, 2, EdgeKind.BARRIER)])
    assert world.engine.cancel(ticket) == 4
    assert world.engine.wait(ticket, 0.0), "cancelled ops end at once"
    results = world.results(3)
    assert {result.status for result in results.values()} == {OpStatus.CANCELLED}
    assert [results[op.op_id].failed.tolist() for op in ops] == [[0, 1], [0, 1], []]
    assert world.engine.cancel(ticket) == 0
    calls = world.mover.calls
    world.mover.release()
    world.results(1)
    assert world.mover.calls == calls, "a cancelled page was moved"


def test_cancel_while_pages_move_names_what_did_not_arrive(make_world: Callable[..., World]) -> None:
    # A page is 1 MiB, so a work item has 8 pages. Page 3 hangs, so pages 0 to 7 are in flight, and pages 8 to 19 are
    # not.
    world = make_world(
        layers=2,
        blocks=20,
        slots=20,
        run_bytes=512 * 1024,
        rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, page=3)],
    )
    before = world.scribble()
    op = world.op(OpKind.D2H, range(20))
    ticket = world.submit(op)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    assert world.engine.cancel(ticket) == 12
    assert not world.engine.wait(ticket, 0.05), "it has not ended: its bytes are moving"
    world.mover.release()
    result = world.results(1)[op.op_id]
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, list(range(8, 20)))
    assert result.reason == "cancelled"
    assert all((world.stored(slot) == before[:, slot].reshape(-1)).all() for slot in range(8))


def test_cancel_between_layers_stops_after_the_one_that_moves(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.H2D, layer=1, page=0)])
    op = world.op(OpKind.H2D, [0, 1], layerwise=True)
    ticket = world.submit(op)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.engine.cancel(ticket)
    world.mover.release()
    result = world.results(1)[op.op_id]
    # Bytes of pages 0 and 1 have already overwritten their targets, so the op is FAILED and not CANCELLED.
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [0, 1])
    assert world.counter.count(OpKind.H2D)[0] == 4


def test_cancel_after_the_end_changes_nothing(world: World) -> None:
    op = world.op(OpKind.D2H, [1])
    ticket = world.submit(op)
    assert world.engine.wait(ticket, GENEROUS_S)
    assert world.engine.cancel(ticket) == 0
    assert world.results(1)[op.op_id].status is OpStatus.OK
