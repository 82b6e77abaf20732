"""Plugins beside a real engine. The engine's tokens are those of an engine without plugins. Plugins can ask which pages
the engine has cached, and no plugin runs after the engine has ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flexkv.plugins.client import connect
from tests.unit.plugins.plugin_folders import (
    EXITS,
    FLOODS,
    HANGS,
    LEAVES,
    plugin,
    processes_of,
    wait_for,
)

from .conftest import Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugins" / "scheduler_warm_cache.py"
TELLS = '#!/bin/sh\necho "$FLEXKV_PLUGIN_SOCKET" > name && mv name "socket.$FLEXKV_PLUGIN_ROLE"\n'
ASK_S = 60.0


def cached_alone(session: EngineSession, prompt: Prompt) -> int:
    """Drops the engine's own cache, then sends the prompt. Returns how many of its tokens were hits in flexkv."""
    session.forget()
    return session.check_one(prompt).cached


def test_the_engine_serves_as_if_there_were_no_plugins(engines: Engines, stream: int, tmp_path: Path) -> None:
    folder = tmp_path / "plugins"
    plugin(folder, "all_tells", TELLS)
    for name, text in (("exits", EXITS), ("floods", FLOODS), ("hangs", HANGS), ("leaves", LEAVES)):
        plugin(folder, f"scheduler_{name}", text)
        plugin(folder, f"worker_0_{name}", text)
    plugin(folder, "scheduler_stranger", mode=0o4755)
    (tmp_path / "disk").mkdir()
    session = engines.get(
        connector(
            disk__folders=str(tmp_path / "disk"),
            disk__bytes_per_folder="64MiB",
            disk__compute_if_faster=False,
            plugins__folder=str(folder),
        )
    )
    prompt, other = Prompt.of(400, stream), Prompt.of(300, stream + 1)
    pages = prompt.whole_blocks // BLOCK_TOKENS
    assert session.check_one(prompt).cached == 0
    for role in ("scheduler", "worker"):
        wait_for((folder / f"socket.{role}").exists, f"the plugin beside the {role} has run")
    assert (folder / "socket.scheduler").read_text() == (folder / "socket.worker").read_text()
    session.forget()
    session.call("drop_host")

    # The published example runs in a plugin's environment, while the engine serves another prompt.
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "prompts.jsonl").write_text(f"{list(prompt.ids)}\n")
    name = (folder / "socket.scheduler").read_text().strip()
    example = subprocess.Popen(
        [sys.executable, EXAMPLE.name],
        cwd=tmp_path,
        env=os.environ | {"FLEXKV_PLUGIN_SOCKET": name, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )

    def has_ended() -> bool:
        session.check_one(other)
        return example.poll() is not None

    wait_for(has_ended, "the example ends")
    assert example.communicate()[0] == f"warmed 1 prompts: {pages} pages of them are in host memory\n"
    with connect(name, ASK_S) as unit:
        status = unit.status()
        assert (status["state"], status["tiers"]) == ("usable", ["host", "disk"])
    before = session.metric("vllm:flexkv_hit_blocks_total{tier=host}")
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert session.metric("vllm:flexkv_hit_blocks_total{tier=host}") == before + pages, "host memory had them"

    # A plugin erases the pages of a namespace, in host memory and on disk.
    tenants = replace(other, extra={"kv_transfer_params": {"flexkv.namespace": "tenant"}})
    assert cached_alone(session, tenants) == 0
    assert cached_alone(session, tenants) == tenants.whole_blocks, "the control: it is there before"
    with connect(name, ASK_S) as unit, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(unit.erase_namespace, "tenant")
        while not answer.done():
            session.check_one(other)
    assert answer.result() == tenants.whole_blocks // BLOCK_TOKENS
    assert cached_alone(session, tenants) == 0
    assert cached_alone(session, prompt) == prompt.whole_blocks

    # All plugins and keepers are killed while the engine runs. The engine continues, and starts a new keeper. When the
    # engine ends, no process is left.
    running = processes_of(folder)
    assert running
    # All processes are stopped before any is killed. Otherwise a shell whose child was killed would start another
    # child. After the keeper has ended, nothing would kill this child.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    wait_for(lambda: processes_of(folder) - running, "a keeper is started again")
    engines.close()
    assert processes_of(folder) == set()


def test_an_engine_whose_folder_of_plugins_is_absent_serves(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    session = engines.get(connector(plugins__folder=str(tmp_path / "nowhere")))
    prompt = Prompt.of(400, stream)
    assert cached_alone(session, prompt) == 0
    assert cached_alone(session, prompt) == prompt.whole_blocks
