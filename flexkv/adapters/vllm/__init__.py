"""flexkv for vLLM: the connector `FlexKVConnector`.

The class is imported on first use. vLLM imports this package in each of its processes to load the plugin entry point,
which must not import torch.
"""

from __future__ import annotations

from typing import Any

from flexkv.native_core import import_with_core

__all__ = ["FlexKVConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_with_core("flexkv.adapters.vllm.connector", name)
