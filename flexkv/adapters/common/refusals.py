"""What an engine's log and the caller are given when flexkv refuses to start."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator

from flexkv.errors import FlexKVError


@contextlib.contextmanager
def log_refusal(logger: logging.Logger) -> Iterator[None]:
    """Logs why flexkv refuses to start, an error for each line of the reason, before the engine prints the exception
    among its own traceback."""
    try:
        yield
    except FlexKVError as error:
        for line in str(error).splitlines():
            logger.error("flexkv refuses to start: %s", line)
        # The message says it all; the engine would print each step that led to it. A copy, because the interpreter
        # gives an exception that it passes on its whole traceback back.
        raise copy.copy(error).with_traceback(None) from None
