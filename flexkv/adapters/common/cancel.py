"""Waits for copies that must end before the engine continues, cancels late ones, and raises an error if one does not
end.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from flexkv.config import FlexKVConfig
from flexkv.errors import ClosedError
from flexkv.transfer.base import DataPlane, Ticket


def wait_all(lanes: DataPlane, tickets: Collection[Ticket], wait_s: float) -> bool:
    """Waits up to `wait_s` seconds; returns whether every op of these graphs has ended. Takes no results."""
    ends_s = time.monotonic() + wait_s
    return all(lanes.wait(ticket, max(0.0, ends_s - time.monotonic())) for ticket in tickets)


def cancel_and_drain(
    lanes: DataPlane,
    tickets: Collection[Ticket],
    config: FlexKVConfig,
    what: str,
    limit: str = "load.deadline_s",
) -> None:
    """Ends graphs that are late: drops the pages that no lane has taken, and waits for the rest.

    Args:
        what: the name of the copies in the error's text, such as "a load of 3 pages".
        limit: the setting whose time has passed, for the error's text.

    Raises:
        ClosedError: a copy neither ended nor could be recalled. Its blocks may still be read or written at any time, so
            the engine can neither use nor reuse them.
    """
    for ticket in tickets:
        lanes.cancel(ticket)
    # The watchdog needs up to one stuck_s to find a lane stuck, and the lane may recover meanwhile.
    drain_s = 2 * config.transfer.stuck_s
    if not wait_all(lanes, tickets, drain_s):
        section, name = limit.split(".")
        waited_s = float(getattr(getattr(config, section), name))
        raise ClosedError(
            f"{what} ended neither within {limit} ({waited_s:g} s) nor, recalled, within twice "
            f"transfer.stuck_s ({drain_s:g} s); its blocks may be read or written at any time"
        )
