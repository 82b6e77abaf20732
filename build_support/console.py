"""Prints the output of the build tools: one line per step, and errors that tell the user how to fix them."""

from __future__ import annotations

import sys
from typing import NoReturn


def say(text: str) -> None:
    """Prints one line of progress, and flushes it immediately."""
    print(f"flexkv: {text}", flush=True)


def fail(text: str) -> NoReturn:
    """Prints the reason to stderr, and ends the program with exit code 1."""
    print(f"flexkv: error: {text}", file=sys.stderr, flush=True)
    raise SystemExit(1)
