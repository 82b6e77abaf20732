"""Turns a failed write to standard output into a separate error, because a command whose output is lost has failed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class OutputError(Exception):
    """Standard output cannot be written: its disk is full, its reader has gone, or it is closed."""


class CheckedOutput:
    """A text stream whose failed writes raise OutputError, so that they differ from those of other files.

    OutputError is not an OSError, because click and rich end the process by themselves at a broken pipe.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _as_output_error():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with _as_output_error():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Checks standard output within the block, and flushes it at the end. Characters that its encoding lacks are
    written as escapes.

    Raises:
        OutputError: something could not be written.
    """
    stream: Any = sys.stdout
    if stream is None:  # as Python starts with a closed descriptor
        raise OutputError("standard output is closed")
    if stream.errors == "strict":  # a locale's encoding may lack a character of a path or a setting
        stream.reconfigure(errors="backslashreplace")
    checked: Any = CheckedOutput(stream)
    sys.stdout = checked
    try:
        yield
        checked.flush()
    except OutputError:
        # The rest in its buffer would fail again when the interpreter ends.
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        raise
    finally:
        sys.stdout = stream


@contextlib.contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error
