"""Names LoRA adapters before vLLM loads them. An adapter's files may change between its load and its first request, and
afterwards nothing shows which content vLLM has read.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any
from weakref import WeakSet

from flexkv.adapters.common.lora_names import LoraNames

ENGINE = "vllm.v1.engine.core"
"""The module of vLLM's engine core, in whose process the scheduler's side runs. `EngineCore.add_lora` loads an adapter
before any request uses it. All other loads are made for a request, which the scheduler's side sees first."""

_IS_WATCHED = "flexkv_names_adapters"
_names: WeakSet[LoraNames] = WeakSet()


def adapter_names() -> LoraNames:
    """Makes the `LoraNames` of this process's engine. If vLLM's loads can be watched, an adapter is named before each
    load. If not, nothing is cached for adapters that changed after this call (see `LoraNames`)."""
    core = sys.modules.get(ENGINE)
    names = LoraNames(sees_loads=core is not None and _watch_loads(core))
    _names.add(names)
    return names


def _watch_loads(core: ModuleType) -> bool:
    """Makes `EngineCore.add_lora` name the adapter first. Idempotent. Returns False if this vLLM has no such method."""
    plain = getattr(getattr(core, "EngineCore", None), "add_lora", None)
    if plain is None or hasattr(plain, _IS_WATCHED):
        return plain is not None

    @functools.wraps(plain)
    def add_lora(engine: Any, lora_request: Any) -> Any:
        for names in list(_names):
            names.name(lora_request.lora_path)
        return plain(engine, lora_request)

    setattr(add_lora, _IS_WATCHED, True)
    core.EngineCore.add_lora = add_lora
    return True
