"""Calls `cuda.bindings.driver`, whose functions return tuples that start with an error code."""

from __future__ import annotations

from typing import Any


class DriverRefused(Exception):
    """A call of the driver did not succeed; names it and the code."""


def done(answer: tuple[Any, ...], call: str) -> Any:
    """The value that a call returned after its code; None if there is none.

    Raises:
        DriverRefused: the code is not 0.
    """
    code, *values = answer
    if code != 0:
        raise DriverRefused(f"{call}: {code!r}")
    return values[0] if values else None
