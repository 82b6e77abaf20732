"""Waits for copies that must finish before the engine continues, cancels late copies, and raises an error if a
cancelled copy does not finish.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from flexkv.config import FlexKVConfig
from flexkv.errors import ClosedError
from flexkv.transfer.base import DataPlane, Ticket


def wait_all(lanes: DataPlane, tickets: Collection[Ticket], wait_s: float) -> bool:
    """Waits up to `wait_s` seconds for the graphs of `tickets`; returns whether all their ops have finished. A later
    `poll` returns the ops' results."""
    ends_s = time.monotonic() + wait_s
    return all(lanes.wait(ticket, max(0.0, ends_s - time.monotonic())) for ticket in tickets)


def cancel_and_drain(
    lanes: DataPlane,
    tickets: Collection[Ticket],
    config: FlexKVConfig,
    what: str,
    limit: str = "load.deadline_s",
) -> None:
    """Cancels graphs that are late: drops the pages that no lane has begun to copy, and waits for the other pages.

    Args:
        what: name of the copies in the error's text, such as "a load of 3 pages".
        limit: dotted name of the setting whose time has passed, for the error's text.

    Raises:
        ClosedError: a copy neither finished nor could be cancelled. Its blocks may still be read or written at any
            time, so the engine can neither use nor reuse them.
    """
    for ticket in tickets:
        lanes.cancel(ticket)
    # The wait is longer than `stuck_s`, because the watchdog may need `stuck_s` to detect a stuck lane, and the lane
    # may recover until then.
    drain_s = 2 * config.transfer.stuck_s
    if not wait_all(lanes, tickets, drain_s):
        section, name = limit.split(".")
        waited_s = float(getattr(getattr(config, section), name))
        raise ClosedError(
            f"{what} ended neither within {limit} ({waited_s:g} s) nor, recalled, within twice "
            f"transfer.stuck_s ({drain_s:g} s); its blocks may be read or written at any time"
        )
