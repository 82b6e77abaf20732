"""The live requests and their block tables, kept from what the engine says with each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flexkv.adapters.common.common_keys import COMMON
from flexkv.adapters.vllm.block_keys import EngineBlockKeys, TokenBlockKeys
from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.adapters.vllm.request import RequestTracker, wants_no_store
from flexkv.adapters.vllm.request_namespace import RequestNamespaces

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from flexkv.adapters.vllm.store_mode import StoreMode


class RequestTable:
    """Every request from its first lookup to its end.

    Args:
        scheme: `keys.scheme`.
    """

    def __init__(self, namespace: bytes, geometry: BlockGeometry, scheme: str) -> None:
        self._namespaces = RequestNamespaces(namespace)
        self._geometry = geometry
        self._keys = TokenBlockKeys if scheme == COMMON else EngineBlockKeys
        self._trackers: dict[str, RequestTracker] = {}

    def of(self, request: Request) -> RequestTracker:
        """The request's tracker; a new one where there is none."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            keys = self._keys(request, self._namespaces.of(request), self._geometry)
            tracker = RequestTracker(request, keys, wants_no_store(request))
            self._trackers[request.request_id] = tracker
        return tracker

    def get(self, request_id: str) -> RequestTracker | None:
        return self._trackers.get(request_id)

    def pop(self, request_id: str) -> RequestTracker | None:
        return self._trackers.pop(request_id, None)

    def __iter__(self) -> Iterator[RequestTracker]:
        return iter(self._trackers.values())

    def __len__(self) -> int:
        return len(self._trackers)

    def begin_lookup(self, tracker: RequestTracker, preempted: Callable[[RequestTracker], None]) -> None:
        """The engine asks what is cached of the request, so the request holds no block any more.

        After a reset with running requests the engine asks before a step names the preempted ones.

        Args:
            preempted: takes a request that has lost its blocks, while the tracker still knows them.
        """
        if tracker.block_ids:
            _lose(tracker, preempted)
        tracker.preemptions = tracker.request.num_preemptions

    def follow(
        self, output: SchedulerOutput, stores: StoreMode, preempted: Callable[[RequestTracker], None]
    ) -> None:
        """Keeps the block tables: O(new blocks).

        Args:
            stores: hears of requests that get new blocks.
            preempted: hears of requests that lose their blocks, while the tracker still knows them.
        """
        for request_id in output.preempted_req_ids or ():
            tracker = self.get(request_id)
            # A lookup may have come before the step that names the preemption: the table is then of other blocks.
            if tracker is not None and tracker.preemptions != tracker.request.num_preemptions:
                _lose(tracker, preempted)
        for new in output.scheduled_new_reqs:
            if tracker := self.get(new.req_id):
                _start(tracker, new.block_ids[0], stores)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is None:
                continue
            if tracker := self.get(request_id):
                if request_id in cached.resumed_req_ids:
                    _start(tracker, blocks[0], stores)
                else:
                    tracker.block_ids.extend(blocks[0])


def _lose(tracker: RequestTracker, preempted: Callable[[RequestTracker], None]) -> None:
    """The engine has taken the request's blocks."""
    preempted(tracker)
    tracker.restart()
    tracker.preemptions = tracker.request.num_preemptions


def _start(tracker: RequestTracker, block_ids: list[int], stores: StoreMode) -> None:
    """The request begins, or begins again, with this block table."""
    # What was loaded before a reset is still there; only losing the blocks ends that.
    stale = tracker.stale
    tracker.restart()
    tracker.stale = stale
    tracker.block_ids.extend(block_ids)
    stores.started(tracker)
