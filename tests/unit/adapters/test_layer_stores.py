"""Layerwise stores copy each layer after the forward pass has written it. A page is published only if all of its layers
arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexkv import c_ext
from flexkv.adapters.common.layerwise import NOT_FINISHED, LayerStores
from flexkv.adapters.vllm.connector import FlexKVConnector
from flexkv.adapters.vllm.engine_spec import possible_store_mode
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.worker import WorkerSide
from flexkv.transfer.graph import OpId, OpKind, Priority, TransferGraph, TransferOp
from tests import testing_ext
from tests.unit.adapters.faulty_worker import FaultyWorker, faulty_worker
from tests.unit.adapters.mini_engine import MiniEngine, stored_engine
from tests.unit.adapters.mini_pools import LAYERS
from tests.unit.adapters.vllm_objects import make_request
from tests.unit.transfer.transfer_world import FAIL, STALL

Make = Callable[..., MiniEngine]
PROMPT = list(range(100, 123))
WHOLE = 20
"""Number of the prompt's 23 tokens that are in full blocks of 4."""
H2D, D2H = 0, 1
LONG_S = 60.0
BY_LAYER = {"store.mode": "layerwise"}


def wait_calls(worker: type[FaultyWorker], calls: int, rank: int = 0) -> None:
    ends_s = time.monotonic() + LONG_S
    while worker.movers[rank].calls < calls:
        assert time.monotonic() < ends_s, f"{worker.movers[rank].calls} of {calls} copies"
        time.sleep(0.001)


def found(engine: MiniEngine, name: str = "again") -> int:
    """Returns how many external tokens a request gets for the prompt, and checks every byte of them."""
    engine.forget()
    return engine.run(make_request(PROMPT, name))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_what_is_stored_by_layer_is_what_was_written(
    make_engine: Make, ranks: int, remote: bool, latent: bool
) -> None:
    """A layerwise store keeps exactly the bytes that the engine wrote. The store also computes digests layer by layer,
    and the load verifies them.
    """
    engine = make_engine(ranks=ranks, remote=remote, latent=latent, **{"host.verify": True}, **BY_LAYER)
    engine.run(make_request(PROMPT, "one"))
    assert engine.stored_pages == WHOLE // 4
    assert found(engine) == WHOLE


