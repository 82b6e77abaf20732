"""The plugin that vLLM loads through the entry point group `vllm.general_plugins`.

It registers the connector's name, so that `"kv_connector":"FlexKVConnector"` needs no module path, also within a
MultiConnector. It registers the model classes that can blend. And it makes vLLM put a prefix before hashes of the names
that clients give to inputs (`name_marks`).

vLLM loads this module in each of its processes, with or without a connector. So the module imports nothing of vLLM, and
none of its errors reaches the engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from flexkv.adapters.vllm.blend import ARCHITECTURES, MODELS
from flexkv.adapters.vllm.name_marks import HASHER, mark_names

NAME, MODULE = "FlexKVConnector", "flexkv.adapters.vllm"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
"""The module in which vLLM registers connectors. It imports hundreds of modules, and vLLM imports it only in processes
that need a connector."""

REGISTRY = "vllm.model_executor.models.registry"
"""The module in which vLLM registers model classes by their architecture's name."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Applies each change of `CHANGES` to its module of vLLM: now if the module is already imported, otherwise when
    vLLM imports it. Idempotent."""
    for module in CHANGES:
        if module in sys.modules:
            _change(sys.modules[module])
        elif not any(isinstance(finder, _Finder) and finder.module == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(module))


class _Finder(MetaPathFinder):
    """Finds one module for Python's import system, once, and applies the module's change after it was executed."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                _change(module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def _add_name(factory: ModuleType) -> None:
    connectors = factory.KVConnectorFactory
    if NAME not in connectors._registry:
        connectors.register_connector(NAME, MODULE, NAME)


def _add_models(registry: ModuleType) -> None:
    for name in ARCHITECTURES.values():
        registry.ModelRegistry.register_model(name, f"{MODELS}:{name}")


CHANGES: dict[str, tuple[Callable[[ModuleType], None], str]] = {
    FACTORY: (
        _add_name,
        'vLLM does not know the connector by its name (%s: %s); add "kv_connector_module_path":"flexkv.adapters.vllm" '
        "to --kv-transfer-config where you use it",
    ),
    HASHER: (
        mark_names,
        "this vLLM hashes inputs elsewhere (%s: %s), so a name that a client gives cannot be told from a digest: "
        "prompts are stored for one run from their first image or other input on",
    ),
    REGISTRY: (_add_models, "this vLLM takes no model classes (%s: %s), so blending cannot be turned on"),
}
"""For each module of vLLM, the function that changes it, and the warning to log if the change fails."""


def _change(module: ModuleType) -> None:
    change, warning = CHANGES[module.__name__]
    try:
        change(module)
    except Exception as error:
        logger.warning(f"flexkv: {warning}", type(error).__name__, error)
