"""A module in place of the core, with faults that the fuzzer must find; the environment variable FAULT chooses one."""

from __future__ import annotations

import ctypes
import os
import time

FAULT = os.environ.get("FAULT", "")
RACING = ctypes.CDLL(os.environ["RACING_LIBRARY"]) if FAULT == "race" else None
MOST_CALLS = 20


class Counter:
    """Counts calls, over more than one case."""

    calls = 0


def reads_an_address(where: int, times: int) -> int:
    """Accepts any `where` that is not an integer, and fails with None."""
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
