"""Broken managers, each of which breaks the rule that no page is a hit after its time to live. The simulation must
catch every one.
"""

from __future__ import annotations

from typing import Any

from flexkv.cache.manager import LocalCacheManager
from flexkv.transfer.graph import NEVER
from tests.unit.cache.disk_world import disk_tier


class LooksUpWhatHasExpired(LocalCacheManager):
    """A broken manager whose lookup does not drop expired pages, so that they stay hits until the next periodic
    check.
    """

    def match(self, *args: Any, **kwargs: Any) -> Any:
        self._drop_expired = lambda: None  # type: ignore[method-assign]
        try:
            return super().match(*args, **kwargs)
        finally:
            del self._drop_expired


class CallsExpiredPagesKnown(LocalCacheManager):
    """A broken manager that does not store a page again if it still has an expired copy of the page."""

    def begin_store(self, *args: Any, **kwargs: Any) -> Any:
        self._drop_expired = lambda: None  # type: ignore[method-assign]
        try:
            return super().begin_store(*args, **kwargs)
        finally:
            del self._drop_expired


class IgnoresTimes(LocalCacheManager):
    def begin_store(self, *args: Any, ttl_s: int | None = None, **kwargs: Any) -> Any:
        return super().begin_store(*args, **kwargs)


class PrefersTheLastTime(LocalCacheManager):
    """A broken manager that restarts the time to live of a cached page when the page is stored again."""

    def begin_store(
        self, request_id: str, group: int, keys: Any, *args: Any, ttl_s: int | None = None, **kwargs: Any
    ) -> Any:
        kwargs["ttl_s"] = ttl_s
        plan = super().begin_store(request_id, group, keys, *args, **kwargs)
        if ttl_s is not None:
            there, slots = self.hub._slots_of(group, keys)
            self.hub.times.set(group, slots, keys[there], self.tables.now_s + ttl_s)
        return plan


class WritesPagesWithoutTheirTime(LocalCacheManager):
    """A broken manager that writes pages to disk without their expiry, as if they never expired."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk, begin_write = disk_tier(self), disk_tier(self).begin_write
        disk.begin_write = (  # type: ignore[method-assign]
            lambda group, keys, tokens, room, expiries=None: begin_write(group, keys, tokens, room)
        )


class FetchesPagesWithoutTheirTime(LocalCacheManager):
    """A broken manager that reads pages from disk to host memory without their expiry, as if they never expired."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        disk_tier(self).expiries_of = lambda plan: None  # type: ignore[method-assign]


class PromisesExpiredPagesOnDisk(LocalCacheManager):
    """A broken manager that promises pages on disk after their time to live."""

    def match(self, *args: Any, **kwargs: Any) -> Any:
        if self.tables.hub.times.any:
            self._drop_expired()
        unix_s = self.tables.unix_s
        self.tables.unix_s = lambda: NEVER
        try:
            return super().match(*args, **kwargs)
        finally:
            self.tables.unix_s = unix_s


BROKEN_TIMES: list[type[LocalCacheManager]] = [
    LooksUpWhatHasExpired,
    CallsExpiredPagesKnown,
    IgnoresTimes,
    PrefersTheLastTime,
]
BROKEN_TIMES_ON_DISK: list[type[LocalCacheManager]] = [
    *BROKEN_TIMES,
    WritesPagesWithoutTheirTime,
    FetchesPagesWithoutTheirTime,
    PromisesExpiredPagesOnDisk,
]
