"""flexkv for vLLM: load it with `kv_connector_module_path="flexkv.adapters.vllm"`, `kv_connector="FlexKVConnector"`."""

from flexkv.adapters.vllm.connector import FlexKVConnector

__all__ = ["FlexKVConnector"]
