"""Engine configurations that flexkv refuses at the start, because the engine would crash, give wrong answers, or never
get a hit.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from demo.engine_process import FLEXKV, IN_PROCESS, SEPARATE_CORE, EngineError, EngineProcess

from .conftest import UNPINNED, Engines, connector, engine_arguments
from .session import Prompt
from .test_beside_others import PROMISING, beside
from .test_store_modes import BUILT_IN
from .transformers_models import write_hrm_text


def pooling(kind: str) -> dict[str, Any]:
    return {"runner": "pooling", "convert": "embed", "pooler_config": {"seq_pooling_type": kind}}


def test_a_pooling_model_that_vllm_cannot_compute_in_parts_is_refused(engines: Engines) -> None:
    message = (
        r"ConfigError: vLLM does not support prefix caching for \S+ \(decoder attention, MEAN.*leave --kv-tra"
    )
    with pytest.raises(EngineError, match=message):
        engines.another(connector(), **pooling("MEAN"))


def test_a_pooling_model_of_the_last_token_is_served(engines: Engines, stream: int) -> None:
    session = engines.another(connector(), **pooling("LAST"))
    prompt = Prompt.of(200, stream)
    computed = session.call("embed", ids=list(prompt.ids))
    session.forget()
    served = session.call("embed", ids=list(prompt.ids))
    assert (computed["cached"], served["cached"]) == (0, prompt.whole_blocks)
    assert served["embedding"] == pytest.approx(computed["embedding"], abs=1e-6)
    other = session.call("embed", ids=list(Prompt.of(200, stream + 1).ids))
    assert other["embedding"] != pytest.approx(computed["embedding"], abs=1e-3)


def test_a_prefix_lm_is_refused(engines: Engines, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="GeometryError: KV cache group of 2 layers is non-causal"):
        engines.another(connector(), model=str(write_hrm_text(tmp_path / "model")))


@pytest.mark.parametrize(
    "second", [FLEXKV, {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}], ids=["ours", "built-in"]
)
def test_a_second_connector_of_flexkv_in_an_engine_is_refused(
    engines: Engines, second: dict[str, Any]
) -> None:
    with pytest.raises(EngineError, match="ConfigError: a second connector of flexkv in one engine"):
        engines.another(beside(connector(), connector(second)))


def test_a_setting_that_the_machine_cannot_have_is_named_before_any_traceback(
    model: Path, tmp_path: Path
) -> None:
    arguments = engine_arguments(model) | {"kv_transfer_config": connector(host__numa_node=63)}
    log = tmp_path / "engine.log"
    words = (
        "host.numa_node (engine extra config) is 63: memory of this machine that this process may use lies on"
    )
    with pytest.raises(EngineError, match="engine"):
        EngineProcess(arguments, log, environment={**SEPARATE_CORE, **UNPINNED}).close()
    before, traceback, _ = log.read_text().partition("Traceback")
    assert traceback
    assert f"flexkv refuses to start: {words}" in before


def test_the_built_in_class_in_a_multi_connector_is_refused(engines: Engines) -> None:
    with pytest.raises(
        EngineError, match=r"ConfigError: .*one of the connectors of a MultiConnector.*in its place"
    ):
        engines.another(beside(PROMISING, connector(BUILT_IN)), async_scheduling=False)


RANK_MEMORY = [Path("/dev/shm") / f"-tp:0-[0-1]-cpushm_{rank}" for rank in range(2)]
"""Files of the shared memory of vLLM's two CPU ranks. With an external launcher their names are the same for every
engine.
"""


@contextmanager
def names_free(paths: Sequence[Path]) -> Iterator[None]:
    """Keeps these file names free within the `with` block: renames another engine's files, and at the end gives them
    their names back. Processes that map the files do not notice it.

    A rank that ends during its start leaves its shared memory behind. This function removes it, unless a process still
    maps it.
    """
    aside = {path: path.with_name(f"{path.name}.{uuid4().hex}") for path in paths if path.exists()}
    for path, other in aside.items():
        path.rename(other)
    try:
        yield
    finally:
        mapped = mapped_files()
        for path in paths:
            if path.exists() and str(path) not in mapped:
                path.unlink()
        for path, other in aside.items():
            if not path.exists():
                other.rename(path)


def mapped_files() -> set[str]:
    """Returns the paths of all files that processes on this machine map, as far as this user may read the maps."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue  # the process has ended, or belongs to another user, whose files this user cannot remove
        found |= {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return found


def test_only_memory_of_ended_ranks_is_removed(tmp_path: Path) -> None:
    others, left, used = (tmp_path / name for name in ("others", "left", "used"))
    others.write_bytes(b"another engine's")
    with names_free([others, left, used]):
        assert not others.exists()
        for path in (others, left, used):
            path.write_bytes(bytes(64))
        file = used.open("rb")
        memory = mmap.mmap(file.fileno(), 64, access=mmap.ACCESS_READ)
    assert others.read_bytes() == b"another engine's"
    assert not left.exists()
    assert used.exists()
    memory.close()
    file.close()
    assert sorted(tmp_path.iterdir()) == [others, used], "nothing stays aside"


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    with names_free(RANK_MEMORY):
        yield


@pytest.mark.usefixtures("no_leftovers")
def test_ranks_of_an_external_launcher_are_refused(model: Path, tmp_path: Path) -> None:
    """flexkv refuses ranks of an external launcher. The test runs each rank in its own process, as torchrun does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = engine_arguments(model) | {
        "kv_transfer_config": connector(),
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "external_launcher",
    }

    def start(rank: int) -> None:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**IN_PROCESS, **UNPINNED, **place, **meeting}
        EngineProcess(arguments, tmp_path / f"{rank}.log", environment=environment).close()

    with ThreadPoolExecutor(2) as threads:
        started = [threads.submit(start, rank) for rank in range(2)]
        ended = [future.exception() for future in started]
    for error in ended:
        assert isinstance(error, EngineError)
        assert "external_launcher' with tensor_parallel_size 2" in str(error)
