"""Decides how long a group commit waits for more rows after its first one. One sync then makes all of them durable."""

from __future__ import annotations

from collections.abc import Callable

GROUP_S = 0.1
"""Maximum seconds that a commit waits for more rows. Ten syncs per second cost a busy disk very little."""

QUIET_S = 0.005
"""If no row has come for this long, in seconds, the burst is over and the commit stops waiting."""


def await_group(clock: Callable[[], float], wait_for_more: Callable[[float], bool]) -> None:
    """Waits until QUIET_S seconds after the last row of a burst, but at most GROUP_S seconds.

    Args:
        clock: returns monotonic time in seconds.
        wait_for_more: waits for another row, for at most the given number of seconds. Returns whether one has come and
            the commit is not urgent.
    """
    ends_s = clock() + GROUP_S
    while (left_s := ends_s - clock()) > 0 and wait_for_more(min(QUIET_S, left_s)):
        pass
