"""vLLM's two model runners from the point of view of a connector's worker. vLLM's own code
(`KVConnectorModelRunnerMixin` of Model Runner V1, `ActiveKVConnector` of V2) calls the worker's hooks in the order of
`execute_model` and `sample_tokens`. A test supplies functions in place of the rest of these two methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

Work = Callable[[], None]


class ModelRunner(ABC):
    """Runs the steps of one worker.

    Args:
        config: the engine's configuration.
        connector: the worker's connector.
        caches: the KV tensors by layer name, as `register_kv_caches` takes them.
    """

    def __init__(
        self, config: VllmConfig, connector: KVConnectorBase_V1, caches: Mapping[str, torch.Tensor]
    ) -> None:
        self._config = config
        self._connector = connector

    def step(self, output: SchedulerOutput, prepare: Work, forward: Work, sample: Work) -> KVConnectorOutput:
        """Runs one step.

        Args:
            prepare: stands for the runner's work on KV cache blocks before the forward pass: it clears and copies
                blocks.
            forward: writes the KV of the scheduled tokens; not called if no tokens are scheduled.
            sample: stands for the work after the forward pass: sampling, and the draft model.
        """
        # vLLM keeps the worker's connector in a global variable of the process, but each test has its own connector.
        before, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, self._connector
        try:
            report = self._step(output, prepare, forward, sample)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before
        return report or KVConnectorOutput()

    @abstractmethod
    def _step(
        self, output: SchedulerOutput, prepare: Work, forward: Work, sample: Work
    ) -> KVConnectorOutput | None: ...


class RunnerV1(ModelRunner):
    """Calls the hooks in the order of `GPUModelRunner.execute_model` in v1/worker/gpu_model_runner.py. It handles
    preemptions first. Then `_update_states` clears and copies blocks. It calls all other hooks before sampling.
    """

    def __init__(
        self, config: VllmConfig, connector: KVConnectorBase_V1, caches: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(config, connector, caches)
        connector.register_kv_caches(dict(caches))

    def _step(
        self, output: SchedulerOutput, prepare: Work, forward: Work, sample: Work
    ) -> KVConnectorOutput | None:
        assert output.kv_connector_metadata is not None
        self._connector.handle_preemptions(output.kv_connector_metadata)
        prepare()
        mixin = KVConnectorModelRunnerMixin
        if not output.total_num_scheduled_tokens:
            return mixin.kv_connector_no_forward(output, self._config).kv_connector_output
        with (
            set_forward_context(None, self._config),
            mixin.maybe_get_kv_connector_output(output) as report,
        ):
            forward()
        sample()
        return report


class RunnerV2(ModelRunner):
    """Calls the hooks in the order of `GPUModelRunner` in v1/worker/gpu/model_runner.py. `execute_model` clears and
    copies blocks in `update_requests`, then calls `pre_forward`, which handles preemptions, and `finish_forward`.
    `sample_tokens` calls `post_forward` last, after sampling and the draft model.
    """

    def __init__(
        self, config: VllmConfig, connector: KVConnectorBase_V1, caches: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(config, connector, caches)
        before, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, connector
        try:
            self._active = ActiveKVConnector(config, dict(caches))
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    def _step(
        self, output: SchedulerOutput, prepare: Work, forward: Work, sample: Work
    ) -> KVConnectorOutput | None:
        prepare()
        if not output.total_num_scheduled_tokens:
            return self._active.no_forward(output).kv_connector_output
        with set_forward_context(None, self._config):
            self._active.pre_forward(output)
            forward()
        self._active.finish_forward()
        sample()
        return self._active.post_forward(output.finished_req_ids)


class DeferringRunnerV2(RunnerV2):
    """Model Runner V2 of vLLM 0.33 with a draft model: `post_forward` makes the report, then the draft model runs, and
    `finalize_step` ends the step. To get this order with every version of vLLM, the class delays the last two hooks
    that `post_forward` calls.
    """

    def _step(
        self, output: SchedulerOutput, prepare: Work, forward: Work, sample: Work
    ) -> KVConnectorOutput | None:
        prepare()
        if not output.total_num_scheduled_tokens:
            return self._active.no_forward(output).kv_connector_output
        with set_forward_context(None, self._config):
            self._active.pre_forward(output)
            forward()
        self._active.finish_forward()
        connector = self._active.kv_connector
        with patch.multiple(connector, wait_for_save=nothing, clear_connector_metadata=nothing):
            report = self._active.post_forward(output.finished_req_ids)
        sample()
        connector.wait_for_save()
        connector.clear_connector_metadata()
        return report


RUNNERS: dict[str, type[ModelRunner]] = {"V1": RunnerV1, "V2": RunnerV2}


def nothing(*_: Any) -> None:
    """Does nothing. Stands for a part of a step that a test does not use."""
