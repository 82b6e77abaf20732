"""Tests host pools that several processes share: all of them see the same bytes. Other tests cover pools whose creator
has died, and process ids that are reused.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import BlockRangeError, ClosedError, ContractError, GeometryError
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import OpId, OpKind, Priority, TransferGraph, TransferOp
from flexkv.transfer.host_pool import HostPool, PoolDescriptor
from tests.servers.stopping import stop_all_threads
from tests.unit.transfer.transfer_world import GENEROUS_S, ids

SLOT_BYTES, SLOTS = 128 * 1024, 64
spawn = multiprocessing.get_context("spawn")


def pattern(slot: int, salt: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng([slot, salt]).integers(0, 256, SLOT_BYTES, dtype=np.uint8)


def attach_and_answer(connection: Connection, descriptor: PoolDescriptor) -> None:
    """Runs in a process that attaches the pool: checks the creator's bytes, writes different bytes, and reports whether
    the creator's bytes were right.
    """
    pool = HostPool.attach(descriptor)
    ready = pool.wait_ready(SLOTS, GENEROUS_S)
    wrong = [slot for slot in range(SLOTS) if not (pool.slot(slot) == pattern(slot, 1)).all()]
    for slot in range(SLOTS):
        pool.slot(slot)[:] = pattern(slot, 2)
    kinds = {extent.pages_kind for extent in pool.report()}
    connection.send((ready, wrong, kinds, pool.native.attached))
    pool.close()


def create_and_hang(connection: Connection) -> None:
    pool = HostPool(SLOT_BYTES, SLOTS, shared=True)
    assert pool.wait_ready(SLOTS, GENEROUS_S)
    for slot in range(SLOTS):
        pool.slot(slot)[:] = pattern(slot, 1)
    connection.send(pool.descriptor())
    connection.recv()


def load_what_comes(connection: Connection, descriptor: PoolDescriptor) -> None:
    """Runs in a process that attaches the pool: loads slots 0 to 3, and reports the result. Slots 0 to 2 wait for the
    creator's read 8, and slot 3 waits for the creator's read 9.
    """
    pool = HostPool.attach(descriptor)
    memory = np.zeros((4, SLOT_BYTES), np.uint8)
    view = c_ext.KvView(np.array([[memory.ctypes.data, SLOT_BYTES, SLOT_BYTES, 0, 0]]), 4, SLOT_BYTES)
    engine = TransferEngine()
    engine.attach_view(0, view, pool, 0, owners=[memory])
    reads = np.array([8, 8, 8, 9], np.int64)
    load = TransferOp(OpId(1), OpKind.H2D, 0, Priority.LOAD, ids(range(4)), ids(range(4)), reads=reads)
    ticket = engine.submit(TransferGraph((load,)))
    assert ticket is not None
    connection.send(engine.wait(ticket, 0.05))
    ended = engine.wait(ticket, GENEROUS_S)
    [result] = engine.poll()
    right = [bool((memory[slot] == pattern(slot, 3)).all()) for slot in range(4)]
    connection.send((ended, result.failed.tolist(), right))
    engine.close(GENEROUS_S)


def receive(connection: Connection) -> object:
    assert connection.poll(120), "the other process said nothing"
    return connection.recv()


def test_two_processes_see_the_same_bytes() -> None:
    pool = HostPool(SLOT_BYTES, SLOTS, shared=True, extent_bytes=4 << 20)
    assert pool.wait_ready(SLOTS, GENEROUS_S)
    for slot in range(SLOTS):
        pool.slot(slot)[:] = pattern(slot, 1)
    here, there = spawn.Pipe()
    worker = spawn.Process(target=attach_and_answer, args=(there, pool.descriptor()))
    worker.start()
    assert receive(here) == (True, [], {"attached"}, True)
    worker.join(GENEROUS_S)
    assert worker.exitcode == 0
    assert all((pool.slot(slot) == pattern(slot, 2)).all() for slot in range(SLOTS))
    pool.close()


def test_a_load_waits_for_slots_that_another_process_fills() -> None:
    pool = HostPool(SLOT_BYTES, SLOTS, shared=True)
    assert pool.wait_ready(SLOTS, GENEROUS_S)
    # the load must not mistake this earlier read of slot 3, read 7, for read 9
    pool.native.settle(ids([3]), 7, True)
    here, there = spawn.Pipe()
    worker = spawn.Process(target=load_what_comes, args=(there, pool.descriptor()))
    worker.start()
    assert receive(here) is False
    for slot in range(4):
        pool.slot(slot)[:] = pattern(slot, 3)
    pool.native.settle(ids([0, 2]), 8, True)
    pool.fail_read(ids([1]), 8)
    pool.native.settle(ids([3]), 9, True)
    assert receive(here) == (True, [1], [True, False, True, True])
    worker.join(GENEROUS_S)
    assert worker.exitcode == 0
    with pytest.raises(ContractError, match="read 0"):
        pool.fail_read(ids([1]), 0)
    with pytest.raises(BlockRangeError, match=f"slot {SLOTS}: allowed are"):
        pool.fail_read(ids([SLOTS]), 10)
    pool.close()


def test_an_attached_pool_outlives_its_creator_and_nobody_attaches_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, there = spawn.Pipe()
    creator = spawn.Process(target=create_and_hang, args=(there,))
    creator.start()
    descriptor = receive(here)
    assert isinstance(descriptor, PoolDescriptor)
    pool = HostPool.attach(descriptor)
    assert creator.pid is not None
    os.kill(creator.pid, signal.SIGKILL)
    creator.join(GENEROUS_S)
    assert pool.creator_gone
    assert pool.ready_slots == SLOTS
    assert pool.ready_slots == SLOTS
    assert sum("has ended or closed it" in record.getMessage() for record in caplog.records) == 1
    assert pool.stopped_reason == "", "all slots came up"
    for slot in range(SLOTS):
        assert (pool.slot(slot) == pattern(slot, 1)).all()
        pool.slot(slot)[:] = 0
    with pytest.raises(ClosedError, match=f"/proc/{descriptor.pid}/fd/"):
        HostPool.attach(descriptor)
    pool.close()


def create_much_and_hang(connection: Connection, slots: int) -> None:
    pool = HostPool(1 << 20, slots, shared=True)
    connection.send(pool.descriptor())
    connection.recv()


def test_a_creator_that_dies_during_bring_up_ends_the_wait_of_those_attached() -> None:
    # The creator is stopped and later killed while it touches a gigabyte of memory. Touching all of it would take far
    # longer than the kill.
    here, there = spawn.Pipe()
    slots = 1024
    creator = spawn.Process(target=create_much_and_hang, args=(there, slots))
    creator.start()
    descriptor = receive(here)
    assert isinstance(descriptor, PoolDescriptor)
    assert creator.pid is not None
    stop_all_threads(creator.pid)
    pool = HostPool.attach(descriptor)
    assert not pool.creator_gone
    assert not pool.wait_ready(slots, 0.05)
    os.kill(creator.pid, signal.SIGKILL)
    assert not pool.wait_ready(slots, 1000.0), "it would come up no more"
    assert "has ended or closed it" in pool.stopped_reason
    creator.join(GENEROUS_S)
    pool.close()


def test_numbers_that_name_something_else_now_are_refused() -> None:
    pool = HostPool(4096, 8, shared=True)
    other = HostPool(4096, 8, shared=True)
    descriptor = pool.descriptor()
    with tempfile.TemporaryFile() as file, pytest.raises(ClosedError, match="is not the pool any more"):
        HostPool.attach(dataclasses.replace(descriptor, fd=file.fileno(), token=bytes(16)))
    with pytest.raises(ClosedError, match="its token differs"):
        HostPool.attach(dataclasses.replace(descriptor, fd=other.descriptor().fd, token=bytes(16)))
    with pytest.raises(ClosedError, match="is not the pool any more"):
        HostPool.attach(dataclasses.replace(descriptor, file_bytes=4096, token=bytes(16)))
    foreign = os.memfd_create("flexkv-pool")
    os.ftruncate(
        foreign, descriptor.file_bytes
    )  # name and size are right, but the memory is not sealed, so another process could shrink it
    with pytest.raises(ClosedError, match="sealed"):
        HostPool.attach(dataclasses.replace(descriptor, fd=foreign, token=bytes(16)))
    os.close(foreign)
    with pytest.raises(ContractError, match="token has 16 bytes"):
        HostPool.attach(dataclasses.replace(descriptor, token=b"short"))
    pool.close()
    other.close()
    with pytest.raises(ClosedError, match="is not the pool any more"):
        HostPool.attach(descriptor)


def attach_with_other_geometry(connection: Connection, descriptor: PoolDescriptor) -> None:
    try:
        HostPool.attach(dataclasses.replace(descriptor, slots=descriptor.slots - 1))
    except GeometryError as error:
        connection.send(str(error))
    else:
        connection.send("attached")


def test_another_geometry_is_refused() -> None:
    pool = HostPool(SLOT_BYTES, SLOTS, shared=True)
    here, there = spawn.Pipe()
    worker = spawn.Process(target=attach_with_other_geometry, args=(there, pool.descriptor()))
    worker.start()
    assert "it has 64 slots of 131072 bytes" in str(receive(here))
    worker.join(GENEROUS_S)
    pool.close()


def test_closing_gives_back_the_descriptor_and_the_mapping() -> None:
    def state() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("flexkv-pool" in line for line in maps)

    before = state()
    for _ in range(5):
        pool = HostPool(4096, 64, shared=True)
        assert pool.wait_ready(64, GENEROUS_S)
        pool.close()
    assert state() == before
