"""The transfer engine: a wrapper around the native transfer engine. It takes transfer graphs and returns each op's
`OpResult`.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flexkv import c_ext
from flexkv.errors import ContractError, GeometryError
from flexkv.transfer.base import DataPlane, LaneReport, LayerResult, Ticket
from flexkv.transfer.graph import OpId, OpKind, OpResult, OpStatus, TransferGraph
from flexkv.transfer.host_pool import HostPool
from flexkv.transfer.stream import StreamLike, optional_stream
from flexkv.transfer.ways_file import CopyWays

logger = logging.getLogger(__name__)

NO_DIGEST_AREA = -1
"""The digest offset that tells the native engine that slots have no digests."""

AT_EXIT_S = 2.0
"""At exit, the interpreter waits at most this many seconds for the copies in flight of all transfer engines together.
"""

_still_moving: dict[int, tuple[object, object]] = {}
"""Objects whose memory a transfer engine may still touch because its `close` returned False. If no later `close`
succeeds, they are never freed: a late DMA into reused memory would be worse than the leak.
"""

_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends copies while their memory still exists. Later, the interpreter's shutdown frees objects in any order."""
    deadline = time.monotonic() + AT_EXIT_S
    for engine in list(_engines):
        engine.close(max(0.0, deadline - time.monotonic()))
    for kept in _still_moving.values():
        # With one more reference, even the interpreter's shutdown does not free the object.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


class OnDevice(Protocol):
    """A tensor with an attribute `device`, such as torch's."""

    @property
    def device(self) -> Any: ...


def cuda_device_of(tensors: Sequence[OnDevice]) -> int | None:
    """Returns the CUDA device on which all of an engine's tensors lie; None if they lie in plain memory.

    Raises:
        GeometryError: the tensors lie on several devices, or on a kind of device that has no lanes.
    """
    devices = sorted({(str(tensor.device.type), tensor.device.index) for tensor in tensors}, key=str)
    if len(devices) != 1:
        raise GeometryError(f"the KV caches lie on {devices}: all of a rank's must lie on one device")
    kind, index = devices[0]
    if kind not in ("cpu", "cuda"):
        raise GeometryError(
            f"the KV caches lie on a device of kind {kind!r}: there are lanes for 'cpu' and 'cuda'"
        )
    return None if kind == "cpu" else int(index or 0)


def log_choices(device: int, lane: c_ext.CudaLane) -> None:
    """Logs how the lane copies to and from the GPU, and why it does not use other paths."""
    for direction, ways in lane.ways.items():
        logger.info("cuda:%d %s: %s", device, direction.upper(), ways)
    if lane.notes:
        logger.info("cuda:%d: %s", device, lane.notes)


