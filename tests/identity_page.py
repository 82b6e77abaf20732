"""Reads docs/identity.md for tests. The tests check that certain settings of an engine do not change a key."""

from __future__ import annotations

import re
from pathlib import Path

from flexkv.adapters.common.identity_table import FieldTable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "identity.md"


def left_out(table: FieldTable, reason: str = "") -> list[str]:
    """Returns the fields of the table's configuration class that must not change a key, according to docs/identity.md.
    If `reason` is given, returns only the fields for which the page gives this reason.
    """
    rows = re.findall(rf"^\| {table.config} \| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [name for names, why in rows if reason in ("", why) for name in re.findall(r"`(\w+)`", names)]
