"""The error for an engine that looks here for the other package named flexkv (github.com/taco-project/FlexKV).

The engine integrations of that package import modules which this one does not have. Without this error, such an engine
ends with "FlexKV is not installed", although a package of that name is.
"""

from __future__ import annotations

from typing import NoReturn

from flexkv.errors import ConfigError

SGLANG_INSTEAD = (
    "SGLang's --enable-flexkv and --radix-cache-backend flexkv are made for it. Leave them out, and give "
    "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic "
    '--unified-cache-external-linker-config \'{"linker": "FlexKVLinker", '
    '"linker_module_path": "flexkv.adapters.sglang"}\' (docs/sglang.md)'
)
TENSORRT_LLM_INSTEAD = (
    "TensorRT-LLM: connector_module: flexkv.adapters.tensorrt_llm, connector_scheduler_class: FlexKVScheduler, "
    "connector_worker_class: FlexKVWorker in kv_connector_config (docs/tensorrt-llm.md)"
)


def refuse_other_flexkv(module: str, *instead: str) -> NoReturn:
    """Ends the import of a module that only the other package has.

    It does not raise ImportError, because SGLang treats that as a missing package, and its message would hide this one.

    Args:
        module: the name that was imported.
        instead: what to set so that the engine uses this package.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{module} belongs to another package named flexkv (github.com/taco-project/FlexKV); the one installed here "
        f"is attached in another way. {'. '.join(instead)}"
    )
