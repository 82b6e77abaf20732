"""Tests the file with the measured thresholds for a GPU's copies (`transfer.ways_file`). The engine uses a complete
file with this GPU's key. It refuses a damaged file with a ConfigError that gives the reason. If the key is that of
another GPU, the engine logs this and uses the built-in thresholds. The tests run the lane that uses the thresholds with
the FAKE driver, and use no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

import flexkv
from flexkv import c_ext
from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.transfer import ways_file
from flexkv.transfer.ways_file import (
    ALL_RUNS,
    MOST_FILE_BYTES,
    CopyWays,
    WaysKey,
    check_ways_file,
    driver_version,
    pci_link,
    read_ways,
    this_key,
    usable_ways,
    ways_of,
    write_ways,
)
from tests.testing_ext import FakeGpu

KEY = WaysKey("GPU-f0efeeed-eceb-eae9-e8e7-e6e5e4e3e2e1", 16, 5, "13.0 (580.159.04)", "0.1.0")
WAYS = CopyWays(64 << 10, ALL_RUNS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "ways.json"
    write_ways(file, KEY, WAYS, [{"run_bytes": 4096, "direction": "H2D"}])
    return file


def change(path: Path, *keys: str, value: object) -> None:
    table: Any = json.loads(path.read_text())
    part = table
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(table))


@pytest.mark.parametrize("ways", [WAYS, CopyWays(0, 0), CopyWays(ALL_RUNS, 4096)], ids=str)
def test_a_table_comes_back_as_written(path: Path, ways: CopyWays) -> None:
    write_ways(path, KEY, ways, [])
    assert read_ways(str(path), KEY) == ways
    assert list(path.parent.iterdir()) == [path]


OTHERS = [
    dataclasses.replace(KEY, device="GPU-00000000-0000-0000-0000-000000000000"),
    dataclasses.replace(KEY, link_width=8),
    dataclasses.replace(KEY, link_generation=4),
    dataclasses.replace(KEY, driver="12.9 (575.51.03)"),
    dataclasses.replace(KEY, flexkv="0.2.0"),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_table_of_another_key_is_refused_and_both_are_named(path: Path, other: WaysKey) -> None:
    with pytest.raises(ConfigError, match="was measured on") as refused:
        read_ways(str(path), other)
    assert all(str(key) in str(refused.value) for key in (KEY, other))
    assert str(path) in str(refused.value)


def test_every_part_of_the_key_is_compared() -> None:
    assert {
        name
        for other in OTHERS
        for name in dataclasses.asdict(KEY)
        if getattr(other, name) != getattr(KEY, name)
    } == set(dataclasses.asdict(KEY))


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="is not a whole table of ways"):
            read_ways(str(path), KEY)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), "flexkv copy ways 2"),
        (("format",), None),
        (("key",), []),
        (("key",), {"device": "GPU-1"}),
        (("key", "more"), 1),
        (("key", "device"), 5),
        (("key", "device"), ""),
        (("key", "device"), "x" * 129),
        (("key", "device"), "GPU-\x1b[31m\n"),
        (("key", "link_width"), "16"),
        (("key", "link_width"), True),
        (("key", "link_width"), -1),
        (("key", "link_generation"), 5.0),
        (("key", "link_generation"), 10**40),
        (("kernel_below_bytes",), 4096),
        (("kernel_below_bytes",), {"h2d": 4096}),
        (("kernel_below_bytes", "both"), 4096),
        (("kernel_below_bytes", "h2d"), -1),
        (("kernel_below_bytes", "h2d"), True),
        (("kernel_below_bytes", "h2d"), 1e6),
        (("kernel_below_bytes", "h2d"), float("nan")),
        (("kernel_below_bytes", "h2d"), (1 << 40) + 1),
        (("kernel_below_bytes", "d2h"), 10**4000),
        (("kernel_below_bytes", "d2h"), "ALL"),
        (("kernel_below_bytes", "d2h"), None),
        (("kernel_below_bytes", "d2h"), ["all"]),
    ],
    ids=repr,
)
def test_hostile_values_are_refused(path: Path, keys: tuple[str, ...], value: object) -> None:
    change(path, *keys, value=value)
    with pytest.raises(ConfigError, match="is not a whole table of ways") as refused:
        read_ways(str(path), KEY)
    assert len(str(refused.value)) < 1000
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"5", b"\xff\xfe{", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}"],
    ids=range(7),
)
def test_what_is_no_table_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a whole table of ways"):
        read_ways(str(path), KEY)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ways(str(tmp_path / "none"), KEY)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ways("nul\0", KEY)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_ways(str(tmp_path), KEY)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_ways(str(pipe), KEY)
    large = tmp_path / "large"
    large.write_bytes(b" " * (MOST_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_ways(str(large), KEY)


def test_a_write_that_fails_leaves_the_table_that_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_ways(path, KEY, CopyWays(0, 0), [])
    assert read_ways(str(path), KEY) == WAYS


def test_the_link_is_what_both_ends_can_do(tmp_path: Path) -> None:
    bridge = tmp_path / "pci" / "0000:16:00.0"
    gpu = bridge / "0000:17:00.0"
    gpu.mkdir(parents=True)
    devices = tmp_path / "devices"
    devices.mkdir()
    (devices / "0000:17:00.0").symlink_to(gpu)
    assert pci_link("0000:17:00.0", devices) == (0, 0)
    (gpu / "current_link_width").write_text("16\n")
    (gpu / "current_link_speed").write_text(
        "2.5 GT/s PCIe\n"
    )  # an idle GPU lowers its link speed, so flexkv ignores the current speed
    (gpu / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    assert pci_link("0000:17:00.0", devices) == (16, 5)
    (bridge / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    assert pci_link("0000:17:00.0", devices) == (16, 4)
    (bridge / "max_link_speed").write_text("Unknown\n")
    assert pci_link("0000:17:00.0".upper(), devices) == (16, 5)


def test_the_driver_is_named_with_its_module_where_that_is_known(tmp_path: Path) -> None:
    module = tmp_path / "version"
    assert driver_version(12090, module) == "12.9"
    module.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC\n"
    )
    assert driver_version(13000, module) == "13.0 (580.159.04)"


def test_a_lane_goes_by_the_table_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane on the fake driver uses the thresholds of a real file, whose key is that of the fake GPU."""
    gpu = FakeGpu()
    built_in, identity = gpu.ways(), gpu.identity()
    monkeypatch.setattr(c_ext, "cuda_identity", lambda _: identity)
    monkeypatch.setattr(c_ext, "cuda_info", lambda: {"driver": 13000})
    key = this_key(0)
    assert (key.device, key.flexkv) == (KEY.device, flexkv.__version__)
    path = tmp_path / "ways.json"
    write_ways(path, key, CopyWays(16 << 10, 0), [])
    settings = load_config(None, {"FLEXKV_TRANSFER_WAYS_FILE": str(path)}).transfer
    ways = ways_of(settings, 0)
    assert ways == CopyWays(16 << 10, 0)
    del gpu
    told = FakeGpu(ways.load_kernel_below, ways.store_kernel_below).ways()
    assert told["h2d"].startswith("kernel for runs below 16 KiB")
    assert told["d2h"] == "in batches"
    assert built_in["h2d"].startswith("kernel for runs below 64 KiB")
    assert built_in["d2h"].startswith("kernel for all runs")
    # Without a GPU, or without the setting, no file is read.
    assert ways_of(settings, None) is None
    assert ways_of(load_config(None, {}).transfer, 0) is None
    assert usable_ways(settings, 0) == ways
    monkeypatch.setattr(flexkv, "__version__", "9.9")
    with pytest.raises(ConfigError, match=r"flexkv 9\.9"):
        ways_of(settings, 0)


def test_a_gpu_that_the_table_is_not_of_goes_by_what_is_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU uses the built-in thresholds if the file belongs to another GPU. An engine has one setting of the file for
    all its GPUs, and must run on all of them.
    """
    monkeypatch.setattr(
        ways_file, "this_key", lambda device: dataclasses.replace(KEY, device=f"GPU-{device}")
    )
    path = tmp_path / "ways.json"
    write_ways(path, dataclasses.replace(KEY, device="GPU-1"), WAYS, [])
    settings = load_config(None, {"FLEXKV_TRANSFER_WAYS_FILE": str(path)}).transfer
    assert [usable_ways(settings, device) for device in (0, 1)] == [None, WAYS]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "GPU-0" in said
    assert "built in" in said
    check_ways_file(settings)
    path.write_text("{")
    with pytest.raises(ConfigError):
        check_ways_file(settings)
    with pytest.raises(ConfigError):
        usable_ways(settings, 1)
