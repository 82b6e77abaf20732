"""The installed vLLM has every name that the adapter uses. tests/engines_vllm33 checks the names of version 0.33."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from build_support import vllm_names
from build_support.vllm_names import BASE, BY_HAND, FOLDERS, absent_in, markdown, missing, owner_of, touched
from flexkv.adapters.vllm.engine_checks import TESTED_VERSIONS, warn_of_version
from flexkv.observe import log
from tests.unit.adapters import attribute_reads
from tests.unit.adapters.vllm_objects import make_request

ROOT = Path(__file__).resolve().parents[3]
VERSION = ".".join(vllm.__version__.split(".")[:2])


def test_the_installed_version_has_every_name() -> None:
    assert VERSION in TESTED_VERSIONS
    assert set(missing(touched())) == absent_in(VERSION)


def test_the_names_are_found_in_the_source() -> None:
    found = touched()
    assert len(found) > 300
    for name in (
        "vllm.v1.request:RequestStatus",
        "vllm.v1.request:Request.all_token_ids",
        "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
        "vllm.config:VllmConfig.use_v2_model_runner",
        "vllm.config:CacheConfig.mamba_cache_dtype",
        "vllm.distributed.kv_events:BlockStored.token_ids",
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


def test_control_each_attribute_that_is_taken_away_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    for name in touched():
        owner, attribute = owner_of(name), name.rpartition(".")[2]
        # Skips classes with subclasses: the check also accepts an attribute that only a subclass defines, so it may not
        # notice that the attribute of the base class is missing.
        if not inspect.isclass(owner) or owner.__subclasses__() or attribute not in vars(owner):
            continue
        if attribute in getattr(owner, "__members__", ()):
            continue  # members of an enum cannot be deleted
        with monkeypatch.context() as patched:
            patched.delattr(owner, attribute)
            patched.setattr(owner, "__annotations__", {}, raising=False)
            assert missing([name]) == [name]
        taken += 1
    assert taken > 100


def test_names_that_were_listed_by_hand_are_in_the_source() -> None:
    source = "\n".join(path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = {name.rpartition(":")[2].rpartition(".")[2] for name in BY_HAND}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", source)] == []


def test_what_the_adapter_reads_while_it_runs_is_listed() -> None:
    files = ("events_and_stats", "geometry", "identity", "lora_names", "roles_and_resets", "store_and_load")
    tests = [f"tests/unit/adapters/test_{name}.py" for name in files]
    plugin = ["-p", "tests.unit.adapters.attribute_reads"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *tests],
        cwd=ROOT,
        env=outside,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


def test_control_a_read_that_is_not_listed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_reads, "_reads", set())
    attribute_reads.note_read(make_request([1, 2, 3]), "num_tokens")
    name = "vllm.v1.request:Request.num_tokens"
    assert attribute_reads.unlisted(touched()) == []
    assert attribute_reads.unlisted({*touched()} - {name}) == [name]


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
