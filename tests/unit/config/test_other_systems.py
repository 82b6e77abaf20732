"""If a user gives a setting of another KV cache system, the error names the setting of flexkv with the same effect. The
tests check every row of the table of such names.
"""

from __future__ import annotations

import pytest

from flexkv.config import load_config
from flexkv.config.model import setting_fields
from flexkv.config.names import ALIASES
from flexkv.config.other_systems import OTHER_NAMES
from flexkv.config.sources import OTHER_VARIABLES
from flexkv.errors import ConfigError

GIB = 1 << 30
# By the name of a setting in another system: an example of its value, flexkv's settings with the same effect, and the
# value that flexkv reads from them. Numbers of bytes are those that the other system computes from its value.
SAME: dict[str, tuple[object, dict[str, object], object]] = {
    "local_cpu": (True, {"host.bytes": "5GiB"}, 5 * GIB),
    "max_local_cpu_size": (2.5, {"host.bytes_per_rank": "2.5GiB"}, int(2.5 * GIB)),
    "local_disk": ("file:///mnt/a", {"disk.folders": "/mnt/a"}, ("/mnt/a",)),
    "max_local_disk_size": (10, {"disk.bytes_per_folder": "10GiB"}, 10 * GIB),
    "use_layerwise": (True, {"load.mode": "layerwise"}, "layerwise"),
    "enable_async_loading": (True, {"load.mode": "async"}, "async"),
    "blocking_timeout_secs": (10, {"load.deadline_s": 10}, 10.0),
    "cache_policy": ("LRU", {"index.policy": "lru"}, "lru"),
    "numa_mode": ("manual", {"host.numa_node": 1}, 1),
    "gds_path": ("/mnt/a", {"disk.folders": "/mnt/a"}, ("/mnt/a",)),
    "cufile_buffer_size": (512, {"gds.max_staging_bytes": "512MiB"}, 512 << 20),
    "remote_url": (
        "redis://127.0.0.1:6379",
        {"remote.urls": "redis://127.0.0.1:6379"},
        ("redis://127.0.0.1:6379",),
    ),
    "enable_remote": (True, {"remote.urls": "redis://127.0.0.1:6379"}, ("redis://127.0.0.1:6379",)),
    "use_mooncake_store_backend": (
        True,
        {"remote.urls": "redis://127.0.0.1:6379"},
        ("redis://127.0.0.1:6379",),
    ),
    "mooncake_store_config_path": (
        "/a.json",
        {"remote.urls": "redis://127.0.0.1:6379"},
        ("redis://127.0.0.1:6379",),
    ),
    "cpu_cache_gb": (16, {"host.bytes": "16GiB"}, 16 * GIB),
    "ssd_cache_gb": (1024, {"disk.bytes_per_folder": "1024GiB"}, 1024 * GIB),
    "ssd_cache_dir": ("/a/;/b/", {"disk.folders": "/a/:/b/"}, ("/a/", "/b/")),
    "enable_gds": (1, {"disk.gds": "on"}, "on"),
    "enable_layerwise_transfer": (1, {"load.mode": "layerwise"}, "layerwise"),
    "eviction_policy": ("lru", {"index.policy": "lru"}, "lru"),
    "use_hugepage_cpu_buffer": (0, {"host.huge_pages": "off"}, "off"),
    "use_ce_transfer_h2d": (1, {"transfer.copy_kernel": False}, False),
    "use_ce_transfer_d2h": (1, {"transfer.copy_kernel": False}, False),
    "iouring_entries": (512, {"disk.depth": 512}, 512),
    "instance_num": (2, {"host.units_per_node": 2}, 2),
    "log_level": ("DEBUG", {"observe.log_level": "debug"}, "debug"),
    "hicache_size": (30, {"host.bytes_per_rank": "30GB"}, 30 * 10**9),
    "hicache_ratio": (2, {"host.memory_share": 0.5}, 0.5),
    "hicache_io_backend": ("direct", {"transfer.copy_kernel": False}, False),
    "hicache_write_policy": ("write_back", {"disk.mode": "back"}, "back"),
    "hicache_storage_backend": ("file", {"disk.folders": "/a"}, ("/a",)),
    "hicache_storage_prefetch_policy": ("timeout", {"load.lookup_wait_s": 2}, 2.0),
    "prefetch_timeout_base": (1.5, {"load.lookup_wait_s": 1.5}, 1.5),
    "kv_offloading_size": (8, {"host.bytes": "8GiB"}, 8 * GIB),
    "num_cpu_blocks": (1000, {"host.bytes": "2000MiB"}, 2000 << 20),
    "offload_prompt_only": (True, {"store.tokens": "prompt"}, "prompt"),
    "disk_path": ("/a", {"disk.folders": "/a"}, ("/a",)),
    "disk_capacity_bytes": (10**9, {"disk.bytes_per_folder": 10**9}, 10**9),
    "secondary_tiers": (["fs"], {"disk.folders": "/a"}, ("/a",)),
}
ABSENT = sorted(name for name, row in OTHER_NAMES.items() if not row.setting)


