"""The name that vLLM's built-in `FlexKVConnectorV1` imports."""

from flexkv.adapters.vllm.builtin import FlexKVConnectorV1Impl

__all__ = ["FlexKVConnectorV1Impl"]
