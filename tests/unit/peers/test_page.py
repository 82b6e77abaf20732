"""flexkv accepts the settings that docs/one-cache.md shows, and writes the log lines that this page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexkv.cache.tiers.running_peers import plan
from flexkv.cache.tiers.running_peers.plan import shares, usual_share
from flexkv.config import load_config
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.peers.live_engines import PROMPT, Make, knows, settings_of, share_of, wait_for

USUAL = usual_share
LOGGED = r"Each engine logs `(.*?)`,\s+and within a second, about the other engine, `(.*?)`"
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "one-cache.md").read_text()


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the default of `peers.share`, which is off in other tests."""
    monkeypatch.setattr(plan, "usual_share", USUAL)


@pytest.mark.usefixtures("usual")
def test_the_pages_settings_share_host_memory(tmp_path: Path) -> None:
    settings, _, common = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    told = tmp_path / "shared.yaml"
    told.write_text(settings)
    assert shares(load_config({}, {"FLEXKV_CONFIG": str(told)})) == (True, False)
    told.write_text(common)
    assert shares(load_config({}, {"FLEXKV_CONFIG": str(told)})) == (False, True)


@pytest.mark.usefixtures("usual")
def test_the_pages_settings_share_folders_with_other_machines(tmp_path: Path) -> None:
    _, distant, _ = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    told = tmp_path / "distant.yaml"
    told.write_text(distant)
    config = load_config({}, {"FLEXKV_CONFIG": str(told)})
    assert shares(config) == (False, True)
    assert config.peers.across_machines
    assert config.peers.beat_s == load_config({}, {}).peers.beat_s == 2.0


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (False, False)),
        ({"disk.folders": "/d"}, (False, True)),
        ({"host.units_per_node": 2}, (True, False)),
        ({"host.units_per_node": 2, "peers.share": "disk"}, (False, False)),
        ({"host.units_per_node": 2, "disk.folders": "/d", "peers.share": False}, (False, False)),
        ({"peers.share": "host+disk", "disk.folders": "/d"}, (True, True)),
    ],
)
def test_what_is_shared_by_default(settings: dict[str, object], expected: tuple[bool, bool]) -> None:
    assert shares(load_config(settings, {})) == expected


def test_the_log_lines_that_the_page_names(
    make_engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one, other = (make_engine(**settings_of(tmp_path / "run")) for _ in range(2))
    wait_for(lambda: share_of(one).joined == share_of(other).joined == 1)
    ((start, found),) = re.findall(LOGGED, " ".join(PAGE.split()))
    for part in (*start.split("..."), found):
        assert part.strip() in caplog.text, part


def test_the_series_that_the_page_names(make_engine: Make, tmp_path: Path) -> None:
    one, other = (make_engine(**settings_of(tmp_path / "run")) for _ in range(2))
    one.run(make_request(PROMPT, "one"))
    wait_for(lambda: knows(other, 5))
    other.run(make_request(PROMPT, "two"))
    other.unit.count(other.counters)
    (pattern,) = re.findall(r"grep -E '(.*?)'", PAGE)
    hits, copied = pattern.split("|")
    assert hits.partition(".*") == ("flexkv_hit_blocks_total", ".*", "peer-host")
    assert other.counters.data["flexkv_hit_blocks_total"]["peer-host"] == 5
    assert other.counters.data[copied]["copied"] == 5
