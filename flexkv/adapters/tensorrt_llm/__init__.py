"""flexkv for TensorRT-LLM: set `connector_module: flexkv.adapters.tensorrt_llm`, and name the two classes below.

The module can be imported even if TensorRT-LLM is not installed. `docs/tensorrt-llm.md` shows the complete
`kv_connector_config`.
"""

from flexkv.adapters.tensorrt_llm.connector import FlexKVScheduler, FlexKVWorker

__all__ = ["FlexKVScheduler", "FlexKVWorker"]
