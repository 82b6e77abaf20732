"""No input from Python crashes the native core: the tests call every function, constructor, method and property with
hostile values.

A seed and a case number determine everything except the order in which threads run. A failure names the seed, the case
number, and the calls that caused it.
"""

from __future__ import annotations

import pytest

from flexkv import c_ext
from tests.soak import soak_rounds
from tests.unit.native_border.cases import RAW_ADDRESSES, named_in
from tests.unit.native_border.fuzz import CrashError, fuzz, run_child
from tests.unit.native_border.recipes import NOT_MADE, RECIPES
from tests.unit.native_border.surface import classes, targets

CHILDREN = 3
CASES = 1000 if not c_ext.build_info()["sanitizer"] else 450
"""Cases per child process. Each case begins with the next target in the list, and makes up to five more calls."""

STAND_IN = "tests.unit.native_border.stand_in"
LEAST_RETURNED = 0.2
"""Smallest allowed share of calls that return without an error. If fewer return, the other arguments are often invalid,
and hostile values do not get deep into the core.
"""


def test_every_class_has_a_recipe() -> None:
    assert set(classes(c_ext)) == {*RECIPES, *NOT_MADE}
    assert not set(RECIPES) & set(NOT_MADE)


def test_every_call_can_be_made_as_it_is_meant() -> None:
    ended = run_child(c_ext.__name__, "valid", 0, 0)
    assert not ended.why, f"{ended.output}\n(ARGUMENTS and BY_NAME of arguments.py name what a call is given)"


def test_every_raw_address_is_one_of_a_call() -> None:
    for row in RAW_ADDRESSES:
        one = {row: ""}
        assert any(named_in(one, target, p) for target in targets(c_ext) for p in target.parameters), row


@pytest.mark.soak
@pytest.mark.timeout(900)
@soak_rounds(CHILDREN)
def test_no_hostile_call_crashes_the_core(soak_round: int) -> None:
    counts = fuzz(seed=soak_round, first=0, end=CASES)
    called = counts.returned + counts.raised
    everything = {target.name for target in targets(c_ext)}
    assert set(called) == everything
    assert counts.returned.total() > LEAST_RETURNED * called.total()


# How a child ends that reads address 0. Under AddressSanitizer, the sanitizer ends the child.
SEGFAULT = "ended with code 1" if c_ext.build_info()["sanitizer"] else "died by SIGSEGV"


@pytest.mark.parametrize(
    ("fault", "why"), [("null", SEGFAULT), ("abort", "died by SIGABRT"), ("memory", "ended with code 3")]
)
def test_control_a_call_that_crashes_is_found_and_named(
    fault: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    with pytest.raises(CrashError) as found:
        fuzz(seed=1, first=0, end=200, module=STAND_IN)
    text = str(found.value)
    assert text.startswith(f"{STAND_IN}, seed 1: a child {why}\nat case ")
    assert "reads_an_address('where'=None" in text
    assert "alone does it, with its calls [" in text


def test_control_a_call_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "hang")
    with pytest.raises(
        CrashError, match=r"(?s)a child ended with code 1\nat case .*'where'=None.*time\.sleep|stand_in\.py"
    ):
        fuzz(seed=1, first=0, end=200, module=STAND_IN, case_s=1.0)


def test_control_a_crash_that_takes_several_cases_is_bisected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "late")
    with pytest.raises(CrashError, match=r"it takes cases \d+ to \d+"):
        fuzz(seed=1, first=0, end=200, module=STAND_IN)


def test_control_a_sound_module_passes() -> None:
    counts = fuzz(seed=1, first=0, end=200, module=STAND_IN)
    assert set(counts.returned) == {"is_sound", "reads_an_address"}
