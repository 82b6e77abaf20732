"""vLLM's plugin entry point (group `vllm.general_plugins`): makes the connector's name known, so that
`"kv_connector":"FlexKVConnector"` is enough and no module path is needed, in a MultiConnector too.

vLLM loads it in each of its processes, with or without a connector. So nothing of vLLM is imported here, and nothing
that fails here reaches the engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

NAME, MODULE = "FlexKVConnector", "flexkv.adapters.vllm"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
"""Where vLLM keeps the names of connectors; it imports hundreds of modules, in processes that need a connector."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the connector's name now, or as soon as vLLM imports its factory. May be called again."""
    if FACTORY in sys.modules:
        _add_name(sys.modules[FACTORY])
    elif not any(isinstance(finder, _FactoryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FactoryFinder())


class _FactoryFinder(MetaPathFinder):
    """Finds the factory as Python does without it, once, and has the name registered when the module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != FACTORY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _add_name(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _add_name(factory: ModuleType) -> None:
    try:
        connectors = factory.KVConnectorFactory
        if NAME not in connectors._registry:
            connectors.register_connector(NAME, MODULE, NAME)
    except Exception as error:
        logger.warning(
            'flexkv: vLLM does not know the connector by its name (%s: %s); add "kv_connector_module_path":"%s" to '
            "--kv-transfer-config where you use it",
            type(error).__name__,
            error,
            MODULE,
        )
