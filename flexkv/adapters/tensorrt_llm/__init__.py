"""flexkv for TensorRT-LLM: `connector_module: flexkv.adapters.tensorrt_llm` with these two classes.

Importable without the package; `docs/tensorrt-llm.md` has the whole of `kv_connector_config`.
"""

from flexkv.adapters.tensorrt_llm.connector import FlexKVScheduler, FlexKVWorker

__all__ = ["FlexKVScheduler", "FlexKVWorker"]
