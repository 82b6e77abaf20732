"""The disk tier of a real engine. The engine's process exits normally or is killed by SIGKILL, and the next process
serves the stored pages. Tests also make host memory too small, and damage slabs between and during runs of engines.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import SEPARATE_CORE
from demo.model import PRESETS
from flexkv.storage.header import SECTOR_BYTES, read_group
from flexkv.weights.fingerprint import sampled_identity
from tests.unit.weights.tensor_files import change

from .conftest import FAULTY, Engines, connector
from .session import BLOCK_TOKENS, EngineSession, Prompt
from .test_parallel import TWO_RANKS

DISK_READS = "vllm:flexkv_disk_pages_total{direction=read}"
DISK_WRITES = "vllm:flexkv_disk_pages_total{direction=write}"
DURABLE = "vllm:flexkv_disk_durable_pages_total"
DISK_HITS = "vllm:flexkv_hit_blocks_total{tier=disk}"
FAILED_READS = "vllm:flexkv_disk_failed_pages_total{direction=read}"
STRAIGHT = "vllm:flexkv_disk_gds_pages_total{direction=read}"
STRAIGHT_WRITES = "vllm:flexkv_disk_gds_pages_total{direction=write}"
NO_ROOM = "vllm:flexkv_no_room_pages_total{tier=disk}"
STREAMED = "vllm:flexkv_disk_streamed_pages_total"
SECRETIVE = FAULTY | {"kv_connector": "SecretiveConnector"}
SLAB_BYTES = 64 << 20
SMALL_HOST_BYTES = 8 << 20
"""Bytes of a host memory for about 58 blocks of the tiny model: three prompts of 600 tokens."""
FOUR_PROMPTS_HOST_BYTES = 10 << 20
"""Bytes of a host memory for four prompts of 600 tokens."""
QUEUED = 16
STREAMING: dict[str, Any] = {"disk__stream": True, "disk__prefetch_requests": 0}
"""Settings for streaming. They turn prefetches off, which would bring pages to host memory while a request waits in the
queue.
"""
DURABLE_WITHIN_S = 30.0
DISK_WAIT_S = 600.0
"""Time limit, in seconds, for waits for the disk. Any queue of prompts in these tests takes less, even on a busy
machine."""
OF_NO_KV: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 768,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 160,
    "max_logprobs": 3,
    "served_model_name": "another",
    "generation_config": "vllm",
    "load_format": "safetensors",
    "seed": 5,
}
"""Engine arguments that do not affect KV. An engine with all these values gets hits on pages of an engine with
different values.
"""
PROMPTS_OF_900 = 6
"""Number of prompts of 28 blocks each. Together they do not fit: the engine's own cache has 128 blocks, and host memory
about 58."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def start(
    engines: Engines,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    tensor_parallel_size: int = 1,
    kind: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EngineSession:
    """Closes all engines, then starts a new engine process with a disk tier.

    Args:
        kind: base of the `kv_transfer_config`; None for flexkv's own connector.
        engine: more engine arguments.
    """
    engines.close()
    engines.close_others()
    disk: dict[str, Any] = {
        "disk__folders": str(folder),
        "disk__bytes_per_folder": SLAB_BYTES,
        # The tests check which pages the disk serves, not how fast. The tiny model often computes faster than the disk
        # reads.
        "disk__compute_if_faster": False,
    }
    connected = connector(kind, **disk | settings)
    more = {"tensor_parallel_size": tensor_parallel_size, **(engine or {})}
    return engines.another(connected, environment, **more)


def wait_written(session: EngineSession, pages: int) -> None:
    """Waits until `pages` pages have been written to disk, durable or not."""
    _wait(session, lambda: session.metric(DISK_WRITES) >= pages, f"{pages} pages did not come to disk")


def wait_durable(session: EngineSession) -> None:
    """Waits until all written pages are reported as durable."""

    def is_durable() -> bool:
        session.settle()
        return session.metric(DURABLE) >= session.metric(DISK_WRITES)

    _wait(session, is_durable, "written pages did not become durable")


