"""A store that machines share, behind host memory and disks."""

from __future__ import annotations

from flexkv.cache.tiers.plan import TierPlan, UnitFacts
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError


def plan_remote(unit: UnitFacts) -> TierPlan | None:
    """The plan of the remote tier; None without `remote.urls`, in which case nothing of the tier is imported.

    Raises:
        FlexKVError: the settings cannot be fulfilled.
    """
    if not unit.config.remote.urls:
        return None
    from flexkv.cache.tiers.remote.plan import RemotePlan

    return RemotePlan(unit)


def remote_faults(config: FlexKVConfig) -> list[ConfigError]:
    """Errors in the settings of the remote tier."""
    if config.remote.urls:
        from flexkv.remote.settings import store_options

        try:
            store_options(config.remote)
        except ConfigError as fault:
            return [fault]
    return []
