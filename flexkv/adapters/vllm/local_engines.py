"""Keeps track of the engines in this process and of their flexkv connectors. Refuses an engine or connector that would
disturb another one.

vLLM runs scheduler and worker in one process if there is one rank on a GPU, or one rank on a CPU with
`VLLM_ENABLE_V1_MULTIPROCESSING=0`. Then the host pool can be private memory, and the scheduler's side can take the
results of copies from the worker's side without an engine step.

The two sides of an engine cannot find each other by name, because a user may give two engines the same `engine_id`.
They find each other by the id of the pool in the handshake, or by a configuration object that both sides were made
with.

vLLM keeps one worker's connector per process, that of the first engine. If a second engine started in the process, its
blocks would be loaded and stored in the first engine's pool, so it is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, has_kv_transfer_group

from flexkv.errors import ConfigError
from flexkv.facts.ranks import PoolId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from flexkv.adapters.vllm.worker import WorkerSide

_engines: WeakKeyDictionary[WorkerSide, object] = WeakKeyDictionary()


def announce(worker: WorkerSide, engine: object = None) -> None:
    """Registers a worker's side in this process, so that its engine's scheduler's side can find it.

    Args:
        engine: an object that both sides of the engine have, such as its `cache_config`.
    """
    _engines[worker] = engine


def workers_of_pools(pools: Sequence[PoolId]) -> tuple[WorkerSide, ...]:
    """Returns the worker's side of each rank, by the rank's pool; empty if some rank is not in this process."""
    by_pool = {worker.pool_id: worker for worker in list(_engines)}
    found = tuple(by_pool[pool] for pool in pools if pool in by_pool)
    return found if len(found) == len(pools) else ()


def worker_of_engine(engine: object) -> WorkerSide | None:
    """Returns the worker's side that `announce` registered with this object; None if there is none in this process."""
    return next((worker for worker, its in list(_engines.items()) if its is engine), None)


IN_PROCESS_BACKENDS = frozenset({"uni", "external_launcher"})
"""The values of vLLM's `distributed_executor_backend` with which the worker runs in the scheduler's process."""

WHAT_TO_DO = (
    "Set VLLM_ENABLE_V1_MULTIPROCESSING=1, with which every engine runs in a process of its own, or end the other "
    "engine first"
)


class OwnPools:
    """Refuses the KV cache of any engine other than the one that made the worker's connector."""

    def __init__(self) -> None:
        # vLLM sets the current configuration both while a worker makes its connector and while the worker registers its
        # KV cache, so the two configurations can be compared. The connector's argument does not serve for this, because
        # within a MultiConnector it is a copy.
        self._engine = get_current_vllm_config_or_none()
        self._pid = os.getpid()
        self._registered = False

    def check(self) -> None:
        """Checks that the engine now registering its KV cache is the one that made the connector.

        Raises:
            ConfigError: another engine has made the connector, or this process was forked from the process that made
                it.
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
    """Refuses an engine whose worker runs in this process, if vLLM already keeps the worker's connector of another
    engine in this process. Called when the engine's scheduler makes its connector.

    Raises:
        ConfigError: the worker's connector in this process belongs to another engine.
    """
    if not has_kv_transfer_group() or worker_of_engine(vllm_config.cache_config) is not None:
        return
    if vllm_config.parallel_config.distributed_executor_backend in IN_PROCESS_BACKENDS:
        raise ConfigError(
            "another engine in this process has a KV connector, and vLLM keeps one a process: it would be handed this "
            f"engine's loads and stores. {WHAT_TO_DO}"
        )


@contextlib.contextmanager
def ending_failed_start(config: VllmConfig) -> Iterator[None]:
    """Wraps a part of an engine's start. If that part raises, shuts down the worker's connector that the engine has
    made in this process. Otherwise vLLM would keep the connector, and every later engine would be refused because of an
    engine that no longer exists."""
    try:
        yield
    except BaseException:
        if has_kv_transfer_group() and worker_of_engine(config.cache_config) is not None:
            ensure_kv_transfer_shutdown()
        raise


_registered: WeakKeyDictionary[Any, tuple[KVConnectorRole, object]] = WeakKeyDictionary()
"""For each live connector, its role and its engine's `cache_config`, which is the same object for all connectors of one
engine."""


def register_only(connector: Any, role: KVConnectorRole, config: VllmConfig) -> None:
    """Registers `connector` as the engine's only connector of flexkv in this role. The registration ends with
    `end_registration`, or when the connector is garbage-collected.

    Raises:
        ConfigError: the engine already has a connector of flexkv in this role, as another child of a MultiConnector.
    """
    for other, (its_role, its_part) in list(_registered.items()):
        if its_role is role and its_part is config.cache_config:
            names = ", then ".join(type(each).__name__ for each in (other, connector))
            raise ConfigError(
                f"a second connector of flexkv in one engine ({names}): both would store the same blocks; keep one of "
                'them in the "connectors" of MultiConnector\'s kv_connector_extra_config'
            )
    _registered[connector] = (role, config.cache_config)


def end_registration(connector: Any) -> None:
    """Ends the registration of a connector that was shut down, so that the engine may make another one."""
    _registered.pop(connector, None)
