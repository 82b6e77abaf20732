"""What several programs of this folder want of their command lines."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    """A type for `argparse`: how often something is measured, or how much of it. A median of nothing is none.

    Raises:
        argparse.ArgumentTypeError: no whole number from 1 on; the program then ends with its usage.
    """
    number = int(text) if text.strip().lstrip("+").isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number
