"""Prints tables whose cells are never wrapped, so that a path or a name can be copied from them and `grep` finds it."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 10_000


def print_table(table: Table) -> None:
    """Prints the table as wide as its cells need. A narrower terminal wraps the lines itself."""
    console = Console(markup=False, highlight=False)
    wanted = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    wide = Console(markup=False, highlight=False, width=max(console.width, wanted))
    with wide.capture() as shown:
        wide.print(table)
    # The blanks after each row's last cell are removed, because a narrower terminal would show them as empty lines.
    for line in shown.get().splitlines():
        console.out(line.rstrip(), highlight=False)
