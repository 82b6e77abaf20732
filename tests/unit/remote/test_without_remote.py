"""If `remote.urls` is not set, a unit starts no process for the remote tier, imports no module of it, and asks no
store.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.servers.redis import RedisServer

PROGRAM = """
import json, sys
from tests.unit.remote.remote_unit import Shape, chain
import numpy as np
from flexkv.config import load_config
from flexkv.unit.build import build_unit
from flexkv.facts.ranks import KvGroup, UnitOwner
from pathlib import Path
loaded = [name for name in sys.modules if name.startswith("flexkv.remote")]
for name in loaded:  # of the test's own imports
    del sys.modules[name]
del sys.modules["flexkv.cache.tiers.remote"]
import flexkv.cache.tiers.remote
from flexkv.cache.tiers import factory
factory.TIERS = (*factory.TIERS[:-1], flexkv.cache.tiers.remote.plan_remote)
config = load_config({"host.bytes": 1 << 20, "host.huge_pages": "off", "remote.urls": sys.argv[1]}, {})
unit = build_unit(config, [KvGroup(4)], Shape().facts(), UnitOwner("a model", b"n" * 32, "unit0"))
unit.grow()
reads = unit.manager.match("request", [chain("prompt", 4)], 0).reads
children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
print(json.dumps([sorted(n for n in sys.modules if n.startswith("flexkv.remote")), len(children), reads]))
unit.close()
"""


def run(url: str) -> tuple[list[str], int, int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules, children, reads = json.loads(done.stdout.splitlines()[-1])
    return modules, children, reads


def test_a_tier_that_is_off_is_not_there() -> None:
    assert run("none") == ([], 0, 0)


def test_control_a_tier_that_is_on_is_seen(redis: RedisServer) -> None:
    modules, children, reads = run(redis.url)
    assert "flexkv.remote.plane" in modules
    assert (children, reads) == (1, 1)
