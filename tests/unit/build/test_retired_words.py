"""Retired words have been replaced by the field's usual words. They do not occur in code, settings, metrics, log lines
or docs.

The glossary in docs/architecture.md lists the words to use instead.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
THIS = Path(__file__).resolve().relative_to(ROOT).as_posix()

NAMES = {
    "AccessOrder": ("Trail", "TrailTable", "trails"),
    "CacheRole": ("Blueprint",),
    "Capabilities": ("Means",),
    "DiskVolume": ("DiskMember",),
    "EngineUnit": ("HostUnit", "UnitDisk", "SegmentDisk", "JoinedRanks"),
    "FailureCause": ("Blame", "blame_of", "NO_BLAMES"),
    "FaultEvents": ("Upsets",),
    "LinearFit": ("MovingLine",),
    "broken_step": ("SpoiledRequests",),
    "PeerFolder, PeerPages, PeerReader": ("Sibling", "SiblingPages", "SiblingReader"),
    "PendingRecords": ("OwedRecords",),
    "Promotions, WriteQueue": ("DiskFlow", "DiskReads", "DiskWrites"),
    "StripedSlabs": ("DiskUnit",),
    "SymbolicVolumes": ("SimDiskTier",),
    "UnitDriver": ("DiskDriver",),
    "WorkItem": ("Piece",),
    "await_group": ("GATHER_S",),
    "cancel_and_drain": ("recall",),
}
"""Retired identifiers, by the name that replaced them."""

PROSE = {
    "invalidate": r"disown\w*",
    "pending, flush": r"owed|owes",
    "disk slot, queue entry": r"(?:disk|queue) places?|places? on (?:the )?disks?",
    "poll": r"pump\w*",
    "source error": r"astray",
    "fault events": r"upsets?",
}
"""Patterns of retired words in prose, in upper or lower case, by the word that replaced them."""


def texts() -> dict[str, str]:
    """Returns the text of every tracked file except this one, by the file's name."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    found = {}
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and name != THIS and path.is_file() and path.suffix != ".png":
            found[name] = path.read_text(errors="replace")
    assert len(found) > 500, "this looks at the whole tree"
    return found


def uses(pattern: str, among: dict[str, str], flags: int = 0) -> list[str]:
    """Returns `file:line` for each match of `pattern` as a complete word."""
    word = re.compile(rf"\b(?:{pattern})\b", flags)
    return [
        f"{name}:{number}"
        for name, text in among.items()
        if word.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if word.search(line)
    ]


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    """Returns the text of every tracked file except this one, by the file's name."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: nothing tells which files are the project's")
    return texts()


@pytest.mark.parametrize("now", NAMES)
def test_a_retired_name_is_gone(tree: dict[str, str], now: str) -> None:
    assert not uses("|".join(NAMES[now]), tree), f"write {now}"


@pytest.mark.parametrize("now", PROSE)
def test_a_retired_word_is_gone_from_prose_too(tree: dict[str, str], now: str) -> None:
    assert not uses(PROSE[now], tree, re.IGNORECASE), f"write {now}"


def test_a_retired_name_would_be_found() -> None:
    """The control: the search finds every retired word in made-up files."""
    for former in NAMES.values():
        for name in former:
            assert uses(name, {"made/up.py": f"x = {name}(1)"}) == ["made/up.py:1"]
    assert uses(PROSE["poll"], {"made/up.md": "It is Pumped."}, re.IGNORECASE)
    assert not uses("Blame", {"made/up.md": "Blameless"}), "whole words"
