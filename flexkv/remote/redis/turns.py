"""Talks to several servers at once in one thread. The steps for each server are a generator. When they must wait, they
yield the event that they wait for. One `poll` call waits for the events of all generators.

So a server that does not answer does not delay the others. Asking the servers one after another would need a share of
the deadline for each, and reading a large value might take longer than its share.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Generator, Iterable
from typing import NamedTuple


class TurnWait(NamedTuple):
    """The event that steps wait for before they continue.

    Attributes:
        fd: file descriptor of a socket; -1 to wait only for a time.
        events: the events to wait for, as in `poll`.
        until_s: when the steps continue anyway, in seconds of the monotonic clock.
    """

    fd: int
    events: int
    until_s: float


LONGEST_POLL_MS = 1 << 30
"""The longest wait of one `poll`, in milliseconds, which must fit into a C int. A longer wait polls again."""

Turn = TurnWait | None
"""The event that steps wait for; None to let the steps for other servers run first, without waiting."""

Steps = Generator[Turn, None, None]


def run_together(all_steps: Iterable[Steps]) -> None:
    """Runs all steps, and returns when all have ended. Nothing here stops steps at a deadline: they must check the
    clock after each wait.
    """
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
    """Blocks until at least one of `waits` is over. Returns for each of them whether it is over."""
    if all(wait is None for wait in waits):
        return [True] * len(waits)
    poll = select.poll()
    for wait in waits:
        if wait is not None and wait.fd >= 0:
            poll.register(wait.fd, wait.events)
    left_s = min(0.0 if wait is None else wait.until_s - time.monotonic() for wait in waits)
    # Rounded up, because rounding down would poll again and again in the last millisecond.
    woken = {fd for fd, _ in poll.poll(min(math.ceil(max(left_s, 0.0) * 1000), LONGEST_POLL_MS))}
    now_s = time.monotonic()
    return [wait is None or wait.fd in woken or wait.until_s <= now_s for wait in waits]
