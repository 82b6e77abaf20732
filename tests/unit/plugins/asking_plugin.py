"""Plugins for tests with real engines. They write their results into files in their folder."""

ASKS = """\
import json
import time
from pathlib import Path

from flexkv.plugins.client import connect

prompt = json.loads(Path("prompt.json").read_text())
with connect(deadline_s=120) as unit:
    while True:
        (found,) = unit.lookup(prompt)
        if found.pages and found.cached == found.pages:
            break
        time.sleep(0.05)
    said = {"state": unit.status()["state"], "pages": found.pages, "cached": found.cached}
    said["pinned"] = unit.pin(prompt, 60)
    said["unpinned"] = unit.unpin()
    Path("new").write_text(json.dumps(said))
    Path("new").rename("asked.json")
    time.sleep(1000)
"""
"""The source of a plugin. It waits until all pages of the prompt in `prompt.json` are cached. Then it pins and unpins
them, and writes the unit's answers to `asked.json`."""

TELLS = """\
import json
import os
import time
from pathlib import Path

Path("role").write_text(json.dumps([os.environ["FLEXKV_PLUGIN_ROLE"], os.environ["FLEXKV_PLUGIN_RANK"]]))
Path("role").rename("told.json")
time.sleep(1000)
"""
"""The source of a plugin. It writes its role and rank to `told.json`."""
