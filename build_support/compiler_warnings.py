"""Turns compiler warnings into errors if FLEXKV_WERROR is `1`, without recompiling files that compiled without a
warning.

ninja recompiles a file whose command has changed. But if a file compiles without a warning, its object does not depend
on the compiler's flag for warnings (`-Werror`). So the flag is not part of the command; the compiler gets it through
the environment. If a file compiles with a warning, its object gets a marker file beside it. If warnings are errors, a
source file whose object has a marker is recompiled.
"""

from __future__ import annotations

import os
from pathlib import Path

FATAL = {"FATAL_CXX": "-Werror", "FATAL_NVCC": "-Werror all-warnings"}
"""Maps each environment variable to the flag that a compiler gets through it. The flag turns warnings into errors."""

NOTE = ".warned"
"""Suffix of the marker file beside an object; the file holds the compiler's output."""


def warnings_are_errors() -> bool:
    """Returns whether FLEXKV_WERROR is `1`. The default is `0`, so that the new warnings of a newer compiler do not
    break an install.

    Raises:
        ValueError: FLEXKV_WERROR is neither `1` nor `0`.
    """
    value = os.environ.get("FLEXKV_WERROR", "0")
    if value not in ("0", "1"):
        raise ValueError(f"FLEXKV_WERROR={value!r}: allowed are '1' and '0'")
    return value == "1"


def noting_warnings(command: str, variable: str = "FATAL_CXX") -> str:
    """Returns a ninja command that runs a compiler's `command` and makes or removes the marker file. The command adds
    the flag that the environment variable `variable` contains.
    """
    note = f"$out{NOTE}"
    return (
        f"{command} $${variable} 2>{note}; code=$$?; cat {note} >&2; "
        f'[ -z "$${variable}" ] && [ -s {note} ] || rm -f {note}; exit $$code'
    )


def flags_for_warnings(folder: Path) -> dict[str, str]:
    """Returns the variables for ninja's environment. If warnings are errors, also removes the objects in `folder` that
    compiled with a warning, so that ninja makes them again.

    Raises:
        ValueError: FLEXKV_WERROR is neither `1` nor `0`.
    """
    if not warnings_are_errors():
        return dict.fromkeys(FATAL, "")
    for pattern in (f"*{NOTE}", f"*/*{NOTE}"):
        for note in folder.glob(pattern):
            note.with_suffix("").unlink(missing_ok=True)
            note.unlink()
    return FATAL
