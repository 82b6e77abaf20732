"""If a start is refused halfway, it leaves neither host memory allocated nor a lock on a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flexkv.adapters.tensorrt_llm import worker as tensorrt_llm_worker
from flexkv.adapters.vllm import stores
from flexkv.adapters.vllm import worker as vllm_worker
from flexkv.config import load_config
from flexkv.errors import ClosedError, ConfigError
from flexkv.transfer import nvtx
from flexkv.transfer.host_pool import HostPool
from flexkv.unit import build
from tests.unit.adapters.disk_engines import PROMPT, SLAB_BYTES
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import make_request

Make = Callable[..., MiniEngine]


class Late(ConfigError):
    """Raised by the last action of a start."""


def fails(*_arguments: object, **_named: object) -> Any:
    raise Late("the last thing that the start does")


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[HostPool]:
    """Returns a list that gets every host pool that is made."""
    made: list[HostPool] = []

    def make(*arguments: Any, **named: Any) -> HostPool:
        made.append(HostPool(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(build, "HostPool", make)
    return made


@pytest.mark.parametrize(("module", "name"), [(build, "LiveUnit"), (stores, "EagerStores")])
def test_a_refused_start_holds_no_memory_and_no_folder(
    make_engine: Make,
    pools: list[HostPool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    module: Any,
    name: str,
) -> None:
    settings = {
        "disk.folders": str(tmp_path),
        "disk.bytes_per_folder": SLAB_BYTES,
    }
    with monkeypatch.context() as broken:
        broken.setattr(module, name, fails)
        # The exception stays referenced, and its traceback refers to all objects that the start had made.
        with pytest.raises(Late) as caught:
            make_engine(**settings)
    [pool] = pools
    with pytest.raises(ClosedError):
        _ = pool.native
    engine = make_engine(**settings)
    engine.run(make_request(PROMPT, "one"))
    assert engine.stored_pages == 5
    assert pools[1].native.slots, "the control: a pool in use is not closed"
    assert caught.value.args


@pytest.mark.parametrize("worker_class", [vllm_worker.WorkerSide, tensorrt_llm_worker.WorkerSide])
def test_a_mistyped_profiler_library_refuses_the_start_of_every_rank(
    worker_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong profiler library is reported when a worker is made, in every process. If a rank in another process were
    refused only later, it would log the refusal and run without the cache.
    """
    monkeypatch.setattr(nvtx, "_library", None)
    more = (1,) if worker_class is vllm_worker.WorkerSide else ()
    with pytest.raises(ConfigError, match=r"observe\.nvtx=/no/such\.so: "):
        worker_class(load_config({"observe.nvtx": "/no/such.so"}, {}), 0, *more)
    worker_class(load_config({}, {}), 0, *more).close()


@pytest.mark.parametrize("remote", [False, True])
def test_an_engine_with_a_mistyped_profiler_library_does_not_start(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setattr(nvtx, "_library", None)
    with pytest.raises(ConfigError, match=r"observe\.nvtx=/no/such\.so: "):
        make_engine(remote=remote, **{"observe.nvtx": "/no/such.so"})
