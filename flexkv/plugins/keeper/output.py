"""One plugin's output as lines of the log: cut, made printable, and at a bounded rate."""

from __future__ import annotations

LINES_PER_S = 10.0
BURST_LINES = 100
"""How many lines at once pass after a silence: a traceback, a table."""

LINE_BYTES = 1000
"""Longer lines are cut here. A message for the engine stays below the 4096 bytes that a pipe takes in one piece, even
where each byte becomes three."""

MOST_SHOWN_BYTES = 3 * LINE_BYTES

READ_BYTES = 1 << 16
"""Bytes of one read."""

READS_PER_S = 16.0
BURST_READS = 16
"""A plugin that writes more than this, a MiB per second, waits for its own pipe; the keeper stays idle."""


class TokenBucket:
    """Lets `burst` events pass at once and `per_s` in the long run."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at_s = float(burst), now_s

    def take(self, now_s: float) -> bool:
        """Takes one event if one is allowed now."""
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def wait_s(self) -> float:
        """Seconds from the last `take` until the next event is allowed."""
        return max(0.0, (1.0 - self._left) / self._per_s)


class OutputLines:
    """Cuts what one run writes into lines; those beyond the rate are counted and lost."""

    def __init__(self, now_s: float) -> None:
        self._bucket = TokenBucket(LINES_PER_S, BURST_LINES, now_s)
        self._begun = b""
        self._is_cut = False
        self._lost = 0

    def take(self, chunk: bytes, now_s: float) -> list[str]:
        """The lines that a piece of output completes, and the beginning of one that is too long. A line before them
        says how many were lost."""
        *whole, rest = (self._begun + chunk).split(b"\n")
        lines = []
        for number, line in enumerate(whole):
            if number == 0 and self._is_cut:
                continue  # its beginning was already logged as a line
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
        """The last line if it has no line end, and how many lines were lost after the last one that passed."""
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
    """The line without characters that could control a terminal or look like another line."""
    text = line.decode(errors="replace").rstrip().expandtabs(4)
    shown = "".join(character if character.isprintable() else "?" for character in text)
    # Cut after tabs became spaces, because the engine would treat the rest of a longer line as another message.
    return shown.encode()[:MOST_SHOWN_BYTES].decode(errors="ignore")
