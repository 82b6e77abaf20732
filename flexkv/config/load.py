"""Reads all sources of settings, checks them and merges them. The engine's extra config overrides the environment, the
environment overrides the YAML file, and the file overrides the defaults."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from flexkv.config.expected import expected
from flexkv.config.model import SECTIONS, FlexKVConfig, setting_fields
from flexkv.config.names import ALIASES, environment_name, shown, unknown_setting
from flexkv.config.sources import (
    CONFIG_FILE_VARIABLE,
    ENVIRONMENT_ORIGIN,
    EXTRA_ORIGIN,
    RawSetting,
    read_environment,
    read_mapping,
    read_yaml,
)
from flexkv.errors import ConfigError

ALTERNATIVES = ("host.bytes", "host.bytes_per_rank")
"""Two settings for the size of the host tier. A source may give only one of them. If it gives one, both settings of
weaker sources are dropped."""

NEEDED_BESIDE = {
    "disk.gds_stores": (("disk.gds", "on"), ("disk.mode", "through"), ("store.mode", "eager")),
    "disk.gds_may_fail_requests": (("disk.gds", "on"),),
}
"""Maps a setting to the values that other settings must have if this setting is on."""

Layer = dict[str, tuple[object, str]]
"""One source's settings: maps each dotted key to (checked value, origin)."""


def load_config(
    extra: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> FlexKVConfig:
    """Reads the configuration from every source.

    Args:
        extra: the engine's extra config (vLLM: `kv_connector_extra_config`), with dotted keys, nested sections or
            aliases; None if there is none.
        environ: the environment variables; None for `os.environ`.

    Raises:
        ConfigError: a name is unknown, or a value is not allowed. The message contains the setting, its source, its
            value, and what is allowed or the nearest known name. All faults are reported together. Every value is
            checked, even if a stronger source overrides it. Requirements between settings are checked on the merged
            values.
    """
    environ = os.environ if environ is None else environ
    variables = {environment_name(name): name for name in (*setting_fields(), *ALIASES)}
    faults: list[ConfigError] = []
    layers: list[Layer] = []
    if CONFIG_FILE_VARIABLE in environ:
        layers.append(_check_layer(read_yaml(_config_file(environ[CONFIG_FILE_VARIABLE])), faults))
    layers.append(_check_layer(read_environment(environ, variables), faults))
    layers.append(_check_layer(read_mapping({} if extra is None else extra, EXTRA_ORIGIN), faults))
    if faults:
        raise _together(faults)

    merged: Layer = {}
    for layer in layers:
        if any(layer.get(key, (None, ""))[0] is not None for key in ALTERNATIVES):
            for key in ALTERNATIVES:
                merged.pop(key, None)
        merged.update(layer)
    values: dict[str, dict[str, object]] = {}
    for key, (value, _) in merged.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    config = FlexKVConfig.with_origins(values, {key: origin for key, (_, origin) in merged.items()})
    if unmet := _unmet_needs(config):
        raise _together(unmet)
    return config


def _config_file(text: str) -> Path:
    if not text.strip():
        raise ConfigError(f"{CONFIG_FILE_VARIABLE} is set and empty: expected the path of a YAML file")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{CONFIG_FILE_VARIABLE}={text!r}: {error}") from error


def _together(faults: list[ConfigError]) -> ConfigError:
    """Returns one error that lists all faults, so that the user can fix all of them at once."""
    if len(faults) == 1:
        return faults[0]
    return ConfigError("\n".join([f"{len(faults)} settings are wrong:", *(f"- {fault}" for fault in faults)]))


def _check_layer(settings: Iterable[RawSetting], faults: list[ConfigError]) -> Layer:
    """Checks one source's settings and returns them by dotted key. Adds an error to `faults` for each value that is not
    allowed, and for each contradiction within the source."""
    layer: Layer = {}
    given_as: dict[str, RawSetting] = {}
    for setting in _readable(settings, faults):
        try:
            key, value = _check_setting(setting)
        except ConfigError as fault:
            faults.append(fault)
            continue
        if key in layer and layer[key][0] != value:
            faults.append(_contradiction(given_as[key], setting))
        layer[key] = (value, setting.origin)
        given_as[key] = setting
    chosen = [given_as[key] for key in ALTERNATIVES if layer.get(key, (None, ""))[0] is not None]
    if len(chosen) > 1:
        faults.append(_contradiction(chosen[0], chosen[1]))
    return layer


def _readable(settings: Iterable[RawSetting], faults: list[ConfigError]) -> Iterator[RawSetting]:
    """Yields settings until an error in their source stops the reading, and adds that error to `faults`."""
    try:
        yield from settings
    except ConfigError as fault:
        faults.append(fault)


def _check_setting(setting: RawSetting) -> tuple[str, object]:
    """Returns the dotted key of a setting, and its checked value.

    Raises:
        ConfigError: there is no such setting, or its value is not allowed.
    """
    fields = setting_fields()
    alias = ALIASES.get(setting.name)
    key = alias.key if alias else setting.name
    if key in SECTIONS:
        raise ConfigError(
            f"{key!r} from {setting.origin} is a section: expected a mapping of "
            f"{', '.join(SECTIONS[key].model_fields)}, got {shown(setting.value)}"
        )
    if key not in fields:
        raise unknown_setting(setting.name, setting.origin, [*fields, *ALIASES], setting.value)
    try:
        translated = alias.translate(setting.value) if alias else setting.value
        return key, _check_value(key, translated)
    except ValueError as error:
        empty = setting.value == "" and setting.origin.startswith(ENVIRONMENT_ORIGIN)
        way_out = "; an empty variable does not stand for the default: unset it" if empty else ""
        raise ConfigError(
            f"{setting.name!r} from {setting.origin} has the value {shown(setting.value)}: {error}{way_out}"
        ) from error


def _check_value(key: str, value: object) -> object:
    """Converts `value` to the type of the setting `key`, and checks it with the pydantic model of the key's section.

    Raises:
        ValueError: the value is not allowed; the message says what is allowed.
    """
    section, name = key.split(".")
    model = SECTIONS[section]
    try:
        return getattr(model.model_validate({name: value}), name)
    except ValidationError as error:
        field = model.model_fields[name]
        reasons = dict.fromkeys(expected(fault, name, field) for fault in error.errors())
        raise ValueError("; or ".join(reasons)) from error


def _unmet_needs(config: FlexKVConfig) -> list[ConfigError]:
    """Returns an error for each setting whose value contradicts the requirement of another setting that is on."""
    rows = {row.key: row for row in config.rows()}
    return [
        ConfigError(
            f"{other!r} from {rows[other].origin} has the value {shown(rows[other].value)}: expected {allowed!r} "
            f"with {key!r} from {rows[key].origin}"
        )
        for key, needs in NEEDED_BESIDE.items()
        if rows[key].value
        for other, allowed in needs
        if rows[other].value != allowed
    ]


def _contradiction(first: RawSetting, second: RawSetting) -> ConfigError:
    return ConfigError(
        f"{first.name!r} = {shown(first.value)} from {first.origin} and {second.name!r} = {shown(second.value)} from "
        f"{second.origin} contradict each other: give one of them"
    )
