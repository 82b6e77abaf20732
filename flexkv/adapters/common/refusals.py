"""Reports to the engine's log and to the caller that flexkv refuses to start."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator

from flexkv.errors import FlexKVError


@contextlib.contextmanager
def log_refusal(logger: logging.Logger) -> Iterator[None]:
    """Logs why flexkv refuses to start, one error per line of the reason, before the engine prints the exception within
    its own traceback."""
    try:
        yield
    except FlexKVError as error:
        for line in str(error).splitlines():
            logger.error("flexkv refuses to start: %s", line)
        # Raised without its traceback, because the message says it all and the engine would print every frame. A copy,
        # because the interpreter restores the whole traceback of an exception that is raised again.
        raise copy.copy(error).with_traceback(None) from None
