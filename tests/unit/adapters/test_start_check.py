"""If this machine cannot fulfil a setting, the engine's start is refused with one line that names the setting to
change. `flexkv info` reports the same line.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexkv.adapters.common.refusals import log_refusal
from flexkv.cli import info_facts
from flexkv.cli.main import main
from flexkv.config import load_config
from flexkv.errors import ConfigError, FlexKVError
from flexkv.storage.folder_share import folder_faults
from flexkv.unit import start_check
from flexkv.unit.start_check import start_faults
from tests.unit.adapters.mini_engine import MiniEngine

Make = Callable[..., MiniEngine]

CASES = [
    ({"host.bytes": "1KiB"}, "host.bytes (engine extra config) asks for 1.0 KiB"),
    ({"host.bytes": "900TiB"}, "host.bytes (engine extra config) asks for 900.0 TiB"),
    ({"host.numa_node": 63}, "host.numa_node (engine extra config) is 63"),
    (
        {"disk.folders": "TMP/a", "disk.bytes_per_folder": "900TiB"},
        "disk.bytes_per_folder (engine extra config) asks for 900.0 TiB in each folder",
    ),
    (
        {"disk.folders": "TMP/a:TMP/b", "disk.bytes_per_folder": "900TiB"},
        "asks for 900.0 TiB in each folder of 2 on one file system",
    ),
    ({"disk.folders": "TMP/a:TMP/a/"}, "disk.folders: TMP/a and TMP/a/ are one folder"),
    ({"disk.folders": "TMP/there:TMP/link"}, "disk.folders: TMP/there and TMP/link are one folder"),
    ({"disk.folders": "TMP/file/x"}, "no disk can be used: TMP/file/x: TMP/file is no folder"),
]


@pytest.fixture
def given(tmp_path: Path) -> Callable[[dict[str, object]], dict[str, object]]:
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    return lambda settings: {
        key: value.replace("TMP", str(tmp_path)) if isinstance(value, str) else value
        for key, value in settings.items()
    }


@pytest.mark.parametrize(("settings", "words"), CASES)
def test_the_start_refuses_in_words_that_name_the_setting(
    make_engine: Make,
    given: Callable[[dict[str, object]], dict[str, object]],
    tmp_path: Path,
    settings: dict[str, object],
    words: str,
) -> None:
    with pytest.raises(FlexKVError) as caught:
        make_engine(**given(settings))
    assert words.replace("TMP", str(tmp_path)) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "there"], (
        "something was made before the refusal"
    )


@pytest.mark.parametrize(("settings", "words"), CASES)
def test_info_finds_what_the_start_refuses(
    given: Callable[[dict[str, object]], dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    settings: dict[str, object],
    words: str,
) -> None:
    file = tmp_path / "flexkv.yaml"
    file.write_text(json.dumps(given(settings)))
    monkeypatch.setenv("FLEXKV_CONFIG", str(file))
    words = words.replace("TMP", str(tmp_path)).replace("engine extra config", f"file {file} line 1")
    assert main(["info", "--json"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert words in problem
    assert main(["info"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert words in line


def test_info_looks_at_each_folder_once_and_names_those_that_are_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`flexkv info` checks each folder once. If at least one folder can be used, each unusable folder is reported as a
    separate problem. In the control, no folder can be used, and one problem lists all of them.
    """
    (tmp_path / "file").touch()
    looks: list[object] = []

    def look(*arguments: Any) -> dict[str, str]:
        looks.append(arguments)
        return folder_faults(*arguments)

    for module in (info_facts, start_check):
        monkeypatch.setattr(module, "folder_faults", look)
    bad, good = f"{tmp_path}/file/x", f"{tmp_path}/good"
    problems = info_facts.collect(load_config({"disk.folders": [bad, good]}, {}), None)["problems"]
    assert problems == [f"the engine would start without the disk {bad}: {tmp_path}/file is no folder"]
    assert len(looks) == 1
    [problem] = info_facts.collect(load_config({"disk.folders": [bad]}, {}), None)["problems"]
    assert problem == f"no disk can be used: {bad}: {tmp_path}/file is no folder"


def test_several_reasons_are_one_error(make_engine: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"2 settings cannot be had on this machine:\n- host\.bytes.*\n- host\.numa"
    ):
        make_engine(**{"host.bytes": "900TiB", "host.numa_node": 63})


def test_what_this_machine_has_is_not_refused(make_engine: Make, tmp_path: Path) -> None:
    settings = {"disk.folders": [str(tmp_path / "a"), str(tmp_path / "b")], "host.numa_node": 0}
    config = load_config(settings, {})
    assert start_faults(config, 1, folder_faults(config, lambda root: 0)) == []
    engine = make_engine(**settings, **{"disk.space_share": 0.001})
    assert engine.unit.has_tiers


def test_the_line_that_says_what_to_set_comes_before_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flexkv.test_start_check")

    @log_refusal(logger)
    def start() -> None:
        try:
            raise KeyError("what led to it")
        except KeyError as error:
            raise ConfigError("set this\nand that") from error

    for _ in range(2):
        caplog.clear()
        with pytest.raises(ConfigError) as caught:
            start()
        assert [record.message for record in caplog.records] == [
            "flexkv refuses to start: set this",
            "flexkv refuses to start: and that",
        ]
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        assert "start" not in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
