"""flexkv for vLLM: the connector `FlexKVConnector`.

It is found on first use: the entry point that vLLM loads in each of its processes must not import torch there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["FlexKVConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("flexkv.adapters.vllm.connector"), name)
