"""Logging under the name `flexkv`. Messages about single requests have level DEBUG, except those about failures
(`failed_ops`)."""

from __future__ import annotations

import logging
import sys

from flexkv.observe.package import name_this_package

ROOT = "flexkv"
FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"

_warned: set[str] = set()
_own_level = [logging.NOTSET]
"""A list with one item: the level that `configure_logging` set last."""


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module of flexkv, whose `__name__` is `name`."""
    return logging.getLogger(name)


def configure_logging(level: str, given: bool = False) -> None:
    """Sets the lowest level to log, unless the program's own logging configuration (such as vLLM's
    VLLM_LOGGING_CONFIG_PATH) has set one. If no handler would get flexkv's messages, adds one that prints to stderr.

    The handler is needed because an engine usually configures its own loggers but not the root logger. Without a
    handler, Python would print flexkv's messages only from WARNING up, and without a format.

    Args:
        level: "debug", "info", "warning" or "error".
        given: whether the user asked for this level. It then overrides the level of the program's configuration.
    """
    logger = logging.getLogger(ROOT)
    if given or logger.level in (logging.NOTSET, _own_level[0]):
        logger.setLevel(level.upper())
        _own_level[0] = logger.level
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
        logger.propagate = False


def log_package(logger: logging.Logger) -> None:
    """Logs the version and folder of this package, and warns of other packages named flexkv. Does nothing if called
    again in the same process."""
    if "package" not in _warned:
        _warned.add("package")
        for is_warning, words in name_this_package():
            logger.log(logging.WARNING if is_warning else logging.INFO, "%s", words)


def warn_once(logger: logging.Logger, key: str, message: str, *args: object) -> None:
    """Logs a warning the first time `key` comes up in this process.

    Args:
        key: identifies the warning. Keys are kept forever, so they must be a bounded set: fixed texts, or one key for
            each unknown environment variable. No key may contain anything from a request.
    """
    if key not in _warned:
        _warned.add(key)
        logger.warning(message, *args)
