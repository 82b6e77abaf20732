"""The first steps of an adapter in an engine's process: settings, logging, and what the log says of both."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flexkv.config import FlexKVConfig, load_config, without_effect
from flexkv.observe import configure_logging, log_package


def read_settings(given: Mapping[str, object] | None = None) -> FlexKVConfig:
    """Reads flexkv's settings, and sets its logging up by them.

    Args:
        given: settings that the engine passes, which override all others.

    Raises:
        ConfigError: a setting is unknown or not allowed.
    """
    settings = load_config(given)
    configure_logging(settings.observe.log_level, settings.given("observe.log_level"))
    return settings


def log_start(logger: logging.Logger, settings: FlexKVConfig, engine: str) -> None:
    """Logs which flexkv runs, and the settings that were given and that the engine does not use.

    Args:
        engine: see `without_effect`.
    """
    log_package(logger)
    for words in without_effect(settings, engine):
        logger.warning("%s", words)
