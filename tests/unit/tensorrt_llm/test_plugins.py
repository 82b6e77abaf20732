"""Plugins beside TensorRT-LLM's connector look up pages that the executor has stored. The plugins end when the
connector ends.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.unit.plugins.asking_plugin import ASKS, TELLS
from tests.unit.plugins.plugin_folders import plugin, processes_of
from tests.unit.tensorrt_llm.group import LONG_S
from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, Make, stored


def test_plugins_ask_for_what_is_stored_and_end_with_the_engine(make_world: Make, tmp_path: Path) -> None:
    folder = tmp_path / "plugins"
    plugin(folder, "scheduler_asks.py", ASKS)
    plugin(folder, "worker_0_tells.py", TELLS)
    (folder / "prompt.json").write_text(json.dumps(PROMPT))
    world = stored(make_world, {"FLEXKV_PLUGINS_FOLDER": str(folder)})
    ends_s = time.monotonic() + LONG_S
    while not ((folder / "asked.json").exists() and (folder / "told.json").exists()):
        assert time.monotonic() < ends_s, "the plugins have not run"
        world.serve([9_000, 1, 2], new_tokens=1)
    asked = json.loads((folder / "asked.json").read_text())
    blocks = WHOLE // 4
    assert asked == {
        "state": "usable",
        "pages": blocks,
        "cached": blocks,
        "pinned": blocks,
        "unpinned": blocks,
    }
    assert json.loads((folder / "told.json").read_text()) == ["worker", "0"]
    assert processes_of(folder)
    world.check()
    world.close()
    assert processes_of(folder) == set()
