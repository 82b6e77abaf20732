"""Gated stores are submitted before their layers are written. They copy each layer only after it has been opened."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from flexkv.errors import BlockRangeError, ContractError
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import OpKind, OpStatus, TransferGraph, TransferOp
from tests import testing_ext
from tests.unit.transfer.transfer_world import FAIL, GENEROUS_S, STALL, World

BLOCKS = range(3)


def gated(world: World, *ops: TransferOp) -> Ticket:
    ticket = world.engine.submit(TransferGraph(ops), gated=True)
    assert ticket is not None, "BUSY"
    return ticket


def store(world: World, blocks: Sequence[int] = BLOCKS) -> TransferOp:
    return world.op(OpKind.D2H, blocks, layerwise=True)


def copied(world: World) -> int:
    """Returns the number of layers that were copied from the engine's pool, summed over pages."""
    return int(world.counter.count(OpKind.D2H)[0])


def wait_copied(world: World, moves: int) -> None:
    ends_s = time.monotonic() + GENEROUS_S
    while copied(world) < moves:
        assert time.monotonic() < ends_s, f"{copied(world)} of {moves} copies"
        time.sleep(0.001)


def test_each_layer_is_copied_when_it_is_named_and_not_before(world: World) -> None:
    """A gated store copies each layer only after it was opened. A forward pass writes and opens the layers one after
    another. At the end the stored pages contain the bytes that the forward pass wrote.
    """
    world.scribble(seed=1)
    op = store(world)
    ticket = gated(world, op)
    for layer in range(world.layers):
        assert not world.engine.wait(ticket, 0.01)
        assert copied(world) == layer * len(BLOCKS)
        world.memory[layer] = np.random.default_rng(layer).integers(0, 256, world.memory[layer].shape)
        world.engine.open_layers([ticket], layer + 1)
        wait_copied(world, (layer + 1) * len(BLOCKS))
    assert world.engine.wait(ticket, GENEROUS_S)
    assert world.results(1)[op.op_id].status is OpStatus.OK
    for block in BLOCKS:
        assert (world.stored(block) == world.page(block)).all()


def test_control_a_store_that_is_not_gated_copies_what_was_there_before(world: World) -> None:
    world.scribble(seed=1)
    ticket = world.submit(store(world))
    assert world.engine.wait(ticket, GENEROUS_S)
    world.scribble(seed=2)
    world.engine.open_layers([ticket], world.layers)
    world.results(1)
    assert not (world.stored(0) == world.page(0)).all()


def test_several_layers_and_graphs_at_once(world: World) -> None:
    tickets = [gated(world, store(world, [n, n + 10]), store(world, [n + 20])) for n in range(3)]
    world.engine.open_layers(tickets[:2], 2)
    wait_copied(world, 2 * 3 * 2)
    before = world.scribble()
    # Layers 0 and 1 of the first two graphs are not copied again, because a layer is opened only once.
    world.engine.open_layers(tickets, world.layers)
    world.engine.open_layers(tickets, 1)
    assert all(world.engine.wait(ticket, GENEROUS_S) for ticket in tickets)
    assert {result.status for result in world.results(6).values()} == {OpStatus.OK}
    assert copied(world) == 3 * 3 * world.layers
    run = world.run_bytes
    for block in (0, 10, 20, 1, 11, 21):
        assert (world.stored(block)[: 2 * run] == 0).all()
        assert (world.stored(block)[2 * run :] == before[2:, block].reshape(-1)).all()
    assert (world.stored(2) == before[:, 2].reshape(-1)).all()


def test_a_page_that_fails_in_a_layer_fails_alone(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(FAIL, kind=OpKind.D2H, page=1, layer=2)])
    op = store(world)
    ticket = gated(world, op)
    for layers in range(1, world.layers + 1):
        world.engine.open_layers([ticket], layers)
    assert world.engine.wait(ticket, GENEROUS_S)
    result = world.results(1)[op.op_id]
    assert (result.status, result.failed.tolist()) == (OpStatus.FAILED, [1])
    assert copied(world) == 2 * world.layers + 2, "no layer of it after the one that failed"


@pytest.mark.parametrize(("opened", "status"), [(0, OpStatus.CANCELLED), (2, OpStatus.FAILED)])
def test_what_is_cancelled_before_its_last_layer_stores_nothing(
    world: World, opened: int, status: OpStatus
) -> None:
    op = store(world)
    ticket = gated(world, op)
    world.engine.open_layers([ticket], opened)
    wait_copied(world, opened * len(BLOCKS))
    assert world.engine.cancel(ticket) == len(BLOCKS)
    result = world.results(1)[op.op_id]
    assert (result.status, result.failed.tolist()) == (status, list(BLOCKS))
    world.engine.open_layers([ticket], world.layers)
    assert copied(world) == opened * len(BLOCKS)


def test_others_pass_a_store_at_its_gate(world: World) -> None:
    """Stores and loads that are submitted later do not wait for the forward pass for which a gated store waits."""
    ticket = gated(world, store(world))
    world.run(world.op(OpKind.D2H, [7]))
    world.run(world.op(OpKind.H2D, [8], [7]))
    assert copied(world) == 1
    world.engine.open_layers([ticket], world.layers)
    assert world.engine.wait(ticket, GENEROUS_S)
    world.results(1)


def test_a_layer_in_flight_when_the_next_is_named(make_world: Callable[..., World]) -> None:
    world = make_world(rules=[testing_ext.FaultRule(STALL, kind=OpKind.D2H, layer=0, page=0)])
    before = world.scribble()
    ticket = gated(world, store(world))
    world.engine.open_layers([ticket], 1)
    assert world.mover.wait_stalled(1, GENEROUS_S)
    world.engine.open_layers([ticket], world.layers)
    world.mover.release()
    assert world.engine.wait(ticket, GENEROUS_S)
    world.results(1)
    for block in BLOCKS:
        assert (world.stored(block) == before[:, block].reshape(-1)).all()


def test_closing_ends_a_store_at_its_gate(world: World) -> None:
    op = store(world)
    gated(world, op)
    assert world.engine.close(GENEROUS_S)
    assert world.results(1)[op.op_id].status is OpStatus.CANCELLED


def test_what_cannot_be_gated_is_refused(world: World) -> None:
    for op, name in (
        (world.op(OpKind.D2H, [1]), "a D2H"),
        (world.op(OpKind.H2D, [1], layerwise=True), "a layerwise H2D"),
    ):
        with pytest.raises(ContractError, match=f"{name} in a gated graph, which takes layerwise D2H only"):
            gated(world, op)
    first = gated(world, store(world))
    with pytest.raises(ContractError, match=r"open_layers\(9\): tickets given are"):
        world.engine.open_layers([first, Ticket(9)], 4)
    assert copied(world) == 0, "nothing was opened"
    for layers in (-1, world.layers + 1, 2**31 - 1):
        with pytest.raises(BlockRangeError, match=rf"{layers} layers; allowed are 0 to {world.layers}"):
            world.engine.open_layers([first], layers)
    assert copied(world) == 0, "nothing was opened"
    with pytest.raises(ContractError, match="has no streams, but one was given"):
        world.engine.open_layers([first], 4, stream=0)
