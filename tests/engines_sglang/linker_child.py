"""Calls flexkv's linker directly, with SGLang's own pool, transfers and wrapper. The cases cannot be produced in a
running engine.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper

from flexkv import c_ext
from flexkv.adapters.sglang import linker as linker_module
from flexkv.adapters.sglang.identity import Place
from flexkv.adapters.sglang.linker import FlexKVLinker
from flexkv.errors import ClosedError, DiskError
from flexkv.facts.ranks import UnitOwner
from flexkv.transfer.base import Ticket
from flexkv.transfer.graph import OpKind
from tests import testing_ext
from tests.engines_sglang.pool_child import PAGE_TOKENS, hashes_of, make_pool, page, tensors_of

DONE_S = 60.0
NOISE_BYTE = 0x41
ALONE = Place("dp0.pp0of1.tp0of1", 1, True)


def make_linker(
    kind: type[FlexKVLinker],
    pool: Any,
    stream: Any = None,
    params: Any = None,
    place: Any = ALONE,
    **settings: Any,
) -> FlexKVLinker:
    """Makes a linker over the pool.

    Args:
        stream: the stream of the engine's forward; None if the forward has no stream of its own.
        params: parameters of the engine's tree; None for parameters that suffice for a linker without a tree.
        place: the `Place` of the rank.
    """
    vars(linker_module).update(
        owner_of=lambda *_: UnitOwner("pool", b"l" * 32, "tp0"),
        prompt_limit=lambda _: None,
        Place=SimpleNamespace(of_this_process=lambda: place),
    )
    params = params or SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        page_size=PAGE_TOKENS,
        mtp_draft_device_pools=(),
        sidecar_draft_device_pools=(),
        attn_cp_size=1,
        enable_kv_cache_events=False,
    )
    return kind(
        SimpleNamespace(),
        params,
        components=[ComponentType.FULL],
        extra_config={"host.bytes": 4 << 20} | settings,
        forward_stream=stream,
    )


def transfers(names: str, *pages: int) -> list[PoolTransfer]:
    """Makes a transfer of pages, one page per letter of `names`. `pages` are page numbers in the pool; a transfer for a
    lookup has none.
    """
    slots = [torch.arange(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS) for number in pages]
    indices = torch.cat(slots) if slots else None
    return [PoolTransfer(name=PoolName.KV, keys=hashes_of(*names), device_indices=indices)]


def spoil(pool: Any) -> list[bytes]:
    """Overwrites the pool. Returns the content that a page then has."""
    for tensor in tensors_of(pool):
        tensor.view(torch.uint8).fill_(NOISE_BYTE)
    return page(pool, 1)


def fill(pool: Any) -> None:
    for tensor in tensors_of(pool):
        tensor.view(torch.uint8).random_(0, 256)


def offload(linker: FlexKVLinker, names: str, *pages: int) -> list[bool]:
    """Offloads pages and waits for the end. Returns two values: whether the linker accepted the offload, and whether
    the pages were stored.
    """
    taken = linker.offload(transfers(names, *pages))
    assert linker._cache.quiesce(DONE_S)
    assert linker.num_completed_offloads() == 1
    return [taken, linker.pop_completed_offload()]


def run_loads(linker: FlexKVLinker) -> bool:
    """Starts the queued loads and waits for each layer. Returns whether all pages were loaded."""
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(linker.layer_done_counter.num_layers):
        linker.layer_done_counter.wait_until(layer)
    return linker.finish_layer_wise_loading(index)


def cancelled() -> dict[str, Any]:
    """Cancels one of two queued loads through SGLang's wrapper. SGLang does this for a request that is aborted before
    its batch starts.
    """
    pool = make_pool("mha fp16")
    linker = make_linker(FlexKVLinker, pool)
    fill(pool)
    before = [page(pool, 2), page(pool, 5)]
    offload(linker, "ab", 2, 5)
    noise = spoil(pool)
    tree = SimpleNamespace(
        tree_components=(ComponentType.FULL,),
        components={},
        _components_tuple=(),
        tree_core=SimpleNamespace(),
    )
    wrapper = UnifiedCacheLinkerWrapper(tree, linker)
    for rid, pages in (("gone", (8, 4)), ("stays", (7, 3))):
        assert linker.lookup(rid, transfers("ab")) == [1, 2]
        assert linker.load(rid, transfers("ab", *pages))
        wrapper.inflight_load_rids.append(rid)
    wrapper.release_request("gone")
    leased = linker._cache.manager.leased_pages("gone")
    again = linker.cancel_queued_load("gone")
    landed = run_loads(linker)
    started = linker.cancel_queued_load("stays")
    found = {
        "left": wrapper.inflight_load_rids,
        "leased": leased,
        "again": again,
        "after its start": started,
        "landed": landed,
        "loaded": [page(pool, 7), page(pool, 3)] == before,
        "untouched": all(page(pool, number) == noise for number in (0, 1, 2, 4, 5, 6, 8, 9)),
    }
    # If a batch's only load is cancelled, the linker starts nothing.
    assert linker.lookup("alone", transfers("ab")) == [1, 2]
    linker.load("alone", transfers("ab", 8, 4))
    linker.cancel_queued_load("alone")
    found["batch of none"] = linker.start_layer_wise_loading()
    # A control: a load that is not cancelled writes these pages.
    linker.lookup("control", transfers("ab"))
    linker.load("control", transfers("ab", 8, 4))
    found["control"] = run_loads(linker) and [page(pool, 8), page(pool, 4)] == before
    linker._cache.manager.check_integrity()
    linker.close()
    return found


def never_refused() -> dict[str, Any]:
    """Offloads when no slot is free, and loads a page that is not stored. The linker accepts these two calls, and they
    fail only at their completion. If one rank refused a call, it would diverge from the other ranks.
    """
    pool = make_pool("mha fp16")
    fill(pool)
    linker = make_linker(FlexKVLinker, pool, **{"host.bytes": 64 << 10, "host.extent_bytes": 2 << 20})
    room = linker._cache._unit.slots
    stored = [offload(linker, letter, 1) for letter in "abcdefgh"[:room]]
    assert linker.lookup("keeps", transfers("abcdefgh"[:room])) == list(range(1, room + 1))
    full = offload(linker, "z", 2)
    taken = linker.load("never promised", transfers("y", 3))
    landed = run_loads(linker)
    linker.close()
    return {"stored": stored, "full": full, "taken": taken, "landed": landed}


def reset() -> dict[str, Any]:
    """Resets the linker while a load is queued and an offload is in flight."""
    pool = make_pool("mha fp16")
    linker = make_linker(FlexKVLinker, pool)
    fill(pool)
    offload(linker, "ab", 2, 5)
    linker.lookup("queued", transfers("ab"))
    linker.load("queued", transfers("ab", 7, 3))
    linker.offload(transfers("c", 6))
    linker.reset()
    found = {
        "completed": linker.num_completed_offloads(),
        "batch": linker.start_layer_wise_loading(),
        "leased": linker._cache.manager.leased_pages("queued"),
        "still stored": linker.lookup("later", transfers("ab")),
    }
    linker.close()
    return found


def new_weights(kind: type[FlexKVLinker]) -> dict[str, Any]:
    """Stores a page after the weights have changed and before the engine's tree is emptied. SGLang does this for a
    request that runs meanwhile, or whose prefix is in the tree. Returns which pages a lookup finds afterwards.
    """
    pool = make_pool("mha fp16")
    linker = make_linker(kind, pool)
    fill(pool)
    updater = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    updater.metrics_collector = None
    offload(linker, "a", 2)
    with updater._observe_weight_load("disk"):
        pass
    offload(linker, "b", 5)
    found = {"before": linker.lookup("1", transfers("a")), "between": linker.lookup("2", transfers("b"))}
    linker.reset()
    found["between, after the flush"] = linker.lookup("3", transfers("b"))
    offload(linker, "c", 6)
    linker.reset()
    found["after"] = linker.lookup("4", transfers("c"))
    linker.close()
    return found


class Trusting(FlexKVLinker):
    """A control: a linker that treats every stored page as a page of the current weights."""

    def reset(self) -> None:
        self._settle()


def written_by_rdma() -> dict[str, Any]:
    """Begins and ends an update in which other programs write the weights without a call to SGLang. Before the begin
    and before the end, stores a page. Returns what lookups of this page find before and after the call.
    """
    pool = make_pool("mha fp16")
    linker = make_linker(FlexKVLinker, pool)
    fill(pool)
    updater = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    updater._session, updater.tp_worker, updater.draft_worker = None, MagicMock(), None
    updater.tp_worker.weight_update_runners.return_value = []
    updater.tp_cpu_group = None
    found = {}
    with patch.object(torch.distributed, "barrier"):
        for name, call in (("a", updater.begin_weight_update), ("b", updater.end_weight_update)):
            offload(linker, name, 2)
            before = linker.lookup("before", transfers(name))
            assert call(SimpleNamespace(selector="all")).success
            found[call.__name__] = [before, linker.lookup("after", transfers(name))]
    linker.close()
    return found


class Stalling(FlexKVLinker):
    """A linker whose copies from the pool wait until `mover.release()` is called."""

    def make_mover(self) -> Any:
        stall = testing_ext.FaultRule(2, kind=int(OpKind.D2H))
        self.mover = testing_ext.FaultyMover(c_ext.HostMover(), [stall])
        return self.mover


def released(hooked: bool, ends: bool = True) -> dict[str, Any]:
    """Releases the pool's memory with SGLang's own code while an offload is in flight.

    Args:
        hooked: whether flexkv's hook is in place; False for a control.
        ends: whether the offload ends while the hook waits for it.
    """
    pool = make_pool("mha fp16")
    settings = {} if ends else {"transfer.stuck_s": 0.2}
    linker = make_linker(Stalling, pool, **settings)
    fill(pool)
    linker.offload(transfers("a", 2))
    assert linker.mover.wait_stalled(1, DONE_S)
    moving: list[int] = []

    def pause(tag: str) -> None:
        linker._cache.take_results()
        moving.append(len(linker._cache._watchers))

    unregistered: list[int] = []
    linker._cache.end_registrations = lambda: unregistered.append(len(moving))  # type: ignore[method-assign]
    manager = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    manager.scheduler, manager.offload_tags = None, set()
    manager.memory_saver_adapter = SimpleNamespace(pause=pause)
    manager.is_fully_idle = lambda ignore_waiting: True
    manager.flush_cache = lambda: True
    release = SchedulerWeightUpdaterManager.release_memory_occupation
    if ends and hooked:
        threading.Timer(0.3, linker.mover.release).start()
    found: dict[str, Any] = {}
    try:
        (release if hooked else release.__wrapped__)(manager, SimpleNamespace(tags=["kv_cache"]))
    except ClosedError as error:
        found["refused"] = str(error)
    found |= {"moving": moving, "unregistered before releases": unregistered}
    linker.mover.release()
    linker.reset()
    found["stored"] = linker.lookup("later", transfers("a"))
    linker.close()
    return found


class Stream:
    """A stand-in for a device's stream. Its work runs only when a caller waits for the stream."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self._work: deque[Callable[[], None]] = deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def drain(self) -> None:
        while self._work:
            self._work.popleft()()


