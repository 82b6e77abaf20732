"""What compute-sanitizer has found: errors of memory, and driver calls that returned an error, by the library that made
them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

PREFIX = "========="
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?\b(?! were not printed)")
API_ERROR = re.compile(r"Program hit .* on CUDA API call to (\w+)")
LIBRARY = re.compile(r"\bin (\S*\.so[\w.]*)\s*$")
DRIVER = "libcuda.so"
CUFILE = "libcufile"
QUIET = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "Target application",
    "Saved host backtrace",
    "RACECHECK SUMMARY",
)
"""Beginnings of lines that begin no finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One error.

    Attributes:
        text: as it was printed.
        call: the driver's function that returned an error; empty for errors of memory.
        caller: file name of the library that called the driver; empty where the backtrace does not name it.
    """

    text: str
    call: str
    caller: str

    @property
    def is_cufiles_own(self) -> bool:
        """cuFile tries calls that may fail, such as freeing what it has not allocated. An error of memory is never
        its own."""
        return bool(self.call) and self.caller.startswith(CUFILE)


def findings(output: str) -> list[Finding]:
    """The errors in what the tool has printed, its lines and the program's.

    Raises:
        ValueError: the tool has printed no summary, or counts another number: then nothing is known.
    """
    found: list[list[str]] = []
    open_ = False
    for line in output.splitlines():
        if not line.startswith(PREFIX):
            continue
        text = line[len(PREFIX) :]
        if not text.strip():
            open_ = False
        elif open_:
            found[-1].append(text)
        elif not text.strip().startswith(QUIET):
            found.append([text])
            open_ = True
    counted = sum(int(count) for count in SUMMARY.findall(output))
    if not SUMMARY.search(output):
        raise ValueError("compute-sanitizer has printed no summary")
    if counted != len(found):
        raise ValueError(f"compute-sanitizer counts {counted} errors, and {len(found)} were read")
    return [_finding(lines) for lines in found]


def _finding(lines: list[str]) -> Finding:
    text = "\n".join(lines)
    call = API_ERROR.search(lines[0])
    libraries = [PurePosixPath(match[1]).name for line in lines if (match := LIBRARY.search(line))]
    caller = next((name for name in libraries if not name.startswith(DRIVER)), "")
    return Finding(text, call[1] if call else "", caller)
