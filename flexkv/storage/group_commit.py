"""Decides how long after the first row of a group its commit, which makes the group durable together, begins."""

from __future__ import annotations

from collections.abc import Callable

GROUP_S = 0.1
"""How long a commit waits for more rows, seconds: ten syncs per second cost a busy disk next to nothing."""

QUIET_S = 0.005
"""A commit no longer waits when no row has come for so long, seconds: the burst is over."""


def await_group(clock: Callable[[], float], wait_for_more: Callable[[float], bool]) -> None:
    """Returns QUIET_S after the last row of a burst, and at the latest GROUP_S after the call.

    Args:
        clock: seconds, never running backwards.
        wait_for_more: waits so many seconds at most; returns whether another row has come, and there is no hurry.
    """
    ends_s = clock() + GROUP_S
    while (left_s := ends_s - clock()) > 0 and wait_for_more(min(QUIET_S, left_s)):
        pass
