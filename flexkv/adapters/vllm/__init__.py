"""flexkv for vLLM: the connector `FlexKVConnector`.

The class is imported on first use. vLLM imports this package in each of its processes to load the plugin entry point,
which must not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flexkv.native_core import missing_core

__all__ = ["FlexKVConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("flexkv.adapters.vllm.connector"), name)
    except ImportError as error:
        raise missing_core(error) or error from None
