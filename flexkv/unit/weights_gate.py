"""Keeps the tiers behind host memory out of use until the name of the engine's weights is known. The name is a digest
of the whole content of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flexkv.cache.base import TierId
from flexkv.cache.manager import LocalCacheManager
from flexkv.cache.tiers.contract import Tier
from flexkv.config import FlexKVConfig
from flexkv.observe import get_logger
from flexkv.weights.check import WeightsCheck
from flexkv.weights.files import WeightsContent
from flexkv.weights.table_folder import table_folder

logger = get_logger(__name__)

START_WAIT_S = 10.0
"""Maximum time for which an engine's start waits for the name of its weights. For files that were read before and have
not changed, the name is known at once. Other files are read, but the start waits only if they have at most
`SOON_BYTES`. Reading so few bytes takes less than a second unless the machine is busy.
"""

OPEN_S = 10.0
"""Maximum time for which all tiers together may remove pages that were computed with other weights. Host memory serves
requests meanwhile."""

OPEN_LOOK_S = 0.002
"""Seconds between two checks, at an engine's start, of whether the tiers have removed the pages of other weights."""

STOP_S = 1.0
"""Maximum time for which a close waits until the thread that reads the weights has finished its current read of 4 MiB.
A read that hangs ends only with the process."""

HELD = "the engine's weights are being read, to name them"


class WeightsGate:
    """Opens the tiers behind host memory after the weights' name is known. A tier that cannot open goes down without
    affecting the others.

    Until the tiers have opened, only host memory serves requests. Pages that are stored in host memory meanwhile go to
    the other tiers later. All calls come from the manager's thread. Only `of`, `start` and `close` wait.

    Args:
        check: computes the weights' name. None if nothing has to wait for the name, because the keys' namespace already
            contains it or there is no tier behind host memory.
    """

    def __init__(self, manager: LocalCacheManager, check: WeightsCheck | None) -> None:
        self._manager = manager
        self._check = check
        self._is_settled = check is None
        self._open_by_s: float | None = None
        """Time on the monotonic clock at which the tiers open at the latest; None before the first `_open`."""

    @classmethod
    def of(cls, config: FlexKVConfig, content: WeightsContent, manager: LocalCacheManager) -> WeightsGate:
        """Makes the gate of a new unit before its first use. Waits at most `START_WAIT_S` for the weights' name."""
        if content.is_named or len(manager.tiers) == 1:
            return cls(manager, None)
        for tier in manager.tiers[1:]:
            tier.hold(HELD)
        gate = cls(manager, WeightsCheck(content, table_folder(config.disk.folders)))
        gate.start()
        return gate

    @property
    def is_open(self) -> bool:
        """Whether the tiers behind host memory may be used."""
        return self._check is None or (self._is_settled and bool(self._check.digest))

    def start(self) -> None:
        """Begins to compute the weights' name. Opens the tiers if the name is known and the tiers are ready within
        `START_WAIT_S`. Otherwise a later `poll` opens the tiers.
        """
        assert self._check is not None
        ends_s = time.monotonic() + START_WAIT_S
        self._check.start(START_WAIT_S)
        while not self.poll() and self._open_by_s is not None and time.monotonic() < ends_s:
            time.sleep(OPEN_LOOK_S)

    def poll(self) -> bool:
        """Opens the tiers if the weights' name is known, or takes them down if it cannot be computed. Returns whether
        this call has opened the tiers or taken them down.
        """
        check = self._check
        if self._is_settled or check is None or check.pending:
            return False
        if check.digest:
            if not self._open(check.digest):
                return False
        else:
            for number in range(1, len(self._manager.tiers)):
                self._manager.work.take_down(
                    TierId(number), f"nothing names the engine's weights: {check.failure}"
                )
        self._is_settled = True
        return True

    def _open(self, weights: bytes) -> bool:
        """On the first call, makes the tiers begin to remove pages of other weights. Opens the tiers if these pages
        have been removed or `OPEN_S` has passed. Returns whether every tier is now open or down.
        """
        if self._open_by_s is None:
            self._open_by_s = time.monotonic() + OPEN_S
            self._each(lambda tier: _begin_open(tier, weights))
        waits = any(tier.opens for tier in self._manager.tiers[1:] if not tier.down)
        if waits and time.monotonic() < self._open_by_s:
            return False
        self._each(lambda tier: tier.open_for(weights))
        self._manager.work.opened()
        logger.info("the engine's weights are named %s: all tiers are in use", weights.hex()[:16])
        return True

    def _each(self, step: Callable[[Tier], None]) -> None:
        """Calls `step` for each tier behind host memory that is not down. If the call raises (because no thread can be
        started, for example), takes that tier down: the engine can do without it.
        """
        for number, tier in enumerate(self._manager.tiers):
            if not number or tier.down:
                continue
            try:
                step(tier)
            except Exception as error:
                logger.exception("opening the %s tier", tier.facts.name)
                self._manager.work.take_down(
                    TierId(number), f"it cannot be opened: {type(error).__name__}: {error}"
                )

    def close(self) -> None:
        """Stops the thread that reads the weights. Idempotent."""
        if self._check is not None:
            self._check.stop(STOP_S)


def _begin_open(tier: Tier, weights: bytes) -> None:
    if strange := tier.begin_open(weights):
        logger.warning(
            "the %s tier had %d pages that were computed with other weights, or nobody knows with which: they are not "
            "served, and their room is used anew",
            tier.facts.name,
            strange,
        )
