"""Fixtures of the engine tests: a model, an engine without a connector for comparison, and functions that start other
engines."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import FLEXKV, IN_PROCESS, EngineProcess
from demo.hybrid import LAYERS, write_gemma_3
from demo.model import write_model

from .session import BLOCK_TOKENS, EngineSession, Reference

PACKAGE = str(__package__)
PACKAGE_ROOT = Path(__file__).resolve().parents[PACKAGE.count(".") + 1]
# The engines' fork server inherits this variable. The models are so small that more threads would only wait for each
# other, for a long time if the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
UNPINNED = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
FAULTY = FLEXKV | {
    "kv_connector": "FaultyConnector",
    "kv_connector_module_path": f"{PACKAGE}.faulty_connector",
}
OPERATIONS = (
    f"{PACKAGE}.blend_ops",
    f"{PACKAGE}.blend_refusal_ops",
    f"{PACKAGE}.blend_row_ops",
    f"{PACKAGE}.blend_stream_ops",
    f"{PACKAGE}.block_ops",
    f"{PACKAGE}.disk_ops",
    f"{PACKAGE}.request_ops",
    f"{PACKAGE}.fault_ops",
    f"{PACKAGE}.image_ops",
    f"{PACKAGE}.kill_ops",
    f"{PACKAGE}.listen_ops",
    f"{PACKAGE}.peer_ops",
    f"{PACKAGE}.remote_ops",
    f"{PACKAGE}.second_ops",
    f"{PACKAGE}.sleep_ops",
)
POOL_BLOCKS = 129
"""Number of blocks in an engine's pool, unless a test sets another one: the null block, and 128 blocks for 4096
tokens."""
GROUPS = LAYERS
"""Number of KV groups of the Gemma 3 model: one per layer."""
BLOCKS_OF_ALL_GROUPS = GROUPS * POOL_BLOCKS
"""Number of blocks in the pool of a Gemma 3 engine. Each KV group takes blocks of its own."""
HOST_BYTES = 96 << 20
"""Size of the host tier, in bytes, unless a test sets another one: about 700 blocks of the tiny model."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


def connector(base: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Makes a `kv_transfer_config` for flexkv. Callers give settings by their dotted names, with `__` for each dot."""
    extra = {"host.bytes": HOST_BYTES} | {key.replace("__", "."): value for key, value in settings.items()}
    return {**(base or FLEXKV), "kv_connector_extra_config": extra}


@dataclass
class Engines:
    """Starts engines. The engine that was started last keeps running, because consecutive tests often need the same
    engine."""

    model: Path
    logs: Path
    reference: Reference
    _key: str = ""
    _session: EngineSession | None = None
    _started: int = 0
    _others: list[EngineProcess] = field(default_factory=list)

    def get(
        self,
        kv_transfer_config: Mapping[str, Any] | None,
        environment: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> EngineSession:
        """Returns an engine with exactly this configuration: the running engine if its configuration matches, otherwise
        a new one.
        """
        key = json.dumps([kv_transfer_config, environment, engine], sort_keys=True)
        if self._session is not None and key == self._key and self._session.process.alive:
            return self._session
        self.close()
        self._session = EngineSession(
            self._start(kv_transfer_config, environment or {}, engine), self.reference
        )
        self._key = key
        return self._session

    def another(
        self,
        kv_transfer_config: Mapping[str, Any] | None,
        environment: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> EngineSession:
        """Starts one more engine while the engine of `get` continues. `close_others` closes it."""
        process = self._start(kv_transfer_config, environment or {}, engine)
        self._others.append(process)
        return EngineSession(process, self.reference)

    def close_others(self) -> None:
        while self._others:
            self._others.pop().close()

    def close(self) -> None:
        if self._session is not None:
            self._session.process.close()
            self._session = None

    def _start(
        self,
        kv_transfer_config: Mapping[str, Any] | None,
        environment: Mapping[str, str],
        engine: Mapping[str, Any],
    ) -> EngineProcess:
        self._started += 1
        arguments = engine_arguments(self.model) | dict(engine)
        if kv_transfer_config is not None:
            arguments["kv_transfer_config"] = dict(kv_transfer_config)
        log = self.logs / f"engine-{self._started}.log"
        return EngineProcess(
            arguments, log, OPERATIONS, {**IN_PROCESS, **UNPINNED, **environment}, [PACKAGE_ROOT]
        )


def engine_arguments(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2304,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": POOL_BLOCKS,
        "disable_log_stats": False,
        "seed": 0,
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"), "tiny")


@contextmanager
def engine_alone(model: Path, log: Path, **engine: Any) -> Iterator[Reference]:
    """Runs an engine without a connector and without a prefix cache until the context ends.

    Args:
        engine: more engine arguments.
    """
    arguments = engine_arguments(model) | {"enable_prefix_caching": False} | engine
    with EngineProcess(arguments, log, environment={**IN_PROCESS, **UNPINNED}) as process:
        yield Reference(process)


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with engine_alone(model, tmp_path_factory.mktemp("reference") / "engine.log") as alone:
        yield alone


@pytest.fixture(scope="session")
def gemma_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_3(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="session")
def gemma_3_alone(gemma_3: Path) -> Iterator[Reference]:
    log = gemma_3.parent / "engine.log"
    with engine_alone(gemma_3, log, num_gpu_blocks_override=BLOCKS_OF_ALL_GROUPS) as alone:
        yield alone


@pytest.fixture
def hybrid(engines: Engines, gemma_3: Path, gemma_3_alone: Reference) -> Callable[..., EngineSession]:
    """Starts engines of a model with six KV groups."""

    def start(
        rules: Sequence[Any] | None = None, kind: Mapping[str, Any] = FAULTY, **settings: Any
    ) -> EngineSession:
        """Starts an engine, or returns the running one if it has the same configuration.

        Args:
            rules: faults for a connector of the given `kind`; None for flexkv's own connector, without faults.
        """
        more: dict[str, Any] = {"model": str(gemma_3), "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS}
        if rules is None:
            session = engines.get(connector(**settings), **more)
        else:
            environment = {"FAULT_RULES": json.dumps(rules)}
            session = engines.get(connector(kind, **settings), environment, **more)
        return EngineSession(session.process, gemma_3_alone)

    return start


@pytest.fixture(scope="session")
def all_engines(
    model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    engines = Engines(model, tmp_path_factory.mktemp("engines"), reference)
    yield engines
    engines.close()


@pytest.fixture
def engines(all_engines: Engines) -> Iterator[Engines]:
    yield all_engines
    all_engines.close_others()


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> int:
    """Returns a seed for this test's prompts. It differs between tests, so that a test does not hit another test's
    blocks in the same engine.
    """
    return zlib.crc32(request.node.nodeid.encode())
