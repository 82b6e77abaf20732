"""Tests copies on a real GPU: long runs, a pool of more than 4 GiB, digests, a pool that two processes share, and
captures of CUDA graphs at the same time as copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flexkv import c_ext
from flexkv.transfer.graph import OpKind
from flexkv.transfer.host_pool import HostPool
from tests.gpu.needs import CUDA_BUILD, GPU
from tests.unit.transfer.large_moves import (
    LONG_S,
    MovesWorld,
    check_digests,
    check_far_blocks,
    check_runs,
    check_second_process,
)

pytestmark = GPU
DEVICE = 0
POOL_BYTES = 6 << 30
"""Free GPU memory in bytes that the test with a pool of more than 4 GiB needs."""
CAPTURES = 20
CAPTURE_REFUSED = 900
"""Value of CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED."""


@pytest.fixture(autouse=True)
def _needs_torch(torch: Any) -> None:
    """Skips the test if torch, which the pools need, is missing."""


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "copy engine"])
@pytest.mark.parametrize("run_bytes", [65536 + 16, 192 << 10, (1 << 20) + 1])
def test_long_runs_go_by_the_way_of_their_direction(run_bytes: int, kernel: bool) -> None:
    """The kernel stores runs of any length. It loads long runs, as in this test, only if the driver has no batched
    copies.
    """
    paths = check_runs(DEVICE, run_bytes, kernel)
    loaded, stored = 2 * 3 * run_bytes, 3 * 3 * run_bytes
    if not kernel:
        assert "kernel" not in paths
    elif "batch" in paths:
        assert paths == {"kernel": stored, "batch": loaded}


@pytest.mark.parametrize("run_bytes", [20 << 20, (20 << 20) + 4096])
def test_a_layer_beyond_8_mib_goes_in_portions(run_bytes: int) -> None:
    assert run_bytes > c_ext.CUDA_THRESHOLDS["sub_batch_bytes"]
    check_runs(DEVICE, run_bytes)


def test_blocks_beyond_4_gib_arrive(torch: Any) -> None:
    if torch.cuda.mem_get_info(DEVICE)[0] < POOL_BYTES:
        pytest.skip("the pool of 4.3 GiB needs 6 GiB of free GPU memory")
    check_far_blocks(DEVICE)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "control"])
def test_digests_find_a_flipped_byte(verify: bool) -> None:
    check_digests(DEVICE, verify)


def test_a_second_process_attaches_the_pool() -> None:
    check_second_process(DEVICE)


@pytest.mark.parametrize("mark", CUDA_BUILD[1:2], ids=["CUDA build"])
def test_short_runs_are_the_kernels_once_memory_is_pinned(mark: pytest.MarkDecorator) -> None:
    if mark.args[0]:
        pytest.skip(mark.kwargs["reason"])
    paths = check_runs(DEVICE, 4096)
    assert list(paths) == ["kernel"], paths
    assert "kernel" not in check_runs(DEVICE, 4096, kernel=False)


@contextmanager
def copies_beside(torch: Any) -> Iterator[list[int]]:
    """Stores pages, loads them, and pins another pool, again and again in a separate thread. Yields a list with one
    element: the number of finished turns.
    """
    world = MovesWorld(DEVICE, 4, 16384, 8, 8)
    for block in range(4):
        world.write(block)
    stream, done, stop = torch.cuda.Stream(DEVICE), [0], threading.Event()
    failures: list[BaseException] = []

    def keep_copying() -> None:
        try:
            while not stop.is_set():
                world.move(OpKind.D2H, [0, 1, 2, 3], [3, 2, 1, 0], stream)
                world.move(OpKind.H2D, [4, 5, 6, 7], [3, 2, 1, 0], stream)
                further = HostPool(1 << 20, 64)
                further.pin(DEVICE)
                assert further.wait_ready(64, LONG_S)
                further.close()
                done[0] += 1
        except BaseException as error:  # raised again in the test's thread
            failures.append(error)

    thread = threading.Thread(target=keep_copying)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(LONG_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
    assert all(world.holds(4 + block, block) for block in range(4))
    world.close()


def wait_for_turns(done: list[int], count: int) -> None:
    ends_s = time.monotonic() + LONG_S
    while done[0] < count:
        assert time.monotonic() < ends_s, "the copies beside the capture have ended"
        time.sleep(0.001)


def test_graphs_are_captured_beside_copies_and_registration(torch: Any) -> None:
    """The capture uses the strictest mode. In this mode a forbidden call in any thread ends the capture, unless the
    thread has opted out.
    """
    source = torch.arange(1 << 16, dtype=torch.float32, device=f"cuda:{DEVICE}")
    with copies_beside(torch) as done:
        for turn in range(CAPTURES):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="global"):
                answer = source * 2 + turn
                wait_for_turns(done, done[0] + 2)  # so one complete turn is inside the capture
            graph.replay()
            torch.cuda.synchronize(DEVICE)
            assert torch.equal(answer, source * 2 + turn)
            del graph
    assert done[0] >= 2 * CAPTURES


@pytest.mark.parametrize("relaxed", [False, True], ids=["control", "relaxed"])
def test_a_forbidden_call_would_have_ended_the_capture(torch: Any, relaxed: bool) -> None:
    """Control for `test_graphs_are_captured_beside_copies_and_registration`. During a capture, the driver refuses an
    allocation in another thread, unless that thread has opted out with the relaxed mode.
    """
    driver = pytest.importorskip("cuda.bindings.driver", reason="the extra flexkv[gpu] is not installed")
    codes: list[int] = []

    def allocate() -> None:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        if relaxed:
            code, _ = driver.cuThreadExchangeStreamCaptureMode(mode)
            assert code == 0
        torch.cuda.set_device(DEVICE)
        code, address = driver.cuMemAlloc(1 << 20)
        codes.append(int(code))
        if code == 0:
            (code,) = driver.cuMemFree(address)
            codes.append(int(code))

    graph, source = torch.cuda.CUDAGraph(), torch.ones(1 << 10, device=f"cuda:{DEVICE}")

    def capture() -> None:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            source * 2
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join(LONG_S)

    if relaxed:
        capture()
        assert codes == [0, 0]
    else:
        with pytest.raises(RuntimeError):
            capture()
        assert codes == [CAPTURE_REFUSED]
