"""Logs why flexkv refuses to start, and raises the error for the engine."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator

from flexkv.errors import FlexKVError


@contextlib.contextmanager
def log_refusal(logger: logging.Logger) -> Iterator[None]:
    """Context manager around flexkv's start. If a FlexKVError is raised inside the `with` block, logs each line of its
    message as an error, so that the reason appears in the log before the engine's own traceback."""
    try:
        yield
    except FlexKVError as error:
        for line in str(error).splitlines():
            logger.error("flexkv refuses to start: %s", line)
        # The error is raised without its traceback, because its message is sufficient and the engine would print every
        # frame. A copy is raised, because the interpreter restores the traceback of an exception that is raised again.
        raise copy.copy(error).with_traceback(None) from None
