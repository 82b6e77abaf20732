"""flexkv for SGLang: an external linker (`FlexKVLinker`) and a HiCache storage class (`FlexKVHiCache`).

Names are found on first use: the entry point that SGLang loads in each of its processes must not import the engine's
memory pools there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "FlexKVHiCache": "flexkv.adapters.sglang.hicache",
    "FlexKVLinker": "flexkv.adapters.sglang.linker",
}

__all__ = ["FlexKVHiCache", "FlexKVLinker"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
