"""Reads the output of compute-sanitizer: memory errors, and driver calls that returned an error, with the library that
made the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

PREFIX = re.compile(r"=========(?!=)")
"""Matches the beginning of each line of the tool's output. Headings of pytest, whose output is mixed with the tool's,
do not match.
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
"""Beginnings of lines that are not the first line of a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One error that the tool found.

    Attributes:
        text: the text that the tool printed for it.
        call: name of the driver's function that returned an error; empty for a memory error.
        caller: file name of the library that called the driver; empty if it is not in the backtrace.
    """

    text: str
    call: str
    caller: str

    @property
    def is_cufiles_own(self) -> bool:
        """Whether the error is a failed driver call by cuFile. Such calls are harmless: for example, cuFile frees
        memory that it has not allocated. False for a memory error.
        """
        return bool(self.call) and self.caller.startswith(CUFILE)


def findings(output: str) -> list[Finding]:
    """Finds the errors in the tool's output, with which the program's output is mixed.

    Raises:
        ValueError: if the output has no summary, or the summary counts a different number of errors, so that the
            result is unknown.
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
