"""Reads the output of compute-sanitizer. The output reports memory errors, and calls of the CUDA driver that returned
an error, with the library that made the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

PREFIX = re.compile(r"=========(?!=)")
"""Matches the beginning of each line that compute-sanitizer prints. The output of pytest is mixed with these lines; its
headings do not match.
"""
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
"""Beginnings of lines that compute-sanitizer prints outside of its error reports."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One error that compute-sanitizer found.

    Attributes:
        text: the lines that compute-sanitizer printed for the error.
        call: name of the driver's function that returned an error; empty for a memory error.
        caller: file name of the library that called the driver; empty if the backtrace does not show the library.
    """

    text: str
    call: str
    caller: str

    @property
    def is_cufiles_own(self) -> bool:
        """Whether the error is a driver call by cuFile that failed; False for a memory error. Such calls are harmless:
        for example, cuFile frees memory that it has not allocated.
        """
        return bool(self.call) and self.caller.startswith(CUFILE)


def findings(output: str) -> list[Finding]:
    """Finds the errors in `output`, which has the lines of compute-sanitizer and those of the program under test.

    Raises:
        ValueError: if the output has no summary, or the summary counts a different number of errors than were found.
            Then the errors are unknown.
    """
    found: list[list[str]] = []
    open_ = False
    for line in output.splitlines():
        prefix = PREFIX.match(line)
        if prefix is None:
            continue
        text = line[prefix.end() :]
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
