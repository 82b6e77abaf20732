"""flexkv's connector has the hooks that vLLM calls, with the parameters that vLLM passes. tests/engines_vllm33 compares
`INTERFACES[(0, 33)]` with vLLM 0.33 itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from flexkv.adapters.vllm.connector import FlexKVConnector
from flexkv.adapters.vllm.engine_spec import sleeps_without_hooks
from tests.unit.adapters.vllm_interface import (
    ABSTRACT,
    INTERFACES,
    PROPERTIES,
    misfits,
    parameters_of,
    public_hooks,
)

MAJOR, MINOR = (int(part) for part in vllm.__version__.split(".")[:2])
OURS_IN_ANY_VERSION = ("unregister_kv_caches", "restore_kv_caches")


class In033(FlexKVConnector):
    """flexkv's class with the hooks that only vLLM 0.33 has. When an older vLLM is installed, flexkv's class lacks
    these hooks.
    """

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True


@pytest.mark.parametrize("version", INTERFACES, ids=str)
def test_the_connector_takes_every_call(version: tuple[int, int]) -> None:
    assert misfits(In033, INTERFACES[version]) == []


@pytest.mark.parametrize("hook", [*ABSTRACT, *OURS_IN_ANY_VERSION])
def test_the_connector_has_what_no_version_does_for_it(hook: str) -> None:
    assert hook in vars(FlexKVConnector)


def test_control_a_hook_with_other_parameters_is_found() -> None:
    class Wrong(In033):
        def start_load_kv(self, forward_context: Any) -> None:  # type: ignore[override]
            """A wrong hook: it has no `**kwargs`."""

        def request_finished(self, request: Any) -> None:  # type: ignore[override]
            """A wrong hook: it has no parameter for the blocks."""

        def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:  # type: ignore[override]
            """A wrong hook: its last parameter has another name."""

        restore_kv_caches = None  # type: ignore[assignment]

    found = misfits(Wrong, INTERFACES[(0, 33)])
    assert [line.partition(":")[0] for line in found] == [
        "start_load_kv",
        "update_state_after_alloc",
        "request_finished",
        "restore_kv_caches",
    ]


def test_the_table_is_what_the_installed_engine_calls() -> None:
    """The table of hooks equals the hooks of the installed vLLM. The test fails when a new version of vLLM adds a
    hook.
    """
    assert public_hooks(KVConnectorBase_V1) == INTERFACES[MAJOR, MINOR]
    assert sorted(KVConnectorBase_V1.__abstractmethods__) == sorted(ABSTRACT)
    names = dir(KVConnectorBase_V1)
    properties = [n for n in names if isinstance(inspect.getattr_static(KVConnectorBase_V1, n), property)]
    assert sorted(properties) == sorted(PROPERTIES)


def test_the_connector_serves_several_kv_groups() -> None:
    """The connector supports `SupportsHMA`. For connectors without it, vLLM turns its hybrid KV cache manager off."""
    assert issubclass(FlexKVConnector, SupportsHMA)
    finished = KVConnectorBase_V1.request_finished
    assert parameters_of(FlexKVConnector.request_finished_all_groups) == parameters_of(finished)


@pytest.mark.parametrize(("sleep_mode", "hooks"), [(True, False), (True, True), (False, False)])
def test_a_reset_ends_copies_where_no_hook_does(
    monkeypatch: pytest.MonkeyPatch, sleep_mode: bool, hooks: bool
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    if hooks:
        monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    model = type("Model", (), {"enable_sleep_mode": sleep_mode})
    config: Any = type("Config", (), {"model_config": model})
    assert sleeps_without_hooks(config) is (sleep_mode and not hooks)
