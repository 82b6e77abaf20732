"""Python threads whose names appear in `top -H` and /proc, like the names of the native core's threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST = 15
"""Longest name of a thread that Linux keeps, in characters (TASK_COMM_LEN without the final zero)."""


class NamedThread(threading.Thread):
    """A daemon thread whose name the operating system also shows. Python itself passes a thread's name to the operating
    system only since version 3.14.

    Args:
        name: begins with `flexkv-` and has at most LONGEST characters.
    """

    def __init__(self, name: str, target: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        check_name(name)
        super().__init__(target=target, args=args, name=name, daemon=True)

    def run(self) -> None:
        name_this_thread(self.name)
        super().run()


def name_this_thread(name: str) -> None:
    """Sets the calling thread's name in the operating system. Thread pools call this as their initializer."""
    check_name(name)
    with contextlib.suppress(OSError):  # no /proc: the thread works without a name
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def check_name(name: str) -> None:
    assert name.startswith("flexkv-"), name
    assert len(name) <= LONGEST, name
