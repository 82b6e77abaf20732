"""Several listeners of one cache manager."""

from __future__ import annotations

from flexkv.cache.base import CacheListener, Keys


class Listeners(CacheListener):
    """Tells each of its listeners, in the order in which they came."""

    def __init__(self, *first: CacheListener) -> None:
        self._listeners = list(first)

    def add(self, listener: CacheListener) -> None:
        self._listeners.append(listener)

    def on_publish(self, group: int, keys: Keys) -> None:
        for listener in self._listeners:
            listener.on_publish(group, keys)

    def on_evict(self, group: int, keys: Keys) -> None:
        for listener in self._listeners:
            listener.on_evict(group, keys)

    def on_reset(self, epoch: int) -> None:
        for listener in self._listeners:
            listener.on_reset(epoch)
