"""A store that machines share, behind host memory and disks."""

from __future__ import annotations

from flexkv.cache.tiers.plan import TierPlan, UnitFacts


def plan_remote(unit: UnitFacts) -> TierPlan | None:
    """None without `remote.urls`: nothing of the remote tier is imported then.

    Raises:
        FlexKVError: the settings say what cannot be had.
    """
    if not unit.config.remote.urls:
        return None
    from flexkv.cache.tiers.remote.plan import RemotePlan

    return RemotePlan(unit)
