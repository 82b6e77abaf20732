"""KV events of SGLang's own tree when flexkv is its linker, for the tree's Rust core and its Python core. Compares the
events for pages in host memory and on disk with those for the same pages on the device. `parts_child` runs this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import structs
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockStored, StorageMedium
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from flexkv.adapters.sglang import engine_watch, page_events
from flexkv.adapters.sglang.linker import FlexKVLinker
from tests.engines_sglang.linker_child import ALONE, DONE_S, make_linker
from tests.engines_sglang.pool_child import PAGE_TOKENS, TOKENS, make_pool

ADAPTER = LoRARef.deterministic_id("mine", "/a")
WHO: dict[str, dict[str, str]] = {
    "nobody": {},
    "salt": {"cache_salt": "a"},
    "adapter": {"extra_key": ADAPTER},
    "extra key": {"extra_key": "a"},
    "extra key and salt": {"extra_key": "a", "cache_salt": "b"},
}
PROMPT = list(range(3, 3 + 4 * PAGE_TOKENS))
OTHER = PROMPT[:PAGE_TOKENS] + list(range(900, 900 + 2 * PAGE_TOKENS))


class Tree:
    """SGLang's prefix tree, with flexkv as its linker."""

    def __init__(self, core: str, dynamo: bool, of_pairs: bool = False, place: Any = ALONE) -> None:
        self.pool = make_pool("mha fp16")
        allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE_TOKENS, torch.float16, "cpu", self.pool, False)
        names = KvEventLoraNames()
        names.register(SimpleNamespace(extra_key=ADAPTER, lora_id=ADAPTER), "mine")
        self.params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE_TOKENS,
            is_eagle=of_pairs,
            enable_kv_cache_events=True,
            dynamo_kv_event_format=dynamo,
            kv_event_lora_names=names,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(self.params)
        self.linker = make_linker(FlexKVLinker, self.pool, params=self.params, place=place)
        self.cache.init_cache_linker(self.linker)
        self._allocator = allocator

    def insert(self, tokens: list[int], **who: str) -> None:
        """Inserts a prompt of full pages into the tree. The tree offloads the pages that are new."""
        key = RadixKey(array("q", tokens), who.get("extra_key"), cache_salt=who.get("cache_salt"))
        slots = self._allocator.alloc(len(tokens) // PAGE_TOKENS * PAGE_TOKENS)
        self.cache.insert(InsertParams(key=key, value=slots, session_id="a session"))
        self.settle()

    def settle(self) -> None:
        assert self.linker._cache.quiesce(DONE_S)
        done = self.cache.linker.num_completed_offloads()
        self.cache.linker.commit_completed_offloads(self.cache.linker.take_completed_offloads(done))

    def close(self) -> None:
        self.cache.linker.close()
        engine_watch._listeners.clear()


def by_medium(events: list[Any]) -> dict[str, list[list[Any]]]:
    """Returns, for each medium, the pages that the events announce as stored there, one element per page."""
    found: dict[str, list[list[Any]]] = {}
    for event in events:
        if not isinstance(event, BlockStored):
            continue
        parent, size = event.parent_block_hash, event.block_size
        for at, block_hash in enumerate(event.block_hashes):
            tokens = event.token_ids[at * size : (at + 1) * size]
            page = [block_hash, parent, [list(each) if isinstance(each, tuple) else each for each in tokens]]
            page += [size, event.cache_salt, event.session_id, event.lora_name]
            found.setdefault(str(event.medium.value), []).append(page)
            parent = block_hash
    return found


def announced(core: str, dynamo: bool, of_pairs: bool = False) -> dict[str, Any]:
    """For each caller, inserts a prompt, and a second prompt that diverges from the first one after one page.

    Returns three values per caller: how many pages are announced on the device, how many in host memory, and whether
    each page in host memory is announced with the same fields as on the device.
    """
    found = {}
    for name, who in WHO.items():
        tree = Tree(core, dynamo, of_pairs)
        tree.insert(PROMPT, **who)
        tree.insert(OTHER, **who)
        media = by_medium(tree.cache.take_events())
        device, host = media.get("GPU", []), media.get("CPU_PINNED", [])
        found[name] = [len(device), len(host), all(page in device for page in host)]
        tree.close()
    return found


def over_a_file(of_pairs: bool) -> dict[str, Any]:
    """Packs the records of announced pages as flexkv writes them to disk, and unpacks them as the next process does.

    Returns three values: the number of records; whether the next process would announce the same pages, apart from the
    session; and the sessions that this process and the next one would announce.
    """
    tree = Tree("rust", True, of_pairs)
    tree.insert(PROMPT, cache_salt="a")
    told = tree.linker._cache._announcements
    assert told is not None
    records: list[Any] = [page.record for page in told._pages.values()]
    now = [record.event(StorageMedium.DISK) for record in records]
    later = [page_events._unpacked(record.packed()).event(StorageMedium.DISK) for record in records]
    tree.close()
    return {
        "pages": len(records),
        "alike": [structs.replace(event, session_id=None) for event in now] == later,
        "sessions": [sorted({str(event.session_id) for event in events}) for events in (now, later)],
    }


def control() -> dict[str, Any]:
    """A control: flexkv names each node's pages as if the node were the beginning of a prompt, so that the names are
    wrong."""
    node = page_events._Node
    page_events._Node = lambda key, parent, hashes: node(key, None, hashes)  # type: ignore[assignment,misc]
    try:
        return announced("rust", False)
    finally:
        page_events._Node = node  # type: ignore[misc]


def kinds(events: list[Any]) -> list[Any]:
    """Returns the kind, medium and number of pages of each event. Joins consecutive events of the same kind and
    medium.
    """
    found: list[list[Any]] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.append(["cleared"])
            continue
        assert event.medium is not None
        kind = ["stored" if isinstance(event, BlockStored) else "removed", str(event.medium.value)]
        if found and found[-1][:2] == kind:
            found[-1][2] += len(event.block_hashes)
        else:
            found.append([*kind, len(event.block_hashes)])
    return found


def life() -> dict[str, Any]:
    """Returns the events of four steps: a prompt is stored, the tree is flushed, a page is evicted, and the weights
    change."""
    tree = Tree("rust", False)
    manager = tree.linker._cache.manager
    tree.insert(PROMPT)
    found = {"stored": kinds(tree.cache.take_events())}
    tree.cache.reset()
    found["flushed"] = kinds(tree.cache.take_events())
    manager.hub.evict(0, 1)
    found["evicted"] = kinds(tree.cache.take_events())
    tree.linker.new_weights()
    found["new weights"] = kinds(tree.cache.take_events())
    found["no news"] = kinds(tree.cache.take_events())
    tree.close()
    return found


def of_several_ranks() -> dict[str, Any]:
    tree = Tree("rust", False, place=replace(ALONE, is_alone=False))
    tree.insert(PROMPT)
    found = {"stored": kinds(tree.cache.take_events())}
    tree.close()
    return found


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for core in ("rust", "python"):
        for dynamo in (False, True):
            yield f"{core}, {'dynamo' if dynamo else 'default'}", announced(core, dynamo)
    yield "pairs of tokens", announced("rust", True, of_pairs=True)
    yield "over a file", over_a_file(of_pairs=False)
    yield "pairs over a file", over_a_file(of_pairs=True)
    yield "control", control()
    yield "life", life()
    yield "several ranks", of_several_ranks()
