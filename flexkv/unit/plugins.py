"""Starts and ends the plugins of a unit and of its ranks."""

from __future__ import annotations

from flexkv.config import FlexKVConfig
from flexkv.facts.ranks import UnitId
from flexkv.observe import get_logger, warn_once
from flexkv.plugins.base import Place, Role
from flexkv.plugins.launcher import PluginLauncher
from flexkv.plugins.programs import FoundPrograms, find_programs
from flexkv.plugins.server import UnitServer
from flexkv.plugins.unit_socket import socket_name
from flexkv.unit.plugin_calls import HasStatus, PluginCalls, PromptKeys

logger = get_logger(__name__)


def start_rank_plugins(config: FlexKVConfig, rank: int, unit: UnitId) -> PluginLauncher | None:
    """Starts the plugins that run beside one rank of `unit`, and returns their launcher; None if there are none."""
    if config.plugins.folder is None:
        return None
    found = find_programs(config.plugins.folder)
    _name_refused(found)
    return _launch(config.plugins.folder, found, Role.WORKER, rank, unit)


def _name_refused(found: FoundPrograms) -> None:
    """Logs which plugins are refused and why, once per process."""
    for name, reason in found.refused:
        warn_once(logger, f"plugin {name}", "plugins.folder: %s is not run: %s", name, reason)


def _launch(
    folder: str, found: FoundPrograms, role: Role, rank: int | None, unit: UnitId
) -> PluginLauncher | None:
    programs = found.at(role, rank)
    return PluginLauncher(Place(role, rank, socket_name(unit)), programs, folder) if programs else None


class UnitPlugins:
    """The plugins that run beside a unit, the socket on which the plugins call the unit, and the plugins' calls.

    Attributes:
        calls: the plugins' calls, which wait for the unit's thread.
    """

    def __init__(self, folder: str, found: FoundPrograms, unit_id: UnitId, calls: PluginCalls) -> None:
        self.calls = calls
        self._server: UnitServer | None = None
        try:
            self._server = UnitServer(socket_name(unit_id), calls)
        except OSError as error:
            logger.error("plugins run without the unit's socket: %s", error)
        self._launcher = _launch(folder, found, Role.SCHEDULER, None, unit_id)

    @classmethod
    def start(
        cls, config: FlexKVConfig, unit_id: UnitId, unit: HasStatus, prompt_keys: PromptKeys | None
    ) -> UnitPlugins | None:
        """Starts a unit's plugins and its socket, which the plugins beside its ranks use as well. Returns None if
        `plugins.folder` is not set or contains no plugin that may run. Logs which plugins are refused.
        """
        folder = config.plugins.folder
        if folder is None:
            return None
        found = find_programs(folder)
        _name_refused(found)
        if not found.places:
            logger.warning("plugins.folder: %s has no plugins that may run", folder)
            return None
        return cls(folder, found, unit_id, PluginCalls(unit, prompt_keys))

    def begin_close(self) -> None:
        """Asks the plugins to end, without waiting for them: an engine that shuts down may have only seconds left to
        write pages."""
        if self._launcher is not None:
            self._launcher.begin_close()

    def close(self) -> None:
        """Ends the plugins, then closes the socket. Waits for the plugins and for the socket's thread, each with its
        own deadline.
        """
        if self._launcher is not None:
            self._launcher.close()
        if self._server is not None and not self._server.close():
            logger.error("the thread of the unit's socket did not end")
        self.calls.close()
