"""Plans the remote tier from the settings, before its helper process is started."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

from flexkv.cache.tiers.contract import TierFacts, WriteMode
from flexkv.cache.tiers.disk.plan import disk_groups, image_needs
from flexkv.cache.tiers.plan import TierPlan, UnitFacts
from flexkv.cache.tiers.remote.tier import RemoteTier
from flexkv.cache.tiers.tables import TierFactory
from flexkv.observe import get_logger
from flexkv.remote.link import HelperLink
from flexkv.remote.messages import Setup
from flexkv.remote.plane import PlaneLimits, RemotePlane
from flexkv.remote.process import HelperProcess
from flexkv.remote.settings import client_environment, store_options, stuck_s
from flexkv.remote.values import ValueOwner
from flexkv.transfer.host_pool import HostPool

logger = get_logger(__name__)

START_WAIT_S = 15.0
"""Maximum time in seconds for which an engine's start waits until the store's client is loaded and the store has given
its first answer. Loading the client takes a fraction of a second."""

QUESTIONS = 64
"""Maximum number of questions to the store that are in flight; further requests continue without the store."""


WRITE_SHARE = 8
"""Pages that are being written to the store may occupy at most one host slot in this many."""


class RemotePlan(TierPlan):
    """The plan of the remote tier.

    Raises:
        ConfigError: a setting cannot be fulfilled; the message names the remedy.
    """

    shares_pool = True

    def __init__(self, unit: UnitFacts) -> None:
        self._unit = unit
        self._groups = disk_groups(unit)
        self._options = store_options(unit.config.remote)
        # The tier needs space in host slots only for run digests, with `host.verify`. Its trailers are not in host
        # slots.
        verify = unit.config.host.verify
        self.images = tuple(image_needs(group) for group in self._groups) if verify else ()

    def open(self, pool: HostPool, on_error: ExitStack) -> TierFactory:
        """Starts the helper process; see `TierPlan.open`.

        Raises:
            StoreError: no client of the store can be started with these settings.
        """
        config, remote = self._unit.config, self._unit.config.remote
        setup = Setup(
            options=self._options,
            owner=ValueOwner(self._unit.owner.namespace, remote.tenant),
            groups=tuple(self._groups),
            pool=pool.descriptor(),
            batch_pages=remote.batch_pages,
            get_s=remote.get_s,
            probe_s=remote.probe_s,
            put_bytes_per_s=remote.put_bytes_per_s,
            ttl_s=remote.ttl_s,
        )
        environment = client_environment(self._options)
        link = HelperLink(setup, lambda: HelperProcess(environment), stuck_s(remote), time.monotonic)
        limits = PlaneLimits(config.transfer.queue_ops, QUESTIONS, remote.probe_s, bool(remote.rdma_devices))
        plane = RemotePlane(link, limits, time.monotonic)
        on_error.callback(plane.close, config.transfer.close_s)
        link.start(START_WAIT_S)
        where = self._options.shown_urls
        if plane.down_reason:
            logger.warning(
                "remote tier: %s is not there, and is asked again now and then: %s", where, plane.down_reason
            )
        else:
            logger.info("remote tier: %s, written %s", where, remote.write)
        return partial(
            RemoteTier, facts=remote_facts(self._unit, pool.slots), probe_s=remote.probe_s, plane=plane
        )


def remote_facts(unit: UnitFacts, slots: int) -> TierFacts:
    """Returns the limits within which the unit reads and writes pages of the store.

    Args:
        slots: number of slots in the unit's host pool. A page that is being written cannot be evicted from the pool,
            however slow the store is. So the number of such pages is limited to a share of the slots.
    """
    config, remote = unit.config, unit.config.remote
    write_pages = min(remote.inflight_pages, max(remote.batch_pages, slots // WRITE_SHARE))
    return TierFacts(
        "remote",
        write=WriteMode(remote.write),
        write_pages=write_pages,
        fetch_pages=remote.inflight_pages,
        waiting_pages=config.store.inflight_pages,
        fetch_ops=max(1, config.transfer.queue_ops // 2),
        wait_s=remote.wait_s,
        write_at_close=False,
    )
