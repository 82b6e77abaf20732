"""Exports `FlexKVConnectorV1Impl`, which vLLM's built-in `FlexKVConnectorV1` imports from this module."""

from flexkv.adapters.vllm.builtin import FlexKVConnectorV1Impl

__all__ = ["FlexKVConnectorV1Impl"]
