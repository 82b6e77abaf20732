"""The remote tier: a store that machines share, behind host memory and disks."""

from __future__ import annotations

from flexkv.cache.tiers.plan import TierPlan, UnitFacts
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError


def plan_remote(unit: UnitFacts) -> TierPlan | None:
    """Plans the remote tier. Without `remote.urls`, returns None and does not import the tier's modules.

    Raises:
        FlexKVError: the settings cannot be fulfilled.
    """
    if not unit.config.remote.urls:
        return None
    from flexkv.cache.tiers.remote.plan import RemotePlan

    return RemotePlan(unit)


def remote_faults(config: FlexKVConfig) -> list[ConfigError]:
    """Returns the errors in the settings of the remote tier."""
    if config.remote.urls:
        from flexkv.remote.settings import store_options

        try:
            store_options(config.remote)
        except ConfigError as fault:
            return [fault]
    return []
