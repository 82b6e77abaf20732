"""Keeps track of the engines and connectors of flexkv in this process, and refuses those that would disturb others.

vLLM runs scheduler and worker in one process when there is one rank (and always without multiprocessing). Then the
host pool can be private memory, and the scheduler's side learns of ended copies without an engine step in between.

Names cannot pair the two sides, because a user may give two engines the same `engine_id`. They are paired by the pool
that a handshake names, or by an object with which both sides of one engine were made.

vLLM keeps one worker's connector per process: that of the engine that made it first. The first engine's worker would
load and store the blocks of a second engine's scheduler in the first engine's pool, so a second engine is refused at
its start.
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
    """Makes a worker's side known in this process.

    Args:
        engine: a part of the engine's configuration that is the same object on both of its sides.
    """
    _engines[worker] = engine


def workers_of_pools(pools: Sequence[PoolId]) -> tuple[WorkerSide, ...]:
    """The worker's side of each rank, found by the pools that their handshakes name; empty unless all live in this
    process."""
    by_pool = {worker.pool_id: worker for worker in list(_engines)}
    found = tuple(by_pool[pool] for pool in pools if pool in by_pool)
    return found if len(found) == len(pools) else ()


def worker_of_engine(engine: object) -> WorkerSide | None:
    """The worker's side in this process that was announced for this engine."""
    return next((worker for worker, its in list(_engines.items()) if its is engine), None)


IN_PROCESS_BACKENDS = frozenset({"uni", "external_launcher"})
"""vLLM's `distributed_executor_backend`s whose worker lives in the scheduler's process."""

WHAT_TO_DO = (
    "Set VLLM_ENABLE_V1_MULTIPROCESSING=1, with which every engine runs in a process of its own, or end the other "
    "engine first"
)


class OwnPools:
    """Lets only the engine that made a worker's connector register its KV cache there."""

    def __init__(self) -> None:
        # vLLM sets the current configuration while a worker makes its connector and while it registers its KV cache.
        # The connector's own argument cannot be compared, because under a MultiConnector it is a copy.
        self._engine = get_current_vllm_config_or_none()
        self._pid = os.getpid()
        self._registered = False

    def check(self) -> None:
        """Called when an engine registers its KV cache.

        Raises:
            ConfigError: the connector was made for another engine, or this process was forked from that engine's
                process.
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
    """Called when a scheduler's connector is made: a worker in this process must belong to the same engine.

    Raises:
        ConfigError: vLLM keeps the worker's connector of another engine.
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
    """Wraps a part of an engine's start. If it fails, this shuts down the worker's connector that the engine has made
    in this process: vLLM would keep it, and every later engine would be refused because of an engine that no longer
    exists."""
    try:
        yield
    except BaseException:
        if has_kv_transfer_group() and worker_of_engine(config.cache_config) is not None:
            ensure_kv_transfer_shutdown()
        raise


_registered: WeakKeyDictionary[Any, tuple[KVConnectorRole, object]] = WeakKeyDictionary()
"""The live connectors: role, and a part of the engine's configuration that is the same object for every connector of
one engine."""


def register_only(connector: Any, role: KVConnectorRole, config: VllmConfig) -> None:
    """Registers the only connector of flexkv that an engine may have in a role, until `end_registration`, or until the
    connector is gone.

    Raises:
        ConfigError: the engine has such a connector already, as another child of a MultiConnector.
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
    """Ends the registration of a connector that was shut down: the engine may make another one."""
    _registered.pop(connector, None)
