"""Tests the refusals and warnings of flexkv's implementation behind `FlexKVConnectorV1`, the connector class that vLLM
ships for flexkv. Another test checks the hits with the real engine.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from flexkv.adapters.vllm import builtin
from flexkv.adapters.vllm.builtin import FlexKVConnectorV1Impl
from flexkv.adapters.vllm.connector import FlexKVConnector
from flexkv.adapters.vllm.engine_checks import warn_of_sudden_end
from flexkv.adapters.vllm.engine_spec import possible_load_mode
from flexkv.config import load_config
from flexkv.errors import ConfigError, GeometryError, KeySchemeError
from tests.unit.adapters.mini_pools import kv_config, make_caches


def engine(**changes: Any) -> Any:
    """Makes the parts of an engine's configuration that the connector reads. Keywords `section__field` change single
    values.
    """
    sections: dict[str, dict[str, Any]] = {
        "kv_transfer_config": {
            "kv_connector_extra_config": {},
            "kv_load_failure_policy": "recompute",
            "engine_id": "e",
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "distributed_executor_backend": "uni",
            "enable_fault_tolerance": False,
        },
        "model_config": {
            "model": "m",
            "is_diffusion": False,
            "is_prefix_caching_supported": True,
            "enable_sleep_mode": False,
        },
        "cache_config": {"prefix_caching_hash_algo": "sha256"},
        "scheduler_config": {"async_scheduling": False},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        sections[section][field] = value
    fields = {name: SimpleNamespace(**values) for name, values in sections.items()}
    return SimpleNamespace(**fields, speculative_config=None, use_v2_model_runner=False)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"parallel_config__tensor_parallel_size": 2},
            ConfigError,
            "tensor_parallel_size is 2.*works with 1",
        ),
        ({"parallel_config__pipeline_parallel_size": 3}, ConfigError, "pipeline_parallel_size is 3"),
        ({"scheduler_config__async_scheduling": True}, ConfigError, "--no-async-scheduling"),
        ({"model_config__enable_sleep_mode": True}, ConfigError, "enable_sleep_mode is set.*FlexKVConnector"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, KeySchemeError, "xxhash"),
        ({"kv_transfer_config__kv_connector_extra_config": {"stor.mode": 1}}, ConfigError, "stor.mode"),
    ],
)
def test_what_it_cannot_do_safely_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FlexKVConnectorV1Impl(engine(**changes), KVConnectorRole.SCHEDULER)


@pytest.mark.parametrize(("policy", "refused"), [("recompute", True), ("fail", False)])
def test_model_runner_v2_is_refused_where_failed_loads_are_computed(policy: str, refused: bool) -> None:
    """Model Runner V2 is refused with the load failure policy "recompute". With vLLM's own connector class, loads end
    within the step, and V2 does not reduce its count of computed tokens after a failed load. With the policy "fail",
    the control, the request ends instead, so V2 is accepted.
    """
    asked = engine(kv_transfer_config__kv_load_failure_policy=policy)
    asked.use_v2_model_runner = True
    if refused:
        with pytest.raises(ConfigError, match="set VLLM_USE_V2_MODEL_RUNNER=0, or"):
            FlexKVConnectorV1Impl(asked, KVConnectorRole.SCHEDULER)
    else:
        FlexKVConnectorV1Impl(asked, KVConnectorRole.SCHEDULER).shutdown()


def test_a_refused_connector_leaves_its_engine_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that fails to start does not count as the engine's connector, even while its exception keeps the
    object alive. As a control, after a connector that works, a second one is refused.
    """
    asked = engine()
    with monkeypatch.context() as refused:
        refused.setattr(builtin, "check_agent", fails)
        with pytest.raises(ConfigError, match="its worker is another engine's") as kept:
            FlexKVConnectorV1Impl(asked, KVConnectorRole.SCHEDULER)
    works = FlexKVConnectorV1Impl(asked, KVConnectorRole.SCHEDULER)
    with pytest.raises(ConfigError, match="a second connector of flexkv"):
        FlexKVConnectorV1Impl(asked, KVConnectorRole.SCHEDULER)
    works.shutdown()
    assert kept.value.args


def fails(_: object) -> None:
    raise ConfigError("its worker is another engine's")


def test_async_scheduling_is_safe_where_failed_requests_end() -> None:
    ends = engine(scheduler_config__async_scheduling=True, kv_transfer_config__kv_load_failure_policy="fail")
    FlexKVConnectorV1Impl(ends, KVConnectorRole.SCHEDULER).shutdown()