def refusal(extra: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(extra, {})
    return str(caught.value)


@pytest.mark.parametrize("name", SAME)
def test_the_setting_named_does_what_the_other_name_does(name: str) -> None:
    value, here, meaning = SAME[name]
    row = OTHER_NAMES[name]
    ((setting, written),) = here.items()
    assert row.setting == setting
    message = refusal({name: value})
    assert f"unknown setting {name!r} from engine extra config" in message
    assert f"{setting!r}" in message
    assert row.systems in message
    if row.unit:
        assert f"({written})" in message
    section, field = setting.split(".")
    assert getattr(getattr(load_config(here, {}), section), field) == meaning


def test_every_name_has_an_example_or_a_reason() -> None:
    with_setting = {name for name, row in OTHER_NAMES.items() if row.setting}
    assert with_setting == {*SAME, "config_path"}
    assert all(OTHER_NAMES[name].how for name in OTHER_NAMES)
    ours = {*setting_fields(), *OTHER_VARIABLES}
    assert {row.setting for row in OTHER_NAMES.values() if row.setting} <= ours
    # The table must not contain a name that flexkv itself accepts.
    assert not set(OTHER_NAMES) & (set(ALIASES) | ours)


@pytest.mark.parametrize("name", ABSENT)
def test_a_name_without_a_setting_here_is_answered_with_the_reason(name: str) -> None:
    row = OTHER_NAMES[name]
    message = refusal({name: "x"})
    assert message.endswith(f"a name of {row.systems}; {row.how}")


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("FLEXKV_CPU_CACHE_GB", "16", "here it is 'FLEXKV_HOST_BYTES', with its unit (16GiB)"),
        ("FLEXKV_CONFIG_PATH", "flexkv.yml", "here it is 'FLEXKV_CONFIG'"),
        ("FLEXKV_SERVER_CLIENT_MODE", "1", "flexkv has no server"),
        # Kubernetes sets variables with names like FLEXKV_SERVER_RECV_PORT, but their values begin with tcp://.
        ("FLEXKV_SERVER_RECV_PORT", "ipc:///tmp/flexkv_server", "flexkv has no server"),
    ],
)
def test_a_variable_of_the_other_flexkv_names_the_variable_here(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str
) -> None:
    monkeypatch.setattr("flexkv.observe.log._warned", set())
    load_config(None, {variable: value})
    [record] = caplog.records
    assert hint in record.message
    assert "CUDA_ARCHS" not in record.message


def test_lmcache_keys_are_found_with_their_prefix_in_an_extra_config() -> None:
    message = refusal({"lmcache.max_local_cpu_size": 20})
    assert "'host.bytes_per_rank', with its unit (20GiB)" in message


@pytest.mark.parametrize("value", ["much", None, -1, "1/3", True, [5]])
def test_a_size_that_is_no_number_is_answered_with_an_example(value: object) -> None:
    message = refusal({"max_local_cpu_size": value})
    assert "(such as '5GiB')" in message


def test_a_slip_of_an_own_name_is_answered_with_that_name() -> None:
    assert "did you mean 'host.bytes'" in refusal({"host.byts": 1})


def test_bytes_of_the_whole_server_are_those_of_the_unit() -> None:
    assert load_config({"cpu_bytes_to_use": 3 * GIB}, {}).host.bytes == 3 * GIB