def test_a_layer_is_copied_while_the_forward_computes_the_next(make_engine: Make) -> None:
    worker = faulty_worker()
    engine = make_engine(worker_class=worker, **BY_LAYER)
    engine.add(make_request(PROMPT, "one"))
    seen: list[int] = []

    def after(layer: int) -> None:
        wait_calls(worker, (layer + 1) * WHOLE // 4)
        seen.append(worker.movers[0].calls)

    engine.after_layer = after
    engine.step()
    assert seen == [WHOLE // 4 * (layer + 1) for layer in range(LAYERS)], "as many as pages, a layer"
    engine.finish("one")
    engine.drain()
    engine.after_layer = lambda layer: None
    assert found(engine) == WHOLE


@pytest.mark.parametrize("again", [True, False], ids=["", "control"])
def test_no_layer_is_copied_of_a_forward_that_may_begin_again(make_engine: Make, again: bool) -> None:
    """No layer is copied while the forward pass may begin again, because a second attempt may write other rows. In the
    control, the forward pass cannot begin again, as without blending.
    """
    worker = faulty_worker()
    engine = make_engine(worker_class=worker, **BY_LAYER)
    blend: Any = SimpleNamespace(
        may_begin_again=again, take_arrived=dict, take_stored=dict, disk_busy=False, close=lambda: None
    )
    blend.begin_step = lambda orders: None
    engine.workers[0].blend = blend
    engine.add(make_request(PROMPT, "one"))
    seen: list[int] = []

    def after(layer: int) -> None:
        if not again:
            wait_calls(worker, (layer + 1) * WHOLE // 4)
        seen.append(worker.movers[0].calls)

    engine.after_layer = after
    engine.step()
    assert any(seen) != again
    engine.finish("one")
    engine.drain()
    engine.after_layer = lambda layer: None
    assert found(engine) == WHOLE


class HastyWorker(WorkerSide):
    """For control tests: a worker that copies all layers too early, before the forward pass has written them."""

    def before_forward(self, orders: ConnectorMetadata) -> None:
        super().before_forward(orders)
        self.layer_stores.finish()
        for graph in orders.stores:
            for op in graph.ops:
                if (mine := self._ops._ops.get(op.op_id)) is not None:
                    assert self._ops.engine.wait(mine.ticket, LONG_S)


def test_control_layers_that_are_copied_too_early_are_seen(make_engine: Make) -> None:
    engine = make_engine(worker_class=HastyWorker, **BY_LAYER)
    engine.run(make_request(PROMPT, "one"))
    engine.forget()
    assert engine.add(make_request(PROMPT, "again")) == WHOLE
    engine.end_load("again")
    assert engine.wrong("again", WHOLE) == list(range(WHOLE)), (
        "every token holds what was there before the forward"
    )
    engine.live.clear()


class SilentWorker(WorkerSide):
    """A worker that does not learn which layers are written, as when a CUDA graph is replayed."""

    def layer_written(self, name: str) -> None:
        pass


def test_a_forward_that_does_not_name_its_layers_stores_all_the_same(make_engine: Make) -> None:
    engine = make_engine(worker_class=SilentWorker, **BY_LAYER)
    engine.run(make_request(PROMPT, "one"))
    assert engine.stored_pages == WHOLE // 4
    assert found(engine) == WHOLE


class OpsSpy:
    """Stands for a rank's ops as `LayerStores` uses them, and records the calls."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def submit_store(self, graph: TransferGraph, gated: bool) -> None:
        self.said.append("gated" if gated else "open")

    def open_layers(self, op_ids: list[OpId], layers: int) -> None:
        self.said.append(layers)

    def give_up(self, op_id: OpId, reason: str) -> None:
        self.said.append(reason)


def test_a_layer_waits_for_those_before_it() -> None:
    """The copy of a layer waits until all earlier layers are written too, because an op copies its layers in order. If
    a later layer is written first, its copy is allowed together with those of the layers before it.
    """
    op = TransferOp(
        OpId(1), OpKind.D2H, 0, Priority.STORE, np.zeros(1, np.int32), np.zeros(1, np.int32), layerwise=True
    )
    stores = LayerStores(spy := OpsSpy())  # type: ignore[arg-type]
    stores.written(0)
    stores.begin([TransferGraph((op,))], 5)
    for layer in (1, 2, 0, 0, 4):
        stores.written(layer)
    assert spy.said == ["gated", 3]
    stores.finish()
    stores.finish()
    stores.abandon()
    assert spy.said == ["gated", 3, 5]
    stores.begin([TransferGraph((op,))], 5)
    stores.abandon()
    stores.finish()
    assert spy.said[3:] == ["gated", NOT_FINISHED]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_page_that_lacks_a_layer_on_one_rank_is_not_published(
    make_engine: Make, layer: int, ranks: int
) -> None:
    class LastRankFails(faulty_worker(testing_ext.FaultRule(FAIL, kind=D2H, layer=layer, page=2, times=1))):  # type: ignore[misc]
        def make_mover(self) -> object:
            return super().make_mover() if self.rank == ranks - 1 else c_ext.HostMover()

    engine = make_engine(ranks=ranks, worker_class=LastRankFails, **BY_LAYER)
    engine.run(make_request(PROMPT, "one"))
    assert engine.stored_pages == WHOLE // 4 - 1
    assert found(engine) == 8, "the pages before it"
    assert found(engine, "third") == WHOLE, "the second request offered it again"


@pytest.mark.parametrize("layer", range(LAYERS))
def test_all_pages_fail_in_a_layer_and_nothing_is_found(make_engine: Make, layer: int) -> None:
    fails = faulty_worker(testing_ext.FaultRule(FAIL, kind=D2H, nth_op=0, layer=layer))
    engine = make_engine(worker_class=fails, **BY_LAYER)
    engine.run(make_request(PROMPT, "one"))
    assert engine.stored_pages == 0
    assert found(engine) == 0


class BrokenForwardError(Exception):
    """Raised in these tests to interrupt a forward pass."""


@pytest.mark.parametrize("hooks_run", [False, True])
def test_a_forward_that_breaks_off_publishes_nothing(make_engine: Make, hooks_run: bool) -> None:
    """If the forward pass raises, no page of the step's stores is published. vLLM calls the connector's last hook even
    then, but the step's report is lost.
    """
    worker = faulty_worker()
    engine = make_engine(worker_class=worker, **BY_LAYER)
    engine.add(make_request(PROMPT, "one"))

    def after(layer: int) -> None:
        wait_calls(worker, WHOLE // 4)
        raise BrokenForwardError

    engine.after_layer = after
    with pytest.raises(BrokenForwardError):
        engine.step()
    if hooks_run:
        engine.workers[0].submit_stores(ConnectorMetadata(engine.unit.unit_id))
        assert engine.workers[0]._ops.engine.wait(1, LONG_S)
    else:
        assert worker.movers[0].calls == WHOLE // 4, "one layer, and no other"
    assert engine.side.match(make_request(PROMPT, "two"), 0) == (0, False)
    assert engine.stored_pages == 0


def test_the_step_after_one_that_broke_off_gives_its_stores_up(make_engine: Make) -> None:
    worker = faulty_worker()
    engine = make_engine(worker_class=worker, **BY_LAYER)
    one = make_request(PROMPT, "one")
    engine.add(one)

    def after(layer: int) -> None:
        raise BrokenForwardError

    engine.after_layer = after
    with pytest.raises(BrokenForwardError):
        engine.step()
    engine.after_layer = lambda layer: None
    one.num_computed_tokens = one.num_in_flight_tokens = 0
    engine.add(make_request(range(300, 309), "two"))
    engine.step({"two": 9})
    engine.drain()
    assert engine.stored_pages == 2, "those of the other request alone"
    engine.check("two")


@pytest.mark.parametrize("mode", ["sync", "layerwise"])
@pytest.mark.parametrize("layer", [0, 1])
def test_nothing_computed_from_a_load_that_failed_is_published(
    make_engine: Make, mode: str, layer: int
) -> None:
    """No page is published that was computed from a failed load. The layers are copied before the failure is known. The
    step's report then prevents the publication of their pages.
    """
    fails = faulty_worker(testing_ext.FaultRule(FAIL, kind=H2D, page=2, layer=layer, times=1))
    engine = stored_engine(make_engine, PROMPT[:16], worker_class=fails, **{"load.mode": mode}, **BY_LAYER)
    assert engine.add(make_request(PROMPT, "two")) == 16
    engine.step()
    assert engine.wrong("two", 23) != []
    engine.drain()
    assert engine.stored_pages == 4
    engine.step()
    engine.check("two")
    engine.finish("two")
    engine.drain()
    assert engine.stored_pages == 6
    assert found(engine) == WHOLE


def test_blocks_that_are_handed_out_under_a_copy(make_engine: Make) -> None:
    """If a request ends right after its step, the engine reuses its blocks. The next step waits with its writes until
    the copies from these blocks have ended.
    """
    slow = faulty_worker(testing_ext.FaultRule(STALL, kind=D2H, layer=1, page=3, times=1))
    engine = make_engine(
        blocks=8, remote=True, worker_class=slow, **{"store.max_reference_share": 1.0}, **BY_LAYER
    )
    engine.add(make_request(PROMPT, "one"))
    engine.step()
    assert slow.movers[0].wait_stalled(1, LONG_S)
    engine.finish("one")
    engine.pool.reset_prefix_cache()
    engine.add(make_request(range(300, 323), "two"))
    # The store of "two" in the same step is layerwise too.
    engine.step({"two": 23})
    slow.movers[0].release()
    engine.drain()
    engine.check("two")
    engine.finish("two")
    engine.drain()
    assert found(engine) <= 12, "the page whose copy had not ended is not there, or those after it"


def test_blocks_that_earlier_chunks_began_and_tails_are_stored(make_engine: Make) -> None:
    """A block is stored even if two chunks of the prompt filled it. When the request ends, its partial tail is stored
    too, as a complete page.
    """
    engine = make_engine(**{"store.partial_blocks": True}, **BY_LAYER)
    engine.add(make_request(PROMPT, "one"))
    for tokens in (3, 6, 14):
        engine.step({"one": tokens})
    engine.finish("one")
    engine.drain()
    assert engine.stored_pages == 6
    assert found(engine) == 22


def test_steps_without_stores_and_layers_without_kv_copy_nothing(make_engine: Make) -> None:
    worker = faulty_worker()
    engine = make_engine(worker_class=worker, **BY_LAYER)
    engine.workers[0].layer_written("layer.1")
    engine.workers[0].layer_written("encoder.7")
    engine.run(make_request(PROMPT[:3], "short"))
    assert worker.movers[0].calls == 0


@pytest.mark.parametrize(
    ("speculative", "in_parts", "hashes", "asked", "mode"),
    [
        (None, False, True, "layerwise", "layerwise"),
        ("EAGLE", False, True, "layerwise", "eager"),
        (None, True, True, "layerwise", "eager"),
        ("EAGLE", True, True, "lazy", "lazy"),
        (None, False, False, "lazy", "eager"),
        (None, False, False, "layerwise", "layerwise"),
    ],
)
def test_where_a_mode_cannot_work_stores_are_eager(
    caplog: pytest.LogCaptureFixture,
    speculative: str | None,
    in_parts: bool,
    hashes: bool,
    asked: str,
    mode: str,
) -> None:
    config: Any = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(use_ubatching=in_parts),
        cache_config=SimpleNamespace(enable_prefix_caching=hashes),
    )
    assert possible_store_mode(asked, config) == mode
    assert ("stores are eager here" in caplog.text) == (asked != mode)


@pytest.mark.parametrize("setting", ["store.mode", "load.mode"])
def test_cuda_graphs_are_cut_where_layers_have_hooks(setting: str) -> None:
    assert FlexKVConnector.requires_piecewise_for_cudagraph({setting: "layerwise"})
    assert not FlexKVConnector.requires_piecewise_for_cudagraph({})
