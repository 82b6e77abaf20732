"""When a named namespace is erased, all of its pages are erased in every tier, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.cache.base import GroupSpec
from flexkv.cache.keys import EngineKeyChain, named_mark, namespace_digest, tail_key
from flexkv.cache.manager import LocalCacheManager
from flexkv.facts.keys import Keys
from tests.unit.cache.disk_world import BLOCK_TOKENS, DiskWorld

PAGES = 3


def keys_in(name: str, pages: int = PAGES, group: int = 0) -> Keys:
    """Returns the keys of a chain of blocks in the namespace `name`. The blocks are the same for every name; only the
    namespace differs.
    """
    namespace = namespace_digest({"named": name}) + named_mark(name)
    blocks = EngineKeyChain(namespace, group)
    blocks.extend([bytes([block]) * 32 for block in range(pages)])
    return blocks.keys


A, B, UNNAMED = keys_in("a"), keys_in("b"), keys_in("")


def filled(manager_class: type[LocalCacheManager] = LocalCacheManager) -> DiskWorld:
    """Returns a world with the pages of three namespaces. All pages are on disk, and the first two of each namespace
    are in host memory too.
    """
    world = DiskWorld(slots=16, manager_class=manager_class)
    for keys in (A, B, UNNAMED):
        world.store(keys)
    world.run()
    world.drop_host()
    for keys in (A, B, UNNAMED):
        assert world.hits(keys[:2]) == 2
    return world


def check_erased(world: DiskWorld) -> None:
    assert not world.manager.present(0, A).any()
    assert [world.hits(keys) for keys in (A, B, UNNAMED)] == [0, PAGES, PAGES]


def test_keys_of_a_namespace_end_with_its_mark_and_differ_otherwise() -> None:
    assert {key[-2:].tobytes() for key in A} == {named_mark("a")}
    assert {key[-2:].tobytes() for key in B} == {named_mark("b")}
    assert len({key[:-2].tobytes() for key in np.concatenate((A, B, UNNAMED))}) == 3 * PAGES
    assert named_mark("") == b""
    assert len({named_mark(f"{number}") for number in range(100)}) > 95


def test_the_key_of_a_tail_has_the_mark() -> None:
    namespace = namespace_digest({}) + named_mark("a")
    assert tail_key(namespace, 0, None, b"", [1, 2], 0)[0, -2:].tobytes() == named_mark("a")
    unmarked = tail_key(namespace[:32], 0, None, b"", [1, 2], 0)
    assert unmarked[0, :-2].tobytes() == tail_key(namespace, 0, None, b"", [1, 2], 0)[0, :-2].tobytes()


def test_every_page_of_the_namespace_is_a_miss_in_every_tier_and_no_other() -> None:
    world = filled()
    assert world.manager.erase_namespace("a") == PAGES
    world.manager.check_integrity()
    check_erased(world)
    assert world.manager.erase_namespace("a") == 0
    assert world.manager.erase_namespace("nobody's") == 0


def test_what_is_stored_afterwards_is_cached_again() -> None:
    world = filled()
    world.manager.erase_namespace("a")
    world.store(A)
    world.run()
    assert world.hits(A) == PAGES


def test_pages_on_their_way_to_disk_do_not_arrive() -> None:
    world = DiskWorld()
    world.store(A)
    world.store(B)
    writes = world.take()
    assert world.manager.erase_namespace("a") == PAGES
    for op in writes:
        world.end(op)
    world.run()
    world.drop_host()
    assert world.hits(A) == 0
    assert world.hits(B) == PAGES


def test_a_request_that_loads_keeps_what_it_was_promised() -> None:
    world = filled()
    result = world.match(A[:2])
    world.manager.erase_namespace("a")
    world.check_promise(result, A)
    world.end_load(world.load(2))
    check_erased(world)


def test_each_group_is_searched() -> None:
    world = DiskWorld(groups=(GroupSpec(BLOCK_TOKENS, 8), GroupSpec(BLOCK_TOKENS, 8)))
    for group in range(2):
        for name in ("a", "b"):
            world.store(keys_in(name, group=group), group=group)
    world.run()
    assert world.manager.erase_namespace("a") == 2 * PAGES
    for group in range(2):
        assert not world.manager.present(group, keys_in("a", group=group)).any()
        assert world.manager.present(group, keys_in("b", group=group)).all()


class OnlyHost(LocalCacheManager):
    """A broken manager that erases the namespace only from host memory."""

    def erase_namespace(self, name: str) -> int:
        presence = self.tables.hub.presence
        return self.forget(0, presence.keys_of(presence.find_marked(0, named_mark(name))))


class TooMuch(LocalCacheManager):
    """A broken manager that also erases another namespace."""

    def erase_namespace(self, name: str) -> int:
        return sum(self.forget(0, keys) for keys in (A, B))


@pytest.mark.parametrize("broken", [OnlyHost, TooMuch])
def test_control_a_manager_that_erases_too_little_or_too_much_is_seen(
    broken: type[LocalCacheManager],
) -> None:
    world = filled(broken)
    world.manager.erase_namespace("a")
    with pytest.raises(AssertionError):
        check_erased(world)
