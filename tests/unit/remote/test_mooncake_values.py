"""With a real Mooncake, a value comes back unchanged, and a get writes to no memory outside of the value's parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.errors import ClosedError
from flexkv.remote.base import NO_VALUE, NOT_SAID, Outcome, Presence
from tests.servers.mooncake import Master, mooncake
from tests.servers.namespace import Namespace, network_namespace
from tests.unit.remote.mooncake_child import GUARD, StoreChild, store_child

DEADLINE_S = 20.0
ODD = [1_000_003, 77, 1, 4096]
OTHERS = [[100, 1], [100, 2], [300], [101, 200], [1]]
"""Sizes of parts that do not fit a value with parts of 102 and 98 bytes. A get with these sizes must not find that
value."""


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    with network_namespace() as made:
        yield made


@pytest.fixture(scope="module")
def master(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with mooncake(namespace, tmp_path_factory.mktemp("mooncake")) as (made, _):
        yield made


@pytest.fixture(scope="module")
def child(
    namespace: Namespace, master: Master, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreChild]:
    with store_child(namespace, tmp_path_factory.mktemp("child"), master.url) as made:
        yield made


def random_value(sizes: list[int], seed: int = 0) -> list[bytes]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size, dtype=np.uint8).tobytes() for size in sizes]


def test_parts_of_odd_sizes_come_back_in_other_parts(child: StoreChild) -> None:
    value = random_value(ODD)
    assert child.call("put", ["odd"], [value], DEADLINE_S) == [Outcome.OK]
    assert child.call("get", ["odd"], [ODD], DEADLINE_S) == ([Outcome.OK], [value], True)
    whole = b"".join(value)
    others = [5, len(whole) - 5]
    assert child.call("get", ["odd"], [others], DEADLINE_S) == ([Outcome.OK], [[whole[:5], whole[5:]]], True)


def test_pages_come_back(child: StoreChild) -> None:
    assert child.call("pages", 64, 2 << 20, DEADLINE_S) == ({Outcome.OK}, {Outcome.OK}, True)
    assert child.ask("remove", [f"page/{i}" for i in range(64)], DEADLINE_S) == [True] * 64


@pytest.mark.parametrize("sizes", OTHERS)
def test_value_of_another_size_writes_nothing(child: StoreChild, sizes: list[int]) -> None:
    value = random_value([102, 98])
    child.call("put", ["sized"], [value], DEADLINE_S)
    outcomes, parts, kept = child.call(
        "get", ["sized", "absent", "sized"], [sizes, [5], [102, 98]], DEADLINE_S
    )
    assert outcomes == [Outcome.OTHER_SIZE, Outcome.ABSENT, Outcome.OK]
    assert set(b"".join(parts[0])) == {GUARD}
    assert parts[2] == value
    assert kept
    assert child.call("last_error") == ""


def test_sizes_are_those_of_the_values(child: StoreChild) -> None:
    sizes = [1, 4, 4097]
    names = [f"of {size}" for size in sizes]
    child.call("put", names, [random_value([size]) for size in sizes], DEADLINE_S)
    assert child.ask("sizes", [names[0], "nothing", *names[1:]], DEADLINE_S) == [1, NO_VALUE, 4, 4097]
    assert child.ask("sizes", names[:1], 0.0) == [NOT_SAID]
    child.ask("remove", names, DEADLINE_S)


def test_names_are_found_until_they_are_removed(child: StoreChild) -> None:
    names = [f"name/{i}" for i in range(300)]
    assert child.ask("exists", names, DEADLINE_S) == [Presence.NO] * 300
    assert child.call("put", names[:3], [random_value([10], i) for i in range(3)], DEADLINE_S) == [0] * 3
    # `exists` makes Mooncake lease the values. flexkv removes values by a forced removal, which ignores the leases.
    assert child.ask("exists", names, DEADLINE_S) == [Presence.YES] * 3 + [Presence.NO] * 297
    assert child.ask("remove", names, DEADLINE_S) == [True] * 300
    assert child.ask("exists", names, DEADLINE_S) == [Presence.NO] * 300


def test_second_put_does_not_replace(child: StoreChild) -> None:
    first, second = random_value([50], 1), random_value([60], 2)
    assert child.call("put", ["twice"], [first], DEADLINE_S) == [Outcome.OK]
    assert child.call("put", ["twice"], [second], DEADLINE_S) == [Outcome.OK]
    assert child.call("get", ["twice"], [[50]], DEADLINE_S)[:2] == ([Outcome.OK], [first])
    assert child.ask("remove", ["twice"], DEADLINE_S) == [True]
    child.call("put", ["twice"], [second], DEADLINE_S)
    assert child.call("get", ["twice"], [[60]], DEADLINE_S)[:2] == ([Outcome.OK], [second])


def test_two_clients_share_values(
    child: StoreChild, namespace: Namespace, master: Master, tmp_path: Path
) -> None:
    value = random_value([3000, 96])
    child.call("put", ["shared"], [value], DEADLINE_S)
    with store_child(namespace, tmp_path, master.url) as other:
        assert other.ask("alive", DEADLINE_S) == ""
        assert other.call("get", ["shared"], [[3000, 96]], DEADLINE_S) == ([Outcome.OK], [value], True)
        other.ask("close")
        other.ask("close")
        with pytest.raises(ClosedError):
            other.ask("exists", ["shared"], DEADLINE_S)


def test_no_call_begins_after_the_deadline(child: StoreChild) -> None:
    child.call("put", ["late"], [random_value([10])], DEADLINE_S)
    assert child.ask("exists", ["late"], 0.0) == [Presence.UNKNOWN]
    assert child.call("get", ["late"], [[10]], 0.0)[0] == [Outcome.FAILED]
    assert child.call("last_error") == "the deadline was over"
    assert child.call("put", ["later"], [random_value([10])], 0.0) == [Outcome.FAILED]
    assert child.ask("exists", ["later"], DEADLINE_S) == [Presence.NO]


def test_full_store_says_so(namespace: Namespace, tmp_path: Path) -> None:
    with (
        mooncake(namespace, tmp_path, mib=16, port=50061) as (small, _),
        store_child(namespace, tmp_path, small.url) as child,
    ):
        names = [f"full/{i}" for i in range(16)]
        outcomes = child.call("put", names, [[bytes(2 << 20)]] * 16, DEADLINE_S)
        assert set(outcomes) == {Outcome.OK, Outcome.FULL}
        assert outcomes[0] is Outcome.OK
        assert "no room" in child.call("last_error")
        present = child.ask("exists", names, DEADLINE_S)
        assert Presence.YES in present
        # Only the rejected values are known to be absent: a full store may have evicted some of the accepted values,
        # too.
        refused = [there for there, outcome in zip(present, outcomes, strict=True) if outcome is Outcome.FULL]
        assert set(refused) == {Presence.NO}
