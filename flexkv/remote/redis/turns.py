"""Talks to several servers at once on one thread: steps that must wait yield what they wait for, and one poll waits for
all of them.

So a server that does not answer does not delay the others, whose bytes are read meanwhile. If the servers were asked
one after another, each with a share of the deadline, a large value might not fit into its share.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Generator, Iterable
from typing import NamedTuple


class TurnWait(NamedTuple):
    """What a step waits for before it continues.

    Attributes:
        fd: the socket's descriptor; -1 to wait only for a time.
        events: events of `poll`.
        until_s: time on the monotonic clock at which the steps continue anyway.
    """

    fd: int
    events: int
    until_s: float


LONGEST_POLL_MS = 1 << 30
"""`poll` takes no more than an int; a longer wait polls again."""

Turn = TurnWait | None
"""What steps wait for; None to let others run first without waiting."""

Steps = Generator[Turn, None, None]


def run_together(all_steps: Iterable[Steps]) -> None:
    """Runs all steps, and returns when all have ended. Each must end by itself: it checks the clock after each wait."""
    waiting: list[tuple[Steps, Turn]] = [(steps, None) for steps in all_steps]
    while waiting:
        ready = _ready([wait for _, wait in waiting])
        still = []
        for (steps, wait), may_go_on in zip(waiting, ready, strict=True):
            if not may_go_on:
                still.append((steps, wait))
                continue
            with contextlib.suppress(StopIteration):
                still.append((steps, next(steps)))
        waiting = still


def _ready(waits: list[Turn]) -> list[bool]:
    """Waits for a socket or a time, and returns which of the waits are over."""
    if all(wait is None for wait in waits):
        return [True] * len(waits)
    poll = select.poll()
    for wait in waits:
        if wait is not None and wait.fd >= 0:
            poll.register(wait.fd, wait.events)
    left_s = min(0.0 if wait is None else wait.until_s - time.monotonic() for wait in waits)
    # Rounded up, because with rounding down it would poll repeatedly in the last millisecond.
    woken = {fd for fd, _ in poll.poll(min(math.ceil(max(left_s, 0.0) * 1000), LONGEST_POLL_MS))}
    now_s = time.monotonic()
    return [wait is None or wait.fd in woken or wait.until_s <= now_s for wait in waits]
