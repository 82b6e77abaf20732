"""Checks the results of functions of `cuda.bindings.driver`, which are tuples that start with an error code."""

from __future__ import annotations

from typing import Any


class DriverRefused(Exception):
    """Raised if a call of the CUDA driver fails. The text contains the call's name and its error code."""


def done(answer: tuple[Any, ...], call: str) -> Any:
    """Returns the value that follows the error code in `answer`, the result of a call; None if no value follows.

    Raises:
        DriverRefused: the error code is not 0.
    """
    code, *values = answer
    if code != 0:
        raise DriverRefused(f"{call}: {code!r}")
    return values[0] if values else None
