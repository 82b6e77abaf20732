"""A module that the fuzzer tests instead of the core. It has faults that the fuzzer must find. The environment variable
FAULT chooses one of them.
"""

from __future__ import annotations

import ctypes
import os
import time

FAULT = os.environ.get("FAULT", "")
RACING = ctypes.CDLL(os.environ["RACING_LIBRARY"]) if FAULT == "race" else None
MOST_CALLS = 20


class Counter:
    """Counts the calls of all cases in this process, for a fault that appears only after several cases."""

    calls = 0


def reads_an_address(where: int, times: int) -> int:
    """Returns 0 for all arguments. Depending on FAULT, it crashes, raises or hangs when `where` is None, races with
    other threads, or aborts at call number MOST_CALLS.
    """
    Counter.calls += 1
    if where is None and FAULT == "null":
        ctypes.string_at(0)
    if where is None and FAULT == "abort":
        os.abort()
    if where is None and FAULT == "memory":
        raise MemoryError
    if where is None and FAULT == "hang":
        time.sleep(3600)
    if RACING is not None:
        RACING.race()
    if Counter.calls == MOST_CALLS and FAULT == "late":
        os.abort()
    return 0


def is_sound(value: int) -> int:
    return 0