def _wait(session: EngineSession, done: Callable[[], bool], late: str) -> None:
    ends_s = time.monotonic() + DURABLE_WITHIN_S
    while not done():
        assert time.monotonic() < ends_s, late
        time.sleep(0.1)
        # The engine updates its metrics only in a step, so this sends a prompt.
        session.ask(Prompt.of(5, 7, max_tokens=1))


def spoil(folder: Path) -> None:
    """Flips a bit in every 4 KiB of all slabs. Leaves out the first 64 KiB of each slab, where the header is."""
    for slab in slabs_of(folder):
        flip(slab, range(64 << 10, slab.stat().st_size, SECTOR_BYTES))


def spoil_last_layers(folder: Path) -> None:
    """Flips bits in all layers of each page except the first two layers, so that a layerwise read finds the damage only
    in its later ranges.
    """
    for slab in slabs_of(folder):
        header, group = read_group(str(slab))
        runs = [(at, size) for at, size, layer in group.runs[0].tolist() if layer >= 2]
        for image in range(header.header_bytes, slab.stat().st_size, header.slot_bytes):
            flip(slab, [image + at for at, _ in runs])


def slabs_of(folder: Path) -> list[Path]:
    slabs = list(folder.rglob("*.slab"))
    assert slabs
    return slabs


def flip(slab: Path, offsets: Iterable[int]) -> None:
    with slab.open("r+b") as file:
        for offset in offsets:
            file.seek(offset + 100)
            byte = file.read(1)
            file.seek(offset + 100)
            file.write(bytes([byte[0] ^ 4]))


def test_a_folder_over_the_lives_of_five_processes(engines: Engines, stream: int, folder: Path) -> None:
    """Five engine processes use one folder in turn. They end in different ways, and each process serves all pages that
    are still valid. This is one test because engines start slowly.
    """
    first, second, third = Prompt.of(601, stream), Prompt.of(400, stream + 1), Prompt.of(500, stream + 2)

    session = start(engines, folder)
    assert session.check_one(first).cached == 0
    session.check_one(second)
    session.settle()
    assert session.metric(DISK_WRITES) > 0
    wait_durable(session)
    session.process.kill()

    # The previous process was killed, but its durable pages are still there.
    session = start(engines, folder, disk__mode="evict")
    assert session.check_one(first).cached == first.whole_blocks
    assert session.metric(DISK_READS) >= first.whole_blocks // BLOCK_TOKENS
    assert session.metric(DISK_HITS) == first.whole_blocks // BLOCK_TOKENS
    session.forget()
    # Three prompts run at once. One waits for the disk, one is in host memory, and one is new.
    answers = session.check(second, first, third)
    assert [answer.cached for answer in answers] == [second.whole_blocks, first.whole_blocks, 0]
    session.settle()
    assert session.metric(DISK_WRITES) == 0, "it writes on eviction, and nothing was evicted"

    # An orderly end writes the pages that were only in host memory. An engine with different arguments can use them.
    session = start(engines, folder, engine=OF_NO_KV, host__bytes=80 << 20)
    assert session.check_one(third).cached == third.whole_blocks
    assert session.metric(DISK_READS) >= third.whole_blocks // BLOCK_TOKENS
    engines.close_others()

    # Damaged pages are recomputed, and no token is wrong.
    spoil(folder)
    session = start(engines, folder, disk__wait_s=0.5)
    assert session.check_one(first).cached == 0
    session.settle()
    assert session.metric(FAILED_READS) > 0
    # Blocks are stored even if flexkv finds the damage on disk only after the engine has computed them and offered them
    # for a store.
    assert cached_after_a_late_failure(session, second) == second.whole_blocks
    assert cached_after_a_late_failure(session, third, taken_for_stored=True) == 0, "the control"

    # The engine has stored the recomputed blocks again. After a reset, which means new weights, they are not served.
    session = start(engines, folder)
    assert session.check_one(first).cached == first.whole_blocks
    session.settle()
    assert session.call("reset", connector=True)["done"]
    assert session.check_one(first).cached == 0
    session.settle()


