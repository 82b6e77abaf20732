"""Tests host pools that belong to one process: their geometry, memory, growth and limits."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.errors import (
    BlockRangeError,
    CapacityError,
    ClosedError,
    ConfigError,
    ContractError,
    GeometryError,
)
from flexkv.transfer.host_pool import HostPool
from tests.unit.transfer.transfer_world import GENEROUS_S

MIB = 1 << 20


@pytest.mark.parametrize("shared", [False, True])
def test_every_slot_is_memory_of_its_own_and_no_slot_crosses_an_extent(shared: bool) -> None:
    # An extent of 4 MiB has space for 3 slots of 1.25 MiB, and ends with a gap.
    pool = HostPool(5 * MIB // 4 // 4096 * 4096, 8, shared=shared, extent_bytes=4 * MIB)
    assert pool.wait_ready(8, GENEROUS_S)
    for slot in range(8):
        pool.slot(slot)[:] = slot
    for slot in range(8):
        assert (pool.slot(slot) == slot).all()
    addresses = [pool.slot(slot).ctypes.data for slot in range(8)]
    starts = [addresses[0], addresses[3], addresses[6]]
    assert all(start % (2 * MIB) == 0 for start in starts)
    for index, address in enumerate(addresses):
        extent = index // 3
        assert starts[extent] <= address
        assert address + pool.slot_bytes <= starts[extent] + 4 * MIB
    report = pool.report()
    assert [extent.bytes for extent in report] == [4 * MIB, 4 * MIB, 4 * MIB]
    assert not any(extent.registered for extent in report)
    pool.close()


@pytest.mark.parametrize("shared", [False, True])
def test_the_report_is_what_the_kernel_says(shared: bool) -> None:
    pool = HostPool(MIB, 16, shared=shared, extent_bytes=8 * MIB)
    assert pool.wait_ready(16, GENEROUS_S)
    for extent in pool.report():
        kind = "huge" if extent.huge_bytes == extent.bytes else "mixed" if extent.huge_bytes else "4k"
        assert extent.pages_kind in (kind, "hugetlb")
        assert extent.bring_up_s > 0
    pool.close()
    plain = HostPool(MIB, 16, shared=shared, extent_bytes=8 * MIB, huge_pages="off")
    assert plain.wait_ready(16, GENEROUS_S)
    assert [(extent.pages_kind, extent.huge_bytes) for extent in plain.report()] == [("4k", 0)] * 2
    plain.close()


def test_what_was_got_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="flexkv.transfer.host_pool"):
        pool = HostPool(4096, 16)
        assert pool.wait_ready(16, GENEROUS_S)
        assert [pool.ready_slots for _ in range(3)] == [16, 16, 16]
    lines = [r for r in caplog.records if "host pool: 16 of 16 slots" in r.getMessage()]
    assert len(lines) == 1
    pool.close()


def test_memory_that_the_gpu_refused_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(4096, 16)
    assert pool.wait_ready(16, GENEROUS_S)
    native = pool.native
    assert native.registration_error == ""
    pool._native = SimpleNamespace(  # type: ignore[assignment]
        ready_slots=16,
        settled=False,
        creator_gone=False,
        registration_error="slots 4 to 7 (7 tries): cuMemHostRegister: out of memory",
    )
    assert [pool.ready_slots for _ in range(3)] == [16, 16, 16]
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "slots 4 to 7 (7 tries): cuMemHostRegister: out of memory" in line
    native.close()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"slot_bytes": 4095, "slots": 1}, "slot_bytes=4095"),
        ({"slot_bytes": 0, "slots": 1}, "slot_bytes=0"),
        ({"slot_bytes": -4096, "slots": 1}, "slot_bytes=-4096"),
        ({"slot_bytes": 4096, "slots": 0}, "slots=0"),
        ({"slot_bytes": 4096, "slots": 1 << 40}, "slots=1099511627776"),
        ({"slot_bytes": 8192, "slots": 1, "extent_bytes": 4096}, "extent_bytes=4096"),
        ({"slot_bytes": 4096, "slots": 1, "extent_bytes": (1 << 30) + 1}, "extent_bytes=1073741825"),
    ],
)
def test_sizes_that_are_not_allowed_are_named(arguments: dict[str, int], what: str) -> None:
    with pytest.raises(GeometryError, match=what):
        HostPool(**arguments)  # type: ignore[arg-type]


def test_a_wrong_word_for_huge_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="huge_pages='yes'"):
        HostPool(4096, 1, huge_pages="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [False, True])
def test_more_than_the_memory_available_is_refused_before_it_is_taken(shared: bool) -> None:
    available, _ = c_ext.available_memory()
    with pytest.raises(CapacityError, match=r"\d+ bytes asked, \d+ allowed by"):
        HostPool(MIB, available // MIB + 1024, shared=shared)


@pytest.mark.parametrize("shared", [False, True])
def test_a_failed_mmap_is_a_capacity_error(shared: bool) -> None:
    script = (
        "import resource\n"
        "from flexkv.transfer.host_pool import HostPool\n"
        "from flexkv.errors import CapacityError\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "try:\n"
        f"    HostPool(1 << 20, 256, shared={shared})\n"
        "except CapacityError as error:\n"
        "    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert "refused: host pool: mmap of" in done.stdout, done.stdout + done.stderr


def test_control_groups_limit_what_is_available(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:    8192 kB\n")
    (proc / "self" / "cgroup").write_text("7:cpu,memory:/a\n0::/b/c\n")
    assert c_ext.available_memory(str(proc), str(groups)) == (8 * MIB, "MemAvailable")
    # cgroup v2: the limit is the parent's. The parent's inactive page cache counts as free memory.
    (groups / "b" / "c").mkdir(parents=True)
    (groups / "b" / "c" / "memory.max").write_text("max\n")
    (groups / "b" / "c" / "memory.current").write_text("1\n")
    (groups / "b" / "memory.max").write_text(f"{6 * MIB}\n")
    (groups / "b" / "memory.current").write_text(f"{3 * MIB}\n")
    (groups / "b" / "memory.stat").write_text(f"anon 5\ninactive_file {MIB}\n")
    assert c_ext.available_memory(str(proc), str(groups)) == (4 * MIB, f"{groups}/b/memory.max")
    # The kernel throttles a group above memory.high, so memory.high applies before memory.max does.
    (groups / "b" / "c" / "memory.high").write_text(f"{3 * MIB}\n")
    (groups / "b" / "c" / "memory.current").write_text(f"{MIB}\n")
    assert c_ext.available_memory(str(proc), str(groups)) == (2 * MIB, f"{groups}/b/c/memory.high")
    # cgroup v1: the group already uses more than its limit.
    (groups / "memory" / "a").mkdir(parents=True)
    (groups / "memory" / "a" / "memory.limit_in_bytes").write_text("4096\n")
    (groups / "memory" / "a" / "memory.usage_in_bytes").write_text("8192\n")
    assert c_ext.available_memory(str(proc), str(groups)) == (
        0,
        f"{groups}/memory/a/memory.limit_in_bytes",
    )
    with pytest.raises(ContractError, match="MemAvailable"):
        c_ext.available_memory(str(tmp_path / "nowhere"))


def test_slots_outside_or_not_ready_and_closed_pools_are_refused() -> None:
    pool = HostPool(4096, 4)
    assert pool.wait_ready(4, GENEROUS_S)
    for slot in (-1, 4):
        with pytest.raises(BlockRangeError, match=f"slot {slot}: allowed are \\[0, 4\\)"):
            pool.slot(slot)
    with pytest.raises(BlockRangeError, match="the pool has 4 slots"):
        pool.wait_ready(5, 0.1)
    with pytest.raises(ContractError, match="private"):
        pool.descriptor()
    kept = pool.slot(1)
    kept[:] = 7
    pool.close()
    pool.close()
    assert (kept == 7).all()  # the array keeps the memory alive after the close
    with pytest.raises(ClosedError, match="the host pool was closed"):
        pool.slot(1)


def test_slots_become_ready_in_order_while_the_pool_comes_up() -> None:
    pool = HostPool(64 * 1024, 4096)  # the pool is 256 MiB
    seen = [pool.ready_slots]
    while seen[-1] < 4096:
        assert pool.wait_ready(min(4096, seen[-1] + 1), GENEROUS_S)
        seen.append(pool.ready_slots)
        pool.slot(seen[-1] - 1)[:] = 1
    assert seen == sorted(seen)
    assert len(seen) > 3, "it grows while it comes up"
    pool.close()


def test_closing_while_memory_comes_up_ends_it() -> None:
    pool = HostPool(64 * 1024, 8192)
    pool.close()
    with pytest.raises(ClosedError, match="the host pool was closed"):
        _ = pool.ready_slots


def test_cuda_info_says_why_there_is_no_device() -> None:
    info = c_ext.cuda_info()
    assert info["built"] == bool(c_ext.build_info()["cuda"])
    assert (info["device_count"] > 0) == (info["reason"] == "")


def test_a_descriptor_is_picklable() -> None:
    pool = HostPool(4096, 2, shared=True)
    descriptor = pool.descriptor()
    assert pickle.loads(pickle.dumps(descriptor)) == descriptor
    assert HostPool.attach(descriptor).native is pool.native
    np.testing.assert_equal(descriptor.pid, os.getpid())
    pool.close()


@pytest.mark.skipif(
    c_ext.build_info()["sanitizer"] == "thread", reason="ThreadSanitizer starts under no such stack limit"
)
def test_a_pool_without_a_thread_is_refused_by_name() -> None:
    """If the system starts no thread for a pool, creating the pool raises an error. The process asks for thread stacks
    that no address space can hold, so that no thread can start."""
    code = (
        "from flexkv.errors import CapacityError\n"
        "from flexkv.transfer.host_pool import HostPool\n"
        "try: HostPool(4096, 4)\n"
        "except CapacityError as error: print(error)\n"
    )

    def lower_limits() -> None:
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 47, hard))

    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        preexec_fn=lower_limits,
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "no thread to bring its memory up" in ran.stdout
