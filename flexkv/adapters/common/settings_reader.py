"""Reads the settings that callers give in requests (`RequestSettings`). Only exact values are accepted, but a bad value
does not make the request fail.

No engine lets its connector check the fields while the request can still be refused, and an exception in vLLM's
scheduler ends the engine with all its requests. So an unreadable setting is logged as a warning and counted. If the
setting would restrict storing or sharing, the request is kept out of the cache, because storing cannot be undone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexkv.config.names import shown
from flexkv.facts.request_settings import NAMES, OWN_NAMES, PREFIX, UnreadableError
from flexkv.observe import Counters

WARN_EVERY_S = 60.0

IF_UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "skip_save": ({"skip_save": True}, "; the request is not stored"),
    "max_store_tokens": ({"skip_save": True}, "; the request is not stored"),
    "ttl_s": ({"skip_save": True}, "; the request is not stored"),
    "namespace": ({"skip_save": True, "skip_load": True}, "; nothing is stored or loaded for the request"),
}
"""For fields that restrict storing or sharing: the settings that replace an unreadable value, and the words that the
warning adds. An unreadable value of any other field counts as not given."""

Given = dict[str, Any]
"""Values by field of `RequestSettings`, for the fields that a request gives."""


class SettingsReader:
    """Reads the settings of requests.

    Args:
        counters: where unreadable fields are counted.
        logger: where unreadable fields are logged.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, counters: Counters, logger: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counters = counters
        self._logger = logger
        self._clock = clock
        self._warned_s: float | None = None
        self._left_out = 0

    def take(self, request_id: str, place: str, name: str, value: object, given: Given) -> None:
        """Adds a known setting to `given`. If two names set the same field, the more restrictive value applies.

        Args:
            request_id: the engine's id of the request, for the log.
            place: the part of the request that contains the name, for the log.
            name: one of NAMES.
            value: the value that the caller gave; None counts as not given.
            given: the settings of the request so far; updated.
        """
        setting = NAMES[name]
        before = given.get(setting.field, setting.default)
        if value is None:
            given[setting.field] = before
            return
        try:
            read = setting.read(value)
            given[setting.field] = read if before == setting.default else setting.join(before, read)
        except UnreadableError as error:
            instead, words = IF_UNREADABLE.get(setting.field, ({}, ""))
            given.update(instead)
            self.warn(request_id, f"{place}.{name}", value, "value", f"{error}{words}")

    def take_among(
        self,
        request_id: str,
        place: str,
        found: Mapping[Any, Any],
        given: Given,
        served: Sequence[str] = OWN_NAMES,
    ) -> None:
        """Adds to `given` the settings from a part of the request that callers use for other purposes too. Names
        without a dot are ignored, because they are not flexkv's. A name that is meant for flexkv but unknown is logged.

        Args:
            request_id: the engine's id of the request, for the log.
            place: the part of the request that contains `found`, for the log.
            found: names and values in that part of the request.
            given: the settings of the request so far; updated.
            served: flexkv's own names of the settings that take effect in this engine.
        """
        for name, value in found.items():
            if not (isinstance(name, str) and "." in name):
                continue
            if name in NAMES and PREFIX + NAMES[name].field in served:
                self.take(request_id, place, name, value, given)
            elif name in NAMES or name.startswith(PREFIX):
                self.name_unknown(request_id, place, name, value, served)

    def name_unknown(
        self,
        request_id: str,
        place: str,
        name: object,
        value: object,
        known: Sequence[str] = OWN_NAMES,
    ) -> None:
        """Logs and counts a field that is meant for flexkv but is unknown or has no effect in this engine."""
        self.warn(request_id, f"{place}.{shown(name)}", value, "name", ", ".join(known))

    def warn(self, request_id: str, place: str, value: object, what: str, allowed: str) -> None:
        """Counts a field that cannot be read, and logs it unless another field was logged in the last WARN_EVERY_S
        seconds.

        Args:
            place: the field's path in the request.
            what: the part of the field that is unknown: "name", "value" or "type".
            allowed: the allowed names or values, in words.
        """
        self._counters.add("flexkv_unread_request_fields_total", 1, reason=what)
        now_s = self._clock()
        if self._warned_s is not None and now_s - self._warned_s < WARN_EVERY_S:
            self._left_out += 1
            return
        more = f"; {self._left_out} more since the last warning" if self._left_out else ""
        self._warned_s, self._left_out = now_s, 0
        self._logger.warning(
            "request %s: %s is %s: flexkv does not know this %s; allowed: %s%s",
            request_id,
            place,
            shown(value),
            what,
            allowed,
            more,
        )
