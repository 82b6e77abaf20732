"""flexkv for SGLang: an external linker (`FlexKVLinker`) and a HiCache storage class (`FlexKVHiCache`).

The classes are imported on first use, because SGLang loads this package's entry point in each of its processes, and
doing so must not import the engine's memory pools.
"""

from __future__ import annotations

from typing import Any

from flexkv.native_core import import_with_core

_PLACES = {
    "FlexKVHiCache": "flexkv.adapters.sglang.hicache",
    "FlexKVLinker": "flexkv.adapters.sglang.linker",
}

__all__ = ["FlexKVHiCache", "FlexKVLinker"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_with_core(_PLACES[name], name)