def test_weights_changed_in_place_find_no_page_of_the_former_ones(
    engines: Engines, stream: int, folder: Path, tmp_path: Path
) -> None:
    """If weights are changed in place, no page of the old weights is served. The test changes eight rows of the
    embedding that are not among the samples by which keys identify the weights."""
    model = tmp_path / "model"
    shutil.copytree(engines.model, model)
    prompt = Prompt.of(601, stream)
    session = start(engines, folder, engine={"model": str(model)})
    [former] = session.ask(prompt)
    session.settle()
    wait_durable(session)
    engines.close_others()
    fingerprint = sampled_identity(model)
    for token in sorted(set(prompt.ids[100:]))[:8]:
        first, width = token * PRESETS["tiny"].hidden, PRESETS["tiny"].hidden
        change(model / "model.safetensors", "model.embed_tokens.weight", first, width)
    assert sampled_identity(model) == fingerprint
    session = start(engines, folder, engine={"model": str(model)})
    [answer, cold] = [session.ask(asked)[0] for asked in (prompt, replace(prompt, salt="cold"))]
    assert (answer.cached, cold.cached) == (0, 0)
    assert answer.tokens == cold.tokens != former.tokens
    session.settle()
    wait_durable(session)
    # After a restart, pages that were computed with the new weights are served.
    session = start(engines, folder, engine={"model": str(model)})
    [again] = session.ask(prompt)
    assert (again.cached, again.tokens) == (prompt.whole_blocks, cold.tokens)


def cached_after_a_late_failure(
    session: EngineSession, prompt: Prompt, taken_for_stored: bool = False
) -> int:
    """Sends a prompt twice, and returns the number of tokens that are hits the second time. The first time, the disk's
    pages are damaged: the wait for the disk ends after `disk.wait_s`, the engine computes the blocks, and then their
    read fails.

    Args:
        taken_for_stored: for a control, whether stores skip pages that are being read, as if such pages were stored.
    """
    session.call("hold_reads", taken_for_stored=taken_for_stored)
    assert session.check_one(prompt).cached == 0
    assert session.call("let_reads_go")["failed"] == prompt.whole_blocks // BLOCK_TOKENS
    session.forget()
    return session.check_one(prompt).cached


def serve_two_prompts(
    engines: Engines, folder: Path, stream: int, settings: dict[str, Any]
) -> tuple[EngineSession, Prompt, int]:
    """Lets one engine compute two prompts, and checks that the next engine gets complete hits on both. Returns the
    second engine's session, the first prompt, and the number of pages of the two prompts.
    """
    first, second = Prompt.of(601, stream), Prompt.of(500, stream + 1)
    session = start(engines, folder, **settings)
    for prompt in (first, second):
        assert session.check_one(prompt).cached == 0
    session = start(engines, folder, **settings)
    answers = session.check(first, second)
    assert [answer.cached for answer in answers] == [first.whole_blocks, second.whole_blocks]
    session.settle()
    return session, first, (first.whole_blocks + second.whole_blocks) // BLOCK_TOKENS


@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long), "layerwise"])
def test_what_is_on_disk_is_promised_and_streamed_to_the_engine(
    engines: Engines, stream: int, folder: Path, load_mode: str
) -> None:
    streaming = STREAMING | {"load__mode": load_mode}
    session, first, pages = serve_two_prompts(engines, folder, stream, streaming)
    assert session.metric(STREAMED) == pages
    assert session.metric("vllm:flexkv_disk_lookups_total") == 0, "nobody waited for a lookup"
    engines.close_others()

    # flexkv promises the same pages, but the slab is damaged. It reports to the engine which blocks did not arrive, and
    # the engine computes them. In layerwise loads, the read fails in the middle of the forward pass, which has already
    # read earlier layers.
    spoil_last_layers(folder)
    session = start(engines, folder, **streaming)
    session.check_one(first)
    session.settle()
    assert session.metric(STREAMED) > 0
    assert session.metric(FAILED_READS) > 0
    session.forget()
    assert session.check_one(first).cached == first.whole_blocks, "computed again, it was stored again"


