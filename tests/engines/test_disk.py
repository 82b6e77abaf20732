"""The disk tier under the real engine: its process ends, by order or by SIGKILL, and the next one serves what it had
stored; host memory is too small; slabs are damaged between and while engines run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import SEPARATE_CORE

from .conftest import Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt
from .test_parallel import TWO_RANKS

DISK_READS = "vllm:flexkv_disk_pages_total{direction=read}"
DISK_WRITES = "vllm:flexkv_disk_pages_total{direction=write}"
DURABLE = "vllm:flexkv_disk_durable_pages_total"
FAILED_READS = "vllm:flexkv_disk_failed_pages_total{direction=read}"
SLAB_BYTES = 64 << 20
SMALL_HOST_BYTES = 8 << 20
"""About 58 blocks of the tiny model: three prompts of 600 tokens."""
DURABLE_WITHIN_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def start(
    engines: Engines,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    tensor_parallel_size: int = 1,
    **settings: Any,
) -> EngineSession:
    """A new engine process with a disk tier; the one before it has ended."""
    engines.close()
    engines.close_others()
    disk: dict[str, Any] = {
        "disk__folders": str(folder),
        "disk__bytes_per_folder": SLAB_BYTES,
        # The model is tiny and the machine may be busy: what is asked here is what the disk serves.
        "disk__compute_if_faster": False,
    }
    connected = connector(None, **disk | settings)
    return engines.another(connected, environment, tensor_parallel_size=tensor_parallel_size)


def wait_durable(session: EngineSession) -> None:
    """Until everything written is said to survive a crash."""
    ends_s = time.monotonic() + DURABLE_WITHIN_S
    while session.metric(DURABLE) < session.metric(DISK_WRITES):
        assert time.monotonic() < ends_s, "written pages did not become durable"
        time.sleep(0.1)
        # The engine tells its metrics when it steps.
        session.check_one(Prompt.of(5, 7, max_tokens=1))
        session.settle()


@pytest.mark.parametrize("crash", [False, True], ids=["orderly", "killed"])
def test_the_next_process_serves_what_the_last_one_stored(
    engines: Engines, stream: int, folder: Path, crash: bool
) -> None:
    session = start(engines, folder)
    prompt, other = Prompt.of(601, stream), Prompt.of(400, stream + 1)
    assert session.check_one(prompt).cached == 0
    session.check_one(other)
    session.settle()
    assert session.metric(DISK_WRITES) > 0
    if crash:
        wait_durable(session)
        session.process.kill()
    session = start(engines, folder)
    assert session.check_one(prompt).cached == prompt.whole_blocks
    assert session.metric(DISK_READS) >= prompt.whole_blocks // BLOCK_TOKENS
    session.forget()
    # Several at once, of which some wait for the disk and some do not.
    answers = session.check(other, prompt, Prompt.of(300, stream + 2))
    assert [answer.cached for answer in answers] == [other.whole_blocks, prompt.whole_blocks, 0]


@pytest.mark.timeout(900)
def test_a_scheduler_in_a_process_of_its_own(engines: Engines, stream: int, folder: Path) -> None:
    """As deployed: host memory is shared with the worker's process, and the scheduler spins in its own loop."""
    prompt = Prompt.of(601, stream)
    for served in (0, prompt.whole_blocks):
        session = start(engines, folder, environment={**SEPARATE_CORE, **TWO_RANKS}, tensor_parallel_size=2)
        assert session.check_one(prompt).cached == served
        ends_s = time.monotonic() + DURABLE_WITHIN_S
        while not served and session.metric(DURABLE) < prompt.whole_blocks // BLOCK_TOKENS:
            assert time.monotonic() < ends_s, "written pages did not become durable"
            session.check_one(Prompt.of(5, stream + 1, max_tokens=2))
            time.sleep(0.1)


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_what_does_not_fit_host_memory_is_served_from_disk(
    engines: Engines, stream: int, folder: Path, load_mode: str
) -> None:
    session = start(engines, folder, host__bytes=SMALL_HOST_BYTES, load__mode=load_mode)
    prompts = [Prompt.of(600, stream + n) for n in range(8)]
    for number, prompt in enumerate(prompts):
        assert session.check_one(prompt).cached == 0
        session.forget(number)
    for number, prompt in enumerate(prompts):
        assert session.check_one(prompt).cached == prompt.whole_blocks
        session.forget(number)
    assert session.metric("vllm:flexkv_evictions_total") > 0
    assert session.metric(DISK_READS) > 100
    # All at once: they compete for the few slots that there are. Every answer is right, whatever came from where.
    session.check(*prompts)
    session.settle()


def spoil(folder: Path) -> None:
    """Flips a bit in every 4 KiB of all slabs but their first 64 KiB, where the headers lie."""
    slabs = list(folder.rglob("*.slab"))
    assert slabs
    for slab in slabs:
        with slab.open("r+b") as file:
            for offset in range(64 << 10, slab.stat().st_size, 4096):
                file.seek(offset + 100)
                byte = file.read(1)
                file.seek(offset + 100)
                file.write(bytes([byte[0] ^ 4]))


def test_damage_costs_a_computation_and_never_a_wrong_token(
    engines: Engines, stream: int, folder: Path
) -> None:
    prompt = Prompt.of(601, stream)
    session = start(engines, folder)
    session.check_one(prompt)
    session.settle()
    engines.close_others()
    spoil(folder)
    session = start(engines, folder)
    assert session.check_one(prompt).cached == 0
    session.settle()
    assert session.metric(FAILED_READS) > 0
    # Computed again, it is stored again, and served by a third process.
    session = start(engines, folder)
    assert session.check_one(prompt).cached == prompt.whole_blocks


def test_a_disk_that_fails_while_the_engine_runs(engines: Engines, stream: int, folder: Path) -> None:
    session = start(engines, folder, host__bytes=SMALL_HOST_BYTES)
    prompts = [Prompt.of(600, stream + n) for n in range(6)]
    for number, prompt in enumerate(prompts):
        session.check_one(prompt)
        session.forget(number)
    for slab in folder.rglob("*.slab"):
        os.truncate(slab, 4096)
    for number, prompt in enumerate(prompts):
        session.check_one(prompt)
        session.forget(number)
    # The host tier goes on.
    assert session.check_one(prompts[-1]).cached == prompts[-1].whole_blocks


def test_new_weights_are_not_served_old_pages(engines: Engines, stream: int, folder: Path) -> None:
    prompt = Prompt.of(500, stream)
    session = start(engines, folder)
    session.check_one(prompt)
    session.settle()
    assert session.call("reset", connector=True)["done"]
    assert session.check_one(prompt).cached == 0
    session.settle()
    # The next process cannot know which weights this one had after the reset.
    session = start(engines, folder)
    assert session.check_one(prompt).cached == 0
