"""Operations on an engine that shares pages with another, and whose scheduler runs in this process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from demo.engine_child import Operation
from flexkv.cache.tiers.live.tier import LivePeerTier
from flexkv.peers import pool_reader

GONE_S = 30.0


def _tiers(llm: Any) -> list[LivePeerTier]:
    unit = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit
    return [tier for tier in unit.manager.tiers if isinstance(tier, LivePeerTier)]


def peers(llm: Any) -> dict[str, Any]:
    """How many pages of peers are known, by tier, and what each peer was asked for."""
    known: dict[str, int] = {}
    for tier in _tiers(llm):
        tier.take_news(1 << 20)
        known[tier.facts.name] = len(tier.presence)
    return {"known": known, "peers": _tiers(llm)[0]._share.peers()}  # type: ignore[attr-defined]


def kill_in_copy(llm: Any) -> dict[str, Any]:
    """From now on, the first copy of several pages kills the process of the only peer when some of the pages have come,
    and goes on once the peer has been forgotten."""
    (tier,) = _tiers(llm)
    share: Any = tier._share
    reader: Any = tier.plane
    pool_reader.PAGES_AT_ONCE = 4
    directory = reader._directory

    class Killing:
        calls = 0

        def bring(self, *asked: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                (row,) = share.peers()
                os.kill(row["pid"], signal.SIGKILL)
                ends_s = time.monotonic() + GONE_S
                while share.joined and time.monotonic() < ends_s:
                    time.sleep(0.01)
            return directory.bring(*asked)

    reader._directory = Killing()
    return {}


OPERATIONS: dict[str, Operation] = {"peers": peers, "kill_in_copy": kill_in_copy}
