"""A store that machines share, behind host memory and disks."""

from __future__ import annotations

from flexkv.cache.tiers.plan import TierPlan, UnitFacts
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError


def plan_remote(unit: UnitFacts) -> TierPlan | None:
    """None without `remote.urls`: nothing of the remote tier is imported then.

    Raises:
        FlexKVError: the settings say what cannot be had.
    """
    if not unit.config.remote.urls:
        return None
    from flexkv.cache.tiers.remote.plan import RemotePlan

    return RemotePlan(unit)


def remote_faults(config: FlexKVConfig) -> list[ConfigError]:
    """Settings of the remote tier that cannot be had."""
    if config.remote.urls:
        from flexkv.remote.settings import store_options

        try:
            store_options(config.remote)
        except ConfigError as fault:
            return [fault]
    return []
