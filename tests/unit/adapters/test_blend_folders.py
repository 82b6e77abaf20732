"""Tests the folders in which a rank of vLLM keeps its segments on disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.adapters.vllm.blend import folders as module
from flexkv.adapters.vllm.blend.folders import segment_folders, segment_namespace
from flexkv.cache.keys import namespace_digest
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.weights.files import WeightsContent

WEIGHTS = WeightsContent(("/models/llama",))


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "engine_weights", lambda vllm_config, settings: WEIGHTS)
    monkeypatch.setattr(module, "engine_namespace", lambda vllm_config, geometry, settings: b"n" * 32)


def engine(replica: int = 0, ranks: int = 2) -> Any:
    parallel = SimpleNamespace(data_parallel_index=replica, tensor_parallel_size=ranks)
    return SimpleNamespace(model_config=SimpleNamespace(model="llama"), parallel_config=parallel)


def config(disk: dict[str, Any] | None = None, **blend: Any) -> FlexKVConfig:
    return FlexKVConfig.model_validate({"disk": disk or {}, "blend": blend, "load": {"deadline_s": 12}})


def test_segments_are_in_host_memory_alone_unless_they_have_room_on_disk() -> None:
    found = segment_folders(engine(), config({"folders": "/mnt/a"}), 0)
    assert not found.disk.folders


def test_room_without_folders_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"blend\.disk_bytes=4096: it needs disk\.folders"):
        segment_folders(engine(), config(disk_bytes=4096), 0)


def test_each_rank_has_its_own_room_under_a_name_of_its_own() -> None:
    disk = {"folders": "/mnt/a:/mnt/b", "bytes_per_folder": 1 << 30, "mode": "evict"}
    settings = config(disk, disk_bytes=4096)
    found = [segment_folders(engine(replica), settings, rank) for replica in (0, 1) for rank in (0, 1)]
    assert len({each.unit for each in found}) == 4
    for each in found:
        assert (each.disk.folders, each.disk.bytes_per_folder, each.disk.mode) == (
            ("/mnt/a", "/mnt/b"),
            4096,
            "evict",
        )
        assert (each.weights, each.streams, each.asks_again) == (WEIGHTS, False, True)


@pytest.mark.parametrize(
    ("wait_s", "stream", "waits_s"),
    [(2.0, False, 2.0), (30.0, False, 4.0), (2.0, True, 2.0), (30.0, True, 3.0)],
)
def test_what_came_can_be_used_before_the_requests_deadline(
    wait_s: float, stream: bool, waits_s: float
) -> None:
    """All waits of a request together end before the load's deadline. A request may wait three times: for space in host
    memory, for reads, and, if segments are streamed, for their first layers. So each wait gets a part of the deadline.
    """
    settings = config({"folders": "/mnt/a", "wait_s": wait_s, "stream": stream}, disk_bytes=4096)
    found = segment_folders(engine(), settings, 0)
    assert (found.disk.wait_s, found.streams) == (waits_s, stream)
    assert (2 + stream) * waits_s < settings.load.deadline_s


def test_a_rank_finds_nothing_of_another_or_of_another_number_of_ranks() -> None:
    settings = config({"folders": "/mnt/a"}, disk_bytes=4096)
    geometry: Any = None
    found = {
        namespace_digest(segment_namespace(engine(ranks=ranks), geometry, settings, rank))
        for ranks, rank in ((1, 0), (2, 0), (2, 1))
    }
    assert len(found) == 3
    again = segment_namespace(engine(replica=1), geometry, settings, 1)
    assert namespace_digest(again) in found, "the ranks of other replicas compute the same"
