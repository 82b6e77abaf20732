"""Hostile calls that two threads make at the same time on shared objects do not race in the core.

Without ThreadSanitizer the tests find only crashes. With ThreadSanitizer, the first data race ends the child process.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_support.preflight import compiler
from flexkv import c_ext
from tests.soak import soak_rounds
from tests.unit.native_border.fuzz import CrashError, fuzz
from tests.unit.native_border.surface import targets

CASES = 300
MOST_MISSED = 2
"""The largest allowed number of targets without a completed call. A concurrent call may have closed the objects that a
target needs."""

FIRST_SEED = 1000
"""The first seed of these tests. It is beyond all seeds of test_fuzz.py."""

RACING = """
static long counter = 0;
extern "C" void race() { for (int i = 0; i < 1000; ++i) ++counter; }
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
@soak_rounds()
def test_calls_at_once_do_not_race(soak_round: int) -> None:
    counts = fuzz(seed=FIRST_SEED + soak_round, first=0, end=CASES, at_once=1.0)
    missed = {target.name for target in targets(c_ext)} - {*counts.returned, *counts.raised}
    assert len(missed) <= MOST_MISSED, missed


if c_ext.build_info()["sanitizer"] == "thread":

    def test_control_a_race_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "race.cpp").write_text(RACING)
        library = str(tmp_path / "race.so")
        flags = ["-fsanitize=thread", "-fPIC", "-shared", "-g", "-o", library]
        subprocess.run([*(compiler() or "g++").split(), *flags, str(tmp_path / "race.cpp")], check=True)
        monkeypatch.setenv("FAULT", "race")
        monkeypatch.setenv("RACING_LIBRARY", library)
        with pytest.raises(CrashError) as found:
            fuzz(seed=1, first=0, end=100, module="tests.unit.native_border.stand_in", at_once=1.0)
        text = str(found.value)
        assert "a child ended with code 66\nat case " in text
        assert "WARNING: ThreadSanitizer: data race" in text
        assert "race.cpp:3" in text
