"""The helper `broken_promises` finds a page that would be served to two KV groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.storage import striped_slabs
from flexkv.storage.group_tables import codec_of
from tests.faults.disk_child import SLOTS, WAYS, Child
from tests.faults.promises import Promises, broken_promises

STEPS = 30


@pytest.mark.parametrize("named", [True, False])
def test_a_page_is_its_own_groups_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """A page is served only to its own group. In the control, trailers do not contain the group's number, and
    `broken_promises` finds pages that would be served to other groups, too."""
    if not named:
        monkeypatch.setattr(striped_slabs, "codec_of", lambda group, number: codec_of(group))
    way = WAYS["groups"]
    child = Child(tmp_path / "disk", tmp_path / "marks", 8, way)
    for _ in range(STEPS):
        child.step()
    while child.world.unit.stats().journal_lag_s:
        child.pause()
    child.poll()
    assert child.world.close()
    promises = Promises((tmp_path / "marks").read_text().splitlines())
    assert {of for _, _, of in promises.durable.values()} == {0, 1, 2}
    broken = broken_promises(promises, tmp_path / "disk", way.groups, SLOTS)
    assert any("is another group's too" in what for what in broken) == (not named)
    assert not broken or not named
