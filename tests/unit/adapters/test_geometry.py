"""Shows which pool geometries the adapter serves or refuses, and the wording of the refusals."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_layout import KVCacheLayout

from flexkv.adapters.vllm.geometry import (
    build_views,
    head_replicas,
    heads_of_rows,
    layer_numbers,
    replicas,
    required_layout,
)
from flexkv.adapters.vllm.pool_geometry import check_group, one_group_geometry, pool_geometry
from flexkv.errors import GeometryError
from flexkv.facts.keys import Rule
from flexkv.transfer.engine import cuda_device_of
from tests.unit.adapters.mini_pools import kv_config, make_caches


def test_one_group_of_full_attention_is_served() -> None:
    (geometry,) = one_group_geometry(kv_config(9)).groups
    assert (geometry.block_tokens, geometry.num_blocks, geometry.hashes_per_block) == (4, 9, 1)
    (group,) = build_views(make_caches(kv_config(9)), kv_config(9), 1)
    assert group.view.num_blocks == 9
    assert "vllm-cpu-attn" in group.facts.format_id


def test_several_groups_are_refused_where_one_is_needed() -> None:
    config = kv_config(9)
    config.kv_cache_groups.append(config.kv_cache_groups[0])
    with pytest.raises(GeometryError, match="FullAttentionSpec, FullAttentionSpec"):
        one_group_geometry(config)


def test_a_model_without_kv_is_refused() -> None:
    config = kv_config(9)
    config.kv_cache_groups.clear()
    with pytest.raises(GeometryError, match="no KV cache"):
        one_group_geometry(config)


SHAPE: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float32}
FULL, LATENT = specs.FullAttentionSpec(**SHAPE), specs.MLAAttentionSpec(**SHAPE)
WINDOW = specs.SlidingWindowSpec(**SHAPE, sliding_window=8)
CHUNK = specs.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=8)
STATE = specs.MambaSpec(
    block_size=4, shapes=((2, 4), (3, 2, 2)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align"
)
SERVED = (FULL, LATENT, WINDOW, CHUNK, STATE)
REFUSED = (
    specs.AttentionSpec(**SHAPE),
    specs.CircularBufferSpec(**SHAPE),
    specs.CrossAttentionSpec(**SHAPE),
    specs.EncoderOnlyAttentionSpec(**SHAPE),
    specs.HiSparseHotSpec(block_size=4, page_size=64, blocks_per_request=1),
    specs.HiSparseResidentSpec(block_size=4, page_size=64),
    specs.HiddenStateCacheSpec(**SHAPE),
    specs.RSWASpec(**SHAPE, rswa_window=8),
    specs.SinkFullAttentionSpec(**SHAPE, sink_len=4),
    specs.SlidingWindowMLASpec(**SHAPE, sliding_window=8),
)
MIXED = specs.UniformTypeKVCacheSpecs(
    block_size=4,
    kv_cache_specs={"layer.0": SERVED[0], "layer.1": replace(SERVED[0], num_kv_heads=4)},
)


def group_of(spec: Any, **fields: Any) -> Any:
    return specs.KVCacheGroupSpec(["layer.0"], spec, **fields)


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: type(spec).__name__)
def test_a_kind_of_kv_cache_that_is_not_known_is_refused_by_its_name(spec: Any) -> None:
    with pytest.raises(GeometryError, match=f"is a {type(spec).__name__}; flexkv stores FullAttentionSpec"):
        check_group(group_of(spec))


@pytest.mark.parametrize("spec", SERVED, ids=lambda spec: type(spec).__name__)
def test_a_kind_of_kv_cache_is_served(spec: Any) -> None:
    check_group(group_of(spec))


@pytest.mark.parametrize("spec", [FULL, LATENT], ids=lambda spec: type(spec).__name__)
def test_full_attention_is_served_also_where_layers_see_a_window_of_it(spec: Any) -> None:
    """A group of full attention is served even if its layers see only a window. vLLM makes this configuration with
    --disable-hybrid-kv-cache-manager.
    """
    config = config_of(replace(spec, sliding_window=8))
    assert not one_group_geometry(config).is_hybrid


def config_of(*kinds: Any, **fields: Any) -> Any:
    """Makes a configuration with one KV group of each of these kinds."""
    config = kv_config(9)
    config.kv_cache_groups[:] = [specs.KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(kinds)]
    return replace(config, **fields)


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_that_the_engine_does_not_keep_at_the_ends_of_blocks_are_refused(mode: str) -> None:
    with pytest.raises(GeometryError, match=f"mamba_cache_mode is '{mode}'.*--mamba-cache-mode align"):
        check_group(group_of(replace(STATE, mamba_cache_mode=mode)))


def test_a_group_of_states_has_a_rule_and_a_signature_of_its_own() -> None:
    full, states = pool_geometry(config_of(STATE, FULL)).groups
    assert (full.rule, full.states) == (Rule.FULL, "")
    assert (states.rule, states.reach, states.kv_dtype) == (Rule.STATE, 0, "bfloat16+float32")
    for other in (
        replace(STATE, shapes=((2, 4), (3, 4))),
        replace(STATE, dtypes=(torch.bfloat16, torch.bfloat16)),
        replace(STATE, block_size=8),
    ):
        assert pool_geometry(config_of(other, FULL)).groups[1].signature != states.signature
    padded = replace(STATE, page_size_padded=4096)
    assert pool_geometry(config_of(padded, FULL)).groups[1].signature == states.signature


@pytest.mark.parametrize(
    ("fields", "hash_tokens", "handed_over"),
    [({}, 4, False), ({}, 2, True), ({"num_prefill_checkpoint_blocks": 1}, 4, True)],
)
def test_where_states_may_end_within_blocks_the_engine_says_which_block_has_them(
    fields: dict[str, int], hash_tokens: int, handed_over: bool
) -> None:
    config = config_of(replace(STATE, **fields), FULL, hash_block_size=hash_tokens)
    full, states = pool_geometry(config).groups
    assert (full.states_handed_over, states.states_handed_over) == (False, handed_over)


def window(tokens: int, block: int = 4, extra: int = 0) -> Any:
    return replace(WINDOW, sliding_window=tokens, block_size=block, extra_retained_tokens=extra)


def test_groups_have_the_rules_that_the_engine_allocates_by() -> None:
    geometry = pool_geometry(config_of(window(9), FULL, CHUNK, LATENT))
    assert [group.number for group in geometry.groups] == [1, 3, 0, 2], "full ones first"
    assert [group.rule for group in geometry.groups] == [Rule.FULL, Rule.FULL, Rule.WINDOW, Rule.CHUNK]
    assert [group.reach for group in geometry.groups] == [0, 0, 2, 8]
    assert geometry.is_hybrid
    assert geometry.alignment_tokens == 4


@pytest.mark.parametrize(
    ("tokens", "extra", "pages"), [(9, 0, 2), (10, 0, 3), (8, 0, 2), (8, 2, 3), (2, 0, 1), (1, 1, 1)]
)
def test_a_window_reaches_as_many_pages_as_the_engine_keeps(tokens: int, extra: int, pages: int) -> None:
    """A hit needs as many pages of a window as vLLM keeps. vLLM frees the blocks that end before the window of the next
    token begins.
    """
    (group,) = pool_geometry(config_of(window(tokens, extra=extra))).groups
    assert group.reach == pages
    manager = SlidingWindowManager.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = tokens, extra
    kept = 40 // 4 - manager.get_num_skipped_tokens(40) // 4
    assert kept == pages


def test_a_window_of_which_the_engine_keeps_no_block_is_refused() -> None:
    with pytest.raises(GeometryError, match="sliding window of one token"):
        pool_geometry(config_of(FULL, window(1)))


def test_hits_are_aligned_to_whole_blocks_of_all_groups_and_as_the_engine_wants() -> None:
    unlike = config_of(FULL, window(64, block=16))
    assert pool_geometry(unlike).alignment_tokens == 16
    assert pool_geometry(replace(unlike, cache_hit_alignment_tokens=32)).alignment_tokens == 32


def test_layers_of_a_group_that_need_other_pages_are_refused() -> None:
    both = specs.UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"layer.0": WINDOW, "layer.1": CHUNK})
    with pytest.raises(GeometryError, match="layers of several rules"):
        pool_geometry(config_of(both))


def test_signatures_tell_groups_apart() -> None:
    groups = pool_geometry(config_of(window(9), window(9), window(10), FULL)).kv_groups()
    assert len({group.signature for group in groups}) == 4
    assert pool_geometry(config_of(FULL)).kv_groups()[0].signature == b"", (
        "keys of one full group stay as they are"
    )


def test_a_window_and_a_chunk_of_one_number_have_other_signatures() -> None:
    """A window group and a chunk group with the same reach have different signatures, because a window's reach counts
    pages and a chunk's counts tokens. With equal signatures, a model whose window layers are reconfigured as chunk
    layers would find wrong pages.
    """
    pages, tokens = pool_geometry(config_of(window(33), CHUNK)).groups
    assert (pages.reach, tokens.reach) == (8, 8)
    assert replace(pages, layer_names=tokens.layer_names).signature != tokens.signature


def test_layers_of_several_shapes_are_served_where_each_is() -> None:
    check_group(group_of(MIXED))
    other = {**MIXED.kv_cache_specs, "layer.2": REFUSED[-1]}
    with pytest.raises(GeometryError, match="is a SlidingWindowMLASpec"):
        check_group(group_of(replace(MIXED, kv_cache_specs=other)))
    other = {**MIXED.kv_cache_specs, "layer.2": replace(SERVED[0], non_causal=True)}
    with pytest.raises(GeometryError, match="non-causal"):
        check_group(group_of(replace(MIXED, kv_cache_specs=other)))


def of_specs(*layers: Any) -> Any:
    config = kv_config(9)
    named = {f"layer.{number}": spec for number, spec in enumerate(layers)}
    config.kv_cache_groups[0].kv_cache_spec = specs.UniformTypeKVCacheSpecs(
        block_size=4, kv_cache_specs=named
    )
    return config


def test_ranks_hold_copies_only_where_no_layer_is_split_by_heads() -> None:
    attention, latent = FULL, LATENT
    assert replicas(of_specs(latent, replace(latent, head_size=8)), 4) == 4
    assert replicas(of_specs(latent, attention), 4) == 1
    assert replicas(of_specs(attention, latent), 4) == 1


def test_ranks_share_a_kv_head_where_every_layer_has_one_a_rank() -> None:
    one_head = replace(FULL, num_kv_heads=1)
    window = specs.SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8
    )
    assert replicas(of_specs(one_head, one_head), 8, of_heads=4) == 4
    assert replicas(of_specs(one_head), 8, of_heads=1) == 1
    assert replicas(of_specs(one_head, replace(FULL, num_kv_heads=2)), 8, of_heads=4) == 1
    assert replicas(of_specs(one_head, LATENT), 8, of_heads=4) == 1
    both = of_specs(one_head)
    both.kv_cache_groups.append(specs.KVCacheGroupSpec(["layer.9"], window))
    assert replicas(both, 8, of_heads=4) == 4


def engine_of(heads: int, ranks: int, draft: object = None, **counts: object) -> Any:
    """Makes the parts of a vLLM configuration that determine how KV heads are distributed over ranks."""
    named = {"num_attention_heads": 32, "head_dim": 64, **(counts or {"num_key_value_heads": heads})}
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads, hf_text_config=SimpleNamespace(to_dict=lambda: named)
    )
    parallel = SimpleNamespace(tensor_parallel_size=ranks)
    return SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=draft)


@pytest.mark.parametrize(
    ("engine", "replicas"),
    [
        (engine_of(2, 8), 4),
        (engine_of(1, 2), 2),
        (engine_of(8, 8), 1),
        (engine_of(16, 8), 1),
        (engine_of(3, 8), 1),
        (engine_of(2, 8, multi_query_group_num=2), 4),
        (engine_of(2, 8, num_key_value_heads=2, num_global_key_value_heads=8), 1),
        (engine_of(2, 8, num_key_value_heads=2, swa_num_key_value_heads=8), 1),
        (engine_of(2, 8, layers="that say it otherwise"), 1),
        (engine_of(2, 8, draft=object()), 1),
    ],
)
def test_more_ranks_than_kv_heads(engine: Any, replicas: int) -> None:
    assert head_replicas(engine) == replicas


def test_layers_of_several_shapes_have_no_rows_in_common() -> None:
    attention = SERVED[0]
    assert heads_of_rows(of_specs(attention, attention).kv_cache_groups[0]) == 2
    assert heads_of_rows(of_specs(attention, replace(attention, num_kv_heads=4)).kv_cache_groups[0]) == 0
    indexer = replace(SERVED[1], dtype=torch.uint8, head_size=132)
    assert one_group_geometry(of_specs(SERVED[1], indexer)).groups[0].kv_dtype == "float32+uint8"


def test_every_kind_of_kv_cache_that_vllm_has_is_decided() -> None:
    kinds = {
        kind for _, kind in inspect.getmembers(specs, inspect.isclass) if issubclass(kind, specs.KVCacheSpec)
    }
    assert kinds - {type(spec) for spec in (*SERVED, *REFUSED, MIXED)} == {specs.KVCacheSpec}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"non_causal": True}, "non-causal .*depends on later tokens"),
        ({"tokens_per_state": 4}, "4 tokens a state"),
    ],
)
@pytest.mark.parametrize("spec", [FULL, LATENT], ids=lambda spec: type(spec).__name__)
def test_kv_that_is_not_one_state_for_each_token_before_is_refused(
    spec: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        check_group(group_of(replace(spec, **fields)))


@pytest.mark.parametrize("fields", [{"host_resident": True}, {"enable_kv_transfer": False}])
def test_a_group_that_vllm_keeps_to_itself_is_refused(fields: dict[str, bool]) -> None:
    with pytest.raises(GeometryError, match="not for connectors"):
        check_group(group_of(SERVED[0], **fields))


def test_a_layer_that_shares_anothers_kv_has_its_number() -> None:
    config = kv_config(9)
    caches = make_caches(config)
    view = build_views(caches, config, 1)[0].view
    caches |= {"layer.2": caches["layer.0"], "layer.3": caches["layer.1"], "encoder": caches["layer.0"][1:]}
    assert layer_numbers(caches, config) == {"layer.0": 0, "layer.1": 1, "layer.2": 0, "layer.3": 1}
    assert build_views(caches, config, 1)[0].view.segments.tolist() == view.segments.tolist()


def test_a_tensor_of_another_dtype_is_refused() -> None:
    caches = {name: cache.to(torch.float16) for name, cache in make_caches(kv_config(9)).items()}
    with pytest.raises(GeometryError, match="bytes"):
        build_views(caches, kv_config(9), 1)


def test_a_pool_on_a_device_without_lanes_is_refused() -> None:
    caches = {name: cache.to("meta") for name, cache in make_caches(kv_config(9)).items()}
    with pytest.raises(GeometryError, match="kind 'meta'"):
        build_views(caches, kv_config(9), 1)


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
        build_views(caches, kv_config(16), 1)
    with pytest.raises(GeometryError, match="no KV tensor"):
        build_views({"other": caches["layer.0"]}, kv_config(9), 1)


def test_on_a_cpu_no_layout_is_asked_for_because_there_is_one_only() -> None:
    assert required_layout(SimpleNamespace()) is None


def asked_for(monkeypatch: pytest.MonkeyPatch, *layers: str, named: str | None = None) -> str | None:
    """Returns the layout that the connector requests on a GPU. In this process either the layers have the attention
    backends `layers`, or the configuration names the backend `named`.
    """
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    found = [SimpleNamespace(get_attn_backend=AttentionBackendEnum[backend].get_class) for backend in layers]
    monkeypatch.setattr("vllm.config.get_layers_from_vllm_config", lambda *_: dict(enumerate(found)))
    backend = AttentionBackendEnum[named] if named else None
    return required_layout(
        SimpleNamespace(attention_config=SimpleNamespace(backend=backend, backend_per_kind={}))
    )


def test_blocks_are_asked_for_as_one_run_where_every_backend_accepts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert asked_for(monkeypatch, "TRITON_ATTN") == "BLHNC"
    assert asked_for(monkeypatch, "TRITON_ATTN", "TRITON_MLA") == "BLHNC"
    assert asked_for(monkeypatch) == "BLHNC", "workers of other processes have yet to choose"
    assert asked_for(monkeypatch, named="TRITON_ATTN") == "BLHNC"


def test_an_order_that_a_backend_in_use_has_not_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    only = AttentionBackendEnum.FLEX_ATTENTION.get_class().supported_kv_cache_layouts()
    assert [layout.name for layout in only or ()] == ["LBNHC"], "what this test stands on"
    assert asked_for(monkeypatch, "FLEX_ATTENTION") is None
    assert asked_for(monkeypatch, "TRITON_ATTN", "FLEX_ATTENTION") is None
    assert asked_for(monkeypatch, named="FLEX_ATTENTION") is None


def test_another_order_with_blocks_outermost_is_taken_where_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = AttentionBackendEnum.TRITON_ATTN.get_class()
    monkeypatch.setattr(
        kind, "supported_kv_cache_layouts", lambda: (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)
    )
    assert asked_for(monkeypatch, "TRITON_ATTN") == "BLNHC"
