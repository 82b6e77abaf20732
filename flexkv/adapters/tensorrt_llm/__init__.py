"""flexkv for TensorRT-LLM: `connector_module: flexkv.adapters.tensorrt_llm` with these two classes.

It can be imported even if TensorRT-LLM is not installed. `docs/tensorrt-llm.md` has the complete `kv_connector_config`.
"""

from flexkv.adapters.tensorrt_llm.connector import FlexKVScheduler, FlexKVWorker

__all__ = ["FlexKVScheduler", "FlexKVWorker"]
