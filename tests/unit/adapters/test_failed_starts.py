"""A start that fails changes nothing in its process. The next engine in that process is not refused as a second
engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import has_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from flexkv.adapters.vllm import connector, local_engines
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.errors import CapacityError, ConfigError, DiskError, FlexKVError, GeometryError
from tests.unit.adapters import model_runners
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.scheduled_pools import full

PROMPT = list(range(10, 40))


class KeptRunner(model_runners.RunnerV1):
    """A model runner that keeps its connector in vLLM's global variable, as vLLM does. It sets the variable before the
    connector registers the KV cache.
    """

    def __init__(self, config: VllmConfig, connector: KVConnectorBase_V1, caches: Mapping[str, Any]) -> None:
        assert not has_kv_transfer_group(), "vLLM would go on with the connector of another engine"
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        super().__init__(config, connector, caches)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScheduledEngine]]:
    """Returns a function that starts an engine in this process. After the test, the fixture closes all engines that
    were started.
    """
    monkeypatch.setitem(model_runners.RUNNERS, "kept", KeptRunner)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    engines: list[ScheduledEngine] = []

    def make(**options: Any) -> ScheduledEngine:
        engines.append(ScheduledEngine(tmp_path, [full(4)], runner="kept", **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Misshaped(WorkerSide):
    def register_kv_caches(self, *_arguments: Any) -> None:
        raise GeometryError("no such pool")


def wrong(kind: str, folder: Path) -> tuple[type[FlexKVError], dict[str, Any]]:
    """Returns the type of the error that `kind` names, and arguments with which a start fails with this error."""
    (folder / "file").write_text("")
    starts: dict[str, tuple[type[FlexKVError], dict[str, Any]]] = {
        "too little memory": (CapacityError, {"host.bytes": 16}),
        "a folder that is a file": (DiskError, {"disk.folders": str(folder / "file")}),
        "a wrong password file": (
            ConfigError,
            {"remote.urls": "redis://127.0.0.1:1", "remote.password_file": str(folder / "none")},
        ),
        "a pool that cannot be read": (GeometryError, {"worker_class": Misshaped}),
    }
    return starts[kind]


KINDS = (
    "too little memory",
    "a folder that is a file",
    "a wrong password file",
    "a pool that cannot be read",
)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_start_that_failed_a_right_one_works(
    start: Callable[..., ScheduledEngine], kind: str, tmp_path: Path
) -> None:
    error, options = wrong(kind, tmp_path)
    for _ in range(2):
        with pytest.raises(error) as kept:
            start(**options)
        assert not has_kv_transfer_group()
    engine = start()
    engine.run("one", PROMPT)
    engine.forget()
    assert engine.run("two", PROMPT) == 28
    engine.check()
    assert kept.value.args, "also where somebody keeps the error"


@pytest.mark.parametrize("kind", KINDS)
def test_control_a_connector_that_stays_refuses_the_next_start(
    start: Callable[..., ScheduledEngine], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def leaves_all(_: VllmConfig) -> Iterator[None]:
        yield

    monkeypatch.setattr(connector, "ending_failed_start", leaves_all)
    error, options = wrong(kind, tmp_path)
    with pytest.raises(error):
        start(**options)
    assert has_kv_transfer_group()
    with pytest.raises(AssertionError, match="the connector of another engine"):
        start()


def test_a_failed_start_beside_a_live_engine_ends_nothing_of_it(
    start: Callable[..., ScheduledEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    with pytest.raises(ConfigError, match="another engine"), local_engines.ending_failed_start(VllmConfig()):
        raise ConfigError("another engine in this process has a KV connector")
    assert has_kv_transfer_group()
    engine.run("one", PROMPT)
    engine.check()
