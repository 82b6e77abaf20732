"""vLLM's plugin entry point (group `vllm.general_plugins`): registers the connector's name, so that
`"kv_connector":"FlexKVConnector"` is enough and no module path is needed, in a MultiConnector too. Also registers the
model classes that blend, and makes vLLM mark the names that clients give inputs (`name_marks`).

vLLM loads this module in each of its processes, with or without a connector. So it imports nothing of vLLM, and none of
its errors reaches the engine.
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
"""The module in which vLLM keeps the names of connectors. It imports hundreds of modules, in processes that need a
connector."""

REGISTRY = "vllm.model_executor.models.registry"
"""The module in which vLLM keeps the names of architectures."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the names of connector and models, and makes vLLM mark names of inputs: now, or as soon as vLLM imports
    the modules that this changes. Idempotent."""
    for module in CHANGES:
        if module in sys.modules:
            _change(sys.modules[module])
        elif not any(isinstance(finder, _Finder) and finder.module == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(module))


class _Finder(MetaPathFinder):
    """Finds one module as Python would, once, and changes it after it was executed."""

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
"""Module -> the change, and the warning where it fails."""


def _change(module: ModuleType) -> None:
    change, warning = CHANGES[module.__name__]
    try:
        change(module)
    except Exception as error:
        logger.warning(f"flexkv: {warning}", type(error).__name__, error)
