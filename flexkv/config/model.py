"""The complete configuration, and where each of its values came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import PrivateAttr
from pydantic.fields import FieldInfo

from flexkv.config.blending import BlendConfig
from flexkv.config.names import environment_name, unknown_setting
from flexkv.config.sections import (
    DiskConfig,
    GdsConfig,
    HostConfig,
    IdentityConfig,
    IndexConfig,
    KeysConfig,
    LoadConfig,
    ObserveConfig,
    PeersConfig,
    PluginsConfig,
    RemoteConfig,
    Section,
    StoreConfig,
    TransferConfig,
)

DEFAULT_ORIGIN = "default"


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as `flexkv config show` prints it."""

    key: str
    value: Any
    origin: str
    environment_name: str
    description: str


class FlexKVConfig(Section):
    """All settings of one flexkv instance. `load_config` makes it; it is frozen and can be pickled."""

    host: HostConfig = HostConfig()
    store: StoreConfig = StoreConfig()
    load: LoadConfig = LoadConfig()
    transfer: TransferConfig = TransferConfig()
    disk: DiskConfig = DiskConfig()
    remote: RemoteConfig = RemoteConfig()
    gds: GdsConfig = GdsConfig()
    index: IndexConfig = IndexConfig()
    keys: KeysConfig = KeysConfig()
    blend: BlendConfig = BlendConfig()
    identity: IdentityConfig = IdentityConfig()
    plugins: PluginsConfig = PluginsConfig()
    peers: PeersConfig = PeersConfig()
    observe: ObserveConfig = ObserveConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def with_origins(cls, values: dict[str, dict[str, object]], origins: dict[str, str]) -> FlexKVConfig:
        """Makes a configuration from `values` (by section, then by field) and the origin of each given dotted key."""
        config = cls.model_validate(values)
        config._origins.update(origins)
        return config

    def origin(self, key: str) -> str:
        """Returns where the value of a dotted key came from: "default", "file X line N", "env NAME" or "engine extra
        config".

        Raises:
            ConfigError: there is no such setting.
        """
        if key not in setting_fields():
            raise unknown_setting(key, "origin()", setting_fields())
        return self._origins.get(key, DEFAULT_ORIGIN)

    def given(self, key: str) -> bool:
        """Returns whether any source sets the dotted key.

        Raises:
            ConfigError: there is no such setting.
        """
        return self.origin(key) != DEFAULT_ORIGIN

    def replaced(self, values: Mapping[str, Any]) -> FlexKVConfig:
        """Returns a copy with different values for some dotted keys. The values are not checked, and the keys keep
        their origins."""
        config = self
        for key, value in values.items():
            section, name = key.split(".")
            changed = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: changed})
        return config

    def rows(self) -> Iterator[SettingRow]:
        """Yields every setting with its value and origin, in the order of the sections."""
        for key, field in setting_fields().items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            yield SettingRow(key, value, self.origin(key), environment_name(key), field.description or "")


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in FlexKVConfig.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
"""Maps each section's name to the section's pydantic model."""


def setting_fields() -> dict[str, FieldInfo]:
    """Returns the pydantic field of every setting, by the setting's dotted key."""
    return {
        f"{section}.{name}": field
        for section, model in SECTIONS.items()
        for name, field in model.model_fields.items()
    }
