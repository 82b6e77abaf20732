"""The base classes of the connector: TensorRT-LLM's own if the package is installed; otherwise replacements with the
same interface.

The path of the package's module changed in version 1.3; both paths are tried.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Paths of the module with the base classes: from version 1.3 on, and in earlier versions."""

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")
"""Environment variables in which launchers pass a process its rank; used if the package is not installed."""


class BareWorker:
    """Replaces TensorRT-LLM's base class of workers' connectors if the package is not installed. Keeps the engine's
    arguments, and the metadata that was bound last.
    """

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata


class BareScheduler:
    """Replaces TensorRT-LLM's base class of schedulers' connectors if the package is not installed. Keeps the engine's
    arguments.
    """

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


def find_api() -> Any:
    """The module that defines the connector's base classes; None if the package is not installed."""
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # If a module other than this one and its parents is missing, the installation is broken, and the user
            # should see the error.
            if error.name is None or not name.startswith(error.name):
                raise
    return None


_api = find_api()
WorkerBase: Any = BareWorker if _api is None else _api.KvCacheConnectorWorker
SchedulerBase: Any = BareScheduler if _api is None else _api.KvCacheConnectorScheduler


def engine_version() -> str:
    """The version of TensorRT-LLM, without the part after "+"; empty if the package is not installed or has no
    version."""
    if _api is None:
        return ""
    return str(getattr(importlib.import_module("tensorrt_llm"), "__version__", "")).partition("+")[0]


def mpi_rank() -> int:
    """This process's rank in the engine's world; 0 if unknown."""
    if _api is not None:
        return int(importlib.import_module("tensorrt_llm._utils").mpi_rank())
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
