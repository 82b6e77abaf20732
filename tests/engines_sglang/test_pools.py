"""Pages of SGLang's own pool classes, on the device and on the host, are stored and loaded byte for byte. Pools of
other classes are refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines_sglang.conftest import Parts


@pytest.fixture(scope="module")
def pools(parts: Parts) -> dict[str, dict[str, Any]]:
    return parts["pool_child"]


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [
        ("mha fp16", "torch.float16"),
        ("mha fp8", "torch.uint8"),
        ("mha other v", "torch.bfloat16"),
        ("mla bf16", "torch.bfloat16"),
        ("mla fp8", "torch.uint8"),
    ],
)
def test_pages_come_back_byte_for_byte(pools: dict[str, dict[str, Any]], name: str, stored_as: str) -> None:
    result = pools[name]
    assert result["arrived"]
    assert result["same"]
    assert result["others untouched"]
    assert result["stored as"] == stored_as


def test_k_and_v_lie_in_one_allocation_where_their_shapes_match(pools: dict[str, dict[str, Any]]) -> None:
    assert [name for name, result in pools.items() if result.get("shared")] == ["mha fp16", "mha fp8"]


def test_another_kind_of_pool_is_refused(pools: dict[str, dict[str, Any]]) -> None:
    assert "MHATokenToKVPoolFP4" in pools["fp4"]["refused"]


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
HOST_POOLS = [
    *(f"{name} {layout}" for name in ("mha fp16", "mha fp8") for layout in LAYOUTS),
    *(f"{name} {layout}" for name in ("mla bf16", "mla fp8") for layout in LAYOUTS if layout != "page_head"),
]


@pytest.mark.parametrize("name", HOST_POOLS)
def test_pages_of_a_host_pool_come_back_byte_for_byte(parts: Parts, name: str) -> None:
    """Pages of HiCache's host pools are stored and loaded byte for byte, in each layout. Latents in `page_head` are
    left out, because this layout splits heads."""
    assert parts["host_pool_child"][name] == {
        "stored": [[True, True]] * 2,
        "found": 2,
        "loaded": [True, True, False],
        "same": True,
        "others untouched": True,
        "seen to differ": True,
    }


def test_kinds_of_fp8_that_a_host_pool_holds_as_bytes_have_different_keys(parts: Parts) -> None:
    found = parts["host_pool_child"]["dtypes of keys"]
    for name in ("mha fp8", "mla fp8"):
        assert found[name] == ["torch.uint8, fp8_e4m3", "torch.uint8, fp8_e5m2"]
    # A control: other pools keep their dtype, which distinguishes them.
    assert found["mha fp16"] == ["torch.float16"] * 2


def test_every_rank_stores_its_latents(parts: Parts) -> None:
    """With flexkv's storage, every rank stores its latents. Without it, SGLang lets only the first rank store latents,
    and the other ranks would never get a hit. Since all ranks must agree on a hit, no rank would get one.
    """
    assert parts["host_pool_child"]["writers of latents"] == {"before": False, "after": True}


def test_context_parallelism_with_hicache_is_refused(parts: Parts) -> None:
    found = parts["host_pool_child"]["context parallelism"]
    assert found == {"refused": "attention context parallelism of 2; flexkv works with 1"}


def test_pages_of_former_weights_that_hicache_stores_late_are_forgotten(parts: Parts) -> None:
    assert parts["host_pool_child"]["new weights"] == {
        "former": False,
        # Until the flush, SGLang's own tiers serve such KV, too.
        "late": True,
        "late, after the flush": False,
        # A control: a flush without new weights forgets no page.
        "new, after another flush": True,
    }


def test_a_storage_attached_after_new_weights_serves_no_earlier_page(parts: Parts) -> None:
    assert parts["host_pool_child"]["attached later"] == {
        "first": 0,
        "weights of the start": 1,
        "other weights": 0,
    }


def test_another_layout_of_a_host_pool_is_refused(parts: Parts) -> None:
    assert "'page_unified'; allowed are layer_first" in parts["host_pool_child"]["refused"]["layout"]


def test_a_storage_keeps_the_host_pool_that_it_has(parts: Parts) -> None:
    again = parts["host_pool_child"]["registered again"]
    assert "a second host pool, MHATokenToKVPoolHost of" in again.pop("other")
    assert again == {"same": 2, "after both": 2, "pool": True}


def test_a_refused_storage_holds_no_thread_and_no_folder(parts: Parts) -> None:
    found = parts["host_pool_child"]["refused late"]
    assert found["refused"] == ["no such hook", "can't start new thread"]
    assert found["watch"] == found["PageBatches"] == []
    assert found["works"] == [True], "the folder is free for another"
    assert "in use" in found["control"], "and is not while one has it"
