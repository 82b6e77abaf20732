"""Refuses a second engine in a process at its start.

vLLM keeps one worker's connector in a process, of whichever engine made it first. A second engine's scheduler would
have its blocks loaded and stored by the first one's worker, in the first one's pool.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import has_kv_transfer_group

from flexkv.adapters.vllm import local_link
from flexkv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

IN_PROCESS_BACKENDS = frozenset({"uni", "external_launcher"})
"""vLLM's `distributed_executor_backend`s whose worker lives in the scheduler's process."""

WHAT_TO_DO = (
    "Set VLLM_ENABLE_V1_MULTIPROCESSING=1, with which every engine runs in a process of its own, or end the other "
    "engine first"
)


class OwnPools:
    """Lets the engine that made a worker's connector register its KV cache there, and no other."""

    def __init__(self) -> None:
        # vLLM sets it while a worker makes its connector and while it registers its KV cache. The connector's own
        # argument is a copy under a MultiConnector.
        self._engine = get_current_vllm_config_or_none()
        self._pid = os.getpid()
        self._registered = False

    def check(self) -> None:
        """An engine registers its KV cache.

        Raises:
            ConfigError: it is another engine than the one that the connector was made for.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                f"process {os.getpid()} was forked from one with an engine in it (process {self._pid}) and has that "
                "engine's KV connector, whose threads are not here: set VLLM_WORKER_MULTIPROC_METHOD=spawn, or "
                "VLLM_ENABLE_V1_MULTIPROCESSING=1 for the first engine too"
            )
        if self._registered and (
            self._engine is None or get_current_vllm_config_or_none() is not self._engine
        ):
            raise ConfigError(
                "another engine in this process has a KV connector, and vLLM keeps one a process: blocks of this "
                f"engine would be loaded and stored in the other's KV cache. {WHAT_TO_DO}"
            )
        self._registered = True


def check_agent(vllm_config: VllmConfig) -> None:
    """A scheduler's connector is made: the process's worker must be of the same engine where it is in this process.

    Raises:
        ConfigError: vLLM has kept the worker's connector of another engine.
    """
    if not has_kv_transfer_group() or local_link.worker_of_engine(vllm_config.cache_config) is not None:
        return
    if vllm_config.parallel_config.distributed_executor_backend in IN_PROCESS_BACKENDS:
        raise ConfigError(
            "another engine in this process has a KV connector, and vLLM keeps one a process: it would be handed this "
            f"engine's loads and stores. {WHAT_TO_DO}"
        )
