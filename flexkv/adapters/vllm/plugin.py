"""vLLM's plugin entry point (group `vllm.general_plugins`): makes the connector's name known, so that
`"kv_connector":"FlexKVConnector"` is enough and no module path is needed, in a MultiConnector too; and has vLLM mark
the names of inputs that a client gave (`name_marks`).

vLLM loads it in each of its processes, with or without a connector. So nothing of vLLM is imported here, and nothing
that fails here reaches the engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from flexkv.adapters.vllm.name_marks import HASHER, mark_names

NAME, MODULE = "FlexKVConnector", "flexkv.adapters.vllm"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
"""Where vLLM keeps the names of connectors; it imports hundreds of modules, in processes that need a connector."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers the connector's name and has names of inputs marked, now, or as soon as vLLM imports the modules that
    it takes. May be called again."""
    for module, change in ((FACTORY, _add_name), (HASHER, _mark_names)):
        if module in sys.modules:
            change(sys.modules[module])
        elif not any(isinstance(finder, _Finder) and finder.module == module for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(module, change))


class _Finder(MetaPathFinder):
    """Finds one module as Python does without it, once, and has it changed when it has run."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self.module = module
        self._change = change

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
                self._change(module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
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


def _mark_names(hasher: ModuleType) -> None:
    try:
        mark_names(hasher)
    except Exception as error:
        logger.warning(
            "flexkv: this vLLM hashes inputs elsewhere (%s: %s), so a name that a client gives cannot be told from a "
            "digest: prompts are stored for one run from their first image or other input on",
            type(error).__name__,
            error,
        )