@pytest.mark.parametrize("load_mode", ["async", "layerwise"])
def test_what_is_on_disk_goes_straight_to_the_engines_pool(
    engines: Engines, stream: int, folder: Path, load_mode: str
) -> None:
    """Pages on disk are loaded directly into the engine's pool. The loads bypass host memory, and use fewer staging
    slots than a prompt has blocks."""
    straight: dict[str, Any] = {"disk__gds": "on", "gds__max_staging_blocks": 4, "load__mode": load_mode}
    session, first, pages = serve_two_prompts(engines, folder, stream, straight)
    assert session.metric(STRAIGHT) == pages
    assert session.metric(DISK_READS) == 0, "nothing came up to host memory"
    engines.close_others()

    # In the control, the first prompt is loaded from the same slab through host memory.
    session = start(engines, folder, disk__gds="off")
    assert session.check_one(first).cached == first.whole_blocks
    session.settle()
    assert session.metric(STRAIGHT) == 0
    assert session.metric(DISK_READS) == first.whole_blocks // BLOCK_TOKENS
    engines.close_others()

    # The slab is damaged, so flexkv reports to the engine which blocks did not arrive. The engine computes them and
    # gives the same answer. In layerwise loads, the read fails in the middle of the forward pass, which has already
    # used earlier layers.
    (spoil_last_layers if load_mode == "layerwise" else spoil)(folder)
    session = start(engines, folder, **straight)
    session.check_one(first)
    session.settle()
    assert session.metric(STRAIGHT) == 0
    assert session.metric(FAILED_READS) == first.whole_blocks // BLOCK_TOKENS
    engines.close_others()
    session = start(engines, folder, **straight)
    assert session.check_one(first).cached == first.whole_blocks, "computed again, it was stored again"
    assert session.metric(STRAIGHT) == first.whole_blocks // BLOCK_TOKENS


def test_stores_go_straight_from_the_engines_pool_to_disk(
    engines: Engines, stream: int, folder: Path
) -> None:
    """Pages are stored directly from the engine's pool to disk. Neither loads nor stores use host memory. Durable pages
    are still there after the process was killed."""
    straight: dict[str, Any] = {"disk__gds": "on", "disk__gds_stores": True, "gds__max_staging_blocks": 4}
    prompt = Prompt.of(601, stream)
    pages = prompt.whole_blocks // BLOCK_TOKENS
    session = start(engines, folder, **straight)
    assert session.check_one(prompt).cached == 0
    session.settle()
    wait_durable(session)
    assert session.metric(STRAIGHT_WRITES) == session.metric(DISK_WRITES) >= pages
    assert session.metric("vllm:flexkv_host_slots_used") == 0
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.settle()
    assert session.metric(STRAIGHT) == pages
    session.process.kill()

    # Pages that GDS stores wrote can also be read through host memory, by the manager's own lane.
    session = start(engines, folder, disk__gds="off")
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.settle()
    assert session.metric(DISK_READS) >= pages
    engines.close_others()
    spoil(folder)
    session = start(engines, folder, **straight)
    session.check_one(prompt)
    session.settle()
    assert (session.metric(STRAIGHT), session.metric(FAILED_READS)) == (0, pages)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks_load_their_stripes_straight_from_disk(engines: Engines, stream: int, folder: Path) -> None:
    deployed: dict[str, Any] = {
        "environment": {**SEPARATE_CORE, **TWO_RANKS},
        "tensor_parallel_size": 2,
        "disk__gds": "on",
    }
    prompt = Prompt.of(601, stream, max_tokens=4)
    session = start(engines, folder, **deployed)
    assert session.check_one(prompt).cached == 0
    session = start(engines, folder, **deployed)
    assert session.check_one(prompt).cached == prompt.whole_blocks
    # The engine updates its metrics only in a step, so this sends a prompt.
    session.check_one(Prompt.of(5, stream + 99, max_tokens=2))
    assert session.metric(STRAIGHT) == prompt.whole_blocks // BLOCK_TOKENS
    assert session.metric(DISK_READS) == 0


