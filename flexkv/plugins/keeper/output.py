"""Turns one plugin's output into lines of the log. Cuts long lines, replaces characters that cannot be printed, and
limits the number of lines per second.
"""

from __future__ import annotations

LINES_PER_S = 10.0
BURST_LINES = 100
"""The number of lines that are logged at once after a pause in the output. It is enough for a traceback or a table."""

LINE_BYTES = 1000
"""Longer lines are cut to this many bytes. So a message for the engine stays below the 4096 bytes that a pipe takes in
one piece, even if each byte is replaced by a character of three bytes.
"""

MOST_SHOWN_BYTES = 3 * LINE_BYTES

READ_BYTES = 1 << 16
"""The maximum number of bytes that one read returns."""

READS_PER_S = 16.0
BURST_READS = 16
"""The number of reads of a plugin's output that may follow each other without a pause. At `READS_PER_S`, the keeper
reads 1 MiB per second. A plugin that writes more has to wait until the keeper reads its pipe again. So no plugin can
keep the keeper busy.
"""


class TokenBucket:
    """Allows `burst` events at once, and `per_s` events per second in the long run."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at_s = float(burst), now_s

    def take(self, now_s: float) -> bool:
        """Returns whether an event is allowed now, and counts it if so."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def wait_s(self) -> float:
        """Returns the seconds from the last `take` until the next event is allowed."""
        return max(0.0, (1.0 - self._left) / self._per_s)


class OutputLines:
    """Splits the output of one run into lines. Lines beyond LINES_PER_S are dropped and counted."""

    def __init__(self, now_s: float) -> None:
        self._bucket = TokenBucket(LINES_PER_S, BURST_LINES, now_s)
        self._begun = b""
        self._is_cut = False
        self._lost = 0

    def take(self, chunk: bytes, now_s: float) -> list[str]:
        """Returns the lines that `chunk`, a piece of output, completes. If a line is too long, returns its beginning.
        If lines were dropped, an extra line before the next line says how many.
        """
        *whole, rest = (self._begun + chunk).split(b"\n")
        lines = []
        for number, line in enumerate(whole):
            if number == 0 and self._is_cut:
                continue  # the beginning of this line was already logged
            lines += self._passed(line, now_s)
        if whole:
            self._is_cut = False
        if self._is_cut or len(rest) > LINE_BYTES:
            if not self._is_cut:
                lines += self._passed(rest, now_s)
            self._is_cut, rest = True, b""
        self._begun = rest
        return lines

    def end(self, now_s: float) -> list[str]:
        """Returns the last line if it has no line end. If lines were dropped since the last line that was returned,
        also returns a line that says how many.
        """
        lines = self._passed(self._begun, now_s) if self._begun else []
        self._begun = b""
        if self._lost:
            lines.append(self._loss())
        return lines

    def _passed(self, line: bytes, now_s: float) -> list[str]:
        if not self._bucket.take(now_s):
            self._lost += 1
            return []
        lines = [self._loss()] if self._lost else []
        lines.append(printable(line[:LINE_BYTES]) + (" ..." if len(line) > LINE_BYTES else ""))
        return lines

    def _loss(self) -> str:
        lost, self._lost = self._lost, 0
        return f"({lost} lines were lost: more than {LINES_PER_S:g} per second)"


def printable(line: bytes) -> str:
    """Returns the line without characters that could control a terminal or look like a new line."""
    text = line.decode(errors="replace").rstrip().expandtabs(4)
    shown = "".join(character if character.isprintable() else "?" for character in text)
    # The text is cut again, because tabs have become spaces, and the engine would treat the rest of a long line as a
    # new message.
    return shown.encode()[:MOST_SHOWN_BYTES].decode(errors="ignore")