def test_it_warns_of_resets_and_of_a_policy_that_loses_requests(said: pytest.LogCaptureFixture) -> None:
    FlexKVConnectorV1Impl(engine(), KVConnectorRole.SCHEDULER).shutdown()
    assert "does not forward cache resets" in said.text
    assert "kv_load_failure_policy" not in said.text
    FlexKVConnectorV1Impl(
        engine(kv_transfer_config__kv_load_failure_policy="fail"), KVConnectorRole.SCHEDULER
    ).shutdown()
    assert "kv_load_failure_policy is 'fail'" in said.text


def test_settings_that_it_cannot_keep_are_named(said: pytest.LogCaptureFixture) -> None:
    asked = {"store.mode": "lazy", "store.partial_blocks": True, "load.mode": "async", "disk.folders": "/d"}
    FlexKVConnectorV1Impl(
        engine(kv_transfer_config__kv_connector_extra_config=asked), KVConnectorRole.SCHEDULER
    ).shutdown()
    for name in asked:
        assert f"{name}=" in said.text
    said.clear()
    FlexKVConnectorV1Impl(engine(), KVConnectorRole.SCHEDULER).shutdown()
    assert "store.mode" not in said.text


@pytest.mark.parametrize(
    ("asked", "async_scheduling", "drafts", "given"),
    [
        ("async", True, True, "async"),
        ("sync", False, False, "sync"),
        ("sync", True, False, "async"),
        ("layerwise", True, False, "async"),
        ("layerwise", False, True, "sync"),
        ("layerwise", False, False, "layerwise"),
    ],
)
def test_the_load_mode_that_an_engine_can_have(
    asked: str, async_scheduling: bool, drafts: bool, given: str, said: pytest.LogCaptureFixture
) -> None:
    config = engine(scheduler_config__async_scheduling=async_scheduling)
    config.speculative_config = object() if drafts else None
    assert possible_load_mode(asked, config) == given
    assert (f"load.mode={asked}" in said.text) == (asked != given)


@pytest.mark.parametrize(
    ("setting", "mode", "piecewise"),
    [
        ("load.mode", "layerwise", True),
        ("load.mode", "sync", False),
        ("load.mode", "async", False),
        ("store.mode", "layerwise", True),
        ("store.mode", "eager", False),
        ("blend.enabled", True, True),
        ("blend.enabled", False, False),
        ("enable_blending", True, True),
    ],
)
def test_hooks_of_layers_stay_out_of_whole_graphs(setting: str, mode: str | bool, piecewise: bool) -> None:
    assert FlexKVConnector.requires_piecewise_for_cudagraph({setting: mode}) is piecewise


@pytest.mark.parametrize(
    ("mode", "folders", "timeout_s", "warned"),
    [
        ("evict", "/d", 0, True),
        ("back", "/d", 0, True),
        ("through", "/d", 0, False),
        ("evict", "/d", 30, False),
        ("evict", "", 0, False),
    ],
)
def test_a_server_that_ends_suddenly_is_warned_about(
    mode: str, folders: str, timeout_s: int, warned: bool, said: pytest.LogCaptureFixture
) -> None:
    settings = load_config({"disk.mode": mode} | ({"disk.folders": folders} if folders else {}))
    warn_of_sudden_end(settings, SimpleNamespace(shutdown_timeout=timeout_s))
    assert ("--shutdown-timeout" in said.text) == warned


@pytest.mark.parametrize("groups", [1, 2])
def test_the_pool_is_that_of_the_workers_connector(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker takes its pool's configuration from vLLM's own connector. A pool with several KV groups is refused,
    because only flexkv's own connector class serves several groups.
    """
    config = kv_config(9)
    config.kv_cache_groups *= groups
    agent = SimpleNamespace(_kv_cache_config=config)
    monkeypatch.setattr(builtin, "get_kv_transfer_group", lambda: agent)
    monkeypatch.setattr(builtin, "check_batch_invariance", lambda _: None)
    connector = FlexKVConnectorV1Impl(engine(), KVConnectorRole.WORKER)
    if groups > 1:
        with pytest.raises(GeometryError, match="only one of full attention is served"):
            connector.register_kv_caches(make_caches(config))
        assert connector._worker.kv_config is None
    else:
        connector.register_kv_caches(make_caches(config))
        assert connector._worker.kv_config is config
    connector.shutdown()
