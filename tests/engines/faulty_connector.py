"""flexkv's connector with a mover that fails on purpose, by the rules in the environment variable FAULT_RULES. Also
connectors for controls, each with one bug.

FAULT_RULES is a JSON list. Each rule is an object with the arguments of `FaultRule`; its `action` and `kind` are words
(the keys of `ACTIONS` and `KINDS`). If a rule has a `rank`, it applies to the mover of that rank only.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from flexkv import c_ext
from flexkv.adapters.common.load_job import LoadJob
from flexkv.adapters.vllm.connector import FlexKVConnector
from flexkv.adapters.vllm.loads import Loads
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.transfer.graph import OpKind
from tests import testing_ext

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from flexkv.adapters.vllm.metadata import ConnectorMetadata

RULES_VARIABLE = "FAULT_RULES"
ACTIONS = {"fail": 0, "delay": 1, "stall": 2, "corrupt": 3}
KINDS = {"load": OpKind.H2D, "store": OpKind.D2H}


class FaultyWorker(WorkerSide):
    """The worker's part of a connector, with a mover that follows the rules in FAULT_RULES."""

    faults: testing_ext.FaultyMover | None = None

    def make_mover(self) -> Any:
        rules = []
        for rule in json.loads(os.environ[RULES_VARIABLE]):
            if rule.pop("rank", self.rank) == self.rank:
                action, kind = ACTIONS[rule.pop("action")], rule.pop("kind", None)
                rules.append(
                    testing_ext.FaultRule(action, kind=None if kind is None else int(KINDS[kind]), **rule)
                )
        self.faults = testing_ext.FaultyMover(c_ext.HostMover(), rules)
        return self.faults


class FaultyConnector(FlexKVConnector):
    """flexkv's connector, with a mover that injects faults."""

    worker_class = FaultyWorker


class LayeredTailsConnector(FaultyConnector):
    """A control for tests of partial tails: loads even the tails layer by layer."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        begin = Loads.begin

        def begin_by_layer(loads: Loads, *arguments: Any) -> LoadJob | None:
            job = begin(loads, *arguments)
            if job is None:
                return None
            layered = replace(job, graph=job.graph.layerwise())
            loads.jobs.update({op.op_id: layered for op in layered.graph.ops})
            return layered

        Loads.begin = begin_by_layer  # type: ignore[method-assign, assignment]
        super().__init__(vllm_config, role, kv_cache_config)


class CarelessConnector(FaultyConnector):
    """A control for tests of failed loads: publishes blocks that were computed from a failed load."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        unit = self.scheduler.unit
        unit.manager.discard_from = lambda request_id, first_token: 0  # type: ignore[method-assign]
        super().update_connector_output(connector_output)


class SleepyConnector(FaultyConnector):
    """Behaves as if the engine had sleep mode, so that a reset ends all copies. vLLM does not allow sleep mode on a
    CPU."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        vllm_config.model_config.enable_sleep_mode = True
        super().__init__(vllm_config, role, kv_cache_config)


class ForgetfulConnector(FaultyConnector):
    """A control for tests of new weights: reports that it has reset its cache, but does not reset it."""

    def reset_cache(self) -> bool:
        return True


class ImpatientWorker(FaultyWorker):
    """Worker's part of `ImpatientConnector`: reports a layer as loaded without waiting for it."""

    def wait_for_layer(self, name: str) -> None:
        self.layer_loads._waited.add(self._layer_numbers[name])


class ImpatientConnector(FaultyConnector):
    """A control for tests of layerwise loads: lets the forward pass read layers that have not arrived."""

    worker_class = ImpatientWorker


class HastyWorker(FaultyWorker):
    """Worker's part of `HastyConnector`: copies a step's layers before the forward pass has written them."""

    def before_forward(self, orders: ConnectorMetadata) -> None:
        super().before_forward(orders)
        self.layer_stores.finish()
        for op in (op for graph in orders.stores for op in graph.ops):
            if (mine := self._ops._ops.get(op.op_id)) is not None:
                self._ops.engine.wait(mine.ticket, 10.0)


class HastyConnector(FaultyConnector):
    """A control for tests of layerwise stores: copies a step's layers before the forward pass has written them."""

    worker_class = HastyWorker


class EarlyConnector(FaultyConnector):
    """A control for tests of draft models: stores a step's blocks before the draft model has written its layers."""

    _stored: KVConnectorMetadata | None = None

    def finish_forward(self) -> None:
        if self.has_connector_metadata():
            self._stored = self._get_connector_metadata()
            self.worker.finish_stores(cast("ConnectorMetadata", self._stored))

    def wait_for_save(self) -> None:
        if self._get_connector_metadata() is not self._stored:
            super().wait_for_save()


class SecretiveConnector(FaultyConnector):
    """A control for tests of loads that are cut short: does not report the blocks that a load did not fill. So the
    engine continues with KV that never arrived.
    """

    def get_block_ids_with_load_errors(self) -> set[int]:
        super().get_block_ids_with_load_errors()
        return set()


class LateConnector(FaultyConnector):
    """A control for tests of loads between steps: loads several KV groups within the step that computes from them."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        with patch("flexkv.adapters.vllm.connector.with_possible_modes", lambda settings, *_: settings):
            super().__init__(vllm_config, role, kv_cache_config)


class TalkativeConnector(FaultyConnector):
    """A control for tests in which the engine recomputes a complete request. If a load of several KV groups fails, it
    reports the blocks that the load did not fill. This is right only for a single group.
    """

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=results.finished_recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        reports = self.worker.reports
        return reports.take_failed_blocks() if reports.failed_blocks else set()