class EagerLanes:
    """Wraps lanes so that a copy runs as early as possible. If it has a fence, it first runs the work of the fence's
    stream.
    """

    def __init__(self, lanes: Any, *streams: Stream) -> None:
        self._lanes = lanes
        self._streams = {stream.cuda_stream: stream for stream in streams}
        self.waits: list[int | None] = []

    def record(self, stream: int | None) -> int | None:
        return stream

    def submit(self, graph: Any, gated: bool = False, after: int | None = None) -> Ticket:
        if after is not None:
            self._streams[after].drain()
        ticket: Ticket = self._lanes.submit(graph)
        assert self._lanes.wait(ticket, DONE_S)
        return ticket

    def wait_layer(self, ticket: Ticket, layer: int, deadline_s: float, stream: int | None = None) -> Any:
        self.waits.append(stream)
        return self._lanes.wait_layer(ticket, layer, deadline_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lanes, name)


class Forgetful(FlexKVLinker):
    """A control: a linker that ignores the stream of the forward pass."""

    def _writer_stream(self) -> int | None:
        return self._cache.current_stream()


def fenced(kind: type[FlexKVLinker], with_forward_stream: bool = True) -> dict[str, Any]:
    """Stores and loads pages while a forward pass is enqueued and has not run. The store must copy the KV that the
    forward pass writes, and the forward pass must not read the bytes of the load.
    """
    pool = make_pool("mha fp16")
    current, forward = Stream(5), Stream(7)
    linker = make_linker(kind, pool, forward if with_forward_stream else None)
    # The linker must behave as it does on a device.
    linker._cache.device = 0
    linker._cache._current_stream = lambda device: current.cuda_stream
    lanes = linker._cache._ops.engine = EagerLanes(linker._cache._ops.engine, current, forward)
    writer = forward if with_forward_stream else current

    fill(pool)
    written = page(pool, 2)
    spoil(pool)

    def forward_writes() -> None:
        for tensor, content in zip(tensors_of(pool), written, strict=True):
            rows = tensor[2 * PAGE_TOKENS : 3 * PAGE_TOKENS]
            rows.view(torch.uint8).copy_(
                torch.frombuffer(bytearray(content), dtype=torch.uint8).view_as(rows.view(torch.uint8))
            )

    writer.enqueue(forward_writes)
    offload(linker, "a", 2)
    writer.drain()
    seen: list[list[bytes]] = []
    for tensor in tensors_of(pool):
        tensor[7 * PAGE_TOKENS : 8 * PAGE_TOKENS].view(torch.uint8).fill_(NOISE_BYTE + 1)
    old = page(pool, 7)
    writer.enqueue(lambda: seen.append(page(pool, 7)))
    linker.lookup("r", transfers("a"))
    linker.load("r", transfers("a", 7))
    landed = run_loads(linker)
    writer.drain()
    found = {
        "landed": landed,
        "stored what was written": page(pool, 7) == written,
        "read before the load": seen == [old],
        "layers wait on": list(set(lanes.waits)),
    }
    linker.close()
    return found


