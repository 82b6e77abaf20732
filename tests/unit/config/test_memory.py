"""flexkv reads the free memory from the kernel and the control groups, and a unit takes a share of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flexkv.config import load_config, read_memory, resolve_host_bytes
from flexkv.config.memory import HEADROOM_BYTES, allowed_nodes, check_numa_node
from flexkv.config.sizes import format_size, parse_size
from flexkv.errors import CapacityError, ConfigError

GIB = 1 << 30
MEMINFO = "MemTotal: 65536 kB\nMemAvailable: 32768 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_tells_its_memory() -> None:
    state = read_memory()
    assert 0 < state.usable <= state.total


def test_without_control_groups(tmp_path: Path) -> None:
    state = read_memory(machine(tmp_path, {}))
    assert (state.total, state.usable) == (65536 * 1024, 32768 * 1024)
    assert state.limited_by == "MemAvailable"
    assert (state.huge_page_bytes, state.huge_pages_free) == (2 << 20, 3)


def test_the_tightest_group_above_this_process_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": "100\n",
            "sys/fs/cgroup/pod/memory.max": "10000\n",
            "sys/fs/cgroup/pod/memory.current": "4000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 3000\ninactive_file 500\n",
        },
    )
    state = read_memory(root)
    assert (state.usable, state.limited_by) == (6500, str(root / "sys/fs/cgroup/pod/memory.max"))


def test_a_limit_of_version_1_groups_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "20000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\n",
    }
    assert read_memory(machine(tmp_path, files)).usable == 13000
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = (
        "9223372036854771712\n"  # control groups version 1 write "no limit" like this
    )
    assert read_memory(machine(tmp_path, files)).limited_by == "MemAvailable"


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "10\n",
        "sys/fs/cgroup/memory.current": "20\n",
    }
    assert read_memory(machine(tmp_path, files)).usable == 0


def test_a_kernel_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MemAvailable.*host\.bytes"):
        read_memory(machine(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\n"}))


def test_share_of_free_memory_is_divided_among_the_units() -> None:
    assert resolve_host_bytes(load_config({}, {}), 4, 8 * GIB) == 4 * GIB
    shared = load_config({"host.memory_share": 0.8, "host.units_per_node": 2}, {})
    assert resolve_host_bytes(shared, 4, 10 * GIB) == 4 * GIB
    # Even with a share of 1, a pool leaves HEADROOM_BYTES of the memory free.
    everything = load_config({"host.memory_share": 1}, {})
    assert resolve_host_bytes(everything, 1, GIB) == GIB - HEADROOM_BYTES
    assert resolve_host_bytes(everything, 1, 100) == 0


def test_bytes_per_rank_is_multiplied_and_bytes_is_not() -> None:
    per_rank = load_config({"cpu_bytes_to_use_per_rank": 10_000}, {})
    assert resolve_host_bytes(per_rank, 4, GIB) == 40_000
    assert resolve_host_bytes(load_config({"host.bytes": 10_000}, {}), 4, GIB) == 10_000


def test_more_than_is_free_is_refused_by_name() -> None:
    config = load_config({"cpu_bytes_to_use_per_rank": GIB}, {})
    with pytest.raises(
        CapacityError,
        match=r"host\.bytes_per_rank \(engine extra config\) x 4 ranks.*4\.0 GiB.*3\.0 GiB can be had: "
        rf"set it to {3 * GIB // 4} or less",
    ):
        resolve_host_bytes(config, 4, 3 * GIB + HEADROOM_BYTES)
    assert resolve_host_bytes(config, 4, 4 * GIB + HEADROOM_BYTES) == 4 * GIB
    assert resolve_host_bytes(config, 4, 3 * GIB, huge_free_bytes=4 * GIB) == 4 * GIB
    with pytest.raises(CapacityError, match="can be had"):
        # A pool is either completely in reserved huge pages or completely outside them, so the two amounts of free
        # memory are not added.
        resolve_host_bytes(config, 4, 3 * GIB, huge_free_bytes=GIB)
    with pytest.raises(ConfigError, match="ranks=0"):
        resolve_host_bytes(config, 0, GIB)


def test_less_than_a_block_of_any_model_is_refused_by_name() -> None:
    with pytest.raises(CapacityError, match=r"host\.bytes \(env FLEXKV_HOST_BYTES\) asks for 1\.0 KiB"):
        resolve_host_bytes(load_config({}, {"FLEXKV_HOST_BYTES": "1KiB"}), 1, GIB)


def test_the_headroom_is_the_native_pools() -> None:
    header = (Path(__file__).resolve().parents[3] / "csrc/transfer/host_pool.h").read_text()
    [(number, shift)] = re.findall(r"kHeadroomBytes = int64_t\{(\d+)\} << (\d+);", header)
    assert int(number) << int(shift) == HEADROOM_BYTES


@pytest.mark.parametrize(
    ("files", "nodes"),
    [
        ({}, set()),
        ({"proc/self/status": "Name:\tx\nMems_allowed_list:\t0-1,3\n"}, {0, 1, 3}),
        ({"sys/devices/system/node/has_memory": "0,2\n"}, {0, 2}),
        (
            {
                "proc/self/status": "Mems_allowed_list:\t0-1\n",
                "sys/devices/system/node/has_memory": "1-2\n",
            },
            {1},
        ),
    ],
)
def test_a_numa_node_without_memory_for_this_process_is_refused(
    tmp_path: Path, files: dict[str, str], nodes: set[int]
) -> None:
    root = machine(tmp_path, files)
    assert allowed_nodes(root) == nodes
    check_numa_node(load_config({}, {}), root)
    for node in range(8):
        config = load_config({"host.numa_node": node}, {})
        if node in nodes or not nodes:
            check_numa_node(config, root)
        else:
            with pytest.raises(ConfigError, match=rf"host\.numa_node \(engine extra config\) is {node}: "):
                check_numa_node(config, root)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("40GiB", 40 * GIB), ("1.5 kib", 1536), ("2MB", 2_000_000), (" 3 TiB ", 3 << 40), ("5B", 5)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 2", "40G", "0x10", "1.3B", "١"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number of bytes"):
        parse_size(text)


def test_sizes_are_shown_in_the_largest_unit() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 40 * GIB, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "40.0 GiB",
        "3.0 TiB",
    ]
