"""The first steps of an adapter in an engine's process: reads the settings, sets up logging, and logs the start."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flexkv.config import FlexKVConfig, load_config, without_effect
from flexkv.observe import configure_logging, log_package


def read_settings(given: Mapping[str, object] | None = None) -> FlexKVConfig:
    """Reads flexkv's settings, and sets up flexkv's logging accordingly.

    Args:
        given: settings that the engine passes, which override all other sources; None if it passes none.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """
    settings = load_config(given)
    configure_logging(settings.observe.log_level, settings.given("observe.log_level"))
    return settings


def log_start(logger: logging.Logger, settings: FlexKVConfig, engine: str) -> None:
    """Logs which flexkv package runs, and warns of settings that were given but have no effect in this engine.

    Args:
        engine: see `without_effect`.
    """
    log_package(logger)
    for words in without_effect(settings, engine):
        logger.warning("%s", words)
