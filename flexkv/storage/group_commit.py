"""When a group commit begins: after the first row of a group that will be made durable together."""

from __future__ import annotations

from collections.abc import Callable

GROUP_S = 0.1
"""How long a commit waits for more rows, seconds: ten syncs a second cost a busy disk next to nothing."""

QUIET_S = 0.005
"""A commit does not wait when no row has come for so long, seconds: the burst is over."""


def await_group(clock: Callable[[], float], wait_for_more: Callable[[float], bool]) -> None:
    """Returns QUIET_S after the last row of a burst, and GROUP_S after it was called at the latest.

    Args:
        clock: seconds, never running backwards.
        wait_for_more: waits so many seconds at most; whether another row has come, and there is no hurry.
    """
    ends_s = clock() + GROUP_S
    while (left_s := ends_s - clock()) > 0 and wait_for_more(min(QUIET_S, left_s)):
        pass
