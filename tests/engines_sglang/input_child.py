"""Finds the names of requests with images and embeddings when flexkv watches the queue of SGLang's scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from flexkv.adapters.sglang import engine_watch
from flexkv.errors import ConfigError
from tests.engines_sglang.pool_child import PAGE_TOKENS

TEXT = list(range(3, 3 + 2 * PAGE_TOKENS))
ADAPTER = LoRARef.deterministic_id("mine", "/a")


def image(content: int) -> MultimodalDataItem:
    """Makes an image with the digest `content`, in SGLang's own class."""
    item = MultimodalDataItem(modality=Modality.IMAGE)
    item.set_hash(content)
    return item


def request(items: list[MultimodalDataItem], **who: Any) -> Req:
    """Makes a request with two pages of text and one page per image."""
    tokens = array("q", TEXT)
    for item in items:
        tokens.extend(item.padding_sequence(PAGE_TOKENS))
    made = Req("r", "", tokens, SamplingParams(max_new_tokens=1), **who)
    if items:
        made.multimodal_inputs = MultimodalInputs(mm_items=items)
    return made


def enter(made: Req, times: int = 1) -> list[str]:
    """Adds the request to the scheduler's queue. Returns the hashes of the request's pages as SGLang's tree computes
    them.
    """
    # A stand-in for a scheduler. It rejects the request, but only after the hook under test has run.
    scheduler = SimpleNamespace(
        _set_or_validate_priority=lambda req: False, _release_aborted_request=lambda req: None
    )
    for _ in range(times):
        Scheduler._add_request_to_queue(scheduler, made)
    key = RadixKey(made.origin_input_ids, extra_key=made.extra_key, cache_salt=made.cache_salt)
    return list(get_storage_hash_str(key, None, page_size=PAGE_TOKENS))


def shared(one: list[str], other: list[str]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


def refused() -> dict[str, Any]:
    """Tries to put the hook into an SGLang that lacks the method, and into one in which another plugin has hooked it.
    Returns the errors.
    """
    target, *rest = engine_watch._HOOKS["enter"]
    found = {}
    for name, place in (("no such method", f"{target}_gone"), ("hooked by another", target)):
        changed = patch.dict(engine_watch._HOOKS, enter=(place, *rest))
        with changed, patch.object(engine_watch, "_hooked", set()):
            try:
                engine_watch.put_hook("enter")
            except ConfigError as error:
                found[name] = str(error)
    return found


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    # The two images stand for different images with equal digests. Only the names that flexkv gives them distinguish
    # them.
    one, alike = [image(7)], [image(7)]
    before = enter(request(one))
    yield "control: without the watch", {"shared": shared(before, enter(request(alike)))}
    by_adapter = enter(request([], lora_id=ADAPTER))
    sent = {"extra_key": ADAPTER}
    yield "control: an id without the watch", {"shared": shared(by_adapter, enter(request([], **sent)))}

    engine_watch.put_hook("enter")
    text, first = enter(request([])), enter(request(one))
    run = engine_watch.RUN_INPUTS
    engine_watch.RUN_INPUTS = "flexkv-inputs-of-another-run"
    second = enter(request(alike))
    engine_watch.RUN_INPUTS = run
    yield (
        "images",
        {
            "text as before": text == before[: len(text)],
            "pages of two runs": shared(first, second),
            "pages of one run": shared(first, enter(request(one))),
            "queued again": shared(first, enter(request(one), times=3)),
            "with text": shared(first, text),
            "salted": shared(first, enter(request(one, cache_salt="a"))),
            "another extra key": shared(first, enter(request(one, extra_key="a"))),
        },
    )
    brought = []
    for name in ("input_embeds", "positional_embed_overrides"):
        for _ in range(2):
            made = request([])
            setattr(made, name, [[1.0]])
            brought.append(enter(made, times=2)[0])
    yield "embeddings", {"apart": len({text[0], *brought})}
    named = enter(request([], **sent))
    yield (
        "an adapter's id as extra key",
        {
            "adapter as before": enter(request([], lora_id=ADAPTER)) == by_adapter,
            "with the adapter": shared(named, by_adapter),
            "queued again": shared(named, enter(request([], **sent), times=3)),
            "in longer text": shared(
                enter(request([], extra_key=f"a{ADAPTER}")),
                enter(request([], lora_id=ADAPTER, extra_key="a")),
            ),
        },
    )
    # A request gets its name before HiCache or the linker looks it up.
    looked = request(one)
    engine_watch._tell_of_request(SimpleNamespace(tree_cache=None), looked)
    yield "refused", refused()
    yield "prefetched", {"named": run in (looked.extra_key or "")}