class TransferEngine(DataPlane):
    """A `DataPlane` that runs graphs on the native scheduler and its lanes.

    Args:
        mover: copies the pages of host lanes; None for a `c_ext.HostMover`. A mover may call another mover to copy the
            pages.
        queue_ops: number of queue entries for each kind and priority of op.
        copy_threads: number of threads for host copies. Loads and stores share the threads, and loads come first. The
            threads are started on first use and sleep while idle.
        op_stuck_s: if an op makes no progress for this many seconds, its lane goes down; 0 for never.
        lanes: lanes for further kinds of ops, such as `Volumes.lane`. A lane serves one transfer engine.
        device: the CUDA device on which the engine's pools lie; None for plain memory. The device's lane has its own
            threads.
        batch_copies: whether the lane may pass many copies to the copy engine in one call. The lane also tests at start
            whether the driver can do this, and does so only if the test succeeds.
        copy_kernel: whether short runs may be copied by a CUDA kernel.
        ways: the lengths of runs that the CUDA kernel copies; None for the built-in lengths.
        digest_threads: number of threads that compute and check the digests of a CUDA device's pages, 1 to 16.
        current_stream: returns the engine's stream. Called when `submit`, `record`, `order_after` or `open_layers` gets
            no `stream`. None for plain memory.

    Raises:
        ConfigError: an argument is out of range, or there is no such device.
        ContractError: two lanes have the same kind, or a mover was given for a CUDA device.
    """

    def __init__(
        self,
        mover: c_ext.PageMover | None = None,
        queue_ops: int = 1024,
        copy_threads: int = 1,
        op_stuck_s: float = 30.0,
        lanes: Sequence[c_ext.Lane] = (),
        device: int | None = None,
        batch_copies: bool = True,
        copy_kernel: bool = True,
        ways: CopyWays | None = None,
        digest_threads: int = 4,
        current_stream: Callable[[], StreamLike] | None = None,
    ) -> None:
        if device is not None and mover is not None:
            raise ContractError("a mover serves plain memory: none beside a CUDA device")
        self._current_stream = current_stream
        self.device = device
        self.cuda_lane = None
        if device is not None:
            below = (None, None) if ways is None else (ways.load_kernel_below, ways.store_kernel_below)
            self.cuda_lane = c_ext.CudaLane(device, batch_copies, copy_kernel, digest_threads, *below)
            log_choices(device, self.cuda_lane)
        self.kernels_given_up = 0
        """The number of the lane's two CUDA kernels (one copies, the other waits) that failed to start and are no
        longer used.
        """
        self._kernel_notes = ""
        own = [] if self.cuda_lane is None else [self.cuda_lane]
        self._native = c_ext.TransferEngine(mover, queue_ops, copy_threads, op_stuck_s, [*own, *lanes])
        self._views = threading.Lock()
        """Guards the native core's views, `_owners` and `_detached`, which change together."""
        self._detached: dict[int, Sequence[object]] = {}
        self._down: dict[OpKind, str] = {}
        self._owners: dict[int, Sequence[object]] = {}
        _engines.add(self)

    def attach_view(
        self,
        group: int,
        view: c_ext.KvView,
        pool: HostPool,
        stripe_offset: int = 0,
        digest_offset: int | None = None,
        owners: Sequence[object] = (),
    ) -> None:
        """Makes ops of `group` copy between the blocks of `view` and this rank's stripe in `pool`'s slots.

        Args:
            stripe_offset: bytes from a slot's start to this rank's stripe, a multiple of 4 KiB.
            digest_offset: bytes from a slot's start to this rank's run digests (8 bytes per run), a multiple of 8.
                Stores then write the digests and loads check them. If None, pages are not verified.
            owners: objects that keep the engine's pool alive, such as arrays and tensors. They are held until no op
                can touch the pool any more.

        Raises:
            GeometryError: the stripe does not fit into the slot. Or a block of this view shares bytes with a block of
                another group's view, and the two blocks have different numbers.
            ContractError: the group already has a view.
            ClosedError: the transfer engine or the pool was closed.
        """
        with self._views:
            self._native.attach_view(
                group,
                view,
                pool.native,
                stripe_offset,
                NO_DIGEST_AREA if digest_offset is None else digest_offset,
            )
            self._owners[group] = tuple(owners)

    def detach_view(self, group: int) -> None:
        """Detaches the group's view. The view and its owners are freed after the results of all ops in flight that use
        the view have been polled.

        Raises:
            ContractError: the group has no view.
        """
        with self._views:
            number = self._native.detach_view(group)
            # `_owners` is empty if a concurrent close has already released the owners.
            self._detached[number] = self._owners.pop(group, ())
        self._drop_released()

    def _drop_released(self) -> None:
        with self._views:
            released = [self._detached.pop(number, ()) for number in self._native.released_views()]
        # The owners are freed after the lock is released, because their destructors may run arbitrary code.
        released.clear()

    def _native_stream(self, stream: StreamLike | None) -> int | None:
        """Returns the `cudaStream_t` of `stream`, or that of the current stream if `stream` is None."""
        if stream is None and self._current_stream is not None:
            stream = self._current_stream()
        return optional_stream(stream)

    def submit(
        self,
        graph: TransferGraph,
        stream: StreamLike | None = None,
        gated: bool = False,
        after: c_ext.StreamPoint | None = None,
    ) -> Ticket | None:
        ticket = self._native.submit(graph.ops, graph.edges, self._native_stream(stream), gated, after)
        return None if ticket is None else Ticket(ticket)

    def record(self, stream: StreamLike | None = None) -> c_ext.StreamPoint | None:
        native = self._native_stream(stream)
        return None if native is None else self._native.record(native)

    def order_after(self, ticket: Ticket, deadline_s: float, stream: StreamLike | None = None) -> bool:
        return self._native.order_after(ticket, deadline_s, self._native_stream(stream))

    def open_layers(self, tickets: Sequence[Ticket], layers: int, stream: StreamLike | None = None) -> None:
        self._native.open_layers(tickets, layers, self._native_stream(stream))

    def poll(self, max_results: int = 1024) -> list[OpResult]:
        if max_results < 1:
            raise ContractError(f"poll(max_results={max_results}): must be at least 1")
        results = [
            OpResult(OpId(r.op_id), OpStatus(r.status), r.failed, r.reason, r.digests, r.causes)
            for r in self._native.poll(max_results)
        ]
        if results and self._detached:
            self._drop_released()
        if results and (self._down or any(result.status is OpStatus.LANE_DOWN for result in results)):
            self._log_lanes()
        if results and self.cuda_lane is not None:
            self._log_kernels(self.cuda_lane)
        return results

    def _log_kernels(self, lane: c_ext.CudaLane) -> None:
        """Logs, once for each of the two CUDA kernels (one copies, the other waits), that the kernel could not be
        started.
        """
        if lane.failed_launches > 0 and lane.notes != self._kernel_notes:
            self._kernel_notes = lane.notes
            self.kernels_given_up += 1
            logger.warning("cuda:%s: %s", self.device, lane.notes)

    def _log_lanes(self) -> None:
        """Logs which lanes went down or came up since the last call."""
        down = {lane.kind: lane.reason for lane in self.lanes() if not lane.up}
        for kind, reason in down.items():
            if kind not in self._down:
                logger.warning("%s; its ops end as LANE_DOWN until the copy that hangs has ended", reason)
        for kind in self._down.keys() - down.keys():
            logger.warning("lane %s is up again", kind.name)
        self._down = down

    @property
    def event_fd(self) -> int:
        return self._native.event_fd

    def wait(self, ticket: Ticket, deadline_s: float) -> bool:
        return self._native.wait(ticket, deadline_s)

    def wait_layer(
        self, ticket: Ticket, layer: int, deadline_s: float, stream: StreamLike | None = None
    ) -> LayerResult:
        in_time, failed = self._native.wait_layer(ticket, layer, deadline_s, optional_stream(stream))
        return LayerResult(in_time, {OpId(op_id): pages for op_id, pages in failed})

    def cancel(self, ticket: Ticket) -> int:
        return self._native.cancel(ticket)

    def lanes(self) -> list[LaneReport]:
        return [
            LaneReport(OpKind(kind), lane, up, reason, open_ops, held, tuple(OpId(i) for i in stuck), downs)
            for kind, lane, up, reason, open_ops, held, stuck, downs in self._native.lanes()
        ]

    def close(self, deadline_s: float) -> bool:
        if not self._native.close(deadline_s):
            self._keep_for_good()
            return False
        _still_moving.pop(id(self._native), None)
        with self._views:
            owners = [*self._owners.values(), *self._detached.values()]
            self._owners.clear()
            self._detached.clear()
        owners.clear()
        return True

    def _keep_for_good(self) -> None:
        with self._views:
            owners = [*self._owners.values(), *self._detached.values()]
        _still_moving[id(self._native)] = (self._native, owners)

    def __del__(self) -> None:
        # If copies of an engine that was not closed are still running, the memory that they touch is kept, not freed.
        if hasattr(self, "_owners") and not self._native.close(0.0):
            self._keep_for_good()
