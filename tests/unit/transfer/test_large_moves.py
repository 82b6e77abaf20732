"""Runs in plain memory the checks of moves that tests/gpu runs on a GPU: long runs, a pool of more than 4 GiB, digests,
and a pool that two processes share.
"""

from __future__ import annotations

import pytest

from flexkv.transfer.graph import OpKind
from tests.unit.transfer.large_moves import (
    MovesWorld,
    check_digests,
    check_far_blocks,
    check_runs,
    check_second_process,
)


@pytest.mark.parametrize("run_bytes", [65536 + 16, 192 << 10, (1 << 20) + 1, (20 << 20) + 4096])
def test_long_runs_arrive_and_nothing_else_changes(run_bytes: int) -> None:
    assert check_runs(None, run_bytes) == {}


def test_blocks_beyond_4_gib_arrive() -> None:
    check_far_blocks(None)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "control"])
def test_a_flipped_byte_is_found(verify: bool) -> None:
    check_digests(None, verify)


def test_a_second_process_moves_to_and_from_the_pool() -> None:
    check_second_process(None)


def test_a_world_sees_a_block_that_did_not_arrive() -> None:
    world = MovesWorld(None, 2, 4096, 3, 2)
    world.write(0)
    assert world.holds(0, 0)
    assert world.holds(1, None)
    assert not world.holds(1, 0)
    assert not world.holds(0, 0, salt=1)
    world.move(OpKind.D2H, [0], [1])
    world.move(OpKind.H2D, [2], [1])
    assert world.holds(2, 0)
    world.close()
