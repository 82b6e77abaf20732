"""flexkv's configuration: typed, validated and frozen.

Its sources, from the weakest to the strongest, are the defaults, the YAML file (FLEXKV_CONFIG), FLEXKV_* environment
variables, and the engine's extra config. Settings are read once, in one place, and passed on. No other part of flexkv
reads settings from the environment.
"""

from flexkv.config.blending import BlendConfig
from flexkv.config.engines import STEP_LOADS_NEED, without_effect
from flexkv.config.load import load_config
from flexkv.config.memory import MemoryState, read_memory, resolve_host_bytes
from flexkv.config.model import FlexKVConfig, SettingRow
from flexkv.config.sections import (
    DiskConfig,
    GdsConfig,
    HostConfig,
    IdentityConfig,
    IndexConfig,
    IoBackend,
    LoadConfig,
    ObserveConfig,
    PeersConfig,
    PluginsConfig,
    RemoteConfig,
    StoreConfig,
    TransferConfig,
)

__all__ = [
    "STEP_LOADS_NEED",
    "BlendConfig",
    "DiskConfig",
    "FlexKVConfig",
    "GdsConfig",
    "HostConfig",
    "IdentityConfig",
    "IndexConfig",
    "IoBackend",
    "LoadConfig",
    "MemoryState",
    "ObserveConfig",
    "PeersConfig",
    "PluginsConfig",
    "RemoteConfig",
    "SettingRow",
    "StoreConfig",
    "TransferConfig",
    "load_config",
    "read_memory",
    "resolve_host_bytes",
    "without_effect",
]
