"""Finds which requests have different page hashes in SGLang. The requests are made as SGLang's scheduler makes them,
and all use one flexkv cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from flexkv.cache.keys import TokenChain
from tests.engines_sglang.pool_child import PAGE_TOKENS, make_cache, make_pool

TOKENS = list(range(3, 3 + 2 * PAGE_TOKENS))
ADAPTERS = [LoRARef.deterministic_id("mine", path) for path in ("/a", "/b")]
WHO: dict[str, dict[str, Any]] = {
    "nobody": {},
    "extra key": {"extra_key": "a"},
    "another extra key": {"extra_key": "b"},
    "salt": {"cache_salt": "a"},
    "another salt": {"cache_salt": "b"},
    "extra key and salt": {"extra_key": "a", "cache_salt": "b"},
    "adapter": {"lora_id": ADAPTERS[0]},
    "another adapter": {"lora_id": ADAPTERS[1]},
    "adapter and salt": {"lora_id": ADAPTERS[0], "cache_salt": "a"},
    "adapter and extra key": {"lora_id": ADAPTERS[0], "extra_key": "a"},
}


def page_hashes(tokens: list[int], **who: Any) -> list[str]:
    """Returns the hashes of a request's pages, which depend on its extra key and salt, as in SGLang's tree."""
    request = Req("r", "", array("q", tokens), SamplingParams(max_new_tokens=1), **who)
    key = RadixKey(array("q", tokens), extra_key=request.extra_key, cache_salt=request.cache_salt)
    return list(get_storage_hash_str(key, None, page_size=PAGE_TOKENS))


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    cache = make_cache(make_pool("mha fp16"))
    served = {}
    for name, who in WHO.items():
        keys = cache.keys(page_hashes(TOKENS, **who))
        before = cache.match("r", keys, 0.0)
        cache.manager.release("r")
        cache.store("s", keys, np.array([2, 5], np.int32), lambda done: None, None)
        assert cache.quiesce(30)
        cache.manager.release("s")
        served[name] = [before, cache.match("r", keys, 0.0)]
        cache.manager.release("r")
    cache.close()
    yield "served", {"pages": served}
    chain = TokenChain(PAGE_TOKENS)
    chain.extend(TOKENS)
    ours = [digest.tobytes().hex() for digest in chain.digests]
    yield "chain", {"same": ours == page_hashes(TOKENS)}
