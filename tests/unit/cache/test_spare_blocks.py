"""Spare blocks are useful only to requests that diverge from a prompt. If spare blocks have more than their share of
host memory, they are evicted first. A block that a request uses is no longer spare.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.manager import LocalCacheManager
from flexkv.facts.keys import Keys, Rule
from tests.unit.cache.host_world import end, keys, make, store

SLOTS = 32
SHARE = SLOTS // 16
SPARE, OTHERS, LATER = keys(6, 1), keys(SLOTS - 6, 2), keys(6, 3)


def offer(manager: LocalCacheManager, offered: Keys, request: str, spare: bool) -> int | None:
    """Offers blocks for a store. Returns the store's op, or None if nothing is to be stored."""
    blocks = np.arange(len(offered), dtype=np.int32)
    plan = manager.begin_store(request, 0, offered, blocks, 0, spare=spare)
    return None if plan.graph is None else plan.graph.ops[0].op_id


def full_of_spares() -> LocalCacheManager:
    """Returns a manager whose host memory is full, and whose spare blocks were stored last."""
    manager = make(SLOTS)
    store(manager, OTHERS, "others")
    manager.end_request("others")
    op = offer(manager, SPARE, "spare", spare=True)
    assert op is not None
    end(manager, op)
    manager.end_request("spare")
    return manager


def left_after(manager: LocalCacheManager) -> tuple[int, int]:
    """Stores LATER, for which earlier blocks are evicted. Returns how many blocks of SPARE and how many of OTHERS are
    left.
    """
    store(manager, LATER, "later")
    manager.end_request("later")
    assert manager.present(0, LATER).all()
    return int(manager.present(0, SPARE).sum()), int(manager.present(0, OTHERS).sum())


def test_spare_blocks_leave_first_where_they_have_more_than_their_share() -> None:
    evicted = len(LATER)
    assert left_after(full_of_spares()) == (SHARE, len(OTHERS) - (evicted - (len(SPARE) - SHARE)))


def loaded(manager: LocalCacheManager) -> None:
    assert manager.match("sibling", [SPARE], 0).blocks == len(SPARE)
    graph = manager.begin_load("sibling", [np.arange(len(SPARE), dtype=np.int32)])
    assert graph is not None
    end(manager, graph.ops[0].op_id)
    manager.end_request("sibling")


def offered_as_no_spare(manager: LocalCacheManager) -> None:
    assert offer(manager, SPARE, "sibling", spare=False) is None


@pytest.mark.parametrize("use", [loaded, offered_as_no_spare])
def test_a_block_that_was_of_use_is_spare_no_more(use: Callable[[LocalCacheManager], None]) -> None:
    manager = full_of_spares()
    use(manager)
    assert left_after(manager) == (len(SPARE), len(OTHERS) - len(LATER))


def test_one_that_is_offered_as_no_spare_while_it_is_stored_is_none() -> None:
    manager = make(SLOTS)
    store(manager, OTHERS, "others")
    op = offer(manager, SPARE, "spare", spare=True)
    assert op is not None
    offered_as_no_spare(manager)
    end(manager, op)
    for request in ("others", "spare", "sibling"):
        manager.end_request(request)
    assert left_after(manager) == (len(SPARE), len(OTHERS) - len(LATER))


def test_an_offer_of_spare_blocks_leaves_those_that_are_there_as_they_are() -> None:
    manager = full_of_spares()
    assert offer(manager, OTHERS, "again", spare=True) is None
    manager.end_request("again")
    assert left_after(manager)[0] == SHARE


def test_their_share_is_of_all_groups_that_share_slots() -> None:
    groups = (GroupSpec(4, SLOTS), GroupSpec(4, SLOTS, Rule.WINDOW, 1, shares=0))
    manager = make(groups=groups)
    store(manager, OTHERS, "others", group=0)
    plan = manager.begin_store("spare", 1, SPARE, np.arange(len(SPARE), dtype=np.int32), 0, spare=True)
    assert plan.graph is not None
    end(manager, plan.graph.ops[0].op_id)
    store(manager, LATER, "later", group=0)
    assert manager.present(1, SPARE).sum() == SHARE
    assert manager.present(0, LATER).all()
