"""What the adapter refuses to serve, and what it says then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec

from flexkv.adapters.vllm.bare_tensors import config_of_tensors
from flexkv.adapters.vllm.geometry import block_geometry, build_view, check_parallelism, required_layout
from flexkv.errors import ConfigError, GeometryError
from flexkv.transfer.engine import cuda_device_of
from tests.unit.adapters.mini_pools import kv_config, make_caches


def test_one_group_of_full_attention_is_served() -> None:
    geometry = block_geometry(kv_config(9))
    assert (geometry.block_tokens, geometry.num_blocks, geometry.hashes_per_block) == (4, 9, 1)
    view, format_id = build_view(make_caches(kv_config(9)), kv_config(9), 1)
    assert view.num_blocks == 9
    assert "vllm-cpu-attn" in str(format_id)


def test_several_groups_are_refused() -> None:
    config = kv_config(9)
    config.kv_cache_groups.append(config.kv_cache_groups[0])
    with pytest.raises(GeometryError, match="2 KV cache groups"):
        block_geometry(config)


def test_a_sliding_window_is_refused() -> None:
    config = kv_config(9)
    spec = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=4, dtype=torch.float32, sliding_window=8)
    config.kv_cache_groups[0] = KVCacheGroupSpec(["layer.0"], spec)
    with pytest.raises(GeometryError, match="SlidingWindowSpec"):
        block_geometry(config)


def test_a_tensor_of_another_dtype_is_refused() -> None:
    caches = {name: cache.to(torch.float16) for name, cache in make_caches(kv_config(9)).items()}
    with pytest.raises(GeometryError, match="bytes"):
        build_view(caches, kv_config(9), 1)


def test_a_pool_on_a_device_without_lanes_is_refused() -> None:
    caches = {name: cache.to("meta") for name, cache in make_caches(kv_config(9)).items()}
    with pytest.raises(GeometryError, match="kind 'meta'"):
        build_view(caches, kv_config(9), 1)


def test_the_device_of_the_tensors_decides_which_lanes_an_engine_has() -> None:
    def on(kind: str, index: int | None = None) -> Any:
        return SimpleNamespace(device=SimpleNamespace(type=kind, index=index))

    assert cuda_device_of([on("cpu"), on("cpu")]) is None
    assert cuda_device_of([on("cuda", 3), on("cuda", 3)]) == 3
    with pytest.raises(GeometryError, match="must lie on one device"):
        cuda_device_of([on("cuda", 0), on("cuda", 1)])
    with pytest.raises(GeometryError, match="must lie on one device"):
        cuda_device_of([on("cuda", 0), on("cpu")])
    with pytest.raises(GeometryError, match=r"device of kind 'xpu': there are lanes for 'cpu' and 'cuda'"):
        cuda_device_of([on("xpu", 0)])


def test_foreign_tensors_are_refused() -> None:
    caches = make_caches(kv_config(9))
    with pytest.raises(
        GeometryError, match=r"layer\.0: its allocation has 4608 bytes, its placement says 8192"
    ):
        build_view(caches, kv_config(16), 1)
    with pytest.raises(GeometryError, match="no KV tensor"):
        build_view({"other": caches["layer.0"]}, kv_config(9), 1)


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_ranks_that_split_layers_or_tokens_are_refused(name: str) -> None:
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        name: 2,
    }
    with pytest.raises(ConfigError, match=f"{name} is 2"):
        check_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))


def test_on_a_cpu_no_layout_is_asked_for_because_there_is_one_only() -> None:
    assert required_layout(SimpleNamespace()) is None


def test_tensors_alone_give_the_same_view(monkeypatch: pytest.MonkeyPatch) -> None:
    config = kv_config(9)
    caches = make_caches(config)
    layer = SimpleNamespace(get_kv_cache_spec=lambda _: config.kv_cache_groups[0].kv_cache_spec)
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: dict.fromkeys(caches, layer))
    found = config_of_tensors(caches, SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout="LBHNC")))
    assert found.num_blocks == 9
    one, other = build_view(caches, config, 1)[0], build_view(caches, found, 1)[0]
    assert one.segments.tolist() == other.segments.tolist()


def test_tensors_that_share_memory_are_refused_by_the_built_in_class(monkeypatch: pytest.MonkeyPatch) -> None:
    config = kv_config(9)
    cache = make_caches(config)["layer.0"]
    layer = SimpleNamespace(get_kv_cache_spec=lambda _: config.kv_cache_groups[0].kv_cache_spec)
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: {"a": layer, "b": layer})
    with pytest.raises(GeometryError, match=r"flexkv\.adapters\.vllm"):
        config_of_tensors({"a": cache, "b": cache}, SimpleNamespace())