def refused_late() -> dict[str, Any]:
    """Makes a linker that flexkv cannot hook into SGLang, then a linker that works in the same folder."""
    pool = make_pool("mha fp16")
    found: dict[str, Any] = {}

    def cannot_hook(*_: object) -> Any:
        raise RuntimeError("no such hook")

    with tempfile.TemporaryDirectory() as folder:
        settings = {"disk.folders": folder, "disk.bytes_per_folder": 4 << 20}
        original = vars(linker_module)["watch"]
        vars(linker_module)["watch"] = cannot_hook
        try:
            make_linker(FlexKVLinker, pool, **settings)
        except RuntimeError as error:
            # the error's traceback keeps the linker alive, and all objects that the linker refers to
            kept = error
            found["refused"] = str(kept)
        vars(linker_module)["watch"] = original
        linker = make_linker(FlexKVLinker, pool, **settings)
        found["works"] = offload(linker, "a", 2)
        try:
            make_linker(FlexKVLinker, pool, **settings)
        except DiskError as error:
            found["control"] = str(error)
        linker.close()
    return found


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "cancelled", cancelled()
    yield "never refused", never_refused()
    yield "reset", reset()
    yield "new weights", new_weights(FlexKVLinker)
    yield "control: new weights", new_weights(Trusting)
    yield "written by RDMA", written_by_rdma()
    yield "released", released(hooked=True)
    yield "released without the hook", released(hooked=False)
    yield "released under a copy that hangs", released(hooked=True, ends=False)
    yield "refused late", refused_late()
    yield "fenced", fenced(FlexKVLinker)
    yield "fenced with one stream", fenced(FlexKVLinker, with_forward_stream=False)
    yield "control without the fence", fenced(Forgetful)
