"""Single processes of a running engine are killed in the middle of a load or of stores. The next engine uses the same
folder, serves the durable pages, and gives right answers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import SEPARATE_CORE

from .conftest import FAULTY, Engines, connector
from .session import EngineSession, Prompt
from .test_disk import DISK_READS, DISK_WRITES, DURABLE, SLAB_BYTES
from .test_parallel import TWO_RANKS

DURABLE_WITHIN_S = 60.0
GONE_WITHIN_S = 120.0
"""Time limit, in seconds, for the exit of the remaining processes. A rank first finishes a delayed copy and closes its
lanes."""
SLOW_S = 5.0
"""Seconds that one page of a load takes on one rank, so that the kill comes while the load is in flight."""


def start(engines: Engines, folder: Path, rules: list[dict[str, Any]]) -> EngineSession:
    """Starts an engine whose scheduler and two ranks run in their own processes, as users run it. Processes of the
    previous engine may still be exiting.
    """
    settings: dict[str, Any] = {
        "disk__folders": str(folder),
        "disk__bytes_per_folder": SLAB_BYTES,
        "disk__compute_if_faster": False,
        "load__mode": "async",
    }
    environment = {
        **SEPARATE_CORE,
        **TWO_RANKS,
        "FAULT_RULES": json.dumps(rules),
        # The test sends functions to the ranks through the scheduler's process; vLLM allows it only with this setting.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    return engines.another(connector(FAULTY, **settings), environment, tensor_parallel_size=2)


def wait_durable(session: EngineSession, stream: int) -> None:
    """Waits until all written pages are reported as durable. Sends prompts meanwhile, because the engine updates its
    metrics only in a step.
    """
    ends_s = time.monotonic() + DURABLE_WITHIN_S
    while True:
        session.check_one(Prompt.of(5, stream, max_tokens=1))
        written = session.metric(DISK_WRITES)
        if written and session.metric(DURABLE) >= written:
            return
        assert time.monotonic() < ends_s, "written pages did not become durable"
        time.sleep(0.1)


def forget(session: EngineSession) -> None:
    """Drops the engine's own cache. vLLM refuses this while blocks are referenced, so this function repeats the call
    until the deadline."""
    ends_s = time.monotonic() + DURABLE_WITHIN_S
    while not session.call("reset")["done"]:
        assert time.monotonic() < ends_s, "blocks are still held"
        time.sleep(0.1)


def kill_while_loading(session: EngineSession, victim: str, *prompts: Prompt) -> None:
    """Sends prompts, kills one process while a rank copies pages, and waits until no process maps flexkv's host
    memory."""
    asked = [prompt.wire() for prompt in prompts]
    reply = session.call("kill_while_copying", requests=asked, victim=victim)
    assert reply["acted"], "no copy had begun"
    ends_s = time.monotonic() + GONE_WITHIN_S
    while left := [pid for pid in reply["processes"] if maps_a_pool(pid)]:
        assert time.monotonic() < ends_s, f"processes {left} still hold host memory"
        time.sleep(0.2)


def maps_a_pool(pid: int) -> bool:
    """Whether a process maps flexkv's shared host memory. This memory is not a file in a file system."""
    try:
        return "memfd:flexkv-pool" in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(2400)  # the test starts three engines of three processes each
def test_the_next_engine_takes_over_from_one_that_was_killed_in_part(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    """The next engine works and serves the durable pages after a part of the previous engine was killed. This is one
    test for several kills, because engines start slowly."""
    known, fresh, later = Prompt.of(601, stream), Prompt.of(700, stream + 1), Prompt.of(650, stream + 2)
    folder = tmp_path / "disk"

    slow_load = {"action": "delay", "kind": "load", "page": 3, "delay_s": SLOW_S, "rank": 1}
    session = start(engines, folder, [slow_load])
    assert session.check_one(known).cached == 0
    wait_durable(session, stream + 8)
    forget(session)
    kill_while_loading(session, "rank", known, fresh)

    session = start(engines, folder, [slow_load | {"nth_op": 1}])
    assert session.check_one(known).cached == known.whole_blocks
    session.check_one(Prompt.of(5, stream + 9, max_tokens=1))
    assert session.metric(DISK_READS) > 0
    forget(session)
    kill_while_loading(session, "scheduler", known, later)

    session = start(engines, folder, [])
    assert session.check_one(known).cached == known.whole_blocks
    session.check(fresh, later)
    assert not [entry.name for entry in Path("/dev/shm").iterdir() if "flexkv" in entry.name]
