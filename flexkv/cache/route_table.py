"""The routes of one manager by kind of op: what loads a promise, and where a store goes."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.cache.disk.flow import DiskFlow
from flexkv.cache.host_loads import HostLoads
from flexkv.cache.host_stores import HostStores
from flexkv.cache.inflight import InflightOp
from flexkv.cache.leases import Lease
from flexkv.cache.routes import LoadRoute, StoreRoute
from flexkv.transfer.graph import BlockIds, OpKind, TransferOp


class RouteTable:
    """Through host memory always; straight from and to the disks where the tier has routes for that.

    Args:
        disk: the traffic with the disks behind the host tier; None where there are none.
    """

    def __init__(self, loads: HostLoads, stores: HostStores, disk: DiskFlow | None) -> None:
        self._disk = disk
        self._loads: dict[OpKind, LoadRoute] = {OpKind.H2D: loads}
        self._stores: dict[OpKind, StoreRoute] = {OpKind.D2H: stores}
        if disk is not None and disk.gds_loads is not None:
            self._loads[OpKind.GDS_READ] = disk.gds_loads
        if disk is not None and disk.gds_stores is not None:
            self._stores[OpKind.GDS_WRITE] = disk.gds_stores

    def release(self, lease: Lease) -> None:
        """Ends a lease whose promise is not loaded."""
        for group in lease.groups:
            for route in self._loads.values():
                route.release(group)

    def begin_load(
        self, request_id: str, lease: Lease, targets: Sequence[BlockIds], epoch: int
    ) -> list[TransferOp]:
        """`LoadRoute.begin` of all routes: each serves the part of the promise that lies in its tier."""
        return [op for route in self._loads.values() for op in route.begin(request_id, lease, targets, epoch)]

    def load(self, op: InflightOp) -> LoadRoute:
        """The route that planned a load."""
        return self._loads[op.kind]

    def store(self, op: InflightOp) -> StoreRoute:
        """The route that planned a store."""
        return self._stores[op.kind]

    @property
    def for_stores(self) -> StoreRoute:
        """Where stores go now."""
        to_disk = OpKind.GDS_WRITE in self._stores and self._disk is not None and not self._disk.down
        return self._stores[OpKind.GDS_WRITE if to_disk else OpKind.D2H]
