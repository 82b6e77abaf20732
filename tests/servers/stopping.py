"""Stops a process that a test has started, with all its threads."""

from __future__ import annotations

import os
import signal
import time

STOPPED_WITHIN_S = 30.0


def stop_all_threads(pid: int) -> None:
    """Stops a child of this process, and waits until none of its threads runs.

    On a busy machine, the threads of a process continue until the thread that gets the signal is scheduled. So a server
    may still answer after the signal was sent. That is why this function waits.
    """
    os.kill(pid, signal.SIGSTOP)
    ends_s = time.monotonic() + STOPPED_WITHIN_S
    how = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_PID, pid, how)) is None:
        assert time.monotonic() < ends_s, f"process {pid} does not stop"
        time.sleep(0.001)
    assert found.si_code == os.CLD_STOPPED, f"process {pid} has ended"