def test_control_who_hides_the_pages_that_were_lost_answers_wrong(
    engines: Engines, stream: int, folder: Path
) -> None:
    """A control: if the connector does not report lost pages to the engine, the answer is wrong. Layers of a load fail
    in the middle of the forward pass."""
    streaming = STREAMING | {"load__mode": "layerwise"}
    prompt = Prompt.of(601, stream)
    session = start(engines, folder, **streaming)
    assert session.check_one(prompt).cached == 0
    engines.close_others()

    spoil_last_layers(folder)
    session = start(engines, folder, {"FAULT_RULES": "[]"}, kind=SECRETIVE, **streaming)
    [answer] = session.ask(prompt)
    assert answer.cached == prompt.whole_blocks
    assert answer.tokens != session.reference.tokens(prompt)


@pytest.mark.timeout(600)
def test_two_ranks_and_a_scheduler_in_a_process_of_its_own(
    engines: Engines, stream: int, folder: Path
) -> None:
    """The disk tier works with two ranks and a scheduler in a process of its own, as users run it. The processes share
    host memory."""
    session = start(
        engines,
        folder,
        environment={**SEPARATE_CORE, **TWO_RANKS},
        tensor_parallel_size=2,
        host__bytes=SMALL_HOST_BYTES,
    )
    # These prompts have more pages than fit into the engine's own cache and host memory together.
    prompts = [Prompt.of(900, stream + n, max_tokens=2) for n in range(PROMPTS_OF_900)]
    pages = 0
    for prompt in prompts:
        assert session.check_one(prompt).cached == 0
        # This waits for the disk: a page would be lost if it were evicted from host memory before a slow disk has
        # written it.
        pages += prompt.whole_blocks // BLOCK_TOKENS
        wait_written(session, pages)
    assert session.check_one(prompts[0]).cached == prompts[0].whole_blocks
    # The engine updates its metrics only in a step, so this sends a prompt.
    session.check_one(Prompt.of(5, stream + 99, max_tokens=2))
    assert session.metric(DISK_READS) > 0


@pytest.mark.long
def test_control_queued_prompts_that_wait_for_no_room_are_computed(
    engines: Engines, stream: int, folder: Path
) -> None:
    session = start(engines, folder, host__bytes=FOUR_PROMPTS_HOST_BYTES, disk__wait_s=0.001)
    prompts = [Prompt.of(600, stream + n) for n in range(QUEUED)]
    for number, prompt in enumerate(prompts):
        assert session.check_one(prompt).cached == 0
        session.forget(number)
    answers = session.check(*prompts)
    assert sum(answer.cached for answer in answers) < sum(prompt.whole_blocks for prompt in prompts)


@pytest.mark.parametrize("load_mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_what_does_not_fit_host_memory_is_served_until_the_disk_fails(
    engines: Engines, stream: int, folder: Path, load_mode: str
) -> None:
    session = start(
        engines, folder, host__bytes=FOUR_PROMPTS_HOST_BYTES, load__mode=load_mode, disk__wait_s=DISK_WAIT_S
    )
    prompts = [Prompt.of(600, stream + n) for n in range(QUEUED)]
    for number, prompt in enumerate(prompts):
        assert session.check_one(prompt).cached == 0
        session.forget(number)
    for number, prompt in enumerate(prompts):
        assert session.check_one(prompt).cached == prompt.whole_blocks
        session.forget(number)
    assert session.metric("vllm:flexkv_evictions_total") > 0
    assert session.metric(DISK_READS) > 100
    # All prompts run at once. They compete for the few slots of host memory, and each prompt gets slots in turn.
    answers = session.check(*prompts)
    assert [answer.cached for answer in answers] == [prompt.whole_blocks for prompt in prompts]
    assert session.metric(NO_ROOM) == 0
    session.settle()
    # The disk fails while the engine runs. Host memory continues to serve.
    for slab in folder.rglob("*.slab"):
        os.truncate(slab, 4096)
    for number, prompt in enumerate(prompts):
        session.check_one(prompt)
        session.forget(number)
    assert session.check_one(prompts[-1]).cached == prompts[-1].whole_blocks
