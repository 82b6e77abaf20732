"""Operations on an engine that shares pages with another engine. Its scheduler runs in this process.

If PEER_PROTOCOL is set, the engine uses that version of the protocol with its peers, as a later release would do.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from demo.engine_child import Operation
from flexkv.cache.tiers.running_peers.tier import LivePeerTier
from flexkv.peers import card, pool_reader
from flexkv.peers import share as peer_share

GONE_S = 30.0

if version := os.environ.get("PEER_PROTOCOL"):
    for module in (card, peer_share):
        assert "PROTOCOL" in vars(module)
        vars(module)["PROTOCOL"] = int(version)


def _tiers(llm: Any) -> list[LivePeerTier]:
    unit = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit
    return [tier for tier in unit.manager.tiers if isinstance(tier, LivePeerTier)]


def host_pages(llm: Any) -> dict[str, Any]:
    """Returns the number of pages in host memory, including copies of peers' pages."""
    unit = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.unit
    return {"pages": unit.manager.cached_blocks()}


def kill_peer(llm: Any) -> dict[str, Any]:
    """Kills the process of the only peer, and waits until this unit does not follow the peer any longer."""
    share: Any = _tiers(llm)[0]._share
    (row,) = share.peers()
    os.kill(row["pid"], signal.SIGKILL)
    ends_s = time.monotonic() + GONE_S
    while share.joined and time.monotonic() < ends_s:
        time.sleep(0.01)
    return {"joined": share.joined}


def peers(llm: Any) -> dict[str, Any]:
    """Returns two results: how many pages of peers each tier knows, and the unit's counts for each peer."""
    known: dict[str, int] = {}
    for tier in _tiers(llm):
        tier.take_all_news(1 << 20)
        known[tier.facts.name] = len(tier.presence)
    return {"known": known, "peers": _tiers(llm)[0]._share.peers()}  # type: ignore[attr-defined]


def declined(llm: Any) -> dict[str, Any]:
    """Returns this unit's id, and the ids of the units that it has found but with which it does not share pages."""
    share: Any = _tiers(llm)[0]._share
    return {"unit": share._card.unit, "declined": list(share._watch._again_s)}


def kill_in_copy(llm: Any) -> dict[str, Any]:
    """Makes the next copies from the only peer fail half-way. A copy moves four pages at a time: before it moves the
    second four, it kills the peer's process, and waits until this unit does not follow the peer any longer.
    """
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


OPERATIONS: dict[str, Operation] = {
    "peers": peers,
    "host_pages": host_pages,
    "kill_peer": kill_peer,
    "kill_in_copy": kill_in_copy,
    "declined": declined,
}
