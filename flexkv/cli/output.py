"""Turns a failed write to standard output into a separate error, because a command has failed if its output is lost."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class OutputError(Exception):
    """Raised if standard output cannot be written: its disk is full, its reader has exited, or it is closed."""


class CheckedOutput:
    """A text stream whose failed writes raise OutputError, so that they differ from failed writes to other files.

    OutputError is not an OSError, because click and rich catch the OSError of a broken pipe and end the process.
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
    """Checks writes to standard output within the `with` block, and flushes standard output at the end. Characters that
    its encoding lacks are written as escapes.

    Raises:
        OutputError: some output could not be written.
    """
    stream: Any = sys.stdout
    if stream is None:  # Python sets None if it starts with descriptor 1 closed
        raise OutputError("standard output is closed")
    if stream.errors == "strict":  # a locale's encoding may lack a character of a path or a setting
        stream.reconfigure(errors="backslashreplace")
    checked: Any = CheckedOutput(stream)
    sys.stdout = checked
    try:
        yield
        checked.flush()
    except OutputError:
        # Text left in the stream's buffer would fail again when the interpreter exits, so it goes to /dev/null.
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
