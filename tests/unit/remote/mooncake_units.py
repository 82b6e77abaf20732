"""Units whose store is a Mooncake. They run in a child process in Mooncake's network namespace, and the test calls them
through `StoreChild`.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from flexkv.transfer.graph import OpKind
from tests.unit.remote import mooncake_child
from tests.unit.remote.helper_faults import begin_fetch, leased, load_in_time, rest_briefly
from tests.unit.remote.remote_unit import BLOCK_TOKENS, RemoteUnit, chain

FAST = {"remote__get_s": 1.0, "remote__stuck_s": 8.0}
"""Settings of the units. A call of Mooncake's library may take 4.3 s, and a call to a dead master is tried twice. So
`stuck_s`, the time after which a silent helper is killed, is longer than its default of 5 s."""


class Units(mooncake_child.Answers):
    """Methods that the test can call in the child. They make units and use them; the test refers to a unit by its
    name."""

    def __init__(self) -> None:
        super().__init__()
        rest_briefly(pytest.MonkeyPatch(), longest_s=2.0)
        self._units: dict[str, RemoteUnit] = {}

    def make(self, name: str, url: str) -> str:
        """Makes a unit. Returns the reason why its remote tier is down, or an empty string if the tier is up."""
        self._units[name] = RemoteUnit(url, **FAST)  # type: ignore[arg-type]
        return self._units[name].tier.down

    def store_pages(self, name: str, prompt: str, pages: int) -> int:
        """Computes the prompt's pages, and lets the unit try once to write them to the store. Returns how many of these
        pages the store then has."""
        unit, keys = self._units[name], chain(prompt, pages)
        unit.lose_host()
        unit.store(keys)
        unit.settle()
        return int(unit.tier.known(0, keys).sum())

    def load_pages(self, name: str, prompt: str, pages: int) -> int:
        """Loads the prompt's pages from the store and compares their bytes. Returns the number of pages loaded."""
        unit = self._units[name]
        unit.lose_host()
        return load_in_time(unit, chain(prompt, pages)) // BLOCK_TOKENS

    def set_out(self, name: str, kind: str, prompt: str, pages: int) -> bool:
        """Starts to get or put the prompt's pages, and waits until ops are in flight. Returns whether all ops in flight
        are of the given kind."""
        unit, keys = self._units[name], chain(prompt, pages)
        unit.lose_host()
        if kind == "get":
            begin_fetch(unit, keys)
        else:
            unit.store(keys)
            unit.poll_until(lambda: unit.plane._moving, "the store is written")
        return {moving.op.kind for moving in unit.plane._moving.values()} == {
            OpKind.DISK_READ if kind == "get" else OpKind.DISK_WRITE
        }

    def settle(self, name: str) -> None:
        self._units[name].settle()

    def down(self, name: str) -> str:
        unit = self._units[name]
        unit.unit.poll()
        return unit.tier.down

    def totals(self, name: str) -> tuple[dict[str, int], dict[str, int]]:
        totals = self._units[name].plane.totals
        return dict(totals.gets), dict(totals.puts)

    def check(self, name: str) -> int:
        """Waits until no op is in flight. Returns the number of host slots that are still in use."""
        self._units[name].check_no_leaks()
        return leased(self._units[name])

    def close_all(self) -> bool:
        closed = [unit.close() for unit in self._units.values()]
        return all(closed)


def run(*arguments: Any) -> None:
    mooncake_child.Answers = Units  # type: ignore[misc]
    mooncake_child.main()


if __name__ == "__main__":
    run(*sys.argv[1:])
