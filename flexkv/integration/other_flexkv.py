"""The error for an engine that imports a module of the other package named flexkv (github.com/taco-project/FlexKV).

Some engines have integrations for that package and import its modules, which this package lacks. Without this error,
such an engine would end with "FlexKV is not installed", although a package of that name is installed.
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

    It does not raise ImportError, because SGLang would report a missing package instead of this error's message.

    Args:
        module: name of the imported module.
        instead: per engine, the settings with which the engine uses this package.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{module} belongs to another package named flexkv (github.com/taco-project/FlexKV); the one installed here "
        f"is attached in another way. {'. '.join(instead)}"
    )
