"""Argument types that several programs of this folder share."""

from __future__ import annotations

import argparse


def at_least_one(text: str) -> int:
    """A type for `argparse`: a whole number of at least 1. Such a number sets how many rounds a program measures, and
    without a round there is no median.

    Raises:
        argparse.ArgumentTypeError: `text` is not a whole number of at least 1; `argparse` then prints the usage and
            ends the program.
    """
    number = int(text) if text.strip().lstrip("+").isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number
