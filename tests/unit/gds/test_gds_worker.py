"""GDSTransferWorker takes its settings from the configuration unless arguments override them. It moves the requested
blocks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexkv.config import load_config
from flexkv.errors import CapacityError, ConfigError, GeometryError
from flexkv.transfer.raw.gds_worker import GDSTransferWorker, RawFileLayout, RawPool

LAYERS, CHUNK, BLOCKS = 5, 4096, 10


class Rank:
    """A pool in plain memory in one of vLLM's layouts, [layer][kv][block][chunk], and the files of its rank."""

    def __init__(self, folder: Path) -> None:
        self.memory = np.random.default_rng(3).integers(0, 256, (LAYERS, 2, BLOCKS, CHUNK), np.uint8)
        self.pool = RawPool(
            gpu_block_type=0,
            layer_ptrs=tuple(self.memory[layer].ctypes.data for layer in range(LAYERS)),
            block_stride=CHUNK,
            kv_stride=CHUNK * BLOCKS,
        )
        self.files = RawFileLayout.dense(LAYERS, CHUNK, blocks_per_file=8)
        self.paths = {0: [str(folder / "a"), str(folder / "b")]}


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_blocks_come_back_to_other_places(rank: Rank) -> None:
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths)
    content = rank.memory.copy()
    worker.write([0, 3, 9], [1, 12, 4])
    rank.memory[:] = 0
    worker.read([5, 6, 7], [4, 1, 12])
    assert (rank.memory[:, :, [5, 6, 7]] == content[:, :, [9, 0, 3]]).all()
    assert not rank.memory[:, :, [0, 1, 2, 3, 4, 8, 9]].any()
    rank.memory[:] = 0
    worker.read([2], [12], layers=[1, 3])
    assert (rank.memory[[1, 3], :, 2] == content[[1, 3], :, 3]).all()
    assert not rank.memory[[0, 2, 4]].any()
    worker.close()


def test_settings_reach_the_manager_and_arguments_win(rank: Rank) -> None:
    environ = {
        "FLEXKV_GDS_USE_STAGED_TRANSFER": "0",
        "FLEXKV_GDS_MAX_STAGING_BLOCKS": "3",
        "FLEXKV_GDS_MAX_STAGING_BYTES": "1MiB",
    }
    config = load_config(None, environ).gds
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config)
    worker.write([0, 1], [0, 1])
    assert worker.manager.totals["io_calls"] == 2 * 2 * LAYERS
    assert worker.manager.staging_bytes == 0
    worker.close()

    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config, use_staged_transfer=True)
    worker.write(list(range(BLOCKS)), list(range(BLOCKS)))
    assert worker.manager.totals["io_calls"] == BLOCKS
    assert worker.manager.staging_bytes == 3 * rank.files.block_stride
    worker.close()

    worker = GDSTransferWorker(
        rank.pool, rank.files, rank.paths, config=config, use_staged_transfer=True, max_staging_blocks=2
    )
    worker.write([0, 1, 2], [0, 1, 2])
    assert worker.manager.staging_bytes == 2 * rank.files.block_stride
    worker.close()


def test_the_environment_is_read_where_no_config_is_given(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_GDS_USE_STAGED_TRANSFER", "0")
    monkeypatch.setenv("FLEXKV_GDS_MAX_STAGING_BLOCKS", "3")
    monkeypatch.setenv("FLEXKV_DISK_IO", "threads")
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths)
    assert (worker.use_staged_transfer, worker.max_staging_blocks) == (False, 3)
    assert worker.manager.describe() == "posix to host"
    worker.write([0, 1], [0, 1])
    assert worker.manager.totals["io_calls"] == 2 * 2 * LAYERS
    worker.close()

    # Arguments override the settings of the process. If a `config` is given, the worker ignores the process's settings.
    worker = GDSTransferWorker(
        rank.pool, rank.files, rank.paths, use_staged_transfer=True, max_staging_blocks=2
    )
    assert (worker.use_staged_transfer, worker.max_staging_blocks) == (True, 2)
    worker.close()
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths, config=load_config(None, {}).gds)
    assert (worker.use_staged_transfer, worker.max_staging_blocks) == (True, 64)
    worker.close()


