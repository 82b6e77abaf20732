"""The installed vLLM has every name that the adapter touches. tests/engines_vllm33 checks 0.33."""

from __future__ import annotations

import pytest
import vllm

from build_support import vllm_names
from build_support.vllm_names import BASE, absent_in, markdown, missing, touched
from flexkv.adapters.vllm.engine_checks import TESTED_VERSIONS, warn_of_version
from flexkv.observe import log

VERSION = ".".join(vllm.__version__.split(".")[:2])


def test_the_installed_version_has_every_name() -> None:
    assert VERSION in TESTED_VERSIONS
    assert set(missing(touched())) == absent_in(VERSION)


def test_the_names_are_found_in_the_source() -> None:
    found = touched()
    assert len(found) > 140
    for name in (
        "vllm.v1.request:RequestStatus",
        "vllm.v1.request:Request.all_token_ids",
        "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
        "vllm.config:VllmConfig.use_v2_model_runner",
        f"{BASE}:KVConnectorBase_V1._get_connector_metadata",
    ):
        assert name in found


@pytest.mark.parametrize(
    "name",
    [
        "vllm.v1.no_such_module:Request",
        "vllm.v1.request:NoSuchClass",
        "vllm.v1.request:Request.no_such_attribute",
        "vllm.config:VllmConfig.no_such_field",
    ],
)
def test_control_a_name_that_is_gone_is_found(name: str) -> None:
    assert missing([name, "vllm.v1.request:Request"]) == [name]


def test_the_table_says_what_a_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm_names, "touched", lambda: ["vllm.a:x", f"{BASE}:KVConnectorBase_V1.restore_kv_caches"]
    )
    assert markdown().splitlines()[2:] == [
        "| `vllm.a` | `x` | yes | yes |",
        f"| `{BASE}` | `KVConnectorBase_V1.restore_kv_caches` | no | yes |",
    ]


@pytest.mark.parametrize(
    ("version", "tested"), [("0.32.1", True), ("0.33.0", True), ("0.34.0", False), ("1.0", False)]
)
def test_an_untested_version_is_named_once_with_what_was_tested(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_warned", set())
    monkeypatch.setattr(vllm, "__version__", version)
    with caplog.at_level("WARNING", "flexkv"):
        warn_of_version()
        warn_of_version()
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(". ")[0] for line in said] == (
        [] if tested else [f"vLLM {version}: flexkv was tested with vLLM 0.32 and 0.33"]
    )