def test_a_bad_variable_is_refused_by_the_worker(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_GDS_MAX_STAGING_BLOCKS", "many")
    with pytest.raises(ConfigError, match="env FLEXKV_GDS_MAX_STAGING_BLOCKS"):
        GDSTransferWorker(rank.pool, rank.files, rank.paths)


def test_staging_is_bounded_in_bytes(rank: Rank) -> None:
    config = load_config({"gds.max_staging_bytes": rank.files.block_stride * 5 // 2}, {}).gds
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config)
    worker.write(list(range(BLOCKS)), list(range(BLOCKS)))
    assert worker.manager.staging_bytes == 2 * rank.files.block_stride
    worker.close()


def test_staging_is_taken_at_the_start(rank: Rank) -> None:
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths, max_staging_blocks=3)
    assert worker.manager.staging_bytes == 3 * rank.files.block_stride
    assert worker.manager.totals["transfers"] == 0
    worker.write([0], [0])
    assert worker.manager.staging_bytes == 3 * rank.files.block_stride
    worker.close()


def test_staging_that_is_not_there_is_an_error_at_the_start_with_what_to_set(rank: Rank) -> None:
    config = load_config({"gds.max_staging_bytes": "1024TiB"}, {}).gds
    with pytest.raises(CapacityError) as caught:
        GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config, max_staging_blocks=2**31 - 1)
    words = str(caught.value)
    assert "are available (MemAvailable)" in words or "cgroup" in words
    assert f"{2**31 - 1} staging slots of {rank.files.block_stride} bytes" in words
    assert "lower gds.max_staging_blocks or gds.max_staging_bytes" in words
    # The failed worker has left no file open: a worker with fewer staging blocks can open the same files.
    GDSTransferWorker(rank.pool, rank.files, rank.paths, max_staging_blocks=1).close()


def test_a_limit_that_leaves_no_slot_is_an_error_at_the_start(rank: Rank) -> None:
    config = load_config({"gds.max_staging_bytes": rank.files.block_stride - 1}, {}).gds
    with pytest.raises(
        CapacityError, match=r"raise gds.max_staging_bytes, or switch gds.use_staged_transfer off"
    ):
        GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config)
    GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config, use_staged_transfer=False).close()


def test_a_limit_that_cuts_another_is_logged_with_both_and_the_result(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    size = rank.files.block_stride
    config = load_config({"gds.max_staging_bytes": size * 5 // 2}, {}).gds
    caplog.set_level("INFO")
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config)
    assert (worker.manager.staging_slots, worker.manager.staging_slot_bytes) == (2, size)
    worker.close()
    assert [r.message for r in caplog.records if "max_staging" in r.message] == [
        "2 staging slots of 40.0 KiB, 80.0 KiB together: gds.max_staging_blocks = 64 asks for 2.5 MiB, and "
        "gds.max_staging_bytes = 100.0 KiB leaves no more"
    ]
    caplog.clear()
    GDSTransferWorker(rank.pool, rank.files, rank.paths, config=config, max_staging_blocks=2).close()
    assert [r.message for r in caplog.records if "max_staging" in r.message] == []


def test_defaults_are_the_documented_ones() -> None:
    config = load_config(None, {}).gds
    assert (config.use_staged_transfer, config.max_staging_blocks) == (True, 64)


def test_bad_settings_and_ids_are_named(rank: Rank) -> None:
    with pytest.raises(ConfigError, match="FLEXKV_GDS_MAX_STAGING_BLOCKS"):
        load_config(None, {"FLEXKV_GDS_MAX_STAGING_BLOCKS": "0"})
    with pytest.raises(ConfigError, match="FLEXKV_GDS_USE_STAGED_TRANSFER"):
        load_config(None, {"FLEXKV_GDS_USE_STAGED_TRANSFER": "perhaps"})
    worker = GDSTransferWorker(rank.pool, rank.files, rank.paths)
    with pytest.raises(GeometryError, match="ssd_blocks"):
        worker.read([0], [0.5])  # type: ignore[list-item]
    worker.close()
